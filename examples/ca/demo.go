package main

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// demo starts a server on ports that are free, takes certificates over both APIs, replaces the root by
// the command of an operator, and goes on taking certificates and checking old ones until the new
// root signs. The first thing that fails is its error.
func demo(ctx context.Context, c *config, out io.Writer) error {
	dir, err := os.MkdirTemp("", "svidkit-ca-demo")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	own := config{command: command{verbose: c.verbose}}
	fs := own.flags(io.Discard) // for the defaults
	for flag, value := range map[string]string{
		"trust-domain": c.trustDomain.String(), "root-ca-dir": filepath.Join(dir, "none"), "state-dir": dir,
		"istio-addr": "127.0.0.1:0", "linkerd-addr": "127.0.0.1:0", "bundle-addr": "127.0.0.1:0", "admin-addr": "127.0.0.1:0",
		"root-ttl": "1h", "default-ttl": "5m", "linkerd-ttl": "5m", "max-ttl": "10m",
		"refresh-hint": "1s", "propagation": "5s", "caller-rate": "0",
	} {
		if err := fs.Set(flag, value); err != nil {
			return fmt.Errorf("-%s: %w", flag, err)
		}
	}
	own.complete()
	log := slog.New(slog.DiscardHandler)
	p, err := build(ctx, &own, log)
	if err != nil {
		return err
	}
	defer p.close()
	s, err := newServer(&own, p, log)
	if err != nil {
		return err
	}
	show := &show{server: s, out: out, start: time.Now(), issuers: make(map[string]bool)}
	if err := s.serve(ctx, show.run); err != nil || ctx.Err() != nil {
		return err
	}
	return show.audit(own.auditLog)
}

// show is the demo while the server runs.
type show struct {
	server *server
	out    io.Writer
	start  time.Time

	bundle  *spiffe.Bundle // as the endpoint gave it last
	leaves  []*x509.Certificate
	issuers map[string]bool // serial numbers
	issued  int
}

func (s *show) say(format string, args ...any) {
	fmt.Fprintf(s.out, "%5.1fs  %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, args...))
}

func (s *show) run(ctx context.Context) error {
	s.server.announce(s.out)
	roots, err := os.ReadFile(s.server.c.rootsFile())
	if err != nil {
		return err
	}
	if s.bundle, err = spiffe.ParseBundlePEM(s.server.c.trustDomain, roots); err != nil {
		return err
	}
	if err := s.fetch(ctx); err != nil {
		return err
	}
	if err := s.introduce(ctx); err != nil {
		return err
	}
	if err := s.rotate(ctx); err != nil {
		return err
	}
	return s.health(ctx)
}

// introduce shows who gets what.
func (s *show) introduce(ctx context.Context) error {
	key, chain, err := s.istio(ctx, "demo/web", nil)
	if err != nil {
		return err
	}
	s.say("Istio's API: demo/web is %s, until %s", chain[0].URIs[0], chain[0].NotAfter.Local().Format(time.TimeOnly))
	if _, chain, err = s.istio(ctx, "", &tls.Certificate{Certificate: raw(chain), PrivateKey: key}); err != nil {
		return err
	}
	s.say("Istio's API: the same again, by its certificate instead of a token: %s", chain[0].URIs[0])
	chain, err = s.linkerd(ctx, "demo", "db")
	if err != nil {
		return err
	}
	s.say("Linkerd's API: demo/db is %s, until %s", chain[0].DNSNames[0], chain[0].NotAfter.Local().Format(time.TimeOnly))

	_, _, err = s.istio(ctx, "spiffe://elsewhere.test/web", nil)
	if refusal, ok := errors.AsType[*caclient.Error](err); !ok || refusal.Code != caclient.Unauthenticated {
		return fmt.Errorf("somebody from another trust domain was not refused: %w", err)
	}
	s.say("Istio's API: spiffe://elsewhere.test/web is refused")
	return nil
}

// rotate replaces the root and takes certificates until the new one signs.
func (s *show) rotate(ctx context.Context) error {
	command := *s.server.c
	command.rotate = true
	s.say("an operator: ca -rotate")
	if err := command.do(ctx, nil, io.Discard, slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	for tick := time.Tick(100 * time.Millisecond); ctx.Err() == nil && len(s.issuers) < 2; {
		if err := s.fetch(ctx); err != nil {
			return err
		}
		if err := s.step(ctx); err != nil {
			return err
		}
		select {
		case <-tick:
		case <-ctx.Done():
		}
	}
	for _, r := range s.server.p.authority.Roots() {
		s.say("%.14s… %s", r, strings.SplitN(r.String(), ": ", 2)[1])
	}
	return ctx.Err()
}

// step takes a certificate over each API and checks all that there are by the newest bundle.
func (s *show) step(ctx context.Context) error {
	if _, _, err := s.istio(ctx, "demo/web", nil); err != nil {
		return err
	}
	if _, err := s.linkerd(ctx, "demo", "db"); err != nil {
		return err
	}
	for _, leaf := range s.leaves {
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: s.bundle.CertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
			return fmt.Errorf("a certificate that is valid until %s: %w", leaf.NotAfter, err)
		}
	}
	return nil
}

// istio takes a certificate over Istio's API and checks it.
func (s *show) istio(ctx context.Context, token string, own *tls.Certificate) (crypto.Signer, []*x509.Certificate, error) {
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		return nil, nil, err
	}
	client := newClient(s.bundle, own) // a new handshake each time
	defer client.CloseIdleConnections()
	chain, _, err := istioRequest(ctx, client, "https://"+s.server.istioAt.String(), s.server.c.trustDomain, token, key)
	if err != nil {
		return nil, nil, err
	}
	v, err := spiffe.NewVerifier(s.bundle, spiffe.AllowMembersOf(s.server.c.trustDomain), nil)
	if err != nil {
		return nil, nil, err
	}
	if _, err := v.VerifyChain(chain, spiffe.ClientRole); err != nil {
		return nil, nil, err
	}
	return key, chain, s.took(chain)
}

