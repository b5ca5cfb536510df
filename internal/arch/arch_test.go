package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestImports(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-deps", "-json=ImportPath,Imports,Standard", module+"/...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Logf("%s", exit.Stderr)
		}
		t.Fatal(err)
	}
	var pkgs []Package
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p Package
		if err := dec.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) < 20 {
		t.Fatalf("go list named %d packages: the rules were not checked", len(pkgs))
	}
	for _, bad := range Check(pkgs) {
		t.Error(bad)
	}
}

func TestCheck(t *testing.T) {
	in := func(name string) string { return module + "/" + name }
	std := []Package{{ImportPath: "fmt", Standard: true}, {ImportPath: "net/http", Standard: true}}
	for _, tc := range []struct {
		name string
		pkgs []Package
		want []string
	}{
		{"allowed", []Package{
			{ImportPath: in("provider/docker"), Imports: []string{"fmt", in("provider"), in("internal/sh"), "github.com/moby/moby/client"}},
			{ImportPath: in("cmd/aisandbox"), Imports: []string{in("provider/docker"), in("cli")}},
			{ImportPath: in("guest/inside"), Imports: []string{"golang.org/x/sys/unix"}},
		}, nil},
		{"backend in the middle", []Package{{ImportPath: in("sandbox"), Imports: []string{in("provider/docker")}}},
			[]string{"sandbox imports " + in("provider/docker") + ": the table allows "}},
		{"one agent in the command line", []Package{{ImportPath: in("cli"), Imports: []string{in("harness/claudecode")}}},
			[]string{"cli imports " + in("harness/claudecode") + ": "}},
		{"upward", []Package{{ImportPath: in("event"), Imports: []string{in("chat")}}},
			[]string{"event imports " + in("chat") + ": the table allows no package of the module"}},
		{"third party in the core", []Package{{ImportPath: in("provider"), Imports: []string{"golang.org/x/sync/errgroup"}}},
			[]string{"provider imports golang.org/x/sync/errgroup: that module is not among"}},
		{"a prefix is no module", []Package{{ImportPath: in("guest"), Imports: []string{"golang.org/x/system"}}},
			[]string{"guest imports golang.org/x/system: that module"}},
		{"new package", []Package{{ImportPath: in("shiny")}},
			[]string{"shiny is not in the table of internal/arch/arch.go"}},
		{"internal in an example", []Package{{ImportPath: in("examples/toy"), Imports: []string{in("internal/sh")}}},
			[]string{"examples/toy imports " + in("internal/sh") + ": "}},
		{"code in the root", []Package{{ImportPath: module}}, []string{"the module's root"}},
		{"http in the guest", []Package{
			{ImportPath: in("cmd/aisandbox-guest"), Imports: []string{in("guest/inside")}},
			{ImportPath: in("guest/inside"), Imports: []string{in("internal/x")}},
			{ImportPath: in("internal/x"), Imports: []string{"net/http"}},
		}, []string{"cmd/aisandbox-guest links net/http, through " + in("internal/x")}},
		{"the guest embeds itself", []Package{
			{ImportPath: in("cmd/aisandbox-guest"), Imports: []string{in("internal/x")}},
			{ImportPath: in("internal/x"), Imports: []string{in("guest")}},
		}, []string{"cmd/aisandbox-guest links " + in("guest")}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := Check(append(tc.pkgs, std...))
			if len(got) != len(tc.want) {
				t.Fatal(cmp.Diff(tc.want, got))
			}
			for i := range got {
				if !strings.HasPrefix(got[i], tc.want[i]) {
					t.Error(cmp.Diff(tc.want[i], got[i]))
				}
			}
		})
	}
}
