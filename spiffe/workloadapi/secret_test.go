package workloadapi_test

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var _ sds.Source = (*workloadapi.Source)(nil)

// now asks for a secret and does not wait.
func now(t testing.TB, s *workloadapi.Source, name string) (*pki.Secret, error) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return s.GenerateSecret(ctx, name)
}

// isPair asserts that a name stands for the key pair of svid.
func isPair(t testing.TB, s *workloadapi.Source, name string, svid *spiffe.SVID) {
	t.Helper()
	got, err := now(t, s, name)
	require.NoError(t, err, name)
	want, err := pki.NewKeyPairSecret(name, svid)
	require.NoError(t, err)
	sameSecret(t, want, got)
}

// isRoots asserts that a name stands for the roots of d.
func isRoots(t testing.TB, s *workloadapi.Source, name string, d domain) {
	t.Helper()
	got, err := now(t, s, name)
	require.NoError(t, err, name)
	want, err := pki.NewTrustSecret(name, d.Bundle())
	require.NoError(t, err)
	sameSecret(t, want, got)
}

func sameSecret(t testing.TB, want, got *pki.Secret) {
	t.Helper()
	assert.Equal(t, want.Name(), got.Name())
	assert.Equal(t, want.NotAfter(), got.NotAfter())
	wantChain, wantKey, _ := want.KeyPair()
	chain, key, _ := got.KeyPair()
	assert.Equal(t, wantChain, chain)
	assert.Equal(t, wantKey, key)
	wantRoots, _ := want.Roots()
	roots, _ := got.Roots()
	assert.Equal(t, wantRoots, roots)
}

// gone asserts that there are no such names.
func gone(t testing.TB, s *workloadapi.Source, names ...string) {
	t.Helper()
	for _, name := range names {
		_, err := now(t, s, name)
		require.ErrorIs(t, err, fs.ErrNotExist, name)
		assert.Less(t, len(err.Error()), 600)
	}
}

// told is what a subscriber was told.
type told struct {
	mu    sync.Mutex
	names []string
}

func (n *told) add(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names = append(n.names, name)
}

func (n *told) take() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	names := n.names
	n.names = nil
	return names
}

const (
	webName, dbName, homeName, otherName = "spiffe://example.org/web", "spiffe://example.org/db", "spiffe://example.org", "spiffe://other.test"
)

func TestGenerateSecret(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home, other := newDomain(t, "example.org"), newDomain(t, "other.test")
		web, db := home.SVID("/web"), home.SVID("/db")
		streams := make(feed)
		s := source(t, workloadapi.Config{Hint: "main", JWTBundles: true}, func(c *call) {
			if c.rpc == "FetchX509SVID" {
				streams.serve(c)
				return
			}
			c.wait()
		})
		var news told
		cancel := s.Subscribe(news.add)

		// Before the first answer a look-up waits for it.
		gone(t, s, "", "x", "*", "rootca", "spiffe://example.org/", "file-root:system", strings.Repeat("x", 1<<20))
		for _, name := range []string{"default", "ROOTCA", "ALL", webName, homeName} {
			_, err := now(t, s, name)
			require.ErrorIs(t, err, spiffe.ErrNotReady, name)
			require.ErrorIs(t, err, context.Canceled, name)
			require.NotErrorIs(t, err, fs.ErrNotExist, name)
		}
		waiting := make(chan error)
		go func() {
			_, err := s.GenerateSecret(t.Context(), "default")
			waiting <- err
		}()
		response := home.response(t, db, other)
		response.Svids = append(response.Svids, home.message(t, web, "main"))
		streams.send(response)
		require.NoError(t, <-waiting)
		assert.Equal(t, []string{"ALL", "ROOTCA", homeName, otherName, "default", dbName, webName}, news.take(), "bundles first")
		isPair(t, s, "default", web)
		isPair(t, s, webName, web)
		isPair(t, s, dbName, db)
		isRoots(t, s, "ROOTCA", home)
		isRoots(t, s, homeName, home)
		isRoots(t, s, otherName, other)
		everything, err := now(t, s, "ALL")
		require.NoError(t, err)
		domains, _ := everything.TrustDomains()
		assert.Equal(t, map[spiffe.TrustDomain][]byte{
			home.TrustDomain(): home.Bundle().MarshalPEM(), other.TrustDomain(): other.Bundle().MarshalPEM(),
		}, domains)
		gone(t, s, "spiffe://example.org/other", "spiffe://third.test")

		// The same again is no news; one that is renewed is.
		streams.send(response)
		assert.Empty(t, news.take())
		renewed := home.SVID("/web")
		response.Svids[1] = home.message(t, renewed, "main")
		streams.send(response)
		assert.Equal(t, []string{"default", webName}, news.take())
		isPair(t, s, "default", renewed)
		isPair(t, s, dbName, db)
		other.Rotate()
		response.FederatedBundles[other.key()] = other.roots()
		streams.send(response)
		assert.Equal(t, []string{"ALL", otherName}, news.take())
		isRoots(t, s, otherName, other)

		// What the server no longer sends is gone, and comes back.
		streams.send(home.response(t, db))
		assert.Equal(t, []string{"ALL", "ROOTCA", otherName, "default", webName}, news.take(), "no identity has the hint")
		gone(t, s, "default", "ROOTCA", webName, otherName)
		isPair(t, s, dbName, db)
		isRoots(t, s, homeName, home)
		streams.send(response)
		assert.Equal(t, []string{"ALL", "ROOTCA", otherName, "default", webName}, news.take())
		isPair(t, s, "default", renewed)

		// An outage takes nothing away.
		all := []string{"default", "ROOTCA", "ALL", webName, dbName, homeName, otherName}
		for range 5 {
			streams.do(func(c *call) { c.end(codeUnavailable, "") })
			time.Sleep(time.Minute)
		}
		for _, name := range all {
			_, err := now(t, s, name)
			require.NoError(t, err, name)
		}
		assert.Empty(t, news.take())

		// A withdrawal takes all, also when an outage follows, and until there is something again.
		streams.do(func(c *call) { c.end(codePermissionDenied, "") })
		assert.Equal(t, []string{"ALL", "ROOTCA", homeName, otherName, "default", dbName, webName}, news.take())
		gone(t, s, all...)
		streams.do(func(c *call) { c.end(codeUnavailable, "") })
		gone(t, s, all...)
		cancel()
		cancel()
		streams.send(response)
		assert.Empty(t, news.take(), "canceled")
		isPair(t, s, "default", renewed)

		// An expired certificate is not handed out; a look-up waits for the next.
		time.Sleep(time.Until(renewed.NotAfter()))
		_, err = now(t, s, "default")
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		assert.ErrorContains(t, err, "has expired at")
		isRoots(t, s, "ROOTCA", home)
		go func() {
			_, err := s.GenerateSecret(t.Context(), webName)
			waiting <- err
		}()
		next := home.SVID("/web")
		response.Svids[1] = home.message(t, next, "main")
		streams.send(response)
		require.NoError(t, <-waiting)
		isPair(t, s, webName, next)
	})
}

