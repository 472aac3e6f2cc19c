package caserver

import (
	"context"
	"crypto/x509"
	"fmt"
	"iter"
	"net"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// newIdentity returns the SecretManager of the server's own certificate. The certificate comes from the CA
// that is served, like that of any workload, and is renewed at half of its life and when the roots change.
func newIdentity(o Options) (*secretcache.Manager, error) {
	s := &self{ca: o.CA, id: o.ID}
	for _, name := range o.Names {
		switch name.Type {
		case pki.DNS:
			s.dnsNames = append(s.dnsNames, name.Value)
		case pki.IP:
			s.ips = append(s.ips, net.IP(name.Value))
		default:
			return nil, fmt.Errorf("Options.Names has %v, which is neither a DNS name nor an IP address", name)
		}
	}
	var source caclient.CA = s
	if w, ok := o.CA.(interface{ Changed() <-chan struct{} }); ok {
		source = watched{s, w.Changed}
	}
	return secretcache.New(secretcache.Config{ID: o.ID, CA: source, Names: o.Names, Logger: o.Logger})
}

// self is the CA for the server's own certificate. The names are those of the Options, whatever the request has; a
// registration authority grants only names that are in the request, which is why the requests have them too.
type self struct {
	ca       ca.Signer
	id       spiffe.ID
	dnsNames []string
	ips      []net.IP
}

// Sign implements [caclient.CA].
func (s *self) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	return s.ca.Sign(ctx, ca.Request{CSR: csr, ID: s.id, DNSNames: s.dnsNames, IPs: s.ips, TTL: lifetime, Method: "self"})
}

// FetchBundles implements [caclient.CA]. A registration authority that learns its roots from what is
// signed has none before the first signature, so one is asked for, with a key that is thrown away.
func (s *self) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if b := s.ca.Bundle(); b == nil || len(b.MarshalPEM()) == 0 {
		key, err := pki.NewKey(pki.ECDSAP256)
		if err != nil {
			return nil, err
		}
		csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(s.id)}})
		if err != nil {
			return nil, err
		}
		if _, err := s.Sign(ctx, csr, 0); err != nil {
			return nil, err
		}
	}
	return spiffe.NewBundleSet(s.ca.Bundle())
}

// watched is a self whose CA tells of new bundles.
type watched struct {
	*self
	changed func() <-chan struct{}
}

// WatchBundles has the form that [caclient.CA] describes.
func (w watched) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		for ctx.Err() == nil {
			changed := w.changed() // before reading, so that no change is missed
			if !yield(spiffe.NewBundleSet(w.ca.Bundle())) {
				return
			}
			select {
			case <-ctx.Done():
			case <-changed:
			}
		}
	}
}
