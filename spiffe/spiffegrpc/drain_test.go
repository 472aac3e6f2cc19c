package spiffegrpc_test

import (
	"bytes"
	"context"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// governed are the counts of a Governor.
type governed struct{ open, draining, ended uint64 }

// counts reads the metrics of g.
func counts(t testing.TB, g *spiffetls.Governor) (c governed) {
	t.Helper()
	var text bytes.Buffer
	require.NoError(t, g.Report().Metrics(&text))
	for line := range strings.Lines(text.String()) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		n, _ := strconv.ParseUint(value, 10, 64)
		switch {
		case strings.HasPrefix(name, `svidkit_governor_connections{state="open"`):
			c.open += n
		case strings.HasPrefix(name, `svidkit_governor_connections{state="draining"`):
			c.draining += n
		case strings.HasPrefix(name, "svidkit_governor_ended_connections_total{"):
			c.ended += n
		}
	}
	return c
}

// governor runs until the end of the test.
func governor(t testing.TB, grace time.Duration) *spiffetls.Governor {
	t.Helper()
	g := &spiffetls.Governor{Grace: grace, Jitter: -1}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return g
}

// ended waits until a Governor has ended n connections.
func ended(t testing.TB, g *spiffetls.Governor, n uint64) {
	t.Helper()
	require.Eventually(t, func() bool { return counts(t, g).ended >= n }, time.Minute, 5*time.Millisecond)
}

// load makes calls and streams until stop is called, which returns how many there were. Each of them must succeed.
func load(t testing.TB, client testpb.TestServiceClient) (stop func() (unary, messages int64)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	var wg sync.WaitGroup
	var over atomic.Bool
	var calls, messages atomic.Int64
	worker := func(once func() error) {
		wg.Go(func() {
			for !over.Load() {
				if !assert.NoError(t, once()) {
					return
				}
			}
		})
	}
	for range 4 {
		worker(func() error {
			_, err := client.UnaryCall(ctx, &testpb.SimpleRequest{Payload: &testpb.Payload{Body: make([]byte, 1000)}})
			calls.Add(1)
			return err
		})
	}
	body := make([]byte, 100_000) // more than a window, and than a buffer of grpc-go
	for range 2 {
		worker(func() error { // a stream of about half a second, over the moments at which a connection is drained
			stream, err := client.FullDuplexCall(ctx)
			if err != nil {
				return err
			}
			if _, err := stream.Recv(); err != nil {
				return err
			}
			for begin := time.Now(); time.Since(begin) < 500*time.Millisecond; {
				if err := stream.Send(&testpb.StreamingOutputCallRequest{Payload: &testpb.Payload{Body: body}}); err != nil {
					return err
				}
				m, err := stream.Recv()
				if err != nil {
					return err
				}
				if !assert.Len(t, m.GetPayload().GetBody(), len(body)) {
					return io.ErrShortBuffer
				}
				messages.Add(1)
			}
			if err := stream.CloseSend(); err != nil {
				return err
			}
			if _, err = stream.Recv(); err == io.EOF {
				err = nil
			}
			return err
		})
	}
	return func() (int64, int64) {
		over.Store(true)
		wg.Wait()
		cancel()
		return calls.Load(), messages.Load()
	}
}

// Leaf and root are rotated, and the old root removed, under unary calls and streams: none fails, with a Governor on the
// server alone, on the client alone, and on both.
func TestRotation(t *testing.T) {
	t.Parallel()
	for name, sides := range map[string]struct{ server, client bool }{
		"server": {true, false}, "client": {false, true}, "both": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			dbSource, webSource := ca.Source("/db"), ca.Source("/web")
			all := func(change func()) {
				change()
				dbSource.Renew()
				webSource.Renew()
			}
			var serverOpts, clientOpts spiffetls.Config
			var governors []*spiffetls.Governor
			if sides.server {
				serverOpts.Governor = governor(t, 20*time.Second)
				governors = append(governors, serverOpts.Governor)
			}
			if sides.client {
				clientOpts.Governor = governor(t, 20*time.Second)
				governors = append(governors, clientOpts.Governor)
			}
			addr := serve(t, serverCreds(t, dbSource, dbSource, spiffe.AllowIDs(web), &serverOpts), &service{})
			client := connect(t, addr, clientCreds(t, webSource, webSource, spiffe.AllowIDs(db), &clientOpts))
			stop := load(t, client)
			must.Get(client.EmptyCall(callContext(t), &testpb.Empty{}, grpc.WaitForReady(true)))(t)
			const rotations = 2
			for n := range uint64(rotations) {
				all(ca.Prepare)
				all(ca.Rotate)
				all(func() {}) // leaves alone
				all(ca.DropOldRoots)
				for _, g := range governors {
					if !sides.server || !sides.client {
						ended(t, g, n+1)
					}
				}
				if sides.server && sides.client {
					require.Eventually(t, func() bool {
						return counts(t, governors[0]).ended+counts(t, governors[1]).ended > n
					}, time.Minute, 5*time.Millisecond)
				}
			}
			calls, messages := stop()
			assert.Greater(t, calls, int64(100))
			assert.Greater(t, messages, int64(10))
			t.Logf("%d calls and %d messages in streams, none failed", calls, messages)
		})
	}
}

