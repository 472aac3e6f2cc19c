package conns

import (
	"context"
	"net"
	"sync"
)

// Dial is a function by which a client dials, as in http.Transport.
type Dial = func(ctx context.Context, network, addr string) (net.Conn, error)

// Dialed tracks the connections of a client, to close them with the client: net/http keeps idle connections of a
// Transport, cannot close a connection whose last request is just ending, and goes on with a dial whose request has
// given up. The zero value has no connections. It is safe for concurrent use.
type Dialed struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
	over context.Context // done with the next Close, or after End; nil if there was no dial since the last Close
	end  context.CancelCauseFunc
}

// Dial returns a function that dials with dial and tracks the connections in d.
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

// now returns the context that ends when d is closed next; d.mu is held.
func (d *Dialed) now() context.Context {
	if d.over == nil {
		d.over, d.end = context.WithCancelCause(context.Background())
	}
	return d.over
}

// Close closes the open connections and ends the dials under way with net.ErrClosed. Later dials are not affected.
func (d *Dialed) Close() { d.End(net.ErrClosed) }

// End is like Close, but permanent: later dials fail with err.
func (d *Dialed) End(err error) {
	d.mu.Lock()
	over := d.now()
	d.end(err)
	if context.Cause(over) == net.ErrClosed { // closed by Close, not End
		d.over, d.end = nil, nil
	}
	open := d.open
	d.open = nil
	d.mu.Unlock()
	for c := range open {
		_ = c.Close() // below TLS, whose Close would wait to send an alert
	}
}

func (d *Dialed) forget(c net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, c)
}
