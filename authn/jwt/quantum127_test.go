//go:build go1.27

package jwt_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/pki"
)

// TestQuantum: the key set of an issuer may have keys of ML-DSA beside others. They verify no token.
func TestQuantum(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	members, _ := jws.AppendKey(nil, key.Public())
	i := newIssuer()
	i.jwks = `{"keys":[{` + string(members) + `,"kid":"65","use":"sig"},` + jwk("p256", `,"kid":"p256"`) + `]}`
	a := newAuthenticator(t, i)
	must.Get(a.Authenticate(request(t, sign("p256", nil))))(t)
	for _, kid := range []string{"65", "p256", ""} {
		text := must.Get(must.Get(token.NewSigner(key, "", kid, "JWT"))(t).Token([]byte(mustJSON(claims(nil)))))(t)
		_, err := a.Authenticate(request(t, text))
		assert.ErrorIs(t, err, authn.ErrRefused, kid)
	}
}
