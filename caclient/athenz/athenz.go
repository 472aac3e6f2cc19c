// Package athenz is a client of ZTS, the certificate authority of Athenz, for one instance of a service.
//
// The common name of a certificate is the principal. [Expectation] tells package secretcache what to expect:
//
//	var m *secretcache.Manager
//	ca, err := athenz.New(athenz.Options{
//		Endpoint: caclient.Endpoint{
//			URL:         "https://zts.athenz.svc:4443",
//			TrustDomain: td,
//			RootsFile:   "/var/run/athenz/service-ca.pem",
//			TokenFile:   "/var/run/secrets/kubernetes.io/bound-serviceaccount/token",
//		},
//		Instance:    instance, // its service, its provider, its ID
//		Certificate: func() *tls.Certificate { … }, // the manager's present credential
//	})
//	…
//	want, err := athenz.Expectation(instance, td)
//	…
//	m, err = secretcache.New(secretcache.Config{Expect: want, CommonName: instance.Service.String(), CA: ca})
//
// # Proof of identity
//
// The first certificate requires attestation data that the instance's provider understands: an identity document of
// package authn/athenz, or a token of the pod's service account. The Endpoint's token carries it.
//
// After that the certificate itself is the proof, if Options.Certificate returns it: [CA.Sign] presents it in TLS,
// and ZTS refreshes the instance. If ZTS refuses, or the certificate has expired, Sign registers the instance anew,
// if there is a token.
//
// With Options.KeyID a service proves itself only with a key whose public half its domain has registered, as
// providers and the services of Athenz's control plane do. No provider vouches for it, and each certificate is for
// that key.
//
// ZTS remembers the serial numbers of an instance's last two certificates, and revokes the instance for good if an
// older one is presented. So a CA presents the last certificate that it received or, if the answer to the last
// refresh was lost, the one that it presented then; never an older one. No two programs may refresh one instance. A
// program that keeps its certificate in a file replaces it there before it uses the new one.
//
// # Trust
//
// The roots in Options.ServerRootsFile vouch for the server, or else the roots in Endpoint.RootsFile, or else the
// host's roots. The bundle of the trust domain comes from Endpoint.Roots or Endpoint.RootsFile, one of which is
// required, plus the roots that ZTS sends with certificates.
//
// # What it does not do
//
// It makes no attestation data. It deletes no instance: a killed pod could not do so either, so nothing may depend on
// it, and the provider refuses instances that have gone. It requests no SSH certificates, no certificates for roles
// and users, and no tokens except service tokens: ZTS requires a registration for each audience of a JWT-SVID, and an
// identity document can be used once. A request names no host, cloud or signer key. CA certificates come only from
// the answers.
//
// Its tests run against a fake of ZTS, written from the public documentation.
package athenz

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices of [New]. URL, TrustDomain, and Roots or RootsFile of the Endpoint, and Instance, are
// required.
type Options struct {
	// Endpoint says where ZTS is. The URL has no path; in particular not /zts/v1. Its token is the attestation data.
	// An HTTPClient itself decides which server is trusted. If its transport is a *http.Transport, refreshes use a
	// copy that presents the certificate; any other transport must present it itself.
	caclient.Endpoint

	// Instance is the instance that the certificates are for.
	Instance athenzname.Instance

	// Certificate returns the present certificate of the instance, or nil if there is none: the method TLSCertificate
	// of a [pki.Credential] makes one. It is called for each Sign. Nil means that each certificate requires
	// attestation data.
	Certificate func() *tls.Certificate

	// ServerRootsFile has the CA certificates that vouch for ZTS itself, in PEM. It is read for each connection.
	ServerRootsFile string

	// KeyID, if set, is the ID under which the domain registered the service's key. Then the token of the Endpoint is
	// a service token signed with that key, such as authn/athenz.SignServiceToken makes for each call, and the key
	// signs the requests. The Instance then has no Provider and no ID, and Certificate and WithServiceToken are not
	// set.
	KeyID string

	// WithServiceToken asks for a service token with each certificate, which [CA.ServiceToken] returns.
	WithServiceToken bool
}

// CA is a [caclient.CA] and a [caclient.BundleWatcher]; [New] makes one. It is safe for concurrent use, and never
// prints a token or a key.
type CA struct {
	redacted
	opts      Options
	namespace string // of the SPIFFE ID
	conn      *caconn.Conn
	refreshes *caconn.Conn // presents the certificate

	// turn lets one request at a time use the fields below: with crossed answers, the later one would be unknown.
	turn      chan struct{}
	presented string // the serial number of the last certificate presented
	received  string // the serial number of the last certificate received

	token atomic.Pointer[func() string] // a service token, in a function so that no printer shows it; nil for none
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	c := &CA{opts: o, turn: make(chan struct{}, 1)}
	err := o.check()
	if err == nil && !o.Instance.SPIFFE.IsZero() {
		_, c.namespace, err = athenzname.ServiceOfID(o.Instance.SPIFFE)
	}
	if err == nil {
		c.conn, err = c.dial(nil)
	}
	if err == nil {
		c.refreshes, err = c.dial(c.clientCertificate)
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: invalid Options: %w", err)
	}
	c.redacted = c.conn.Text()
	return c, nil
}