// What the server has refused from the beginning does not exist either, and appears.
func TestGenerateSecretDenied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := newDomain(t, "example.org")
		streams := make(feed)
		s := source(t, workloadapi.Config{}, streams.serve)
		var news told
		s.Subscribe(news.add)
		waiting := make(chan error)
		go func() {
			_, err := s.GenerateSecret(t.Context(), "default")
			waiting <- err
		}()
		streams.do(func(c *call) { c.end(codeUnavailable, "") })
		select {
		case err := <-waiting:
			require.Fail(t, "an outage says nothing", "%v", err)
		default:
		}
		time.Sleep(time.Minute)
		streams.do(func(c *call) { c.end(codePermissionDenied, "no identity issued") })
		require.ErrorIs(t, <-waiting, fs.ErrNotExist)
		time.Sleep(time.Minute)
		web := home.SVID("/web")
		streams.send(home.response(t, web))
		assert.Equal(t, []string{"ALL", "ROOTCA", homeName, "default", webName}, news.take())
		isPair(t, s, "default", web)
	})

	// A server that refuses for good leaves no one waiting, and an empty bundle is not the absence of one.
	synctest.Test(t, func(t *testing.T) {
		s := source(t, workloadapi.Config{}, func(c *call) { c.end(codeUnimplemented, "") })
		_, err := s.GenerateSecret(t.Context(), "default")
		require.ErrorIs(t, err, workloadapi.ErrUnimplemented)
		assert.NotContains(t, err.Error(), "waited")
		require.NotErrorIs(t, err, fs.ErrNotExist)
	})
	synctest.Test(t, func(t *testing.T) {
		home := newDomain(t, "example.org")
		response := home.response(t, home.SVID("/web"))
		response.FederatedBundles[otherName] = nil
		streams := make(feed)
		s := source(t, workloadapi.Config{}, streams.serve)
		streams.send(response)
		_, err := now(t, s, otherName)
		require.ErrorIs(t, err, spiffe.ErrNoAuthority)
		require.False(t, errors.Is(err, fs.ErrNotExist))
	})
	// Bundles alone have no identity, and so no root of its own.
	synctest.Test(t, func(t *testing.T) {
		home := newDomain(t, "example.org")
		s := source(t, workloadapi.Config{BundlesOnly: true}, func(c *call) {
			c.send(&wire.X509BundlesResponse{Bundles: map[string][]byte{home.key(): home.roots()}})
			c.wait()
		})
		require.NoError(t, s.Ready(t.Context()))
		gone(t, s, "default", "ROOTCA", webName)
		isRoots(t, s, homeName, home)
	})
}
