package conns

import (
	"context"
	"net"
	"sync"
)

// Dial is the function by which a client dials, as an http.Transport has it.
type Dial = func(ctx context.Context, network, addr string) (net.Conn, error)

// Dialed are the connections of a client, so that its end can be theirs: net/http keeps those of a Transport that are
// idle, cannot close those whose last request is just ending, and goes on with a dial whose request has given up. The
// zero value has none. It is safe for concurrent use.
type Dialed struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
	over context.Context // done with the next Close, and from End on; nil if there was no dial since the last Close
	end  context.CancelCauseFunc
}

// Dial returns dial with its connections in d.
func (d *Dialed) Dial(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		d.mu.Lock()
		over := d.now()
		d.mu.Unlock()
		if over.Err() != nil {
			return nil, context.Cause(over)
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(over, cancel)()
		raw, err := dial(ctx, network, addr)
		d.mu.Lock()
		defer d.mu.Unlock()
		switch {
		case over.Err() != nil:
			if err == nil {
				_ = raw.Close()
			}
			return nil, &net.OpError{Op: "dial", Net: network, Err: context.Cause(over)}
		case err != nil:
			return nil, err
		}
		if d.open == nil {
			d.open = map[net.Conn]struct{}{}
		}
		d.open[raw] = struct{}{}
		return &closer{raw, func() { d.forget(raw) }}, nil
	}
}

// now returns what is done when d is closed next; d.mu is held.
func (d *Dialed) now() context.Context {
	if d.over == nil {
		d.over, d.end = context.WithCancelCause(context.Background())
	}
	return d.over
}

// Close closes the connections that there are, and ends the dials that are under way, with net.ErrClosed. Later ones
// are not affected.
func (d *Dialed) Close() { d.close(net.ErrClosed) }

// End is Close, for good: what is dialed later fails with err.
func (d *Dialed) End(err error) { d.close(err) }

func (d *Dialed) close(err error) {
	d.mu.Lock()
	over := d.now()
	d.end(err)
	if context.Cause(over) == net.ErrClosed { // and not that of End
		d.over, d.end = nil, nil
	}
	open := d.open
	d.open = nil
	d.mu.Unlock()
	for c := range open {
		_ = c.Close() // below TLS, which would wait to say that it ends
	}
}

func (d *Dialed) forget(c net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, c)
}
