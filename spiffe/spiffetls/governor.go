package spiffetls

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Governor ends connections whose proof no longer holds. A handshake proves a peer once; a Governor judges every open
// connection again, with the same [spiffe.Verifier], when a bundle or a policy changes, and ends it before the proof
// expires. Name it in a [Config] and run it:
//
//	g := &spiffetls.Governor{}
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: source, Peers: source, Allow: allow, Governor: g})
//	…
//	go g.Run(ctx) // in a group that waits for it
//
// # When
//
// A change of a source with a method Changed() <-chan struct{} is noticed within a second, and any other change after
// at most Interval. A connection whose proof no longer holds is drained after a random part of
// Jitter, and cut Grace later: within Interval + Jitter + Grace, or 1 second + Jitter + Grace if the source has
// Changed. A peer that is trusted again before it is drained stays. A source that fails ends no connection.
//
// No connection outlives its proof. Draining begins Grace and a random part of Jitter before [spiffe.Peer.NotAfter].
// A connection made later than that is not drained, so that a peer with little lifetime left can work, and is cut
// when the proof expires. A client without a certificate has no proof that could expire. A server also drains before
// the certificate that it has presented expires, so that clients reconnect before their own Governor cuts them off.
//
// These times count from the moment at which Run notices, on a computer that is not overloaded.
//
// # How
//
// Draining closes an idle connection at once. In a server of [Endpoint.ConfigureServer] net/http reports which
// connections are idle; an HTTP/2 connection counts as idle after a second. A busy connection gets "Connection:
// close" on its next response, which ends an HTTP/1.1 connection after the response, and makes an HTTP/2 connection
// send GOAWAY and end with its last request. After Grace it is cut.
//
// In a [Endpoint.Transport] net/http reports nothing. A connection counts as idle if no byte has moved for five
// seconds and the last ones came in, so a request that waits longer than that for the next byte of its response may
// be cut before the end of Grace.
//
// The Governor does not know the use of a connection from [Endpoint.Listener], or of a connection that a handler has
// hijacked: it is cut after Grace. A program that knows the protocol can end such a connection itself: if it passes
// [Endpoint.Client] or [Endpoint.Server] a connection with a method Drain(), the Governor calls that once when
// draining begins. Drain must not block. Package spiffegrpc uses this.
//
// A connection is cut without a TLS close_notify, as sending one can block. HTTP detects a truncated message by
// itself.
//
// # What it costs
//
// One goroutine for all connections, which looks at the sources each second, and some 300 bytes for each connection.
// All are judged again when a source has changed or a connection was added. That takes less than a microsecond for
// each connection if its bundle has not changed, and about a tenth of a millisecond if it has. The Governor keeps no
// connection alive.
//
// The zero Governor is ready to use. A Governor is safe for concurrent use and may be shared by servers and
// transports. It must not be copied, and its fields must not change once it is in use.
type Governor struct {
	// Interval is how often all connections are judged, and so the longest time after which a change of a source
	// without a Changed method is noticed. 0 or less means one minute.
	Interval time.Duration

	// Grace is how long a draining connection may finish its requests. 0 means 30 seconds and less than
	// 0 none.
	Grace time.Duration

	// Jitter spreads the ends of connections: each end moves by a random part of it, so that their peers do not
	// all reconnect at once. 0 means 10 seconds and less than 0 none.
	Jitter time.Duration

	running atomic.Bool

	mu      sync.Mutex
	conns   map[any]*governed // by the key of their link
	added   bool              // a connection, since all were judged
	endedBy map[string]uint64
}

const (
	governorPause = time.Second     // between two looks at the sources, and at draining connections
	quiet         = time.Second     // after which HTTP/2 of a server has flushed its responses
	silence       = 5 * time.Second // after which a client's connection is idle
)

// The values of the fields, with their defaults.
func (g *Governor) interval() time.Duration { return cmp.Or(max(0, g.Interval), time.Minute) }
func (g *Governor) grace() time.Duration    { return max(0, cmp.Or(g.Grace, 30*time.Second)) }

// governed is one connection.
type governed struct {
	e      *Endpoint
	role   spiffe.Role // of the peer
	remote string
	proof
	link   link
	since  time.Time
	spread time.Duration // the random part of Jitter

	// Only Run's goroutine uses these, once the connection is added. Others read the cause, under the Governor's lock.
	cause  string    // while it is draining: the reason as a label
	at     time.Time // when to drain it or, while it is draining, when to cut it
	reason error     // why it is drained; nil while the proof holds
}

// link ends a connection. Its methods never wait.
type link interface {
	key() any // no other connection has it
	drain()   // begins to end the connection, before it is asked whether it is idle
	cut()
	idle() bool
}

// govern puts a connection under the Governor, if there is one. The Governor judges it once more, as the sources may
// have changed since the handshake.
func (e *Endpoint) govern(l link, role spiffe.Role, remote string, p proof) {
	g, now := e.config.Governor, time.Now()
	if g == nil {
		return
	}
	c := &governed{
		e: e, role: role, remote: remote, proof: p, link: l, since: now,
		spread: time.Duration(rand.Float64() * float64(max(0, cmp.Or(g.Jitter, 10*time.Second)))),
	}
	c.at = g.farewell(c, now)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conns == nil {
		g.conns, g.endedBy = map[any]*governed{}, map[string]uint64{}
	}
	g.conns[l.key()], g.added = c, true
}

