package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/aisandbox-go/aisandbox/event"
)

// The environment of the commands that talk to a server.
const (
	envServer = "AISANDBOX_SERVER"
	envKey    = "AISANDBOX_KEY"
)

// serverFlag adds --server.
func serverFlag(f *pflag.FlagSet, to *string) {
	f.StringVar(to, "server", "", "URL of the server (default "+envServer+", else http://"+defaultAddr+"); a key for it comes from "+envKey)
}

// client talks to a server.
type client struct {
	base *url.URL
	key  string
	http *http.Client

	// A stream that is silent for idle is dead: a server says something every 15 s.
	// A broken one is taken up after a while that doubles from first to most, for
	// patience altogether without an event.
	idle, first, most, patience time.Duration

	retrying func(err error) // told when a stream broke
}

// answerTime bounds the answer to a request that isn't a stream, and the start of
// one that is.
const answerTime = 30 * time.Second

func (a *app) client(server string) (*client, error) {
	field := "--server"
	if server == "" {
		if server = a.getenv(envServer); server != "" {
			field = envServer
		}
	}
	if server == "" {
		server = "http://" + defaultAddr
	}
	u, err := url.Parse(strings.TrimRight(server, "/"))
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		// It may hold a password, so it isn't shown.
		return nil, &exitError{exitUsage, fmt.Errorf("%s is no URL of a server: write http://HOST:PORT, and put a key into %s", field, envKey)}
	}
	c := &client{
		base: u, key: a.getenv(envKey),
		http: &http.Client{Transport: transport(), CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
		idle: 45 * time.Second, first: 100 * time.Millisecond, most: 5 * time.Second, patience: 5 * time.Minute,
	}
	if c.key != "" && u.Scheme == "http" && !loopback(u.Hostname()) {
		fmt.Fprintf(a.err, "aisandbox: warning: the key in %s goes to %s unencrypted: use https where others can listen\n", envKey, u.Host)
	}
	return c, nil
}

func transport() *http.Transport {
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, ResponseHeaderTimeout: answerTime, TLSHandshakeTimeout: 10 * time.Second, ForceAttemptHTTP2: true}
	return t
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// answerError is an answer other than 2xx.
type answerError struct {
	Status  int
	Code    string // stable; empty where there was none
	Message string
	Cure    string
}

func (e *answerError) Error() string {
	s := fmt.Sprintf("the server says: %s (%d", e.Message, e.Status)
	if e.Code != "" {
		s += " " + e.Code
	}
	s += ")"
	if e.Cure != "" {
		s += ": " + e.Cure
	}
	return s
}

// lasting says that asking again can't help.
func (e *answerError) lasting() bool {
	return e.Status < 500 && e.Status != http.StatusTooManyRequests && e.Status != http.StatusRequestTimeout
}

// do sends a request. The caller closes the body of the answer, which is a 2xx.
func (c *client) do(ctx context.Context, method, path string, query url.Values, body string, header http.Header) (*http.Response, error) {
	u := c.base.JoinPath(path)
	u.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, &exitError{exitUnavailable, fmt.Errorf("%w: is a server running there? See aisandbox serve --help, and --server", err)}
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return nil, refusal(resp)
}

// refusal reads an answer that isn't a 2xx.
func refusal(resp *http.Response) error {
	e := &answerError{Status: resp.StatusCode, Message: resp.Status}
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var body struct {
		Error struct{ Code, Message string }
	}
	if err == nil && json.Unmarshal(b, &body) == nil && body.Error.Message != "" {
		e.Code, e.Message = body.Error.Code, body.Error.Message
	}
	switch {
	case e.Status == http.StatusUnauthorized:
		e.Cure = "put a key of the server into " + envKey
	case e.Code == "unknown_run":
		e.Cure = "aisandbox runs lists those there are"
	}
	if e.lasting() {
		return &exitError{exitUsage, e}
	}
	return &exitError{exitUnavailable, e}
}

// maxAnswer bounds an answer that isn't a stream.
const maxAnswer = 64 << 20

