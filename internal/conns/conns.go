// Package conns bounds the connections that the servers of a process have, in total and for each peer, and the time that the
// body of a request may take to arrive. [Dialed] holds the connections that a client has made, to close them all.
package conns

import (
	"cmp"
	"net"
	"sync"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// Reasons of a [limit.Error], beside those of package limit.
const (
	DescriptorReserve = "the other file descriptors are kept for the program itself"
	Crowded           = "few connections are left, and this caller has many"
)

// Options says how many connections a [Listener] hands out.
type Options struct {
	Total       int // at the same time; 0: no limit but that of the process
	Each        int // of each peer; 0: no limit
	Descriptors int // that a connection takes, with those that the server opens for it; 0: one

	// Peer returns the peer of a connection, from the widest name to the narrowest, such as a user and a process of it. Nil
	// means [Peer].
	Peer func(net.Conn) []string

	// Refused, if set, is called for each connection that is closed because of a limit, before it is closed.
	Refused func(c net.Conn, err *limit.Error)
}

// Listener accepts connections within limits. One that is beyond them is closed at once, and the next one is accepted, so
// that a peer with too many connections delays no other. [Listen] makes one.
//
// Descriptors are the process's, so all Listeners of a process share one budget. A peer may have twice as many connections
// at one Listener as are free in the budget and at the Listener, so the fuller the process is, the less each may add: a peer
// that takes what it can leaves a third for the others, two leave a fifth, and n of them one part in 2n+1, also where they
// are one peer at n Listeners. So there is room for a peer that has none, and for a Listener that has none. Within the wider
// name of its peers, a narrower one may have 32 times as many as are free for that; and while a quarter is free, one that has
// none gets its first connection whatever the others of the wider name have.
//
// No connection takes a descriptor of the reserve: a quarter of those that the process may have (RLIMIT_NOFILE), from 64
// to 1,024 of them. The system gives out the lowest free number, so a connection whose number is in the reserve is one too
// many, whatever holds the others, in this server or elsewhere in the process.
type Listener struct {
	net.Listener
	o      Options
	usable int // descriptors of the process; 0: any number

	mu   sync.Mutex
	held map[net.Conn][]string // the peer of each connection
	of   map[string]int        // connections of each name
}

// process has the descriptors that the connections of all Listeners take: what is given away belongs to the process, whoever
// gives it away. Whoever holds its lock may take that of a Listener.
var process struct {
	sync.Mutex
	held int
}

// Listen returns a Listener over l.
func Listen(l net.Listener, o Options) *Listener {
	if o.Peer == nil {
		o.Peer = Peer
	}
	o.Descriptors = max(o.Descriptors, 1)
	limited := &Listener{Listener: l, o: o, held: map[net.Conn][]string{}, of: map[string]int{}}
	limited.usable, _ = usableDescriptors()
	return limited
}

// Accept returns the next connection that is within the limits. It counts until [Listener.Closed] is called.
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
		if l.o.Refused != nil {
			l.o.Refused(c, refused)
		}
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
	l.mu.Lock()
	defer l.mu.Unlock()
	all := cmp.Or(l.o.Total, 1<<30) // connections
	free := all - len(l.held)
	if free <= 0 {
		return &limit.Error{Reason: limit.TotalShare}
	}
	if l.usable > 0 {
		all, free = min(all, l.usable/l.o.Descriptors), min(free, (l.usable-process.held)/l.o.Descriptors)
	}
	if free <= 0 {
		return &limit.Error{Reason: DescriptorReserve}
	}
	times := 2
	for i, name := range peer {
		has := l.of[name]
		if i == 0 && l.o.Each > 0 && has >= l.o.Each {
			return &limit.Error{Reason: limit.CallerShare}
		}
		none := i+1 < len(peer) && l.of[peer[i+1]] == 0
		if has >= times*free && !(none && free >= all/4) {
			return &limit.Error{Reason: Crowded}
		}
		if free = max((times*free-has+times)/(times+1), 1); i == 0 && l.o.Each > 0 { // of those within it, this one included
			free = min(free, l.o.Each-has)
		}
		times = 32
	}
	for _, name := range peer {
		l.of[name]++
	}
	l.held[c] = peer
	process.held += l.o.Descriptors
	return nil
}

// Closed says that a connection, as Accept returned it, counts no longer. A second call for it does nothing.
func (l *Listener) Closed(c net.Conn) {
	process.Lock()
	defer process.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	peer, held := l.held[c]
	if !held {
		return
	}
	delete(l.held, c)
	for _, name := range peer {
		if l.of[name]--; l.of[name] == 0 {
			delete(l.of, name)
		}
	}
	process.held -= l.o.Descriptors
}

// Held returns how many connections count now.
func (l *Listener) Held() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.held)
}

// Closing returns l with connections that count until they are closed.
func (l *Listener) Closing() net.Listener { return closing{l} }

type closing struct{ *Listener }

func (l closing) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &counted{c, l.Listener}, nil
}

// counted is a connection that counts until it is closed.
type counted struct {
	net.Conn
	of *Listener
}

func (c *counted) Close() error {
	defer c.of.Closed(c.Conn)
	return c.Conn.Close()
}

// CloseWrite says that nothing more follows, if the connection can.
func (c *counted) CloseWrite() error { return closeWrite(c.Conn) }

// Peer returns the peer of a connection by TCP: its address, and the user of this machine if it begins here. Other connections
// of the system are one peer, and those within the process, as tests have them, none.
func Peer(c net.Conn) []string {
	from, ok := peerkey.Address(c)
	if _, system := descriptor(c); !ok && system {
		return []string{"others"}
	} else if !ok {
		return nil
	}
	if user, known := owner(c); known {
		return []string{from.String() + " " + peerkey.User(user)}
	}
	return []string{from.String()}
}

// Max returns how many connections a server should have at a time, which is most if the process has descriptors for
// that, and else all of them but the reserve.
func Max(most int) int {
	if usable, known := usableDescriptors(); known {
		return min(most, usable)
	}
	return most
}

// usableDescriptors returns how many file descriptors the accepted connections of this process may use, by its limit
// (RLIMIT_NOFILE) at this moment: all but the reserve, which is a quarter of the limit, and from 64 to 1,024. Of a limit
// below 128 the reserve is half. It reports false on systems that have no such limit.
func usableDescriptors() (usable int, known bool) {
	most, known := descriptorLimit()
	if !known {
		return 0, false
	}
	return usableOf(most), true
}

func usableOf(most int) int { return most - min(max(most/4, 64), 1024, most/2) }
