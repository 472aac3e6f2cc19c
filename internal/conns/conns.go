// Package conns bounds the connections that a server has, in total and for each peer, and the time that the body of a
// request may take to arrive. [Dialed] holds the connections that a client has made, to close them all.
package conns

import (
	"errors"
	"net"
	"sync"

	"github.com/svidkit/svidkit/internal/limit"
)

// Reasons of a [limit.Error], beside those of package limit.
const (
	DescriptorReserve = "the other file descriptors are kept for the program itself"
	Crowded           = "few connections are left, and this caller has many"
)

// Options says how many connections a [Listener] hands out. Peers are told apart by a K.
type Options[K comparable] struct {
	Total int // at the same time; 0: no limit but that of the process
	Each  int // of each peer; 0: no limit

	// Peer returns the peer of a connection. False means that it counts in total only. Required.
	Peer func(net.Conn) (peer K, counted bool)

	// Refused, if set, is called for each connection that is closed because of a limit, before it is closed.
	Refused func(c net.Conn, err *limit.Error)
}

// Listener accepts connections within limits. One that is beyond them is closed at once, and the next one is accepted, so
// that a peer with too many connections delays no other. [Listen] makes one.
//
// A peer may have twice as many connections as are free, so the fuller the server is, the less each may add: a peer that
// takes what it can leaves a third for the others, two leave a fifth, and n of them one part in 2n+1. So there is room for
// a peer that has none, also if some peers have conspired.
//
// No connection takes a descriptor of the reserve: a quarter of those that the process may have (RLIMIT_NOFILE), from 64
// to 1,024 of them. The system gives out the lowest free number,
// so a connection whose number is in the reserve is one too many, whatever holds the others, in this server or
// elsewhere in the process.
type Listener[K comparable] struct {
	net.Listener
	o    Options[K]
	all  *limit.Shares[struct{}]
	each *limit.Shares[K]
	most int // descriptor that a connection may have; 0: any

	mu   sync.Mutex
	held map[net.Conn]holder[K]
}

type holder[K comparable] struct {
	peer    K
	counted bool
}

// Listen returns a Listener over l.
func Listen[K comparable](l net.Listener, o Options[K]) *Listener[K] {
	limited := &Listener[K]{
		Listener: l, o: o, all: limit.NewShares[struct{}](o.Total, 0), each: limit.NewShares[K](0, o.Each), held: map[net.Conn]holder[K]{},
	}
	if usable, known := usableDescriptors(); known {
		limited.most = usable - 1
	}
	return limited
}

// Accept returns the next connection that is within the limits. It counts until [Listener.Closed] is called. One
// goroutine calls it.
func (l *Listener[K]) Accept() (net.Conn, error) {
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

func (l *Listener[K]) take(c net.Conn) *limit.Error {
	if fd, known := descriptor(c); known && l.most > 0 && fd > l.most {
		return &limit.Error{Reason: DescriptorReserve}
	}
	var h holder[K]
	h.peer, h.counted = l.o.Peer(c)
	// Only this goroutine takes, so what is free now stays free until it is taken below.
	if free := l.o.Total - l.all.Held(); h.counted && free > 0 && l.each.Of(h.peer) >= 2*free {
		return &limit.Error{Reason: Crowded}
	}
	if h.counted {
		if err := l.each.Take(h.peer, 1); err != nil {
			return refusal(err)
		}
	}
	if err := l.all.Take(struct{}{}, 1); err != nil {
		if h.counted {
			l.each.Give(h.peer, 1)
		}
		return refusal(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[c] = h
	return nil
}

// refusal returns the error that Take of Shares has.
func refusal(err error) *limit.Error {
	e, _ := errors.AsType[*limit.Error](err)
	return e
}

// Closed says that a connection, as Accept returned it, counts no longer. A second call for it does nothing.
func (l *Listener[K]) Closed(c net.Conn) {
	l.mu.Lock()
	h, held := l.held[c]
	delete(l.held, c)
	l.mu.Unlock()
	if !held {
		return
	}
	if h.counted {
		l.each.Give(h.peer, 1)
	}
	l.all.Give(struct{}{}, 1)
}

// Held returns how many connections count now.
func (l *Listener[K]) Held() int { return l.all.Held() }

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
