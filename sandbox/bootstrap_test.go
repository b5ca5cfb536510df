package sandbox

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/workspace"
)

func TestSecretsReachEveryCommand(t *testing.T) {
	set := func(v string) *secret.Set {
		s, err := secret.NewSet(map[string]string{"GH_TOKEN": v, "EMPTY": ""})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	x := newFixture(t, func(d *Definition) { d.Workspace.Secrets = set("ghp_secret_one") })
	t.Setenv("EMPTY", "login")
	see := func(want string) {
		t.Helper()
		box, _, err := Ensure(t.Context(), x.deps, x.def, k1)
		if err != nil {
			t.Fatal(err)
		}
		defer box.Close()
		res, err := box.Shell(t.Context(), `printf %s "$GH_TOKEN-$EMPTY"`)
		if err != nil || string(res.Stdout) != want {
			t.Errorf("%q, %v, want %q", res.Stdout, err, want)
		}
		if s := fmt.Sprintf("%v %+v %#v %+v", box, box, box, x.f.specs); strings.Contains(s, "ghp_") {
			t.Error("a secret is printed:", s)
		}
	}
	see("ghp_secret_one-login")
	d := x.def.Definition()
	d.Workspace.Secrets = set("ghp_secret_two")
	next, err := Define(d)
	if err != nil {
		t.Fatal(err)
	}
	if next.InstanceKey(k1) != x.def.InstanceKey(k1) {
		t.Error("a rotated secret has another key")
	}
	x.def = next
	see("ghp_secret_two-login") // resumed
	x.f.resume = notFound
	see("ghp_secret_two-login") // restored
	if x.f.count() != "1/2/1/1" {
		t.Error(x.f.count())
	}
	if b, err := json.Marshal(must(x.record())); err != nil || strings.Contains(string(b), "ghp_") {
		t.Errorf("record %s, %v", b, err)
	}
}

func must[T any](v T, ok bool) T {
	if !ok {
		panic("missing")
	}
	return v
}

func TestBootstrapFiles(t *testing.T) {
	x := newFixture(t, func(d *Definition) {
		d.Workspace.Instructions = "Be brief.\n"
		d.Workspace.Scripts = map[string]string{"test": "pnpm test"}
		d.Workspace.Skills = []workspace.Skill{workspace.FileSkill("docs/a b/how.md", "how"), workspace.FileSkill("yarn.lock", "")}
		d.Workspace.Setup = workspace.Steps(workspace.Serial("cat CLAUDE.md > seen"))
	})
	box, out, err := Ensure(t.Context(), x.deps, x.def, k1)
	if err != nil {
		t.Fatal(err)
	}
	defer box.Close()
	agents := "Be brief.\n\n## Workspace scripts\n\n- test → pnpm test"
	for name, want := range map[string]string{"AGENTS.md": agents, "docs/a b/how.md": "how", "seen": agents} {
		if b, err := box.ReadFile(t.Context(), name); err != nil || string(b) != want {
			t.Errorf("%s = %q, %v", name, b, err)
		}
	}
	for _, l := range workspace.LinkFiles() {
		if to, err := os.Readlink(box.RealRoot() + "/" + l); err != nil || to != "AGENTS.md" {
			t.Errorf("%s -> %q, %v", l, to, err)
		}
	}
	if out.PackageManager != workspace.Yarn || len(out.Setup) != 1 {
		t.Errorf("outcome %+v", out)
	}
}
