package store_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Codes go to clients: they never change.
func TestCodes(t *testing.T) {
	for _, tt := range []struct {
		err  error
		is   error
		code string
	}{
		{store.ErrNotFound, store.ErrNotFound, "not_found"},
		{store.ErrConflict, store.ErrConflict, "conflict"},
		{store.ErrFenced, store.ErrFenced, "claim_lost"},
		{store.ErrSealed, store.ErrSealed, "log_closed"},
		{store.ErrUnavailable, store.ErrUnavailable, "store_unavailable"},
		{&store.NotFoundError{What: "run", ID: "r"}, store.ErrNotFound, "not_found"},
		{&store.BusyError{}, store.ErrConflict, "thread_busy"},
		{&store.RunConflictError{}, store.ErrConflict, "run_conflict"},
		{&store.ClaimError{Reason: store.ClaimHeld}, store.ErrConflict, "claim_not_acquired"},
		{&store.ClaimError{Reason: store.ClaimUnknown}, store.ErrNotFound, "claim_not_acquired"},
		{&store.ClaimError{Reason: store.ClaimTerminal}, store.ErrSealed, "claim_not_acquired"},
		{&store.FencedError{}, store.ErrFenced, "claim_lost"},
		{&store.SealedError{}, store.ErrSealed, "log_closed"},
		{&store.BatchError{}, store.ErrConflict, "batch_out_of_order"},
		{&store.WatermarkError{}, store.ErrConflict, "replay_diverged"},
		{&store.OffsetError{Reason: store.OffsetExpired}, nil, "log_expired"},
		{&store.OffsetError{Reason: store.OffsetRewound}, nil, "log_rewound"},
		{&store.OffsetError{Reason: store.OffsetInvalid}, nil, "offset_invalid"},
		{&store.OffsetError{Reason: store.OffsetRunMismatch}, nil, "offset_run_mismatch"},
		{&store.InstanceError{}, store.ErrConflict, "instance_conflict"},
		{&store.HeldError{}, store.ErrConflict, "lease_held"},
		{&store.LeaseLostError{}, store.ErrFenced, "claim_lost"},
		{&store.InterruptError{}, store.ErrConflict, "conflict"},
		{&store.InvalidError{}, nil, "invalid"},
	} {
		err := fmt.Errorf("wrapped: %w", tt.err)
		if tt.is != nil && !errors.Is(err, tt.is) {
			t.Errorf("%T is not %v", tt.err, tt.is)
		}
		if got := store.Code(err, "?"); got != tt.code {
			t.Errorf("%T: code %q, want %q", tt.err, got, tt.code)
		}
		for _, other := range []error{store.ErrFenced, store.ErrSealed, store.ErrUnavailable} {
			if other != tt.is && errors.Is(err, other) {
				t.Errorf("%T is also %v", tt.err, other)
			}
		}
	}
	if got := store.Code(errors.New("x"), "internal"); got != "internal" {
		t.Errorf("fallback %q", got)
	}
}

func TestHoldKeepsAndGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		held, release, err := store.Hold(t.Context(), s.Leases, "k", "a", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan time.Duration)
		began := time.Now()
		go func() {
			_, release, err := store.Hold(t.Context(), s.Leases, "k", "b", time.Second)
			if err != nil {
				t.Error(err)
			}
			got <- time.Since(began)
			_ = release()
		}()
		time.Sleep(time.Hour) // renewed all along
		if held.Err() != nil {
			t.Error(context.Cause(held))
		}
		for range 2 {
			if err := release(); err != nil {
				t.Error(err)
			}
		}
		if d := <-got; d < time.Hour || d > time.Hour+250*time.Millisecond {
			t.Errorf("the next one had it after %v", d)
		}
		if held.Err() == nil {
			t.Error("the context of a lease that was given back goes on")
		}
	})
}

func TestHoldWaitsNoLongerThanItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		if _, err := s.Leases.Acquire(t.Context(), "k", "a", time.Hour); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _, err := store.Hold(ctx, s.Leases, "k", "b", 0)
		var h *store.HeldError
		if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &h) || h.Owner != "a" {
			t.Errorf("got %v", err)
		}
	})
}

// broken is a Leaser whose renewals fail.
type broken struct {
	store.Leaser
	err error
}

func (b broken) Renew(context.Context, store.Lease, time.Duration) (store.Lease, error) {
	return store.Lease{}, b.err
}

func TestHoldTellsOfALoss(t *testing.T) {
	for _, tt := range []struct {
		err   error
		after time.Duration
	}{
		{&store.LeaseLostError{Key: "k"}, time.Second},
		{store.ErrUnavailable, 3 * time.Second}, // until the lease has run out for sure
	} {
		synctest.Test(t, func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			held, release, err := store.Hold(t.Context(), broken{s.Leases, tt.err}, "k", "a", 3*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			<-held.Done()
			if !errors.Is(context.Cause(held), store.ErrFenced) || time.Since(began) != tt.after {
				t.Errorf("after %v: %v", time.Since(began), context.Cause(held))
			}
			if err := release(); !errors.Is(err, store.ErrFenced) {
				t.Errorf("release: %v", err)
			}
		})
	}
}

// flaky is a Leaser that can't be reached every other time.
type flaky struct {
	store.Leaser
	n *int
}

func (f flaky) Renew(ctx context.Context, l store.Lease, ttl time.Duration) (store.Lease, error) {
	if *f.n++; *f.n%2 == 0 {
		return store.Lease{}, store.ErrUnavailable
	}
	return f.Leaser.Renew(ctx, l, ttl)
}

func TestHoldOutlastsOneFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		held, release, err := store.Hold(t.Context(), flaky{s.Leases, new(int)}, "k", "a", 3*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if held.Err() != nil {
			t.Error(context.Cause(held))
		}
		if err := release(); err != nil {
			t.Error(err)
		}
	})
}

// The work under a lease may have to clean up after its context is done: nobody
// else gets in before it gave the lease back.
func TestHoldOutlivesItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		ctx, cancel := context.WithCancel(t.Context())
		held, release, err := store.Hold(ctx, s.Leases, "k", "a", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		<-held.Done()
		time.Sleep(time.Minute)
		if _, err := s.Leases.Acquire(t.Context(), "k", "b", time.Second); !errors.Is(err, store.ErrConflict) {
			t.Errorf("somebody else got in: %v", err)
		}
		if err := release(); err != nil {
			t.Error(err)
		}
		if _, err := s.Leases.Acquire(t.Context(), "k", "b", time.Second); err != nil {
			t.Error(err)
		}
	})
}
