package caprogram

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/caclient"
	caclientistio "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	jwts "github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// oidc is an OpenID Connect issuer with TLS.
type oidc struct {
	*httptest.Server
	key *ecdsa.PrivateKey
}

func newOIDC(t testing.TB) *oidc {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	i := &oidc{key: key}
	i.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/.well-known/openid-configuration" {
			fmt.Fprintf(w, `{"issuer":%q,"jwks_uri":"%s/jwks"}`, i.URL, i.URL)
			return
		}
		members, _ := jws.AppendKey(nil, key.Public())
		fmt.Fprintf(w, `{"keys":[{%s,"kid":"1","use":"sig"}]}`, members)
	}))
	t.Cleanup(i.Close)
	return i
}

// sign returns a token.
func (i *oidc) sign(t testing.TB, aud, sub string, exp time.Time) string {
	t.Helper()
	s := must.Get(jwts.NewSigner(i.key, "", "1", "JWT"))(t)
	text := must.Get(s.Token(fmt.Appendf(nil, `{"iss":%q,"aud":[%q],"sub":%q,"exp":%d}`, i.URL, aud, sub, exp.Unix())))(t)
	return text
}

// pod returns a good token of a service account in the namespace demo.
func (i *oidc) pod(t testing.TB, aud, name string) string {
	return i.sign(t, aud, "system:serviceaccount:demo:"+name, time.Now().Add(time.Hour))
}

// forwardedHeader is what a gateway says of a client.
func forwardedHeader(value string) http.Header {
	return http.Header{"X-Forwarded-Client-Cert": {value}}
}

// asCaller asks Istio's API with whatever the caller has.
func asCaller(t testing.TB, s *server, c *http.Client, token string, header http.Header, ttl time.Duration) ([]*x509.Certificate, error) {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	client := must.Get(caclientistio.New(caclientistio.Options{Header: header, Endpoint: caclient.Endpoint{
		URL: "https://" + s.at.Istio.Addr().String(), HTTPClient: c, TrustDomain: s.c.CA.TrustDomain,
		Token: func(context.Context) (string, error) { return token, nil },
	}}))(t)
	return client.Sign(t.Context(), csr, ttl)
}

