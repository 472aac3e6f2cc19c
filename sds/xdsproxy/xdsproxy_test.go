package xdsproxy_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// odd returns an encoded message that generated code would not write: fields out of order, twice, unknown, in groups,
// and with lengths that take more bytes than they need.
func odd(r *rand.Rand, number protowire.Number, typeURL string) []byte {
	var b []byte
	unknown := func() {
		switch r.IntN(4) {
		case 0:
			b = protowire.AppendVarint(protowire.AppendTag(b, 1000, protowire.VarintType), r.Uint64())
		case 1:
			b = protowire.AppendBytes(protowire.AppendTag(b, 19, protowire.BytesType), make([]byte, r.IntN(3000)))
		case 2:
			b = protowire.AppendTag(b, 77, protowire.StartGroupType)
			b = protowire.AppendTag(protowire.AppendFixed32(protowire.AppendTag(b, 3, protowire.Fixed32Type), r.Uint32()), 77, protowire.EndGroupType)
		case 3:
			b = append(protowire.AppendTag(b, 18, protowire.BytesType), 0x81, 0x80, 0x00, 'x')
		}
	}
	for range r.IntN(5) {
		unknown()
	}
	if r.IntN(2) == 0 { // the last one counts
		b = protowire.AppendString(protowire.AppendTag(b, number, protowire.BytesType), secretType)
	}
	b = protowire.AppendString(protowire.AppendTag(b, number, protowire.BytesType), typeURL)
	for range r.IntN(5) {
		unknown()
	}
	return b
}

// Every message arrives as it was sent, in both directions and both variants.
func TestTransparent(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-1", "IST-9.4-4", "IST-9.4-9")
	for _, method := range []string{stream, delta} {
		for _, local := range []bool{false, true} {
			t.Run(fmt.Sprint(method, " ", local), func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(1, 2))
				var requests, responses [][]byte
				number := protowire.Number(4)
				if method == delta {
					number = 2
				}
				for range rounds.Of(75) {
					requests = append(requests, odd(r, number, clusters))
					responses = append(responses, odd(r, 4, endpoints))
				}
				if !local { // where nothing is read, nothing is refused either
					requests = append(requests, []byte("\xff\xff\xff"), nil, ask(t, secretType, "x"))
					responses = append(responses, []byte("\xff"), nil, ask(t, secretType, "x"))
				} else {
					huge := protowire.AppendTag(odd(r, 4, endpoints), 900, protowire.BytesType)
					responses = append(responses, protowire.AppendBytes(huge, make([]byte, 5<<20)))
				}
				got := make(chan [][]byte, 1)
				n := sockets(t)
				n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, isDelta bool) error {
					assert.Equal(t, method == delta, isDelta)
					assert.Empty(t, c.Header().Get("X-Of-Envoy"))
					assert.Equal(t, "Kubernetes", c.Header().Get("Clusterid"))
					var in [][]byte
					for {
						msg, err := c.Receive()
						if err == io.EOF {
							got <- in
							return nil
						}
						if !assert.NoError(t, err) {
							return err
						}
						if len(in) < len(responses) {
							assert.NoError(t, c.Send(responses[len(in)]))
						}
						in = append(in, msg)
					}
				}))
				c := onSocket(t, newProxy(t, n, func(cfg *xdsproxy.Config) {
					cfg.Header = http.Header{"ClusterID": {"Kubernetes"}}
					if local {
						secrets(t, new(secretSource), nil)(cfg)
					}
				}))
				for len(requests) < len(responses) {
					requests = append(requests, odd(r, number, clusters))
				}
				s := c.Open(t.Context(), method, http.Header{"X-Of-Envoy": {"y"}})
				defer s.Close()
				go func() {
					for _, msg := range requests {
						assert.NoError(t, s.Send(msg))
					}
					s.CloseSend()
				}()
				for i, want := range responses {
					require.True(t, bytes.Equal(want, must.Get(s.Receive())(t)), "response %d", i)
				}
				assert.Equal(t, io.EOF, must.Err(s.Receive()), "the end with OK passes, too")
				in := <-got
				require.Len(t, in, len(requests))
				for i := range requests {
					require.True(t, bytes.Equal(requests[i], in[i]), "request %d", i)
				}
			})
		}
	}
}

