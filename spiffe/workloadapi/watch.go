package workloadapi

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"
)

// The waits between two streams (WAPI-18), and the one for a first response.
const (
	firstWait    = time.Second
	lastWait     = 30 * time.Second
	shortestWait = 50 * time.Millisecond
	silenceLimit = 2 * time.Minute // a server answers at once (WAPI-7), but may have to find out who is asking
	patience     = 8               // bad responses in a row after which a stream is given up
)

// backoff plans the next stream after one has ended.
type backoff struct {
	failures int       // streams in a row without a good message
	leapt    time.Time // when the last reconnect without a wait was
}

// next returns how long to wait. A stream that had brought something is followed by the next one at
// once (AMB-10), unless the server denied it, and unless that happened a moment ago: a server that
// answers and hangs up must not keep us busy. Otherwise the wait is exponential with full jitter
// from u, in [0,1), and only a good message sets it back.
func (b *backoff) next(good, denied bool, now time.Time, u float64) time.Duration {
	if good {
		b.failures = 0
		if !denied && now.Sub(b.leapt) >= firstWait {
			b.leapt = now
			return 0
		}
	}
	step := lastWait
	if b.failures < 5 {
		step = min(firstWait<<b.failures, lastWait)
	}
	b.failures++
	return shortestWait + time.Duration(u*float64(step-shortestWait))
}

var (
	errSilent   = errors.New("the server did not answer within 2 minutes")
	errEnded    = errors.New("the server ended the stream")
	errNonsense = errors.New("the server sends nothing but bad responses; the stream was given up")
)

// watch is a stream that is opened again and again.
type watch[U any] struct {
	client  *Client
	name    string // of the RPC
	request *raw
	read    func(data []byte) (U, error) // makes an update of a response, which it may remember
	forget  func()                       // what read remembers
}

// run yields updates and errors until ctx is done, the caller has enough, or a final error.
func (w *watch[U]) run(ctx context.Context, yield func(U, error) bool) {
	var none U
	var b backoff
	for ctx.Err() == nil {
		good, over, err := w.stream(ctx, yield)
		if over || ctx.Err() != nil {
			return
		}
		denied := errors.Is(err, ErrDenied)
		if denied {
			w.forget()
		}
		if !err.Final {
			err.RetryIn = b.next(good, denied, time.Now(), rand.Float64())
		}
		if !yield(none, err) || err.Final {
			return
		}
		if err.RetryIn > 0 {
			t := time.NewTimer(err.RetryIn)
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
			}
		}
	}
}

// stream runs one stream to its end. It reports whether a message on it was good, and whether the
// caller has had enough. A stream that is given up counts as one without a good message.
func (w *watch[U]) stream(ctx context.Context, yield func(U, error) bool) (good, over bool, _ *Error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(silenceLimit, func() { cancel(errSilent) })
	defer silence.Stop()
	fail := func(err error) *Error {
		if context.Cause(ctx) == errSilent {
			err = errSilent
		}
		return w.client.failure(w.name, err)
	}

	s, err := w.client.rpc(w.client.maxMessage).Stream(ctx, w.name, metadata(), w.request.b)
	if err != nil {
		return false, false, fail(err)
	}
	defer func() {
		cancel(nil)
		_ = s.Close()
	}()
	for bad := 0; ; {
		data, err := s.Receive()
		if err == io.EOF {
			return good, false, w.client.failure(w.name, errEnded)
		}
		if err != nil {
			return good, false, fail(err)
		}
		silence.Stop()
		u, err := w.read(data)
		if err != nil {
			var none U
			if !yield(none, w.client.badResponse(w.name, err)) {
				return good, true, nil
			}
			if bad++; bad == patience {
				return false, false, w.client.failure(w.name, errNonsense)
			}
			continue
		}
		good, bad = true, 0
		if !yield(u, nil) {
			return good, true, nil
		}
	}
}
