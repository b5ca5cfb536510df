package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
)

// doctorReport is the JSON of doctor --json.
type doctorReport struct {
	Providers []doctorProvider `json:"providers"`
	Harnesses []doctorHarness  `json:"harnesses"`
	Guest     doctorGuest      `json:"guest"`
}

type doctorProvider struct {
	Name      string             `json:"name"`
	Usable    bool               `json:"usable"`
	Isolation provider.Isolation `json:"isolation"`
	Networks  []provider.Network `json:"networks"`
	Auto      bool               `json:"auto"`           // what --provider auto takes
	Cure      string             `json:"cure,omitempty"` // why it isn't usable, and what to do
}

type doctorHarness struct {
	Name    string `json:"name"`
	Usable  bool   `json:"usable"`
	Path    string `json:"path,omitempty"`
	Version string `json:"version,omitempty"`
	Cure    string `json:"cure,omitempty"`
}

type doctorGuest struct {
	Version   int              `json:"version"` // of the protocol
	Source    string           `json:"source"`  // embedded, self or none
	Bytes     map[string]int64 `json:"bytes"`   // size by platform
	Platforms []string         `json:"platforms"`
	Cure      string           `json:"cure,omitempty"`
}

func (a *app) doctorCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say what can be used on this machine, what isolation it gives, and what to do about the rest",
		Args:  exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), 30*time.Second)
			defer cancel()
			r := a.examine(ctx)
			if asJSON {
				enc := json.NewEncoder(a.out)
				enc.SetIndent("", "  ")
				enc.SetEscapeHTML(false)
				return enc.Encode(r)
			}
			return a.printReport(r)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func (a *app) examine(ctx context.Context) doctorReport {
	var r doctorReport
	auto := false
	for _, name := range slices.Sorted(maps.Keys(a.reg.Providers)) {
		r.Providers = append(r.Providers, a.examineProvider(ctx, name))
	}
	for _, name := range a.reg.Auto {
		i := slices.IndexFunc(r.Providers, func(p doctorProvider) bool { return p.Name == name })
		if i >= 0 && r.Providers[i].Usable && !auto {
			r.Providers[i].Auto, auto = true, true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.reg.Harnesses)) {
		h := doctorHarness{Name: name, Usable: true}
		if find := a.reg.Harnesses[name].Find; find != nil {
			p, err := find(ctx)
			h.Path, h.Version = p.Path, p.Version
			if err != nil {
				h.Usable, h.Cure = false, err.Error()
			}
		}
		r.Harnesses = append(r.Harnesses, h)
	}
	r.Guest = examineGuest()
	return r
}

func (a *app) examineProvider(ctx context.Context, name string) doctorProvider {
	d := doctorProvider{Name: name}
	p, err := a.reg.Providers[name].New(nil, a.logger())
	if err != nil {
		d.Cure = err.Error()
		return d
	}
	t := p.Traits()
	d.Isolation, d.Networks, d.Usable = t.Isolation, t.Networks, true
	if pg, ok := provider.As[provider.Pinger](p); ok {
		if err := pg.Ping(ctx); err != nil {
			d.Usable, d.Cure = false, err.Error()
		}
	}
	return d
}

func examineGuest() doctorGuest {
	g := doctorGuest{Version: guest.ProtocolVersion, Source: string(guest.SourceNone), Bytes: map[string]int64{}}
	for _, platform := range []string{"linux/amd64", "linux/arm64"} {
		src, n := guest.SourceOf(platform)
		if src == guest.SourceNone {
			continue
		}
		g.Source = string(src)
		g.Bytes[platform] = n
		g.Platforms = append(g.Platforms, platform)
	}
	if len(g.Platforms) == 0 {
		g.Cure = "this build has no guest programs: use `make build`; sandboxes work without, but slower and with weaker kills"
	}
	return g
}

func (a *app) printReport(r doctorReport) error {
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PROVIDER\tUSABLE\tISOLATION\tNOTE")
	for _, p := range r.Providers {
		note := p.Cure
		if p.Auto {
			note = strings.TrimSpace("taken by --provider auto " + note)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", p.Name, yesNo(p.Usable), p.Isolation, printable(firstLine(note)))
	}
	fmt.Fprintln(w, "\nHARNESS\tUSABLE\tVERSION\tNOTE")
	for _, h := range r.Harnesses {
		note := h.Cure
		if note == "" {
			note = h.Path
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", h.Name, yesNo(h.Usable), printable(h.Version), printable(firstLine(note)))
	}
	fmt.Fprintln(w, "\nGUEST\tPROTOCOL\tSOURCE\tPLATFORMS")
	var ps []string
	for _, p := range r.Guest.Platforms {
		ps = append(ps, fmt.Sprintf("%s (%.1f MiB)", p, float64(r.Guest.Bytes[p])/(1<<20)))
	}
	fmt.Fprintf(w, "\t%d\t%s\t%s\n", r.Guest.Version, r.Guest.Source, strings.Join(ps, ", "))
	if r.Guest.Cure != "" {
		fmt.Fprintln(w, "\t"+r.Guest.Cure)
	}
	return w.Flush()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