// Secrets are answered here, and pushed when they change; the control plane neither hears of them nor can send any.
// Each server is told the node.
func TestSecrets(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, method := range []string{stream, delta} {
		for _, secretsFirst := range []bool{false, true} {
			t.Run(fmt.Sprint(method, " ", secretsFirst), func(t *testing.T) {
				t.Parallel()
				n := sockets(t)
				forged := encode(t, &envoysds.DiscoveryResponse{TypeUrl: secretType, Nonce: "forged"})
				real := encode(t, &envoysds.DiscoveryResponse{TypeUrl: clusters, Nonce: "real"})
				asked := make(chan []byte, 10)
				n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
					for {
						msg, err := c.Receive()
						if err != nil {
							return err
						}
						asked <- msg
						if err := errors.Join(c.Send(forged), c.Send(real)); err != nil {
							return err
						}
					}
				}))
				src := new(secretSource)
				src.put(t, ca, "default")
				var known atomic.Bool
				h := newProxy(t, n, secrets(t, src, &sds.Options{RequireHeader: true, Resolve: func(ctx context.Context, name string) (string, error) {
					p, ok := unixsocket.PeerFromContext(ctx)
					known.Store(ok && p.PID == int32(os.Getpid()))
					return name, nil
				}}))
				c := onSocket(t, h)
				s := c.Open(t.Context(), method, http.Header{"Workload.spiffe.io": {"true"}})
				defer s.Close()

				node := &envoysds.Node{Id: "sidecar~1", Cluster: strings.Repeat("c", 1000)}
				wantSecret, wantCluster := ask(t, secretType, "default"), ask(t, clusters, "a")
				whole := encode(t, &envoysds.DiscoveryRequest{Node: node})
				if method == delta {
					wantSecret, wantCluster = askDelta(t, secretType, "default"), askDelta(t, clusters, "a")
					whole = encode(t, &envoysds.DeltaDiscoveryRequest{Node: node})
				}
				sendSecret := func(prefix []byte) {
					require.NoError(t, s.Send(append(prefix, wantSecret...)))
					for range 2 {
						r := receive(t, s)
						require.Equal(t, secretType, r.GetTypeUrl())
						require.NotEqual(t, "forged", r.GetNonce())
						require.Len(t, r.GetResources(), 1)
						ack := encode(t, &envoysds.DiscoveryRequest{TypeUrl: secretType, ResourceNames: []string{"default"}, ResponseNonce: r.GetNonce()})
						if method == delta {
							ack = encode(t, &envoysds.DeltaDiscoveryRequest{TypeUrl: secretType, ResponseNonce: r.GetNonce()})
						}
						require.NoError(t, s.Send(ack))
						if prefix == nil {
							break
						}
						src.put(t, ca, "default") // a push
						prefix = nil
					}
				}
				sendCluster := func(prefix []byte) {
					require.NoError(t, s.Send(append(prefix, wantCluster...)))
					require.Equal(t, "real", receive(t, s).GetNonce())
				}
				if secretsFirst {
					sendSecret(whole)
					sendCluster(nil)
				} else {
					sendCluster(whole)
					sendSecret(nil)
				}
				assert.Equal(t, append(bytes.Clone(whole), wantCluster...), <-asked, "with the node in front")
				require.NoError(t, s.Send(wantCluster))
				assert.Equal(t, wantCluster, <-asked, "once")
				assert.Empty(t, asked, "nothing about secrets")
				assert.True(t, known.Load(), "Resolve knows the process")

				var m bytes.Buffer
				require.NoError(t, h.Report().Metrics(&m))
				assert.Regexp(t, `istio_agent_xds_proxy_dropped_responses [12]\n`, m.String())
				assert.Contains(t, m.String(), "istio_agent_xds_proxy_streams 1\n")
				assert.Equal(t, 1, h.Report().Servers[0].Streams)
				assert.NotZero(t, h.Report().Upstreams[0].LastSuccess)
				assert.NoError(t, h.Report().Upstreams[0].Err)
			})
		}
	}
}

