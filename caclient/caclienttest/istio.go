package caclienttest

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/x509"
	"fmt"
	"net/http"
	"testing"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// NewIstio serves Istio's certificate API, as istiod does, for the workload at path, such as "/ns/default/sa/web".
func NewIstio(t testing.TB, ca *spiffetest.CA, path string) *Fake {
	t.Helper()
	f := newFake(t, ca, path)
	token := "istio-" + rand.Text()
	srv, err := istioca.New(istioca.Options{Signer: honest{f.Signer(), f}, Authenticator: bearer{token, f}})
	if err != nil {
		t.Fatalf("caclienttest: %v", err)
	}
	f.serve(wire{
		name: "Istio", handler: srv, signs: anyRequest, refuse: refuseGRPC, garbled: http.HandlerFunc(garbledGRPC), grpc: true,
		token: func() string { return token },
		replace: func(body []byte, chain []*x509.Certificate) []byte {
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
	return f
}

// bearer knows one token.
type bearer struct {
	token string
	f     *Fake
}

func (b bearer) Authenticate(r *http.Request) (*authn.Caller, error) {
	got, err := authn.Bearer(r)
	if err != nil {
		return nil, err
	}
	if !same(got, b.token) {
		return nil, fmt.Errorf("another token: %w", authn.ErrRefused)
	}
	return &authn.Caller{ID: b.f.id, Method: "caclienttest"}, nil
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

func anyRequest(*http.Request) bool { return true }

// refuseGRPC says a failure as servers of gRPC do.
func refuseGRPC(w http.ResponseWriter, r *http.Request, e *caclient.Error) {
	code := grpchttp.Unknown
	switch e.Kind {
	case caclient.ErrUnavailable:
		code = grpchttp.Unavailable
	case caclient.ErrInvalid:
		code = grpchttp.FailedPrecondition
	case caclient.ErrUnauthenticated:
		code = grpchttp.Unauthenticated
	case caclient.ErrDenied:
		code = grpchttp.PermissionDenied
	}
	answerGRPC(w, r, nil, &grpchttp.Error{Code: code, Message: e.Err.Error(), RetryAfter: e.RetryAfter})
}

func garbledGRPC(w http.ResponseWriter, r *http.Request) {
	answerGRPC(w, r, []byte("\x0a\xff\xff this is no message"), nil)
}

func answerGRPC(w http.ResponseWriter, r *http.Request, message []byte, e *grpchttp.Error) {
	method := grpchttp.Unary(func(context.Context, []byte) ([]byte, error) {
		if e != nil {
			return nil, e
		}
		return message, nil
	})
	(&grpchttp.Handler{Methods: map[string]grpchttp.Method{r.URL.Path: method}, MaxMessage: 1 << 20}).ServeHTTP(w, r)
}

// mustWrite returns a message of texts that are UTF-8.
func mustWrite(write func(*protofield.Writer)) []byte {
	b, err := protofield.Write(write)
	if err != nil {
		panic(err)
	}
	return b
}
