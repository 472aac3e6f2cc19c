package spiffetls

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
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
// A change of a source with a method Changed() <-chan struct{} is noticed at once, but at most once a second; any
// other change after at most Interval. A connection whose proof no longer holds is drained after a random part of
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
// One goroutine for all connections, and some 300 bytes for each. All are judged again when a source changes and
// when a connection is added, at most once a second. That takes less than a microsecond for each connection if its
// bundle has not changed, and about a tenth of a millisecond if it has. The Governor keeps no connection alive.
//
// The zero Governor is ready to use. A Governor is safe for concurrent use and may be shared by servers and
// transports. It must not be copied, and its fields must not change once it is in use.
type Governor struct {
	// Interval is how often all connections are judged, and so the longest time after which a change of a source
	// without a Changed method is noticed. 0 means one minute.
	Interval time.Duration

	// Grace is how long a draining connection may finish its requests. 0 means 30 seconds and less than
	// 0 none.
	Grace time.Duration

	// Jitter spreads the ends of connections: each end moves by a random part of it, so that their peers do not
	// all reconnect at once. 0 means 10 seconds and less than 0 none.
	Jitter time.Duration

	// Logger logs each connection that is drained and why (Info), and sources that fail (Warn), with the
	// attributes peer, remote, side, reason and err. Nil means silence.
	Logger *slog.Logger

	toLog sync.Once
	log   *slog.Logger // see logger

	running atomic.Bool
	hooked  sync.Map // weak.Pointer[tls.Conn] to *governed, for the ConnState hook of net/http

	mu       sync.Mutex
	wake     chan struct{} // a connection was added; see woken
	conns    map[*governed]struct{}
	draining int
	endedBy  map[string]uint64
}

const (
	governorPause = time.Second     // between two rounds of judging all
	quiet         = time.Second     // after which HTTP/2 of a server has flushed its responses
	silence       = 5 * time.Second // after which a client's connection is idle
	maxSources    = 1000            // that can wake Run; others are noticed after Interval
)

// check returns an error if a field is invalid.
func (g *Governor) check() error {
	if g.Interval < 0 {
		return errors.New("the Interval of the Governor is negative; 0 means one minute")
	}
	return nil
}

// The values of the fields, with their defaults.
func (g *Governor) interval() time.Duration { return cmp.Or(g.Interval, time.Minute) }
func (g *Governor) grace() time.Duration    { return max(0, cmp.Or(g.Grace, 30*time.Second)) }
func (g *Governor) jitter() time.Duration   { return max(0, cmp.Or(g.Jitter, 10*time.Second)) }
func (g *Governor) logger() *slog.Logger {
	g.toLog.Do(func() { g.log = ratelog.Patient(g.Logger) })
	return g.log
}

// woken returns the channel by which a new connection wakes Run.
func (g *Governor) woken() chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wake == nil {
		g.wake = make(chan struct{}, 1)
	}
	return g.wake
}

// governed is one connection.
type governed struct {
	e     *Endpoint
	role  spiffe.Role         // of the peer
	chain []*x509.Certificate // as presented
	proof
	link  link
	since time.Time
	share float64     // of the jitter
	leave atomic.Bool // it is draining; read by its requests

	// Only Run's goroutine uses these, once the connection is added.
	at       time.Time // when to drain it or, once it is draining, when to look again
	cut      time.Time // while it is draining: when to cut it
	reason   error     // why it is drained; nil while the proof holds
	cause    string    // the label of reason
	draining bool      // written with the Governor's lock
}

// link ends a connection. Its methods never wait.
type link interface {
	drain() // begins to end the connection
	cut()
	idleIn() time.Duration // how soon it may be idle; 0 or less if it is now
	gone() bool            // the connection was closed
	remote() string
}

// govern returns the argument of add.
func (e *Endpoint) govern(l link, role spiffe.Role, p proof, cs tls.ConnectionState) *governed {
	g, now := e.config.Governor, time.Now()
	c := &governed{e: e, role: role, chain: cs.PeerCertificates, proof: p, link: l, since: now, share: rand.Float64()}
	if role == spiffe.ClientRole && e.config.Self != nil {
		if svid, err := e.config.Self.SVID(); err == nil && svid != nil {
			c.own = svid.NotAfter()
		}
	}
	c.at = g.farewell(c, now)
	return c
}

// add puts a connection under the Governor, which judges it once more, as the sources may have changed since the
// handshake.
func (g *Governor) add(c *governed) {
	g.mu.Lock()
	if g.conns == nil {
		g.conns, g.endedBy = map[*governed]struct{}{}, map[string]uint64{}
	}
	g.conns[c] = struct{}{}
	g.mu.Unlock()
	select {
	case g.woken() <- struct{}{}:
	default: // Run is awake already
	}
}

// remove forgets a connection. It may be called more than once.
func (g *Governor) remove(c *governed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.conns[c]; !ok {
		return
	}
	delete(g.conns, c)
	if c.draining {
		g.draining--
		g.endedBy[c.cause]++
	}
	if s, ok := c.link.(*served); ok {
		g.hooked.Delete(s.conn)
	}
}

// all returns the connections at this moment.
func (g *Governor) all() []*governed {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Keys(g.conns))
}

