package workloadapitest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// start runs a source for the server until the test is over, and waits until it is ready.
func start(t testing.TB, api *workloadapitest.Server) *workloadapi.Source {
	t.Helper()
	s := must.Get(workloadapi.Start(t.Context(), api.Config()))(t)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func svid(t testing.TB, s spiffe.SVIDSource) *spiffe.SVID {
	t.Helper()
	return must.Get(s.SVID())(t)
}

// inBubble runs f with a server in memory and a source that is ready.
func inBubble(t *testing.T, f func(t *testing.T, ca *spiffetest.CA, api *workloadapitest.Server, s *workloadapi.Source)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		api := workloadapitest.NewInMemory(t, ca, "/web", "/db")
		f(t, ca, api, start(t, api))
	})
}

// wait lets everything settle, for at most d.
func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestSocket(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-3")
	ca := spiffetest.NewCA(t, "example.org")
	var address string
	t.Run("server", func(t *testing.T) {
		api := workloadapitest.NewServer(t, ca, "/web")
		address = api.Config().Address
		assert.True(t, strings.HasPrefix(address, "unix:///"), address)
		assert.Equal(t, "workloadapitest.Server("+address+")", fmt.Sprint(api))
		s := start(t, api)
		assert.Equal(t, "spiffe://example.org/web", svid(t, s).ID().String())
		changed := s.Changed()
		api.Rotate()
		<-changed
		assert.Equal(t, 1, api.Requests())

		spiffetest.TestSVIDSource(t, func(testing.TB) spiffe.SVIDSource { return s })
		spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
			return s, []spiffe.TrustDomain{ca.TrustDomain()}
		})
	})
	path := strings.TrimPrefix(address, "unix://")
	_, err := os.Stat(path)
	assert.ErrorIs(t, err, os.ErrNotExist, "nothing is left behind")
	_, err = net.Dial("unix", path)
	assert.Error(t, err)
}

func TestServes(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, api *workloadapitest.Server, s *workloadapi.Source) {
		require.Len(t, s.SVIDs(), 2)
		assert.Equal(t, "spiffe://example.org/web", svid(t, s).ID().String(), "the first is the default")
		want := must.Get(api.Snapshot().SVID())(t)
		assert.Equal(t, want.Leaf().Raw, svid(t, s).Leaf().Raw)
		assert.Equal(t, "workloadapitest.Server(in memory)", fmt.Sprintf("%v", api))
		assert.Equal(t, "workloadapitest.Server(in memory)", fmt.Sprintf("%#v", api))
		assert.Empty(t, api.Config().Address)

		// What happens to the CA is passed on.
		partner := spiffetest.NewCA(t, "partner.test")
		ca.Federate(partner.Bundle())
		wait(0)
		b := must.Get(s.Bundle(partner.TrustDomain()))(t)
		assert.True(t, b.CertPool().Equal(partner.Bundle().CertPool()))
		ca.Rotate()
		wait(0)
		b = must.Get(s.Bundle(ca.TrustDomain()))(t)
		assert.True(t, b.CertPool().Equal(ca.Bundle().CertPool()))

		// Hints, and an order of one's own.
		guest := partner.SVID("/guest")
		api.SetIdentities(workloadserver.Identity{SVID: ca.SVID("/a"), Hint: "internal"}, workloadserver.Identity{SVID: guest, Hint: "external"})
		wait(0)
		first := svid(t, s)
		assert.Equal(t, "spiffe://example.org/a", first.ID().String())
		api.Rotate()
		wait(0)
		assert.NotEqual(t, first.Leaf().Raw, svid(t, s).Leaf().Raw)
		assert.Equal(t, guest.Leaf().Raw, s.SVIDs()[1].Leaf().Raw, "an identity of another trust domain stays")
		assert.Equal(t, 1, api.Requests(), "one stream for it all")
		for u, err := range api.Config().Client.WatchX509SVIDs(t.Context()) {
			require.NoError(t, err)
			assert.Equal(t, "internal", u.Identities[0].Hint, "hints stay")
			break
		}
	})
}

