package spiffetls

import (
	"cmp"
	"container/heap"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// GovernorOptions are the choices of a [Governor] that have a default.
type GovernorOptions struct {
	// Interval is how often all connections are judged if no source says that it has changed: sources
	// without a Changed method are noticed so late. 0 means one minute.
	Interval time.Duration

	// Grace is how long a connection that has to go may finish what it is doing. 0 means 30 seconds and
	// less than 0 none.
	Grace time.Duration

	// Jitter spreads the ends of connections, by a random part of it each, so that their peers do not all
	// come back in one moment. 0 means 10 seconds and less than 0 none.
	Jitter time.Duration

	// Logger is told of each connection that has to go and why (Info), and of sources that cannot answer
	// (Warn), with the attributes peer, remote, side, reason and err. Nil means silence.
	Logger *slog.Logger
}

// Governor ends connections whose proof no longer holds. A handshake proves a peer once; a Governor
// judges every open connection again, by the same [spiffe.Verifier], when a bundle or a policy
// changes, and ends it before the proof expires. Name it in [Options] and run it:
//
//	g, err := spiffetls.NewGovernor(nil)
//	…
//	err = spiffetls.ConfigureServer(server, self, bundles, allow, &spiffetls.Options{Governor: g})
//	…
//	go g.Run(ctx) // in a group that waits for it
//
// # When
//
// A change of a source with a method Changed() <-chan struct{} is noticed at once, though not more than
// once a second; any other after at most Interval. The connections that it condemns are drained, each
// after a random part of Jitter, and are gone Grace later: all of them within Interval + Jitter + Grace,
// or 1 second + Jitter + Grace if the source says when it changes. Who is trusted again before it is
// drained stays. A source that fails to answer condemns nobody.
//
// No connection outlives its proof: draining begins Grace and a random part of Jitter before
// [spiffe.Peer.NotAfter], and what is left after Grace is cut. A connection that was made later than
// that is not drained before, so that a peer with little life left can work, and is cut when the proof
// expires. A server also drains before the certificate expires that it has shown itself, so that
// clients are told to come back before a Governor of theirs cuts them off.
//
// All of that is counted from the moment at which Run sees it, and on a computer with time for it.
//
// # How
//
// Draining closes a connection at once if it is idle. Of a server made by [ConfigureServer] net/http
// says which those are; an HTTP/2 connection counts once it was idle for a second. One that is busy
// gets "Connection: close" on its next response, which ends an HTTP/1.1 connection after the response,
// and has an HTTP/2 connection tell its client to go elsewhere and end with the last request. When Grace
// is over it is cut.
//
// Of a [Transport] net/http does not say, and the connections count as idle on which nothing has moved
// for five seconds, unless the last to move went out: a request that waits longer than that for the
// next byte of its response may be cut before Grace is over.
//
// A connection from [Governor.Listener] is cut when Grace is over, as nobody knows what it is used for.
// So is one that a handler has hijacked.
//
// What is cut ends without a TLS close_notify, as sending one can block. HTTP tells by itself whether
// something is missing.
//
// # What it costs
//
// One goroutine, however many connections there are, and some 300 bytes for each, beside the chain that
// the connection holds anyway. To judge a connection again takes less than a microsecond if its bundle
// has not changed, and about a tenth of a millisecond if it has. No connection is kept alive by being
// governed.
//
// A Governor is safe for concurrent use and may be shared by servers and transports.
type Governor struct {
	interval, grace, jitter time.Duration
	log                     *slog.Logger
	wake                    chan struct{} // a connection wants attention before Run would look
	running                 atomic.Bool
	hooked                  sync.Map // weak.Pointer[tls.Conn] to *governed, for the ConnState hook of net/http

	mu        sync.Mutex
	queue     queue
	endpoints map[*endpoint]int // connections of each
	renewed   bool              // endpoints has changed
	draining  int
	ended     uint64
}

// GovernorStatus counts connections.
type GovernorStatus struct {
	Open     int    // governed at this moment, the draining ones too
	Draining int    // about to end
	Ended    uint64 // that have left while they were draining, so far
}

const (
	governorPause = time.Second     // between two rounds of judging all
	quiet         = time.Second     // after which HTTP/2 of a server has flushed what it wrote
	silence       = 5 * time.Second // after which a client's connection is idle
	maxSources    = 1000            // that can wake Run; further ones have to wait for Interval
)

// NewGovernor returns a Governor, which does nothing until it is run. The options may be nil.
func NewGovernor(opts *GovernorOptions) (*Governor, error) {
	var o GovernorOptions
	if opts != nil {
		o = *opts
	}
	if o.Interval < 0 {
		return nil, errors.New("spiffetls: governor: the interval is negative")
	}
	return &Governor{
		interval:  cmp.Or(o.Interval, time.Minute),
		grace:     max(0, cmp.Or(o.Grace, 30*time.Second)),
		jitter:    max(0, cmp.Or(o.Jitter, 10*time.Second)),
		log:       cmp.Or(o.Logger, slog.New(slog.DiscardHandler)),
		wake:      make(chan struct{}, 1),
		endpoints: make(map[*endpoint]int),
	}, nil
}

// Status returns the counts of this moment.
func (g *Governor) Status() GovernorStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	return GovernorStatus{Open: len(g.queue), Draining: g.draining, Ended: g.ended}
}

