package caserver_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
)

// TestOverload sends a multiple of the requests that the processors can verify, for a second of virtual time: when a
// burst is over, what is served is served soon, and the rest is refused at once and told when to come back.
func TestOverload(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2)) // with more of them the queue, whose length is fixed, is full first
		const work = time.Millisecond
		times := rounds.Of(3)
		h := caservice.Service{Name: "test", Path: "/test/Sign", Answer: func(ctx context.Context, c *caservice.Call) ([]byte, error) {
			if _, err := c.Receive(); err != nil {
				return nil, err
			}
			_, err := c.ParseCSR(ctx, func() (*pki.CSR, error) { time.Sleep(work); return nil, nil })
			c.Leaf = &x509.Certificate{SerialNumber: big.NewInt(1)}
			return nil, err
		}}.Handler()
		var mu sync.Mutex
		var served, refused, late int
		var wg sync.WaitGroup
		start := time.Now()
		for range 1000 * times * runtime.GOMAXPROCS(0) {
			wg.Go(func() {
				r := httptest.NewRequest(http.MethodPost, "/test/Sign", bytes.NewReader(make([]byte, 5)))
				r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
				r.Header.Set("Content-Type", "application/grpc")
				w := httptest.NewRecorder()
				begin := time.Now()
				h.ServeHTTP(w, r)
				mu.Lock()
				defer mu.Unlock()
				took := time.Since(begin)
				switch {
				case w.Header().Get("Grpc-Status") == "8":
					refused++
					if took != 0 || w.Header().Get("Grpc-Retry-Pushback-Ms") == "" {
						assert.Fail(t, "not refused at once, or without a time", "%v %v", took, w.Header())
					}
				case w.Header().Get("Trailer:Grpc-Status") == "0":
					served++
					if took > 100*time.Millisecond && begin.Sub(start) > 600*time.Millisecond {
						late++
					}
				default:
					assert.Fail(t, "neither served nor refused", "%v", w.Header())
				}
			})
			time.Sleep(work / time.Duration(times*runtime.GOMAXPROCS(0)))
		}
		wg.Wait()
		assert.Zero(t, late)
		assert.InDelta(t, 1000*runtime.GOMAXPROCS(0), served, 200*float64(runtime.GOMAXPROCS(0)), "the processors are not idle")
		assert.Greater(t, refused, served*(times-1)*2/3)
	})
}

// A second caller that is refused for the same reason is seen in the log: by its proven name, else by its address.
func TestRefusedCallersAreNamed(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	refused := errors.New("no such pod")
	h := caservice.Service{
		Name: "test", Path: "/test/Sign", Logger: slog.New(slog.NewTextHandler(&log, nil)), Reasons: []error{refused},
		Answer: func(_ context.Context, c *caservice.Call) ([]byte, error) {
			if name := c.Request().Header.Get("Name"); name != "" {
				c.Attrs = []slog.Attr{slog.String("caller", name)}
			} else {
				c.Attrs = []slog.Attr{slog.String("identity", rand.Text())} // what an unknown caller says
			}
			return nil, caservice.Refuse(grpchttp.PermissionDenied, "no", refused)
		},
	}.Handler()
	for _, from := range []string{"192.0.2.1", "192.0.2.2"} {
		for _, name := range []string{"", "web", "db"} {
			for port := range 20 {
				r := httptest.NewRequest(http.MethodPost, "/test/Sign", bytes.NewReader(make([]byte, 5)))
				r.Proto, r.ProtoMajor, r.ProtoMinor, r.RemoteAddr = "HTTP/2.0", 2, 0, fmt.Sprint(from, ":", port+1)
				r.Header.Set("Content-Type", "application/grpc")
				r.Header.Set("Name", name)
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
		}
	}
	for _, says := range []string{"peer=192.0.2.1:1 ", "peer=192.0.2.2:1 ", "caller=web peer=192.0.2.1:1 ", "caller=db peer=192.0.2.1:1 "} {
		assert.Contains(t, log.String(), says)
	}
	assert.Equal(t, 4, strings.Count(log.String(), "\n"), log.String())
}

// A CA has the bundle of one trust domain, and may have none yet.
func TestBundles(t *testing.T) {
	t.Parallel()
	td, other := spiffe.MustParseTrustDomain("example.org"), spiffe.MustParseTrustDomain("elsewhere.test")
	b := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{}))(t)
	has := caservice.Bundles(func() *spiffe.Bundle { return b })
	none := caservice.Bundles(func() *spiffe.Bundle { return nil })
	assert.Same(t, b, must.Get(has.Bundle(td))(t))
	assert.ErrorIs(t, must.Err(has.Bundle(other)), spiffe.ErrUnknownTrustDomain)
	assert.ErrorIs(t, must.Err(none.Bundle(td)), spiffe.ErrUnknownTrustDomain)
}
