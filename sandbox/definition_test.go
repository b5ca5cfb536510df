package sandbox

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// paper is a provider that must not be asked for anything but its name and facts.
type paper struct {
	provider.Provider
	name, print string
}

func (p paper) Name() string        { return p.name }
func (p paper) Fingerprint() string { return p.print }
func (paper) Traits() provider.Traits {
	return provider.Traits{Networks: []provider.Network{provider.NetworkHost, provider.NetworkNone}}
}

func def(t *testing.T, change func(*Definition)) *Def {
	t.Helper()
	d := Definition{ID: "repo", Provider: paper{name: "docker", print: "node:22"}}
	if change != nil {
		change(&d)
	}
	def, err := Define(d)
	if err != nil {
		t.Fatal(err)
	}
	return def
}

func TestInstanceKey(t *testing.T) {
	want := def(t, nil).InstanceKey(k1)
	if !regexp.MustCompile(`^[a-z0-9]{1,40}$`).MatchString(want) || len(want)+4 > 40 {
		t.Errorf("key %q", want)
	}
	if want != "b30e2d641665c0a5a11625b5efd6bee860d2" {
		t.Error("the encoding of keys changed:", want)
	}
	run2 := k1
	run2.RunID = "run-2"
	if def(t, nil).InstanceKey(run2) != want {
		t.Error("another run has another key")
	}
	seen := map[string]string{}
	for name, key := range map[string]string{
		"base":     want,
		"thread":   def(t, nil).InstanceKey(Key{ThreadID: "thread-2"}),
		"tenant":   def(t, nil).InstanceKey(Key{ThreadID: "thread-1", Tenant: "org"}),
		"user":     def(t, nil).InstanceKey(Key{ThreadID: "thread-1", UserID: "org"}),
		"shifted":  def(t, nil).InstanceKey(Key{ThreadID: "thread-1", Tenant: "o", UserID: "rg"}),
		"id":       def(t, func(d *Definition) { d.ID = "other" }).InstanceKey(k1),
		"provider": def(t, func(d *Definition) { d.Provider = paper{name: "bwrap", print: "node:22"} }).InstanceKey(k1),
		"image":    def(t, func(d *Definition) { d.Provider = paper{name: "docker", print: "node:24"} }).InstanceKey(k1),
		"network":  def(t, func(d *Definition) { d.Network = provider.NetworkNone }).InstanceKey(k1),
		"setup":    def(t, func(d *Definition) { d.Workspace.Setup = workspace.Steps(workspace.Serial("a")) }).InstanceKey(k1),
		"per run":  def(t, func(d *Definition) { d.Lifecycle.Reuse = PerRun }).InstanceKey(k1),
		"per run2": def(t, func(d *Definition) { d.Lifecycle.Reuse = PerRun }).InstanceKey(run2),
	} {
		if other, ok := seen[key]; ok {
			t.Errorf("%s and %s have the same key", name, other)
		}
		seen[key] = name
	}
	// These two collided in the reference; so did others among so many.
	d := def(t, nil)
	if d.InstanceKey(Key{ThreadID: "thread-0112789"}) == d.InstanceKey(Key{ThreadID: "thread-0349192"}) {
		t.Error("keys collide")
	}
	keys := map[string]bool{}
	for i := range 400_000 {
		keys[d.InstanceKey(Key{ThreadID: fmt.Sprintf("thread-%07d", i)})] = true
	}
	if len(keys) != 400_000 {
		t.Errorf("%d keys of 400000 threads", len(keys))
	}
}

func TestDefineRefuses(t *testing.T) {
	ok := Definition{ID: "x", Provider: paper{name: "docker"}}
	for field, change := range map[string]func(*Definition){
		"id":                       func(d *Definition) { d.ID = "a\nb" },
		"provider":                 func(d *Definition) { d.Provider = nil },
		"network":                  func(d *Definition) { d.Network = "mars" },
		"lifecycle.reuse":          func(d *Definition) { d.Lifecycle.Reuse = "always" },
		"lifecycle.snapshot":       func(d *Definition) { d.Lifecycle.Snapshot = "sometimes" },
		"lifecycle.onComplete":     func(d *Definition) { d.Lifecycle.OnComplete = "maybe" },
		"lifecycle.snapshotMaxAge": func(d *Definition) { d.Lifecycle.SnapshotMaxAge = -time.Hour },
		"fileEvents":               func(d *Definition) { d.FileEvents = "yes" },
	} {
		d := ok
		change(&d)
		_, err := Define(d)
		var de *DefinitionError
		if !errors.As(err, &de) || de.Field != field || !errors.Is(err, ErrDefinition) {
			t.Errorf("%s: %v", field, err)
		}
	}
	d := ok
	d.Workspace.Root = "x"
	if _, err := Define(d); !errors.Is(err, workspace.ErrInvalid) {
		t.Error(err)
	}
	d = ok
	d.Policy = &policy.Policy{Default: "perhaps"}
	if _, err := Define(d); err == nil {
		t.Error("a bad policy was accepted")
	}
}

