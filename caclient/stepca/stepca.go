// Package stepca is a client of step-ca, Smallstep's certificate authority, and of other servers with its API.
//
//	var m *secretcache.Manager
//	ca, err := stepca.New(stepca.Options{
//		Endpoint: caclient.Endpoint{
//			URL:         "https://ca.example.org",
//			TrustDomain: td,
//			Token:       oneTimeToken, // from a program that has the provisioner's key
//		},
//		Fingerprint: "0d7d3834cf187726cf331c40a31aa7ef6b29ba4df601416c9788f6ee01058cf3",
//		Certificate: func() *tls.Certificate { … }, // the manager's present identity
//	})
//	…
//	m, err = secretcache.New(secretcache.Config{ID: web, CA: ca})
//
// A program that calls the [CA] without package secretcache wraps it with [caclient.New], for deadlines and the check
// of every answer.
//
// # Proof of identity
//
// The first certificate requires a token: [CA.Sign] sends it with the request to /1.0/sign. The token of a JWK
// provisioner is good for one request with exactly the names in the token, so Endpoint.Token makes one for each call.
// The token of a provisioner for Kubernetes service accounts is a file, Endpoint.TokenFile.
//
// After that the certificate itself is the proof, if Options.Certificate returns it: Sign presents it in TLS and
// sends the request to /1.0/rekey, which certifies the new key with the names and the lifetime of the old
// certificate; /1.0/renew would keep the old key. Sign falls back to a token if the certificate has expired, if it
// has other names than the request, or if step-ca refuses it, as it does when the provisioner allows no renewal or
// after its root was lost.
//
// # Trust
//
// The server is trusted by the roots in Endpoint.Roots or Endpoint.RootsFile; by the root with the SHA-256 in
// Options.Fingerprint, which is fetched from the CA and compared; or, without these, by the host's roots. With a
// fingerprint, the roots that /1.0/roots lists over a verified connection count too, so that the CA can change its
// root. Nothing is trusted on first use.
//
// The bundle of the trust domain comes from Endpoint.Roots or Endpoint.RootsFile, or from /1.0/roots.
//
// # What it does not do
//
// It makes no tokens: the key of a provisioner does not belong in a workload. It revokes nothing, and does not
// support SSH and ACME.
package stepca

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices of [New]. URL and TrustDomain of the Endpoint are required.
type Options struct {
	// Endpoint says where the CA is. An HTTPClient itself decides which server is trusted, and presents the client
	// certificate for renewals.
	caclient.Endpoint

	// Fingerprint is the SHA-256 of the root certificate in DER, in hexadecimal, as "step certificate fingerprint"
	// prints it. Set it only without Roots, RootsFile and HTTPClient.
	Fingerprint string

	// Certificate returns the present certificate of the workload, with its Leaf, or nil if there is none: the method
	// TLSCertificate of a [spiffe.SVID] makes one. It is called for each Sign. Nil means that each certificate
	// requires a token.
	Certificate func() *tls.Certificate
}

// CA is a [caclient.CA] and a [caclient.BundleWatcher]; [New] makes one. It is safe for concurrent use, and never
// prints a token or a key.
type CA struct {
	redacted
	opts        Options
	fingerprint []byte
	conn        *caconn.Conn
	renewals    *caconn.Conn // presents the certificate
	unverified  *caconn.Conn // for the root with the fingerprint

	root atomic.Pointer[x509.Certificate] // with the fingerprint; nil before it was fetched
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	sum, err := hex.DecodeString(o.Fingerprint)
	c := &CA{opts: o, fingerprint: sum}
	switch {
	case err != nil || len(sum) != 0 && len(sum) != sha256.Size:
		err = errors.New("the Fingerprint is not a SHA-256 in hexadecimal, which has 64 digits")
	case len(sum) > 0 && (o.Roots != nil || o.RootsFile != "" || o.HTTPClient != nil):
		err = errors.New("the Fingerprint is set together with Roots, RootsFile or HTTPClient, " +
			"which have the roots already")
	default:
		err = c.connect()
	}
	if err != nil {
		return nil, fmt.Errorf("stepca: invalid Options: %w", err)
	}
	return c, nil
}

// connect makes the connections. A workload calls seldom, so none is kept.
func (c *CA) connect() (err error) {
	if c.conn, err = c.dial(c.tls(nil), nil); err != nil {
		return err
	}
	c.redacted = c.conn.Text()
	if c.renewals, err = c.dial(c.tls(c.clientCertificate), c.clientCertificate); err != nil {
		return err
	}
	c.unverified, err = c.dial(func(context.Context) (*tls.Config, error) {
		// The SHA-256 of the certificate is known, and checked later.
		return &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}, nil
	}, nil)
	return err
}

type getCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error)

func (c *CA) dial(config func(context.Context) (*tls.Config, error), client getCertificate) (*caconn.Conn, error) {
	cfg := caconn.Config{Name: "stepca", Endpoint: c.opts.Endpoint, Roots: c.fetchRoots}
	if c.opts.HTTPClient == nil {
		cfg.Endpoint.HTTPClient = caconn.OneCall(config, client)
	}
	return caconn.New(cfg)
}

// tls returns the configuration for connections; nil for one that trusts the roots of the host.
func (c *CA) tls(client getCertificate) func(context.Context) (*tls.Config, error) {
	if c.opts.Roots == nil && c.opts.RootsFile == "" && len(c.fingerprint) == 0 {
		return nil
	}
	return func(ctx context.Context) (*tls.Config, error) {
		pool, err := c.pool(ctx)
		return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, Time: certchain.Now,
			GetClientCertificate: client}, err
	}
}

