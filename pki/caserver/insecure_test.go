package caserver_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
)

func TestInsecureTokens(t *testing.T) {
	t.Parallel()
	tokens := caserver.InsecureTokens{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")}
	request := func(remote string) *http.Request {
		r := httptest.NewRequest(http.MethodPost, "https://localhost/", nil)
		r.RemoteAddr = remote
		r.Header.Set("Authorization", "Bearer demo/web")
		return r
	}
	for _, remote := range []string{"127.0.0.1:5", "[::1]:5", "127.9.9.9:5"} {
		caller, err := tokens.Authenticate(request(remote))
		require.NoError(t, err, remote)
		require.Equal(t, "developer", caller.Method)
		require.Equal(t, &authn.Pod{Namespace: "demo", ServiceAccount: "web"}, caller.Pod)
	}
	for _, remote := range []string{"192.0.2.1:5", "[2001:db8::1]:5", "", "@", "127.0.0.1", "localhost:5"} {
		_, err := tokens.Authenticate(request(remote))
		require.ErrorIs(t, err, authn.ErrRefused, remote)
	}
	r := request("127.0.0.1:5")
	r.Header.Del("Authorization")
	_, err := tokens.Authenticate(r)
	require.ErrorIs(t, err, authn.ErrNoCredential)
	r = request("127.0.0.1:5")
	r.Header.Set("Authorization", "Bearer eyJhbGciOiJIUzI1NiJ9.secret.secret")
	_, err = tokens.Authenticate(r)
	require.ErrorIs(t, err, authn.ErrRefused)
	require.NotContains(t, err.Error(), "secret", "a real token that was sent by mistake is in no log")
}

func TestInsecureTokensReview(t *testing.T) {
	t.Parallel()
	tokens := caserver.InsecureTokens{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")}
	for _, token := range []string{"demo/db", "demo/db\n", "spiffe://cluster.local/ns/demo/sa/db"} {
		account, err := tokens.Review(t.Context(), token, nil)
		require.NoError(t, err, token)
		assert.Equal(t, &kube.Account{Namespace: "demo", ServiceAccount: "db"}, account)
	}
	for _, token := range []string{"", "db", "demo/", "/db", "a/b/c", "spiffe://cluster.local/db", "spiffe://cluster.local", "spiffe://elsewhere.test/ns/demo/sa/db", "secret"} {
		_, err := tokens.Review(t.Context(), token, nil)
		require.ErrorIs(t, err, kube.ErrInvalidToken, token)
		assert.NotContains(t, err.Error(), "secret")
	}
}
