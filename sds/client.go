package sds

import (
	"bytes"
	"cmp"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"iter"
	"math"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Client receives secrets from an SDS server: ours, or any server that speaks version 3 over gRPC. It is for programs
// other than Envoy. It is safe for concurrent use.
type Client struct{ grpc *grpchttp.Client }

// NewClient returns a client for the server at baseURL, such as "https://sds.example.org". c must speak HTTP/2 to it
// and must have no Timeout, which would end the stream. For a server on a Unix socket use [UnixClient] and
// "http://localhost".
func NewClient(c *http.Client, baseURL string) *Client {
	return &Client{grpchttp.NewClient(c, baseURL, 4*maxResponse)}
}

// UnixClient returns an HTTP client that connects to the Unix socket at path for every URL, with HTTP/2 and no TLS.
// Requests share a connection, which CloseIdleConnections closes.
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

// Watch yields the secrets with these names, each when it first arrives and whenever its content changes, until ctx
// is done or the loop ends. Names that the server does not have yet come when they appear.
//
// Watch acknowledges a response once all its secrets are parsed by the rules of package pki: the key of each pair
// belongs to its leaf, each root is a CA, content is inline, and each validator is the SPIFFE validator. Otherwise it
// rejects the whole response, tells the server why, and yields the reason. For a certificate that has expired or is
// not valid yet, it yields an error instead; once the certificate is valid, it asks the server for it again. Watch
// verifies nothing more.
//
// If the stream fails, Watch yields the reason and opens a new one: after 0.5 s at first, then after up to 4 % of the
// secrets' remaining life and at most 30 s, or at most 5 s before the first secret. Secrets already yielded stay
// good. A caller that wants to give up ends the loop.
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

// watcher is the state of one call of Watch.
type watcher struct {
	grpc    *grpchttp.Client
	names   []string
	has     map[string]*pki.Secret // as yielded, by name
	version string                 // last accepted one
	yield   func(*pki.Secret, error) bool
	over    bool        // the caller has left the loop
	again   time.Time   // when the first withheld certificate becomes valid
	timer   *time.Timer // fires at again
}

// end returns the next expiry of a secret, or the last expiry if all have expired; zero if no secret expires.
func (w *watcher) end() time.Time {
	var ends []time.Time
	for _, s := range w.has {
		ends = append(ends, s.NotAfter())
	}
	return renew.NextEnd(time.Now(), slices.Values(ends))
}

// stream runs one stream to its end, and reports whether the server answered on it.
func (w *watcher) stream(ctx context.Context) (answered bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w.again, w.timer = time.Time{}, time.AfterFunc(math.MaxInt64, func() { cancel(errNowValid) })
	defer w.timer.Stop()
	header := http.Header{http.CanonicalHeaderKey(securityHeader): {"true"}}
	s := w.grpc.Open(ctx, service+"StreamSecrets", header)
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
		if w.over = !w.deliver(secrets, bad); w.over {
			return answered, nil
		}
		msg, err := s.Receive()
		if err = cmp.Or(err, sent); err != nil { // in this order, as Send only says that the stream has ended
			if context.Cause(ctx) == errNowValid {
				err = errNowValid
			}
			return answered, err
		}
		answered = true
		var version string
		if secrets, version, nonce, bad = w.parse(msg); bad == nil {
			w.version = version
		}
	}
}

// deliver yields the new secrets of a response, and the reason if the response was rejected. It reports whether to go
// on.
func (w *watcher) deliver(secrets []*pki.Secret, bad error) bool {
	for _, s := range secrets {
		if old := w.has[s.Name()]; old != nil && sameSecret(old, s) {
			continue // sent again after a reconnect
		}
		if from, early := secretset.InTime(s); early != nil {
			if wait := time.Until(from); wait > 0 && (w.again.IsZero() || from.Before(w.again)) {
				w.again = from
				w.timer.Reset(wait)
			}
			if !w.yield(nil, fmt.Errorf("sds: watch: secret %q: %w", s.Name(), early)) {
				return false
			}
			continue
		}
		w.has[s.Name()] = s
		if !w.yield(s, nil) {
			return false
		}
	}
	return bad == nil || w.yield(nil, fmt.Errorf("sds: watch: response rejected: %w", bad))
}

