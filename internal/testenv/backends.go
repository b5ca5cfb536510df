package testenv

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Image is the Docker image of the tests: Debian with git, ca-certificates,
// Node.js and procps. scripts/setup-test.sh makes it.
const Image = "aisandbox-test"

const setupCure = "run scripts/setup-test.sh"

// Docker ends the test as [Require] does where the docker command reaches no
// engine that has [Image].
func Docker(t testing.TB) {
	t.Helper()
	LookPath(t, "docker", setupCure)
	err := try("docker", "image", "inspect", "--format", "{{.Id}}", Image)
	Require(t, err == "", "a Docker engine with the image "+Image+": "+err, setupCure)
}

// Bwrap ends the test as [Require] does where bubblewrap can't make a sandbox.
func Bwrap(t testing.TB) {
	t.Helper()
	LookPath(t, "bwrap", setupCure)
	err := try("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true")
	Require(t, err == "", "bubblewrap with namespaces: "+err, "run as root, or allow user namespaces")
}

// try runs a command and returns what went wrong, in a few words.
func try(argv ...string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err == nil {
		return ""
	}
	return strings.TrimSpace(err.Error() + ": " + string(out))
}
