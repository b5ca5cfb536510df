package player

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"strconv"
	"strings"
	"time"
)

const (
	maxHead  = 64 << 10
	maxEvent = maxReply
)

// target is an http URL, taken apart.
type target struct {
	addr string // host:port to dial
	host string // as the Host header says it
	path string
}

func parseTarget(url string) (target, error) {
	rest, ok := strings.CutPrefix(url, "http://")
	if !ok {
		return target{}, fmt.Errorf("%q is no http URL", url)
	}
	host, path := rest, "/"
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		host, path = rest[:i], rest[i:]
	}
	path, _, _ = strings.Cut(path, "#")
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	for _, c := range []byte(rest) {
		if c <= ' ' || c >= 0x7f {
			return target{}, fmt.Errorf("%q holds a character that no URL has", url)
		}
	}
	if host == "" || strings.Contains(host, "@") {
		return target{}, fmt.Errorf("%q has no plain host", url)
	}
	addr := host
	if _, _, err := net.SplitHostPort(host); err != nil {
		addr = net.JoinHostPort(strings.Trim(host, "[]"), "80")
	}
	return target{addr, host, path}, nil
}

// response is an answer whose body has not been read. Close it.
type response struct {
	status int
	header map[string]string // by lower-case name, the last one wins
	body   *bufio.Reader
	conn   net.Conn
	stop   func() bool
}

func (r *response) Close() error {
	r.stop()
	return r.conn.Close()
}

// post sends one request on a connection of its own. An end of ctx breaks it.
func post(ctx context.Context, t target, headers [][2]string, body []byte) (*response, error) {
	conn, err := (&net.Dialer{Timeout: connectLimit}).DialContext(ctx, "tcp", t.addr)
	if err != nil {
		return nil, err
	}
	// A deadline in the past breaks reads and writes, and Close stays ours.
	r := &response{conn: conn, header: make(map[string]string)}
	r.stop = context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	if err := r.exchange(t, headers, body); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

func (r *response) exchange(t target, headers [][2]string, body []byte) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: %d\r\n", t.path, t.host, len(body))
	for _, h := range headers {
		fmt.Fprintf(&b, "%s: %s\r\n", h[0], h[1])
	}
	b.WriteString("\r\n")
	b.Write(body)
	if _, err := r.conn.Write(b.Bytes()); err != nil {
		return err
	}
	head := bufio.NewReaderSize(r.conn, maxHead)
	for {
		if err := r.readHead(head); err != nil {
			return err
		}
		if r.status/100 != 1 { // 100 Continue and its like come before the answer
			break
		}
	}
	var src io.Reader = head
	if strings.EqualFold(r.header["transfer-encoding"], "chunked") {
		src = &chunked{r: head}
	} else if v, ok := r.header["content-length"]; ok {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("bad content length %q", cut(v, 40))
		}
		src = &exactly{head, n}
	}
	r.body = bufio.NewReaderSize(src, 32<<10)
	return nil
}

func (r *response) readHead(b *bufio.Reader) error {
	line, err := headLine(b)
	if err != nil {
		return err
	}
	proto, rest, _ := strings.Cut(line, " ")
	code, _, _ := strings.Cut(rest, " ")
	r.status, err = strconv.Atoi(code)
	if err != nil || !strings.HasPrefix(proto, "HTTP/1.") || len(code) != 3 {
		return fmt.Errorf("no HTTP answer: %q", cut(line, 80))
	}
	clear(r.header)
	for left := maxHead; ; {
		line, err := headLine(b)
		if err != nil {
			return err
		}
		if line == "" {
			return nil
		}
		if left -= len(line); left < 0 {
			return errors.New("the head of the answer is too long")
		}
		k, v, _ := strings.Cut(line, ":")
		r.header[strings.ToLower(k)] = strings.TrimSpace(v)
	}
}

func headLine(b *bufio.Reader) (string, error) {
	line, err := b.ReadSlice('\n')
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return strings.TrimRight(string(line), "\r\n"), err
}

// all reads the whole body.
func (r *response) all() ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r.body, maxReply+1))
	if err == nil && len(b) > maxReply {
		err = fmt.Errorf("the answer is longer than %d bytes", maxReply)
	}
	return b, err
}

// events reads the body as server-sent events and yields the data of each.
func (r *response) events() iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		var data []byte
		size := 0
		var line []byte
		for {
			part, err := r.body.ReadSlice('\n')
			line = append(line, part...)
			if size += len(part); size > maxEvent {
				yield(nil, fmt.Errorf("an event is longer than %d bytes", maxEvent))
				return
			}
			if err == bufio.ErrBufferFull {
				continue
			}
			if err != nil && err != io.EOF {
				yield(nil, err)
				return
			}
			text := bytes.TrimRight(line, "\r\n")
			if v, ok := bytes.CutPrefix(text, []byte("data:")); ok {
				if data != nil {
					data = append(data, '\n')
				}
				data = append(data, bytes.TrimPrefix(v, []byte(" "))...)
			}
			if (len(text) == 0 || err == io.EOF) && data != nil {
				if !yield(data, nil) {
					return
				}
				data, size = nil, 0
			}
			if err == io.EOF {
				return
			}
			line = line[:0]
		}
	}
}

// exactly reads n bytes; an earlier end is an error.
type exactly struct {
	r io.Reader
	n int64
}

func (e *exactly) Read(p []byte) (int, error) {
	if e.n == 0 {
		return 0, io.EOF
	}
	n, err := e.r.Read(p[:min(int64(len(p)), e.n)])
	e.n -= int64(n)
	if err == io.EOF && e.n > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// chunked decodes the chunked transfer encoding; trailers stay unread.
type chunked struct {
	r    *bufio.Reader
	left int64 // of the current chunk
	in   bool  // a chunk was begun: its line end is still to come
	done bool
}

func (c *chunked) Read(p []byte) (int, error) {
	if c.done {
		return 0, io.EOF
	}
	if c.left == 0 {
		if c.in {
			if _, err := headLine(c.r); err != nil {
				return 0, err
			}
		}
		line, err := headLine(c.r)
		if err != nil {
			return 0, err
		}
		size, _, _ := strings.Cut(line, ";")
		n, err := strconv.ParseUint(strings.TrimSpace(size), 16, 31)
		if err != nil {
			return 0, fmt.Errorf("bad chunk size %q", cut(line, 40))
		}
		if n == 0 {
			c.done = true
			return 0, io.EOF
		}
		c.left, c.in = int64(n), true
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