// linkerd takes a certificate over Linkerd's API and checks it.
func (s *show) linkerd(ctx context.Context, namespace, account string) ([]*x509.Certificate, error) {
	name, err := s.server.c.mesh().Name(namespace, account)
	if err != nil {
		return nil, err
	}
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		return nil, err
	}
	client := newClient(s.bundle, nil)
	defer client.CloseIdleConnections()
	chain, err := linkerdRequest(ctx, client, "https://"+s.server.linkerdAt.String(), namespace+"/"+account, name, key)
	if err != nil {
		return nil, err
	}
	if err := checkLinkerd(chain, name, s.bundle); err != nil {
		return nil, err
	}
	return chain, s.took(chain)
}

// took counts a certificate, and says when another root signs.
func (s *show) took(chain []*x509.Certificate) error {
	s.issued++
	s.leaves = append(s.leaves, chain[0])
	for root := range s.bundle.X509Authorities() {
		if chain[0].CheckSignatureFrom(root) == nil {
			if serial := root.SerialNumber.Text(16); !s.issuers[serial] {
				s.issuers[serial] = true
				s.say("certificates are signed by root %.8s…", serial)
			}
			return nil
		}
	}
	return errors.New("a certificate of no root in the bundle")
}

// fetch gets the bundle from its endpoint, which proves itself by the bundle that we had before.
func (s *show) fetch(ctx context.Context) error {
	id, err := s.server.c.trustDomain.KubernetesID(s.server.c.namespace, account)
	if err != nil {
		return err
	}
	b, err := federation.Fetch(ctx, federation.Relationship{
		TrustDomain: s.server.c.trustDomain,
		URL:         "https://" + s.server.bundleAt.String() + "/",
		Profile:     federation.SPIFFE{EndpointID: id, Initial: s.bundle},
	}, nil)
	if err != nil {
		return err
	}
	before, _ := s.bundle.Sequence()
	if sequence, _ := b.Sequence(); sequence != before {
		s.say("bundle endpoint: bundle %d", sequence)
		for root := range b.X509Authorities() {
			s.say("    with root %.8s…", root.SerialNumber.Text(16))
		}
	}
	s.bundle = b
	return nil
}

// health asks what a cluster asks.
func (s *show) health(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.server.adminAt.String()+"/ready", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	s.say("health: %s", resp.Status)
	return nil
}

// audit finds each certificate in the audit log, after the server has ended.
func (s *show) audit(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	records := make(map[string]bool)
	for i, err := range auditlog.Read(f) {
		if err != nil {
			return err
		}
		records[i.Serial] = true
	}
	for _, leaf := range s.leaves {
		if serial := leaf.SerialNumber.Text(16); !records[serial] {
			return fmt.Errorf("the audit log lacks the certificate %s", serial)
		}
	}
	s.say("the audit log has %d records, those of our %d certificates among them", len(records), s.issued)
	return nil
}

func raw(chain []*x509.Certificate) (der [][]byte) {
	for _, cert := range chain {
		der = append(der, cert.Raw)
	}
	return der
}
