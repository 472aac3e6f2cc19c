package ca_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

func Example() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}

	// The workload makes a key and a request. Whatever it asks for, only the key counts.
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}

	// The caller has been authenticated; its ID goes into the request.
	web := spiffe.MustParseID("spiffe://example.org/web")
	chain, err := authority.Sign(context.Background(), ca.Request{CSR: csr, ID: web, TTL: time.Hour})
	if err != nil {
		panic(err)
	}

	// A peer verifies it with the authority's bundle.
	v, err := spiffe.NewVerifier(authority.Bundle(), spiffe.AllowIDs(web), nil)
	if err != nil {
		panic(err)
	}
	peer, err := v.VerifyChain(chain, spiffe.ClientRole)
	fmt.Println(peer, err)
	// Output: spiffe://example.org/web <nil>
}

// A CA that survives its process. The directory is the backup, too.
func ExampleOpen() {
	dir, err := os.MkdirTemp("", "example-ca")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	store, err := ca.NewDirStore(filepath.Join(dir, "ca"))
	if err != nil {
		panic(err)
	}
	cfg := ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Create: true}
	first, err := ca.Open(context.Background(), cfg, store)
	if err != nil {
		panic(err)
	}
	if _, err := first.Rotate(context.Background()); err != nil {
		panic(err)
	}

	// Later, or at the same time in another process.
	cfg.Create = false // what is not there now was there before
	second, err := ca.Open(context.Background(), cfg, store)
	if err != nil {
		panic(err)
	}
	fmt.Println("one CA:", first.Bundle().Equal(second.Bundle()))
	for _, r := range second.Roots() {
		fmt.Println(r.Phase)
	}
	// Output:
	// one CA: true
	// active
	// distributing
}

// The private key of the root may be in wrong hands.
func ExampleAuthority_Taint() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}
	bad := authority.Roots()[0].ID
	if err := authority.Taint(context.Background(), bad); err != nil {
		panic(err)
	}
	for _, r := range authority.Roots() {
		fmt.Println(r.Phase, r.Tainted)
	}
	_, err = authority.Revoke(context.Background(), bad, false)
	fmt.Println(errors.Is(err, ca.ErrActive))
	// Output:
	// active true
	// distributing false
	// true
}

// The bundle of an authority, with its roots and JWT keys, for other trust domains. Tokens that it
// signs are accepted by every verifier that has fetched it.
func ExampleAuthority_SignJWT() {
	td := spiffe.MustParseTrustDomain("example.org")
	authority, err := ca.New(ca.Config{TrustDomain: td, JWT: new(ca.JWTConfig)})
	if err != nil {
		panic(err)
	}
	handler, err := federation.NewHandler(bundleOf{authority}, td)
	if err != nil {
		panic(err)
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/bundle", nil))
	fetched, err := spiffe.ParseBundle(td, w.Body.Bytes())
	if err != nil {
		panic(err)
	}
	n, _ := fetched.Sequence()
	hint, _ := fetched.RefreshHint()
	fmt.Println("bundle", n, "for", hint)

	web := spiffe.MustParseID("spiffe://example.org/web")
	token, err := authority.SignJWT(context.Background(), ca.JWTRequest{ID: web, Audience: []string{"db"}})
	if err != nil {
		panic(err)
	}
	v, err := jwtsvid.NewValidator(fetched, []string{"db"}, nil)
	if err != nil {
		panic(err)
	}
	claims, err := v.Validate(token)
	if err != nil {
		panic(err)
	}
	fmt.Println("hello", claims.ID())
	// Output:
	// bundle 1 for 5m0s
	// hello spiffe://example.org/web
}

// bundleOf makes an authority a source of its bundle, which changes when keys rotate.
type bundleOf struct{ *ca.Authority }

func (b bundleOf) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return b.Authority.Bundle().Bundle(td)
}

func ExampleAuthority_Rotate() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}
	next, err := authority.Rotate(context.Background())
	if err != nil {
		panic(err)
	}
	fmt.Println("the new root signs after", next.Activates.Sub(next.Prepared))
	for _, r := range authority.Roots() {
		fmt.Println(r.Phase)
	}
	_, err = authority.Rotate(context.Background())
	fmt.Println(errors.Is(err, ca.ErrRotating))
	// Output:
	// the new root signs after 25m0s
	// active
	// distributing
	// true
}

func ExampleAuthority_Sign_refused() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), MaxTTL: time.Hour})
	if err != nil {
		panic(err)
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}
	web := spiffe.MustParseID("spiffe://example.org/web")
	_, err = authority.Sign(context.Background(), ca.Request{CSR: csr, ID: web, TTL: 2 * time.Hour})
	fmt.Println(errors.Is(err, ca.ErrTTL))
	fmt.Println(err)
	// Output:
	// true
	// ca: sign "spiffe://example.org/web": bad lifetime: 2h0m0s was asked for, the longest is 1h0m0s
}