// TestCallers has all methods in one server, each with its own callers, over TLS: certificates, an issuer, the API
// server of a cluster, a gateway, and the issuer of the server's own token.
func TestCallers(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-5.1-5", "IST-3.2-20", "IST-3.2-22", "IST-3.2-23")
	east, own := newOIDC(t), newOIDC(t)
	dir := t.TempDir()
	roots, ownToken := filepath.Join(dir, "roots.pem"), filepath.Join(dir, "own-token")
	var trusted []byte
	for _, i := range []*oidc{east, own} {
		trusted = append(trusted, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.Certificate().Raw})...)
	}
	require.NoError(t, os.WriteFile(roots, trusted, 0o600))
	require.NoError(t, os.WriteFile(ownToken, []byte(own.pod(t, "own-audience", "istiod")+"\n"), 0o600))
	k, args := cluster(t)
	both := east.pod(t, "istio-ca", "east") // proves one account to the issuer's authenticator and another to the cluster's
	k.TokenReviews(reviews(map[string]string{"token-web": "web", "token-db": "db", both: "reviewed"}))
	var log lockedBuffer
	s, stop := startLogged(t, newConfig(t, filepath.Join(dir, "state"), append(args,
		"-jwt-rule", `{"issuer":"`+east.URL+`","audiences":["istio-ca"]}`, "-jwt-roots", roots, "-own-token", ownToken,
		"-trusted-gateway-cidr", "192.0.2.0/24", "-default-ttl", "2h", "-jwt-policy", "first-party-jwt",
	)...), &log)
	plain := newClient(s.ca.Bundle(), nil)
	t.Cleanup(plain.CloseIdleConnections)
	certified := func(name string) *http.Client {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		chain, _, err := istioRequest(t.Context(), plain, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, east.pod(t, "istio-ca", name), key)
		require.NoError(t, err)
		c := newClient(s.ca.Bundle(), mustSVID(t, chain, key))
		t.Cleanup(c.CloseIdleConnections)
		return c
	}
	vm, gateway := certified("vm"), certified("gateway")
	stranger := spiffetest.NewCA(t, "cluster.local").SVID("/ns/demo/sa/web")
	strange := newClient(s.ca.Bundle(), stranger)
	t.Cleanup(strange.CloseIdleConnections)

	const uri = "URI=spiffe://cluster.local/ns/demo/sa/behind"
	methods := map[string]string{} // by serial number
	for name, c := range map[string]struct {
		client       *http.Client
		token        string
		header       http.Header
		want, method string
	}{
		"certificate":                           {vm, "", nil, "vm", "client-certificate"},
		"token of the issuer":                   {plain, east.pod(t, "istio-ca", "east"), nil, "east", "jwt"},
		"token of the cluster":                  {plain, "token-web", nil, "web", "kubernetes-token"},
		"gateway":                               {plain, "", forwardedHeader(uri), "behind", "forwarded-certificate"},
		"token of our issuer":                   {plain, own.pod(t, "own-audience", "own"), nil, "own", "jwt"},
		"the certificate first":                 {vm, east.pod(t, "istio-ca", "east"), nil, "vm", "client-certificate"},
		"the issuer before the cluster":         {plain, both, nil, "east", "jwt"},
		"the cluster before the gateway":        {plain, "token-web", forwardedHeader(uri), "web", "kubernetes-token"},
		"a token before the gateway":            {plain, east.pod(t, "istio-ca", "east"), forwardedHeader(uri), "east", "jwt"},
		"the gateway before our issuer":         {plain, own.pod(t, "own-audience", "own"), forwardedHeader(uri), "behind", "forwarded-certificate"},
		"a gateway that names no SPIFFE ID":     {plain, own.pod(t, "own-audience", "own"), forwardedHeader("DNS=web.demo.svc"), "own", "jwt"},
		"a bad certificate":                     {strange, "token-db", nil, "db", "kubernetes-token"},
		"gateway with a certificate of its own": {gateway, "", forwardedHeader("URI=spiffe://cluster.local/ns/demo/sa/admin," + uri), "behind", "forwarded-certificate"},
	} {
		chain := must.Get(asCaller(t, s, c.client, c.token, c.header, 0))(t, name)
		require.Len(t, chain[0].URIs, 1)
		assert.Equal(t, "spiffe://cluster.local/ns/demo/sa/"+c.want, chain[0].URIs[0].String(), name)
		assert.Empty(t, chain[0].DNSNames)
		methods[chain[0].SerialNumber.Text(16)] = c.method
	}
	// A certificate alone proves for -default-ttl, whichever way it comes. A token proves for more.
	for name, c := range map[string]struct {
		client *http.Client
		token  string
		header http.Header
		want   time.Duration
	}{
		"certificate": {vm, "", nil, 2 * time.Hour}, "gateway": {plain, "", forwardedHeader(uri), 2 * time.Hour}, "token": {plain, "token-web", nil, 24 * time.Hour},
	} {
		chain := must.Get(asCaller(t, s, c.client, c.token, c.header, 24*time.Hour))(t, name)
		assert.WithinDuration(t, time.Now().Add(c.want), chain[0].NotAfter, time.Minute, name)
	}

	late := time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		client *http.Client
		token  string
		header http.Header
	}{
		"nothing":               {plain, "", nil},
		"a strange certificate": {strange, "", nil},
		"expired":               {plain, east.sign(t, "istio-ca", "system:serviceaccount:demo:web", time.Now().Add(-time.Hour)), nil},
		"other audience":        {plain, east.pod(t, "own-audience", "web"), nil},
		"other audience of own": {plain, own.pod(t, "istio-ca", "web"), nil},
		"no account":            {plain, east.sign(t, "istio-ca", "demo:web", late), nil},
		"three parts":           {plain, east.sign(t, "istio-ca", "system:serviceaccount:demo", late), nil},
		"forged":                {plain, (&oidc{east.Server, own.key}).pod(t, "istio-ca", "web"), nil},
		"other issuer":          {plain, newOIDC(t).pod(t, "istio-ca", "web"), nil},
		"unknown":               {plain, "token-other", nil},
		"malformed header":      {plain, "", forwardedHeader(uri + `;Subject="`)},
		"other trust domain":    {plain, "", forwardedHeader("URI=spiffe://evil.test/ns/demo/sa/web")},
		"two IDs":               {plain, "", forwardedHeader(uri + ";URI=spiffe://cluster.local/x")},
		"no SPIFFE ID":          {plain, "", forwardedHeader(`Subject="CN=web";DNS=web.demo.svc`)},
		"a gateway's own certificate behind a bad header": {gateway, "", forwardedHeader("x")},
	} {
		_, err := asCaller(t, s, c.client, c.token, c.header, 0)
		e, ok := errors.AsType[*caclient.Error](err)
		require.True(t, ok, "%s: %v", name, err)
		require.Equal(t, caclient.ErrUnauthenticated, e.Kind, "%s: %v", name, err)
		assert.Contains(t, err.Error(), "request authenticate failure", name)
		for _, secret := range []string{"issuer", "token:", "forwarded", "SPIFFE"} {
			assert.NotContains(t, err.Error(), secret, "the client is not told why")
		}
	}
	stop()
	for serial, i := range audited(t, s.c) {
		if method := methods[serial]; method != "" {
			assert.Equal(t, method, i.Method)
			assert.Equal(t, i.ID.String(), i.Caller)
			delete(methods, serial)
		}
	}
	assert.Empty(t, methods)
	// The first refusal of a reason is there with each method's answer and the peer; the others are a number.
	var refused []string
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "certificate refused") {
			refused = append(refused, line)
		}
	}
	require.NotEmpty(t, refused)
	require.LessOrEqual(t, len(refused), 2, "%q", refused)
	assert.Regexp(t, `peer=127\.0\.0\.1:\d+ code=unauthenticated err="(.*; ){4}.*"`, refused[0])
	assert.Contains(t, log.String(), "first-party-jwt is treated as third-party-jwt")
}