// state is what is to happen to a connection when its time has come.
type state int

const (
	fresh     state = iota // to be judged, as something may have changed while the handshake went on
	watched                // to be drained, as the proof is about to end
	condemned              // to be drained, as the proof does not hold
	draining               // to be cut, or closed if it is idle
)

// governed is one connection.
type governed struct {
	e     *endpoint
	role  spiffe.Role         // of the peer
	chain []*x509.Certificate // as presented
	peer  *spiffe.Peer
	own   time.Time // when the certificate expires that a server has shown; zero for a client
	link  link
	since time.Time
	share float64     // of the jitter
	leave atomic.Bool // it is draining: read by its requests

	// Below, only Run's goroutine writes, once the connection is in the queue, and only with the
	// Governor's lock.
	state  state
	at     time.Time // when something is to happen
	cut    time.Time // while it is draining: when it has to be gone
	reason string
	index  int // in the queue; -1 when it has left
}

// link is how a connection is ended. Its methods never wait.
type link interface {
	cut()
	idleIn() time.Duration // how soon it may be idle; 0 or less if it is
	gone() bool            // nobody uses the connection any more
	remote() string
}

// govern makes what add wants.
func (e *endpoint) govern(l link, role spiffe.Role, peer *spiffe.Peer, cs tls.ConnectionState) *governed {
	now := time.Now()
	c := &governed{
		e: e, role: role, chain: cs.PeerCertificates, peer: peer, link: l,
		since: now, share: rand.Float64(), at: now, index: -1,
	}
	if svid, err := e.self.SVID(); role == spiffe.ClientRole && err == nil && svid != nil {
		c.own = svid.NotAfter()
	}
	return c
}

// add puts a connection under the Governor. It is judged once more, as the sources may have changed
// after they were asked.
func (g *Governor) add(c *governed) {
	g.mu.Lock()
	heap.Push(&g.queue, c)
	g.endpoints[c.e]++
	if g.endpoints[c.e] == 1 {
		g.renewed = true
	}
	g.mu.Unlock()
	select {
	case g.wake <- struct{}{}:
	default: // it is awake already
	}
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
		g.renewed = true
	}
	if c.state == draining {
		g.draining--
		g.ended++ // whoever has closed it
	}
	if s, ok := c.link.(*served); ok {
		g.hooked.Delete(s.conn)
	}
}

// Run judges and ends connections until ctx is done, and then returns the cause. Connections stay open
// when it returns. It may be run once at a time.
func (g *Governor) Run(ctx context.Context) error {
	if !g.running.CompareAndSwap(false, true) {
		return errors.New("spiffetls: governor: it is running already")
	}
	defer g.running.Store(false)
	timer := time.NewTimer(0)
	defer timer.Stop()
	own := []reflect.SelectCase{
		{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())},
		{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(timer.C)},
		{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(g.wake)},
	}
	var (
		changes []reflect.SelectCase // of the sources
		round   = time.Now()         // when all are judged again
		last    time.Time            // when they were
		told    bool                 // a source has changed since
	)
	for ctx.Err() == nil {
		now := time.Now()
		due := !round.After(now)
		if g.takeRenewed() || due {
			before := changes
			changes = g.changes() // before judging, so that no change is missed
			if !due && !told && anyClosed(before) {
				told, round = true, soon(last, round) // the channel that told of it is gone from changes
			}
		}
		if due {
			last, told, round = now, false, now.Add(g.interval)
			g.judgeAll(ctx)
		}
		next := g.act(ctx)
		if next.IsZero() || round.Before(next) {
			next = round
		}
		timer.Reset(time.Until(next))
		cases := own
		if !told {
			cases = slices.Concat(own, changes)
		}
		if i, _, _ := reflect.Select(cases); i >= len(own) {
			told, round = true, soon(last, round)
		}
	}
	return context.Cause(ctx)
}

// soon returns when all are judged again after a change, if round is when they would have been.
func soon(last, round time.Time) time.Time {
	if pause := last.Add(governorPause); pause.Before(round) {
		return pause
	}
	return round
}

// anyClosed reports whether a source has changed since its channel was taken.
func anyClosed(changes []reflect.SelectCase) bool {
	i, _, _ := reflect.Select(append(slices.Clone(changes), reflect.SelectCase{Dir: reflect.SelectDefault}))
	return i < len(changes)
}

