// Package istioca is a client of Istio's certificate API: of istiod, of package pki/caserver/istioca, or of
// any other server that speaks it.
//
//	ca, err := istioca.New(istioca.Options{
//		Endpoint: caclient.Endpoint{
//			URL:         "https://istiod.istio-system.svc:15012",
//			TrustDomain: spiffe.MustParseTrustDomain("cluster.local"),
//			TokenFile:   "/var/run/secrets/tokens/istio-token",
//			RootsFile:   "/var/run/secrets/istio/root-cert.pem",
//		},
//		ClusterID: "Kubernetes",
//	})
//	…
//	m, err := secretcache.New(secretcache.Config{ID: web, CA: ca})
//
// A program that calls the [CA] without package secretcache wraps it with [caclient.New], for deadlines and the check
// of every answer.
//
// # Trust bundles
//
// The API has no method for trust bundles: roots come only with certificates. So the bundle consists of
//
//   - the roots in Options.Roots or Options.RootsFile, read again each time;
//   - the roots that came with the newest certificate;
//   - the roots that came with an older one, for as long as a certificate issued under them may live, because peers
//     may still present one. It is assumed to live as long as our own.
//
// A root that disappears from Options.Roots or Options.RootsFile is dropped at once, so that an operator can withdraw
// it. It comes back if the CA still sends it with a certificate.
//
// Without both, the first FetchBundles requests a certificate for a throwaway key to learn the roots; a CA that
// requires names in the request may refuse it. After that, new roots arrive only with our own renewals. That is too
// late if the CA signs with a new root before half of a certificate's life has passed. It is better to mount the
// roots, as Istio does in every pod, or to fetch them from a bundle endpoint.
//
// # What it promises
//
// A token goes to the host of Options.URL and nowhere else: redirects are not followed, and a connection
// without TLS is refused unless Options.AllowPlaintext allows it. No error and no log record contains the token.
package istioca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/caclient/internal/carpc"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// method is the path of the API's one method.
const method = "/istio.v1.auth.IstioCertificateService/CreateCertificate"

const maxTexts = 1000 // of an answer; most have one for each certificate

// Options are the choices of [New]. URL and TrustDomain of the Endpoint are required. The connection must support
// HTTP/2.
type Options struct {
	caclient.Endpoint

	// ClusterID is the name of the cluster that the token is from.
	ClusterID string

	// CertSigner names one of several signers behind the CA.
	CertSigner string

	// Impersonate is for an agent that obtains certificates for the pods on its node with its own token. Each request
	// then also names the SPIFFE ID of its CSR as the identity to certify instead of the agent's own
	// (ImpersonatedIdentity); a CSR without a SPIFFE ID is refused. The CA must trust the agent's service account
	// (CA_TRUSTED_NODE_ACCOUNTS), and refuses an ID that no pod of the node has, with [caclient.ErrUnauthenticated].
	// An agent may use the same CA for its own certificate: it is also a pod of its node.
	Impersonate bool

	// Header has further metadata to send, as Istio's CA_HEADER_ variables give it.
	Header http.Header
}

// CA is a [caclient.CA] and a [caclient.BundleWatcher]; [New] makes one. It is safe for concurrent use, and never
// prints a token or a key.
type CA struct {
	redacted
	opts Options
	conn *caconn.Conn
	rpc  *grpchttp.Client
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	c := &CA{opts: o}
	conn, err := caconn.New(caconn.Config{Name: "istioca", Endpoint: o.Endpoint, PriorKnowledge: true, Learn: c.ask})
	if err == nil {
		err = o.check()
	}
	if err != nil {
		return nil, fmt.Errorf("istioca: invalid Options: %w", err)
	}
	c.conn, c.redacted, c.opts.Header = conn, conn.Text(), o.Header.Clone()
	c.rpc = grpchttp.NewClient(conn.HTTP, conn.URL, caconn.MaxResponse)
	return c, nil
}

// writeText writes an entry of the field metadata of an IstioCertificateRequest, which is a google.protobuf.Struct.
func writeText(w *protofield.Writer, key, text string) {
	value, err := protofield.Write(func(w *protofield.Writer) { w.AddText(3, text) }) // string_value
	if err != nil {
		w.Fail(err)
		return
	}
	w.Entry(1, key, value)
}

func (o *Options) check() error {
	if !utf8.ValidString(o.CertSigner) {
		return errors.New("CertSigner is not UTF-8")
	}
	if !caconn.IsText(o.ClusterID) {
		return errors.New("ClusterID is not printable ASCII")
	}
	for name, values := range o.Header {
		if !mayBeSet(name) {
			return fmt.Errorf("the name %q in Header is not one for metadata, or not yours to set", name)
		}
		for _, v := range values {
			if !caconn.IsText(v) {
				return fmt.Errorf("a value of %q in Header is not printable ASCII", name)
			}
		}
	}
	return nil
}

