package conns

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/metrics"
)

const (
	headerTime = 10 * time.Second // for the first request, the header of each, and the rest of a body
	idleTime   = 5 * time.Minute  // without a request in progress
	answerTime = 30 * time.Second // in which a client must take an answer, unless the handler sets another time

	maxHeader  = 64 << 10 // bytes of the header of a request
	headerUnit = 8 << 10  // bytes of a header that count as one request
	// requests that are under way in the process, some 16 KiB each; a thousand fit on one connection
	maxWork = 1664
)

// Reasons of a [limit.Error] for requests.
const (
	Busy       = "too many requests are under way"
	BusyCaller = "too many requests are under way, and this caller has many of them"
)

// underWay counts the requests that the handlers of all Servers of the process have not finished, and the answers
// that net/http has not sent completely.
var underWay = budget{of: map[string]int{}}

// take counts n requests of a peer with these names, or returns an error if a limit is reached.
func (b *budget) take(peer []string, n int) *limit.Error {
	b.Lock()
	defer b.Unlock()
	if b.held+n > maxWork {
		return &limit.Error{Reason: Busy}
	}
	if crowded(peer, b.of, maxWork, maxWork-b.held, 0) != nil {
		return &limit.Error{Reason: BusyCaller}
	}
	b.add(peer, n)
	return nil
}

// give returns n requests that take has counted.
func (b *budget) give(peer []string, n int) {
	b.Lock()
	defer b.Unlock()
	b.add(peer, -n)
}

var busy = metrics.Process.Counters("svidkit_requests_refused_total",
	"The number of requests that were refused at once because of a limit, by the reason.",
	"reason", slices.Sorted(maps.Values(busyLabels))...)

var busyLabels = map[string]string{Busy: labels[limit.TotalShare], BusyCaller: labels[limit.CallerShare]}

// Server returns a server for the connections of l, with HTTP/1.1, and HTTP/2 without TLS with at most streams
// concurrent streams on a connection. A connection counts until the server has closed it.
//
// Requests under way share a budget of the process, as descriptors do: of 1,664, a peer may have twice as many as are
// free, at all Servers together, and one of its connections 32 times as many as are free for the peer. A request by
// TCP counts twice, a request with a long header as several, and a request with a [Large] message once more. It
// counts from before h is called until the end of the answer is written, or until [Known]. The client has 30 seconds
// for each part that h writes, unless h sets a time. Requests beyond the budget are answered with 503, and gRPC with
// ResourceExhausted, without a body that would wait for the client. The server does not read from a client that does
// not read its answers, so the number of that client's requests stays bounded.
func (l *Listener) Server(h http.Handler, streams int, log slog.Handler) *http.Server {
	srv := &http.Server{
		Protocols: new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          streams,
			MaxReadFrameSize:              16 << 10, // Go clients set aside that much for each stream
			MaxReceiveBufferPerConnection: 64 << 10,
			MaxReceiveBufferPerStream:     64 << 10,
			WriteByteTimeout:              time.Minute,
		},
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeader,
		ConnState: func(c net.Conn, state http.ConnState) {
			if state == http.StateClosed || state == http.StateHijacked {
				l.Closed(Raw(c))
			}
		},
		ErrorLog: slog.NewLogLogger(log, slog.LevelDebug),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		reads, _ := c.(*patientConn)
		c = Raw(c)
		l.own.Lock()
		names := slices.Clone(l.held[c].inProcess())
		l.own.Unlock()
		names = append(names, strconv.FormatUint(clients.Add(1), 10))
		return context.WithValue(ctx, clientKey{}, client{c, names, reads})
	}
	srv.Handler = Body(within(h, l.o.Refused), headerTime)
	return srv
}

// Raw returns the accepted connection of a Listener that c wraps.
func Raw(c net.Conn) net.Conn {
	for {
		inner, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = inner.NetConn()
	}
}

// Patient returns l with connections that are read no faster than a Server can follow: not while the client leaves
// written data unread, and not while many HTTP/2 streams wait for their handlers or for the end of a refusal. A
// connection is closed if its streams get no handler because net/http refuses them itself.
func Patient(l net.Listener) net.Listener { return patient{l} }

type patient struct{ net.Listener }

func (l patient) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &patientConn{Conn: c, writing: make(chan struct{}, 1)}, nil
}

// Limits on waiting streams.
const (
	maxWaiting     = 256 // in the process
	maxWaitingEach = 64  // on a connection
	fewWaiting     = 2   // on a connection, always allowed
)

var waiting atomic.Int64 // on all connections

var errWaiting = errors.New("too many streams of the connection are malformed, or beyond its limit")