func TestParseAge(t *testing.T) {
	for in, want := range map[string]time.Duration{"90s": 90 * time.Second, "1h": time.Hour, "7d": 7 * 24 * time.Hour, "2w": 14 * 24 * time.Hour, "1.5h": 90 * time.Minute, "0s": 0} {
		if got, err := ParseAge(in); err != nil || got != want {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "abc", "1.5x", "-1h", "-1d", "+1d", "d", "1.5d", "99999999999d", "7 d"} {
		if got, err := ParseAge(in); !errors.Is(err, ErrDefinition) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
}

func TestKeyedMutex(t *testing.T) {
	m := newKeyedMutex()
	var mu sync.Mutex
	holders, order := map[string]int{}, map[string][]int{}
	var wg sync.WaitGroup
	for i := range 2000 {
		wg.Go(func() {
			key := fmt.Sprint(i % 7)
			ctx, cancel := context.WithCancel(t.Context())
			if i%5 == 0 {
				go cancel()
			}
			defer cancel()
			unlock, err := m.lock(ctx, key)
			if err != nil {
				return
			}
			mu.Lock()
			if holders[key]++; holders[key] > 1 {
				t.Error("two holders")
			}
			order[key] = append(order[key], i)
			mu.Unlock()
			mu.Lock()
			holders[key]--
			mu.Unlock()
			unlock()
		})
	}
	wg.Wait()
	if len(m.keys) != 0 {
		t.Errorf("%d idle keys are kept", len(m.keys))
	}
	// First come, first served.
	unlock, err := m.lock(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan int, 3)
	for i := range 3 {
		wg.Go(func() {
			u, err := m.lock(t.Context(), "k")
			if err != nil {
				t.Error(err)
				return
			}
			got <- i
			u()
		})
		for {
			m.mu.Lock()
			n := len(m.keys["k"])
			m.mu.Unlock()
			if n == i+1 {
				break
			}
		}
	}
	unlock()
	wg.Wait()
	if a, b, c := <-got, <-got, <-got; a != 0 || b != 1 || c != 2 {
		t.Error("order", a, b, c)
	}
}

// FuzzParseExports: whatever a shell prints, reading it ends.
func FuzzParseExports(f *testing.F) {
	f.Add("export A='x'\ndeclare -x B=\"y\\\"\"\nexport C=$'\\n\\x41\\101'\n")
	f.Add("export A='")
	f.Add("$'\\")
	f.Fuzz(func(t *testing.T, s string) { parseExports(s) })
}

// FuzzSplitter: however output is cut, the step's output and code are the same.
func FuzzSplitter(f *testing.F) {
	f.Add("out\n", "after", 3)
	f.Add("__BSSH_x 1\n__BSS", "__BSSH_m 9\n", 9)
	f.Fuzz(func(t *testing.T, out, after string, cut int) {
		const marker = "__BSSH_m"
		if len(out) > stepTail/2 || regexp.MustCompile(`(?m)^__BSSH_m `).MatchString(out) {
			t.Skip()
		}
		in := out + "\n" + marker + " 7\n" + after
		cut &= 0xffff
		cut = min(cut, len(in))
		s := &splitter{after: &ring{max: 1 << 20}}
		got, ended := s.begin(marker, stepTail)
		_, _ = s.Write([]byte(in[:cut]))
		_, _ = s.Write([]byte(in[cut:]))
		select {
		case <-ended:
		default:
			t.Fatal("the marker was missed")
		}
		if got.String() != out+"\n" || s.code != 7 || s.after.String() != after {
			t.Errorf("%q, %d, %q", got.String(), s.code, s.after.String())
		}
	})
}
