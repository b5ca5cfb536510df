package server_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/server"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func TestKeys(t *testing.T) {
	h := newHouse(t, says(finished), func(c *server.Config) {
		c.Keys = []server.Key{{Token: "correct-horse-battery", Tenant: "a"}, {Token: "another-key-altogether", Tenant: "b"}}
	})
	for _, tt := range []struct {
		auth string
		ok   bool
	}{
		{"Bearer correct-horse-battery", true},
		{"bearer another-key-altogether", true},
		{"", false},
		{"Bearer", false},
		{"Bearer ", false},
		{"Bearer correct-horse-batter", false},
		{"Bearer correct-horse-battery2", false},
		{"Basic correct-horse-battery", false},
		{"correct-horse-battery", false},
	} {
		for _, path := range []string{"/v1/runs", "/v1/threads", "/v1/instances", "/metrics", chatPath + "?threadId=t"} {
			w := h.do(t, "GET", path, "", header("Authorization", tt.auth))
			if tt.ok != (w.Code == 200) {
				t.Errorf("%q %s: %d", tt.auth, path, w.Code)
			}
			if !tt.ok {
				wantStatus(t, w, 401, "unauthorized")
				if w.Header().Get("WWW-Authenticate") == "" {
					t.Error("no WWW-Authenticate")
				}
			}
		}
		if w := h.do(t, "GET", "/healthz", "", header("Authorization", tt.auth)); w.Code != 200 {
			t.Errorf("healthz %d", w.Code)
		}
	}
	if w := h.post(t, body("t", "r", "hi"), header("Authorization", "Bearer correct-horse-battery")); w.Code != 200 {
		t.Errorf("%d", w.Code)
	}
	if rec := h.record(t, "r"); rec.Thread.Tenant != "a" {
		t.Errorf("%+v", rec)
	}
	wantStatus(t, h.post(t, body("t", "r", "hi")), 401, "unauthorized")
}

func TestAuthenticateHook(t *testing.T) {
	h := newHouse(t, says(finished), func(c *server.Config) {
		c.Authenticate = func(r *http.Request) (server.Principal, error) {
			if u := r.Header.Get("X-User"); u != "" {
				return server.Principal{Tenant: "t-" + u, UserID: u}, nil
			}
			return server.Principal{}, errors.New("no cookie 42")
		}
	})
	w := h.do(t, "GET", "/v1/runs", "")
	wantStatus(t, w, 401, "unauthorized")
	if strings.Contains(w.Body.String(), "42") {
		t.Errorf("%s", w.Body)
	}
	if w := h.post(t, body("t", "r", "hi"), header("X-User", "ann")); w.Code != 200 {
		t.Errorf("%d", w.Code)
	}
	if rec := h.record(t, "r"); rec.Thread.Tenant != "t-ann" {
		t.Errorf("%+v", rec)
	}
}

func TestWithoutKeysLoopbackOnly(t *testing.T) {
	open := newHouse(t, says(finished), nil)
	keyed := newHouse(t, says(finished), func(c *server.Config) { c.Keys = []server.Key{{Token: "correct-horse-battery"}} })
	for addr, ok := range map[string]bool{
		"127.0.0.1:8080": true, "localhost:80": true, "[::1]:80": true, "127.8.8.8:1": true,
		":8080": false, "0.0.0.0:8080": false, "[::]:80": false, "10.0.0.1:80": false, "example.com:80": false, "nonsense": false,
	} {
		if err := open.RequireAuthFor(addr); (err == nil) != ok {
			t.Errorf("%s: %v", addr, err)
		}
		if err := keyed.RequireAuthFor(addr); err != nil {
			t.Errorf("%s with keys: %v", addr, err)
		}
	}
	// Also where nobody asked: by the address that the connection came in on.
	on := func(ip string) reqOption {
		return func(r *http.Request) {
			ctx := context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(&net.TCPAddr{IP: net.ParseIP(ip), Port: 80}))
			*r = *r.WithContext(ctx)
		}
	}
	wantStatus(t, open.do(t, "GET", "/v1/runs", "", on("10.0.0.1")), 403, "loopback_only")
	if w := open.do(t, "GET", "/v1/runs", "", on("127.0.0.1")); w.Code != 200 {
		t.Errorf("%d", w.Code)
	}
	if w := keyed.do(t, "GET", "/v1/runs", "", on("10.0.0.1"), header("Authorization", "Bearer correct-horse-battery")); w.Code != 200 {
		t.Errorf("%d", w.Code)
	}
}

