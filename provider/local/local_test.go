//go:build linux

package local_test

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

func TestMain(m *testing.M) {
	guest.Hook()
	goleak.VerifyTestMain(m)
}

func open(t *testing.T) provider.Provider {
	return local.New(local.Options{BaseDir: providertest.Dir(t)})
}

func TestExecOnly(t *testing.T) { providertest.Run(t, providertest.Options{New: open}) }

func TestGuest(t *testing.T) {
	providertest.Run(t, providertest.Options{
		New: open,
		Wrap: func(ctx context.Context, h provider.Handle) (provider.Handle, error) {
			return guest.Attach(ctx, h, guest.Options{Traits: local.New(local.Options{}).Traits()})
		},
	})
}
