package workloadapi_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

const server = "the server of an http.Client" // as errors name that of inMemory

// TestReadySays: whatever keeps a source from being ready, Start and Ready say it, and so does a reader.
func TestReadySays(t *testing.T) {
	t.Parallel()
	home, svid := inBubbles(t)
	web := response(t, home, svid)
	mute := func(c *call) { c.wait() }
	rows := []struct {
		name   string
		cfg    workloadapi.Config
		server func(*call)
		dial   error         // in place of a server
		wait   time.Duration // 0 means 10 s; the error is there before if it is final
		final  bool
		want   string
		is     error
	}{
		{name: "a server that accepts and is mute", server: mute, want: server + " has not answered yet"},
		{name: "a server that is mute for long", server: mute, wait: 5 * time.Minute, want: "FetchX509SVID at " + server + ": the server did not answer in time"},
		{name: "a header and no message", server: func(c *call) { c.flush(); c.wait() }, want: server + " has not answered yet"},
		{name: "not registered", server: func(c *call) { c.end(workloadtest.PermissionDenied, "no identity issued%0Aby me") }, want: `FetchX509SVID at ` + server + `: no identity for this caller: "no identity issued\nby me"`, is: workloadapi.ErrDenied},
		{name: "not registered, and then mute", server: deniedThenMute(), want: "no identity for this caller", is: workloadapi.ErrDenied},
		{name: "a server that starts", server: func(c *call) { c.end(workloadtest.Unavailable, "still attesting") }, want: `"still attesting"`},
		{name: "a permission", dial: os.NewSyscallError("connect", syscall.EACCES), want: "permission denied", is: syscall.EACCES},
		{name: "no socket", dial: os.NewSyscallError("connect", syscall.ENOENT), want: "no such file or directory", is: syscall.ENOENT},
		{name: "nothing listens", dial: os.NewSyscallError("connect", syscall.ECONNREFUSED), want: "connection refused", is: syscall.ECONNREFUSED},
		{name: "refused for good", server: func(c *call) { c.end(workloadtest.InvalidArgument, "security header missing from request") }, final: true, want: "security header missing", is: workloadapi.ErrRefused},
		{name: "not a Workload API", server: func(c *call) { c.end(workloadtest.Unimplemented, "unknown service") }, final: true, want: "unknown service", is: errors.ErrUnsupported},
		{name: "nonsense", server: func(c *call) { c.sendRaw([]byte("junk")); c.wait() }, want: "response discarded", is: workloadapi.ErrBadResponse},
		{name: "another hint", cfg: workloadapi.Config{Hint: "internal"}, server: func(c *call) { c.send(web); c.wait() }, want: `no identity with the hint "internal"; it has "spiffe://example.org/web" with the hint ""`},
		{name: "mute about the keys for JWT-SVIDs", cfg: workloadapi.Config{JWTBundles: true}, server: func(c *call) {
			if c.rpc == "FetchX509SVID" {
				c.send(web)
			}
			c.wait()
		}, want: "no bundles for JWT-SVIDs: " + server + " has not answered yet"},
		{name: "mute about bundles", cfg: workloadapi.Config{BundlesOnly: true}, server: mute, want: server + " has not answered yet"},
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				if r.dial != nil {
					c, transport := client(t, func(context.Context, string, string) (net.Conn, error) {
						return nil, &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/run/agent.sock", Net: "unix"}, Err: r.dial}
					})
					t.Cleanup(transport.CloseIdleConnections)
					r.cfg.Client = c
				} else {
					r.cfg.Client = inMemory(t, fake(t, r.server))
				}
				wait := 10 * time.Second
				if r.wait > 0 {
					wait = r.wait
				}
				check := func(err error, after time.Duration) {
					t.Helper()
					must.Fail(t, err, spiffe.ErrNotReady, r.want)
					require.NotErrorIs(t, err, lifecycle.ErrNotStarted)
					if r.is != nil {
						require.ErrorIs(t, err, r.is)
					}
					if r.final {
						assert.Zero(t, after)
						return
					}
					require.ErrorIs(t, err, workloadtest.ErrStop)
					assert.Equal(t, wait, after)
				}
				ctx, cancel := context.WithTimeoutCause(t.Context(), wait, workloadtest.ErrStop)
				defer cancel()
				begun := time.Now()
				s, err := workloadapi.Start(ctx, r.cfg)
				check(err, time.Since(begun))
				assert.Nil(t, s)

				// The three steps by hand, with one context for both, which ends them at the same moment.
				s = must.Get(workloadapi.New(r.cfg))(t)
				ctx, cancel = context.WithTimeoutCause(t.Context(), wait, workloadtest.ErrStop)
				defer cancel()
				ended := make(chan error, 1)
				go func() { ended <- s.Run(ctx) }()
				begun = time.Now()
				check(s.Ready(ctx), time.Since(begun))
				err = <-ended
				assert.Equal(t, r.final, err != nil, "%v", err)
				if !r.cfg.BundlesOnly && !r.cfg.JWTBundles {
					_, err = s.SVID()
					must.Fail(t, err, spiffe.ErrNotReady, r.want)
					if r.cfg.Hint == "" {
						require.ErrorIs(t, err, lifecycle.ErrEnded)
					}
				}
			})
		})
	}
}