func TestHostHeader(t *testing.T) {
	h := newHouse(t, says(finished), func(c *server.Config) { c.Hosts = []string{"agents.example.com"} })
	for host, ok := range map[string]bool{
		"localhost": true, "localhost:8080": true, "LOCALHOST:1": true, "app.localhost": true, "127.0.0.1:80": true, "[::1]:80": true, "[::1]": true,
		"10.1.2.3:80": true, "agents.example.com": true, "Agents.Example.com:443": true, "agents.example.com.": true,
		"evil.com": false, "localhost.evil.com": false, "agents.example.com.evil.com": false, "127.0.0.1.nip.io": false, "": false, "evillocalhost": false,
	} {
		w := h.do(t, "GET", "/v1/runs", "", header("Host", host))
		if ok && w.Code != 200 {
			t.Errorf("%q: %d", host, w.Code)
		}
		if !ok {
			wantStatus(t, w, 403, "host_not_allowed")
			wantStatus(t, h.post(t, body("t", "r", "hi"), header("Host", host)), 403, "host_not_allowed")
			wantStatus(t, h.do(t, "OPTIONS", chatPath, "", header("Host", host)), 403, "host_not_allowed")
		}
		if w := h.do(t, "GET", "/healthz", "", header("Host", host)); w.Code != 200 {
			t.Errorf("healthz for %q: %d", host, w.Code)
		}
	}
}

func TestOrigins(t *testing.T) {
	const app = "https://app.example.com"
	h := newHouse(t, says(finished), func(c *server.Config) { c.Origins = []string{app} })
	for origin, ok := range map[string]bool{
		app: true, "http://localhost:8080": true, // the server's own
		"http://app.example.com": false, "https://app.example.com:444": false, "https://evil.com": false, "null": false,
		"http://localhost:3000": false, "https://app.example.com.evil.com": false,
	} {
		w := h.post(t, body("t", "r", "hi"), header("Origin", origin))
		if !ok {
			wantStatus(t, w, 403, "origin_not_allowed")
			wantStatus(t, h.do(t, "OPTIONS", chatPath, "", header("Origin", origin)), 403, "origin_not_allowed")
			if w.Header().Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s: %v", origin, w.Header())
			}
			continue
		}
		if w.Code != 200 {
			t.Errorf("%s: %d %s", origin, w.Code, w.Body)
		}
		if got := w.Header().Get("Access-Control-Allow-Origin"); (got == app) != (origin == app) || !strings.Contains(strings.Join(w.Header()["Vary"], ","), "Origin") {
			t.Errorf("%s: %v", origin, w.Header())
		}
	}
	w := h.do(t, "OPTIONS", chatPath, "", header("Origin", app, "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "x-run-id"))
	hd := w.Header()
	if w.Code != 204 || hd.Get("Access-Control-Allow-Origin") != app || !strings.Contains(hd.Get("Access-Control-Allow-Methods"), "POST") ||
		hd.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("%d %v", w.Code, hd)
	}
	for _, name := range []string{"X-Run-Id", "Last-Event-ID", "Authorization", "Content-Type"} {
		if !strings.Contains(hd.Get("Access-Control-Allow-Headers"), name) {
			t.Errorf("%s isn't allowed: %v", name, hd)
		}
	}
}

func TestMethodsAndTypes(t *testing.T) {
	h := newHouse(t, says(finished), nil)
	for _, tt := range []struct {
		method, path string
		status       int
		code, allow  string
	}{
		{"DELETE", chatPath, 405, "method_not_allowed", "GET, HEAD, OPTIONS, POST"},
		{"HEAD", chatPath + "?offset=-1&runId=r", 405, "method_not_allowed", "GET, HEAD, OPTIONS, POST"},
		{"GET", chatPath + "/cancel", 405, "method_not_allowed", "OPTIONS, POST"},
		{"POST", "/v1/runs", 405, "method_not_allowed", "GET, HEAD, OPTIONS"},
		{"GET", "/", 404, "not_found", ""},
		{"GET", "/v1/chat/", 404, "not_found", ""},
		{"GET", "/v1/runs/a/b", 404, "not_found", ""},
	} {
		w := h.do(t, tt.method, tt.path, "")
		wantStatus(t, w, tt.status, tt.code)
		if w.Header().Get("Allow") != tt.allow {
			t.Errorf("%s %s: Allow %q", tt.method, tt.path, w.Header().Get("Allow"))
		}
	}
	if w := h.do(t, "HEAD", "/healthz", ""); w.Code != 200 {
		t.Errorf("HEAD: %d", w.Code)
	}
	for ct, ok := range map[string]bool{
		"application/json": true, "application/json; charset=utf-8": true, "APPLICATION/JSON": true, "": true,
		"text/plain": false, "application/x-www-form-urlencoded": false, "multipart/form-data; boundary=x": false, ";": false,
	} {
		if w := h.post(t, body("t", "r", "hi"), header("Content-Type", ct)); w.Code != 200 {
			t.Errorf("%q without an origin: %d %s", ct, w.Code, w.Body)
		}
		w := h.post(t, body("t", "r", "hi"), header("Content-Type", ct, "Origin", "http://localhost:8080"))
		if ok && w.Code != 200 {
			t.Errorf("%q: %d %s", ct, w.Code, w.Body)
		}
		if !ok {
			wantStatus(t, w, 415, "unsupported_media_type")
		}
	}
	wantStatus(t, h.do(t, "GET", "/v1/runs", "", header("X-Big", strings.Repeat("x", 40<<10))), 431, "headers_too_large")
}

