package witsvid_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

// newSVID makes a token and a key for a workload.
func newSVID(issuer *witsvid.Issuer, id spiffe.ID) (*witsvid.SVID, error) {
	token, key, err := issuer.IssueWITSVID(context.Background(), id, "")
	if err != nil {
		return nil, err
	}
	return witsvid.NewSVID(token, key)
}

// newExample makes what a deployment has before a program starts: an issuer with its key, and the trust
// bundle that says so.
func newExample() (*witsvid.Issuer, *spiffe.Bundle, error) {
	td := spiffe.MustParseTrustDomain("example.org")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	issuer, err := witsvid.NewIssuer(td, "wit-1", key, nil)
	if err != nil {
		return nil, nil, err
	}
	wits := map[string]crypto.PublicKey{"wit-1": key.Public()}
	bundle, err := spiffe.NewBundle(td, spiffe.BundleContents{WITAuthorities: wits})
	return issuer, bundle, err
}

// A server that knows its callers, and a client that proves who it is with each request.
func Example() {
	issuer, bundle, err := newExample()
	if err != nil {
		fmt.Println(err)
		return
	}
	web := spiffe.MustParseID("spiffe://example.org/web")

	// The server. Its own name comes from configuration; here it is only known once it listens.
	validator, err := witsvid.NewValidator(bundle, spiffe.AllowIDs(web), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	server := httptest.NewUnstartedServer(nil)
	wrap, err := witsvid.Middleware(validator, []string{"https://" + server.Listener.Addr().String()}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	server.Config.Handler = wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, _ := witsvid.FromContext(r.Context())
		fmt.Fprintf(w, "hello, %s\n", caller.ID())
	}))
	server.StartTLS()
	defer server.Close()

	// The client.
	svid, err := newSVID(issuer, web)
	if err != nil {
		fmt.Println(err)
		return
	}
	prover := &witsvid.Prover{Source: func() (*witsvid.SVID, error) { return svid, nil }}
	transport, err := witsvid.NewTransport(prover, server.Client().Transport)
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	for _, c := range []*http.Client{client, server.Client()} {
		resp, err := c.Get(server.URL + "/greeting?x=1")
		if err != nil {
			fmt.Println(err)
			return
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = resp.Body.Close()
		fmt.Printf("%d %s", resp.StatusCode, body)
	}
	// Output:
	// 200 hello, spiffe://example.org/web
	// 400 {"title":"Bad Request","status":400,"detail":"request: missing"}
}

// Protocols that are not HTTP carry the token and the proof as they like, over a secure channel.
func ExampleValidator_Validate() {
	issuer, bundle, err := newExample()
	if err != nil {
		fmt.Println(err)
		return
	}
	svid, err := newSVID(issuer, spiffe.MustParseID("spiffe://example.org/orders"))
	if err != nil {
		fmt.Println(err)
		return
	}
	prover := &witsvid.Prover{Source: func() (*witsvid.SVID, error) { return svid, nil }}
	token, proof, err := prover.Prove(witsvid.Call{Target: "queue:payments"})
	if err != nil {
		fmt.Println(err)
		return
	}

	validator, err := witsvid.NewValidator(bundle, spiffe.AllowMembersOf(bundle.TrustDomain()), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, target := range []string{"queue:refunds", "queue:payments", "queue:payments"} {
		caller, err := validator.Validate(token, proof, witsvid.Call{Target: target})
		if e, ok := errors.AsType[*refused](err); ok {
			fmt.Println(target, "refused:", e.What, e.Reason, e.Rule)
			continue
		}
		fmt.Println(target, "called by", caller.ID())
	}
	// Output:
	// queue:refunds refused: proof audience WPT-5
	// queue:payments called by spiffe://example.org/orders
	// queue:payments refused: proof replay WPT-9
}

// A token names its holder. It does not authenticate without a proof.
func ExampleParseUnverified() {
	issuer, _, err := newExample()
	if err != nil {
		fmt.Println(err)
		return
	}
	token, _, err := issuer.IssueWITSVID(context.Background(), spiffe.MustParseID("spiffe://example.org/web"), "")
	if err != nil {
		fmt.Println(err)
		return
	}
	claimed, err := witsvid.ParseUnverified(token)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("claims to be", claimed.ID)
	_, err = witsvid.ParseUnverified("not a token")
	fmt.Println(err)
	// Output:
	// claims to be spiffe://example.org/web
	// witsvid: token: malformed: 1 parts, not three
}