func deniedThenMute() func(*call) {
	var calls atomic.Int64
	return func(c *call) {
		if calls.Add(1)%2 == 1 {
			c.end(workloadtest.PermissionDenied, "")
			return
		}
		c.wait()
	}
}

// TestReadySaysNeverStarted: that is the program's own fault, and not the server's.
func TestReadySaysNeverStarted(t *testing.T) {
	t.Parallel()
	s := must.Get(workloadapi.New(workloadapi.Config{Address: "unix:///run/agent.sock"}))(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := s.Ready(ctx)
	must.Fail(t, err, spiffe.ErrNotReady, lifecycle.ErrNotStarted)
	assert.EqualError(t, err, "workloadapi: source: not ready: this program has neither called Start nor Run, so nothing was tried; waited for it: context deadline exceeded")
	require.NoError(t, s.Close())
	require.ErrorIs(t, must.Err(s.Fetch(t.Context(), "a")), lifecycle.ErrClosed)
	assert.EqualError(t, s.Ready(t.Context()), "workloadapi: source: not ready: it was closed by this program")
	require.ErrorIs(t, must.Err(s.SVID()), lifecycle.ErrClosed)
	assert.EqualError(t, s.Run(t.Context()), "workloadapi: run: it was closed by this program")
}

// TestStart: the context bounds the start and nothing after it.
func TestStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		streams := make(feed)
		c := inMemory(t, fake(t, func(c *call) { c.sleep(time.Second); c.send(response(t, home, home.SVID("/web"))); streams.serve(c) }))
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		begun := time.Now()
		s := must.Get(workloadapi.Start(ctx, workloadapi.Config{Client: c}))(t)
		assert.Equal(t, time.Second, time.Since(begun))
		require.EqualError(t, s.Run(t.Context()), "workloadapi: run: "+lifecycle.ErrRunning.Error())
		first := must.Get(s.SVID())(t)

		time.Sleep(time.Hour)
		require.Error(t, ctx.Err())
		streams.send(response(t, home, home.SVID("/web")))
		second := must.Get(s.SVID())(t)
		assert.NotSame(t, first, second, "it runs on")

		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
		assert.Same(t, second, must.Get(s.SVID())(t), "what was received stays")
		require.NoError(t, s.Ready(t.Context()))
		assert.False(t, s.Status().X509.Open)
	})
}

// TestCloseWaits: when Close returns, nothing is under way any more, and what waited for the source waits no longer.
func TestCloseWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		streams := make(feed)
		s := must.Get(workloadapi.New(workloadapi.Config{Client: inMemory(t, fake(t, streams.serve))}))(t)
		waiting := make(chan error, 2)
		stop := workloadtest.Run(t, s)
		synctest.Wait()
		streams.send(response(t, home, home.SVID("/web")))
		require.NoError(t, s.Close())
		require.NoError(t, stop())
		must.Get(s.SVID())(t)

		s = must.Get(workloadapi.New(workloadapi.Config{Client: inMemory(t, fake(t, func(c *call) { c.wait() }))}))(t)
		stop = workloadtest.Run(t, s)
		go func() {
			waiting <- s.Ready(t.Context())
		}()
		synctest.Wait()
		require.NoError(t, s.Close())
		require.ErrorIs(t, <-waiting, lifecycle.ErrClosed)
		require.NoError(t, stop())
	})
}

// TestCloseEndsDials: a dial that hangs ends with Close. The end of a bubble finds each goroutine that is left.
func TestCloseEndsDials(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := must.Get(workloadapi.New(workloadapi.Config{Address: "tcp://192.0.2.1:8081"}))(t)
			mine, other := net.Pipe()
			workloadapi.SetDial(s, func(ctx context.Context) (net.Conn, error) {
				<-ctx.Done()
				if late { // as a connection that comes at the same moment
					return mine, nil
				}
				return nil, context.Cause(ctx)
			})
			stop := workloadtest.Run(t, s)
			time.Sleep(time.Minute)
			require.NoError(t, s.Close())
			require.NoError(t, stop())
			synctest.Wait()
			if late {
				require.ErrorIs(t, must.Err(other.Read(make([]byte, 1))), io.EOF)
			}
			require.ErrorIs(t, must.Err(s.Fetch(t.Context(), "a")), lifecycle.ErrClosed)
		})
	}
}

// TestStartRefuses: what New refuses, Start refuses too.
func TestStartRefuses(t *testing.T) {
	t.Parallel()
	s, err := workloadapi.Start(t.Context(), workloadapi.Config{Address: "/run/agent.sock"})
	require.ErrorContains(t, err, "unix:///run/agent.sock")
	assert.Nil(t, s)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(workloadtest.ErrStop)
	_, err = workloadapi.Start(ctx, workloadapi.Config{Address: "unix:///nowhere.sock"})
	require.ErrorIs(t, err, workloadtest.ErrStop)
	require.False(t, errors.Is(err, lifecycle.ErrNotStarted))
}
