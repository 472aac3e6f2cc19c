package peers_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

type doc = map[string]any

// signPolicy allows what our client does, and nothing else.
const signPolicy = `path "pki/sign/web" { capabilities = ["update"] }`

// newBao starts an OpenBao with the mount and the role of the documentation of package vault, whose root is new.
func newBao(t *testing.T) *peers.OpenBao {
	t.Helper()
	b := peers.NewOpenBao(t)
	mountPKI(t, b, "", "pki", true)
	return b
}

func mountPKI(t *testing.T, b *peers.OpenBao, namespace, mount string, root bool) {
	t.Helper()
	b.Do(t, namespace, http.MethodPost, "sys/mounts/"+mount, doc{"type": "pki", "config": doc{"max_lease_ttl": "100h"}}, nil)
	if root {
		b.Do(t, namespace, http.MethodPost, mount+"/root/generate/internal", doc{"common_name": "root", "key_type": "ec", "ttl": "90h"}, nil)
	}
	b.Do(t, namespace, http.MethodPost, mount+"/roles/web", doc{
		"require_cn": false, "key_type": "any", "max_ttl": "24h", "no_store": true, "allowed_uri_sans": webID.String(), "not_before_duration": "5s",
	}, nil)
}

// baoClient returns our client of it.
func baoClient(t *testing.T, b *peers.OpenBao, token string, edit ...func(*vault.Options)) caclient.CA {
	t.Helper()
	o := vault.Options{Role: "web", Endpoint: caclient.Endpoint{URL: b.URL, TrustDomain: domain, HTTPClient: &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: b.Roots()}},
	}}}
	if token != "" {
		o.Endpoint.Token = func(context.Context) (string, error) { return token, nil }
	}
	for _, e := range edit {
		e(&o)
	}
	inner := must.Get(vault.New(o))(t)
	return must.Get(caclient.New(inner, nil))(t)
}

// signBy has a CA sign for web.
func signBy(t *testing.T, ca caclient.CA, lifetime time.Duration) (*pki.Credential, error) {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
	chain, err := ca.Sign(t.Context(), csr, lifetime)
	if err != nil {
		return nil, err
	}
	return pki.NewCredential(chain, key)
}

// refusedAs requires a kind of refusal, and whether the call is worth repeating.
func refusedAs(t *testing.T, err, kind error, again bool, says string) {
	t.Helper()
	e, ok := errors.AsType[*caclient.Error](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, kind, e.Kind, "%v", err)
	_, retryable := e.Retryable()
	assert.Equal(t, again, retryable, "%v", err)
	assert.ErrorContains(t, err, says)
}

// TestOpenBao has our client ask a real OpenBao.
func TestOpenBao(t *testing.T) {
	t.Parallel()
	b := newBao(t)
	token := b.Token(t, signPolicy)
	ca := baoClient(t, b, token)
	got, err := signBy(t, ca, 10*time.Minute)
	require.NoError(t, err)
	assert.WithinDuration(t, time.Now().Add(10*time.Minute), got.NotAfter(), 30*time.Second)
	got = must.Get(signBy(t, ca, 48*time.Hour))(t)
	assert.WithinDuration(t, time.Now().Add(24*time.Hour), got.NotAfter(), time.Minute, "max_ttl of the role")

	// A token that is bad, missing or ended is another thing than one whose policies do not allow the call.
	for name, bad := range map[string]string{"bad": "hvs.bad", "missing": ""} {
		_, err = signBy(t, baoClient(t, b, bad), 0)
		refusedAs(t, err, caclient.ErrUnauthenticated, false, "permission denied")
		assert.Error(t, err, name)
	}
	_, err = signBy(t, baoClient(t, b, b.Token(t, `path "other" { capabilities = ["read"] }`)), 0)
	refusedAs(t, err, caclient.ErrDenied, false, "permission denied")
	_, err = signBy(t, baoClient(t, b, "root", func(o *vault.Options) { o.Role = "none" }), 0)
	refusedAs(t, err, caclient.ErrInvalid, false, "unknown role")

	// A mount without an issuer may get one: of both calls alike.
	mountPKI(t, b, "", "empty", false)
	empty := baoClient(t, b, "root", func(o *vault.Options) { o.Mount = "empty" })
	_, err = signBy(t, empty, 0)
	refusedAs(t, err, caclient.ErrUnavailable, true, "issuer")
	_, err = empty.FetchBundles(t.Context())
	refusedAs(t, err, caclient.ErrUnavailable, true, "make a root in it")

	// A second root, and a namespace of its own.
	set := must.Get(ca.FetchBundles(t.Context()))(t)
	before := must.Get(set.Bundle(domain))(t)
	b.Do(t, "", http.MethodPost, "pki/root/generate/internal", doc{"common_name": "next", "key_type": "ec", "ttl": "90h"}, nil)
	set = must.Get(baoClient(t, b, token).FetchBundles(t.Context()))(t)
	after := must.Get(set.Bundle(domain))(t)
	assert.Equal(t, []int{1, 2}, []int{count(before.X509Authorities()), count(after.X509Authorities())})
	b.Do(t, "", http.MethodPost, "sys/namespaces/team", doc{}, nil)
	mountPKI(t, b, "team", "pki", true)
	must.Get(signBy(t, baoClient(t, b, "root", func(o *vault.Options) { o.Namespace = "team" }), 0))(t)
}

func count[V any](all func(func(V) bool)) (n int) {
	all(func(V) bool { n++; return true })
	return n
}

