package proofs

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var errGivenUp = errors.New("the program has given up")

// TestMuteAgent: while the agent takes requests and does not answer, the error of the wait says that, at any moment.
func TestMuteAgent(t *testing.T) {
	t.Parallel()
	for _, patience := range []time.Duration{time.Millisecond, time.Second, 10 * time.Second, time.Minute, 10 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			api := workloadapitest.NewInMemory(t, spiffetest.NewCA(t, "example.org"), "/web")
			api.Hang()
			ctx, cancel := context.WithTimeoutCause(t.Context(), patience, errGivenUp)
			defer cancel()
			_, err := workloadapi.Start(ctx, api.Config())
			require.ErrorIs(t, err, spiffe.ErrNotReady, patience)
			require.ErrorIs(t, err, errGivenUp, patience)
			assert.NotContains(t, err.Error(), "nothing was tried", patience)
			assert.Contains(t, err.Error(), "answer", patience)
			api.Mend()
		})
	}
}

// source is what Start returns, of an agent or of a CA.
type source interface {
	spiffe.SVIDSource
	spiffe.BundleSource
	Run(context.Context) error
	Ready(context.Context) error
	Close() error
}

// TestStartInOneCall: one call gives an identity that is there, and Close ends all of it; the explicit form ends without
// an error, too; and a source that was not started says so.
func TestStartInOneCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		agent := workloadapitest.NewInMemory(t, ca, "/web")
		id := spiffe.MustParseID("spiffe://example.org/web")
		for name, c := range map[string]struct {
			start func(context.Context) (source, error)
			make  func() (source, error)
			fail  func(error)
		}{
			"agent": {
				func(ctx context.Context) (source, error) { return workloadapi.Start(ctx, agent.Config()) },
				func() (source, error) { return workloadapi.New(agent.Config()) },
				func(err error) {
					if agent.Mend(); err != nil {
						agent.Deny()
					}
				},
			},
			"CA": {
				func(ctx context.Context) (source, error) {
					return secretcache.Start(ctx, secretcache.Config{ID: id, CA: ca})
				},
				func() (source, error) { return secretcache.New(secretcache.Config{ID: id, CA: ca}) },
				func(err error) {
					if ca.FailNext(0, nil); err != nil {
						ca.FailNext(-1, err)
					}
				},
			},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			me := must.Get(c.start(ctx))(t, name)
			cancel()
			time.Sleep(3 * time.Hour) // renewals
			svid := must.Get(me.SVID())(t, name)
			assert.Equal(t, id, svid.ID(), name)
			if agent.Rotate(); name == "CA" { // the agent of a test renews when it is told
				assert.True(t, svid.NotAfter().After(time.Now()), "it runs on after the context of the start has ended")
			}
			require.NoError(t, me.Close(), name)
			must.Get(me.Bundle(id.TrustDomain()))(t, "%s: what was received stays", name)

			me = must.Get(c.make())(t, name)
			ctx, cancel = context.WithTimeout(t.Context(), time.Second)
			err := me.Ready(ctx)
			cancel()
			assert.ErrorContains(t, err, "this program has neither called Start nor Run", name)
			ctx, cancel = context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- me.Run(ctx) }()
			require.NoError(t, me.Ready(t.Context()), name)
			cancel()
			require.NoError(t, <-ended, "%s: a clean stop", name)

			c.fail(errors.New("the power is out"))
			ctx, cancel = context.WithTimeoutCause(t.Context(), time.Minute, errGivenUp)
			_, err = c.start(ctx)
			cancel()
			require.ErrorIs(t, err, errGivenUp, name)
			if name == "CA" {
				require.ErrorContains(t, err, "the power is out")
			} else {
				require.ErrorIs(t, err, workloadapi.ErrDenied)
			}
			c.fail(nil)
		}
	})
}
