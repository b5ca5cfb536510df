//go:build unix

package statedir

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

func open(t *testing.T) *Dir {
	t.Helper()
	d, err := Open(filepath.Join(t.TempDir(), "a", "b"), 0o700)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRecord(t *testing.T) {
	d := open(t)
	type rec struct{ A string }
	var got rec
	if err := d.Load("key", &got); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before: %v", err)
	}
	if err := d.Claim("key", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.Claim("key", 0o700); err != nil {
		t.Errorf("an empty directory is what a crash leaves: %v", err)
	}
	for _, want := range []rec{{"one"}, {"two"}} {
		if err := d.Save("key", want); err != nil {
			t.Fatal(err)
		}
		if err := d.Load("key", &got); err != nil || got != want {
			t.Errorf("%v, %v", got, err)
		}
	}
	if err := d.Claim("key", 0o700); !errors.Is(err, provider.ErrConflict) {
		t.Errorf("claim of what is taken: %v", err)
	}
	keys, err := d.Keys()
	if diff := cmp.Diff([]string{"key"}, keys); diff != "" || err != nil {
		t.Error(diff, err)
	}
	es, err := os.ReadDir(d.Of("key"))
	if len(es) != 1 || err != nil {
		t.Errorf("%v, %v", es, err)
	}
	if err := os.WriteFile(filepath.Join(d.Of("key"), stateFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Load("key", &got); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("rubbish: %v", err)
	}
	if err := errors.Join(d.Forget("key"), d.Forget("key")); err != nil {
		t.Error(err)
	}
}

func TestLock(t *testing.T) {
	d := open(t)
	var wg sync.WaitGroup
	var held, n atomic.Int32
	for range 8 {
		wg.Go(func() {
			for range 20 {
				unlock, err := d.Lock(t.Context(), "key")
				if err != nil {
					t.Error(err)
					return
				}
				if held.Add(1) != 1 {
					t.Error("two hold the lock")
				}
				n.Add(1)
				runtime.Gosched()
				held.Add(-1)
				unlock()
			}
		})
	}
	wg.Wait()
	if n.Load() != 160 {
		t.Errorf("taken %d times", n.Load())
	}
	unlock, err := d.Lock(t.Context(), "key")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := d.Lock(ctx, "key"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("held: %v", err)
	}
	unlock()
	if _, err := d.Lock(ctx, "other"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ended context: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(file, 0o700); err == nil {
		t.Error("a file was opened")
	}
	wide := filepath.Join(t.TempDir(), "wide")
	if err := errors.Join(os.Mkdir(wide, 0o700), os.Chmod(wide, 0o777)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(wide, 0o700); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(wide); err != nil || fi.Mode().Perm()&0o022 != 0 {
		t.Errorf("others may write: %v, %v", fi.Mode(), err)
	}
	if os.Geteuid() == 0 {
		other := filepath.Join(t.TempDir(), "other")
		if err := errors.Join(os.Mkdir(other, 0o700), os.Chown(other, 12345, 12345)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(other, 0o700); !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("another user's: %v", err)
		}
	}
}

func TestRemove(t *testing.T) {
	top := filepath.Join(t.TempDir(), "top")
	outside := filepath.Join(t.TempDir(), "outside")
	if err := errors.Join(os.MkdirAll(top+"/a/b", 0o700), os.MkdirAll(outside, 0o700), os.WriteFile(outside+"/keep", nil, 0o600),
		os.Symlink(outside, top+"/a/link"), os.WriteFile(top+"/a/b/f", nil, 0), os.Chmod(top+"/a/b", 0), os.Chmod(top+"/a", 0o500)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(Remove(t.Context(), top), Remove(t.Context(), top)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(outside + "/keep"); err != nil {
		t.Error(err)
	}
}

func TestMatches(t *testing.T) {
	have := map[string]string{"a": "1", "b": ""}
	for _, c := range []struct {
		want map[string]string
		ok   bool
	}{{nil, true}, {map[string]string{"a": "1"}, true}, {map[string]string{"b": ""}, true}, {map[string]string{"c": ""}, false}, {map[string]string{"a": "2"}, false}} {
		if Matches(have, c.want) != c.ok {
			t.Errorf("%v: %v", c.want, !c.ok)
		}
	}
	for key, ok := range map[string]bool{"a1": true, "": false, "../x": false, "A": false, "a b": false} {
		if ValidKey(key) != ok {
			t.Errorf("%q: %v", key, !ok)
		}
	}
}