var errNowValid = errors.New("a certificate is valid now, and the server is asked for it again")

// request returns a DiscoveryRequest: a stream's first, or the answer to a response, which it rejects unless bad is
// nil.
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

// parse returns the requested secrets in a response, its version and its nonce. The error is why to reject it.
func (w *watcher) parse(msg []byte) (secrets []*pki.Secret, version, nonce string, err error) {
	var bad error
	err = protofield.Read(msg, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&version)
		case 2:
			if bad == nil { // go on after an error, as the nonce comes last
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

// resource reads a google.protobuf.Any with a Secret. It returns nil for a Secret that was not requested.
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

// secret is an Envoy Secret: if it has several kinds, the last one counts.
type secret struct {
	name     string
	kind     protofield.Number // its field; 0 for none
	chain    []byte            // these are nil if not inline
	key      []byte
	roots    []byte
	crls     []byte
	hasCRLs  bool
	leafOnly bool
	provider []byte
	keys     [][]byte
	values   map[string][]byte
	custom   bool // it has a custom validator
	url      string
	config   []byte
}

func (m *secret) read(f *protofield.Field) {
	var part func(*protofield.Field)
	switch f.Number {
	case 1:
		f.Text(&m.name)
	case tlsCertificate:
		part = m.readPair
	case sessionTicketKeys:
		part = m.readKeys
	case validationContext:
		part = m.readContext
	case genericSecret:
		part = m.readValues
	}
	if part == nil || f.Data == nil {
		return
	}
	if m.kind != f.Number {
		*m = secret{name: m.name, kind: f.Number}
	}
	f.Message(part)
}

func (m *secret) readPair(f *protofield.Field) {
	switch f.Number {
	case 1:
		readInline(f, &m.chain)
	case 2:
		readInline(f, &m.key)
	case 6:
		f.Bytes(&m.provider)
	}
}

func (m *secret) readKeys(f *protofield.Field) {
	if f.Number == 1 && f.Data != nil {
		var key []byte
		readInline(f, &key)
		m.keys = append(m.keys, key)
	}
}

func (m *secret) readContext(f *protofield.Field) {
	if f.Number == 14 {
		f.Bool(&m.leafOnly)
	}
	if f.Data == nil {
		return // the rest are messages
	}
	switch f.Number {
	case 1:
		readInline(f, &m.roots)
	case 7:
		m.hasCRLs = true
		readInline(f, &m.crls)
	case 12:
		m.custom = true
		f.Message(func(f *protofield.Field) {
			if f.Number == 2 {
				m.url, m.config = f.Any()
			}
		})
	}
}

func (m *secret) readValues(f *protofield.Field) {
	if f.Data == nil {
		return
	}
	var key string
	var value []byte
	switch f.Number {
	case 1:
		readInline(f, &value)
	case 2:
		key = f.Entry(func(f *protofield.Field) { readInline(f, &value) })
	default:
		return
	}
	if m.values == nil {
		m.values = make(map[string][]byte)
	}
	m.values[key] = value
}

// readInline reads a DataSource: content, or a reference to content elsewhere.
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

var errNotInline = errors.New("no inline content; files and environment variables of the server's choice are not read")

func (m *secret) parse() (*pki.Secret, error) {
	switch m.kind {
	case tlsCertificate:
		if m.provider != nil {
			if m.chain == nil || m.key != nil {
				return nil, errors.New("a key provider without an inline certificate chain, " +
					"or with a private key beside it")
			}
			return pki.NewKeyProviderSecret(m.name, m.chain, m.provider)
		}
		if m.chain == nil || m.key == nil {
			return nil, errNotInline
		}
		return pki.NewSecretPEM(m.name, m.chain, m.key, nil, time.Time{})
	case validationContext:
		return m.parseContext()
	case sessionTicketKeys:
		return pki.NewTicketKeysSecret(m.name, m.keys...)
	case genericSecret:
		for _, value := range m.values {
			if value == nil {
				return nil, errNotInline
			}
		}
		return pki.NewGenericSecret(m.name, m.values)
	}
	return nil, errors.New("a secret without content, or of a kind that is not known")
}

func (m *secret) parseContext() (*pki.Secret, error) {
	switch {
	case m.custom && m.url != validatorURL:
		return nil, fmt.Errorf("a validator of type %q, not %s", clip(m.url), validatorURL)
	case m.custom && m.hasCRLs:
		return nil, errors.New("revocation lists beside the SPIFFE validator; it has them in its bundles")
	case m.custom:
		return parseDomains(m.name, m.config)
	case m.roots == nil || m.hasCRLs && m.crls == nil:
		return nil, errNotInline
	}
	s, err := pki.NewSecretPEM(m.name, nil, nil, m.roots, time.Time{})
	if err != nil || !m.hasCRLs {
		return s, err
	}
	return s.WithCRLs(m.crls, m.leafOnly)
}

// parseDomains reads a SPIFFECertValidatorConfig.
func parseDomains(secretName string, config []byte) (*pki.Secret, error) {
	var bundles []*spiffe.Bundle
	crls := make(map[spiffe.TrustDomain][]byte)
	err := protofield.Read(config, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			b, lists, err := parseDomain(f)
			if f.Fail(err); err != nil {
				return
			}
			bundles = append(bundles, b)
			if lists != nil {
				crls[b.TrustDomain()] = lists
			}
		case 2:
			f.Fail(errors.New("trust_bundles, a map in JSON, is not read; the server has to send trust_domains"))
		}
	})
	if err != nil {
		return nil, err
	}
	set, err := spiffe.NewBundleSet(bundles...)
	if err != nil {
		return nil, err
	}
	s, err := pki.NewTrustDomainsSecret(secretName, set)
	if err != nil || len(crls) == 0 {
		return s, err
	}
	return s.WithTrustDomainCRLs(crls)
}

