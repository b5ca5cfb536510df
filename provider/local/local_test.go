//go:build linux

package local_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestProvider(t *testing.T) {
	providertest.Run(t, providertest.Options{New: func(t *testing.T) provider.Provider {
		return local.New(local.Options{BaseDir: providertest.Dir(t)})
	}})
}
