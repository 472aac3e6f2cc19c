package ca_test

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

func signJWT(t testing.TB, a *ca.Authority, ttl time.Duration) string {
	t.Helper()
	return must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}, TTL: ttl}))(t)
}

// validate returns the error of the service "db", which trusts bundle.
func validate(bundle *spiffe.Bundle, token string) error {
	v, err := jwtsvid.NewValidator(bundle, []string{"db"}, nil)
	if err != nil {
		return err
	}
	_, err = v.Validate(token)
	return err
}

func TestSignJWT(t *testing.T) {
	t.Parallel()
	all := []string{"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
	for _, alg := range all[:min(4*rounds.Of(1), 9)] { // making the others' keys takes long, and jwtsvid tests them all
		bubble.Run(t, alg, func(t *testing.T) {
			records := &auditor{}
			a := newAuthority(t, func(c *ca.Config) { c.JWT, c.Auditor = &ca.JWTConfig{Algorithm: alg}, records })
			assert.Equal(t, alg, a.Status().JWTKeys[0].Algorithm)
			time.Sleep(500 * time.Millisecond)
			token, err := a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}, TTL: 90*time.Second + 1, Caller: "me", Method: "test"})
			require.NoError(t, err)
			require.NoError(t, validate(a.Bundle(), token))
			unproven := must.Get(jwtsvid.ParseUnverified(token))(t)
			assert.Equal(t, web, unproven.ID)
			assert.Equal(t, time.Now().Truncate(time.Second).Add(90*time.Second).UTC(), unproven.Expires.UTC())
			require.Len(t, records.all, 1)
			r := records.all[0]
			assert.Regexp(t, `^[0-9a-f]{32}$`, r.Serial)
			assert.Regexp(t, `^[0-9a-f]{64}$`, r.Fingerprint)
			assert.Equal(t, &ca.Issuance{
				Time: time.Now().Round(0), Kind: "jwt-svid", Serial: r.Serial, ID: web, Audience: []string{"db"},
				NotBefore: time.Now().UTC().Truncate(time.Second), NotAfter: unproven.Expires.UTC(),
				Issuer: a.Status().JWTKeys[0].ID, Fingerprint: r.Fingerprint, Caller: "me", Method: "test",
			}, r)
			payload := must.Get(base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1]))(t)
			var claims struct{ JTI string }
			require.NoError(t, json.Unmarshal(payload, &claims))
			assert.Equal(t, r.Serial, claims.JTI)
			token2 := must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}}))(t)
			assert.NotEqual(t, token, token2)
			assert.Equal(t, web.String(), records.all[1].Caller, "the workload itself")
			assert.Equal(t, 5*time.Minute, records.all[1].NotAfter.Sub(records.all[1].NotBefore))
		})
	}
}

func TestSignJWTRefuses(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, withJWT)
	db := []string{"db"}
	for _, tt := range []struct {
		name string
		r    ca.JWTRequest
		kind error
		says string
	}{
		{"no identity", ca.JWTRequest{Audience: db}, ca.ErrIdentity, spiffe.ErrZero.Error()},
		{"another trust domain", ca.JWTRequest{ID: spiffe.MustParseID("spiffe://example.com/web"), Audience: db}, ca.ErrIdentity, "not in the trust domain"},
		{"the trust domain itself", ca.JWTRequest{ID: td.ID(), Audience: db}, ca.ErrIdentity, "no path"},
		{"no audience", ca.JWTRequest{ID: web}, ca.ErrIdentity, "say whom the token is for"},
		{"an empty audience", ca.JWTRequest{ID: web, Audience: []string{""}}, ca.ErrIdentity, "say whom the token is for"},
		{"two audiences", ca.JWTRequest{ID: web, Audience: []string{"a", "b"}}, ca.ErrIdentity, "2 audiences"},
		{"all of a trust domain", ca.JWTRequest{ID: web, Audience: []string{"spiffe://example.com"}}, ca.ErrGeneration, "is a whole trust domain"},
		{"too long", ca.JWTRequest{ID: web, Audience: db, TTL: time.Hour + 1}, ca.ErrTTL, "the longest is 1h0m0s"},
		{"too short", ca.JWTRequest{ID: web, Audience: db, TTL: time.Second - 1}, ca.ErrTTL, "the shortest is 1s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			token, err := a.SignJWT(t.Context(), tt.r)
			require.ErrorIs(t, err, tt.kind)
			assert.ErrorContains(t, err, tt.says)
			assert.Empty(t, token)
		})
	}
	_, err := newAuthority(t).SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: db})
	assert.ErrorIs(t, err, ca.ErrNoJWT)
}

// By this method an Authority is the issuer of a Workload API server.
func TestIssueJWTSVID(t *testing.T) {
	t.Parallel()
	records := &auditor{}
	a := newAuthority(t, withJWT, func(c *ca.Config) { c.Auditor = records })
	token := must.Get(a.IssueJWTSVID(t.Context(), web, []string{"db"}))(t)
	require.NoError(t, validate(a.Bundle(), token))
	require.Len(t, records.all, 1)
	assert.Equal(t, web.String(), records.all[0].Caller)
	_, err := newAuthority(t).IssueJWTSVID(t.Context(), web, []string{"db"})
	require.ErrorIs(t, err, ca.ErrNoJWT)
}