func TestJWT(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, api *workloadapitest.Server, s *workloadapi.Source) {
		c := api.Config().Client
		tokens := must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db", "cache"))(t)
		assert.Equal(t, "spiffe://example.org/web", tokens[0].ID.String())
		id, claims := must.Get2(c.ValidateJWTSVID(t.Context(), "cache", tokens[0].Token()))(t)
		assert.Equal(t, tokens[0].ID, id)
		assert.Equal(t, []any{"db", "cache"}, claims["aud"])
		_, _, err := c.ValidateJWTSVID(t.Context(), "other", tokens[0].Token())
		assert.ErrorIs(t, err, workloadapi.ErrRefused)

		for u, err := range c.WatchJWTBundles(t.Context()) {
			require.NoError(t, err)
			b := must.Get(u.Bundles.Bundle(ca.TrustDomain()))(t)
			claim := must.Get(jwtsvid.ParseUnverified(tokens[0].Token()))(t)
			_, ok := b.JWTAuthority(claim.KeyID)
			assert.True(t, ok)
			second := workloadapitest.NewInMemory(t, ca, "/web").Config().Client
			_, _, err := second.ValidateJWTSVID(t.Context(), "cache", tokens[0].Token())
			require.NoError(t, err, "another server of the CA")
			stranger := workloadapitest.NewInMemory(t, spiffetest.NewCA(t, "example.org"), "/web").Config().Client
			_, _, err = stranger.ValidateJWTSVID(t.Context(), "cache", tokens[0].Token())
			assert.ErrorIs(t, err, workloadapi.ErrRefused, "a server of another CA")
			break
		}

		api.Deny()
		_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db")
		assert.ErrorIs(t, err, workloadapi.ErrDenied)
		api.Garble()
		_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db")
		assert.Error(t, err)
		api.Hang()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = c.FetchJWTSVIDs(ctx, spiffe.ID{}, "db")
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestExpireIn(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, _ *spiffetest.CA, api *workloadapitest.Server, s *workloadapi.Source) {
		api.ExpireIn(time.Minute)
		wait(0)
		assert.Equal(t, time.Minute, time.Until(svid(t, s).NotAfter()).Round(time.Second))
		api.ExpireIn(-time.Minute)
		wait(0)
		assert.Equal(t, time.Minute, time.Until(svid(t, s).NotAfter()).Round(time.Second), "the source keeps the valid one")
		assert.ErrorContains(t, s.Report().Problems[0], "has expired at")
		api.Rotate()
		wait(0)
		assert.Equal(t, time.Hour, time.Until(svid(t, s).NotAfter()).Round(time.Second))
	})
}

// A server that hangs is silent on its open streams, for however long, and tells of everything when it is
// mended.
func TestHangIsSilent(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, _ *spiffetest.CA, api *workloadapitest.Server, s *workloadapi.Source) {
		before := svid(t, s)
		api.Hang()
		api.Rotate()
		wait(50 * time.Minute)
		assert.Same(t, before, svid(t, s))
		api.Mend()
		wait(0)
		assert.NotSame(t, before, svid(t, s))
	})
}

// What a client makes of each position of the dial, and of the way back.
func TestDial(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		turn      func(*workloadapitest.Server)
		withdrawn bool
		silent    bool // the stream stays open
		is        error
	}{
		"Deny":   {turn: (*workloadapitest.Server).Deny, withdrawn: true, is: workloadapi.ErrDenied},
		"Hang":   {turn: (*workloadapitest.Server).Hang, silent: true},
		"Garble": {turn: (*workloadapitest.Server).Garble, is: workloadapi.ErrBadResponse},
		"Drop":   {turn: (*workloadapitest.Server).Drop},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(t *testing.T, ca *spiffetest.CA, api *workloadapitest.Server, s *workloadapi.Source) {
				first, requests := svid(t, s), api.Requests()
				c.turn(api)
				c.turn(api) // the same again is nothing new
				wait(5 * time.Minute)
				now, err := s.SVID()
				if c.withdrawn {
					assert.ErrorIs(t, err, spiffe.ErrNotReady)
					assert.ErrorIs(t, err, workloadapi.ErrDenied)
				} else {
					require.NoError(t, err)
					assert.Equal(t, first.Leaf().Raw, now.Leaf().Raw, "what was there stays")
				}
				assert.Equal(t, c.silent, api.Requests() == requests && name != "Drop", "%d requests", api.Requests())

				api.Rotate() // no client hears of it
				wait(time.Minute)
				if now, err := s.SVID(); !c.withdrawn {
					require.NoError(t, err)
					assert.Equal(t, first.Leaf().Raw, now.Leaf().Raw)
				}

				// A new client fares no better.
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				var failed error
				for u, err := range api.Config().Client.WatchX509SVIDs(ctx) {
					assert.Nil(t, u)
					failed = errors.Join(failed, err)
				}
				assert.Equal(t, c.silent, failed == nil, "%v", failed)
				if c.is != nil {
					assert.ErrorIs(t, failed, c.is)
				}

				api.Mend()
				wait(5 * time.Minute)
				assert.NotEqual(t, first.Leaf().Raw, svid(t, s).Leaf().Raw)
				want := must.Get(api.Snapshot().SVID())(t)
				assert.Equal(t, want.Leaf().Raw, svid(t, s).Leaf().Raw)
			})
		})
	}
}

// recorder is a testing.TB whose end can be observed.
type recorder struct {
	testing.TB
	message string
}

func (r *recorder) Helper() {}

func (r *recorder) Fatalf(format string, args ...any) {
	r.message = fmt.Sprintf(format, args...)
	panic(r)
}

func TestFailsTheTest(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := &recorder{TB: t}
	assert.PanicsWithValue(t, r, func() { workloadapitest.NewInMemory(r, ca) })
	assert.Contains(t, r.message, "give a path")
	api := workloadapitest.NewInMemory(r, ca, "/web")
	assert.PanicsWithValue(t, r, func() { api.SetIdentities() })
	assert.Contains(t, r.message, "use Deny")
}

// A CA that fails at the start is not passed over in silence.
func TestCAFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.FailNext(1, errors.New("out of order"))
		l := &listener{TB: t, heard: make(chan string, 10)}
		workloadapitest.NewInMemory(l, ca, "/web")
		assert.Contains(t, <-l.heard, "bundles of the CA: out of order")
	})
}

type listener struct {
	testing.TB
	heard chan string
}

func (l *listener) Helper() {}

func (l *listener) Errorf(format string, args ...any) { l.heard <- fmt.Sprintf(format, args...) }
