package jwt_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/testkey"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	issuerURL = "https://oidc.example.org"
	audience  = "istio-ca"
	subject   = "system:serviceaccount:prod:web"
	webID     = "spiffe://example.org/ns/prod/sa/web"
)

var td = spiffe.MustParseTrustDomain("example.org")

// Keys of the issuer, by their IDs.
var keys = sync.OnceValue(func() map[string]crypto.Signer {
	all := map[string]crypto.Signer{}
	for id, curve := range map[string]elliptic.Curve{"p256": elliptic.P256(), "other": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		key, err := ecdsa.GenerateKey(curve, rand.Reader)
		if err != nil {
			panic(err)
		}
		all[id] = key
	}
	all["rsa"] = testkey.RSA()
	return all
})

// issuer is an OpenID Connect issuer. It is the transport of a client, so that it needs no network.
type issuer struct {
	mu        sync.Mutex
	discovery string // in the place of the usual one
	jwks      string
	err       error
	wait      func(context.Context) error
	status    int
	header    http.Header
	gets      []string // paths, in order
}

func newIssuer(ids ...string) *issuer { return &issuer{jwks: keySet(ids...)} }

// set changes the issuer.
func (i *issuer) set(f func(*issuer)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f(i)
}

// asked returns the paths that were asked for, in order.
func (i *issuer) asked() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.gets)
}

// count returns how often the key set was asked for.
func (i *issuer) count() (n int) {
	for _, path := range i.asked() {
		if path == "/jwks" {
			n++
		}
	}
	return n
}

// RoundTrip implements [http.RoundTripper].
func (i *issuer) RoundTrip(r *http.Request) (*http.Response, error) {
	i.mu.Lock()
	i.gets = append(i.gets, r.URL.Path)
	wait, err, status, header := i.wait, i.err, cmp.Or(i.status, http.StatusOK), i.header
	body := i.jwks
	if r.URL.Path == "/.well-known/openid-configuration" {
		body = cmp.Or(i.discovery, fmt.Sprintf(`{"issuer":%q,"jwks_uri":"%s/jwks"}`, issuerURL, issuerURL))
	}
	i.mu.Unlock()
	if wait != nil {
		err = cmp.Or(wait(r.Context()), err)
	}
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Header: maps.Clone(header), Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

// keySet returns the document with the keys.
func keySet(ids ...string) string {
	var all []string
	for _, id := range ids {
		all = append(all, jwk(id, `,"kid":"`+id+`","use":"sig"`))
	}
	return `{"keys":[` + strings.Join(all, ",") + `]}`
}

// jwk returns a key with more members.
func jwk(id, more string) string {
	members, ok := jws.AppendKey(nil, keys()[id].Public())
	if !ok {
		panic(id)
	}
	return "{" + string(members) + more + "}"
}

func newAuthenticator(t testing.TB, i *issuer, edit ...func(*jwt.Options)) *jwt.Authenticator {
	t.Helper()
	o := jwt.Options{Issuer: issuerURL, Audiences: []string{audience}, TrustDomain: td, HTTPClient: &http.Client{Transport: i}}
	for _, e := range edit {
		e(&o)
	}
	a := must.Get(jwt.New(o))(t)
	return a
}

// claims are those of a good token, with changes: nil takes a claim out.
func claims(changes map[string]any) map[string]any {
	now := time.Now().Unix()
	all := map[string]any{"iss": issuerURL, "sub": subject, "aud": []string{audience}, "iat": now, "nbf": now, "exp": now + 3600}
	for name, value := range changes {
		if all[name] = value; value == nil {
			delete(all, name)
		}
	}
	return all
}

// sign returns a token that the key signs with its usual algorithm.
func sign(id string, changes map[string]any) string {
	payload, err := json.Marshal(claims(changes))
	if err != nil {
		panic(err)
	}
	return signRaw(id, "", id, "JWT", string(payload))
}

func signRaw(id, alg, kid, typ, payload string) string {
	s, err := token.NewSigner(keys()[id], alg, kid, typ)
	if err != nil {
		panic(err)
	}
	text, err := s.Token([]byte(payload))
	if err != nil {
		panic(err)
	}
	return text
}

// signHeader returns a token with any header.
func signHeader(header string, changes map[string]any) string {
	payload, err := json.Marshal(claims(changes))
	if err != nil {
		panic(err)
	}
	input := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString(payload)
	sum := sha256.Sum256([]byte(input))
	r, s, err := ecdsa.Sign(rand.Reader, keys()["p256"].(*ecdsa.PrivateKey), sum[:])
	if err != nil {
		panic(err)
	}
	sig := append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
	return input + "." + base64.RawURLEncoding.EncodeToString(sig)
}

// request is one that presents a token by TLS.
func request(t testing.TB, text string) *http.Request {
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "https://ca.example.org/", nil)
	if text != "" {
		r.Header.Set("Authorization", "Bearer "+text)
	}
	return r
}