func (g *Governor) takeRenewed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer func() { g.renewed = false }()
	return g.renewed
}

// changes asks the sources of all connections for the channels that tell of their next change.
func (g *Governor) changes() []reflect.SelectCase {
	g.mu.Lock()
	var changers []changer
	for e := range g.endpoints {
		changers = append(changers, e.changers...)
	}
	g.mu.Unlock()
	var cases []reflect.SelectCase
	seen := make(map[<-chan struct{}]bool)
	for _, c := range changers {
		ch := c.Changed()
		if ch == nil || seen[ch] || len(cases) == maxSources {
			continue
		}
		seen[ch] = true
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ch)})
	}
	return cases
}

// judgeAll judges all connections, without the lock. A newcomer with sources that Run does not listen to
// yet has to wait for that; see act.
func (g *Governor) judgeAll(ctx context.Context) {
	g.mu.Lock()
	all, renewed := slices.Clone(g.queue), g.renewed
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
		case c.state != draining && (c.state != fresh || !renewed):
			if err := g.judge(c); err != nil {
				failure = err
				stay++
			}
		}
	}
	if stay > 0 {
		g.log.Warn("connections cannot be judged and stay", slog.Int("connections", stay), slog.Any("err", failure))
	}
}

// judge decides what is to happen to a connection that is not draining. The error is that of a source
// that could not answer.
func (g *Governor) judge(c *governed) error {
	peer, err := c.e.verifier.VerifyChain(c.chain, c.role)
	now := time.Now()
	switch {
	case err == nil:
		c.peer = peer // by another path perhaps, which ends at another time
		g.schedule(c, watched, g.farewell(c, now))
	case undecided(err):
		if c.state == fresh {
			g.schedule(c, watched, g.farewell(c, now))
		}
		return err
	case c.state != condemned:
		c.reason = err.Error()
		at := now.Add(g.spread(c))
		if end := c.end(now); end.Before(at) {
			at = end // nobody gains time by being condemned
		}
		g.schedule(c, condemned, at)
	}
	return nil
}

// undecided reports whether err is only that the bundle source could not answer.
func undecided(err error) bool {
	ve, ok := errors.AsType[*spiffe.VerifyError](err)
	return ok && ve.Stage == spiffe.StageBundle && !errors.Is(err, spiffe.ErrUnknownTrustDomain) && !errors.Is(err, spiffe.ErrNoAuthority)
}

func (g *Governor) spread(c *governed) time.Duration {
	return time.Duration(c.share * float64(g.jitter))
}

// end returns when a proof ends, on the clock of the timers.
func (c *governed) end(now time.Time) time.Time {
	end := c.peer.NotAfter()
	if !c.own.IsZero() && c.own.Before(end) {
		end = c.own
	}
	return now.Add(end.Sub(c.e.now()))
}

// farewell returns when to drain a connection so that it is gone when its proof ends.
func (g *Governor) farewell(c *governed, now time.Time) time.Time {
	end := c.end(now)
	start := end.Add(-g.grace).Add(-g.spread(c)) // one by one, as their sum may be too much for a Duration
	if start.Before(c.since) {
		return end
	}
	return start
}

// schedule says what happens to c next, unless it has left.
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

// act does what is due and returns when there is something to do next, or the zero time for never.
func (g *Governor) act(ctx context.Context) time.Time {
	for ctx.Err() == nil {
		now := time.Now()
		g.mu.Lock()
		if len(g.queue) == 0 {
			g.mu.Unlock()
			return time.Time{}
		}
		c, renewed := g.queue[0], g.renewed
		g.mu.Unlock()
		if c.at.After(now) {
			return c.at
		}
		switch c.state {
		case fresh:
			if renewed { // Run has to listen to its sources first, or a change right after is missed
				return now
			}
			_ = g.judge(c) // if it cannot be judged, it was a moment ago
		case watched:
			c.reason = "the proof is about to expire"
			g.drain(c, now)
		case condemned:
			g.drain(c, now)
		case draining:
			g.finish(c, now)
		}
	}
	return time.Time{}
}

// drain asks everybody to leave.
func (g *Governor) drain(c *governed, now time.Time) {
	g.log.Info("a connection has to go", slog.String("peer", c.peer.ID().String()), slog.String("remote", c.link.remote()),
		slog.String("side", c.side()), slog.String("reason", c.reason))
	c.cut = c.end(now)
	if by := now.Add(g.grace); by.Before(c.cut) {
		c.cut = by
	}
	g.schedule(c, draining, now)
	c.leave.Store(true) // before looking whether it is idle; who makes it idle looks in the other order
	g.finish(c, now)
}

// finish ends a connection that is draining, if it is time or it does nothing.
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

// queue is a heap of connections, that with the earliest time first.
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
