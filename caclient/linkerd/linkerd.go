// Package linkerd is a client of Linkerd's identity API: of a mesh's certifier, of package pki/caserver/linkerd, or of
// any other server that speaks it.
//
// Its certificates have the DNS name of a service account, and no SPIFFE ID. [caclient.New] adds a deadline, and the
// check of every answer against that name:
//
//	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
//	inner, err := linkerd.New(linkerd.Options{
//		Endpoint: caclient.Endpoint{
//			URL:         "https://linkerd-identity-headless.linkerd.svc.cluster.local:8080",
//			TrustDomain: td,
//			TokenFile:   "/var/run/secrets/tokens/linkerd-identity-token",
//			RootsFile:   "/var/run/linkerd/identity/trust-roots/ca-bundle.crt",
//		},
//		Mesh: mesh,
//	})
//	…
//	name, err := mesh.Name("emojivoto", "web")
//	…
//	ca, err := caclient.New(inner, &caclient.Options{Expect: pki.ExpectDNSName(td, name)})
//
// # What it promises
//
// The token goes only to the mesh's certifier. Before the client sends it, the server has proven in a TLS handshake
// that one of its names is [linkerdname.Mesh.Certifier], with a chain to the trust anchors. The host in the URL and a
// wildcard in a certificate prove nothing. Each call makes a connection. The
// connection is TLS 1.3 without ALPN, like Linkerd's.
//
// The token is read again for each call. It is sent in the request body, as the API requires. No error and no log
// record contains it.
//
// An answer has one certificate for the key of the request, and an expiry in the future that matches the
// certificate to the second, give or take one for servers that round.
//
// # Retries
//
// A certifier answers "invalid argument" and "failed precondition" to an unknown token, which it may not know yet or
// no longer, and also to a wrong name. So both are retried: see [caclient.Error].MayPass. So is "unknown", Linkerd's
// answer while its issuer does not verify.
//
// # What it does not do
//
// The API has no trust bundle: Endpoint.Roots or Endpoint.RootsFile is required, for the anchors. It has no lifetime:
// the certifier chooses it. No client certificate is presented.
package linkerd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/caclient/internal/carpc"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// method is the path of the API's one method.
const method = "/io.linkerd.proxy.identity.Identity/Certify"

const (
	maxChain  = 16
	tolerance = time.Second // between valid_until and the end of the leaf
)

// Options are the choices of [New]. URL and TrustDomain of the Endpoint, and its Roots or RootsFile, are required.
type Options struct {
	// Endpoint says where the certifier is. HTTPClient must be nil unless URL begins with http, because package
	// linkerd must see the server's certificate itself. An http URL is for the proxy on the same host; the client
	// must then speak HTTP/2.
	caclient.Endpoint

	// Mesh determines the certifier's name, and the form of the names that a workload can request.
	Mesh linkerdname.Mesh
}

// CA is a [caclient.CA] and a [caclient.BundleWatcher]; [New] makes one. It is safe for concurrent use, and never
// prints a token or a key.
type CA struct {
	redacted
	mesh linkerdname.Mesh
	conn *caconn.Conn
	rpc  *grpchttp.Client
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	c := &CA{mesh: o.Mesh}
	certifier, err := o.Mesh.Certifier()
	if err == nil {
		c.conn, err = caconn.New(caconn.Config{
			Name: "linkerd", Endpoint: o.Endpoint, PriorKnowledge: true, TLS: tlsConfig(o.Endpoint, certifier),
		})
	}
	switch {
	case err != nil:
	case o.Roots == nil && o.RootsFile == "":
		err = errors.New("neither Roots nor RootsFile has the trust anchors")
	case o.HTTPClient != nil && strings.HasPrefix(c.conn.URL, "https:"):
		err = errors.New("HTTPClient is set, but this package has to recognise the certifier in the handshake itself")
	}
	if err != nil {
		return nil, fmt.Errorf("linkerd: invalid Options: %w", err)
	}
	c.redacted = c.conn.Text()
	c.rpc = grpchttp.NewClient(c.conn.HTTP, c.conn.URL, caconn.MaxResponse)
	return c, nil
}

