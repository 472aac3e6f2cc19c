package jwtsvid_test

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// authority is a trust domain of one key: an issuer, and the bundle that others verify with. In a program
// the bundle comes from a source that keeps it fresh, and tokens from a Workload API.
func authority(td string) (*jwtsvid.Issuer, *spiffe.Bundle, error) {
	domain, err := spiffe.ParseTrustDomain(td)
	if err != nil {
		return nil, nil, err
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return nil, nil, err
	}
	issuer, err := jwtsvid.NewIssuer(domain, "key-1", key, nil)
	if err != nil {
		return nil, nil, err
	}
	bundle, err := spiffe.NewBundle(domain, spiffe.BundleContents{
		JWTAuthorities: map[string]crypto.PublicKey{"key-1": key.Public()},
	})
	return issuer, bundle, err
}

// own is a source of tokens for a workload whose program has the issuer itself.
type own struct {
	issuer *jwtsvid.Issuer
	id     spiffe.ID
}

func (o own) Fetch(_ context.Context, audience ...string) (string, error) {
	return o.issuer.Issue(jwtsvid.Request{ID: o.id, Audience: audience})
}

// A service that is called with tokens, and a client that calls it.
func Example() {
	issuer, bundle, err := authority("example.org")
	if err != nil {
		fmt.Println(err)
		return
	}
	web := spiffe.MustParseID("spiffe://example.org/web")

	// The service is known as "db" and serves /web.
	validator, err := jwtsvid.NewValidator(bundle, []string{"db"}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	protect, err := jwtsvid.Middleware(validator, spiffe.AllowIDs(web), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	server := httptest.NewTLSServer(protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if proof, ok := jwtsvid.FromContext(r.Context()); ok {
			fmt.Fprintf(w, "hello %s", proof.ID())
		}
	})))
	defer server.Close()

	// The client is /web.
	cache, err := jwtsvid.NewCache(own{issuer, web}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	host := strings.TrimPrefix(server.URL, "https://")
	transport, err := jwtsvid.NewTransport(cache, map[string]string{host: "db"}, &jwtsvid.TransportOptions{Base: server.Client().Transport})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)

	// Without a token.
	resp, err = server.Client().Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, resp.Header.Get("WWW-Authenticate"))
	// Output:
	// hello spiffe://example.org/web <nil>
	// 401 Unauthorized Bearer realm="jwt-svid"
}

// A token for another receiver.
func ExampleValidator_Validate() {
	issuer, bundle, err := authority("example.org")
	if err != nil {
		fmt.Println(err)
		return
	}
	token, err := issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"cache"}})
	if err != nil {
		fmt.Println(err)
		return
	}

	validator, err := jwtsvid.NewValidator(bundle, []string{"db"}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = validator.Validate(token)
	if errors.Is(err, jwtsvid.ErrAudience) {
		fmt.Println(err)
	}
	// Output: jwtsvid: token of "spiffe://example.org/web": audience: it is for "cache", and this is "db"
}

// Claims beyond those of SPIFFE are read into a type of the caller's.
func ExampleVerified_Claim() {
	issuer, bundle, err := authority("example.org")
	if err != nil {
		fmt.Println(err)
		return
	}
	token, err := issuer.Issue(jwtsvid.Request{
		ID:       spiffe.MustParseID("spiffe://example.org/web"),
		Audience: []string{"db"},
		Claims:   map[string]any{"scope": []string{"read", "list"}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	validator, err := jwtsvid.NewValidator(bundle, []string{"db"}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	proof, err := validator.Validate(token)
	if err != nil {
		fmt.Println(err)
		return
	}
	var scope []string
	ok, err := proof.Claim("scope", &scope)
	fmt.Println(proof, scope, ok, err)
	// Output: spiffe://example.org/web [read list] true <nil>
}

// What a program can know about a token of its own.
func ExampleParseUnverified() {
	issuer, _, err := authority("example.org")
	if err != nil {
		fmt.Println(err)
		return
	}
	token, err := issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"db"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	u, err := jwtsvid.ParseUnverified(token)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(u.ID, u.Audience, u.KeyID, time.Until(u.Expires) > 4*time.Minute)
	// Output: spiffe://example.org/web [db] key-1 true
}

// A token for a client that is not an HTTP client. The second call is answered from the cache.
func ExampleCache_Fetch() {
	issuer, _, err := authority("example.org")
	if err != nil {
		fmt.Println(err)
		return
	}
	cache, err := jwtsvid.NewCache(own{issuer, spiffe.MustParseID("spiffe://example.org/web")}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	first, err := cache.Fetch(ctx, "db")
	if err != nil {
		fmt.Println(err)
		return
	}
	second, err := cache.Fetch(ctx, "db")
	fmt.Println(strings.Count(first, "."), "dots", first == second, err)
	// Output:
	// 2 dots true <nil>
}
