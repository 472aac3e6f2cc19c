package internal_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/examples/internal/devtoken"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
)

// newTokens returns tokens and their secret.
func newTokens(t testing.TB, td spiffe.TrustDomain) (tokens *devtoken.Tokens, secret string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token-secret")
	tokens = must.Get(devtoken.New(td, file))(t)
	return tokens, string(must.Get(os.ReadFile(file))(t))
}

func TestTokens(t *testing.T) {
	t.Parallel()
	tokens, secret := newTokens(t, spiffe.MustParseTrustDomain("cluster.local"))
	_, other := newTokens(t, spiffe.MustParseTrustDomain("cluster.local"))
	request := func(remote, token string) *http.Request {
		r := httptest.NewRequest(http.MethodPost, "https://localhost/", nil)
		r.RemoteAddr = remote
		r.Header.Set("Authorization", "Bearer "+token)
		return r
	}
	for _, remote := range []string{"127.0.0.1:5", "[::1]:5", "127.9.9.9:5", "[::ffff:127.0.0.1]:5"} {
		caller, err := tokens.Authenticate(request(remote, secret+":demo/web"))
		require.NoError(t, err, remote)
		require.Equal(t, "developer", caller.Method)
		require.Equal(t, &spiffe.Pod{Namespace: "demo", ServiceAccount: "web"}, caller.Pod)
	}
	caller, err := tokens.Authenticate(request("127.0.0.1:5", secret+":spiffe://cluster.local/web"))
	require.NoError(t, err)
	require.Equal(t, "spiffe://cluster.local/web", caller.ID.String())
	for name, id := range map[string]string{"demo/web": "spiffe://cluster.local/ns/demo/sa/web", "//cluster.local/web": "spiffe://cluster.local/web"} {
		token := secret + "." + name
		require.NotContains(t, token, ":", "RFC 6750 has no colon")
		require.Equal(t, id, must.Get(tokens.Authenticate(request("127.0.0.1:5", token)))(t).ID.String())
	}
	for _, remote := range []string{"192.0.2.1:5", "[2001:db8::1]:5", "", "@", "127.0.0.1", "localhost:5"} {
		_, err := tokens.Authenticate(request(remote, secret+":demo/web"))
		require.ErrorIs(t, err, authn.ErrRefused, remote)
	}
	for _, token := range []string{
		"demo/web", "spiffe://cluster.local/web", ":demo/web", other + ":demo/web", secret[1:] + ":demo/web", secret + "x:demo/web", "x" + secret + ":demo/web",
		strings.ToLower(secret) + ":demo/web", secret, secret + ":", secret + ":" + secret + ":demo/web", secret + "demo/web", secret + ":spiffe://elsewhere.test/web",
		secret + ".//elsewhere.test/web", secret + ".///web", secret + ".//cluster.local", secret + ".", secret + ".demo", other + ".demo/web", ".demo/web",
		secret + ":a/b/c", secret + ":../b", secret + ":/", secret + ":spiffe://cluster.local",
	} {
		_, err := tokens.Authenticate(request("127.0.0.1:5", token))
		require.ErrorIs(t, err, authn.ErrRefused, token)
		require.NotContains(t, err.Error(), secret)
		_, err = new(devtoken.Tokens).Authenticate(request("127.0.0.1:5", token))
		require.ErrorIs(t, err, authn.ErrRefused, token)
	}
	r := request("127.0.0.1:5", secret+":demo/web")
	r.Header.Del("Authorization")
	require.ErrorIs(t, must.Err(tokens.Authenticate(r)), authn.ErrNoCredential)
	_, err = tokens.Authenticate(request("127.0.0.1:5", "eyJhbGciOiJIUzI1NiJ9.secret.secret"))
	require.ErrorIs(t, err, authn.ErrRefused)
	require.NotContains(t, err.Error(), "secret.secret", "a real token that was sent by mistake is in no log")

	var logged strings.Builder
	slog.New(slog.NewJSONHandler(&logged, nil)).Info("x", "tokens", tokens)
	printed := must.Get(json.Marshal(map[string]any{"tokens": tokens}))(t)
	assert.NotContains(t, fmt.Sprintf("%v %+v %#v %s %s", tokens, tokens, *tokens, printed, &logged), secret)
}