// A tainted root proves nothing, and what a gateway says does not tell by which root.
func TestGatewayAfterTaint(t *testing.T) {
	t.Parallel()
	s, _ := start(t, newConfig(t, t.TempDir(), "-trusted-gateway-cidr", "192.0.2.0/24", "-refresh-hint", "1s", "-propagation", "8s"))
	plain := newClient(s.ca.Bundle(), nil)
	t.Cleanup(plain.CloseIdleConnections)
	header := forwardedHeader("URI=spiffe://cluster.local/ns/demo/sa/behind")
	must.Get(asCaller(t, s, plain, "", header, 0))(t)
	require.NoError(t, s.ca.Own.Taint(t.Context(), s.ca.Own.Status().Roots[0].ID))
	require.ErrorIs(t, must.Err(asCaller(t, s, plain, "", header, 0)), caclient.ErrUnauthenticated)
	must.Get(asCaller(t, s, plain, token(t, s, "demo/web"), header, 0))(t, "a clean proof")
}

// TestClientRoots: certificates of another CA prove callers, whose IDs are of the trust domain, and nothing else.
func TestClientRoots(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	other, third := spiffetest.NewCA(t, "cluster.local"), spiffetest.NewCA(t, "cluster.local")
	dir := t.TempDir()
	roots := filepath.Join(dir, "roots.pem")
	require.NoError(t, os.WriteFile(roots, pki.MarshalCertificatesPEM(other.Root()), 0o600))
	_, args := cluster(t)
	s, _ := start(t, newConfig(t, filepath.Join(dir, "state"), append(args, "-client-roots", roots)...))
	ask := func(ca *spiffetest.CA, header http.Header) (string, error) {
		c := newClient(s.ca.Bundle(), ca.SVID("/ns/demo/sa/web"))
		t.Cleanup(c.CloseIdleConnections)
		chain, err := asCaller(t, s, c, "", header, 0)
		if err != nil {
			return "", err
		}
		id, err := spiffe.IDFromCertificate(chain[0])
		return id.String(), err
	}
	assert.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", must.Get(ask(other, nil))(t))
	require.ErrorIs(t, must.Err(ask(third, nil)), caclient.ErrUnauthenticated)
	_, err := ask(other, forwardedHeader("URI=spiffe://cluster.local/ns/demo/sa/web"))
	require.ErrorIs(t, err, caclient.ErrUnauthenticated, "a client of a proxy must not get the certificate of the proxy")
	for _, c := range s.ca.Bundle().Contents().X509Authorities {
		assert.False(t, c.Equal(other.Root()), "peers do not trust it")
	}

	o, err := alone.parse(append(args, "-state-dir", filepath.Join(dir, "other"), "-create", "-client-roots", filepath.Join(dir, "none")), env{}.get, io.Discard)
	require.NoError(t, err)
	require.ErrorContains(t, o.Serve(t.Context(), nil, nil), "-client-roots")
}

