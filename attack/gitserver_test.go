package attack

import (
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// gitServer serves a repository to whoever has the token, at an address that the
// sandbox reaches, and returns its URL.
func gitServer(t *testing.T, container bool, token string) string {
	t.Helper()
	dir := t.TempDir()
	repo := filepath.Join(dir, "repo.git")
	work := filepath.Join(dir, "work")
	for _, args := range [][]string{
		{"init", "-q", "-b", "main", work},
		{"-C", work, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "--allow-empty", "-m", "one"},
		{"-C", work, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "--allow-empty", "-m", "two"},
	} {
		run(t, "git", args...)
	}
	if err := os.WriteFile(filepath.Join(work, "README.md"), []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, "git", "-C", work, "add", "-A")
	run(t, "git", "-C", work, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "-m", "three")
	run(t, "git", "clone", "-q", "--bare", work, repo)
	backend := filepath.Join(strings.TrimSpace(string(run(t, "git", "--exec-path"))), "git-http-backend")
	h := &cgi.Handler{Path: backend, Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1"}, InheritEnv: []string{"PATH"}}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pass, _ := r.BasicAuth(); pass != token {
			w.Header().Set("WWW-Authenticate", "Basic")
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	}))
	host := "127.0.0.1"
	if container {
		host = dockerBridge(t)
	}
	l, err := net.Listen("tcp", host+":0")
	if err != nil {
		t.Fatal(err)
	}
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL + "/repo.git"
}

// dockerBridge is the address of this host on the network of containers.
func dockerBridge(t *testing.T) string {
	t.Helper()
	ifc, err := net.InterfaceByName("docker0")
	if err != nil {
		t.Fatalf("the bridge of Docker's network: %v", err)
	}
	addrs, err := ifc.Addrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	t.Fatalf("the bridge of Docker's network has the addresses %v", addrs)
	return ""
}
