package sds

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
)

// Client takes secrets from an SDS server: ours, or any that speaks version 3 over gRPC. It is for
// programs that are not Envoy. It is safe for concurrent use.
type Client struct {
	rpc *connect.Client[envoysds.DiscoveryRequest, envoysds.DiscoveryResponse]
}

// NewClient returns a client for the server at baseURL, such as "https://sds.example.org". c must
// speak HTTP/2 to it and have no Timeout, which would end the stream; for a server on a Unix socket
// use [UnixClient], with the base URL "http://localhost".
func NewClient(c *http.Client, baseURL string) *Client {
	return &Client{rpc: connect.NewClient[envoysds.DiscoveryRequest, envoysds.DiscoveryResponse](
		c, baseURL+service+"StreamSecrets", connect.WithGRPC(), connect.WithReadMaxBytes(4*maxResponse))}
}

// UnixClient returns an HTTP client that reaches the Unix socket at path whatever the URL says, with
// HTTP/2 and no TLS. All requests share one connection, which CloseIdleConnections ends.
func UnixClient(path string) *http.Client {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{
		Protocols: &protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		},
	}}
}

// Watch yields the secrets with these names as the server has them, each when it first arrives and
// whenever its content changes, until ctx is done or the loop ends. Names that the server does not
// have yet come when they appear.
//
// A response is acknowledged once all its secrets are parsed, the key of each pair belongs to its
// leaf, and each root is a CA; else it is rejected as a whole, the server told why, and the reason
// yielded. Nothing more is verified here. When the stream fails, the reason is yielded, and Watch
// goes on with a new stream after 0.5 s at first and 30 s at most: the secrets that the caller has
// stay good until then. A caller that wants to give up ends the loop.
//
// The client calls itself "svidkit" and sends the header "workload.spiffe.io: true".
func (c *Client) Watch(ctx context.Context, names ...string) iter.Seq2[*pki.Secret, error] {
	names = slices.Clone(names)
	return func(yield func(*pki.Secret, error) bool) {
		if len(names) == 0 || slices.Contains(names, "") {
			yield(nil, errors.New("sds: watch: name the secrets to watch"))
			return
		}
		w := &watcher{rpc: c.rpc, names: names, has: make(map[string]*pki.Secret), yield: yield}
		var wait time.Duration
		for ctx.Err() == nil {
			answered, err := w.stream(ctx)
			if w.over || ctx.Err() != nil || !yield(nil, fmt.Errorf("sds: watch: %w", err)) {
				return
			}
			if answered {
				wait = 0
			}
			wait = min(max(2*wait, firstRetry), lastRetry)
			t := time.NewTimer(wait/2 + rand.N(wait/2))
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
			}
		}
	}
}

// watcher is one run of Watch.
type watcher struct {
	rpc     *connect.Client[envoysds.DiscoveryRequest, envoysds.DiscoveryResponse]
	names   []string
	has     map[string]*pki.Secret // what was yielded
	version string                 // last accepted
	yield   func(*pki.Secret, error) bool
	over    bool // the caller has left the loop
}

// stream runs one stream to its end, and reports whether the server answered on it.
func (w *watcher) stream(ctx context.Context) (answered bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn := w.rpc.CallBidiStream(ctx)
	defer conn.CloseResponse()
	// While net/http waits for more of a request's body it does not notice that ctx is done.
	defer context.AfterFunc(ctx, func() { _ = conn.CloseRequest() })()
	defer conn.CloseRequest()
	conn.RequestHeader().Set(securityHeader, "true")
	var secrets []*pki.Secret // of the last response
	var bad error             // why it was rejected
	req := &envoysds.DiscoveryRequest{
		Node:          &envoysds.Node{Id: "svidkit", Cluster: "svidkit"},
		VersionInfo:   w.version,
		ResourceNames: w.names,
		TypeUrl:       typeURL,
	}
	for {
		sent := conn.Send(req)
		for _, s := range secrets {
			if old := w.has[s.Name()]; old != nil && sameSecret(old, s) {
				continue // sent again after a reconnect
			}
			w.has[s.Name()] = s
			if w.over = !w.yield(s, nil); w.over {
				return answered, nil
			}
		}
		if bad != nil {
			if w.over = !w.yield(nil, fmt.Errorf("sds: watch: response rejected: %w", bad)); w.over {
				return answered, nil
			}
		}
		resp, err := conn.Receive()
		if err = cmp.Or(err, sent); err != nil {
			return answered, err // in this order, as Send only says that the stream has ended
		}
		answered = true
		if secrets, bad = w.parse(resp); bad == nil {
			w.version = resp.GetVersionInfo()
		}
		req = &envoysds.DiscoveryRequest{
			VersionInfo: w.version, ResourceNames: w.names, TypeUrl: typeURL, ResponseNonce: resp.GetNonce(),
		}
		if bad != nil {
			const invalidArgument = 3
			req.ErrorDetail = &envoysds.Status{Code: invalidArgument, Message: clip(bad.Error())}
		}
	}
}

// parse returns the secrets of a response that were asked for.
func (w *watcher) parse(resp *envoysds.DiscoveryResponse) ([]*pki.Secret, error) {
	var secrets []*pki.Secret
	for _, a := range resp.GetResources() {
		if a.GetTypeUrl() != typeURL {
			return nil, fmt.Errorf("a resource of type %q, not %s", clip(a.GetTypeUrl()), typeURL)
		}
		var msg envoysds.Secret
		if err := proto.Unmarshal(a.GetValue(), &msg); err != nil {
			return nil, errors.New("a resource that is not a Secret")
		}
		if !slices.Contains(w.names, msg.GetName()) {
			continue
		}
		s, err := parseSecret(&msg)
		if err != nil {
			return nil, fmt.Errorf("secret %q: %w", msg.GetName(), err)
		}
		secrets = append(secrets, s)
	}
	return secrets, nil
}

func parseSecret(msg *envoysds.Secret) (*pki.Secret, error) {
	if c := msg.GetValidationContext(); c != nil {
		roots, err := content(c.GetTrustedCa())
		if err != nil {
			return nil, fmt.Errorf("trusted_ca: %w", err)
		}
		return pki.NewSecretPEM(msg.GetName(), nil, nil, roots, time.Time{})
	}
	c := msg.GetTlsCertificate()
	if c == nil {
		return nil, errors.New("neither tls_certificate nor validation_context")
	}
	chain, err1 := content(c.GetCertificateChain())
	key, err2 := content(c.GetPrivateKey())
	if err := cmp.Or(err1, err2); err != nil {
		return nil, fmt.Errorf("tls_certificate: %w", err)
	}
	return pki.NewSecretPEM(msg.GetName(), chain, key, nil, time.Time{})
}

func content(d *envoysds.DataSource) ([]byte, error) {
	switch d := d.GetSpecifier().(type) {
	case *envoysds.DataSource_InlineBytes:
		return d.InlineBytes, nil
	case *envoysds.DataSource_InlineString:
		return []byte(d.InlineString), nil
	}
	return nil, errors.New("not inline; files and environment variables of the server's choice are not read")
}

func sameSecret(a, b *pki.Secret) bool {
	chainA, keyA, pairA := a.KeyPair()
	chainB, keyB, pairB := b.KeyPair()
	rootsA, _ := a.Roots()
	rootsB, _ := b.Roots()
	return pairA == pairB && bytes.Equal(chainA, chainB) && bytes.Equal(keyA, keyB) && bytes.Equal(rootsA, rootsB)
}
