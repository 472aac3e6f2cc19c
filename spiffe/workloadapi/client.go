package workloadapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/spiffe"
)

// ClientOptions are the choices of a [Client] that have a default.
type ClientOptions struct {
	// HTTPClient reaches the server, whatever the host in a URL. It must speak HTTP/2 without TLS
	// and have no Timeout, which would end the streams. Nil means one that is made for the address.
	// With it the address may be empty: this is how to reach a server by other means, such as a
	// named pipe.
	HTTPClient *http.Client

	// MaxMessage is the largest message in bytes that is received; 0 means 64 MiB. Answers about
	// tokens may have 1 MiB at most.
	MaxMessage int
}

// Client calls the Workload API. It is safe for concurrent use, and keeps nothing but connections. For
// an identity that is always current use [New], which makes a [Source].
type Client struct {
	server     string // the address, for people
	http       *http.Client
	maxMessage int
}

// NewClient returns a client for the server at address, which [ParseAddress] describes; its errors
// are those. It does not connect. opts may be nil.
func NewClient(address string, opts *ClientOptions) (*Client, error) {
	c := &Client{server: address, maxMessage: defaultMaxMessage}
	if opts != nil {
		if opts.MaxMessage < 0 {
			return nil, errors.New("workloadapi: new client: MaxMessage is negative; 0 means 64 MiB")
		}
		c.http, c.maxMessage = opts.HTTPClient, cmp.Or(opts.MaxMessage, defaultMaxMessage)
	}
	if c.http != nil && address == "" {
		c.server = "an HTTPClient of its own"
		return c, nil
	}
	a, err := ParseAddress(address)
	if err != nil {
		return nil, err
	}
	c.server = a.String()
	if c.http == nil {
		c.http = httpClient(a)
	}
	return c, nil
}

// httpClient returns a client that reaches a whatever the URL says, with HTTP/2 and no TLS. Proxies
// are not used.
func httpClient(a Address) *http.Client {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	dialer := &net.Dialer{Timeout: 30 * time.Second}
	return &http.Client{Transport: &http.Transport{
		Protocols: &protocols,
		HTTP2: &http.HTTP2Config{
			// A server whose process hangs keeps its connections. Servers made with grpc-go end those
			// whose client asks more often than every five minutes.
			SendPingTimeout: 6 * time.Minute,
			// One that writes and does not read would have everybody wait who closes a stream.
			WriteByteTimeout: 30 * time.Second,
		},
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        90 * time.Second,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, a.network, a.target)
		},
	}}
}

// Close closes connections that are not in use, such as those of watches that have ended, which would
// stay for another 90 seconds. The Client stays usable.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// String names the server.
func (c *Client) String() string { return "workloadapi.Client(" + c.server + ")" }

func (c *Client) rpc(maxMessage int) *grpchttp.Client {
	return grpchttp.NewClient(c.http, "http://localhost"+service, maxMessage)
}

// metadata has the header that shows that nobody was tricked into sending the request (WEP-5).
func metadata() http.Header {
	h := make(http.Header)
	h.Set(securityHeader, "true")
	return h
}

// WatchX509SVIDs yields the identities and trust bundles of this workload as the server has them:
// first as they are, then at each change, until ctx is done, the loop ends, or the server says that
// to go on is useless. A loop that is slow receives each change all the same.
//
// What went wrong is yielded as an [*Error], and unless that is Final the watch goes on, with a new
// stream: at once after one that had brought something, and then after a second at first and half a
// minute at most, give or take a random part. What was received before stays good, with one
// exception: an error that wraps [ErrDenied] withdraws it (WAPI-17). One that wraps [ErrBadResponse]
// tells of a response that was discarded.
func (c *Client) WatchX509SVIDs(ctx context.Context) iter.Seq2[*X509Update, error] {
	return func(yield func(*X509Update, error) bool) {
		var r x509Reader
		w := &watch[*X509Update]{
			client: c, name: fetchX509SVID, request: &raw{}, read: r.read, forget: r.forget,
		}
		w.run(ctx, yield)
	}
}

// WatchX509Bundles yields the trust bundles for X.509-SVIDs, as [Client.WatchX509SVIDs] does: for
// programs that verify others and have no identity of their own to present.
func (c *Client) WatchX509Bundles(ctx context.Context) iter.Seq2[*BundlesUpdate, error] {
	return func(yield func(*BundlesUpdate, error) bool) {
		var r bundlesReader
		w := &watch[*BundlesUpdate]{
			client: c, name: fetchX509Bundles, request: &raw{}, read: r.readX509, forget: r.forget,
		}
		w.run(ctx, yield)
	}
}

// WatchJWTBundles yields the trust bundles for JWT-SVIDs, as [Client.WatchX509SVIDs] does.
func (c *Client) WatchJWTBundles(ctx context.Context) iter.Seq2[*BundlesUpdate, error] {
	return func(yield func(*BundlesUpdate, error) bool) {
		var r bundlesReader
		w := &watch[*BundlesUpdate]{
			client: c, name: fetchJWTBundles, request: &raw{}, read: r.readJWT, forget: r.forget,
		}
		w.run(ctx, yield)
	}
}

// call makes a unary call, once. It takes callTimeout at most.
func (c *Client) call(ctx context.Context, name string, maxMessage int, m *raw) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	data, err := c.rpc(min(maxMessage, c.maxMessage)).Unary(ctx, name, metadata(), m.b)
	if err != nil {
		return nil, c.failure(name, err)
	}
	return data, nil
}

// parsedID parses an ID in a response.
func parsedID(s string) (spiffe.ID, error) {
	if s == "" {
		return spiffe.ID{}, errors.New("spiffe_id is empty (WAPI-14)")
	}
	id, err := spiffe.ParseID(s)
	if err != nil {
		return spiffe.ID{}, fmt.Errorf("spiffe_id: %w", err)
	}
	return id, nil
}
