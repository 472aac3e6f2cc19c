package spiffetls

import (
	"cmp"
	"container/heap"
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
// A change of a source with a method Changed() <-chan struct{} is noticed at once, but at most once a second; any other
// change after at most Interval. A connection that no longer holds is drained after a random part of Jitter, and cut Grace
// later: within Interval + Jitter + Grace, or 1 second + Jitter + Grace if the source has Changed. A peer that is trusted
// again before it is drained stays. A source that fails ends no connection.
//
// No connection outlives its proof. Draining begins Grace and a random part of Jitter before [spiffe.Peer.NotAfter]. A
// connection made later than that is not drained, so that a peer with little lifetime left can work, and is cut when the
// proof expires. A client without a certificate has no proof that could expire. A server also drains before the certificate
// that it has presented expires, so that clients reconnect before their own Governor cuts them off.
//
// These times count from the moment at which Run notices, on a computer that is not overloaded.
//
// # How
//
// Draining closes an idle connection at once. In a server of [Endpoint.ConfigureServer] net/http reports which connections are idle;
// an HTTP/2 connection counts as idle after a second. A busy connection gets "Connection: close" on its next response,
// which ends an HTTP/1.1 connection after the response, and makes an HTTP/2 connection send GOAWAY and end with its last
// request. After Grace it is cut.
//
// In a [Endpoint.Transport] net/http reports nothing. A connection counts as idle if no byte has moved for five seconds and the last
// ones came in, so a request that waits longer than that for the next byte of its response may be cut before the end of
// Grace.
//
// The use of a connection from [Endpoint.Listener], or of one that a handler has hijacked, is unknown: it is cut after
// Grace. A program that knows the protocol can end such a connection itself: if what it passes to [Endpoint.Client] or
// [Endpoint.Server] has a method Drain(), that is called once when draining begins, and must not block. Package spiffegrpc
// does so.
//
// A connection is cut without a TLS close_notify, as sending one can block. HTTP detects a truncated message by itself.
//
// # What it costs
//
// One goroutine for all connections, and some 300 bytes for each. Judging a connection again takes less than a microsecond
// if its bundle has not changed, and about a tenth of a millisecond if it has. The Governor keeps no connection alive.
//
// The zero Governor is ready to use. A Governor is safe for concurrent use and may be shared by servers and transports. It
// must not be copied, and its fields must not change once it is in use.
type Governor struct {
	// Interval is how often all connections are judged: a change of a source without a Changed method is
	// noticed after so long at the latest. 0 means one minute.
	Interval time.Duration

	// Grace is how long a draining connection may finish its requests. 0 means 30 seconds and less than
	// 0 none.
	Grace time.Duration

	// Jitter spreads the ends of connections, by a random part of it each, so that their peers do not all
	// reconnect at once. 0 means 10 seconds and less than 0 none.
	Jitter time.Duration

	// Logger logs each connection that is drained and why (Info), and sources that fail (Warn), with the
	// attributes peer, remote, side, reason and err. Nil means silence.
	Logger *slog.Logger

	toLog sync.Once
	log   *slog.Logger // see logger

	running atomic.Bool
	hooked  sync.Map // weak.Pointer[tls.Conn] to *governed, for the ConnState hook of net/http

	// heard are the endpoints whose sources Run listens to, and the channels that tell of their next
	// change. Only Run uses it.
	heard map[*Endpoint][]<-chan struct{}

	mu        sync.Mutex
	wake      chan struct{} // a connection was added; see woken
	queue     queue
	endpoints map[*Endpoint]int // connections of each
	draining  int
	endedBy   [numCauses]uint64
}

const (
	governorPause = time.Second     // between two rounds of judging all
	quiet         = time.Second     // after which HTTP/2 of a server has flushed its responses
	silence       = 5 * time.Second // after which a client's connection is idle
	maxSources    = 1000            // that can wake Run; others are noticed after Interval
)

// check reports what is wrong with the fields.
func (g *Governor) check() error {
	if g.Interval < 0 {
		return errors.New("the Interval of the Governor is negative; 0 means one minute")
	}
	return nil
}

// Of the fields, with their defaults.
func (g *Governor) interval() time.Duration { return cmp.Or(g.Interval, time.Minute) }
func (g *Governor) grace() time.Duration    { return max(0, cmp.Or(g.Grace, 30*time.Second)) }
func (g *Governor) jitter() time.Duration   { return max(0, cmp.Or(g.Jitter, 10*time.Second)) }
func (g *Governor) logger() *slog.Logger {
	g.toLog.Do(func() { g.log = ratelog.Patient(g.Logger) })
	return g.log
}

// woken returns the channel that tells Run of a new connection.
func (g *Governor) woken() chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wake == nil {
		g.wake = make(chan struct{}, 1)
	}
	return g.wake
}