// remove forgets the connection with the key, if there is one. A nil Governor has none.
func (g *Governor) remove(key any) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.conns[key]
	if c == nil {
		return
	}
	delete(g.conns, key)
	if c.cause != "" {
		g.endedBy[c.cause]++
	}
}

// all returns the connections at this moment, and whether any was added since the last call.
func (g *Governor) all() (all []*governed, added bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	added, g.added = g.added, false
	return slices.Collect(maps.Values(g.conns)), added
}

// Run judges and ends connections until ctx is done, and then returns nil. Connections stay open
// when it returns. Only one call may run at a time.
func (g *Governor) Run(ctx context.Context) error {
	if !g.running.CompareAndSwap(false, true) {
		return errors.New("spiffetls: governor: Run is running already")
	}
	defer g.running.Store(false)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var (
		changes     []<-chan struct{} // of all sources, from before they were last asked
		last, round time.Time         // when all connections were judged, and will be if nothing changes
	)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		now := time.Now()
		all, added := g.all()
		if added || slices.ContainsFunc(changes, closed) {
			round = last.Add(governorPause)
		}
		if !round.After(now) {
			changes = changesOf(all)
			last, round = now, now.Add(g.interval())
			for _, c := range all {
				g.judge(c)
			}
		}
		timer.Reset(time.Until(g.act(all, round)))
	}
}

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// changesOf returns the channels that are closed when a source of a connection changes.
func changesOf(conns []*governed) (all []<-chan struct{}) {
	endpoints := map[*Endpoint]bool{}
	for _, c := range conns {
		endpoints[c.e] = true
	}
	for e := range endpoints {
		for _, source := range e.sources {
			if s, ok := source.(interface{ Changed() <-chan struct{} }); ok {
				all = append(all, s.Changed())
			}
		}
	}
	return all
}

// judge decides about a connection, unless it is draining.
func (g *Governor) judge(c *governed) {
	if c.cause != "" {
		return
	}
	p, err := c.e.judge(c.chain, c.role, c.name, c.addr)
	now := time.Now()
	switch {
	case err == nil:
		c.peer, c.notAfter = p.peer, p.notAfter // perhaps by another path with another expiry
		c.reason, c.at = nil, g.farewell(c, now)
	case undecided(err):
		c.e.log.Warn("spiffetls: a connection cannot be judged and stays open", reasonFor(err), c.attrs(err)...)
	case c.reason == nil:
		c.reason, c.at = err, earlier(now.Add(c.spread), c.end(now))
	}
}

func (c *governed) attrs(err error) []slog.Attr {
	return []slog.Attr{
		slog.String("peer", c.proof.String()), slog.String("remote", c.remote),
		slog.String("side", sides[c.role == spiffe.ClientRole]), slog.Any("err", err),
	}
}

// undecided reports whether err only means that the source of bundles, roots or policies failed.
func undecided(err error) bool {
	reason := reasonFor(err)
	return reason == "no_bundle" || reason == "no_roots" || reason == "denied" && !errors.Is(err, spiffe.ErrDenied)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// end returns when a proof expires, on the clock of the timers.
func (c *governed) end(now time.Time) time.Time {
	end := c.notAfter
	if end.IsZero() || !c.own.IsZero() && c.own.Before(end) {
		end = c.own
	}
	if end.IsZero() { // a client without a certificate, and no own certificate known
		return now.Add(math.MaxInt64)
	}
	return now.Add(end.Sub(c.e.now()))
}

// farewell returns when to drain a connection so that it is closed when its proof expires.
func (g *Governor) farewell(c *governed, now time.Time) time.Time {
	end := c.end(now)
	start := end.Add(-g.grace()).Add(-c.spread) // one by one, as their sum may overflow a Duration
	if start.Before(c.since) {
		return end
	}
	return start
}

// act takes the steps that are due, and returns when to look again: at round or earlier.
func (g *Governor) act(all []*governed, round time.Time) (next time.Time) {
	next = earlier(round, time.Now().Add(governorPause))
	for _, c := range all {
		now := time.Now()
		if c.cause == "" && !c.at.After(now) {
			g.drain(c, now)
		}
		if c.cause != "" && (c.link.idle() || !c.at.After(now)) {
			g.remove(c.link.key())
			c.link.cut()
			continue
		}
		next = earlier(next, c.at)
	}
	return next
}

var errProofEnds = errors.New("the proof is about to expire")

// drain begins to end a connection.
func (g *Governor) drain(c *governed, now time.Time) {
	c.reason = cmp.Or(c.reason, errProofEnds)
	c.at = earlier(now.Add(g.grace()), c.end(now))
	g.mu.Lock()
	c.cause = reasonFor(c.reason)
	g.mu.Unlock()
	c.e.log.Log(slog.LevelInfo, "spiffetls: connection is drained", c.cause, c.attrs(c.reason)...)
	c.link.drain()
}