// pool returns the roots that vouch for the server.
func (c *CA) pool(ctx context.Context) (*x509.CertPool, error) {
	if len(c.fingerprint) == 0 {
		b, err := c.conn.Source(ctx)
		if err != nil {
			return nil, err
		}
		return b.CertPool(), nil
	}
	root, err := c.pinned(ctx)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if known := c.conn.Known(); known != nil {
		pool = known.CertPool()
	}
	pool.AddCert(root)
	return pool, nil
}

// pinned returns the root with the fingerprint.
func (c *CA) pinned(ctx context.Context) (*x509.Certificate, error) {
	if root := c.root.Load(); root != nil {
		return root, nil
	}
	const op = "fetch bundles"
	var answer struct {
		CA string `json:"ca"`
	}
	path := "/1.0/root/" + hex.EncodeToString(c.fingerprint)
	if err := c.unverified.Do(ctx,
		caconn.Request{Op: op, Method: http.MethodGet, Path: path, Message: caconn.Message}, &answer); err != nil {
		return nil, err
	}
	certs, err := pki.ParseCertificatesPEM([]byte(answer.CA))
	if err != nil {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer, fmt.Errorf("root: %w", err))
	}
	if sum := sha256.Sum256(certs[0].Raw); len(certs) != 1 || !bytes.Equal(sum[:], c.fingerprint) {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer, fmt.Errorf(
			"the server has a root with the fingerprint %x, and not the one in Options: "+
				"it is not this CA, or the root was replaced", sum))
	}
	c.root.Store(certs[0])
	return certs[0], nil
}

// clientCertificate is a [tls.Config].GetClientCertificate, for a renewal: so there is a source of certificates.
func (c *CA) clientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return cmp.Or(c.opts.Certificate(), new(tls.Certificate)), nil
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

// Sign implements [caclient.CA]; the package comment describes the proof. A token is sent with a lifetime in whole
// seconds, at least one; a renewal keeps the previous certificate's lifetime. The error is a [*caclient.Error],
// unless ctx is done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := c.conn.CheckRequest(csr, lifetime); err != nil {
		return nil, err
	}
	var refused error
	if c.renewable(csr) {
		c.renewals.Reconnect() // the connections of an HTTPClient may be older than the certificate
		chain, err := c.certify(ctx, c.renewals, csr, "/1.0/rekey", request{CSR: string(csr.PEM())}, "")
		if err == nil || !caconn.Refused(err) {
			return chain, err
		}
		refused = err
	}
	const none = "there is neither a token nor a valid certificate to send; set Token or TokenFile"
	token, err := c.conn.ProofToken(ctx, refused, none)
	if err != nil {
		return nil, err
	}
	r := request{CSR: string(csr.PEM()), Token: token}
	if lifetime > 0 {
		r.NotAfter = max(lifetime, time.Second).Truncate(time.Second).String() // relative to the CA's clock
	}
	return c.certify(ctx, c.conn, csr, "/1.0/sign", r, token)
}

// renewable reports whether there is a certificate that proves all names of csr.
func (c *CA) renewable(csr *pki.CSR) bool {
	cert := caconn.Present(c.opts.Certificate)
	if cert == nil {
		return false
	}
	has, err := pki.ParseSANs(cert.Leaf.Extensions)
	wants := csr.SANs()
	return err == nil && len(has) == len(wants) &&
		!slices.ContainsFunc(wants, func(s pki.SAN) bool { return !slices.Contains(has, s) })
}

type request struct {
	CSR      string `json:"csr"` // PEM
	Token    string `json:"ott,omitempty"`
	NotAfter string `json:"notAfter,omitempty"` // a duration
}

func (c *CA) certify(ctx context.Context, conn *caconn.Conn, csr *pki.CSR, path string, r request, token string,
) ([]*x509.Certificate, error) {
	var answer response
	if err := conn.Do(ctx, caconn.Request{Op: "sign", Method: http.MethodPost, Path: path, Body: r,
		Secrets: []string{token}, Message: caconn.Message}, &answer); err != nil {
		return nil, err
	}
	if len(answer.Chain) == 0 {
		answer.Chain = []string{answer.Leaf, answer.Issuer}
	}
	return c.conn.Chain(csr, answer.Chain...)
}

// response is an answer with certificates in PEM.
type response struct {
	Leaf   string   `json:"crt"`
	Issuer string   `json:"ca"`
	Chain  []string `json:"certChain"` // both, and more; missing in early versions
}

func (c *CA) fetchRoots(ctx context.Context) ([]*x509.Certificate, error) {
	var answer struct {
		Certs []string `json:"crts"`
	}
	const op = "fetch bundles"
	if err := c.conn.Do(ctx, caconn.Request{Op: op, Method: http.MethodGet, Path: "/1.0/roots",
		Message: caconn.Message}, &answer); err != nil {
		return nil, err
	}
	if n := len(answer.Certs); n > caconn.MaxRoots {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer,
			fmt.Errorf("the CA has %d roots, the limit is %d", n, caconn.MaxRoots))
	}
	roots, err := pki.ParseCertificatesPEM([]byte(strings.Join(answer.Certs, "\n")))
	if err != nil {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer, fmt.Errorf("roots: %w", err))
	}
	return roots, nil
}