// The secret outlives a restart.
func TestTokensAfterARestart(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "token-secret")
	td := spiffe.MustParseTrustDomain("cluster.local")
	must.Get(devtoken.New(td, name))(t)
	before := must.Get(os.ReadFile(name))(t)
	tokens := must.Get(devtoken.New(td, name))(t)
	after := must.Get(os.ReadFile(name))(t)
	require.Equal(t, string(before), string(after))
	r := httptest.NewRequest(http.MethodPost, "https://localhost/", nil)
	r.RemoteAddr = "127.0.0.1:5"
	r.Header.Set("Authorization", "Bearer "+string(before)+".demo/web")
	must.Get(tokens.Authenticate(r))(t)
	for _, cut := range []string{"", string(before[1:]), string(before) + "A"} { // by a crash, or by an editor
		require.NoError(t, os.WriteFile(name, []byte(cut), 0o600))
		must.Get(devtoken.New(td, name))(t)
		after = must.Get(os.ReadFile(name))(t)
		require.Len(t, after, len(before))
		require.NotContains(t, string(before), string(after))
	}
	if runtime.GOOS != "windows" { // others may have read it
		require.NoError(t, os.WriteFile(name, before, 0o600))
		require.NoError(t, os.Chmod(name, 0o644))
		must.Get(devtoken.New(td, name))(t)
		after = must.Get(os.ReadFile(name))(t)
		require.NotEqual(t, string(before), string(after))
	}
}

// The secret is in a file that others cannot read, whatever was there before.
func TestTokensFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	name, target := filepath.Join(dir, "token-secret"), filepath.Join(dir, "target")
	require.NoError(t, os.WriteFile(target, []byte("theirs"), 0o666))
	td := spiffe.MustParseTrustDomain("cluster.local")
	seen := map[string]bool{}
	for _, before := range []func() error{
		func() error { return nil },
		func() error { return os.WriteFile(name, []byte("old"), 0o666) },
		func() error { return os.Symlink(target, name) },
	} {
		_ = os.Remove(name)
		require.NoError(t, before())
		must.Get(devtoken.New(td, name))(t)
		info := must.Get(os.Lstat(name))(t)
		require.True(t, info.Mode().IsRegular())
		if runtime.GOOS != "windows" {
			require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		}
		text := must.Get(os.ReadFile(name))(t)
		require.GreaterOrEqual(t, len(text), 26, "130 bits")
		seen[string(text)] = true
	}
	require.Len(t, seen, 3)
	text, err := os.ReadFile(target)
	require.NoError(t, err)
	require.Equal(t, "theirs", string(text))
	_, err = devtoken.New(td, filepath.Join(dir, "none", "token-secret"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Linkerd's API knows the caller by the address that it has reached, and refuses a token where there is none.
func TestTokensReview(t *testing.T) {
	t.Parallel()
	tokens, secret := newTokens(t, spiffe.MustParseTrustDomain("cluster.local"))
	for _, ctx := range []context.Context{t.Context(), context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)})} {
		must.Fail(t, must.Err(tokens.Review(ctx, secret+":demo/db", nil)), kube.ErrInvalidToken, "not on this machine")
	}
	var account *spiffe.Pod
	var err error
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		account, err = tokens.Review(r.Context(), r.Header.Get("Token"), nil)
	})})
	client := caservertest.ALPNClient(t)
	review := func(token string) {
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+addr, nil))(t)
		req.Header.Set("Token", token)
		require.NoError(t, must.Get(client.Do(req))(t).Body.Close())
	}
	for _, token := range []string{secret + ":demo/db", secret + " :demo/db", secret + ":spiffe://cluster.local/ns/demo/sa/db"} {
		review(token)
		require.NoError(t, err, token)
		assert.Equal(t, &spiffe.Pod{Namespace: "demo", ServiceAccount: "db"}, account)
	}
	for _, name := range []string{"", "db", "demo/", "/db", "a/b/c", "spiffe://cluster.local/db", "spiffe://cluster.local", "spiffe://elsewhere.test/ns/demo/sa/db", "secret"} {
		review(secret + ":" + name)
		require.ErrorIs(t, err, kube.ErrInvalidToken, name)
		assert.NotContains(t, err.Error(), secret)
		review(name)
		require.ErrorIs(t, err, kube.ErrInvalidToken, name)
	}
}