// A CA outside of Kubernetes whose callers have tokens of an issuer: it is no development mode.
func TestIssuerWithoutKubernetes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	i := newOIDC(t)
	dir := t.TempDir()
	roots := filepath.Join(dir, "roots.pem")
	require.NoError(t, os.WriteFile(roots, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.Certificate().Raw}), 0o600))
	environment := env{"JWT_RULE": `{"issuer":"` + i.URL + `","jwksUri":"` + i.URL + `/jwks","audiences":["ca"]}`, "TRUST_DOMAIN": "example.org"}
	args := []string{"-state-dir", filepath.Join(dir, "state"), "-create", "-jwt-roots", roots, "-istio-addr", "127.0.0.1:0", "-bundle-addr", "", "-admin-addr", ""}
	o := must.Get(alone.parse(args, environment.get, io.Discard))(t)
	s, _ := start(t, o.Config)
	assert.Nil(t, s.at.Linkerd)
	assert.NoFileExists(t, o.SecretFile)
	var out strings.Builder
	announce(&out, s.c, s.ca, s.at)
	assert.NotContains(t, out.String(), "DEVELOPMENT")
	c := newClient(s.ca.Bundle(), nil)
	t.Cleanup(c.CloseIdleConnections)
	chain := must.Get(asCaller(t, s, c, i.pod(t, "ca", "web"), nil, 48*time.Hour))(t)
	id := must.Get(spiffe.IDFromCertificate(chain[0]))(t)
	assert.Equal(t, "spiffe://example.org/ns/demo/sa/web", id.String())
	assert.WithinDuration(t, time.Now().Add(48*time.Hour), chain[0].NotAfter, time.Minute)
	require.ErrorIs(t, must.Err(asCaller(t, s, c, "x:demo/web", nil, 0)), caclient.ErrUnauthenticated)

	i.Close() // the keys that are known count on
	must.Get(asCaller(t, s, c, i.pod(t, "ca", "web"), nil, 0))(t)
	o = must.Get(alone.parse(append(args, "-state-dir", filepath.Join(dir, "other")), environment.get, io.Discard))(t)
	later, _ := start(t, o.Config)
	c = newClient(later.ca.Bundle(), nil)
	t.Cleanup(c.CloseIdleConnections)
	_, err := asCaller(t, later, c, i.pod(t, "ca", "web"), nil, 0)
	require.Error(t, err, "a server that starts meanwhile says to come back")
	require.NotErrorIs(t, err, caclient.ErrUnauthenticated)

	for flag, bad := range map[string]env{
		"-jwt-rule":             {"JWT_RULE": `{"issuer":"` + i.URL + `","audiences":[]}`},
		"-trusted-gateway-cidr": {"TRUSTED_GATEWAY_CIDR": "0.0.0.0/0"},
	} {
		require.ErrorContains(t, must.Err(alone.parse(args, bad.get, io.Discard)), flag)
	}
	for _, flag := range []string{"-own-token", "-jwt-roots"} { // which Serve reads
		o, err := alone.parse(append(args, "-state-dir", filepath.Join(dir, flag), flag, filepath.Join(dir, "none")), environment.get, io.Discard)
		require.NoError(t, err)
		require.ErrorContains(t, o.Serve(t.Context(), nil, nil), flag)
	}
}