func TestRequestIDsAndLogs(t *testing.T) {
	var log bytes.Buffer
	h := newHouse(t, says(finished), func(c *server.Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Keys = []server.Key{{Token: "correct-horse-battery", Tenant: "a"}}
	})
	as := header("Authorization", "Bearer correct-horse-battery")
	if w := h.do(t, "GET", "/v1/runs", "", as, header("X-Request-Id", "abc-123")); w.Header().Get("X-Request-Id") != "abc-123" {
		t.Errorf("%v", w.Header())
	}
	for _, bad := range []string{"", "a b", "a\tb", strings.Repeat("x", 200)} {
		if id := h.do(t, "GET", "/v1/runs", "", as, header("X-Request-Id", bad)).Header().Get("X-Request-Id"); len(id) < 16 || id == bad {
			t.Errorf("%q became %q", bad, id)
		}
	}
	h.post(t, `{"threadId":"private-things"}`, as)
	out := log.String()
	if !strings.Contains(out, "abc-123") || strings.Contains(out, "horse") || strings.Contains(out, "private-things") {
		t.Errorf("log %s", out)
	}
}

func TestPanicGivesNothingAway(t *testing.T) {
	var log bytes.Buffer
	h := newHouse(t, says(finished), func(c *server.Config) {
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Store.Runs = panics{c.Store.Runs}
	})
	w := h.do(t, "GET", "/v1/runs/r", "")
	wantStatus(t, w, 500, "internal")
	if strings.Contains(w.Body.String(), "password") || !strings.Contains(log.String(), "password") {
		t.Errorf("body %s, log %s", w.Body, log.String())
	}
}

type panics struct{ store.Runs }

func (panics) Get(context.Context, string) (store.Run, error) { panic("password 42") }

func TestConfigErrors(t *testing.T) {
	ok := func() server.Config {
		return server.Config{Store: memstore.New(memstore.Options{}), Definitions: map[string]server.Definition{"a": {Request: says().request}}}
	}
	for want, change := range map[string]func(*server.Config){
		"Runs or Log": func(c *server.Config) { c.Store.Log = nil },
		"Definitions": func(c *server.Config) { c.Definitions = nil },
		"letters":     func(c *server.Config) { c.Definitions["a/b"] = c.Definitions["a"] },
		"Request":     func(c *server.Config) { c.Definitions["a"] = server.Definition{} },
		"Busy":        func(c *server.Config) { c.Definitions["a"] = server.Definition{Request: says().request, Busy: "wait"} },
		"QueueDepth": func(c *server.Config) {
			c.Definitions["a"] = server.Definition{Request: says().request, QueueDepth: -1}
		},
		"16 printable": func(c *server.Config) { c.Keys = []server.Key{{Token: "short"}} },
		"twice": func(c *server.Config) {
			c.Keys = []server.Key{{Token: "correct-horse-battery"}, {Token: "correct-horse-battery"}}
		},
		"no origin":     func(c *server.Config) { c.Origins = []string{"*"} },
		"is negative: ": func(c *server.Config) { c.Limits.Body = -1 },
	} {
		c := ok()
		change(&c)
		if _, err := server.New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// The definition may bring its own persistence; the server's then stays away.
func TestDefinitionBringsItsOwn(t *testing.T) {
	own := memstore.New(memstore.Options{})
	h := newHouse(t, says(finished), func(c *server.Config) {
		c.Definitions["demo"] = server.Definition{Request: func(context.Context, server.RunInput) (chat.Request, error) {
			return chat.Request{Adapter: says(append(text("m", "x"), finished)...), Use: []chat.Middleware{chat.Persist(own.Messages, nil)}}, nil
		}}
	})
	if w := h.post(t, body("t", "r", "hi")); w.Code != 200 {
		t.Fatal(w.Code)
	}
	for want, s := range map[int]store.Set{2: own, 0: h.store} {
		if msgs, _ := s.Messages.Load(t.Context(), store.Thread{ID: "t"}); len(msgs) != want {
			t.Errorf("%d messages, want %d", len(msgs), want)
		}
	}
}
