package jwt_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// A server for the pods of another cluster, whose API server publishes the keys of its tokens.
func ExampleNew() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	cluster := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		members, _ := jws.AppendKey(nil, key.Public())
		fmt.Fprintf(w, `{"keys":[{%s,"kid":"1"}]}`, members)
	}))
	defer cluster.Close()

	a, err := jwt.New(jwt.Options{
		Issuer:      "https://kubernetes.default.svc.cluster.local",
		JWKSURL:     cluster.URL + "/openid/v1/jwks",
		Audiences:   []string{"istio-ca"},
		TrustDomain: spiffe.MustParseTrustDomain("example.org"),
		HTTPClient:  cluster.Client(), // which trusts the API server
	})
	if err != nil {
		panic(err)
	}
	handler := authn.Require(a, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, _ := authn.CallerFromContext(r.Context())
		fmt.Fprintln(w, "hello", caller.ID)
	}), slog.New(slog.DiscardHandler))

	pod, err := token.NewSigner(key, "", "1", "JWT") // the API server
	if err != nil {
		panic(err)
	}
	podToken, err := pod.Token(fmt.Appendf(nil, `{"iss":"https://kubernetes.default.svc.cluster.local","aud":["istio-ca"],"sub":"system:serviceaccount:prod:web","exp":%d}`,
		time.Now().Add(time.Hour).Unix()))
	if err != nil {
		panic(err)
	}
	for _, text := range []string{podToken, podToken[:len(podToken)-8]} {
		r := httptest.NewRequest(http.MethodGet, "https://server.example.org/", nil)
		r.Header.Set("Authorization", "Bearer "+text)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Print(w.Code, " ", w.Body)
	}
	// Output:
	// 200 hello spiffe://example.org/ns/prod/sa/web
	// 401 Unauthorized
}

// A server for workloads that have JWT-SVIDs.
func ExampleSVID() {
	td := spiffe.MustParseTrustDomain("example.org")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	bundle, err := spiffe.NewBundle(td, spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{"1": key.Public()}})
	if err != nil {
		panic(err)
	}
	v, err := jwtsvid.NewValidator(bundle, []string{"ca"}, nil)
	if err != nil {
		panic(err)
	}
	a, err := jwt.SVID(v, spiffe.AllowMembersOf(td))
	if err != nil {
		panic(err)
	}

	issuer, err := jwtsvid.NewIssuer(td, "1", key, nil)
	if err != nil {
		panic(err)
	}
	text, err := issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"ca"}})
	if err != nil {
		panic(err)
	}
	r := httptest.NewRequest(http.MethodGet, "https://server.example.org/", nil)
	r.Header.Set("Authorization", "Bearer "+text)
	caller, err := a.Authenticate(r)
	fmt.Println(caller, err)
	// Output: spiffe://example.org/web <nil>
}
