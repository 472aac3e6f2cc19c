package istioca_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
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

// BenchmarkHandler is the handler without a network, and what is in it: the authority, and the
// reading of the signing request.
func BenchmarkHandler(b *testing.B) {
	a := authority(b)
	b.Run("whole", func(b *testing.B) {
		call := roundTrip(b, newServer(b, istioca.Options{Signer: a, Authenticator: web, AllowPlaintext: true}))
		b.ReportAllocs()
		for b.Loop() {
			call()
		}
	})
	text := []byte(newCSR(b, pki.CSROptions{}))
	b.Run("authority", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			csr, err := pki.ParseCSRPEM(text)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := a.Sign(b.Context(), ca.Request{CSR: csr, ID: callers["web"].(*authn.Caller).ID}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkRequests is a whole request over HTTP/2 and TLS on the loopback, by 1 client and by 32 with a
// connection each, against a handler that answers the same bytes without doing anything.
func BenchmarkRequests(b *testing.B) {
	srv := newServer(b, istioca.Options{Signer: authority(b), Authenticator: web})
	rec := httptest.NewRecorder()
	plain := newServer(b, istioca.Options{Signer: authority(b), Authenticator: web, AllowPlaintext: true})
	r := httptest.NewRequest(http.MethodPost, istioca.CreateCertificate, bytes.NewReader(frame(0, marshal(b, goodRequest(b)))))
	r.ProtoMajor = 2
	r.Header.Set("Content-Type", "application/grpc")
	plain.ServeHTTP(rec, r)
	answer := rec.Body.Bytes()
	require.NotEmpty(b, answer)
	empty := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status")
		_, _ = w.Write(answer)
		w.Header().Set("Grpc-Status", "0")
	})
	msg := frame(0, marshal(b, goodRequest(b)))
	for _, h := range []struct {
		name    string
		handler http.Handler
	}{{"empty", empty}, {"create", srv}} {
		for _, n := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/clients=%d", h.name, n), func(b *testing.B) {
				url, cfg := listen(b, h.handler)
				cs := make(chan *http.Client, n)
				for range n {
					cs <- transport(b, cfg)
				}
				ctx, cancel := context.WithCancel(b.Context())
				defer cancel()
				do := func(c *http.Client) {
					resp, _ := post(ctx, b, c, url, "web", bytes.NewReader(msg), nil)
					if resp.Trailer.Get("Grpc-Status") != "0" {
						b.Error(resp.Trailer)
					}
				}
				var ready, wg sync.WaitGroup
				work := make(chan struct{}, n)
				ready.Add(n)
				for range n {
					wg.Go(func() {
						c := <-cs
						do(c) // the handshake
						ready.Done()
						for range work {
							do(c)
						}
					})
				}
				ready.Wait()
				b.ReportAllocs()
				for b.Loop() {
					work <- struct{}{}
				}
				close(work)
				wg.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
			})
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
		csr, err := pki.ParseCSRPEM(text)
		require.NoError(t, err)
		_, err = a.Sign(t.Context(), ca.Request{CSR: csr, ID: callers["web"].(*authn.Caller).ID})
		require.NoError(t, err)
	})
	t.Logf("%v allocations, of which the authority has %v", whole, bare)
	require.LessOrEqual(t, whole-bare, 70.0)
}