// A call that is in progress when its connection is drained ends well, and the next one needs a proof that holds.
func TestCallInProgress(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"server", "client"} {
		t.Run(side, func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			var allowClients, allowServers spiffe.LivePolicy
			require.NoError(t, allowClients.Set(spiffe.AllowIDs(web)))
			require.NoError(t, allowServers.Set(spiffe.AllowIDs(db)))
			var serverOpts, clientOpts spiffetls.Config
			g, revoked := governor(t, 20*time.Second), &allowClients
			if side == "server" {
				serverOpts.Governor = g
			} else {
				clientOpts.Governor, revoked = g, &allowServers
			}
			s := &service{hold: make(chan struct{}), held: make(chan struct{}, 10)}
			server, addr := start(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), &allowClients, &serverOpts), s)
			client := connect(t, addr, clientCreds(t, ca.SVID("/web"), ca.Bundle(), &allowServers, &clientOpts))
			first := make(chan error, 1)
			go func() {
				_, err := client.UnaryCall(callContext(t), &testpb.SimpleRequest{})
				first <- err
			}()
			<-s.held
			require.NoError(t, revoked.Set(spiffe.AllowIDs(ops)))
			require.Eventually(t, func() bool { return counts(t, g).draining == 1 }, time.Minute, time.Millisecond)
			require.EventuallyWithT(t, func(t *assert.CollectT) { // as soon as the client has read GOAWAY
				_, err := client.EmptyCall(context.Background(), &testpb.Empty{})
				assert.Equal(t, codes.Unavailable, status.Code(err))
			}, time.Minute, 5*time.Millisecond)
			assert.Equal(t, governed{draining: 1}, counts(t, g))
			stopped := make(chan struct{})
			go func() {
				server.GracefulStop() // whose own GOAWAY follows
				close(stopped)
			}()
			time.Sleep(10 * time.Millisecond)
			close(s.hold)
			require.NoError(t, <-first)
			<-stopped
			ended(t, g, 1) // by the client, long before the end of Grace
		})
	}
}

// A call that lasts longer than Grace ends with Unavailable, and an idle connection ends at once.
func TestGrace(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"server", "client"} {
		t.Run(side, func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			dbSource, webSource := ca.Source("/db"), ca.Source("/web")
			var serverOpts, clientOpts spiffetls.Config
			g := governor(t, 100*time.Millisecond)
			if side == "server" {
				serverOpts.Governor = g
			} else {
				clientOpts.Governor = g
			}
			addr := serve(t, serverCreds(t, dbSource, dbSource, spiffe.AllowIDs(web), &serverOpts), &service{})
			client := connect(t, addr, clientCreds(t, webSource, webSource, spiffe.AllowIDs(db), &clientOpts))
			stream := must.Get(client.FullDuplexCall(callContext(t)))(t)
			must.Get(stream.Recv())(t)
			ca.Rotate()
			ca.DropOldRoots()
			dbSource.Renew()
			webSource.Renew()
			_, err := stream.Recv()
			assert.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
			assert.EqualValues(t, 1, counts(t, g).ended)
			_, err = client.EmptyCall(callContext(t), &testpb.Empty{})
			assert.NoError(t, err)
		})
	}
}

// A connection without calls leaves nothing behind.
func TestIdleConnection(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	webSource := ca.Source("/web")
	g := governor(t, 20*time.Second)
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil), &service{})
	creds := clientCreds(t, webSource, webSource, spiffe.AllowIDs(db), &spiffetls.Config{Governor: g})
	client := connect(t, addr, creds)
	must.Get(client.EmptyCall(callContext(t), &testpb.Empty{}))(t)
	assert.EqualValues(t, 1, counts(t, g).open)
	ca.Rotate()
	ca.DropOldRoots()
	webSource.Renew()
	ended(t, g, 1)
	assert.Zero(t, counts(t, g).open+counts(t, g).draining)
	_, err := client.EmptyCall(callContext(t), &testpb.Empty{})
	assert.Equal(t, codes.Unavailable, status.Code(err), "the server has the identity of the old root")
}