// state is the next step for a connection.
type state int

const (
	fresh     state = iota // to be judged, as a source may have changed during the handshake
	watched                // to be drained, as the proof is about to expire
	disproved              // to be drained, as the proof does not hold
	draining               // to be cut, or closed if it is idle
)

// governed is one connection.
type governed struct {
	e     *Endpoint
	role  spiffe.Role         // of the peer
	chain []*x509.Certificate // as presented
	proof
	link  link
	since time.Time
	share float64     // of the jitter
	leave atomic.Bool // it is draining: read by its requests

	// Below, only Run's goroutine writes, once the connection is in the queue, and only with the
	// Governor's lock.
	state  state
	at     time.Time // of the next step
	cut    time.Time // while it is draining: when it is cut
	reason string
	cause  cause // of reason
	index  int   // in the queue; -1 when it has left
}

// link is how a connection is ended. Its methods never wait.
type link interface {
	drain() // says that it begins
	cut()
	idleIn() time.Duration // how soon it may be idle; 0 or less if it is
	gone() bool            // the connection was closed
	remote() string
}

// govern returns the argument of add.
func (e *Endpoint) govern(l link, role spiffe.Role, p proof, cs tls.ConnectionState) *governed {
	now := time.Now()
	c := &governed{
		e: e, role: role, chain: cs.PeerCertificates, proof: p, link: l,
		since: now, share: rand.Float64(), at: now, index: -1,
	}
	if role == spiffe.ClientRole && e.config.Self != nil {
		if svid, err := e.config.Self.SVID(); err == nil && svid != nil {
			c.own = svid.NotAfter()
		}
	}
	return c
}

// add puts a connection under the Governor. It is judged once more, as the sources may have changed
// since the handshake.
func (g *Governor) add(c *governed) {
	g.put(c)
	select {
	case g.woken() <- struct{}{}:
	default: // Run is awake already
	}
}

func (g *Governor) put(c *governed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.endpoints == nil {
		g.endpoints = make(map[*Endpoint]int)
	}
	g.endpoints[c.e]++
	heap.Push(&g.queue, c)
}

// remove forgets a connection. It may be called more than once.
func (g *Governor) remove(c *governed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.index < 0 {
		return
	}
	heap.Remove(&g.queue, c.index)
	if g.endpoints[c.e]--; g.endpoints[c.e] == 0 {
		delete(g.endpoints, c.e)
	}
	if c.state == draining {
		g.draining--
		g.endedBy[c.cause]++
	}
	if s, ok := c.link.(*served); ok {
		g.hooked.Delete(s.conn)
	}
}

// Run judges and ends connections until ctx is done, and then returns nil. Connections stay open
// when it returns. It may be run once at a time.
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
	own := []reflect.SelectCase{
		{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())},
		{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(timer.C)},
		{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(g.woken())},
	}
	var (
		round = time.Now() // when all are judged again
		last  time.Time    // when they were
		told  bool         // a source has changed since
	)
	for ctx.Err() == nil {
		now := time.Now()
		due := !round.After(now)
		cases := g.listen(own, due) // before judging, so that no change is missed
		if due {
			last, told, round = now, false, now.Add(g.interval())
			g.judgeAll(ctx)
		}
		next := g.act(ctx)
		if next.IsZero() || round.Before(next) {
			next = round
		}
		timer.Reset(time.Until(next))
		if told {
			cases = own
		}
		if i, _, _ := reflect.Select(cases); i >= len(own) {
			told = true
			if pause := last.Add(governorPause); pause.Before(round) {
				round = pause
			}
		}
	}
	return nil
}

// listen appends to cases the channels that tell of the next change of a source of a connection: new ones
// if again, and otherwise new ones for new endpoints only, so that a change that came meanwhile still tells.
func (g *Governor) listen(cases []reflect.SelectCase, again bool) []reflect.SelectCase {
	g.mu.Lock()
	endpoints := slices.Collect(maps.Keys(g.endpoints))
	g.mu.Unlock()
	cases, own := slices.Clone(cases), len(cases)
	heard := make(map[*Endpoint][]<-chan struct{}, len(endpoints))
	seen := map[<-chan struct{}]bool{nil: true}
	for _, e := range endpoints {
		channels, ok := g.heard[e]
		if again || !ok {
			channels = nil
			for _, c := range e.changers {
				channels = append(channels, c.Changed())
			}
		}
		heard[e] = channels
		for _, ch := range channels {
			if !seen[ch] && len(cases) < own+maxSources {
				seen[ch] = true
				cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ch)})
			}
		}
	}
	g.heard = heard
	return cases
}

