package server

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// Key is a bearer key and whose it is.
type Key struct {
	Token  string // at least 16 bytes of printable ASCII
	Tenant string
	UserID string // optional, for middleware
}

// Principal is who calls.
type Principal struct{ Tenant, UserID string }

// hashedKey is a key as it is kept: all hashes have one length, so that comparing
// them tells nothing of a key, not even how long it is.
type hashedKey struct {
	hash [sha256.Size]byte
	who  Principal
}

func hashKeys(keys []Key) ([]hashedKey, error) {
	var out []hashedKey
	for i, k := range keys {
		if len(k.Token) < 16 || strings.ContainsFunc(k.Token, func(c rune) bool { return c <= ' ' || c > '~' }) {
			return nil, fmt.Errorf("server: Config.Keys[%d]: Token must be at least 16 printable ASCII characters", i)
		}
		h := hashedKey{sha256.Sum256([]byte(k.Token)), Principal{k.Tenant, k.UserID}}
		if slices.ContainsFunc(out, func(o hashedKey) bool { return o.hash == h.hash }) {
			return nil, fmt.Errorf("server: Config.Keys[%d]: the token is there twice", i)
		}
		out = append(out, h)
	}
	return out, nil
}

func (s *Server) authless() bool { return len(s.keys) == 0 && s.cfg.Authenticate == nil }

// RequireAuthFor returns an error if the server must not listen on addr, which is
// host:port as for [net.Listen]: beyond loopback it needs keys.
func (s *Server) RequireAuthFor(addr string) error {
	if !s.authless() {
		return nil
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("server: address %q: %w", addr, err)
	}
	if loopbackHost(host) {
		return nil
	}
	return fmt.Errorf("server: refusing to listen on %q without authentication: configure a bearer key, or listen on 127.0.0.1", addr)
}

// authenticate says who calls.
func (s *Server) authenticate(r *http.Request) (Principal, error) {
	switch {
	case s.cfg.Authenticate != nil:
		p, err := s.cfg.Authenticate(r)
		if err != nil {
			return Principal{}, fmt.Errorf("%w: %w", errUnauthorized, err)
		}
		return p, nil
	case len(s.keys) == 0:
		// Whoever embeds the handler may have forgotten to ask RequireAuthFor.
		if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
			if ap, err := netip.ParseAddrPort(a.String()); err == nil && !ap.Addr().Unmap().IsLoopback() {
				return Principal{}, errNoKeys
			}
		}
		return Principal{}, nil
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	hash := sha256.Sum256([]byte(strings.TrimSpace(token)))
	var who Principal
	found := 0
	for _, k := range s.keys { // to the end, whichever it is
		if subtle.ConstantTimeCompare(k.hash[:], hash[:]) == 1 {
			found, who = 1, k.who
		}
	}
	if found == 0 || !strings.EqualFold(scheme, "Bearer") {
		return Principal{}, errUnauthorized
	}
	return who, nil
}

// checkHost refuses names that are not ours: a page of a foreign name that was
// pointed at this address must not talk to us. An IP address can't be pointed.
func (s *Server) checkHost(hostport string) error {
	host := hostname(hostport)
	if loopbackHost(host) || slices.ContainsFunc(s.cfg.Hosts, func(h string) bool { return strings.EqualFold(h, host) }) {
		return nil
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return nil
	}
	return errHost
}

func hostname(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ".")
}

