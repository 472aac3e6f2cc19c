package jwt_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// Uses of 1 is once: as long as the signature and the times of an assertion would do, the leeway for clocks that differ included, and however many
// assertions of others come and go meanwhile.
func TestOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		once, issuer := newClients(t, func(o *jwt.ClientOptions) { o.Uses = 1 })
		_, bundle := mint(t)
		often := must.Get(jwt.Client(jwt.ClientOptions{Issuer: asURL, Bundles: bundle, Clients: registered, Uses: 1000}))(t)
		issue := func(n int) string {
			token := must.Get(issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID(webID), Audience: []string{asURL}, Claims: map[string]any{"jti": fmt.Sprint(n)}}))(t)
			return token
		}
		token := issue(0)
		require.NoError(t, must.Err(once.Authenticate(asserts(t, token))))
		good := 0
		for n := 1; n <= 100; n++ { // 500 s, and the assertion is good for 300
			if _, err := often.Authenticate(asserts(t, token)); err == nil {
				good++
				_, err = once.Authenticate(asserts(t, token))
				require.ErrorIs(t, err, authn.ErrRefused, "after %d s", 5*(n-1))
				require.ErrorContains(t, err, "at most 1 are accepted")
			}
			require.NoError(t, must.Err(once.Authenticate(asserts(t, issue(n)))))
			time.Sleep(5 * time.Second)
		}
		require.Greater(t, good, 60, "the leeway")
		require.Less(t, good, 100)
	})
}

// An assertion may end an hour ahead, and no second more.
func TestLifetimeOfAssertion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, issuer := newClients(t)
		for life, ok := range map[time.Duration]bool{time.Second: true, time.Hour: true, time.Hour + time.Second: false} {
			token, err := issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID(webID), Audience: []string{asURL}, Lifetime: life})
			require.NoError(t, err)
			_, err = a.Authenticate(asserts(t, token))
			require.Equal(t, ok, err == nil, "%v: %v", life, err)
		}
	})
}