// The socket has the Secret Discovery Service as well; a stream of secrets alone needs no control plane.
func TestWithoutControlPlane(t *testing.T) {
	t.Parallel()
	src := new(secretSource)
	src.put(t, spiffetest.NewCA(t, "example.org"), "default")
	n := memory()
	n.listen("control").Close()
	c := onSocket(t, newProxy(t, n, secrets(t, src, nil)))
	for _, method := range []string{"/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", stream} {
		s := c.Open(t.Context(), method, nil)
		require.NoError(t, s.Send(ask(t, secretType, "default")))
		require.Len(t, receive(t, s).GetResources(), 1)
		s.CloseSend()
		require.Equal(t, io.EOF, must.Err(s.Receive()))
	}
	_, err := c.Unary(t.Context(), "/other/Method", nil, nil)
	assert.Equal(t, grpchttp.Unimplemented, asError(t, err).Code)
	_, err = onSocket(t, newProxy(t, n)).Unary(t.Context(), "/other/Method", nil, nil)
	assert.Equal(t, grpchttp.Unimplemented, asError(t, err).Code)

	s := c.Open(t.Context(), stream, nil)
	s.CloseSend()
	assert.Equal(t, io.EOF, must.Err(s.Receive()), "nothing is asked for")
	s = c.Open(t.Context(), stream, nil)
	require.NoError(t, s.Send([]byte("\xff")))
	_, err = s.Receive()
	assert.Equal(t, grpchttp.InvalidArgument, asError(t, err).Code)
}

// Both sides write more than connections hold, and the control plane does so before it reads anything: each gets what
// it waits for, and secrets are served meanwhile.
func TestMutualDeadlock(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-5")
	const each, count = 1 << 20, 8
	for _, method := range []string{stream, delta}[:min(2, rounds.Of(1))] {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			n := sockets(t)
			goOn, read := make(chan struct{}), make(chan int, 1)
			n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
				<-goOn
				big := encode(t, &envoysds.DiscoveryResponse{TypeUrl: clusters, VersionInfo: strings.Repeat("v", each)})
				for range count {
					if err := c.Send(big); err != nil {
						return err
					}
				}
				total := 0
				for {
					msg, err := c.Receive()
					if err == io.EOF {
						read <- total
						return nil
					}
					if !assert.NoError(t, err) {
						return err
					}
					total += len(msg)
				}
			}))
			src := new(secretSource)
			src.put(t, spiffetest.NewCA(t, "example.org"), "default")
			c := onSocket(t, newProxy(t, n, secrets(t, src, nil)))
			s := c.Open(t.Context(), method, nil)
			defer s.Close()
			timer := time.AfterFunc(patient, func() { _ = s.Close() })
			defer timer.Stop()
			var msg, secret []byte
			if method == delta {
				msg = encode(t, &envoysds.DeltaDiscoveryRequest{TypeUrl: clusters, ResponseNonce: strings.Repeat("v", each-100)})
				secret = askDelta(t, secretType, "default")
			} else {
				msg = encode(t, &envoysds.DiscoveryRequest{TypeUrl: clusters, VersionInfo: strings.Repeat("v", each-100)})
				secret = ask(t, secretType, "default")
			}
			for range 8 {
				require.NoError(t, s.Send(msg), "more than the connections hold")
			}
			require.NoError(t, s.Send(secret))
			require.Equal(t, secretType, receive(t, s).GetTypeUrl(), "the control plane does not hold up secrets")
			close(goOn)
			go func() { // like Envoy's, whose writes and reads do not wait for each other
				for range 5 {
					assert.NoError(t, s.Send(msg))
				}
				s.CloseSend()
			}()
			for range count {
				must.Get(s.Receive())(t)
			}
			require.Equal(t, io.EOF, must.Err(s.Receive()))
			assert.Equal(t, 13*len(msg), <-read)
		})
	}
}

// A side that never reads costs what its queue holds, and the stream ends.
func TestStalled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := memory()
		n.serve(t, "control", control(func(ctx context.Context, _ *grpchttp.Call, _ bool) error {
			<-ctx.Done()
			return nil
		}))
		h := newProxy(t, n)
		c := n.through(t, h)
		start := time.Now()
		s := c.Open(t.Context(), stream, nil)
		go func() {
			for s.Send(make([]byte, 1<<20)) == nil {
			}
		}()
		time.Sleep(xdsproxy.Stalled / 2)
		_, held := h.Held()
		assert.InDelta(t, 8<<20, held, 1<<20)
		_, err := s.Receive()
		assert.Equal(t, grpchttp.Unavailable, asError(t, err).Code)
		assert.Contains(t, err.Error(), "has not taken a request")
		assert.Equal(t, xdsproxy.Stalled, time.Since(start))
		require.NoError(t, s.Close())
		synctest.Wait()
		streams, held := h.Held()
		assert.Zero(t, streams)
		assert.Zero(t, held)

		// An Envoy that does not read what the control plane sends, which ends the stream.
		n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
			_, _ = c.Receive()
			for range 20 {
				if err := c.Send(make([]byte, 1<<20)); err != nil {
					return nil
				}
			}
			return nil
		}))
		s = c.Open(t.Context(), stream, nil)
		require.NoError(t, s.Send(nil))
		time.Sleep(time.Second)
		require.NoError(t, h.Close())
		time.Sleep(time.Minute) // sendTime
		synctest.Wait()
		streams, _ = h.Held()
		assert.Zero(t, streams, "it is cut off")
		require.NoError(t, s.Close())
	})
}

