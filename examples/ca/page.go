package main

import (
	"context"
	"crypto/x509"
	"net/http"

	"github.com/svidkit/svidkit/pki/caserver/caconfig"
	"github.com/svidkit/svidkit/sds/statuspage"
	"github.com/svidkit/svidkit/spiffe/report"
)

// page returns what operators see at "/" of -admin-addr, until ctx is done.
func (o *options) page(ctx context.Context, a *caconfig.Authority) (http.Handler, error) {
	p, err := statuspage.New("CA", statuspage.Part{Name: "ca", Source: authority{a, &o.pods}, Links: []string{"metrics", "ready", "status"}})
	if err == nil {
		context.AfterFunc(ctx, func() { _ = p.Close() })
	}
	return p, err
}

// authority tells the state of a CA: its keys with what becomes of them, its store, its audit log, and the requests of pods.
type authority struct {
	*caconfig.Authority
	pods *pods
}

// Report implements [report.Reporter].
func (a authority) Report() (r report.Report) {
	if a.Own == nil { // a signer of the cluster
		if b := a.Signer.Bundle(); b != nil {
			r.Bundles = []report.Bundle{{TrustDomain: b.TrustDomain().String(), Origin: a.Where}}
			for c := range b.X509Authorities() {
				r.Bundles[0].X509 = append(r.Bundles[0].X509, c)
			}
		}
		r.Upstreams = []report.Upstream{{Name: a.Where, OK: true}}
		return r
	}
	s, h := a.Own.Status(), a.Own.Health()
	if a.pods.signer != nil {
		r.Upstreams = a.pods.signer.Report().Upstreams
	}
	for _, k := range s.Roots {
		r.Bundles = append(r.Bundles, report.Bundle{TrustDomain: s.TrustDomain.String(), Origin: k.String(), X509: []*x509.Certificate{k.Certificate}})
	}
	for _, k := range s.JWTKeys {
		r.Bundles = append(r.Bundles, report.Bundle{TrustDomain: s.TrustDomain.String(), Origin: k.String(), JWT: []string{k.ID}})
	}
	r.Upstreams = append(r.Upstreams, report.Upstream{Name: a.Where, OK: true, LastSuccess: h.Synced, Err: h.Store}, report.Upstream{Name: "audit log", OK: true, Err: h.Audit})
	r.NotReady = h.Signing
	for _, err := range []error{h.Signing, h.Root} {
		if err != nil {
			r.Problems = append(r.Problems, err)
		}
	}
	return r
}