// Run judges and ends connections until ctx is done, and then returns nil. Connections stay open
// when it returns. Only one call may run at a time.
func (g *Governor) Run(ctx context.Context) error {
	if err := g.check(); err != nil {
		return fmt.Errorf("spiffetls: governor: %w", err)
	}
	if !g.running.CompareAndSwap(false, true) {
		return errors.New("spiffetls: governor: Run is running already")
	}
	defer g.running.Store(false)
	timer := time.NewTimer(0)
	defer timer.Stop()
	own := selectCases(ctx.Done(), g.woken())
	own = append(own, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(timer.C)})
	var (
		cases []reflect.SelectCase
		round = time.Now() // when all are judged again
		last  time.Time    // when they were
	)
	for ctx.Err() == nil {
		now := time.Now()
		if !round.After(now) {
			// Before judging, so that no change is missed.
			cases = append(slices.Clip(own), selectCases(g.changes()...)...)
			last, round = now, now.Add(g.interval())
			g.judgeAll(ctx)
		}
		next := round
		if step := g.act(ctx); !step.IsZero() && step.Before(next) {
			next = step
		}
		timer.Reset(time.Until(next))
		if i, _, _ := reflect.Select(cases); i != 2 { // there is a new connection, or a source has changed
			cases = own
			if soon := last.Add(governorPause); soon.Before(round) {
				round = soon
			}
		}
	}
	return nil
}

func selectCases(channels ...<-chan struct{}) (cases []reflect.SelectCase) {
	for _, ch := range channels {
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ch)})
	}
	return cases
}

// changes returns the channels that are closed when a source of a connection changes.
func (g *Governor) changes() (all []<-chan struct{}) {
	heard := map[*Endpoint]bool{}
	for _, c := range g.all() {
		if heard[c.e] {
			continue
		}
		heard[c.e] = true
		for _, source := range c.e.changers {
			if len(all) < maxSources {
				all = append(all, source.Changed())
			}
		}
	}
	return all
}

// judgeAll judges all connections, without the lock.
func (g *Governor) judgeAll(ctx context.Context) {
	var failure error
	stay := 0
	for _, c := range g.all() {
		switch {
		case ctx.Err() != nil:
			return
		case c.link.gone():
			g.remove(c)
		case !c.draining:
			if err := g.judge(c); err != nil {
				failure = err
				stay++
			}
		}
	}
	if stay > 0 {
		g.logger().Warn("connections cannot be judged and stay open",
			slog.Int("connections", stay), slog.Any("err", failure))
	}
}

// judge decides about a connection that is not draining. The error is from a source that failed.
func (g *Governor) judge(c *governed) error {
	p, err := c.e.judge(c.chain, c.role, c.name, c.addr)
	now := time.Now()
	switch {
	case err == nil:
		c.peer, c.notAfter = p.peer, p.notAfter // perhaps by another path with another expiry
		c.reason, c.at = nil, g.farewell(c, now)
	case undecided(err):
		return err
	case c.reason == nil:
		c.reason, c.cause, c.at = err, causeOf(stageOf(err), err), now.Add(g.spread(c))
		if end := c.end(now); end.Before(c.at) {
			c.at = end
		}
	}
	return nil
}

// undecided reports whether err only means that the source of bundles, roots or policies failed.
func undecided(err error) bool {
	if errors.Is(err, errNoWebRoots) {
		return true
	}
	ve, ok := errors.AsType[*spiffe.VerifyError](err)
	switch {
	case !ok:
		return false
	case ve.Stage == "policy":
		return !errors.Is(err, spiffe.ErrDenied)
	}
	return ve.Stage == "bundle" &&
		!errors.Is(err, spiffe.ErrUnknownTrustDomain) && !errors.Is(err, spiffe.ErrNoAuthority)
}

func (g *Governor) spread(c *governed) time.Duration {
	return time.Duration(c.share * float64(g.jitter()))
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
	start := end.Add(-g.grace()).Add(-g.spread(c)) // one by one, as their sum may overflow a Duration
	if start.Before(c.since) {
		return end
	}
	return start
}

// act takes the steps that are due and returns the time of the next one, or the zero time for none.
func (g *Governor) act(ctx context.Context) (next time.Time) {
	for _, c := range g.all() {
		now := time.Now()
		if ctx.Err() == nil && !c.at.After(now) {
			if !c.draining && !g.drain(c, now) || g.finish(c, now) {
				continue
			}
		}
		if next.IsZero() || c.at.Before(next) {
			next = c.at
		}
	}
	return next
}

var errProofEnds = errors.New("the proof is about to expire")

// drain begins to end a connection, unless it was removed.
func (g *Governor) drain(c *governed, now time.Time) bool {
	if c.reason == nil {
		c.reason, c.cause = errProofEnds, "proof_ends"
	}
	g.mu.Lock()
	_, open := g.conns[c]
	if open {
		c.draining = true
		g.draining++
	}
	g.mu.Unlock()
	if !open {
		return false
	}
	g.logger().Info("connection is drained",
		slog.String("peer", c.proof.String()), slog.String("remote", c.link.remote()),
		slog.String("side", sides[c.role == spiffe.ClientRole]), slog.String("reason", c.reason.Error()))
	c.cut = c.end(now)
	if by := now.Add(g.grace()); by.Before(c.cut) {
		c.cut = by
	}
	c.leave.Store(true) // before it checks for idle; connState checks in the other order
	c.link.drain()
	return true
}

// finish ends a draining connection if it is idle or its time is over, and reports whether it did.
func (g *Governor) finish(c *governed, now time.Time) bool {
	if wait := c.link.idleIn(); wait > 0 && now.Before(c.cut) && !c.link.gone() {
		c.at = now.Add(min(wait, c.cut.Sub(now)))
		return false
	}
	g.remove(c)
	c.link.cut()
	return true
}