// What Envoy sees when the control plane goes: its status, and before that two seconds in which secrets are served.
func TestControlPlaneGone(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-3", "IST-9.7-5")
	ca := spiffetest.NewCA(t, "example.org")
	for name, test := range map[string]struct {
		end  func(ctx context.Context, c *grpchttp.Call) error
		code grpchttp.Code // OK for the end with OK
		kind string        // in the metrics
	}{
		"its own status": {func(context.Context, *grpchttp.Call) error {
			return &grpchttp.Error{Code: grpchttp.PermissionDenied, Message: "no such node; token sesame-sesame-sesame", RetryAfter: time.Minute}
		}, grpchttp.PermissionDenied, `istio_agent_istiod_connection_terminations{type="error"} 1`},
		"OK":    {func(context.Context, *grpchttp.Call) error { return nil }, grpchttp.OK, `istio_agent_istiod_connection_terminations{type="cancelled"} 1`},
		"reset": {func(context.Context, *grpchttp.Call) error { panic(http.ErrAbortHandler) }, grpchttp.Internal, `istio_agent_istiod_connection_terminations{type="error"} 1`},
		"huge": {func(_ context.Context, c *grpchttp.Call) error {
			return c.Send(make([]byte, 5000))
		}, grpchttp.ResourceExhausted, `istio_agent_istiod_connection_terminations{type="error"} 1`},
		"malformed": {func(_ context.Context, c *grpchttp.Call) error {
			return c.Send([]byte{0xff})
		}, grpchttp.Internal, `istio_agent_istiod_connection_terminations{type="error"} 1`},
		"not there": {nil, grpchttp.Unavailable, "istio_agent_istiod_connection_failures 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := memory()
				if test.end != nil {
					n.serve(t, "control", control(func(ctx context.Context, c *grpchttp.Call, _ bool) error {
						assert.Equal(t, "Bearer sesame-sesame-sesame", c.Header().Get("Authorization"))
						if _, err := c.Receive(); err != nil {
							return err
						}
						return test.end(ctx, c)
					}))
				} else {
					n.listen("control").Close()
				}
				src := new(secretSource)
				src.put(t, ca, "default")
				var logs bytes.Buffer
				h := newProxy(t, n, secrets(t, src, nil), func(c *xdsproxy.Config) {
					c.Token = func(context.Context) (string, error) { return "sesame-sesame-sesame", nil }
					c.SetLimits(0, 4000, 0, 0)
					c.Logger = slog.New(slog.NewTextHandler(&logs, nil))
				})
				c := n.through(t, h)
				start := time.Now()
				s := c.Open(t.Context(), stream, nil)
				require.NoError(t, s.Send(ask(t, clusters)))
				time.Sleep(time.Second)
				require.NoError(t, s.Send(ask(t, secretType, "default")))
				require.Equal(t, secretType, receive(t, s).GetTypeUrl())
				require.NoError(t, s.Send(ask(t, clusters)), "it is dropped")
				_, err := s.Receive()
				synctest.Wait()
				assert.Equal(t, xdsproxy.Linger, time.Since(start))
				if test.code == grpchttp.OK {
					assert.Equal(t, io.EOF, err)
				} else {
					e := asError(t, err)
					assert.Equal(t, test.code, e.Code, "%v", err)
					assert.NotContains(t, e.Message, "sesame-sesame")
					assert.Contains(t, logs.String(), "a stream to the control plane has failed")
					assert.NotContains(t, logs.String(), "sesame-sesame")
					if test.code == grpchttp.PermissionDenied {
						assert.Equal(t, time.Minute, e.RetryAfter.Round(time.Second))
					}
				}
				synctest.Wait()
				var m bytes.Buffer
				require.NoError(t, h.Report().Metrics(&m))
				assert.Contains(t, m.String(), test.kind+"\n")
				time.Sleep(time.Hour)
				synctest.Wait()
				assert.Zero(t, h.Report().Servers[0].Streams)
				plane := h.Report().Upstreams[0]
				assert.Equal(t, "http://localhost", plane.Name)
				if test.code == grpchttp.OK {
					assert.NoError(t, plane.Err)
					assert.Zero(t, plane.Failures)
				} else {
					assert.ErrorContains(t, plane.Err, test.code.String())
					assert.NotContains(t, plane.Err.Error(), "sesame-sesame")
					assert.Equal(t, 1, plane.Failures)
				}
			})
		})
	}
}

