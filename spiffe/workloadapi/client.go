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
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// Client calls the Workload API. It is safe for concurrent use. Its only state is its connections; for an identity
// that stays current use a [Source].
type Client struct {
	server string // the address, as errors and logs show it
	http   *http.Client
	api    workloadwire.API // nil for the Workload API
	conns  conns.Dialed     // none with an HTTP client of the caller
}

// NewClient returns a client for the server at address, such as "unix:///run/agent/api.sock": see [Config]. It does
// not connect.
//
// Most programs pass nil for via. A non-nil via carries all requests, and address may then be empty. Use it for a
// server behind a named pipe, for example. It must reach the server whatever host a URL names, speak HTTP/2 without
// TLS, and have no Timeout, which would end the streams.
func NewClient(address string, via *http.Client) (*Client, error) {
	c := &Client{server: address, http: via}
	if via != nil && address == "" {
		c.server = "the server of an http.Client"
		if other, ok := via.Transport.(workloadwire.API); ok {
			c.api, c.server = other, other.String()
		}
		return c, nil
	}
	a, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	c.server = a.String()
	if c.http == nil {
		c.http = httpClient(a, &c.conns)
	}
	return c, nil
}

func parseAddress(s string) (workloadwire.Address, error) {
	return workloadwire.ParseAddress("workloadapi", s, SocketEnv, nil)
}

// httpClient returns a client that speaks HTTP/2 without TLS to a, whatever the URL says. open tracks its connections.
// It uses no proxy.
func httpClient(a workloadwire.Address, open *conns.Dialed) *http.Client {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	dial := open.Dial((&net.Dialer{Timeout: 30 * time.Second}).DialContext)
	return &http.Client{Transport: &http.Transport{
		Protocols: &protocols,
		HTTP2: &http.HTTP2Config{
			// A server process that hangs keeps its connections, so pings are needed. Servers made with grpc-go close
			// the connection of a client that pings more often than every five minutes.
			SendPingTimeout: 6 * time.Minute,
			// A server that writes and does not read would block every goroutine that closes a stream.
			WriteByteTimeout: 30 * time.Second,
		},
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        90 * time.Second,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, a.Network, a.Target)
		},
	}}
}

// CloseIdleConnections closes unused connections, for example after a watch has ended. Otherwise they stay open for 90
// seconds. The Client stays usable.
func (c *Client) CloseIdleConnections() { c.http.CloseIdleConnections() }

// open begins a call. The header shows that the workload itself sent the request (Workload Endpoint section 6).
func (c *Client) open(ctx context.Context, name string, limit int, request []byte) (_ *grpchttp.Stream, err error) {
	url, metadata := "http://localhost"+workloadwire.Service+name, make(http.Header)
	metadata.Set(workloadwire.Header, "true")
	if mldsa.Available() {
		metadata.Set(workloadwire.Alternatives, "true")
	}
	if c.api != nil {
		if url, metadata, request, err = c.api.Request(name, request); err != nil {
			return nil, err
		}
	}
	return grpchttp.NewClient(c.http, "", limit).Stream(ctx, url, metadata, request)
}

// call makes one unary call, within callTimeout.
func (c *Client) call(ctx context.Context, name string, limit int, message []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	s, err := c.open(ctx, name, limit, message)
	var data []byte
	if err == nil {
		defer s.Close()
		data, err = s.ReceiveOnly()
	}
	if err != nil {
		return nil, c.failure(name, err)
	}
	return data, nil
}

// WatchX509SVIDs yields the identities and trust bundles of this workload, first the current ones and then again after
// each change. It ends when ctx is done, the loop ends, or the server refuses for good. A slow loop misses no change.
//
// Failures are yielded as an [*Error]. Unless the error is Final, the watch opens a new stream: at once if the last
// stream delivered a response, otherwise after [Error].RetryIn. Earlier updates stay valid, except that an error that
// wraps [ErrDenied] withdraws them. An error that wraps [ErrBadResponse] reports a discarded response.
func (c *Client) WatchX509SVIDs(ctx context.Context) iter.Seq2[*Update, error] {
	return c.watchUpdates(ctx, workloadwire.FetchX509SVID, (*reader).x509SVIDs)
}

// WatchX509Bundles yields the trust bundles for X.509-SVIDs, like [Client.WatchX509SVIDs], for programs that verify
// peers and present no identity.
func (c *Client) WatchX509Bundles(ctx context.Context) iter.Seq2[*Update, error] {
	return c.watchUpdates(ctx, workloadwire.FetchX509Bundles, (*reader).x509Bundles)
}