// mayBeSet reports whether name is free for metadata, and not a header with a meaning here.
func mayBeSet(name string) bool {
	lower := strings.ToLower(name)
	switch lower {
	case "", "authorization", "clusterid", "content-type", "te", "host", "connection", "content-length",
		"transfer-encoding", "upgrade",
		"trailer", "user-agent", "accept-encoding", "content-encoding", "keep-alive", "proxy-connection", "expect":
		return false
	}
	return !strings.HasPrefix(lower, "grpc-") && !strings.HasPrefix(lower, "connect-") &&
		!strings.ContainsFunc(lower, func(r rune) bool {
			return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-' || r == '_' || r == '.')
		})
}

// FetchBundles implements [caclient.CA]. It returns one bundle with all known roots of the trust domain, and calls the
// CA only if the Endpoint has no source of roots. If the source fails and earlier roots are known, it logs the failure
// and returns them. The error is a [*caclient.Error], unless ctx is done.
func (c *CA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	return c.conn.FetchBundles(ctx)
}

// WatchBundles implements [caclient.BundleWatcher]. It yields roots that come with a certificate at once, and reads
// the source of roots every five minutes, or at the interval of its bundle's refresh hint.
func (c *CA) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return c.conn.WatchBundles(ctx)
}

// Sign implements [caclient.CA]. The lifetime is sent in whole seconds, at least one. The next [CA.FetchBundles]
// includes the roots that come with the chain. The error is a [*caclient.Error], unless ctx is done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := c.conn.CheckRequest(csr, lifetime); err != nil {
		return nil, err
	}
	var id spiffe.ID
	if c.opts.Impersonate {
		var err error
		if id, err = csr.ID(); err != nil {
			return nil, c.conn.Error("sign", caclient.ErrInvalid, fmt.Errorf("whom to impersonate: %w", err))
		}
	}
	return c.sign(ctx, csr, lifetime, id)
}

// sign requests a certificate for id, or for the caller's own ID if id is zero.
func (c *CA) sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration, id spiffe.ID,
) ([]*x509.Certificate, error) {
	request, err := c.request(csr, lifetime, id)
	if err != nil {
		return nil, c.conn.Error("sign", caclient.ErrInvalid, err)
	}
	header := http.Header{}
	maps.Copy(header, c.opts.Header)
	header.Set("ClusterID", c.opts.ClusterID)
	token, missing, err := c.conn.Token(ctx, "sign")
	if err != nil {
		return nil, err
	}
	if token != "" {
		header.Set("Authorization", "Bearer "+token)
	}
	c.conn.Begin()
	response, err := c.rpc.Unary(ctx, method, header, request)
	if err != nil {
		return nil, carpc.Error(ctx, c.conn, err, token, missing)
	}
	chain, roots, err := readResponse(csr, response)
	if err == nil {
		chain, roots, err = c.conn.Sort(ctx, csr, chain, roots)
	}
	if err == nil && len(roots) > 0 {
		err = c.conn.LearnRoots(roots, chain[0])
	}
	if err != nil {
		return nil, c.conn.Error("sign", caclient.ErrBadAnswer, err)
	}
	return chain, nil
}

func (c *CA) request(csr *pki.CSR, lifetime time.Duration, id spiffe.ID) ([]byte, error) {
	if lifetime > 0 {
		lifetime = max(lifetime, time.Second)
	}
	return protofield.Write(func(w *protofield.Writer) {
		w.Bytes(1, csr.PEM())
		w.Varint(3, uint64(lifetime/time.Second))
		w.Message(4, func(w *protofield.Writer) {
			writeText(w, "CertSigner", c.opts.CertSigner) // Istio's own client sends it even if it is empty
			if !id.IsZero() {
				writeText(w, "ImpersonatedIdentity", id.String())
			}
		})
	})
}

// readResponse parses an IstioCertificateResponse, a list of texts with any number of certificates in each. The last
// text has the roots, and those before it the chain. Some CAs send no root; then the last text is an intermediate
// certificate.
func readResponse(csr *pki.CSR, response []byte) (chain, roots []*x509.Certificate, err error) {
	var texts []string
	err = protofield.Read(response, func(f *protofield.Field) {
		if f.Number == 1 && f.Data != nil {
			if len(texts) == maxTexts {
				f.Fail(fmt.Errorf("the answer has more than %d texts", maxTexts))
				return
			}
			var text string
			f.Text(&text)
			texts = append(texts, text)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	if len(texts) < 2 {
		return nil, nil, fmt.Errorf("the answer has %d texts; there must be a chain, and roots in the last one",
			len(texts))
	}
	if chain, err = caconn.Chain(csr, texts[:len(texts)-1]...); err != nil {
		return nil, nil, err
	}
	if roots, err = pki.ParseCertificatesPEM([]byte(texts[len(texts)-1])); err != nil {
		return nil, nil, fmt.Errorf("roots: %w", err)
	}
	if len(roots) > caconn.MaxRoots {
		return nil, nil, fmt.Errorf("the answer has %d roots, the limit is %d", len(roots), caconn.MaxRoots)
	}
	return chain, roots, nil
}

// ask requests a certificate for a new key, and drops both, to learn the roots that come with the certificate.
func (c *CA) ask(ctx context.Context) error {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return c.conn.Error("fetch bundles", caclient.ErrUnavailable, err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		return c.conn.Error("fetch bundles", caclient.ErrUnavailable, err)
	}
	_, err = c.sign(ctx, csr, 0, spiffe.ID{})
	return err
}
