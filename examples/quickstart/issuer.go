package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// issuer returns the CA of a workload: one that knows who is asking.
type issuer func(id spiffe.ID) (secretcache.CA, error)

// newIssuer returns the CA of the show: the one at o.ca, or one in this process, which is returned
// too.
func newIssuer(n *narrator, o options) (issuer, *ca.Authority, error) {
	if o.ca != "" {
		from, err := outside(o)
		return from, nil, err
	}
	authority, err := newAuthority(n, o)
	if err != nil {
		return nil, nil, err
	}
	return inside(authority), authority, nil
}

// newAuthority makes a CA in this process, with lifetimes that fit the show.
func newAuthority(n *narrator, o options) (*ca.Authority, error) {
	authority, err := ca.New(ca.Config{
		TrustDomain: trustDomain,
		DefaultTTL:  o.lifetime,
		MaxTTL:      o.lifetime,
		Backdate:    time.Second,
		RefreshHint: time.Second,
		Rotation:    ca.Rotation{Propagation: max(o.lifetime*2/5, time.Second)}, // how long a new root is known before it signs
	})
	if err != nil {
		return nil, err
	}
	root := authority.Roots()[0].Certificate
	n.say(event{Who: "ca", What: "root created", Serial: short(root), NotAfter: root.NotAfter})
	return authority, nil
}

// inside asks the CA in this process: everything is signed for the identity that local.New names, and
// nothing for what a request asks for.
func inside(authority *ca.Authority) issuer {
	return func(id spiffe.ID) (secretcache.CA, error) { return local.New(authority, id) }
}

// outside asks the CA at o.ca. The workload's name is its token, which is what the development
// authenticator of examples/ca believes; a real one takes the token of a service account.
func outside(o options) (issuer, error) {
	if _, err := readRoots(o.caRoots); err != nil { // now, rather than with the first connection
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{
		DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			roots, err := readRoots(o.caRoots) // again, as the CA's own certificate follows its roots
			if err != nil {
				return nil, err
			}
			dialer := tls.Dialer{Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}}}
			return dialer.DialContext(ctx, network, addr)
		},
		ForceAttemptHTTP2: true,
	}}
	return func(id spiffe.ID) (secretcache.CA, error) {
		remote, err := istioca.New(istioca.Options{
			URL:         o.ca,
			HTTPClient:  client,
			TrustDomain: trustDomain,
			RootsFile:   o.caRoots,
			Token:       func(context.Context) (string, error) { return id.String(), nil },
		})
		if err != nil {
			return nil, err
		}
		return caclient.New(remote, nil)
	}, nil
}

func readRoots(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificates", file)
	}
	return roots, nil
}
