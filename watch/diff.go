package watch

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/internal/sh"
	"github.com/aisandbox-go/aisandbox/provider"
)

// DiffOptions of a [Differ]. The zero value works.
type DiffOptions struct {
	// Root is the directory, a real path inside the sandbox; empty is Handle.Root.
	Root string

	// Name names the baseline in the sandbox: a later Differ of that name goes on with
	// it, whatever host it is on, until one is closed. It has letters, digits and
	// minus, and should not be guessable from inside. Empty: a baseline of its own.
	Name string

	// MaxBytes is the largest file, and diff, that is shown; 0 is 1 MiB.
	MaxBytes int64

	// Redact is applied to every text that is returned; nil changes nothing.
	Redact func(string) string

	Logger *slog.Logger // nil discards
}

// Differ shows how files differ from what they were when it was made. Where the
// directory is a git work tree, that state includes what was not committed, so
// that only later edits are shown. What a Differ needs lies outside of the
// repository, which it does not change.
//
// Files that usually hold secrets are never shown (see [Withheld]), nor is what
// git ignores. Methods may be called concurrently; at most four work at a time.
// They wait until the baseline is there.
type Differ struct {
	h   provider.Handle
	o   DiffOptions
	sem chan struct{}

	name  string        // of what it keeps in the sandbox, in part
	ready chan struct{} // closed when what follows is set
	err   error         // ctx ended first
	git   bool          // there is a baseline: an index of its own
	env   []string      // where that index and its objects are
	tmp   string
	head  string

	mu   sync.Mutex
	tree string // of the baseline, once it was wanted
}

const defaultMaxBytes = 1 << 20

// gitTimeout bounds one command of a Differ.
const gitTimeout = 60 * time.Second

// NewDiffer remembers the state of a directory. Where that can't be done, which is
// logged, there is no baseline and every file counts as new. The error is that of
// ctx only.
func NewDiffer(ctx context.Context, h provider.Handle, o DiffOptions) (*Differ, error) {
	d := StartDiffer(ctx, h, o)
	<-d.ready
	if d.err != nil {
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), gitTimeout)
		defer stop()
		if err := d.Close(ctx); err != nil {
			d.o.Logger.Debug("the differ left files behind", "error", d.text(err.Error()))
		}
		return nil, d.err
	}
	return d, nil
}

// StartDiffer is [NewDiffer] for who has something else to do meanwhile: it comes
// back at once. Until [Differ.Ready] nothing may be changed that is to be shown as
// a change, or that is not. The end of ctx gives the baseline up. Close must be
// called in any case, and waits for the baseline.
func StartDiffer(ctx context.Context, h provider.Handle, o DiffOptions) *Differ {
	if o.Root == "" {
		o.Root = h.Root()
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = defaultMaxBytes
	}
	if o.Redact == nil {
		o.Redact = func(s string) string { return s }
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	d := &Differ{h: h, o: o, sem: make(chan struct{}, 4), name: rand.Text(), ready: make(chan struct{})}
	if plainName(o.Name) {
		d.name = o.Name
	}
	go func() {
		defer close(d.ready)
		err := d.baseline(ctx)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			d.err = context.Cause(ctx)
		default:
			d.o.Logger.Debug("there is no git baseline; every changed file counts as new", "root", o.Root, "reason", d.text(err.Error()))
		}
	}()
	return d
}

// plainName says that a name can be a part of a file's.
func plainName(name string) bool {
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return name != ""
}

