package federationtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
)

func fetch(t testing.TB, r federation.Relationship, endpoints ...*federationtest.Endpoint) (*spiffe.Bundle, error) {
	t.Helper()
	return federation.Fetch(t.Context(), r, &federation.Config{DialContext: federationtest.Dial(endpoints...)})
}

// start runs a manager for the endpoints until the test is over.
func start(t testing.TB, endpoints ...*federationtest.Endpoint) *federation.Manager {
	t.Helper()
	cfg := federation.Config{DialContext: federationtest.Dial(endpoints...)}
	for _, e := range endpoints {
		cfg.Relationships = append(cfg.Relationships, e.Relationship())
	}
	m := must.Get(federation.New(cfg))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return m
}

func TestSocket(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-1", "FED-23", "FED-24", "FED-33", "FED-50")
	ca := spiffetest.NewCA(t, "partner.test")
	var url string
	t.Run("endpoint", func(t *testing.T) {
		e := federationtest.NewEndpoint(t, ca)
		url = e.Relationship().URL
		assert.True(t, strings.HasPrefix(url, "https://127.0.0.1:"), url)
		assert.Equal(t, "federationtest.Endpoint("+url+")", fmt.Sprintf("%v", e))
		assert.Equal(t, "federationtest.Endpoint("+url+")", fmt.Sprintf("%#v", e))
		for _, r := range []federation.Relationship{e.Relationship(), web(e, ca)} {
			b := must.Get(federation.Fetch(t.Context(), r, nil))(t)
			assert.True(t, b.Equal(ca.Bundle()))
			b = must.Get(fetch(t, r, e))(t)
			assert.True(t, b.Equal(ca.Bundle()))
		}
		assert.Equal(t, 4, e.Requests())

		m := start(t, e)
		changed := m.Changed()
		if _, err := m.Bundle(ca.TrustDomain()); err != nil {
			<-changed
		}
		spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
			return m, []spiffe.TrustDomain{ca.TrustDomain()}
		})
	})
	_, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(url, "https://"), "/"))
	assert.Error(t, err, "the listener is closed")
}

// Two endpoints in memory, and an hour in no time: no rotation is missed.
func TestRotate(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-34", "FED-67")
	synctest.Test(t, func(t *testing.T) {
		a := federationtest.NewInMemory(t, spiffetest.NewCA(t, "a.test"))
		ca := spiffetest.NewCA(t, "b.test")
		b := federationtest.NewInMemory(t, ca)
		assert.Equal(t, "https://b.test/", b.Relationship().URL)
		assert.Equal(t, "spiffe://b.test/bundle-endpoint", b.Relationship().Profile.(federation.SPIFFE).EndpointID.String())
		m := start(t, a, b)
		for range 5 {
			time.Sleep(10 * time.Minute)
			have := must.Get(m.Bundle(ca.TrustDomain()))(t)
			assert.True(t, have.Equal(ca.Bundle()), "%v", m.Status())
			b.Rotate()
		}
		_, err := fetch(t, web(b, ca), b)
		assert.NoError(t, err)
		assert.Positive(t, a.Requests())
	})
}

// web returns the relationship of a consumer that knows the endpoint by its host name.
func web(e *federationtest.Endpoint, ca *spiffetest.CA) federation.Relationship {
	r := e.Relationship()
	r.Profile = federation.Web{Roots: ca.Bundle().CertPool()}
	return r
}

func TestExpireIn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "partner.test")
		e := federationtest.NewInMemory(t, ca)
		e.ExpireIn(time.Minute)
		r := e.Relationship()
		must.Get(fetch(t, r, e))(t)
		time.Sleep(2 * time.Minute)
		_, err := fetch(t, r, e)
		assert.ErrorContains(t, err, "expired")
		_, err = fetch(t, web(e, ca), e)
		assert.ErrorContains(t, err, "expired")
		e.Rotate()
		_, err = fetch(t, r, e)
		assert.NoError(t, err)
		e.ExpireIn(-time.Minute)
		_, err = fetch(t, e.Relationship(), e)
		assert.ErrorContains(t, err, "expired")
	})
}

// What a consumer makes of each position of the dial, and of the way back.
func TestDial(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-45")
	for name, c := range map[string]struct {
		turn func(*federationtest.Endpoint)
		says string
	}{
		"Deny":   {(*federationtest.Endpoint).Deny, "HTTP status 403"},
		"Hang":   {(*federationtest.Endpoint).Hang, "deadline exceeded"},
		"Garble": {(*federationtest.Endpoint).Garble, `"keys" is not an array`},
		"Drop":   {(*federationtest.Endpoint).Drop, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "partner.test")
				e := federationtest.NewInMemory(t, ca)
				m := start(t, e)
				time.Sleep(time.Minute)
				first := must.Get(m.Bundle(ca.TrustDomain()))(t)

				c.turn(e)
				e.Rotate() // the Manager does not see it
				time.Sleep(20 * time.Minute)
				have := must.Get(m.Bundle(ca.TrustDomain()))(t)
				assert.Same(t, first, have, "what was there stays")

				_, err := fetch(t, e.Relationship(), e)
				require.ErrorContains(t, err, `federation: bundle of "partner.test" from `)
				assert.ErrorContains(t, err, c.says)
				assert.NotContains(t, err.Error(), "not authenticated")
				assert.Equal(t, name == "Hang", errors.Is(err, context.DeadlineExceeded))

				e.Mend()
				time.Sleep(20 * time.Minute)
				have = must.Get(m.Bundle(ca.TrustDomain()))(t)
				assert.True(t, have.Equal(ca.Bundle()))
			})
		})
	}
}