func (o *Options) check() error {
	switch {
	case o.Roots == nil && o.RootsFile == "":
		return errors.New("neither Roots nor RootsFile is set: " +
			"they have the roots of the certificates that ZTS issues")
	case o.ServerRootsFile != "" && o.HTTPClient != nil:
		return errors.New("both ServerRootsFile and HTTPClient are set, which has roots already")
	case o.KeyID == "" && o.Instance.OwnsKey():
		return errors.New("the Instance has neither a Provider nor an ID, and KeyID is not set")
	case o.KeyID != "" && (!o.Instance.OwnsKey() || o.Certificate != nil || o.WithServiceToken):
		return errors.New("KeyID is set, and so is Certificate, WithServiceToken, or the Provider or ID of the " +
			"Instance: the owner of a key has none of them")
	}
	return o.Instance.Check()
}

// dial makes a connection, which presents a certificate if client is set. An instance is seldom refreshed, so none is
// kept open.
func (c *CA) dial(client func(*tls.CertificateRequestInfo) (*tls.Certificate, error)) (*caconn.Conn, error) {
	cfg := caconn.Config{Name: "athenz", Endpoint: c.opts.Endpoint}
	cfg.TLS = func(context.Context) (*tls.Config, error) {
		own := &tls.Config{MinVersion: tls.VersionTLS12, Time: certchain.Now, GetClientCertificate: client}
		if file := cmp.Or(c.opts.ServerRootsFile, c.opts.RootsFile); file != "" {
			b, err := caconn.ReadBundle(c.opts.TrustDomain, file)
			if err != nil {
				return nil, err
			}
			own.RootCAs = b.CertPool()
		}
		return own, nil
	}
	given := c.opts.HTTPClient
	if given == nil {
		cfg.Endpoint.HTTPClient = caconn.OneCall(cfg.TLS, client)
	} else if base, ok := given.Transport.(*http.Transport); ok && client != nil {
		t := base.Clone()
		t.DisableKeepAlives = true
		if t.TLSClientConfig == nil {
			t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		t.TLSClientConfig.GetClientCertificate = client
		t.TLSClientConfig.ClientSessionCache = nil // a resumed session has the certificate of the first
		cfg.Endpoint.HTTPClient = &http.Client{Transport: t, Timeout: given.Timeout}
	}
	return caconn.New(cfg)
}

// current returns the present certificate, if it may be presented.
func (c *CA) current() *tls.Certificate {
	cert := caconn.Present(c.opts.Certificate)
	if cert == nil || c.received == "" {
		return cert
	}
	if s := serial(cert.Leaf); s != c.received && s != c.presented {
		return nil // superseded
	}
	return cert
}

func serial(leaf *x509.Certificate) string { return leaf.SerialNumber.Text(16) }

type certificateKey struct{}

// clientCertificate is a [tls.Config].GetClientCertificate. The certificate of a refresh is in its context, so that
// the client presents the certificate that was checked.
func (c *CA) clientCertificate(asked *tls.CertificateRequestInfo) (*tls.Certificate, error) {
	if cert, ok := asked.Context().Value(certificateKey{}).(*tls.Certificate); ok {
		return cert, nil
	}
	return new(tls.Certificate), nil
}

// ServiceToken returns the service token that came with the last certificate, or "" if none did. It is a secret.
func (c *CA) ServiceToken() string {
	if token := c.token.Load(); token != nil {
		return (*token)()
	}
	return ""
}

// request is the body of a registration or, without the first four fields, of a refresh.
type request struct {
	Provider        string `json:"provider,omitempty"`
	Domain          string `json:"domain,omitempty"`
	Service         string `json:"service,omitempty"`
	AttestationData string `json:"attestationData,omitempty"`
	CSR             string `json:"csr"` // PEM
	Token           bool   `json:"token,omitempty"`
	Minutes         int64  `json:"expiryTime,omitempty"`
	Namespace       string `json:"namespace,omitempty"`
	KeyID           string `json:"keyId,omitempty"` // of the owner of a key
	principal       string // its service token, for a header
}

// answer is an InstanceIdentity, or the Identity for the owner of a key.
type answer struct {
	Name         string `json:"name"`
	InstanceID   string `json:"instanceId"`
	Certificate  string `json:"x509Certificate"`
	Signer       string `json:"x509CertificateSigner"`
	ServiceToken string `json:"serviceToken"`

	OwnerCertificate string `json:"certificate"`
	OwnerSigner      string `json:"caCertBundle"`
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

// Sign implements [caclient.CA]; the package comment describes the proof. The lifetime is sent in whole minutes, at
// least one; 0 means that ZTS decides. Calls wait for each other, and for this machine's clock if it is up to five
// seconds behind that of ZTS, which does not backdate certificates. The error is a [*caclient.Error], unless ctx is
// done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := c.conn.CheckRequest(csr, lifetime); err != nil {
		return nil, err
	}
	r := request{CSR: string(csr.PEM()), Token: c.opts.WithServiceToken, Namespace: c.namespace}
	if lifetime > 0 {
		r.Minutes = int64(max(lifetime, time.Minute) / time.Minute)
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	i := c.opts.Instance
	var refused error
	if cert := c.current(); cert != nil {
		c.presented = serial(cert.Leaf)
		path := "/" + i.Provider.String() + "/" + i.Service.Domain + "/" + i.Service.Name + "/" + i.ID
		c.refreshes.Reconnect() // a connection belongs to one certificate
		chain, err := c.certify(context.WithValue(ctx, certificateKey{}, cert), c.refreshes, csr, path, r)
		if err == nil || !caconn.Refused(err) {
			return chain, err
		}
		refused = err
	}
	token, err := c.conn.ProofToken(ctx, refused, noProof)
	if err != nil {
		return nil, err
	}
	if c.opts.KeyID != "" {
		r.KeyID, r.principal = c.opts.KeyID, token
		return c.certify(ctx, c.conn, csr, "/"+i.Service.Domain+"/"+i.Service.Name+"/refresh", r)
	}
	r.Provider, r.Domain, r.Service, r.AttestationData = i.Provider.String(), i.Service.Domain, i.Service.Name, token
	return c.certify(ctx, c.conn, csr, "", r)
}

const noProof = "there is neither a token nor a certificate that ZTS would take; set Token or TokenFile"

func (c *CA) certify(ctx context.Context, conn *caconn.Conn, csr *pki.CSR, path string, r request,
) ([]*x509.Certificate, error) {
	var a answer
	call := caconn.Request{Op: "sign", Method: http.MethodPost, Path: "/zts/v1/instance" + path, Body: r,
		Secrets: []string{r.AttestationData}, Message: caconn.Message}
	if r.principal != "" {
		call.Header, call.Secrets = http.Header{"Athenz-Principal-Auth": {r.principal}}, []string{r.principal}
	}
	if err := conn.Do(ctx, call, &a); err != nil {
		return nil, err
	}
	if c.opts.KeyID != "" {
		a.Certificate, a.Signer = a.OwnerCertificate, a.OwnerSigner
	}
	chain, err := c.read(csr, &a)
	if err != nil {
		return nil, conn.Error("sign", caclient.ErrBadAnswer, err)
	}
	c.received = serial(chain[0])
	if path == "" { // registered anew
		c.presented = ""
	}
	c.token.Store(new(func() string { return a.ServiceToken }))
	if ahead := time.Until(chain[0].NotBefore); ahead > 0 && ahead <= clockWait {
		if err := renew.Sleep(ctx, ahead); err != nil {
			return nil, err
		}
	}
	return chain, nil
}

// clockWait is how far this machine's clock may be behind that of ZTS, which does not backdate certificates.
const clockWait = 5 * time.Second

func (c *CA) read(csr *pki.CSR, a *answer) ([]*x509.Certificate, error) {
	switch {
	case a.Certificate == "":
		return nil, errors.New("the answer has no certificate")
	case a.Name != "" && !strings.EqualFold(a.Name, c.opts.Instance.Service.String()):
		return nil, fmt.Errorf("the answer is for the service %.200q", a.Name)
	case a.InstanceID != "" && a.InstanceID != c.opts.Instance.ID:
		return nil, fmt.Errorf("the answer is for the instance %.200q", a.InstanceID)
	case len(a.ServiceToken) > maxServiceToken || !caconn.IsText(a.ServiceToken):
		return nil, errors.New("the service token is too long, or has characters that no token has")
	}
	chain, err := caconn.Chain(csr, a.Certificate)
	if err != nil || a.Signer == "" { // the known roots stay
		return chain, err
	}
	above, err := pki.ParseCertificatesPEM([]byte(a.Signer))
	if err != nil {
		return nil, fmt.Errorf("CA certificates: %w", err)
	}
	if n := len(above); n > caconn.MaxRoots {
		return nil, fmt.Errorf("the answer has %d CA certificates, the limit is %d", n, caconn.MaxRoots)
	}
	roots := slices.DeleteFunc(slices.Clone(above),
		func(cert *x509.Certificate) bool { return !certchain.SelfSigned(cert) })
	if len(roots) > 0 {
		err = c.conn.LearnRoots(roots, chain[0])
	}
	return complete(chain, above), err
}

// complete adds to a chain the intermediate certificates found among the CA certificates.
func complete(chain, above []*x509.Certificate) []*x509.Certificate {
	above = slices.DeleteFunc(above,
		func(c *x509.Certificate) bool { return certchain.SelfSigned(c) || slices.ContainsFunc(chain, c.Equal) })
	for range maxAbove {
		i := certchain.Issuer(above, chain[len(chain)-1])
		if i < 0 {
			break
		}
		chain = append(chain, above[i])
		above = slices.Delete(above, i, i+1)
	}
	return chain
}

const maxAbove = 4 // intermediate certificates

const maxServiceToken = 16 << 10 // bytes
