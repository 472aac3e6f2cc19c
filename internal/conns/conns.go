// Package conns limits the connections to a process's servers and the requests under way on them, in total and for
// each peer, and the time that the body of a request may take to arrive. [Dialed] tracks the connections that a
// client has made, to close them all, and [Transport] the connections of an http.Client.
package conns

import (
	"cmp"
	"errors"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// Reasons of a [limit.Error], in addition to the reasons of package limit.
const (
	DescriptorReserve = "the other file descriptors are kept for the program itself"
	Crowded           = "few connections are left, and this caller has many"
)

// Options are the limits on the connections of a [Listener].
type Options struct {
	Total       int // at the same time; 0: only the limit of the process
	Each        int // of each peer; 0: no limit
	Descriptors int // that a connection uses, including those that the server opens for it; 0: one

	Peer func(net.Conn) Peer // returns the peer of a connection; nil means [TCPPeer]

	// Refused, if set, is called for each connection that is closed because of a limit, before it is closed, and for
	// each request that is refused because of a limit. what describes the refusal.
	Refused func(c net.Conn, what string, err *limit.Error)
}

// Peer identifies the other side of a connection.
type Peer struct {
	// Names are its names at a Listener, from the widest to the narrowest, such as a user and one of the user's
	// processes. Without names the connection counts only in total.
	Names []string

	User string // its first name in the budget of the process, if different there
}

// inProcess returns the names in the budget of the process.
func (p Peer) inProcess() []string {
	if p.User == "" || len(p.Names) == 0 || p.Names[0] == p.User {
		return p.Names
	}
	return append([]string{p.User}, p.Names[1:]...)
}

// Listener accepts connections within limits. It closes a connection beyond a limit at once and accepts the next one,
// so that a peer with too many connections delays no other peer. [Listen] creates one.
//
// Descriptors belong to the process, so all Listeners share one budget, in which a peer is the same at all of them. A
// peer may have twice as many as are free, both of the budget and of the Listener's connections, so the fuller they
// are, the less each peer may add: a peer that takes all it can leaves a third for the others, and a second such peer
// leaves a ninth. So there is always room for a new peer, and for a Listener without connections. Within the wider
// name of its peers, a narrower name may have 32 times as many as are free for the wider one; and while more than a
// quarter is free, a new narrower name gets its first connection however many the others of the wider name have.
//
// No connection uses a descriptor of the reserve: a quarter of the process's limit (RLIMIT_NOFILE), but at least 64
// and at most 1,024. The system assigns the lowest free number, so a connection whose number is in the reserve is one
// too many, even if other parts of the process hold the other descriptors.
type Listener struct {
	net.Listener
	o      Options
	usable int // descriptors of the process; 0: any number

	own  budget // connections
	held map[net.Conn]Peer
}

// budget counts what is in use: in total, and by the names of peers.
type budget struct {
	sync.Mutex
	held int
	of   map[string]int
}

// add counts n more for a peer with these names; the lock is held.
func (b *budget) add(peer []string, n int) {
	b.held += n
	for _, name := range peer {
		if b.of[name] += n; b.of[name] == 0 {
			delete(b.of, name)
		}
	}
}

// process counts the descriptors in use by all Listeners' connections. Its lock is taken before a Listener's lock.
var process = budget{of: map[string]int{}}

// refusals are the refused connections of the process, by the label of the reason.
var refusals = func() map[string]*metrics.Counter {
	metrics.Process.Gauges("svidkit_connection_descriptors",
		"The number of file descriptors that accepted connections may take, by state; a reserve is not among them.",
		func(add metrics.Add) {
			if usable, known := usableDescriptors(); known {
				process.Lock()
				defer process.Unlock()
				add(float64(process.held), "state", "used")
				add(float64(max(usable-process.held, 0)), "state", "free")
			}
		})
	return metrics.Process.Counters("svidkit_connections_refused_total",
		"The number of connections that were closed at once because of a limit, by the reason.",
		"reason", slices.Sorted(maps.Values(labels))...)
}()

var labels = map[string]string{
	DescriptorReserve: "descriptors", Crowded: "crowded", limit.CallerShare: "too_many_of_peer",
	limit.TotalShare: "too_many", handshakes: handshakes,
}

const handshakes = "handshakes"

// RefuseHandshake counts a connection that a server closes because too many have not completed their handshake.
func RefuseHandshake() { refusals[handshakes].Inc() }

// Listen returns a Listener over l.
func Listen(l net.Listener, o Options) *Listener {
	if o.Peer == nil {
		o.Peer = TCPPeer
	}
	if o.Refused == nil {
		o.Refused = func(net.Conn, string, *limit.Error) {}
	}
	o.Descriptors = max(o.Descriptors, 1)
	limited := &Listener{Listener: l, o: o, held: map[net.Conn]Peer{}, own: budget{of: map[string]int{}}}
	limited.usable, _ = usableDescriptors()
	return limited
}

// Accept returns the next connection within the limits. It counts until [Listener.Closed] is called.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		refused := l.take(c)
		if refused == nil {
			return c, nil
		}
		refusals[labels[refused.Reason]].Inc()
		l.o.Refused(c, "connection closed at once", refused)
		_ = c.Close()
	}
}

