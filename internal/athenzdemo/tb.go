package athenzdemo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
)

// tb is a testing.TB outside of a test, for the fakes that take one. It has what they call, and no more.
type tb struct {
	testing.TB
	ctx context.Context

	mu       sync.Mutex
	failure  error
	cleanups []func()
}

// outside calls f, which may end as a test does, then what it has left for the end, and returns the first failure.
func outside(ctx context.Context, f func(t testing.TB)) error {
	ctx, cancel := context.WithCancel(ctx)
	t := &tb{ctx: ctx}
	ended := make(chan struct{})
	go func() { // Fatalf ends the goroutine
		defer close(ended)
		f(t)
	}()
	<-ended
	cancel()
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failure
}

func (t *tb) Helper() {}

func (t *tb) Context() context.Context { return t.ctx }

func (t *tb) Cleanup(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

func (t *tb) Errorf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failure = errors.Join(t.failure, fmt.Errorf(format, args...))
}

func (t *tb) Fatalf(format string, args ...any) {
	t.Errorf(format, args...)
	runtime.Goexit()
}

func (t *tb) TempDir() string {
	dir, err := os.MkdirTemp("", "athenz")
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