// TestOpenBaoJWTLogin logs in with JWT-SVIDs of our CA, by the method jwt.
func TestOpenBaoJWTLogin(t *testing.T) {
	t.Parallel()
	b := newBao(t)
	b.Policy(t, "sign", signPolicy)
	ours := func() (a *ca.Authority, public string) {
		a = must.Get(ca.New(ca.Config{TrustDomain: domain, JWT: &ca.JWTConfig{}}))(t)
		for _, key := range a.Bundle().JWTAuthorities() {
			der := must.Get(x509.MarshalPKIXPublicKey(key))(t)
			public = string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
		}
		return a, public
	}
	authority, public := ours()
	foreign, _ := ours()
	b.Do(t, "", http.MethodPost, "sys/auth/jwt", doc{"type": "jwt"}, nil)
	b.Do(t, "", http.MethodPost, "auth/jwt/config", doc{"jwt_validation_pubkeys": []string{public}}, nil)
	b.Do(t, "", http.MethodPost, "auth/jwt/role/web", doc{
		"role_type": "jwt", "bound_audiences": "openbao", "user_claim": "sub", "bound_subject": webID.String(), "token_policies": "sign",
		"clock_skew_leeway": -1, "expiration_leeway": -1,
	}, nil)
	login := func(token string) error {
		t.Helper()
		_, err := signBy(t, baoClient(t, b, token, func(o *vault.Options) { o.LoginRole, o.LoginMount = "web", "jwt" }), 0)
		return err
	}
	sign := func(a *ca.Authority, id spiffe.ID, audience string, ttl time.Duration) string {
		t.Helper()
		token := must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: id, Audience: []string{audience}, TTL: ttl}))(t)
		return token
	}
	require.NoError(t, login(sign(authority, webID, "openbao", time.Minute)))
	other := spiffe.MustParseID("spiffe://" + domain.String() + "/ns/prod/sa/other")
	brief := sign(authority, webID, "openbao", time.Second)
	time.Sleep(2 * time.Second)
	for name, token := range map[string]string{
		"audience": sign(authority, webID, "vault", time.Minute), "subject": sign(authority, other, "openbao", time.Minute),
		"key": sign(foreign, webID, "openbao", time.Minute), "end": brief, "form": "no.token.atall",
	} {
		err := login(token)
		t.Logf("%s: %v", name, err)
		refusedAs(t, err, caclient.ErrUnauthenticated, false, "")
		assert.NotContains(t, err.Error(), token)
	}
}

// TestOpenBaoSealed renews certificates of 12 s while the OpenBao is sealed for four of them.
func TestOpenBaoSealed(t *testing.T) {
	t.Parallel()
	b := newBao(t)
	m, err := secretcache.Start(t.Context(), secretcache.Config{ID: webID, CA: baoClient(t, b, b.Token(t, signPolicy)), Lifetime: 12 * time.Second})
	require.NoError(t, err)
	defer m.Close()
	serials := map[string]bool{}
	look := func() {
		svid := must.Get(m.SVID())(t)
		require.True(t, time.Now().Before(svid.NotAfter()), "it has expired")
		serials[svid.Leaf().SerialNumber.String()] = true
	}
	began := time.Now()
	sealed := false
	for time.Since(began) < 26*time.Second {
		look()
		switch since := time.Since(began); {
		case !sealed && since > 5*time.Second && since < 9*time.Second:
			b.Seal(t)
			sealed = true
		case sealed && since >= 9*time.Second:
			b.Unseal(t)
			sealed = false
		}
		time.Sleep(50 * time.Millisecond)
	}
	assert.GreaterOrEqual(t, len(serials), 3)
	assert.FileExists(t, b.RootsFile)
}

// testOpenBaoLogin logs in with the token of a service account, which OpenBao has the API server review; and by the method jwt,
// with the keys of the API server.
func testOpenBaoLogin(t *testing.T, c *cluster) {
	const namespace = "bao"
	b := newBao(t)
	for _, account := range []string{"web", "db", "reviewer"} {
		c.Account(t, namespace, account)
	}
	grant(t, c.Cluster, namespace, "reviewer", "ClusterRole", documented(t, "authn/kube"))
	roots := must.Get(os.ReadFile(c.RootsFile()))(t)
	b.Policy(t, "sign", signPolicy)
	b.Do(t, "", http.MethodPost, "sys/auth/kubernetes", doc{"type": "kubernetes"}, nil)
	b.Do(t, "", http.MethodPost, "auth/kubernetes/config", doc{
		"kubernetes_host": c.URL, "kubernetes_ca_cert": string(roots), "token_reviewer_jwt": c.Token(t, namespace, "reviewer", "", peers.Issuer), "disable_local_ca_jwt": true,
	}, nil)
	b.Do(t, "", http.MethodPost, "auth/kubernetes/role/web", doc{
		"bound_service_account_names": "web", "bound_service_account_namespaces": namespace, "audience": peers.Issuer, "token_policies": "sign", "token_ttl": "10s",
	}, nil)
	login := func(account string) caclient.CA {
		return baoClient(t, b, c.Token(t, namespace, account, "", peers.Issuer), func(o *vault.Options) { o.LoginRole = "web" })
	}
	web := login("web")
	for range 2 {
		must.Get(signBy(t, web, 0))(t)
	}
	_, err := signBy(t, login("db"), 0)
	refusedAs(t, err, caclient.ErrUnauthenticated, false, "not authorized")

	// The custodian of a CA logs in the same way.
	mountTransit(t, b, "")
	b.Policy(t, "sign", signPolicy+"\n"+transitPolicy(t))
	custodian := newTransit(t, b, c.Token(t, namespace, "web", "", peers.Issuer), func(o *vault.TransitOptions) { o.LoginRole = "web" })
	lasts(t, custodian, 11*time.Second)
	time.Sleep(11 * time.Second)
	must.Get(signBy(t, web, 0))(t, "the token of the login has ended")
}