// tlsConfig returns the configuration for connections to the certifier.
func tlsConfig(e caclient.Endpoint, certifier string) func(context.Context) (*tls.Config, error) {
	want := pki.ExpectLeaf(e.TrustDomain, "the certifier "+certifier, nil,
		func(leaf *x509.Certificate) error {
			if !slices.Contains(leaf.DNSNames, certifier) {
				return fmt.Errorf("it is for %.300q, and not the certifier %q", leaf.DNSNames, certifier)
			}
			return nil
		})
	return func(context.Context) (*tls.Config, error) {
		anchors := e.Roots
		if e.RootsFile != "" {
			b, err := caconn.ReadBundle(e.TrustDomain, e.RootsFile)
			if err != nil {
				return nil, err
			}
			anchors = b
		}
		return &tls.Config{
			MinVersion:         tls.VersionTLS13,
			ServerName:         certifier,
			InsecureSkipVerify: true, // VerifyConnection verifies a name that no host may have
			VerifyConnection: func(state tls.ConnectionState) error {
				_, err := want.Verify(state.PeerCertificates, anchors, spiffe.ServerRole, time.Now())
				if err != nil {
					return &tls.CertificateVerificationError{UnverifiedCertificates: state.PeerCertificates,
						Err: fmt.Errorf("the server's certificate: %w", err)}
				}
				return nil
			},
		}, nil
	}
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

// Sign implements [caclient.CA]. csr has exactly one DNS name, of a service account in the mesh, which may also be
// its common name; its key is ECDSA. The certifier chooses the lifetime. The error is a [*caclient.Error], unless ctx
// is done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := c.conn.CheckRequest(csr, lifetime); err != nil {
		return nil, err
	}
	name, err := c.name(csr)
	if err != nil {
		return nil, c.conn.Error("sign", caclient.ErrInvalid, err)
	}
	token, err := c.conn.ProofToken(ctx, nil, "there is no token to send; set Token or TokenFile")
	if err != nil {
		return nil, err
	}
	request, err := protofield.Write(func(w *protofield.Writer) {
		w.Text(1, name)
		w.Bytes(2, []byte(token))
		w.Bytes(3, csr.DER())
	})
	if err != nil {
		return nil, c.conn.Error("sign", caclient.ErrInvalid, err)
	}
	c.conn.Begin()
	response, err := c.rpc.Unary(ctx, method, nil, request)
	if err != nil {
		return nil, c.callError(carpc.Error(ctx, c.conn, err, token, nil), err)
	}
	chain, err := readResponse(response, time.Now())
	if err == nil {
		chain, err = caconn.Tidy(csr, chain)
	}
	if err != nil {
		return nil, c.conn.Error("sign", caclient.ErrBadAnswer, err)
	}
	return chain, nil
}

// name returns the only name that csr may request.
func (c *CA) name(csr *pki.CSR) (string, error) {
	sans := csr.SANs()
	if len(sans) != 1 || sans[0].Type != pki.DNS {
		return "", fmt.Errorf("the request is for %.300v, want one DNS name", sans)
	}
	name := sans[0].Value
	if _, _, err := c.mesh.Parse(name); err != nil {
		return "", err
	}
	if cn := csr.CommonName(); cn != "" && cn != name {
		return "", fmt.Errorf("the common name %.300q is not the DNS name of the request", cn)
	}
	return name, nil
}

// callError sets the kind that an error's code means in this API.
func (c *CA) callError(failure, cause error) error {
	e, ok := failure.(*caclient.Error) // it was made by carpc
	if !ok {
		return failure
	}
	if status, ok := errors.AsType[*grpchttp.Error](cause); ok && status.Remote {
		switch status.Code {
		case grpchttp.InvalidArgument, grpchttp.FailedPrecondition:
			e.MayPass = true
		case grpchttp.Unknown:
			e.Kind = caclient.ErrUnavailable
		}
	}
	return e
}

type response struct {
	leaf    []byte
	issuers [][]byte
	until   *time.Time
}

func (r *response) read(f *protofield.Field) {
	switch f.Number {
	case 1:
		f.Bytes(&r.leaf)
	case 2:
		if len(r.issuers) == maxChain-1 {
			f.Fail(fmt.Errorf("the answer has more than %d certificates", maxChain))
			return
		}
		var der []byte
		f.Bytes(&der)
		r.issuers = append(r.issuers, der)
	case 3:
		if f.Data != nil {
			seconds, nanos := f.Seconds()
			until := time.Unix(seconds, int64(nanos))
			r.until = &until
		}
	}
}

// readResponse reads a CertifyResponse at now.
func readResponse(message []byte, now time.Time) ([]*x509.Certificate, error) {
	var r response
	if err := protofield.Read(message, r.read); err != nil {
		return nil, err
	}
	if len(r.leaf) == 0 {
		return nil, errors.New("the answer has no certificate")
	}
	chain := make([]*x509.Certificate, 0, maxChain)
	for i, der := range slices.Concat([][]byte{r.leaf}, r.issuers) {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("certificate %d of %d is not X.509 in DER", i+1, len(r.issuers)+1)
		}
		chain = append(chain, c)
	}
	end := chain[0].NotAfter
	switch {
	case r.until == nil:
		return nil, errors.New("the answer does not say until when the certificate is valid")
	case !r.until.After(now):
		return nil, fmt.Errorf("the answer says that the certificate is valid until %s, and now is %s: "+
			"compare the clocks", text(*r.until), text(now))
	case r.until.Sub(end).Abs() > tolerance:
		return nil, fmt.Errorf("the answer says that the certificate is valid until %s, and the certificate says %s",
			text(*r.until), text(end))
	}
	return chain, nil
}

func text(t time.Time) string { return t.UTC().Format(time.RFC3339) }