// get reads a JSON answer.
func (c *client) get(ctx context.Context, path string, query url.Values, into any) error {
	ctx, stop := context.WithTimeoutCause(ctx, answerTime, errTimeout)
	defer stop()
	resp, err := c.do(ctx, http.MethodGet, path, query, "", nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(into); err != nil {
		return &exitError{exitUnavailable, fmt.Errorf("%s: the answer is not that of an aisandbox server: %w", c.base, err)}
	}
	return nil
}

// record is a run as the server tells it.
type record struct {
	RunID           string `json:"runId"`
	ThreadID        string `json:"threadId"`
	Sandbox         string `json:"sandbox"`
	Status          string `json:"status"`
	StartedAt       int64  `json:"startedAt"`
	FinishedAt      int64  `json:"finishedAt"`
	CancelRequested bool   `json:"cancelRequested"`
	Events          int64  `json:"events"`
}

// run returns the record of a run.
func (c *client) run(ctx context.Context, id string) (record, error) {
	var r record
	if id == "" {
		return r, &usageError{"RUN", id, "name a run; aisandbox runs lists them"}
	}
	if err := c.get(ctx, "/v1/runs/"+url.PathEscape(id), nil, &r); err != nil {
		return r, err
	}
	if r.Sandbox == "" {
		return r, &usageError{"RUN", id, "belongs to no sandbox of the server, so it can't be reached there"}
	}
	return r, nil
}

// entry is an event with what it takes to read on behind it.
type entry struct {
	id string
	ev event.Event
}

// Why a stream ends early.
var (
	errIdle = errors.New("nothing came, not even a sign of life")
	errCut  = errors.New("the stream ended before the run")

	// errEvent comes again however often one asks.
	errEvent = errors.New("an event of the server can't be read")
)

// events follows a run from behind an offset, "-1" being the start, until it has
// ended, over as many connections as that takes.
func (c *client) events(ctx context.Context, r record, from string) iter.Seq2[entry, error] {
	return func(yield func(entry, error) bool) {
		at, wait, since := from, c.first, time.Now()
		terminal := false
		for {
			before := at
			err := c.stream(ctx, r, &at, func(e entry) bool {
				switch e.ev.(type) {
				case event.RunFinished, event.RunError:
					terminal = true
				}
				return yield(e, nil)
			})
			var answer *answerError
			switch {
			case err == nil && terminal, errors.Is(err, errLeft):
				return
			case err == nil && at == before && !terminal:
				// It may have begun behind the end of a run that is over.
				if now, rerr := c.run(ctx, r.RunID); rerr == nil && now.FinishedAt > 0 {
					return
				}
			case ctx.Err() != nil:
				yield(entry{}, context.Cause(ctx))
				return
			case errors.As(err, &answer) && answer.lasting(), errors.Is(err, event.ErrFrameTooLong), errors.Is(err, errEvent):
				yield(entry{}, err)
				return
			}
			if err == nil {
				err = errCut
			}
			if at != before {
				wait, since = c.first, time.Now()
			}
			if time.Since(since) > c.patience {
				yield(entry{}, &exitError{exitUnavailable, fmt.Errorf("lost the run for %s: %w", fmtDuration(c.patience), err)})
				return
			}
			if c.retrying != nil {
				c.retrying(err)
			}
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
			}
			wait = min(2*wait, c.most)
		}
	}
}

// errLeft: the caller wants no more.
var errLeft = errors.New("left")

// stream reads one connection, and moves at with each event.
func (c *client) stream(ctx context.Context, r record, at *string, take func(entry) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(c.idle, func() { cancel(errIdle) })
	defer watchdog.Stop()
	header := http.Header{"Accept": {"text/event-stream"}, "X-Run-Id": {r.RunID}, "Last-Event-Id": {*at}}
	resp, err := c.do(ctx, http.MethodGet, "/v1/chat/"+url.PathEscape(r.Sandbox), nil, "", header)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	for f, err := range event.ReadSSE(alive{resp.Body, watchdog, c.idle}) {
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			return err
		}
		ev, err := event.Decode(f.Data)
		if err != nil {
			return fmt.Errorf("%w: %w", errEvent, err)
		}
		if f.ID != "" {
			*at = f.ID
		}
		if !take(entry{f.ID, ev}) {
			return errLeft
		}
	}
	return nil
}

// alive puts a watchdog off with each byte that comes.
type alive struct {
	r    io.Reader
	dog  *time.Timer
	idle time.Duration
}

func (a alive) Read(p []byte) (int, error) {
	n, err := a.r.Read(p)
	if n > 0 {
		a.dog.Reset(a.idle)
	}
	return n, err
}