// webSite returns a certificate for a website and its key, in PEM.
func webSite(t *testing.T, ca *spiffetest.CA, name string) (cert, key []byte) {
	t.Helper()
	chain, signer := ca.Certificate("/web", func(c *x509.Certificate) { c.DNSNames = []string{name} })
	key = must.Get(pki.MarshalPrivateKeyPEM(signer))(t)
	for _, c := range chain {
		cert = append(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return cert, key
}

// A CA with -oidc-issuer signs tokens that a verifier of OpenID Connect takes, which knows nothing but the URL of the issuer: the
// documents come from -oidc-addr with the certificate in files, which are followed.
func TestOIDC(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	site := spiffetest.NewCA(t, "websites.test")
	replace := func(name string) {
		cert, key := webSite(t, site, name)
		require.NoError(t, os.WriteFile(keyFile, key, 0o600))
		require.NoError(t, os.WriteFile(certFile, cert, 0o600))
	}
	replace("oidc.example.org")
	state := filepath.Join(dir, "state")
	const issuer = "https://oidc.example.org/prod"
	flags := []string{"-oidc-issuer", issuer, "-jwt-algorithm", "RS256"}
	s, _ := start(t, newConfig(t, state, append(flags, "-oidc-addr", "127.0.0.1:0", "-oidc-cert", certFile, "-oidc-key", keyFile)...))

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(site.Bundle().MarshalPEM())
	client := &http.Client{Transport: &http.Transport{ // for which the name leads to the server, as DNS would have it
		TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, map[string]string{"oidc.example.org:443": s.ca.OIDC.Addr().String()}[addr])
		},
	}}
	verifier, err := jwt.New(jwt.Options{Issuer: issuer, Audiences: []string{"bank"}, HTTPClient: client, Caller: func(c *jwt.Claims) (*authn.Caller, error) {
		id, err := spiffe.ParseID(c.Subject)
		return &authn.Caller{ID: id}, err
	}})
	require.NoError(t, err)
	present := func(audience string) (*authn.Caller, error) {
		token, err := shell(t, "", append([]string{"-jwt", audience, "-id", "spiffe://cluster.local/ns/demo/sa/web"}, arguments(state, flags...)...)...)
		require.NoError(t, err)
		r := httptest.NewRequest("GET", "https://bank.test/", nil)
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(token))
		return verifier.Authenticate(r)
	}
	assert.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", must.Get(present("bank"))(t).ID.String())
	require.ErrorIs(t, must.Err(present("other")), authn.ErrRefused)

	for path, want := range map[string]int{
		"/prod/.well-known/openid-configuration": 200, "/prod/keys": 200, "/": 404, "/metrics": 404, "/root-cert.pem": 404, "/prod/status": 404,
	} {
		resp := must.Get(client.Get("https://oidc.example.org" + path))(t)
		must.Get(io.Copy(io.Discard, resp.Body))(t)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, want, resp.StatusCode, path)
	}

	// The certificate is replaced, and presented without a restart.
	replace("new.example.org")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		conn := must.Get(tls.Dial("tcp", s.ca.OIDC.Addr().String(), &tls.Config{RootCAs: roots, ServerName: "new.example.org"}))(c)
		_ = conn.Close()
	}, time.Minute, 50*time.Millisecond)
}

// Without files the CA's own certificate is presented, which a proxy in front can verify; without an issuer there is no "iss".
func TestOIDCBehindProxy(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, _ := start(t, newConfig(t, dir, "-oidc-issuer", "https://oidc.example.org", "-oidc-addr", "127.0.0.1:0"))
	verifier := must.Get(spiffe.NewVerifier(s.ca.Bundle(), spiffe.AllowIDs(s.c.ServerID), nil))(t)
	conn, err := tls.Dial("tcp", s.ca.OIDC.Addr().String(), &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(state tls.ConnectionState) error { // as the ID is checked
		return must.Err(verifier.VerifyChain(state.PeerCertificates, spiffe.ServerRole))
	}})
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	token, err := shell(t, "", append([]string{"-jwt", "bank", "-id", "spiffe://cluster.local/web"}, arguments(dir)...)...)
	require.NoError(t, err)
	assert.NotContains(t, claimsOf(t, token), "iss")
	token, err = shell(t, "", append([]string{"-jwt", "bank", "-id", "spiffe://cluster.local/web", "-oidc-issuer", "https://oidc.example.org"}, arguments(dir)...)...)
	require.NoError(t, err)
	assert.Contains(t, claimsOf(t, token), `"iss":"https://oidc.example.org"`)
}

// claimsOf returns the claims of a token.
func claimsOf(t *testing.T, token string) string {
	t.Helper()
	return string(must.Get(base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1]))(t))
}
