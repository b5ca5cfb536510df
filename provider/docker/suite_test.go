package docker

import (
	"context"
	"testing"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

// programOK ends the test where the guest program was not built.
func programOK(t testing.TB) {
	t.Helper()
	_, err := guest.Program("linux/amd64")
	testenv.Require(t, err == nil, "the guest program", "make guests")
}

// The agent of the exec-only run is root, for whom most ways out of a kill are open;
// that of the guest run is not, which is the setup that is recommended. The tests of
// exec_test.go run for both.
func TestProvider(t *testing.T) {
	t.Run("exec-only", func(t *testing.T) {
		providertest.Run(t, providertest.Options{
			New:  func(t *testing.T) provider.Provider { return newProvider(t, Options{}) },
			Slow: 4,
			Skip: map[string]string{"S13": "the engine carries both streams of an exec on one connection, so one that is not read holds the other back; the guest has no such limit"},
		})
	})
	t.Run("guest", func(t *testing.T) {
		programOK(t)
		p := newProvider(t, Options{User: "1234:1234"})
		providertest.Run(t, providertest.Options{
			New:  func(t *testing.T) provider.Provider { return p },
			Spec: func(*testing.T) provider.Spec { return provider.Spec{Init: guest.NewInit(guest.Options{})} },
			Wrap: func(ctx context.Context, h provider.Handle) (provider.Handle, error) {
				return guest.Attach(ctx, h, guest.Options{Traits: p.Traits()})
			},
			Slow: 2,
		})
	})
}
