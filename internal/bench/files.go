//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	manyFiles = 10_000
	fileBytes = 1 << 10
)

// manyFilesTar is an archive of small files in a hundred directories below dir.
func manyFilesTar(dir string) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	body := bytes.Repeat([]byte("0123456789abcdef"), fileBytes/16)
	add := func(h *tar.Header, body []byte) error {
		h.ModTime = time.Unix(1_700_000_000, 0)
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(body)
		return err
	}
	for i := range manyFiles {
		sub := path.Join(dir, fmt.Sprintf("d%02d", i/100))
		if i == 0 && dir != "" {
			if err := add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, nil); err != nil {
				return nil, err
			}
		}
		if i%100 == 0 {
			if err := add(&tar.Header{Typeflag: tar.TypeDir, Name: sub + "/", Mode: 0o755}, nil); err != nil {
				return nil, err
			}
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%s/f%05d", sub, i), Mode: 0o644, Size: fileBytes}
		if err := add(h, body); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// checkTar makes sure that an archive has all the files.
func checkTar(archive io.Reader) error {
	n := 0
	for r := tar.NewReader(archive); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeReg && h.Size == fileBytes {
			n++
		}
	}
	if n != manyFiles {
		return fmt.Errorf("the archive has %d files, want %d", n, manyFiles)
	}
	return nil
}

func filesDocker(ctx context.Context, e *env) ([]Row, error) {
	b, err := e.box(ctx, "docker")
	if err != nil {
		return nil, err
	}
	defer b.destroy()
	arch, ok := provider.As[provider.Archiver](b.Handle)
	if !ok {
		return nil, fmt.Errorf("the sandbox moves no archives: no guest runs in it")
	}
	id := b.Ref().ID
	archive, err := manyFilesTar("")
	if err != nil {
		return nil, err
	}
	// Each goes into a new directory, and nothing is deleted before the end: ext4
	// avoids numbers of files that were deleted seconds ago, and looking for others
	// then takes more time than all the rest.
	n := 0
	var ours, theirs string
	in, err := interleave(ctx, e.rounds(5),
		side{do: func(ctx context.Context) (time.Duration, error) {
			n++
			ours = path.Join(b.Root(), fmt.Sprintf("guest-%d", n))
			return timed(func(ctx context.Context) error { return arch.TarIn(ctx, ours, bytes.NewReader(archive)) })(ctx)
		}},
		side{do: func(ctx context.Context) (time.Duration, error) {
			n++
			theirs = path.Join(b.Root(), fmt.Sprintf("engine-%d", n))
			named, err := manyFilesTar(path.Base(theirs)) // the engine wants a directory that exists
			if err != nil {
				return 0, err
			}
			return timed(func(ctx context.Context) error {
				_, err := e.engine.CopyToContainer(ctx, id, client.CopyToContainerOptions{DestinationPath: b.Root(), Content: bytes.NewReader(named)})
				return err
			})(ctx)
		}})
	if err != nil {
		return nil, err
	}
	var got bytes.Buffer
	out, err := interleave(ctx, e.rounds(10),
		side{do: checked(&got, func(ctx context.Context) error {
			return arch.TarOut(ctx, ours, &got, provider.TarOptions{})
		})},
		side{do: checked(&got, func(ctx context.Context) error {
			res, err := e.engine.CopyFromContainer(ctx, id, client.CopyFromContainerOptions{SourcePath: theirs})
			if err != nil {
				return err
			}
			defer res.Content.Close()
			_, err = io.Copy(&got, res.Content)
			return err
		})})
	if err != nil {
		return nil, err
	}
	rin := Row{Metric: "10,000 files of 1 KiB into a container", Unit: "ms", Ours: millis(in[0]), Baseline: "engine archive PUT", Base: millis(in[1])}
	rin.atMost(2000)
	rout := Row{Metric: "10,000 files of 1 KiB out of a container", Unit: "ms", Ours: millis(out[0]), Baseline: "engine archive GET", Base: millis(out[1])}
	rout.atMost(1000)
	return []Row{rin, rout}, nil
}

// checked times do, which fills got, and looks afterwards whether all is there.
func checked(got *bytes.Buffer, do func(ctx context.Context) error) op {
	return func(ctx context.Context) (time.Duration, error) {
		got.Reset()
		t, err := timed(do)(ctx)
		if err != nil {
			return t, err
		}
		return t, checkTar(bytes.NewReader(got.Bytes()))
	}
}
