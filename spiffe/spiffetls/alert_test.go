package spiffetls_test

import (
	"github.com/svidkit/svidkit/internal/test/must"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestAlert: a client that is refused is told so by the server's alert, however quick it is to write, and whatever it writes.
func TestAlert(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	url := serve(t, configured(t, ca, spiffe.AllowIDs(ca.SVID("/web").ID()), nil), nil)
	refused, servers := ca.SVID("/other"), spiffe.AllowIDs(ca.SVID("/db").ID())
	var wg sync.WaitGroup
	defer wg.Wait()
	for range rounds.Of(3) {
		for _, opts := range []*spiffetls.Config{http1, nil, {Metrics: new(spiffetls.Metrics)}} {
			for _, size := range []int{0, 1, 1 << 20} {
				wg.Go(func() {
					transport, err := newTransport(with(opts, refused, ca.Bundle(), servers))
					if !assert.NoError(t, err) {
						return
					}
					defer transport.CloseIdleConnections()
					resp, err := (&http.Client{Transport: transport}).Post(url, "", strings.NewReader(strings.Repeat("x", size)))
					if assert.ErrorContains(t, err, "remote error: tls: bad certificate") {
						return
					}
					if err == nil {
						_ = resp.Body.Close()
					}
				})
			}
		}
		dialer := must.Get(spiffetls.New(spiffetls.Config{Self: refused, Peers: ca.Bundle(), Allow: servers}))(t)
		conn := must.Get(dialer.DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "https://")))(t)
		var err error
		for err == nil {
			_, err = conn.Write([]byte("hello"))
		}
		assert.ErrorContains(t, err, "remote error: tls: bad certificate")
		_, err = conn.Read(make([]byte, 1))
		assert.ErrorContains(t, err, "remote error: tls: bad certificate")
		_ = conn.Close() // it cannot say goodbye
	}
}
