package config

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/internal/yamltree"
)

// MaxFile bounds a configuration.
const MaxFile = 1 << 20

//go:embed schema.json
var schema []byte

// Schema returns the JSON Schema of the file, for editors. Options of providers
// and agents are open in it: they depend on the program.
func Schema() []byte { return slices.Clone(schema) }

// Parse reads a configuration in YAML, strictly: an unknown or repeated key, a
// value of another type, an anchor, a tag and a second document are errors. Name
// is the file's, for messages and for paths relative to it. The error joins a
// [*FileError] for each fault, in the order of the file.
func Parse(name string, data []byte) (File, error) {
	s := &source{name: name, pos: map[string]yamltree.Pos{}}
	n, err := yamltree.Parse(data, MaxFile)
	if err != nil {
		fe := &FileError{File: name, Line: 1, Column: 1, Msg: err.Error(), Err: err}
		var ye *yamltree.Error
		if errors.As(err, &ye) {
			fe.Line, fe.Column, fe.Msg, fe.Cure = ye.Line, ye.Column, ye.Msg, ye.Cure
		}
		return File{}, fe
	}
	if n.Kind == yamltree.Null {
		s.fail("", "is empty", "write at least sandboxes: (see `aisandbox config schema`)")
		return File{}, s.err()
	}
	s.pos[""] = n.Pos
	f := File{src: s}
	s.decode(n, reflect.ValueOf(&f).Elem(), "")
	f.check(s)
	if err := s.err(); err != nil {
		return File{}, err
	}
	return f, nil
}

var (
	sandboxName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	envName     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// check reports what a field's type doesn't say.
func (f *File) check(s *source) {
	if f.Sandboxes != nil && len(f.Sandboxes) == 0 {
		s.fail("sandboxes", "is empty", "define what can be run")
	}
	for _, name := range slices.Sorted(maps.Keys(f.Sandboxes)) {
		p := join("sandboxes", name)
		if !sandboxName.MatchString(name) {
			s.fail(p, "is no name", "use up to 64 letters, digits, '.', '_' and '-', and begin with a letter or digit")
		}
		b := f.Sandboxes[name]
		b.check(s, p)
	}
	if f.Addr != "" {
		_, port, err := net.SplitHostPort(f.Addr)
		if n, perr := strconv.Atoi(port); err != nil || perr != nil || n < 0 || n > 65535 {
			s.fail("addr", fmt.Sprintf("%q is no address", clip(f.Addr)), "write host:port, such as 127.0.0.1:8080")
		}
	}
	f.Store.check(s)
	for i, k := range f.Auth.Keys {
		p := fmt.Sprintf("auth.keys[%d]", i)
		oneOf(s, p, "env", k.Env, "file", k.File, "a key comes from the environment or a file, never from here")
		s.env(join(p, "env"), k.Env)
		if strings.ContainsAny(k.Tenant+k.User, "\x00\n\r") {
			s.fail(p, "tenant or user has a line break", "write it on one line")
		}
	}
	for i, h := range f.Hosts {
		if h == "" || strings.ContainsAny(h, ":/* \t\n") {
			s.fail(fmt.Sprintf("hosts[%d]", i), fmt.Sprintf("%q is no host name", clip(h)), "write the name alone, without scheme, port or wildcards")
		}
	}
	for i, o := range f.Origins {
		if u, err := url.Parse(o); err != nil || u.Scheme == "" || u.Host == "" || u.Scheme+"://"+u.Host != o {
			s.fail(fmt.Sprintf("origins[%d]", i), fmt.Sprintf("%q is no origin", clip(o)), "write scheme://host[:port], without a path or wildcards")
		}
	}
}

func (st Store) check(s *source) {
	if st.SQLite != nil && st.Postgres != nil {
		s.fail("store", "names two stores", "keep sqlite or postgres")
	}
	if st.SQLite != nil && (st.SQLite.Path == "" || strings.ContainsRune(st.SQLite.Path, 0)) {
		s.fail("store.sqlite.path", "is no path", "name a file")
	}
	if p := st.Postgres; p != nil {
		oneOf(s, "store.postgres", "env", p.Env, "file", p.File, "the URL holds a password, so it comes from the environment or a file")
		s.env("store.postgres.env", p.Env)
	}
}

// oneOf reports unless exactly one of two fields is set.
func oneOf(s *source, path, a, av, b, bv, why string) {
	if (av == "") == (bv == "") && s.faultless(path) {
		s.fail(path, fmt.Sprintf("needs either %s or %s", a, b), why)
	}
}

// env reports what can't be the name of an environment variable. It isn't shown:
// it may be the value itself, in the wrong place.
func (s *source) env(path, name string) {
	if name != "" && !envName.MatchString(name) {
		s.fail(path, "is no name of an environment variable", "write the name, not the value")
	}
}

func (b Sandbox) check(s *source, p string) {
	src := join(p, "source")
	switch {
	case b.Source.Git != "" && b.Source.Local != "":
		s.fail(src, "names two sources", "keep git or local")
	case b.Source == (Source{}):
		if _, ok := s.pos[src]; ok {
			s.fail(src, "names no source", "write git: or local:, or remove it")
		}
	case b.Source.Git == "" && b.Source.Local == "":
		s.fail(src, "names no source", "write git: or local:")
	case b.Source.Local != "":
		for name, v := range map[string]string{"depth": string(b.Source.Depth), "token": b.Source.Token, "username": b.Source.Username} {
			if v != "" {
				s.fail(join(src, name), "is for git", "remove it: a directory is copied with its history")
			}
		}
	}
	if t := b.Source.Token; t != "" && !slices.Contains(b.Secrets, t) {
		s.fail(join(src, "token"), "is not among secrets", "name an entry of secrets")
	}
	for i, name := range b.Secrets {
		p := fmt.Sprintf("%s.secrets[%d]", p, i)
		switch {
		case !envName.MatchString(name):
			s.fail(p, "is no name of an environment variable", "write the name, not the value")
		case slices.Contains(b.Secrets[:i], name):
			s.fail(p, fmt.Sprintf("%q is there twice", name), "remove one")
		}
	}
	for i, st := range b.Setup {
		if len(st.Serial)+len(st.Parallel) == 0 && s.faultless(fmt.Sprintf("%s.setup[%d]", p, i)) {
			s.fail(fmt.Sprintf("%s.setup[%d]", p, i), "has no commands", "write one, or remove it")
		}
	}
	if b.Busy == BusyReject && b.QueueDepth > 0 {
		s.fail(join(p, "queueDepth"), "has no effect: busy is reject", "remove one of them")
	}
	if b.KeepFor > 0 && b.OnComplete == "destroy" {
		s.fail(join(p, "keepFor"), "has no effect: onComplete is destroy", "remove one of them")
	}
}

// faultless says that nothing was reported yet of a field or beneath it.
func (s *source) faultless(path string) bool {
	return !slices.ContainsFunc(s.errs, func(e *FileError) bool { return strings.HasPrefix(e.Field, path) })
}