// A client that says that it has no more requests gets the status of the control plane, also if that has gone before.
func TestHalfClosedAfterEnd(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for name, asks := range map[string][]string{"no secrets": nil, "secrets": {"default"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := memory()
				n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
					if _, err := c.Receive(); err != nil {
						return err
					}
					return &grpchttp.Error{Code: grpchttp.PermissionDenied, Message: "no such node"}
				}))
				src := new(secretSource)
				src.put(t, ca, "default")
				s := n.through(t, newProxy(t, n, secrets(t, src, nil))).Open(t.Context(), stream, nil)
				start := time.Now()
				require.NoError(t, s.Send(ask(t, clusters)))
				if asks != nil {
					require.NoError(t, s.Send(ask(t, secretType, asks...)))
					receive(t, s)
				}
				time.Sleep(time.Second)
				s.CloseSend()
				_, err := s.Receive()
				assert.Equal(t, grpchttp.PermissionDenied, asError(t, err).Code, "%v", err)
				assert.Equal(t, time.Second, time.Since(start), "there is nothing to wait for")
			})
		})
	}
}

// Tokens are asked for once per stream, and not while secrets wait.
func TestToken(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-4")
	for name, test := range map[string]struct {
		token string
		err   error
		sent  []string
		code  grpchttp.Code
	}{
		"a token":    {token: "abc.def", sent: []string{"Bearer abc.def"}},
		"none":       {},
		"not there":  {err: fmt.Errorf("no: %w", fs.ErrNotExist)},
		"an error":   {err: errors.New("boom"), code: grpchttp.Unavailable},
		"a line end": {token: "a\r\nb", code: grpchttp.Internal},
		"too long":   {token: strings.Repeat("a", 65<<10), code: grpchttp.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := memory()
				n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
					assert.Equal(t, test.sent, c.Header()["Authorization"])
					_, err := c.Receive()
					return errors.Join(err, c.Send(nil))
				}))
				src := new(secretSource)
				src.put(t, spiffetest.NewCA(t, "example.org"), "default")
				n.serve(t, "proxy", newProxy(t, n, secrets(t, src, nil), func(c *xdsproxy.Config) {
					c.Token = func(context.Context) (string, error) {
						time.Sleep(10 * time.Second)
						return test.token, test.err
					}
				}))
				start := time.Now()
				s := grpchttp.NewClient(n.client(t, "proxy"), "http://localhost", maxMessage).Open(t.Context(), stream, nil)
				require.NoError(t, s.Send(ask(t, clusters)))
				require.NoError(t, s.Send(ask(t, secretType, "default")))
				require.Equal(t, secretType, receive(t, s).GetTypeUrl())
				assert.Zero(t, time.Since(start))
				_, err := s.Receive()
				if test.code == grpchttp.OK {
					require.NoError(t, err)
				} else {
					assert.Equal(t, test.code, asError(t, err).Code)
				}
				require.NoError(t, s.Close())
				time.Sleep(time.Hour)
			})
		})
	}
}