func (l *Listener) take(c net.Conn) *limit.Error {
	if fd, known := descriptor(c); known && l.usable > 0 && fd >= l.usable {
		return &limit.Error{Reason: DescriptorReserve}
	}
	peer := l.o.Peer(c)
	process.Lock()
	defer process.Unlock()
	l.own.Lock()
	defer l.own.Unlock()
	all := cmp.Or(l.o.Total, 1<<30)
	switch {
	case len(l.held) >= all:
		return &limit.Error{Reason: limit.TotalShare}
	case l.usable > 0 && process.held+l.o.Descriptors > l.usable:
		return &limit.Error{Reason: DescriptorReserve}
	}
	if err := crowded(peer.Names, l.own.of, all, all-len(l.held), l.o.Each); err != nil {
		return err
	}
	if l.usable > 0 {
		if err := crowded(peer.inProcess(), process.of, l.usable, l.usable-process.held, 0); err != nil {
			return err
		}
	}
	l.held[c] = peer
	l.count(peer, 1)
	return nil
}

// crowded returns an error if a peer with these names may have no more. all is the total, free is the free part of
// it, of has the number that each name has, and each is how many the widest name may have; 0: no limit.
func crowded(peer []string, of map[string]int, all, free, each int) *limit.Error {
	times := 2
	for i, name := range peer {
		has := of[name]
		if i == 0 && each > 0 && has >= each {
			return &limit.Error{Reason: limit.CallerShare}
		}
		none := i+1 < len(peer) && of[peer[i+1]] == 0
		if has >= times*free && !(none && 4*free > all) {
			return &limit.Error{Reason: Crowded}
		}
		// the number free within this name, including the new one
		if free = max((times*free-has+times)/(times+1), 1); i == 0 && each > 0 {
			free = min(free, each-has)
		}
		times = 32
	}
	return nil
}

// count adds connections of a peer; the locks are held.
func (l *Listener) count(peer Peer, n int) {
	l.own.add(peer.Names, n)
	process.add(peer.inProcess(), n*l.o.Descriptors)
}

// Closed declares that a connection, as Accept returned it, no longer counts. Repeated calls have no effect.
func (l *Listener) Closed(c net.Conn) {
	process.Lock()
	defer process.Unlock()
	l.own.Lock()
	defer l.own.Unlock()
	peer, held := l.held[c]
	if !held {
		return
	}
	delete(l.held, c)
	l.count(peer, -1)
}

// PeerOf returns the first name of the peer of a counted connection, or "".
func (l *Listener) PeerOf(c net.Conn) string {
	l.own.Lock()
	defer l.own.Unlock()
	if names := l.held[c].Names; len(names) > 0 {
		return names[0]
	}
	return ""
}

// Closing returns l as a net.Listener whose connections count until they are closed.
func (l *Listener) Closing() net.Listener { return closing{l} }

type closing struct{ *Listener }

func (l closing) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &closer{c, func() { l.Closed(c) }}, nil
}

// closer is a connection that calls a function when it is closed.
type closer struct {
	net.Conn
	closed func()
}

func (c *closer) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// CloseWrite closes the writing side, if the connection supports that.
func (c *closer) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}

// TCPPeer returns the peer of a TCP connection: its address, and the user if it comes from this machine. All other
// operating system connections share one peer, and connections within the process, as in tests, have none.
func TCPPeer(c net.Conn) Peer {
	from, ok := peerkey.Address(c)
	if !ok {
		if _, system := descriptor(c); system {
			return Peer{Names: []string{"others"}}
		}
		return Peer{}
	}
	if uid, known := owner(c); known {
		user := peerkey.User(uid)
		return Peer{[]string{from.String() + " " + user}, user}
	}
	return Peer{Names: []string{from.String()}}
}

// Max returns how many connections a server should have at a time: most, if the process has enough descriptors, and
// otherwise all descriptors but the reserve.
func Max(most int) int {
	if usable, known := usableDescriptors(); known {
		return min(most, usable)
	}
	return most
}

// usableDescriptors returns how many file descriptors accepted connections may use, by the current limit of the
// process (RLIMIT_NOFILE): all but the reserve, which is a quarter of the limit, at least 64 and at most 1,024. If
// the limit is below 128, the reserve is half of it. It reports false on systems without such a limit.
func usableDescriptors() (usable int, known bool) {
	most, known := descriptorLimit()
	if !known {
		return 0, false
	}
	return usableOf(most), true
}

func usableOf(most int) int { return most - min(max(most/4, 64), 1024, most/2) }
