package caclienttest

import (
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"net/http"
	"testing"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// NewIstio serves Istio's certificate API, as istiod does, for the workload at path, such as "/ns/default/sa/web".
func NewIstio(t testing.TB, ca *spiffetest.CA, path string) *Fake {
	t.Helper()
	f := cafake.New(t, ca, path)
	token := "istio-" + rand.Text()
	srv, err := istioca.New(istioca.Options{Signer: f.HonestSigner(), Authenticator: bearer{token, f}})
	if err != nil {
		t.Fatalf("caclienttest: %v", err)
	}
	f.Serve(cafake.API{
		Name: "Istio", Handler: srv, Signs: anyRequest, Refuse: refuseGRPC, Garbled: http.HandlerFunc(garbledGRPC),
		GRPC:  true,
		Token: func() string { return token },
		Replace: func(body []byte, chain []*x509.Certificate) []byte {
			var texts []string
			_ = protofield.Read(body, func(field *protofield.Field) {
				var text string
				field.Text(&text)
				texts = append(texts, text)
			})
			return mustWrite(func(w *protofield.Writer) {
				for _, c := range chain {
					w.AddText(1, string(pki.MarshalCertificatesPEM(c)))
				}
				w.AddText(1, texts[len(texts)-1]) // the roots
			})
		},
	})
	return newFake(f)
}

// bearer accepts one token.
type bearer struct {
	token string
	f     *cafake.Fake
}

func (b bearer) Authenticate(r *http.Request) (*authn.Caller, error) {
	got, err := authn.Bearer(r)
	if err != nil {
		return nil, err
	}
	if !cafake.SameToken(got, b.token) {
		return nil, fmt.Errorf("another token: %w", authn.ErrRefused)
	}
	return &authn.Caller{ID: b.f.ID(), Method: "caclienttest"}, nil
}