// judgeAll judges all connections, without the lock. A new connection with sources that Run does not
// listen to yet is judged later; see act.
func (g *Governor) judgeAll(ctx context.Context) {
	g.mu.Lock()
	all := slices.Clone(g.queue)
	g.mu.Unlock()
	var failure error
	stay := 0
	for _, c := range all {
		if ctx.Err() != nil {
			return
		}
		switch {
		case c.link.gone():
			g.remove(c)
		case c.state != draining && (c.state != fresh || g.listens(c)):
			if err := g.judge(c); err != nil {
				failure = err
				stay++
			}
		}
	}
	if stay > 0 {
		g.logger().Warn("connections cannot be judged and stay open", slog.Int("connections", stay), slog.Any("err", failure))
	}
}

// listens reports whether Run listens to the sources of a connection.
func (g *Governor) listens(c *governed) bool {
	_, ok := g.heard[c.e]
	return ok
}

// judge decides about a connection that is not draining. The error is that of a source that failed.
func (g *Governor) judge(c *governed) error {
	p, err := c.e.judge(c.chain, c.role, c.name, c.addr)
	now := time.Now()
	switch {
	case err == nil:
		c.peer, c.notAfter = p.peer, p.notAfter // perhaps by another path with another expiry
		g.schedule(c, watched, g.farewell(c, now))
	case undecided(err):
		if c.state == fresh {
			g.schedule(c, watched, g.farewell(c, now))
		}
		return err
	case c.state != disproved:
		c.reason, c.cause = err.Error(), causeOf(stageOf(err), err)
		at := now.Add(g.spread(c))
		if end := c.end(now); end.Before(at) {
			at = end
		}
		g.schedule(c, disproved, at)
	}
	return nil
}

// undecided reports whether err is only that the source of bundles, roots or policies for hosts failed.
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
	return ve.Stage == "bundle" && !errors.Is(err, spiffe.ErrUnknownTrustDomain) && !errors.Is(err, spiffe.ErrNoAuthority)
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
	if end.IsZero() { // of a client without a certificate, and with no own certificate known
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

// schedule sets the next step for c, unless it was removed.
func (g *Governor) schedule(c *governed, s state, at time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.index < 0 {
		return
	}
	if s == draining && c.state != draining {
		g.draining++
	}
	c.state, c.at = s, at
	heap.Fix(&g.queue, c.index)
}

// act takes the steps that are due and returns the time of the next one, or the zero time for none.
func (g *Governor) act(ctx context.Context) time.Time {
	for ctx.Err() == nil {
		now := time.Now()
		g.mu.Lock()
		if len(g.queue) == 0 {
			g.mu.Unlock()
			return time.Time{}
		}
		c := g.queue[0]
		g.mu.Unlock()
		if c.at.After(now) {
			return c.at
		}
		switch c.state {
		case fresh:
			if !g.listens(c) { // Run must listen to its sources first, or it misses a change
				return now
			}
			_ = g.judge(c) // on failure the verdict of the handshake stands
		case watched:
			c.reason, c.cause = "the proof is about to expire", causeProofEnds
			g.drain(c, now)
		case disproved:
			g.drain(c, now)
		case draining:
			g.finish(c, now)
		}
	}
	return time.Time{}
}

// drain begins to end a connection.
func (g *Governor) drain(c *governed, now time.Time) {
	g.logger().Info("connection is drained", slog.String("peer", c.proof.String()), slog.String("remote", c.link.remote()),
		slog.String("side", c.side()), slog.String("reason", c.reason))
	c.cut = c.end(now)
	if by := now.Add(g.grace()); by.Before(c.cut) {
		c.cut = by
	}
	g.schedule(c, draining, now)
	c.leave.Store(true) // before it checks for idle; connState checks in the other order
	c.link.drain()
	g.finish(c, now)
}

// finish ends a draining connection if its time is over or it is idle.
func (g *Governor) finish(c *governed, now time.Time) {
	if wait := c.link.idleIn(); wait > 0 && now.Before(c.cut) && !c.link.gone() {
		g.schedule(c, draining, now.Add(min(wait, c.cut.Sub(now))))
		return
	}
	g.remove(c)
	c.link.cut()
}

func (c *governed) side() string {
	if c.role == spiffe.ClientRole {
		return "server"
	}
	return "client"
}

// queue is a heap of connections, the earliest time first.
type queue []*governed

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements [heap.Interface].
func (q *queue) Push(x any) {
	c := x.(*governed)
	c.index = len(*q)
	*q = append(*q, c)
}

// Pop implements [heap.Interface].
func (q *queue) Pop() any {
	old := *q
	c := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	c.index = -1
	return c
}
