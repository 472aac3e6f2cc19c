package source_test

import (
	"context"
	"crypto"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// lastGood is a LastGood over a source that a test switches.
func lastGood(t *testing.T, dir string, live interface {
	source.Source
	Run(context.Context) error
}) *source.LastGood {
	t.Helper()
	l, err := source.NewLastGood(source.LastGoodConfig{Source: live, Dir: dir, MaxAge: time.Hour, Identity: true})
	require.NoError(t, err)
	return l
}

// during runs l for as long as f takes.
func during(t *testing.T, l *source.LastGood, f func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	synctest.Wait()
	f()
	cancel()
	require.NoError(t, <-done)
}

// status is the state of a LastGood.
type status struct {
	InUse        bool
	Saved        time.Time
	Refused, Err error
}

// statusOf reads the Report of l.
func statusOf(l *source.LastGood) status {
	r := l.Report()
	st := status{Saved: r.Upstreams[0].LastSuccess, Err: r.Upstreams[0].Err}
	for _, err := range r.Problems {
		if strings.HasSuffix(err.Error(), " is in use, as the live source is not ready") {
			st.InUse = true
		} else {
			st.Refused = err
		}
	}
	return st
}

// withdrawn is the error of a source whose server has taken the identity back.
type withdrawn struct{ error }

func (withdrawn) Withdrawn() bool { return true }

// What is stored is deleted each time that the server withdraws the identity, and stored again each time that it is back, even if
// it is the same.
func TestWithdrawnAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "store")
		live := &flip{Source: spiffetest.NewCA(t, "example.org").Source("/web")}
		l := lastGood(t, dir, live)
		during(t, l, func() {
			for range 3 {
				require.FileExists(t, filepath.Join(dir, "identity.pem"))
				require.FileExists(t, filepath.Join(dir, "bundles.json"))
				require.NoError(t, statusOf(l).Err)
				live.Fail(withdrawn{errors.New("no identity")})
				synctest.Wait()
				require.NoFileExists(t, filepath.Join(dir, "identity.pem"))
				require.NoFileExists(t, filepath.Join(dir, "bundles.json"))
				require.Zero(t, statusOf(l).Saved)
				live.Fail(nil)
				synctest.Wait()
			}
			require.False(t, statusOf(l).Saved.IsZero())
		})
	})
}

// A directory that could not be written is told of until it can be, and written then.
func TestStoredAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "store")
		require.NoError(t, os.WriteFile(dir, nil, 0o600))
		live := &flip{Source: spiffetest.NewCA(t, "example.org").Source("/web")}
		l := lastGood(t, dir, live)
		during(t, l, func() {
			for range 2 {
				require.Error(t, statusOf(l).Err)
				require.Error(t, l.Report().Upstreams[0].Err)
				require.NoError(t, os.Remove(dir))
				time.Sleep(time.Minute + time.Second)
				synctest.Wait()
				require.NoError(t, statusOf(l).Err)
				require.NoError(t, l.Report().Upstreams[0].Err)
				require.FileExists(t, filepath.Join(dir, "identity.pem"))

				require.NoError(t, os.RemoveAll(dir))
				require.NoError(t, os.WriteFile(dir, nil, 0o600))
				live.Renew()
				synctest.Wait()
			}
		})
	})
}

// breaks is a live source that ends with an error for a while.
type breaks struct {
	*flip
	err error
}

func (b *breaks) Run(ctx context.Context) error {
	if b.err != nil {
		return b.err
	}
	return b.flip.Run(ctx)
}

// What an earlier Run has ended with, and what it has found in the directory, is not told of the next one.
func TestRunsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "store")
		ca := spiffetest.NewCA(t, "example.org")
		live := &breaks{&flip{Source: ca.Source("/web")}, errors.New("it ends")}
		live.Fail(errAway)
		l := lastGood(t, dir, live)
		require.ErrorIs(t, l.Run(t.Context()), live.err)
		require.ErrorIs(t, statusOf(l).Err, live.err)
		require.ErrorContains(t, statusOf(l).Refused, "no such file")

		other := &flip{Source: ca.Source("/web")}
		during(t, lastGood(t, dir, other), func() {}) // another process of the program
		live.err = nil
		during(t, l, func() {
			st := statusOf(l)
			require.NoError(t, st.Err)
			require.NoError(t, st.Refused)
			require.True(t, st.InUse)
			require.Equal(t, serial(t, other), serial(t, l))
			require.Len(t, l.Report().Problems, 1, "it is in use, and nothing more")
			live.Fail(nil)
			synctest.Wait()
			require.False(t, statusOf(l).InUse)
			require.Empty(t, l.Report().Problems)
		})
	})
}

// An identity is not written before the bundles that vouch for it: a write that fails, or a crash, between the two leaves the pair
// from before.
func TestOrderOfFiles(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "store")
		ca := spiffetest.NewCA(t, "example.org")
		live := &flip{Source: ca.Source("/web")}
		l := lastGood(t, dir, live)
		during(t, l, func() {
			before := must.Get(os.ReadFile(filepath.Join(dir, "identity.pem")))(t)
			bundles := filepath.Join(dir, "bundles.json")
			require.NoError(t, os.Remove(bundles))
			require.NoError(t, os.MkdirAll(filepath.Join(bundles, "in the way"), 0o700))
			live.Renew()
			synctest.Wait()
			require.Error(t, statusOf(l).Err)
			now := must.Get(os.ReadFile(filepath.Join(dir, "identity.pem")))(t)
			assert.Equal(t, string(before), string(now))

			require.NoError(t, os.RemoveAll(bundles))
			time.Sleep(time.Minute + time.Second)
			synctest.Wait()
			require.NoError(t, statusOf(l).Err)
			now = must.Get(os.ReadFile(filepath.Join(dir, "identity.pem")))(t)
			assert.NotEqual(t, string(before), string(now))
			assert.FileExists(t, bundles)
		})
	})
}

// opaque is a key that no file can hold.
type opaque struct{ crypto.Signer }

// sealed is a source of an identity with such a key.
type sealed struct {
	*flip
	snap *spiffe.Snapshot
}

func (s sealed) Snapshot() (*spiffe.Snapshot, error) { return s.snap, nil }
func (s sealed) SVID() (*spiffe.SVID, error)         { return s.snap.SVID() }

// The bundles are stored though the key cannot be, which is told.
func TestKeyThatCannotBeStored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "store")
		ca := spiffetest.NewCA(t, "example.org")
		chain, key := ca.Certificate("/web")
		svid := must.Get(spiffe.NewSVID(chain, opaque{key}))(t)
		l := lastGood(t, dir, sealed{&flip{Source: ca.Source("/web")}, spiffe.NewSnapshot(svid, ca.Bundles())})
		during(t, l, func() {
			require.Error(t, statusOf(l).Err)
			require.FileExists(t, filepath.Join(dir, "bundles.json"))
			require.NoFileExists(t, filepath.Join(dir, "identity.pem"))
		})
	})
}