func loopbackHost(host string) bool {
	host = strings.ToLower(host)
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

func checkOrigins(origins []string) error {
	for i, o := range origins {
		u, err := url.Parse(o)
		if err != nil || u.Scheme == "" || u.Host == "" || u.Scheme+"://"+u.Host != o {
			return fmt.Errorf("server: Config.Origins[%d]: %q is no origin: write scheme://host[:port], without a path or wildcards", i, o)
		}
	}
	return nil
}

// cors answers for the Origin of a browser. Foreign says that the page is not the
// server's own.
func (s *Server) cors(h http.Header, r *http.Request) (foreign bool, err error) {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return false, nil
	}
	h.Add("Vary", "Origin")
	if u, err := url.Parse(origin); err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host) {
		return false, nil
	}
	if !slices.ContainsFunc(s.cfg.Origins, func(o string) bool { return strings.EqualFold(o, origin) }) {
		return true, errOrigin
	}
	h.Set("Access-Control-Allow-Origin", origin)
	h.Set("Access-Control-Expose-Headers", "X-Run-Id, X-Run-Resumed, X-Request-Id, Retry-After")
	return true, nil
}

const (
	corsHeaders = "Accept, Authorization, Content-Type, Last-Event-ID, X-Request-Id, X-Run-Id"
	corsMaxAge  = "600"
)

// call is what a handler gets of a request that passed the checks.
type call struct {
	*http.Request
	who Principal
	log *slog.Logger
}

// access are the checks that every request passes, in this order: size, name,
// origin, method, media type, key.
func (s *Server) access(w http.ResponseWriter, r *http.Request, rt *route) (*call, error) {
	size := 0
	for k, vs := range r.Header {
		for _, v := range vs {
			size += len(k) + len(v) + 4
		}
	}
	if size > s.cfg.Limits.Header || len(r.URL.RawQuery) > s.cfg.Limits.Header {
		return nil, errHeaders
	}
	if rt.probe {
		return &call{Request: r}, nil
	}
	if err := s.checkHost(r.Host); err != nil {
		return nil, err
	}
	if _, err := s.cors(w.Header(), r); err != nil {
		return nil, err
	}
	// A page could send a form without asking first; a program such as curl, which
	// has no origin, may name its JSON as it likes (spec 07 §11.1).
	if r.Method == http.MethodPost && r.Header.Get("Origin") != "" {
		if ct := r.Header.Get("Content-Type"); ct != "" {
			if m, _, _ := mime.ParseMediaType(ct); m != "application/json" {
				return nil, errMedia
			}
		}
	}
	who, err := s.authenticate(r)
	if err != nil {
		return nil, err
	}
	return &call{Request: r, who: who}, nil
}

// requestID is the caller's own, if it is harmless, or a new one.
func requestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if id == "" || len(id) > 128 || strings.ContainsFunc(id, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return rand.Text()
	}
	return id
}

// serve runs a route's handler with everything around it.
func (s *Server) serve(rt *route, w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	rec := &recorder{ResponseWriter: w}
	id := requestID(r)
	log := s.log.With("request", id, "method", r.Method, "route", rt.pattern)
	rec.Header().Set("X-Request-Id", id)
	rec.Header().Set("X-Content-Type-Options", "nosniff")
	aborted := true
	defer func() {
		v := recover()
		if err, ok := v.(error); v != nil && !(ok && errors.Is(err, http.ErrAbortHandler)) {
			log.Error("panic", "value", fmt.Sprint(v), "stack", string(debug.Stack()))
			if rec.status == 0 {
				s.fail(rec, r, log, errInternal)
				aborted = false
			}
		}
		s.metrics.request(rt.pattern, rec.status)
		log.Info("request", "status", rec.status, "duration", time.Since(began), "aborted", aborted)
		if aborted {
			panic(http.ErrAbortHandler) // the client must not take it for the end
		}
	}()
	c, err := s.access(rec, r, rt)
	if err == nil {
		c.log = log
		err = rt.handle(s, rec, c)
	}
	switch {
	case err == nil:
	case errors.Is(err, http.ErrAbortHandler):
		return
	case rec.status != 0:
		log.Warn("response", "error", err)
	default:
		s.fail(rec, r, log, err)
	}
	aborted = false
}

// recorder remembers the status. Unwrap leads ResponseController to the rest.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 && status >= 200 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return r.ResponseWriter.Write(b)
}

// aside is a context for what must not end with the request.
func aside(r *http.Request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), opTime)
}
