package workloadapi

import (
	"context"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"net"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// Client calls the Workload API. It is safe for concurrent use. Its only state is its connections; for an identity
// that stays current use a [Source].
type Client struct {
	server   string // the address, as errors and logs show it
	http     *http.Client
	patience renew.Patience
	conns    conns.Dialed // none with an HTTP client of the caller
	answered renew.Signal // of a stream whose first message is good: the server is there
}

// NewClient returns a client for the server at address, such as "unix:///run/agent/api.sock": see [Config]. It does
// not connect.
//
// Most programs pass nil for via. An HTTP client reaches the server, whatever the host in a URL, in place of a new
// one for the address, which may then be empty: for a server behind a named pipe, say. It must speak HTTP/2 without
// TLS and have no Timeout, which would end the streams.
func NewClient(address string, via *http.Client) (*Client, error) {
	c := &Client{server: address, http: via, patience: patience}
	if via != nil && address == "" {
		c.server = "the server of an http.Client"
		return c, nil
	}
	a, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	c.server = a.String()
	if a.network == "unix" {
		c.patience.Longest = c.patience.Impatient // an attempt costs next to nothing where the server is away
	}
	if c.http == nil {
		c.http = httpClient(a, &c.conns)
	}
	return c, nil
}

// httpClient returns a client that reaches a whatever the URL says, with HTTP/2 and no TLS, by connections in open.
// Proxies are not used.
func httpClient(a address, open *conns.Dialed) *http.Client {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	dial := open.Dial((&net.Dialer{Timeout: 30 * time.Second}).DialContext)
	return &http.Client{Transport: &http.Transport{
		Protocols: &protocols,
		HTTP2: &http.HTTP2Config{
			// A server whose process hangs keeps its connections. Servers made with grpc-go end those
			// whose client asks more often than every five minutes.
			SendPingTimeout: 6 * time.Minute,
			// A server that writes and does not read would block every goroutine that closes a stream.
			WriteByteTimeout: 30 * time.Second,
		},
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        90 * time.Second,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, a.network, a.target)
		},
	}}
}

// CloseIdleConnections closes connections that are not in use, such as those of watches that have ended, which would
// otherwise stay open for 90 seconds. The Client stays usable.
func (c *Client) CloseIdleConnections() { c.http.CloseIdleConnections() }

func (c *Client) rpc(limit int) *grpchttp.Client {
	return grpchttp.NewClient(c.http, "http://localhost"+workloadwire.Service, limit)
}

// metadata has the header that shows that no third party made the workload send the request.
func metadata() http.Header {
	h := make(http.Header)
	h.Set(workloadwire.Header, "true")
	return h
}

// call makes a unary call, once. It takes callTimeout at most.
func (c *Client) call(ctx context.Context, name string, limit int, request []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	data, err := c.rpc(limit).Unary(ctx, name, metadata(), request)
	if err != nil {
		return nil, c.failure(name, err)
	}
	return data, nil
}

// WatchX509SVIDs yields the identities and trust bundles of this workload: the current ones, and then those after each
// change, until ctx is done, the loop ends, or the server refuses for good. A slow loop misses no change.
//
// Failures are yielded as an [*Error]. Unless it is Final, the watch goes on with a new stream: at once after a stream
// that brought something, and else after [Error].RetryIn, or when another watch of the same Client is answered. What
// was received stays valid, except that an error that wraps [ErrDenied] withdraws it. An error that wraps
// [ErrBadResponse] reports a discarded response.
func (c *Client) WatchX509SVIDs(ctx context.Context) iter.Seq2[*Update, error] {
	return c.watchUpdates(ctx, workloadwire.FetchX509SVID, (*reader).x509SVIDs)
}

// WatchX509Bundles yields the trust bundles for X.509-SVIDs, as [Client.WatchX509SVIDs] does: for
// programs that verify peers and have no identity of their own to present.
func (c *Client) WatchX509Bundles(ctx context.Context) iter.Seq2[*Update, error] {
	return c.watchUpdates(ctx, workloadwire.FetchX509Bundles, (*reader).x509Bundles)
}

// WatchJWTBundles yields the trust bundles for JWT-SVIDs, as [Client.WatchX509SVIDs] does.
func (c *Client) WatchJWTBundles(ctx context.Context) iter.Seq2[*Update, error] {
	return c.watchUpdates(ctx, workloadwire.FetchJWTBundles, (*reader).jwtBundles)
}

func (c *Client) watchUpdates(ctx context.Context, name string,
	read func(*reader, []byte) (*Update, error)) iter.Seq2[*Update, error] {
	return func(yield func(*Update, error) bool) {
		r := &reader{}
		(&watch[*Update]{
			client: c, name: name,
			read:   func(data []byte) (*Update, error) { return read(r, data) },
			forget: func() { *r = reader{} },
			ends:   func() time.Time { return r.last.ends(time.Now()) },
		}).run(ctx, yield)
	}
}

const (
	minReconnect = time.Second     // between streams that follow each other without a wait
	silenceLimit = 2 * time.Minute // for the first response: a server may have to find out which process is asking
	maxBad       = 8               // bad responses in a row after which a stream is given up
)

