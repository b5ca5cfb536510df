package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/aisandbox-go/aisandbox/guest"
)

// The test binary is the command, and the guest program too.
func TestMain(m *testing.M) {
	guest.Hook(play)
	testscript.Main(m, map[string]func(){"aisandbox": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "../../cli/testdata",
		Setup: func(e *testscript.Env) error {
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("XDG_STATE_HOME", e.WorkDir+"/state")
			e.Setenv("XDG_CACHE_HOME", e.WorkDir+"/cache")
			for _, n := range []string{"CI", "PATH"} {
				e.Setenv(n, os.Getenv(n))
			}
			return nil
		},
	})
}
