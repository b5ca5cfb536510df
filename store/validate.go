package store

import (
	"strconv"
	"strings"
)

// Validate checks what every store refuses, with an [*InvalidError].
func (n NewRun) Validate() error {
	for _, f := range []struct {
		name, id string
	}{{"NewRun.ID", n.ID}, {"NewRun.Thread.ID", n.Thread.ID}} {
		if f.id == "" {
			return &InvalidError{f.name, "is empty"}
		}
		if strings.ContainsAny(f.id, "\r\n\x00") {
			return &InvalidError{f.name, "has a line break or a NUL byte: use an id of one line"}
		}
	}
	switch n.Kind {
	case "", KindChat, KindSandbox:
		return nil
	}
	return &InvalidError{"NewRun.Kind", "is " + strconv.Quote(string(n.Kind)) + ": use sandbox or chat"}
}

// Validate checks what every store refuses, with an [*InvalidError].
func (f Final) Validate() error {
	switch f.Status {
	case Completed, Aborted, Interrupted:
	case Failed:
		if f.Error == nil || f.Error.Code == "" {
			return &InvalidError{"Final.Error", "is missing, or has no code: a failure must say why"}
		}
	default:
		return &InvalidError{"Final.Status", "is " + strconv.Quote(string(f.Status)) + ": use completed, failed, aborted or interrupted"}
	}
	if f.Batch.No == 0 && len(f.Batch.Events) > 0 {
		return &InvalidError{"Final.Batch.No", "is 0 although there are events"}
	}
	return nil
}

// Validate checks what every store refuses, with an [*InvalidError].
func (i Instance) Validate() error {
	switch {
	case i.Key == "" || strings.Contains(i.Key, "\x00"):
		return &InvalidError{"Instance.Key", "is empty or has a NUL byte"}
	case i.Gen < 0:
		return &InvalidError{"Instance.Gen", "is negative"}
	case i.Provider == "":
		return &InvalidError{"Instance.Provider", "is empty"}
	}
	switch i.State {
	case InstanceCreating, InstanceReady, InstanceDestroying, InstanceDestroyed, InstanceLost:
	default:
		return &InvalidError{"Instance.State", "is " + strconv.Quote(string(i.State)) + ": name one of the states"}
	}
	switch i.Desired {
	case "", DesiredReady, DesiredDestroyed:
		return nil
	}
	return &InvalidError{"Instance.Desired", "is " + strconv.Quote(string(i.Desired)) + ": use ready or destroyed"}
}
