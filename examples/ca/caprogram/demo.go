package caprogram

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// demo starts a server on free ports, takes certificates over both APIs, replaces the root with the operator's
// command, and keeps taking and verifying certificates until the new root signs. It fails at the first failure. The
// server publishes a new root for the time of propagation before the root signs.
func demo(ctx context.Context, td spiffe.TrustDomain, propagation time.Duration, out io.Writer) error {
	dir, err := os.MkdirTemp("", "svidkit-ca-demo")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	o, err := Program{Name: "ca"}.parse([]string{
		"-trust-domain", td.String(), "-state-dir", dir, "-create",
		"-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr",
		"127.0.0.1:0",
		"-root-ttl", "1h", "-default-ttl", "5m", "-linkerd-ttl", "5m", "-max-ttl", "10m",
		"-refresh-hint", "1s", "-propagation", propagation.String(), "-caller-rate", "0",
	}, func(string) string { return "" }, io.Discard)
	if err != nil {
		return err
	}
	v := &visitor{options: o, signed: make(map[string]bool), out: out, begun: time.Now()}
	inner, stop := context.WithCancel(ctx)
	var failed error
	err = o.Serve(inner, nil, func(a *caconfig.Authority, at caserver.Listeners) {
		defer stop()
		v.ca, v.at = a, at
		failed = v.visit(inner)
	})
	stop()
	if ctx.Err() != nil { // an early end is no failure
		return nil
	}
	if err = cmp.Or(err, failed); err != nil {
		return err
	}
	return v.audit()
}

// visitor plays the workloads, the proxies and the operator of the demo.
type visitor struct {
	*options
	out    io.Writer
	begun  time.Time
	ca     *caconfig.Authority
	at     caserver.Listeners
	secret string         // prefix of tokens
	bundle *spiffe.Bundle // the latest from the endpoint
	leaves []*x509.Certificate
	signed map[string]bool // by the roots' serial numbers
}

func (v *visitor) say(format string, args ...any) {
	fmt.Fprintf(v.out, "%5.1fs  %s\n", time.Since(v.begun).Seconds(), fmt.Sprintf(format, args...))
}

// visit runs the demo while the server runs.
func (v *visitor) visit(ctx context.Context) error {
	announce(v.out, v.Config, v.ca, v.at)
	v.bundle = v.ca.Bundle() // a client has it from root-cert.pem
	secret, err := os.ReadFile(v.SecretFile)
	if err != nil {
		return err
	}
	v.secret = string(secret) + ":"
	v.say("Certificates")
	web, db, err := v.round(ctx)
	if err != nil {
		return err
	}
	v.say("Istio's API: demo/web is %s, until %s", web.ID(), web.NotAfter().UTC().Format("15:04:05Z"))
	if web, err = v.istio(ctx, "", web); err != nil {
		return err
	}
	v.say("Istio's API: the same again, by its certificate instead of a token: %s", web.ID())
	v.say("Linkerd's API: demo/db is %s, until %s", db.DNSNames[0], db.NotAfter.UTC().Format("15:04:05Z"))
	v.say("Refusals")
	if _, err = v.istio(ctx, v.secret+"spiffe://elsewhere.test/web", nil); !errors.Is(err,
		caclient.ErrUnauthenticated) {
		return fmt.Errorf("a caller of another trust domain was not refused: %w", err)
	}
	if _, err = v.istio(ctx, "demo/web", nil); !errors.Is(err, caclient.ErrUnauthenticated) {
		return fmt.Errorf("a caller without the secret was not refused: %w", err)
	}
	v.say("Istio's API: spiffe://elsewhere.test/web is refused, and so is demo/web without the secret")
	v.say("The root is replaced")
	rotate := *v.options
	rotate.command = "rotate"
	if err := rotate.do(ctx, nil, io.Discard); err != nil {
		return err
	}
	for len(v.signed) < 2 { // until the new root signs
		time.Sleep(100 * time.Millisecond)
		if _, _, err := v.round(ctx); err != nil {
			return err
		}
	}
	for _, root := range v.ca.Own.Status().Roots {
		v.say("%s", root)
	}
	resp, err := http.Get("http://" + v.at.Admin.Addr().String() + "/ready")
	if err != nil {
		return err
	}
	v.say("health: %s", resp.Status)
	return resp.Body.Close()
}

