package xdsproxy_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
)

const (
	listenerType = "type.googleapis.com/envoy.config.listener.v3.Listener"
	healthType   = "type.googleapis.com/istio.v1.HealthInformation"
)

// The health of the workload is reported when it changes, on each stream once its Envoy has asked for listeners, and
// Envoy knows nothing of it.
func TestReportHealth(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-12")
	for _, method := range []string{stream, delta} {
		for _, local := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				n := memory()
				asked := make(chan string, 100) // "listener", "cluster", "healthy", or what is wrong
				n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, isDelta bool) error {
					for {
						msg, err := c.Receive()
						if err != nil {
							return err
						}
						var typeURL, text string
						var code int32
						if isDelta {
							var r envoysds.DeltaDiscoveryRequest
							err = proto.Unmarshal(msg, &r)
							typeURL, code, text = r.GetTypeUrl(), r.GetErrorDetail().GetCode(), r.GetErrorDetail().GetMessage()
							assert.Empty(t, r.GetResponseNonce())
						} else {
							var r envoysds.DiscoveryRequest
							err = proto.Unmarshal(msg, &r)
							typeURL, code, text = r.GetTypeUrl(), r.GetErrorDetail().GetCode(), r.GetErrorDetail().GetMessage()
							assert.Empty(t, r.GetResponseNonce())
						}
						if !assert.NoError(t, err) {
							return err
						}
						switch {
						case typeURL != healthType:
							asked <- map[string]string{listenerType: "listener", clusters: "cluster"}[typeURL]
						case code == 0:
							asked <- "healthy" + text
						default:
							assert.Equal(t, int32(13), code, "Internal")
							asked <- text
						}
						if err := c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: typeURL})); err != nil {
							return err
						}
					}
				}))
				h := newProxy(t, n, func(c *xdsproxy.Config) {
					if local {
						secrets(t, new(secretSource), nil)(c)
					}
				})
				n.serve(t, "proxy", h)
				c := grpchttp.NewClient(n.client(t, "proxy"), "http://localhost", maxMessage)
				var mu sync.Mutex
				var got []string // what Envoys have received
				open := func() *grpchttp.Stream {
					s := c.Open(t.Context(), method, nil)
					go func() {
						for {
							msg, err := s.Receive()
							if err != nil {
								return
							}
							var r envoysds.DiscoveryResponse
							assert.NoError(t, proto.Unmarshal(msg, &r))
							mu.Lock()
							got = append(got, r.GetTypeUrl())
							mu.Unlock()
						}
					}()
					return s
				}
				want := func(s *grpchttp.Stream, typeURL string) {
					msg := ask(t, typeURL)
					if method == delta {
						msg = askDelta(t, typeURL)
					}
					require.NoError(t, s.Send(msg))
					synctest.Wait()
				}
				expect := func(what ...string) {
					t.Helper()
					synctest.Wait()
					var have []string
					for len(asked) > 0 {
						have = append(have, <-asked)
					}
					assert.Equal(t, what, have)
				}
				s := open()
				want(s, clusters)
				h.ReportHealth(errors.New("starting"))
				expect("cluster") // and no report yet
				want(s, listenerType)
				expect("listener", "starting")
				want(s, listenerType)
				expect("listener") // once
				h.ReportHealth(errors.New("starting, still"))
				expect()
				h.ReportHealth(nil)
				h.ReportHealth(nil)
				expect("healthy")

				other := open()
				want(other, listenerType)
				expect("listener", "healthy")
				h.ReportHealth(errors.New("line\n\xff" + strings.Repeat("x", 600)))
				both := "line " + strings.Repeat("x", 495) + "…"
				expect(both, both)
				require.NoError(t, other.Close())
				synctest.Wait()
				h.ReportHealth(nil)
				expect("healthy")

				require.NoError(t, s.Close())
				s = open()
				want(s, clusters)
				expect("cluster")
				want(s, listenerType)
				expect("listener", "healthy")
				mu.Lock()
				assert.NotContains(t, got, healthType)
				assert.Contains(t, got, listenerType)
				mu.Unlock()
				s.CloseSend()
				synctest.Wait()
				h.ReportHealth(errors.New("late"))
				expect()
				require.NoError(t, s.Close())
				synctest.Wait()
				assert.Zero(t, h.Reported())
			})
		}
	}
}

// A report is not lost, and takes no time, if the control plane does not read; of several the last one is sent.
func TestReportHealthStalled(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-12")
	synctest.Test(t, func(t *testing.T) {
		n := memory()
		goOn, done := make(chan struct{}), make(chan []string, 1)
		n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
			<-goOn
			var reports []string
			for {
				msg, err := c.Receive()
				if err != nil {
					done <- reports
					return nil
				}
				var r envoysds.DiscoveryRequest
				assert.NoError(t, proto.Unmarshal(msg, &r))
				if r.GetTypeUrl() == healthType {
					reports = append(reports, r.GetErrorDetail().GetMessage())
				}
			}
		}))
		h := newProxy(t, n)
		n.serve(t, "proxy", h)
		s := grpchttp.NewClient(n.client(t, "proxy"), "http://localhost", maxMessage).Open(t.Context(), stream, nil)
		require.NoError(t, s.Send(ask(t, listenerType)))
		big := encode(t, &envoysds.DiscoveryRequest{TypeUrl: clusters, VersionInfo: strings.Repeat("v", 2<<20)})
		for range 2 {
			require.NoError(t, s.Send(big))
		}
		synctest.Wait()
		for range 10 {
			h.ReportHealth(errors.New("down"))
			h.ReportHealth(nil)
		}
		h.ReportHealth(errors.New("the last"))
		synctest.Wait()
		close(goOn)
		synctest.Wait()
		require.NoError(t, s.Close())
		assert.Equal(t, []string{"the last"}, <-done)
	})
}
