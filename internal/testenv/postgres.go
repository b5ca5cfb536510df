package testenv

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// cluster is the PostgreSQL server of this test process.
var cluster struct {
	sync.Mutex
	err     error
	started bool
	bin     string // directory of the programs
	sockets string
	stop    func()
	serial  atomic.Int64
}

// Postgres returns the URL of an empty database on a PostgreSQL server that this
// test process has for itself, reached by a Unix socket. The server is started by
// the first call, syncs to disk like any other, and ends with the process, however
// that ends; [StopPostgres] ends it in order. It ends the test as [Require] does where there is no
// server program.
func Postgres(t testing.TB) string {
	t.Helper()
	bin := postgresBin()
	Require(t, bin != "", "the programs of a PostgreSQL server", setupCure)
	cluster.Lock()
	if !cluster.started {
		cluster.started = true
		cluster.bin = bin
		cluster.err = startCluster()
	}
	err := cluster.err
	cluster.Unlock()
	if err != nil {
		t.Fatalf("testenv: PostgreSQL: %v", err)
	}
	name := fmt.Sprintf("test%d", cluster.serial.Add(1))
	sql := func(text string) {
		cmd := exec.Command(filepath.Join(cluster.bin, "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-h", cluster.sockets, "-U", "postgres", "-d", "postgres", "-c", text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("testenv: PostgreSQL: %s: %v: %s", text, err, out)
		}
	}
	sql("CREATE DATABASE " + name)
	t.Cleanup(func() { sql("DROP DATABASE " + name + " WITH (FORCE)") })
	return "postgres:///" + name + "?user=postgres&sslmode=disable&host=" + url.QueryEscape(cluster.sockets)
}

// StopPostgres ends the server that [Postgres] started, for the end of a TestMain.
func StopPostgres() {
	cluster.Lock()
	defer cluster.Unlock()
	if cluster.stop != nil {
		cluster.stop()
		cluster.stop = nil
	}
}

// postgresBin is the directory of a server's programs: that of initdb in PATH, or
// the newest where Debian puts them.
func postgresBin() string {
	dirs, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	slices.SortFunc(dirs, func(a, b string) int { return postgresMajor(b) - postgresMajor(a) })
	if p, err := exec.LookPath("initdb"); err == nil {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	for _, dir := range dirs {
		ok := true
		for _, p := range []string{"initdb", "postgres", "psql"} {
			_, err := os.Stat(filepath.Join(dir, p))
			ok = ok && err == nil
		}
		if ok {
			return dir
		}
	}
	return ""
}

func postgresMajor(dir string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
	return n
}

// startCluster makes and starts a server below a directory of its own. A shell
// stays between: it reads from a pipe that this process holds, so that the server
// ends, and its files go, even where this process is killed.
func startCluster() (err error) {
	base, err := os.MkdirTemp("", "pg")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(base)
		}
	}()
	if err := os.Chmod(base, 0o755); err != nil {
		return err
	}
	// The server refuses to run as root.
	var as []string
	if os.Geteuid() == 0 {
		u, err := user.Lookup("postgres")
		if err != nil {
			return err
		}
		uid, _ := strconv.Atoi(u.Uid)
		gid, _ := strconv.Atoi(u.Gid)
		if err := os.Chown(base, uid, gid); err != nil {
			return err
		}
		as = []string{"setpriv", "--reuid=" + u.Uid, "--regid=" + u.Gid, "--clear-groups", "--"}
	}
	run := func(argv ...string) *exec.Cmd {
		argv = append(slices.Clone(as), argv...)
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir = base
		return cmd
	}
	data := filepath.Join(base, "data")
	out, err := run(filepath.Join(cluster.bin, "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync").CombinedOutput()
	if err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	const script = `"$1/postgres" -D "$2/data" -k "$2" -c listen_addresses= -c max_connections=300 -c shared_buffers=64MB -c max_wal_size=512MB -c logging_collector=off >"$2/log" 2>&1 &
p=$!
read -r _
kill -INT $p
wait $p
rm -rf "$2"`
	cmd := run("sh", "-c", script, "sh", cluster.bin, base)
	hold, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	stop := func() {
		_ = hold.Close()
		_ = cmd.Wait()
		_ = os.RemoveAll(base)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		out, err := exec.CommandContext(ctx, filepath.Join(cluster.bin, "psql"), "-X", "-h", base, "-U", "postgres", "-d", "postgres", "-tAc", "SELECT 1").CombinedOutput()
		if err == nil && strings.TrimSpace(string(out)) == "1" {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			log, _ := os.ReadFile(filepath.Join(base, "log"))
			stop()
			return errors.Join(ctx.Err(), fmt.Errorf("it does not come up: %s%s", out, log))
		}
	}
	cluster.sockets, cluster.stop = base, stop
	return nil
}