// WatchJWTBundles yields the trust bundles for JWT-SVIDs, like [Client.WatchX509SVIDs].
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
	minReconnect = time.Second     // between two reconnects without a wait
	silenceLimit = 2 * time.Minute // for the first response: a server may need time to attest the caller
	maxBad       = 8               // bad responses in a row before a stream is abandoned

	lookInterval = 200 * time.Millisecond // between two looks at a Unix socket where nothing listened
)

// patience bounds the waits between streams. A wait is a share of the remaining lifetime, so that even an identity
// that lives for a minute survives the restart of an agent. An attempt costs next to nothing while the server is away.
var patience = renew.Patience{Impatient: 5 * time.Second, Longest: 5 * time.Second, Wish: 2 * time.Minute}

var (
	errSilent = errors.New("the server did not answer in time")
	errEnded  = errors.New("the server ended the stream")
	errAllBad = errors.New("the server sends nothing but bad responses; the stream was given up")
)

// watch is a stream that is reopened whenever it ends.
type watch[U any] struct {
	client  *Client
	name    string // of the method
	request []byte
	read    func(data []byte) (U, error) // parses a response, which it may remember
	forget  func()                       // clears the memory of read; may be nil
	ends    func() time.Time             // when the remembered response expires; may be nil

	received time.Time // when the last good response came; zero if it was withdrawn
}

// run yields updates and errors until ctx is done, the caller's loop ends, or an error is final.
func (w *watch[U]) run(ctx context.Context, yield func(U, error) bool) {
	var p pace
	for ctx.Err() == nil {
		good, over, err := w.stream(ctx, yield)
		if over || ctx.Err() != nil {
			return
		}
		if errors.Is(err, ErrDenied) {
			err.Final = errors.Is(err, workloadwire.ErrEnded) && !w.received.IsZero() // no longer, and so never again
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
		wait(ctx, err)
	}
}

// wait waits for err.RetryIn or, if nothing listened at a Unix socket, until something does.
func wait(ctx context.Context, err *Error) {
	socket, step := "", err.RetryIn
	if failed, ok := errors.AsType[*net.OpError](err); ok && failed.Op == "dial" && failed.Net == "unix" {
		socket, step = failed.Addr.String(), lookInterval
	}
	for end := time.Now().Add(err.RetryIn); ctx.Err() == nil && time.Now().Before(end); {
		renew.Wait(ctx, min(step, time.Until(end)), nil)
		if conn, err := net.Dial("unix", socket); err == nil {
			_ = conn.Close() // the next stream makes its own
			return
		}
	}
}

// end returns when the received update expires; zero if it does not.
func (w *watch[U]) end() time.Time {
	if w.ends == nil || w.received.IsZero() {
		return time.Time{}
	}
	return w.ends()
}

// pace decides when the next stream starts.
type pace struct {
	failures    int       // in a row
	reconnected time.Time // the last reconnect without a wait
}

// next returns how long to wait at now, after a stream that ended with err. good reports whether the stream had a good
// message. The current update was received at received (zero if there is none) and expires at end (zero if it does
// not). u is in [0,1).
func (p *pace) next(err *Error, good bool, received, end, now time.Time, u float64) time.Duration {
	if good {
		p.failures = 0
	}
	if err.Final {
		return 0
	}
	if good && !received.IsZero() && now.Sub(p.reconnected) >= minReconnect {
		p.reconnected = now // the stream delivered something: reconnect at once
		return 0
	}
	p.failures++
	var life, left time.Duration
	if !end.IsZero() { // not bundles
		life, left = end.Sub(received), end.Sub(now)
	}
	return patience.Wait(renew.NewFailure(p.failures, err), life, left, u)
}

// stream runs one stream to its end. It reports whether the stream had a good message, and whether the caller's loop
// has ended. An abandoned stream counts as having had none.
func (w *watch[U]) stream(ctx context.Context, yield func(U, error) bool) (good, over bool, _ *Error) {
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

	s, err := w.client.open(ctx, w.name, maxMessage, w.request)
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
		good, bad, w.received = true, 0, time.Now()
		if !yield(u, nil) {
			return good, true, nil
		}
	}
}

// ends returns when the next identity of u expires or, if all have expired, when the last one did; zero if u has none.
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