// round fetches the bundle, takes certificates over both APIs, and verifies all certificates so far by the bundle. It
// reports when another root signs.
func (v *visitor) round(ctx context.Context) (web *spiffe.SVID, db *x509.Certificate, err error) {
	if err := v.fetch(ctx); err != nil {
		return nil, nil, err
	}
	if web, err = v.istio(ctx, v.secret+"demo/web", nil); err != nil {
		return nil, nil, err
	}
	if db, err = v.linkerd(ctx); err != nil {
		return nil, nil, err
	}
	for _, leaf := range v.leaves {
		chains, err := leaf.Verify(x509.VerifyOptions{
			Roots: v.bundle.CertPool(), CurrentTime: time.Now().UTC(),
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
		})
		if err != nil {
			return nil, nil, fmt.Errorf("a certificate that is valid until %s: %w", leaf.NotAfter, err)
		}
		if serial := chains[0][1].SerialNumber.Text(16); !v.signed[serial] {
			v.signed[serial] = true
			v.say("certificates are signed by root %.8s…", serial)
		}
	}
	return web, db, nil
}

// fetch fetches the bundle from its endpoint, and verifies the endpoint by the previous bundle.
func (v *visitor) fetch(ctx context.Context) error {
	b, err := federation.Fetch(ctx, federation.Relationship{
		TrustDomain: v.CA.TrustDomain, URL: "https://" + v.at.Bundle.Addr().String() + "/",
		Profile: federation.SPIFFE{EndpointID: v.ServerID, Initial: v.bundle},
	}, nil)
	if err != nil {
		return err
	}
	before, _ := v.bundle.Sequence()
	if sequence, _ := b.Sequence(); sequence != before {
		v.say("bundle endpoint: bundle %d", sequence)
		for root := range b.X509Authorities() {
			v.say("    with root %.8s…", root.SerialNumber.Text(16))
		}
	}
	v.bundle = b
	return nil
}

// istio takes a certificate over Istio's API, as an agent does, with a token or with own as client certificate.
func (v *visitor) istio(ctx context.Context, token string, own *spiffe.SVID) (*spiffe.SVID, error) {
	client := newClient(v.bundle, own)
	defer client.CloseIdleConnections()
	api, err := istioca.New(istioca.Options{Endpoint: caclient.Endpoint{
		URL: "https://" + v.at.Istio.Addr().String(), HTTPClient: client, TrustDomain: v.CA.TrustDomain,
		Token: func(context.Context) (string, error) { return token, nil },
	}})
	if err != nil {
		return nil, err
	}
	key, csr, err := newRequest()
	if err != nil {
		return nil, err
	}
	chain, err := api.Sign(ctx, csr, 0)
	if err != nil {
		return nil, err
	}
	svid, err := spiffe.NewSVID(chain, key)
	if err != nil {
		return nil, err
	}
	v.leaves = append(v.leaves, chain[0])
	return svid, nil
}

// linkerd takes a certificate for demo/db over Linkerd's API, as a proxy does.
func (v *visitor) linkerd(ctx context.Context) (*x509.Certificate, error) {
	name, err := v.mesh.Name("demo", "db")
	if err != nil {
		return nil, err
	}
	_, csr, err := newRequest(pki.DNSSAN(name))
	if err != nil {
		return nil, err
	}
	api, err := linkerd.New(linkerd.Options{Mesh: v.mesh, Endpoint: caclient.Endpoint{
		URL: "https://" + v.at.Linkerd.Addr().String(), TrustDomain: v.CA.TrustDomain, Roots: v.bundle,
		Token: func(context.Context) (string, error) { return v.secret + "demo/db", nil },
	}})
	if err != nil {
		return nil, err
	}
	chain, err := api.Sign(ctx, csr, 0)
	if err != nil {
		return nil, err
	}
	v.leaves = append(v.leaves, chain[0])
	return chain[0], chain[0].VerifyHostname(name)
}

// audit looks up each certificate in the audit log, after the server has ended.
func (v *visitor) audit() error {
	log, err := os.ReadFile(v.AuditLog)
	if err != nil {
		return err
	}
	for _, leaf := range v.leaves {
		if serial := leaf.SerialNumber.Text(16); !bytes.Contains(log, []byte(`"`+serial+`"`)) {
			return fmt.Errorf("the audit log lacks the certificate %s", serial)
		}
	}
	v.say("the audit log has %d records, those of our %d certificates among them", bytes.Count(log, []byte("\n")),
		len(v.leaves))
	return nil
}

func newRequest(names ...pki.SAN) (crypto.Signer, *pki.CSR, error) {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return nil, nil, err
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: names})
	return key, csr, err
}

// newClient returns a client that verifies the server by the roots of b, and presents own if that is not nil.
func newClient(b *spiffe.Bundle, own *spiffe.SVID) *http.Client {
	cfg := &tls.Config{RootCAs: b.CertPool(), ServerName: "localhost", MinVersion: tls.VersionTLS13}
	if own != nil {
		cfg.Certificates = []tls.Certificate{*own.TLSCertificate()}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true},
		Timeout: 10 * time.Second}
}
