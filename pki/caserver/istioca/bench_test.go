package istioca_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
)

// web authenticates every caller without work of its own.
var web = authn.Func(func(*http.Request) (*authn.Caller, error) { return callers["web"].(*authn.Caller), nil })

// writer is an http.ResponseWriter that keeps nothing.
type writer struct{ h http.Header }

func (w *writer) Header() http.Header         { return w.h }
func (w *writer) Write(p []byte) (int, error) { return len(p), nil }
func (w *writer) WriteHeader(int)             {}
func (w *writer) Flush()                      {}

type body struct{ bytes.Reader }

func (*body) Close() error { return nil }

// roundTrip returns a function that calls a handler without a network.
func roundTrip(t testing.TB, h http.Handler) func() {
	msg := frame(0, marshal(t, goodRequest(t)))
	r := httptest.NewRequest(http.MethodPost, istioca.CreateCertificate, nil)
	r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
	r.Header.Set("Content-Type", "application/grpc")
	b, w := &body{}, &writer{}
	return func() {
		b.Reset(msg)
		r.Body = b
		w.h = make(http.Header, 8)
		h.ServeHTTP(w, r)
		if w.h.Get(http.TrailerPrefix+"Grpc-Status") != "0" {
			t.Fatal(w.h)
		}
	}
}

// What the handler adds to the authority's work.
func TestAllocations(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates")
	}
	a := authority(t)
	call := roundTrip(t, newServer(t, istioca.Options{Signer: a, Authenticator: web, AllowPlaintext: true}))
	text := []byte(newCSR(t, pki.CSROptions{}))
	whole := testing.AllocsPerRun(50, call)
	bare := testing.AllocsPerRun(50, func() {
		csr := must.Get(pki.ParseCSRPEM(text))(t)
		must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: callers["web"].(*authn.Caller).ID}))(t)
	})
	t.Logf("%v allocations, of which the authority has %v", whole, bare)
	require.LessOrEqual(t, whole-bare, 70.0)
}