// patience bounds the waits between streams. They are shares of the life that is left to what
// was received, so that identities of a minute survive the restart of an agent.
var patience = renew.Patience{Impatient: 5 * time.Second, Longest: 30 * time.Second, Wish: time.Minute}

var (
	errSilent = errors.New("the server did not answer in time")
	errEnded  = errors.New("the server ended the stream")
	errAllBad = errors.New("the server sends nothing but bad responses; the stream was given up")
)

// watch is a stream that is opened again and again.
type watch[U any] struct {
	client  *Client
	name    string // of the method
	request []byte
	read    func(data []byte) (U, error) // makes an update of a response, which it may remember
	forget  func()                       // what read remembers; may be nil
	ends    func() time.Time             // when that expires; may be nil

	received time.Time // the last good response that is not withdrawn
	brought  bool      // the last stream had a good response
}

// run yields updates and errors until ctx is done, the caller's loop ends, or an error is final.
func (w *watch[U]) run(ctx context.Context, yield func(U, error) bool) {
	p := pace{patience: w.client.patience}
	for ctx.Err() == nil {
		wake := w.client.answered.Changed()
		good, over, err := w.stream(ctx, yield)
		if over || ctx.Err() != nil {
			return
		}
		if errors.Is(err, ErrDenied) {
			w.received = time.Time{}
			if w.forget != nil {
				w.forget()
			}
		}
		err.RetryIn = p.next(err, good, w.received, w.end(), time.Now(), rand.Float64())
		var none U
		if !yield(none, err) || err.Final {
			return
		}
		if w.brought || err.after > 0 {
			// A stream that woke the others is not woken by them, or two that end at once would wake each other
			// without end. A server that names a time is obeyed.
			wake = nil
		}
		renew.Wait(ctx, err.RetryIn, wake)
	}
}

// end returns when what was received expires; zero if it does not.
func (w *watch[U]) end() time.Time {
	if w.ends == nil || w.received.IsZero() {
		return time.Time{}
	}
	return w.ends()
}

// pace decides when a stream is followed by the next.
type pace struct {
	patience    renew.Patience
	failures    int       // in a row
	reconnected time.Time // the last time without a wait
}

// next returns how long to wait at now, after a stream that ended with err and had a good message or not.
// What is in force was received at received, zero if nothing is, and ends at end, zero if it does not. u is
// in [0,1).
func (p *pace) next(err *Error, good bool, received, end, now time.Time, u float64) time.Duration {
	if good {
		p.failures = 0
	}
	if err.Final {
		return 0
	}
	if good && !received.IsZero() && now.Sub(p.reconnected) >= minReconnect {
		p.reconnected = now // a stream that brought something is followed by the next at once
		return 0
	}
	p.failures++
	f := renew.NewFailure(p.failures, err)
	switch {
	case received.IsZero():
		return p.patience.Wait(f, 0, 0, u)
	case end.IsZero(): // bundles
		return p.patience.WaitEndless(f, u)
	}
	return p.patience.Wait(f, end.Sub(received), end.Sub(now), u)
}

// stream runs one stream to its end. It reports whether a message on it was good, and whether the
// caller's loop has ended. A stream that is given up counts as one without a good message.
func (w *watch[U]) stream(ctx context.Context, yield func(U, error) bool) (good, over bool, _ *Error) {
	w.brought = false
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := silenceLimit
	if end := w.end(); !end.IsZero() {
		limit = renew.AttemptTime(silenceLimit, time.Until(end))
	}
	silence := time.AfterFunc(limit, func() { cancel(errSilent) })
	defer silence.Stop()
	fail := func(err error) *Error {
		if context.Cause(ctx) == errSilent {
			err = errSilent
		}
		return w.client.failure(w.name, err)
	}

	s, err := w.client.rpc(maxMessage).Stream(ctx, w.name, metadata(), w.request)
	if err != nil {
		return false, false, fail(err)
	}
	defer func() {
		cancel(nil)
		_ = s.Close()
	}()
	for bad := 0; ; {
		data, err := s.Receive()
		if err == io.EOF {
			err = errEnded
		}
		if err != nil {
			return good, false, fail(err)
		}
		silence.Stop()
		u, err := w.read(data)
		if err != nil {
			var none U
			if !yield(none, w.client.badResponse(w.name, err)) {
				return good, true, nil
			}
			if bad++; bad == maxBad {
				return false, false, w.client.failure(w.name, errAllBad)
			}
			continue
		}
		if !w.brought {
			w.brought = true
			w.client.answered.Notify()
		}
		good, bad, w.received = true, 0, time.Now()
		if !yield(u, nil) {
			return good, true, nil
		}
	}
}

// ends returns when the next identity of an update expires or, after that, when the last did; zero if there
// is none.
func (u *Update) ends(now time.Time) time.Time {
	if u == nil {
		return time.Time{}
	}
	return renew.NextEnd(now, func(yield func(time.Time) bool) {
		for _, id := range u.Identities {
			if !yield(id.SVID.NotAfter()) {
				return
			}
		}
	})
}

// parseID parses an ID in a response.
func parseID(s string) (spiffe.ID, error) {
	if s == "" {
		return spiffe.ID{}, errors.New("spiffe_id is empty")
	}
	return spiffe.ParseID(s)
}