type patientConn struct {
	net.Conn
	writing chan struct{} // has an element during a Write; a mutex would stop the virtual time of tests

	mu     sync.Mutex
	opened int  // streams whose handlers have not begun; net/http may never begin them
	begun  int  // streams whose handlers have begun, but are neither under way nor done
	closed bool // the opened streams no longer count

	// The state of the parser: only Read uses it.
	matched int // bytes of the preface of HTTP/2
	plain   bool
	head    []byte // of a frame
	skip    int    // bytes of one
	newest  uint32 // stream
}

// NetConn serves [Raw].
func (c *patientConn) NetConn() net.Conn { return c.Conn }

func (c *patientConn) Write(p []byte) (int, error) {
	c.writing <- struct{}{}
	defer func() { <-c.writing }()
	return c.Conn.Write(p)
}

func (c *patientConn) Read(p []byte) (int, error) {
	c.writing <- struct{}{}
	<-c.writing
	for begun := time.Now(); c.crowded(); time.Sleep(time.Millisecond) {
		if time.Since(begun) > headerTime {
			return 0, errWaiting
		}
	}
	n, err := c.Conn.Read(p)
	if opened := c.opens(p[:n]); opened > 0 {
		c.wait(opened)
	}
	return n, err
}

// Close closes the connection.
func (c *patientConn) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		waiting.Add(-int64(c.opened))
	}
	c.mu.Unlock()
	return c.Conn.Close()
}

func (c *patientConn) crowded() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.opened + c.begun
	return !c.closed && (n >= maxWaitingEach || n >= fewWaiting && waiting.Load() >= maxWaiting)
}

// wait counts n more streams that wait for their handlers.
func (c *patientConn) wait(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.opened += n
		waiting.Add(int64(n))
	}
}

// served counts the start of a stream's handler. The stream counts until done is called.
func (c *patientConn) served() (done func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.begun++; c.closed {
		waiting.Add(1)
	} else {
		c.opened--
	}
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.begun--
		waiting.Add(-1)
	})
}

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// opens returns how many streams the client opens with the bytes just read.
func (c *patientConn) opens(p []byte) (n int) {
	const header, headers = 9, 1 // bytes of a frame's header, and the type of a HEADERS frame
	for len(p) > 0 && !c.plain {
		switch k := min(c.skip, len(p)); {
		case c.matched < len(preface):
			c.plain = p[0] != preface[c.matched]
			c.matched++
			p = p[1:]
		case k > 0:
			c.skip -= k
			p = p[k:]
		default:
			k = min(header-len(c.head), len(p))
			c.head = append(c.head, p[:k]...)
			if p = p[k:]; len(c.head) < header {
				break
			}
			c.skip = int(c.head[0])<<16 | int(c.head[1])<<8 | int(c.head[2])
			if id := binary.BigEndian.Uint32(c.head[5:]); c.head[3] == headers && id > c.newest {
				c.newest = id
				n++
			}
			c.head = c.head[:0]
		}
	}
	return n
}

// client is a connection whose requests are counted.
type client struct {
	net.Conn
	names   []string     // of its peer, and last the connection's own
	patient *patientConn // or nil
}

type (
	clientKey struct{}
	answerKey struct{}
)

var clients atomic.Uint64

// within returns a handler that serves as next does, within the budget.
func within(next http.Handler, refused func(net.Conn, string, *limit.Error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // this frame stays on each stack
		if a := admit(w, r, refused); a != nil {
			defer a.leave()
			next.ServeHTTP(a, a.request)
			a.end()
		}
	})
}

// admit counts a request and returns its answer, or refuses it if a limit is reached.
func admit(w http.ResponseWriter, r *http.Request, refused func(net.Conn, string, *limit.Error)) *answer {
	from := r.Context().Value(clientKey{}).(client)
	admitted := func() {}
	if from.patient != nil && !isHTTP1(r) {
		admitted = from.patient.served()
	}
	n := 0
	for name, values := range r.Header {
		for _, v := range values {
			n += len(name) + len(v)
		}
	}
	n = 1 + n/headerUnit
	if _, tcp := from.LocalAddr().(*net.TCPAddr); tcp {
		n *= 2 // a thousand on one connection are for Envoy, on Unix sockets
	}
	if err := underWay.take(from.names, n); err != nil {
		defer ended(w, r, admitted)
		busy[busyLabels[err.Reason]].Inc()
		refused(from.Conn, "request refused", err)
		refuse(w, r, err)
		return nil
	}
	admitted()
	a := &answer{ResponseWriter: w, wire: http.NewResponseController(w), http1: isHTTP1(r), names: from.names, n: n}
	a.read.end, a.write.end = a.wire.SetReadDeadline, a.wire.SetWriteDeadline
	a.request = r.WithContext(context.WithValue(r.Context(), answerKey{}, a))
	return a
}

