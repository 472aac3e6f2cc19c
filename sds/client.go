package sds

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
)

// Client takes secrets from an SDS server: ours, or any that speaks version 3 over gRPC. It is for
// programs that are not Envoy. It is safe for concurrent use.
type Client struct{ grpc *grpchttp.Client }

// NewClient returns a client for the server at baseURL, such as "https://sds.example.org". c must
// speak HTTP/2 to it and have no Timeout, which would end the stream; for a server on a Unix socket
// use [UnixClient], with the base URL "http://localhost".
func NewClient(c *http.Client, baseURL string) *Client {
	return &Client{grpchttp.NewClient(c, baseURL, 4*maxResponse)}
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
// goes on with a new stream after 0.5 s at first, and then after up to 4 % of the life that the secrets
// have left, 30 s at most, and 5 s at most before the first: those that the caller has stay good
// until then. A caller that wants to give up ends the loop.
//
// The client calls itself "svidkit" and sends the header "workload.spiffe.io: true".
func (c *Client) Watch(ctx context.Context, names ...string) iter.Seq2[*pki.Secret, error] {
	names = slices.Clone(names)
	return func(yield func(*pki.Secret, error) bool) {
		if len(names) == 0 || slices.Contains(names, "") {
			yield(nil, errors.New("sds: watch: name the secrets to watch"))
			return
		}
		w := &watcher{grpc: c.grpc, names: names, has: make(map[string]*pki.Secret), yield: yield}
		failures := 0
		for ctx.Err() == nil {
			answered, err := w.stream(ctx)
			if w.over || ctx.Err() != nil || !yield(nil, fmt.Errorf("sds: watch: %w", err)) {
				return
			}
			if answered {
				failures = 0
			}
			failures++
			_ = renew.Sleep(ctx, waitAfter(renew.NewFailure(failures, err), len(w.has) > 0, w.end()))
		}
	}
}

// watcher is one run of Watch.
type watcher struct {
	grpc    *grpchttp.Client
	names   []string
	has     map[string]*pki.Secret // what was yielded
	version string                 // last accepted
	yield   func(*pki.Secret, error) bool
	over    bool // the caller has left the loop
}

// end returns when the next of the secrets ends or, after that, when the last did; zero if none does.
func (w *watcher) end() time.Time {
	return renew.NextEnd(time.Now(), func(yield func(time.Time) bool) {
		for _, s := range w.has {
			if !yield(s.NotAfter()) {
				return
			}
		}
	})
}

// stream runs one stream to its end, and reports whether the server answered on it.
func (w *watcher) stream(ctx context.Context) (answered bool, err error) {
	s := w.grpc.Open(ctx, service+"StreamSecrets", http.Header{http.CanonicalHeaderKey(securityHeader): {"true"}})
	defer s.Close()
	var secrets []*pki.Secret // of the last response
	var nonce string
	var bad error // why it was rejected
	for {
		req, err := w.request(!answered, nonce, bad)
		if err != nil {
			return answered, err
		}
		sent := s.Send(req)
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
		msg, err := s.Receive()
		if err = cmp.Or(err, sent); err != nil {
			return answered, err // in this order, as Send only says that the stream has ended
		}
		answered = true
		var version string
		if secrets, version, nonce, bad = w.parse(msg); bad == nil {
			w.version = version
		}
	}
}

// request returns a DiscoveryRequest: the first of a stream, or the answer to a response, which is a
// rejection if it was bad.
func (w *watcher) request(first bool, nonce string, bad error) ([]byte, error) {
	const invalidArgument = 3
	return protofield.Write(func(m *protofield.Writer) {
		m.Text(1, w.version)
		if first {
			m.Message(2, func(m *protofield.Writer) { // the node
				m.Text(1, "svidkit")
				m.Text(2, "svidkit")
			})
		}
		for _, name := range w.names {
			m.AddText(3, name)
		}
		m.Text(4, typeURL)
		m.Text(5, nonce)
		if bad != nil {
			m.Message(6, func(m *protofield.Writer) {
				m.Varint(1, invalidArgument)
				m.Text(2, clip(bad.Error()))
			})
		}
	})
}

// parse returns the secrets of a response that were asked for, its version and its nonce. The error is
// why the response is rejected.
func (w *watcher) parse(msg []byte) (secrets []*pki.Secret, version, nonce string, err error) {
	var bad error
	err = protofield.Read(msg, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&version)
		case 2:
			if bad == nil { // the nonce comes after
				var s *pki.Secret
				if s, bad = w.resource(f); s != nil {
					secrets = append(secrets, s)
				}
			}
		case 5:
			f.Text(&nonce)
		}
	})
	return secrets, version, nonce, cmp.Or(err, bad)
}

// resource reads a google.protobuf.Any with a Secret; nil is one that was not asked for.
func (w *watcher) resource(f *protofield.Field) (*pki.Secret, error) {
	url, value := f.Any()
	if url != typeURL {
		return nil, fmt.Errorf("a resource of type %q, not %s", clip(url), typeURL)
	}
	var m secret
	if err := protofield.Read(value, m.read); err != nil {
		return nil, errors.New("a resource that is not a Secret")
	}
	if !slices.Contains(w.names, m.name) {
		return nil, nil
	}
	s, err := m.parse()
	if err != nil {
		return nil, fmt.Errorf("secret %q: %w", m.name, err)
	}
	return s, nil
}

// secret is an Envoy Secret of a kind that we know: the last that is there counts.
type secret struct {
	name              string
	kind              protofield.Number // of tls_certificate or validation_context; 0 for neither
	chain, key, roots []byte            // nil if not inline
}

const (
	tlsCertificate    = 2
	validationContext = 4
)

func (m *secret) read(f *protofield.Field) {
	switch n := f.Number; {
	case n == 1:
		f.Text(&m.name)
	case f.Data != nil && (n == tlsCertificate || n == validationContext):
		if m.kind != n {
			*m = secret{name: m.name, kind: n}
		}
		f.Message(func(f *protofield.Field) {
			switch {
			case f.Number == 1 && n == tlsCertificate:
				readInline(f, &m.chain)
			case f.Number == 1:
				readInline(f, &m.roots)
			case f.Number == 2 && n == tlsCertificate:
				readInline(f, &m.key)
			}
		})
	}
}

// readInline reads a DataSource: content, or where it is to be found.
func readInline(f *protofield.Field, to *[]byte) {
	f.Message(func(f *protofield.Field) {
		switch {
		case f.Data == nil:
		case f.Number == 2 || f.Number == 3: // inline_bytes, inline_string
			*to = bytes.Clone(f.Data) // not nil
		case f.Number == 1 || f.Number == 4: // filename, environment_variable
			*to = nil
		}
	})
}

func (m *secret) parse() (*pki.Secret, error) {
	switch {
	case m.kind == 0:
		return nil, errors.New("neither tls_certificate nor validation_context")
	case m.kind == tlsCertificate && (m.chain == nil || m.key == nil), m.kind == validationContext && m.roots == nil:
		return nil, errors.New("no inline content; files and environment variables of the server's choice are not read")
	}
	return pki.NewSecretPEM(m.name, m.chain, m.key, m.roots, time.Time{})
}

func sameSecret(a, b *pki.Secret) bool {
	chainA, keyA, pairA := a.KeyPair()
	chainB, keyB, pairB := b.KeyPair()
	rootsA, _ := a.Roots()
	rootsB, _ := b.Roots()
	return pairA == pairB && bytes.Equal(chainA, chainB) && bytes.Equal(keyA, keyB) && bytes.Equal(rootsA, rootsB)
}