// A stream that is refused for secrets, or whose handler fails, ends with the status of that.
func TestSecretsRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		handler http.Handler
		code    grpchttp.Code
	}{
		"status":        {&grpchttp.Handler{}, grpchttp.Unimplemented},
		"no gRPC":       {http.NotFoundHandler(), grpchttp.Unimplemented},
		"panic":         {http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("told to") }), grpchttp.Unknown},
		"a late panic":  {http.HandlerFunc(latePanic), grpchttp.Unavailable},
		"says nothing":  {http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), grpchttp.Unknown},
		"half a status": {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Type", "application/grpc") }), grpchttp.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := memory()
			n.listen("control").Close()
			s := onSocket(t, newProxy(t, n, func(c *xdsproxy.Config) { c.Secrets = test.handler })).Open(t.Context(), stream, nil)
			require.NoError(t, s.Send(ask(t, secretType, "default")))
			_, err := s.Receive()
			assert.Equal(t, test.code, asError(t, err).Code, "%v", err)
			assert.NotContains(t, err.Error(), "told to")
		})
	}
	synctest.Test(t, func(t *testing.T) { // without the header
		n := memory()
		s := n.through(t, newProxy(t, n, secrets(t, new(secretSource), &sds.Options{RequireHeader: true}))).Open(t.Context(), stream, nil)
		require.NoError(t, s.Send(ask(t, secretType, "default")))
		_, err := s.Receive()
		assert.Equal(t, grpchttp.InvalidArgument, asError(t, err).Code)
	})
}

func latePanic(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.(http.Flusher).Flush()
	panic("told to")
}

func TestLimits(t *testing.T) {
	t.Parallel()
	n := sockets(t)
	n.serve(t, "control", control(func(ctx context.Context, _ *grpchttp.Call, _ bool) error {
		<-ctx.Done()
		return nil
	}))
	h := newProxy(t, n, func(c *xdsproxy.Config) { c.SetLimits(1000, 0, 3, 0) })
	c := onSocket(t, h)
	var open []*grpchttp.Stream
	for range 3 {
		s := c.Open(t.Context(), stream, nil)
		require.NotNil(t, s.Header())
		open = append(open, s)
	}
	_, err := c.Open(t.Context(), delta, nil).Receive()
	assert.Equal(t, grpchttp.ResourceExhausted, asError(t, err).Code)
	assert.Equal(t, 10*time.Second, asError(t, err).RetryAfter.Round(time.Second))
	require.NoError(t, open[0].Send(make([]byte, 1001)))
	_, err = open[0].Receive()
	assert.Equal(t, grpchttp.ResourceExhausted, asError(t, err).Code)
	require.NoError(t, open[1].Close())
	require.Eventually(t, func() bool { n, _ := h.Held(); return n == 1 }, patient, time.Millisecond)
	require.NoError(t, h.Close())
	_, err = open[2].Receive()
	assert.Equal(t, grpchttp.Unavailable, asError(t, err).Code)
	_, err = c.Open(t.Context(), stream, nil).Receive()
	assert.Equal(t, grpchttp.Unavailable, asError(t, err).Code)
}

func TestConfig(t *testing.T) {
	t.Parallel()
	token := func(context.Context) (string, error) { return "", nil }
	good := xdsproxy.Config{URL: "https://istiod:15012/", HTTPClient: &http.Client{}, Header: http.Header{"X": {"secret-in-header"}}}
	h := must.Get(xdsproxy.NewHandler(good))(t)
	for _, v := range []any{good, &good, h, []any{h, good}} {
		for _, text := range []string{fmt.Sprintf("%v", v), fmt.Sprintf("%+v", v), fmt.Sprintf("%#v", v), fmt.Sprint(slog.AnyValue(v).Resolve())} {
			assert.NotContains(t, text, "secret-in-header")
		}
	}
	for text, edit := range map[string]func(*xdsproxy.Config){
		"not a URL":          func(c *xdsproxy.Config) { c.URL = "https://user:sesame@%" },
		"without TLS":        func(c *xdsproxy.Config) { c.URL = "http://istiod" },
		"https://host:port":  func(c *xdsproxy.Config) { c.URL = "istiod:15012" },
		"more than a scheme": func(c *xdsproxy.Config) { c.URL = "https://user:sesame@istiod" },
		"than a scheme":      func(c *xdsproxy.Config) { c.URL = "https://istiod/path" },
		"HTTPClient is nil":  func(c *xdsproxy.Config) { c.HTTPClient = nil },
		"Timeout":            func(c *xdsproxy.Config) { c.HTTPClient = &http.Client{Timeout: time.Second} },
		"both Token and": func(c *xdsproxy.Config) {
			c.Token, c.Header = token, http.Header{"authorization": {"x"}}
		},
	} {
		c := good
		edit(&c)
		_, err := xdsproxy.NewHandler(c)
		require.ErrorContains(t, err, text)
		assert.NotContains(t, err.Error(), "sesame")
		assert.NotContains(t, c.String(), "sesame")
	}
}

