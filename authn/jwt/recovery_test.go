package jwt_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
)

// Once an issuer is back its outage is forgotten: a key that it does not have is a reason to refuse again, and its next outage begins with short
// waits.
func TestIssuerIsBack(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		unknown := func() error {
			_, err := a.Authenticate(request(t, sign("other", map[string]any{"jti": time.Now().String()})))
			return err
		}
		away := errors.New("away")
		for range 3 {
			i.set(func(i *issuer) { i.err = away })
			for range 40 { // so that the waits grow to their longest
				err := unknown()
				require.ErrorIs(t, err, away)
				require.NotErrorIs(t, err, authn.ErrRefused)
				time.Sleep(10 * time.Second)
			}
			i.set(func(i *issuer) { i.err = nil })
			time.Sleep(30 * time.Second)
			err := unknown()
			require.ErrorIs(t, err, authn.ErrRefused)
			require.NotErrorIs(t, err, away)
			require.ErrorIs(t, unknown(), authn.ErrRefused, "without asking again")

			i.set(func(i *issuer) { i.err = away })
			time.Sleep(10 * time.Second)
			require.ErrorIs(t, unknown(), away)
			before := len(i.asked())
			time.Sleep(2 * time.Second)
			require.ErrorIs(t, unknown(), away)
			assert.Greater(t, len(i.asked()), before, "the first wait is of two seconds at most")
		}
	})
}
