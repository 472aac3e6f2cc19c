package caclienttest

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// NewLinkerd serves Linkerd's identity API, as the certifier of a mesh does, for the service account in path, which is
// "/ns/NAMESPACE/sa/SERVICEACCOUNT". The control plane is in the namespace "linkerd", and the names of the mesh end with the
// trust domain: see [Mesh].
func NewLinkerd(t testing.TB, ca *spiffetest.CA, path string) *Fake {
	t.Helper()
	f := newFake(t, ca, path)
	mesh := Mesh(ca.TrustDomain())
	namespace, account, _ := f.id.Kubernetes()
	name, err := mesh.Name(namespace, account)
	if err != nil {
		t.Fatalf("caclienttest: the path %q of the workload: %v", path, err)
	}
	certifier, err := mesh.Certifier()
	if err != nil {
		t.Fatalf("caclienttest: %v", err)
	}
	f.want = pki.ExpectDNSName(ca.TrustDomain(), name)
	token := "linkerd-" + rand.Text()
	srv, err := linkerd.New(linkerd.Options{
		Mesh: mesh, Signer: honest{f.Signer(), f}, Lifetime: time.Hour, AllowPlaintext: isInMemory(t),
		Review: func(_ context.Context, got string, _ []string) (*kube.Account, error) {
			if !same(got, token) {
				return nil, kube.ErrNotAuthenticated
			}
			return &kube.Account{Namespace: namespace, ServiceAccount: account}, nil
		},
	})
	if err != nil {
		t.Fatalf("caclienttest: %v", err)
	}
	f.serve(wire{
		name: "Linkerd", handler: srv, signs: anyRequest, refuse: refuseGRPC, garbled: http.HandlerFunc(garbledGRPC), grpc: true, ownLife: true, ownTLS: true,
		token:    func() string { return token },
		dnsNames: []string{certifier},
		tls:      func(c *tls.Config) { c.MinVersion, c.NextProtos = tls.VersionTLS13, nil },
		endpoint: func(e *caclient.Endpoint) {
			if e.Roots = (bundle{ca}); !f.plaintext() {
				e.HTTPClient = nil
				return
			}
			e.AllowPlaintext = true
			t := e.HTTPClient.Transport.(*http.Transport)
			t.ForceAttemptHTTP2, t.Protocols = false, new(http.Protocols)
			t.Protocols.SetUnencryptedHTTP2(true)
		},
		replace: func(_ []byte, chain []*x509.Certificate) []byte {
			return mustWrite(func(w *protofield.Writer) {
				for i, c := range chain {
					w.AddBytes(protofield.Number(min(i+1, 2)), c.Raw)
				}
				if len(chain) > 0 {
					w.Message(3, func(w *protofield.Writer) { w.Varint(1, uint64(chain[0].NotAfter.Unix())) })
				}
			})
		},
	})
	return f
}

// Mesh returns how names are written in the mesh of [NewLinkerd].
func Mesh(td spiffe.TrustDomain) linkerdname.Mesh {
	return linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: td.String()}
}

// bundle is the bundle of a CA as it is now.
type bundle struct{ ca *spiffetest.CA }

func (b bundle) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return b.ca.Bundle().Bundle(td)
}
