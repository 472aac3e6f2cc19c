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
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// NewLinkerd serves Linkerd's identity API, as the certifier of a mesh does, for the service account in path, which is
// "/ns/NAMESPACE/sa/SERVICEACCOUNT". Its mesh is
//
//	linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: ca.TrustDomain().String()}
func NewLinkerd(t testing.TB, ca *spiffetest.CA, path string) *Fake {
	t.Helper()
	f := cafake.New(t, ca, path)
	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: ca.TrustDomain().String()}
	namespace, account, _ := f.ID().Kubernetes()
	name, err := mesh.Name(namespace, account)
	if err != nil {
		t.Fatalf("caclienttest: the path %q of the workload: %v", path, err)
	}
	certifier, err := mesh.Certifier()
	if err != nil {
		t.Fatalf("caclienttest: %v", err)
	}
	f.Expect(pki.ExpectDNSName(ca.TrustDomain(), name))
	token := "linkerd-" + rand.Text()
	srv, err := linkerd.New(linkerd.Options{
		Mesh: mesh, Signer: f.HonestSigner(), Lifetime: time.Hour, AllowPlaintext: cafake.IsInMemory(t),
		Review: func(_ context.Context, got string, _ []string) (*spiffe.Pod, error) {
			if !cafake.SameToken(got, token) {
				return nil, kube.ErrNotAuthenticated
			}
			return &spiffe.Pod{Namespace: namespace, ServiceAccount: account}, nil
		},
	})
	if err != nil {
		t.Fatalf("caclienttest: %v", err)
	}
	f.Serve(cafake.API{
		Name: "Linkerd", Handler: srv, Signs: anyRequest, Refuse: refuseGRPC, Garbled: http.HandlerFunc(garbledGRPC),
		GRPC: true, OwnLife: true, OwnTLS: true,
		Token:    func() string { return token },
		DNSNames: []string{certifier},
		TLS:      func(c *tls.Config) { c.MinVersion, c.NextProtos = tls.VersionTLS13, nil },
		Endpoint: func(e *caclient.Endpoint) { linkerdEndpoint(f, e) },
		Replace:  replaceLinkerd,
	})
	return newFake(f)
}

func linkerdEndpoint(f *cafake.Fake, e *caclient.Endpoint) {
	if e.Roots = f.Roots(); !f.Plaintext() {
		e.HTTPClient = nil
		return
	}
	e.AllowPlaintext = true
	t := e.HTTPClient.Transport.(*http.Transport)
	t.ForceAttemptHTTP2, t.Protocols = false, new(http.Protocols)
	t.Protocols.SetUnencryptedHTTP2(true)
}

// replaceLinkerd returns a CertifyResponse with a chain.
func replaceLinkerd(_ []byte, chain []*x509.Certificate) []byte {
	return mustWrite(func(w *protofield.Writer) {
		for i, c := range chain {
			w.AddBytes(protofield.Number(min(i+1, 2)), c.Raw)
		}
		if len(chain) > 0 {
			w.Message(3, func(w *protofield.Writer) { w.Varint(1, uint64(chain[0].NotAfter.Unix())) })
		}
	})
}