// ended calls f when the answer of a returning handler has ended: with HTTP/2 its goroutine stays until then.
func ended(w http.ResponseWriter, r *http.Request, f func()) {
	if of, ok := w.(interface{ CloseNotify() <-chan bool }); ok && !isHTTP1(r) {
		over := of.CloseNotify()
		go func() {
			<-over
			f()
		}()
		return
	}
	f()
}

// refuse answers a request that exceeds a limit.
func refuse(w http.ResponseWriter, r *http.Request, err *limit.Error) {
	header := w.Header()
	header.Set("Retry-After", "10")
	if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		header.Set("Content-Type", "application/grpc")
		header.Set("Grpc-Status", "8") // ResourceExhausted
		header.Set("Grpc-Message", err.Reason+"; try again later")
		return
	}
	w.WriteHeader(http.StatusServiceUnavailable)
}

// Known declares that the client of a request has taken a message of its stream. The request no longer counts as
// under way: the server of the stream has its own limit for each peer.
func Known(ctx context.Context) {
	if a, ok := ctx.Value(answerKey{}).(*answer); ok {
		a.over()
	}
}

// Large declares that a request has a large message. The request then counts once more. It fails at a limit.
func Large(ctx context.Context) error {
	a, ok := ctx.Value(answerKey{}).(*answer)
	if !ok {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.large || a.done {
		return nil
	}
	if err := underWay.take(a.names, 1); err != nil {
		return err
	}
	a.large = true
	a.n++
	return nil
}

// answer is the answer to a request under way. The client must take each part in time, unless the handler sets the
// time.
type answer struct {
	http.ResponseWriter
	wire                *http.ResponseController
	http1, timed, wrote bool
	read, write         deadline      // of HTTP/2
	request             *http.Request // has the answer in its context
	names               []string      // of the client

	mu          sync.Mutex
	n           int // how many requests it counts as
	large, done bool
}

// over declares that the request is no longer under way.
func (a *answer) over() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.done {
		a.done = true
		underWay.give(a.names, a.n)
	}
}

func (a *answer) begin() {
	if !a.timed {
		_ = a.limit(time.Now().Add(answerTime))
	}
}

// pause clears the deadline: HTTP/2 would end even an idle stream at that time.
func (a *answer) pause() {
	if !a.timed && !a.http1 {
		_ = a.limit(time.Time{})
	}
}

func (a *answer) limit(t time.Time) error {
	if a.http1 {
		return a.wire.SetWriteDeadline(t)
	}
	return a.write.set(t)
}

// SetWriteDeadline serves [http.ResponseController].
func (a *answer) SetWriteDeadline(t time.Time) error {
	a.timed = true
	return a.limit(t)
}

// SetReadDeadline serves [http.ResponseController].
func (a *answer) SetReadDeadline(t time.Time) error {
	if a.http1 {
		return a.wire.SetReadDeadline(t)
	}
	return a.read.set(t)
}

// deadline is a deadline of a stream. A deadline of net/http, if set while the stream ends, would keep the stream in
// memory until that time.
type deadline struct {
	end   func(time.Time) error
	mu    sync.Mutex
	at    time.Time
	timer *time.Timer
}

// set makes t the deadline. At t, or at once if t has passed, it calls end with a time in the past.
func (d *deadline) set(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = t
	over := time.Unix(1, 0)
	switch wait := time.Until(t); {
	case t.IsZero():
		if d.timer != nil {
			d.timer.Stop()
		}
	case wait <= 0:
		return d.end(over)
	case d.timer == nil:
		d.timer = time.AfterFunc(wait, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if !d.at.IsZero() && !time.Now().Before(d.at) {
				_ = d.end(over)
			}
		})
	default:
		d.timer.Reset(wait)
	}
	return nil
}

func (a *answer) Write(p []byte) (int, error) {
	a.begin()
	defer a.pause()
	a.wrote = true
	return a.ResponseWriter.Write(p)
}

// Flush implements [http.Flusher].
func (a *answer) Flush() {
	a.begin()
	defer a.pause()
	_ = a.wire.Flush()
}

// Unwrap serves [http.ResponseController].
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// end waits until the client has taken the answer. net/http would wait only when the request no longer counts.
func (a *answer) end() {
	switch {
	case a.http1: // one request at a time on a connection
		a.begin()
	case a.wrote:
		a.Flush()
	}
}

// leave stops all calls that net/http forbids after the handler, and then ends the request.
func (a *answer) leave() {
	if !a.http1 {
		_ = a.read.set(time.Time{})
		_ = a.write.set(time.Time{})
	}
	ended(a.ResponseWriter, a.request, a.over)
}
