package docker

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/aisandbox-go/aisandbox/provider"
)

// fakeEngine answers by "METHOD /path" without the version, the first entry whose
// key begins the request's. It records what it was asked.
type fakeEngine struct {
	answers map[string]func(w http.ResponseWriter, r *http.Request)
	mu      sync.Mutex
	asked   []string
}

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	if strings.HasPrefix(path, "/v1.") {
		path = path[strings.Index(path[1:], "/")+1:]
	}
	ask := r.Method + " " + path
	f.mu.Lock()
	f.asked = append(f.asked, ask)
	f.mu.Unlock()
	w.Header().Set("Api-Version", "1.41")
	if strings.HasSuffix(path, "/_ping") {
		return
	}
	best := ""
	for k := range f.answers {
		if strings.HasPrefix(ask, k) && len(k) > len(best) {
			best = k
		}
	}
	if best == "" {
		fail(http.StatusTeapot, "not expected: "+ask)(w, r)
		return
	}
	f.answers[best](w, r)
}

func fail(status int, text string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { reply(w, status, map[string]string{"message": text}) }
}

func ok(v any) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, v) }
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// hangUp cuts the connection without an answer.
func hangUp(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }

func fakeProvider(t *testing.T, answers map[string]func(http.ResponseWriter, *http.Request)) (*Provider, *fakeEngine) {
	t.Helper()
	sock := filepath.Join(t.TempDir(), "engine.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeEngine{answers: answers}
	srv := httptest.NewUnstartedServer(f)
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	p := New(Options{Image: "img", Host: "unix://" + sock})
	t.Cleanup(func() {
		_ = p.Close()
		srv.CloseClientConnections()
		srv.Close()
	})
	return p, f
}

const fakeID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func fakeContainer(status string, labels map[string]string) map[string]any {
	return map[string]any{
		"Id": fakeID, "Name": "/aisbx-k", "Image": "sha256:1",
		"State":  map[string]any{"Status": status, "Running": status == "running", "Dead": status == "dead", "ExitCode": 3},
		"Config": map[string]any{"Labels": labels},
	}
}

var ours = map[string]string{labelManaged: "1", labelKey: "k", labelRoot: "/workspace"}

func TestResumeErrors(t *testing.T) {
	inspect := "GET /containers/" + fakeID + "/json"
	for _, tc := range []struct {
		name   string
		answer func(http.ResponseWriter, *http.Request)
		want   error
	}{
		{"404", fail(404, "No such container: x"), provider.ErrNotFound},
		{"500", fail(500, "database is sad"), provider.ErrUnavailable},
		{"503", fail(503, "starting"), provider.ErrUnavailable},
		{"cut", hangUp, provider.ErrUnavailable},
		{"dead", ok(fakeContainer("dead", ours)), provider.ErrNotFound},
		{"removing", ok(fakeContainer("removing", ours)), provider.ErrNotFound},
		{"not ours", ok(fakeContainer("running", nil)), provider.ErrConflict},
		{"no sense", ok(map[string]any{}), provider.ErrConflict},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, _ := fakeProvider(t, map[string]func(http.ResponseWriter, *http.Request){inspect: tc.answer})
			_, err := p.Resume(t.Context(), refOf(fakeID))
			if !errors.Is(err, tc.want) || tc.want != provider.ErrNotFound && errors.Is(err, provider.ErrNotFound) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Whatever fails after the container was created, the container is removed.
func TestCreateFailsClean(t *testing.T) {
	image := ok(map[string]any{"Id": "sha256:1", "Os": "linux", "Architecture": "amd64", "Config": map[string]any{}})
	created := func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusCreated, map[string]any{"Id": fakeID})
	}
	c := "/containers/" + fakeID
	for _, tc := range []struct {
		name    string
		answers map[string]func(http.ResponseWriter, *http.Request)
		want    error
		removed bool
	}{
		{"image missing", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": fail(404, "No such image: img"), "POST /images/create": fail(500, "registry unreachable")}, provider.ErrImageNotFound, false},
		{"no space to pull", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": fail(404, "No such image: img"), "POST /images/create": fail(500, "write /x: no space left on device")}, provider.ErrNoSpace, false},
		{"pull fails in the middle", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": fail(404, "No such image: img"),
			"POST /images/create":  ok(map[string]any{"errorDetail": map[string]any{"message": "layer x: denied"}})}, provider.ErrImageNotFound, false},
		{"no space to create", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": image, "POST /containers/create": fail(500, "mkdir: no space left on device")}, provider.ErrNoSpace, false},
		{"start fails", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": image, "POST /containers/create": created,
			"POST " + c + "/start": fail(500, "cgroups: cannot"), "DELETE " + c: ok(nil)}, provider.ErrUnavailable, true},
		{"no such first program", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": image, "POST /containers/create": created,
			"POST " + c + "/start": fail(400, `exec: "sleep": executable file not found in $PATH`), "DELETE " + c: ok(nil)}, provider.ErrInvalid, true},
		{"ends at once", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": image, "POST /containers/create": created, "POST " + c + "/start": ok(nil),
			"GET " + c + "/json": ok(fakeContainer("exited", ours)), "GET " + c + "/logs": ok(nil), "DELETE " + c: ok(nil)}, provider.ErrInvalid, true},
		{"cut while starting", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": image, "POST /containers/create": created, "POST " + c + "/start": hangUp, "DELETE " + c: ok(nil)}, provider.ErrUnavailable, true},
		{"the name is somebody's", map[string]func(http.ResponseWriter, *http.Request){
			"GET /images/img/json": image, "POST /containers/create": fail(409, "name in use"),
			"GET /containers/aisbx-k/json": ok(fakeContainer("running", map[string]string{labelManaged: "1", labelKey: "other"}))}, provider.ErrConflict, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, f := fakeProvider(t, tc.answers)
			_, err := p.Create(t.Context(), provider.Spec{Key: "k"})
			if !errors.Is(err, tc.want) {
				t.Errorf("got %v", err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if removed := strings.Contains(strings.Join(f.asked, "\n"), "DELETE "+c); removed != tc.removed {
				t.Errorf("removed: %v\n%s", removed, strings.Join(f.asked, "\n"))
			}
		})
	}
}
