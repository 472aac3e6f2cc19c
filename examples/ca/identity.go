package main

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// account is the service account in our own name.
const account = "svidkit-ca"

// newIdentity returns the SecretManager of our own certificate. It comes from our own CA, like
// anybody's, and is renewed at half of its life and when the roots change hands.
func newIdentity(c *config, p *parts, log *slog.Logger) (*secretcache.Manager, error) {
	id, err := c.trustDomain.KubernetesID(c.namespace, account)
	if err != nil {
		return nil, err
	}
	own := &self{signer: p.signer, bundles: bundles{c.trustDomain, p.signer}, id: id}
	own.dnsNames, own.ips = c.ownNames()
	cfg := secretcache.Config{ID: id, CA: own, NewKey: own.newKey, Logger: log}
	if p.authority != nil {
		watched, err := local.New(p.authority, id)
		if err != nil {
			return nil, err
		}
		cfg.CA = watchedSelf{own, watched}
	}
	return secretcache.New(cfg)
}

// watchedSelf is also told of new roots, instead of asking for them.
type watchedSelf struct {
	*self
	*local.CA
}

// Sign implements [secretcache.CA].
func (w watchedSelf) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	return w.self.Sign(ctx, csr, lifetime)
}

// FetchBundles implements [secretcache.CA].
func (w watchedSelf) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	return w.CA.FetchBundles(ctx)
}

// ownNames returns the names by which clients call us: those of istiod, that of Linkerd's certifier,
// those of the configuration and those of this machine's loopback interface.
func (c *config) ownNames() (dns []string, ips []net.IP) {
	for _, name := range []string{"istiod", "istiod-remote", "istio-pilot"} {
		dns = append(dns, name+"."+c.namespace+".svc")
	}
	dns = append(dns, c.dnsNames...)
	if name, err := c.mesh().Certifier(); err == nil {
		dns = append(dns, name)
	}
	dns = append(dns, "localhost")
	slices.Sort(dns)
	return slices.Compact(dns), []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
}

func (c *config) mesh() linkerdname.Mesh {
	return linkerdname.Mesh{ControlNamespace: c.linkerdNS, TrustDomain: c.trustDomain.String()}
}

// self is the CA as this process itself asks it: nobody has to prove anything, and the names are
// those that we decided on.
type self struct {
	signer   signer
	bundles  bundles
	id       spiffe.ID
	dnsNames []string
	ips      []net.IP
	key      atomic.Pointer[crypto.Signer] // of the certificate that is asked for
}

func (s *self) newKey() (crypto.Signer, error) {
	key, err := pki.NewKey(pki.ECDSAP256)
	s.key.Store(&key)
	return key, err
}

// Sign implements [secretcache.CA].
func (s *self) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	// A signer of the cluster grants only what the request names, so that it has to name all of it.
	if key := *s.key.Load(); pki.PublicKeysEqual(key.Public(), csr.PublicKey()) {
		named, err := s.request(key)
		if err != nil {
			return nil, err
		}
		csr = named
	}
	return s.signer.Sign(ctx, ca.Request{CSR: csr, ID: s.id, DNSNames: s.dnsNames, IPs: s.ips, TTL: lifetime, Method: "self"})
}

func (s *self) request(key crypto.Signer) (*pki.CSR, error) {
	names := []pki.SAN{pki.IDSAN(s.id)}
	for _, name := range s.dnsNames {
		names = append(names, pki.DNSSAN(name))
	}
	for _, ip := range s.ips {
		name, err := pki.IPSAN(ip)
		if err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return pki.NewCSR(key, pki.CSROptions{SANs: names})
}

// FetchBundles implements [secretcache.CA]. A registration authority without configured roots learns
// them from what is signed, so that something has to be, before there is a bundle.
func (s *self) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if b := s.signer.Bundle(); b == nil || len(b.MarshalPEM()) == 0 {
		key, err := s.newKey()
		if err != nil {
			return nil, err
		}
		csr, err := s.request(key)
		if err != nil {
			return nil, err
		}
		if _, err := s.Sign(ctx, csr, 0); err != nil {
			return nil, err
		}
	}
	b, err := s.bundles.Bundle(s.bundles.trustDomain)
	if err != nil {
		return nil, err
	}
	return spiffe.NewBundleSet(b)
}

// serverTLS returns a configuration with the certificate of the moment. A client certificate is
// asked for and not required: whether it is any good is for the authenticator to say.
func serverTLS(m *secretcache.Manager) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		ClientAuth: tls.RequestClientCert,
		NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			svid, err := m.SVID()
			if err != nil {
				return nil, err
			}
			return svid.TLSCertificate(), nil
		},
	}
}