// Streams that come and go leave nothing behind, however they end.
func TestLeak(t *testing.T) { // not in parallel, as goroutines are counted
	rounds.NotShort(t)
	n := sockets(t)
	n.serve(t, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
		for i := 0; ; i++ {
			msg, err := c.Receive()
			if err != nil || i == 3 {
				return err
			}
			if err := c.Send(msg); err != nil {
				return err
			}
		}
	}))
	src := new(secretSource)
	src.put(t, spiffetest.NewCA(t, "example.org"), "default")
	h := newProxy(t, n, secrets(t, src, nil))
	c := onSocket(t, h)
	cycle := func(i int) {
		s := c.Open(t.Context(), []string{stream, delta}[i%2], nil)
		defer s.Close()
		wants := [][]byte{ask(t, clusters), ask(t, secretType, "default")}
		if i%2 == 1 {
			wants = [][]byte{askDelta(t, clusters), askDelta(t, secretType, "default")}
		}
		for _, msg := range wants[:i%3%2+1] {
			assert.NoError(t, s.Send(msg))
		}
		if i%5 != 0 {
			assert.NoError(t, must.Err(s.Receive()))
		}
		if i%7 == 0 {
			s.CloseSend()
			for {
				if _, err := s.Receive(); err != nil {
					return
				}
			}
		}
	}
	idle := func() bool { streams, held := h.Held(); return streams == 0 && held == 0 }
	for i := range 30 {
		cycle(i)
	}
	require.Eventually(t, idle, patient, time.Millisecond)
	goroutines := runtime.NumGoroutine()
	var wg sync.WaitGroup
	each := rounds.Of(10) * rounds.Of(5)
	for k := range 4 {
		wg.Go(func() {
			for i := range each {
				cycle(4*i + k)
			}
		})
	}
	wg.Wait()
	require.Eventually(t, idle, patient, time.Millisecond)
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+5 }, patient, 10*time.Millisecond,
		"streams leave no goroutines")
}

// The control plane is reached by TLS, verified by a file of roots, and with the certificate that the files have when the
// connection is made.
func TestTLS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-4")
	host, td := spiffetest.NewCA(t, "server.test"), spiffetest.NewCA(t, "example.org")
	chain, key := host.Certificate("/istiod", func(c *x509.Certificate) { c.DNSNames = []string{"istiod.test"} })
	clients := make(chan string, 10)
	plane := httptest.NewUnstartedServer(control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
		clients <- fmt.Sprint(len(c.Request().TLS.PeerCertificates), " ", c.Header().Get("Authorization"), c.Header().Get("X-Own"))
		msg, err := c.Receive()
		return errors.Join(err, c.Send(msg))
	}))
	plane.EnableHTTP2 = true
	plane.TLS = &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}}, NextProtos: []string{"h2"},
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: td.Bundle().CertPool(),
	}
	plane.StartTLS()
	defer plane.Close()

	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, data []byte) { require.NoError(t, os.WriteFile(file(name), data, 0o600)) }
	write("root-cert.pem", td.Bundle().MarshalPEM()) // not that of the server
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{
		RootsFile: file("root-cert.pem"), CertificateFile: file("cert-chain.pem"), KeyFile: file("key.pem"), ServerName: "istiod.test",
	})
	require.NoError(t, err)
	h := must.Get(xdsproxy.NewHandler(xdsproxy.Config{
		URL: plane.URL, HTTPClient: client, Header: http.Header{"X-Own": {" own"}},
		Token: func(context.Context) (string, error) { return "sesame-sesame-sesame", nil },
	}))(t)
	defer h.Close()
	c := onSocket(t, h)
	pass := func() error {
		s := c.Open(t.Context(), stream, nil)
		defer s.Close()
		require.NoError(t, s.Send(ask(t, clusters)))
		_, err := s.Receive()
		return err
	}
	assert.Equal(t, grpchttp.Unavailable, asError(t, pass()).Code, "the server is not to be trusted")
	assert.Empty(t, clients, "and is told nothing")
	write("root-cert.pem", host.Bundle().MarshalPEM())
	require.NoError(t, pass())
	assert.Equal(t, "0 Bearer sesame-sesame-sesame own", <-clients)
	certs, pem, err := td.SVID("/web").MarshalPEM()
	require.NoError(t, err)
	write("cert-chain.pem", certs)
	write("key.pem", pem)
	client.CloseIdleConnections()
	require.NoError(t, pass())
	assert.Equal(t, "1 Bearer sesame-sesame-sesame own", <-clients)
}
