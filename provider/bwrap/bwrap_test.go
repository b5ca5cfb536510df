//go:build linux

package bwrap_test

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

func TestMain(m *testing.M) {
	guest.Hook()
	goleak.VerifyTestMain(m)
}

func open(t *testing.T) provider.Provider {
	return bwrap.New(bwrap.Options{BaseDir: providertest.Dir(t)})
}

func TestExecOnly(t *testing.T) { providertest.Run(t, providertest.Options{New: open}) }

func TestGuest(t *testing.T) {
	providertest.Run(t, providertest.Options{
		New:  open,
		Spec: func(*testing.T) provider.Spec { return provider.Spec{Init: guest.NewInit(guest.Options{})} },
		Wrap: func(ctx context.Context, h provider.Handle) (provider.Handle, error) {
			return guest.Attach(ctx, h, guest.Options{Traits: bwrap.New(bwrap.Options{}).Traits()})
		},
	})
}
