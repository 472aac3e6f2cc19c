package caservice_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"math/big"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
)

// TestOverload sends ten times as many requests as the processors can verify, for one and a half seconds of virtual time: when a
// burst is over, what is served is served soon, and the rest is refused at once and told when to come back.
func TestOverload(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		const work = time.Millisecond
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
		for range 15_000 * runtime.GOMAXPROCS(0) {
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
					assert.NotEmpty(t, w.Header().Get("Grpc-Retry-Pushback-Ms"))
					assert.Zero(t, took)
				case w.Header().Get("Trailer:Grpc-Status") == "0":
					served++
					if took > 100*time.Millisecond && begin.Sub(start) > time.Second {
						late++
					}
				default:
					assert.Fail(t, "neither served nor refused", "%v", w.Header())
				}
			})
			time.Sleep(work / 10 / time.Duration(runtime.GOMAXPROCS(0)))
		}
		wg.Wait()
		assert.Zero(t, late)
		assert.InDelta(t, 1500*runtime.GOMAXPROCS(0), served, 300*float64(runtime.GOMAXPROCS(0)), "the processors are not idle")
		assert.Greater(t, refused, 6*served)
	})
}