// Ready waits until the state of the directory is remembered. The error is that of
// ctx, or of the context that the Differ was made with.
func (d *Differ) Ready(ctx context.Context) error {
	select {
	case <-d.ready:
		return d.err
	default:
	}
	select {
	case <-d.ready:
		return d.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// baselineScript makes an index of its own, with everything that is not ignored;
// new objects go to a directory of its own, too. It prints that directory, the
// real object directory, the commit, and the repository where it has the common
// form, which git need not be asked about: what is done before an agent starts is
// waited for, and each process costs a millisecond or more. Copies of an index
// keep its time: git compares whole seconds, and takes a file for unchanged that
// is older than the index. $1 makes the directory's name hard to guess; where it was
// given ($2) a baseline of that name is gone on with, and a half made one is not.
const baselineScript = `set -e
umask 077
T=${TMPDIR:-/tmp}/aisandbox-diff-$1
if [ "$2" ] && [ -f "$T/facts" ]; then exec cat "$T/facts"; fi
G=.git H=
if [ -d $G/objects ] && [ -f $G/HEAD ] && [ ! -e $G/commondir ] && [ ! -e $G/reftable ] && [ ! "$GIT_DIR$GIT_WORK_TREE$GIT_COMMON_DIR$GIT_OBJECT_DIRECTORY$GIT_INDEX_FILE" ]; then
	G=$PWD/.git O=$PWD/.git/objects I=$PWD/.git/index
	read -r H <$G/HEAD || :
	case $H in
	"ref: "*)
		R=${H#ref: } H=
		if [ -f "$G/$R" ]; then read -r H <"$G/$R" || :; elif [ -e $G/packed-refs ]; then H=?; fi ;;
	esac
	export GIT_DIR="$G" GIT_WORK_TREE="$PWD"
	case $H in *[!0-9a-f]*) H=$(git rev-parse --verify --quiet HEAD || :) ;; esac
else
	G=
	{ read -r W && read -r O && read -r I; read -r H || :; } <<-E
		$(git rev-parse --is-inside-work-tree --git-path objects --git-path index HEAD 2>/dev/null || :)
	E
	[ "$W" = true ]
	case $O in /*) ;; *) O=$PWD/$O ;; esac
	case $H in *[!0-9a-f]*) H= ;; esac
fi
if [ "$2" ]; then rm -rf "$T"; fi
mkdir "$T" "$T/objects"
trap 'rm -rf "$T"' EXIT
if [ -f "$I" ]; then cp -p "$I" "$T/index"; fi
export GIT_INDEX_FILE="$T/index" GIT_OBJECT_DIRECTORY="$T/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$O"
git add -A -- . >/dev/null 2>&1 || git add -A --ignore-errors -- . >/dev/null 2>&1 || [ $? = 1 ]
if [ ! -f "$T/index" ]; then git read-tree --empty; fi
if [ "$2" ]; then
	printf '%s\n%s\n%s\n%s\n' "$T" "$O" "$H" "$G" >"$T/new"
	mv "$T/new" "$T/facts"
fi
trap - EXIT
printf '%s\n%s\n%s\n%s\n' "$T" "$O" "$H" "$G"`

// gitEnv keeps git from asking, and from programs and settings of the image that
// would change a diff.
func gitEnv() []string {
	return []string{
		"GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0", "LC_ALL=C",
		"GIT_CONFIG_COUNT=3",
		"GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*",
		"GIT_CONFIG_KEY_1=core.quotepath", "GIT_CONFIG_VALUE_1=off",
		"GIT_CONFIG_KEY_2=core.fsmonitor", "GIT_CONFIG_VALUE_2=false",
	}
}

func (d *Differ) baseline(ctx context.Context) error {
	d.env = gitEnv()
	if d.o.Name != "" && d.name != d.o.Name {
		return fmt.Errorf("name %q: %w", d.o.Name, provider.ErrInvalid)
	}
	out, err := d.run(ctx, 64<<10, "sh", "-c", baselineScript, "sh", d.name, d.o.Name)
	if err != nil {
		return err
	}
	lines := strings.Split(string(out), "\n")
	if len(lines) != 5 || lines[0] == "" {
		return fmt.Errorf("unexpected output %q", out)
	}
	d.tmp, d.head, d.git = lines[0], lines[2], true
	d.env = append(d.env, "GIT_INDEX_FILE="+d.tmp+"/index", "GIT_OBJECT_DIRECTORY="+d.tmp+"/objects",
		"GIT_ALTERNATE_OBJECT_DIRECTORIES="+lines[1])
	if lines[3] != "" {
		d.env = append(d.env, "GIT_DIR="+lines[3], "GIT_WORK_TREE="+d.o.Root)
	}
	return nil
}

// Head is the commit at the baseline; empty where there was none.
func (d *Differ) Head() string {
	<-d.ready
	return d.head
}

// Close removes what the Differ keeps in the sandbox.
func (d *Differ) Close(ctx context.Context) error {
	<-d.ready
	switch {
	case d.git:
		_, err := d.run(ctx, 1<<10, "rm", "-rf", "--", d.tmp)
		return err
	case d.err != nil: // it was killed, and did not clean up
		_, err := d.run(ctx, 1<<10, "sh", "-c", `rm -rf -- "${TMPDIR:-/tmp}/aisandbox-diff-$1"`, "sh", d.name)
		return err
	}
	return nil
}

// runError is a command that ended badly.
type runError struct {
	exit provider.Exit
	text string
}

func (e *runError) Error() string { return strings.TrimSpace(e.exit.String() + ": " + e.text) }

var errTooLarge = errors.New("too large")

// run runs a command in the root and returns its output, of at most max bytes;
// when it is longer, the beginning and errTooLarge.
func (d *Differ) run(ctx context.Context, max int64, argv ...string) ([]byte, error) {
	ctx, stop := context.WithTimeoutCause(ctx, gitTimeout, errors.New("no answer"))
	defer stop()
	select {
	case d.sem <- struct{}{}:
		defer func() { <-d.sem }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	out, errb := &limited{max: int(max)}, &limited{max: 4 << 10}
	p, err := d.h.Start(ctx, provider.Cmd{Argv: argv, Dir: d.o.Root, Env: d.env, Stdout: out, Stderr: errb})
	if err != nil {
		return nil, err
	}
	exit, err := p.Wait()
	switch {
	case err != nil:
		return nil, err
	case exit != (provider.Exit{}):
		return out.buf, &runError{exit, string(errb.buf)}
	case out.over:
		return out.buf, errTooLarge
	}
	return out.buf, nil
}

func (d *Differ) gitCmd(ctx context.Context, args ...string) ([]byte, error) {
	return d.run(ctx, d.o.MaxBytes, append([]string{"git", "--literal-pathspecs"}, args...)...)
}

func (d *Differ) diffArgs(more ...string) []string {
	return append([]string{"diff", "--no-ext-diff", "--no-textconv", "--no-color"}, more...)
}

// rel returns name relative to the root.
func (d *Differ) rel(name string) (string, error) {
	clean := path.Clean(name)
	if !path.IsAbs(clean) {
		clean = path.Join(d.o.Root, clean)
	}
	rest, ok := strings.CutPrefix(clean, strings.TrimSuffix(d.o.Root, "/")+"/")
	if !ok || rest == "" || strings.ContainsRune(name, 0) {
		return "", fmt.Errorf("watch: %q is not below %s: %w", name, d.o.Root, provider.ErrInvalid)
	}
	return rest, nil
}

// text makes bytes fit to be shown.
func (d *Differ) text(s string) string {
	return d.o.Redact(strings.ToValidUTF8(s, "�"))
}

// atBaseline is git's name for a file as it is in the index.
func atBaseline(rel string) string { return ":0:./" + rel }

// Before returns what the file was at the baseline; empty when it was not there.
func (d *Differ) Before(ctx context.Context, name string) (string, error) {
	rel, err := d.rel(name)
	if err == nil {
		err = d.Ready(ctx)
	}
	if err != nil || !d.git || Withheld(rel) {
		return "", err
	}
	out, err := d.gitCmd(ctx, "cat-file", "blob", atBaseline(rel))
	var re *runError
	if errors.As(err, &re) {
		return "", nil // it was not there
	}
	return d.content(out, err)
}

// After returns what the file is now; empty when it is gone, or no regular file.
func (d *Differ) After(ctx context.Context, name string) (string, error) {
	rel, err := d.rel(name)
	if err == nil {
		err = d.Ready(ctx)
	}
	if err != nil || Withheld(rel) {
		return "", err
	}
	out, gone, err := d.read(ctx, rel)
	if gone {
		return "", nil
	}
	return d.content(out, err)
}

// read reads a file of the work tree without following a link.
func (d *Differ) read(ctx context.Context, rel string) (out []byte, gone bool, err error) {
	q := sh.Quote("./" + rel)
	out, err = d.run(ctx, d.o.MaxBytes, provider.Shell("if [ -h "+q+" ]; then printf %s \"$(readlink "+q+")\"; elif [ -f "+q+" ]; then cat "+q+" || { [ -e "+q+" ] && exit 1; exit 44; }; else exit 44; fi")...)
	var re *runError
	if errors.As(err, &re) && re.exit.Code == 44 {
		return nil, true, nil
	}
	return out, false, err
}

func (d *Differ) content(out []byte, err error) (string, error) {
	switch {
	case errors.Is(err, errTooLarge):
		return "", nil
	case err != nil:
		return "", err
	case binary(out):
		return "", nil
	}
	return d.text(string(out)), nil
}

// binary says whether b is no text, as git judges.
func binary(b []byte) bool { return bytes.IndexByte(b[:min(len(b), 8<<10)], 0) >= 0 }

// Diff returns how the file differs from the baseline, as a unified diff; empty
// when it doesn't, and when its content is withheld.
func (d *Differ) Diff(ctx context.Context, name string) (string, error) {
	rel, err := d.rel(name)
	if err == nil {
		err = d.Ready(ctx)
	}
	if err != nil || Withheld(rel) {
		return "", err
	}
	if !d.git {
		return d.added(ctx, rel)
	}
	out, err := d.gitCmd(ctx, d.diffArgs("--", rel)...)
	switch {
	case errors.Is(err, errTooLarge):
		return fmt.Sprintf("diff --git a/%s b/%s\nDiff of more than %d bytes left out\n", rel, rel, d.o.MaxBytes), nil
	case err != nil:
		return "", err
	case len(out) > 0:
		return d.text(string(out)), nil
	}
	// Unchanged, or not known to git. What is known at the baseline is unchanged.
	if _, err := d.gitCmd(ctx, "cat-file", "-e", atBaseline(rel)); err == nil {
		return "", nil
	} else if !isExit(err) {
		return "", err
	}
	switch ignored, err := d.ignored(ctx, rel); {
	case err != nil:
		return "", err // nothing is shown rather than too much
	case ignored:
		return "", nil
	}
	return d.added(ctx, rel)
}

func isExit(err error) bool {
	var re *runError
	return errors.As(err, &re)
}

func (d *Differ) ignored(ctx context.Context, rel string) (bool, error) {
	_, err := d.run(ctx, 1<<10, "git", "check-ignore", "-q", "--", rel)
	var re *runError
	switch {
	case err == nil:
		return true, nil
	case errors.As(err, &re) && re.exit.Code == 1:
		return false, nil
	}
	return false, err
}

// added is the diff of a file that was not there.
func (d *Differ) added(ctx context.Context, rel string) (string, error) {
	out, gone, err := d.read(ctx, rel)
	head := fmt.Sprintf("diff --git a/%s b/%s\nnew file mode 100644\n", rel, rel)
	switch {
	case gone:
		return "", nil
	case errors.Is(err, errTooLarge):
		return head + fmt.Sprintf("File of more than %d bytes left out\n", d.o.MaxBytes), nil
	case err != nil:
		return "", err
	case binary(out) || !utf8.Valid(out):
		return head + fmt.Sprintf("Binary files /dev/null and b/%s differ\n", rel), nil
	case len(out) == 0:
		return head, nil
	}
	text := d.text(string(out))
	lines := strings.SplitAfter(text, "\n")
	noEnd := lines[len(lines)-1] != ""
	if !noEnd {
		lines = lines[:len(lines)-1]
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n", head, rel, len(lines))
	for _, l := range lines {
		b.WriteString("+" + l)
	}
	if noEnd {
		b.WriteString("\n\\ No newline at end of file\n")
	}
	return b.String(), nil
}

// treeScript prints the tree of the baseline, which is $1 where it is known. Then
// it puts everything that is not ignored into a copy of the index and prints that
// one's tree.
const treeScript = `set -e
if [ "$1" ]; then echo "$1"; else git write-tree; fi
N="$GIT_INDEX_FILE.$$"; trap 'rm -f "$N"' EXIT
cp -p "$GIT_INDEX_FILE" "$N"
GIT_INDEX_FILE=$N; export GIT_INDEX_FILE
git add -A -- . >/dev/null 2>&1 || git add -A --ignore-errors -- . >/dev/null 2>&1 || :
git write-tree`

// Tree returns how the whole directory differs from the baseline, new files
// included; empty without git. A diff longer than max bytes is cut at the end of a
// line; 0 is MaxBytes of the options.
func (d *Differ) Tree(ctx context.Context, max int64) (diff string, truncated bool, err error) {
	if err := d.Ready(ctx); err != nil || !d.git {
		return "", false, err
	}
	if max <= 0 {
		max = d.o.MaxBytes
	}
	before, now, err := d.trees(ctx)
	if err != nil {
		return "", false, err
	}
	args := append([]string{"git"}, d.diffArgs(before, now, "--", ".")...)
	for _, p := range withheldGlobs {
		args = append(args, ":(exclude,glob,icase)**/"+p)
	}
	out, err := d.run(ctx, max, args...)
	if errors.Is(err, errTooLarge) {
		truncated, err = true, nil
		out = out[:bytes.LastIndexByte(out, '\n')+1]
	}
	if err != nil {
		return "", false, err
	}
	return d.text(string(out)), truncated, nil
}

// trees returns the trees of the baseline and of now.
func (d *Differ) trees(ctx context.Context) (before, now string, err error) {
	d.mu.Lock()
	before = d.tree
	d.mu.Unlock()
	out, err := d.run(ctx, 1<<10, "sh", "-c", treeScript, "sh", before)
	if err != nil {
		return "", "", err
	}
	f := strings.Fields(string(out))
	if len(f) != 2 {
		return "", "", fmt.Errorf("watch: unexpected output %q", out)
	}
	d.mu.Lock()
	d.tree = f[0]
	d.mu.Unlock()
	return f[0], f[1], nil
}

// withheldGlobs are the names of files that usually hold secrets (spec 05 §15.3).
var withheldGlobs = []string{".env*", "*.pem", "id_*", ".npmrc", ".netrc"}

// Withheld says whether the content of a file is never shown, by its name.
func Withheld(name string) bool {
	base := strings.ToLower(path.Base(name))
	for _, g := range withheldGlobs {
		if ok, _ := path.Match(g, base); ok {
			return true
		}
	}
	return false
}