// parseDomain reads a trust domain with its bundle.
func parseDomain(f *protofield.Field) (b *spiffe.Bundle, crls []byte, err error) {
	var name string
	var roots []byte
	f.Message(func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&name)
		case 2:
			readInline(f, &roots)
		}
	})
	td, err := spiffe.ParseTrustDomain(name)
	if err != nil {
		return nil, nil, err
	}
	return parseBundle(td, roots)
}

// parseBundle reads the roots of a trust domain in PEM, with its revocation lists among them.
func parseBundle(td spiffe.TrustDomain, data []byte) (b *spiffe.Bundle, crls []byte, err error) {
	if data == nil {
		return nil, nil, errNotInline
	}
	var certs []byte
	blocks, err := certpem.Read(data, certpem.MaxCertificates)
	if err != nil {
		return nil, nil, fmt.Errorf("the bundle of %q: %w", td, err)
	}
	for _, block := range blocks {
		if block.Type == "X509 CRL" {
			crls = append(crls, pem.EncodeToMemory(block)...)
		} else {
			certs = append(certs, pem.EncodeToMemory(block)...)
		}
	}
	authorities, err := pki.ParseCertificatesPEM(certs)
	if err != nil {
		return nil, nil, err
	}
	b, err = spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: authorities})
	return b, crls, err
}

// sameSecret reports whether two secrets of one name have the same content.
func sameSecret(a, b *pki.Secret) bool {
	x, _ := newEntry(a.Name(), a, nil)
	y, _ := newEntry(b.Name(), b, nil)
	return x != nil && y != nil && bytes.Equal(x.any, y.any)
}
