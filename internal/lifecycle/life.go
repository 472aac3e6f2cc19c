// Package lifecycle starts, runs and stops background work, such as keeping a source of identities current. Such
// packages build their methods Run, Ready and Close and their functions Start on a [Life], so that these mean the same
// everywhere:
//
//   - Run blocks. It returns nil after a clean stop, which is the end of its context or Close, and an error only if
//     the work cannot go on.
//   - Start is Run in a goroutine, and returns after the first success. Its context bounds the start and not the work.
//   - Ready, by [Life.Await], waits for that success.
//   - Close ends the work for good, and waits for it.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// The reasons why no work is running.
var (
	ErrNotStarted = errors.New("this program has neither called Start nor Run, so nothing was tried")
	ErrEnded      = errors.New("Run has ended, so nothing is tried any more")
	ErrClosed     = errors.New("it was closed by this program")
	ErrRunning    = errors.New("it is already running: Start and Run are alternatives")
)

// Life is the state of background work. The zero Life has not started. Its methods are safe for concurrent use.
type Life struct {
	mu      sync.Mutex
	ever    bool // Run was called
	closed  bool
	err     error              // the error of the work, if it does not run
	cancel  context.CancelFunc // not nil while the work runs
	stopped chan struct{}      // closed when it has ended
	news    renew.Signal       // when the work ends, and at Close
}

// Run calls work in this goroutine, with a context that ends with ctx or with Close. It returns nil if one of them
// ended the work, and the error of work otherwise. It returns ErrRunning if another call is under way, and ErrClosed
// after Close. Otherwise it may be called again after it has returned.
func (l *Life) Run(ctx context.Context, work func(context.Context) error) error {
	inner, err := l.begin(ctx)
	if err != nil {
		return err
	}
	return l.do(inner, work)
}

// RunAs is [Life.Run] with errors that begin with name.
func (l *Life) RunAs(ctx context.Context, name string, work func(context.Context) error) error {
	if err := l.Run(ctx, work); err != nil {
		return fmt.Errorf("%s: run: %w", name, err)
	}
	return nil
}

func (l *Life) begin(ctx context.Context) (context.Context, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, ErrClosed
	case l.cancel != nil:
		return nil, ErrRunning
	}
	inner, cancel := context.WithCancel(ctx)
	l.ever, l.err, l.cancel, l.stopped = true, nil, cancel, make(chan struct{})
	return inner, nil
}

func (l *Life) do(inner context.Context, work func(context.Context) error) (err error) {
	defer func() { // even if work panics or calls runtime.Goexit, so that Close does not wait forever
		l.mu.Lock()
		l.cancel()
		l.cancel, l.err = nil, err
		close(l.stopped)
		l.news.Notify()
		l.mu.Unlock()
	}()
	if err := work(inner); inner.Err() == nil {
		return err
	}
	return nil
}

// Start runs work in a goroutine, until Close, and returns once ready does. The end of ctx ends ready but not the
// work; both get the values of ctx. If ready fails, Start closes the Life and returns the error of ready. ready should
// wait with [Life.Await], which returns early if work fails.
func (l *Life) Start(ctx context.Context, work, ready func(context.Context) error) error {
	inner, err := l.begin(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	go func() { _ = l.do(inner, work) }() // Await and Idle return its error
	if err := ready(ctx); err != nil {
		_ = l.Close()
		return err
	}
	return nil
}

// Started is [Life.Start] for a Start function: it returns s once s is ready, and closes s if it fails.
func Started[S interface {
	Ready(context.Context) error
	Close() error
}](ctx context.Context, s S, l *Life, work func(context.Context) error) (started S, err error) {
	if err := l.Start(ctx, work, s.Ready); err != nil {
		if end := s.Close(); end != nil {
			err = errors.Join(err, end)
		}
		return started, err
	}
	return s, nil
}

// Close ends the work for good and waits until it has ended. Further calls do nothing. The work itself must not call
// Close, which would wait for it. The error is always nil; it makes an owner an io.Closer.
func (l *Life) Close() error {
	l.mu.Lock()
	l.closed = true
	l.news.Notify()
	stopped := l.stopped
	if l.cancel != nil {
		l.cancel()
	}
	l.mu.Unlock()
	if stopped != nil {
		<-stopped
	}
	return nil
}

// Await returns nil once look returns true. It calls look first, and then whenever the channel that changed returned
// before is closed, or the work ends. If the work fails first, Await returns its error; after Close it returns
// ErrClosed; otherwise the error is the cause of ctx. Await also waits for work that has not started or has ended
// without an error, because it may be started again.
func (l *Life) Await(ctx context.Context, changed func() <-chan struct{}, look func() bool) error {
	for {
		news, end := changed(), l.news.Changed()
		over := l.over() // before look, so that look sees the last result of the work
		switch {
		case look():
			return nil
		case over != nil:
			return over
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		select {
		case <-news:
		case <-end:
		case <-ctx.Done():
		}
	}
}

// Ready is [Life.Await] for a method Ready: it returns the error of notReady and, unless that includes it, why the
// wait ended.
func (l *Life) Ready(ctx context.Context, changed func() <-chan struct{}, look func() bool,
	notReady func() error) error {
	err := l.Await(ctx, changed, look)
	if err == nil {
		return nil
	}
	why := notReady()
	if errors.Is(why, err) {
		return why
	}
	return fmt.Errorf("%w; waited for it: %w", why, err)
}

// NotReady returns the error of the component name while it is not ready. It wraps [spiffe.ErrNotReady], the error of
// [Life.Idle] and cause. Without a cause its text is waiting, unless the work has not started or was closed.
func (l *Life) NotReady(name string, cause error, waiting string) error {
	idle := l.Idle()
	if cause == nil && (idle == nil || errors.Is(idle, ErrEnded)) {
		cause = errors.New(waiting)
	}
	switch {
	case idle == nil:
	case cause == nil || errors.Is(idle, cause):
		cause = idle
	default:
		cause = fmt.Errorf("%w; %w", idle, cause)
	}
	return fmt.Errorf("%s: %w: %w", name, spiffe.ErrNotReady, cause)
}

// over returns why waiting is pointless, or nil.
func (l *Life) over() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	return l.err
}

// Idle returns why no work is running: nil while the work runs, otherwise ErrClosed, ErrEnded with the error of the
// work, or ErrNotStarted.
func (l *Life) Idle() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case l.cancel != nil:
		return nil
	case l.err != nil:
		return fmt.Errorf("%w: %w", ErrEnded, l.err)
	case l.ever:
		return ErrEnded
	}
	return ErrNotStarted
}
