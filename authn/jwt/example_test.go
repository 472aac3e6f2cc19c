package jwt_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/pki/ca"
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

// An authorization server whose clients have no secret, and one of them: its JWT-SVIDs are from a Workload API in a real program.
func ExampleClient() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), JWT: new(ca.JWTConfig)})
	if err != nil {
		panic(err)
	}
	web := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")

	// The server.
	const issuer = "https://as.example.org"
	registered := map[string]spiffe.Policy{"shop": spiffe.AllowIDs(web)}
	clients, err := jwt.Client(jwt.ClientOptions{
		Issuer: issuer, Bundles: authority.Bundle(), Clients: func(id string) spiffe.Policy { return registered[id] },
		AllowPlaintext: true, // as this example has no TLS
	})
	if err != nil {
		panic(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, 64<<10)
		if err := r.ParseForm(); err != nil {
			http.Error(w, `{"error":"invalid_request"}`, http.StatusBadRequest)
			return
		}
		caller, err := clients.Authenticate(r)
		if err != nil {
			http.Error(w, `{"error":"invalid_client"}`, http.StatusUnauthorized)
			return
		}
		fmt.Println("a token for", caller.Name, "which is", caller.ID)
		fmt.Fprint(w, `{"access_token":"t0ken","token_type":"Bearer","expires_in":300}`)
	}))
	defer server.Close()

	// A client.
	for _, id := range []string{"shop", "admin"} {
		tokens, err := tokensource.ClientCredentials(tokensource.ClientOptions{
			URL: server.URL, Issuer: issuer, ClientID: id, ClientAssertion: tokensource.SVID(workload{authority, web}, issuer),
		})
		if err != nil {
			panic(err)
		}
		_, err = tokens.Token(context.Background())
		refused, ok := errors.AsType[*tokensource.StatusError](err)
		if ok {
			fmt.Println("refused:", refused.Code)
		}
	}
	// Output:
	// a token for shop which is spiffe://example.org/ns/prod/sa/web
	// refused: invalid_client
}

// workload is a source of the JWT-SVIDs of one workload.
type workload struct {
	authority *ca.Authority
	id        spiffe.ID
}

func (w workload) Fetch(ctx context.Context, audience ...string) (string, error) {
	return w.authority.IssueJWTSVID(ctx, w.id, audience)
}
