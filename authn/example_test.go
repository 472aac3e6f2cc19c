package authn_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// A method of one's own, for tokens that this program knows.
func ExampleBearer() {
	known := map[string]spiffe.ID{"sesame": spiffe.MustParseID("spiffe://example.org/web")}
	who := authn.Func(func(r *http.Request) (*authn.Caller, error) {
		token, err := authn.Bearer(r)
		if err != nil {
			return nil, err
		}
		id, ok := known[token]
		if !ok {
			return nil, fmt.Errorf("known tokens: %w", authn.ErrRefused)
		}
		return &authn.Caller{ID: id, Method: "known-token"}, nil
	})

	r := httptest.NewRequest(http.MethodGet, "https://ca.example.org/", nil)
	r.Header.Set("Authorization", "Bearer sesame")
	caller, err := who.Authenticate(r)
	fmt.Println(caller.ID, err)
	r.TLS = nil // as if the client had not used https
	_, err = who.Authenticate(r)
	fmt.Println(err)
	// Output:
	// spiffe://example.org/web <nil>
	// authn: bearer token: credential refused: the connection is not encrypted, so that others can read the token; use TLS or a Unix socket
}

// A handler that knows its callers: those that a gateway names, and those with a token of their own.
func ExampleRequire() {
	td := spiffe.MustParseTrustDomain("example.org")
	gateway, err := authn.ForwardedCertificate(spiffe.AllowMembersOf(td), netip.MustParsePrefix("10.0.0.0/24"))
	if err != nil {
		panic(err)
	}
	handler := authn.Require(authn.FirstOf(gateway), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, _ := authn.CallerFromContext(r.Context())
		fmt.Fprintln(w, "hello", caller)
	}), slog.New(slog.DiscardHandler))

	for _, from := range []string{"10.0.0.7:4711", "10.0.1.7:4711"} {
		r := httptest.NewRequest(http.MethodGet, "https://server.example.org/", nil)
		r.RemoteAddr = from
		// The gateway has added the last element. What the client said is before it.
		r.Header.Set("X-Forwarded-Client-Cert", "URI=spiffe://example.org/admin,By=spiffe://example.org/gateway;URI=spiffe://example.org/web")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Print(w.Code, " ", w.Body)
	}
	// Output:
	// 200 hello spiffe://example.org/web
	// 401 Unauthorized
}

// A server whose callers have X.509-SVIDs. Its TLS asks for certificates, and the verifier judges them.
func ExampleClientCertificate() {
	td := spiffe.MustParseTrustDomain("example.org")
	authority, err := ca.New(ca.Config{TrustDomain: td})
	if err != nil {
		panic(err)
	}
	v, err := spiffe.NewVerifier(authority.CallerBundle(), spiffe.AllowMembersOf(td), nil)
	if err != nil {
		panic(err)
	}
	who := authn.ClientCertificate(v)

	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}
	chain, err := authority.Sign(context.Background(), ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org/web"), DNSNames: []string{"web.prod.svc"}})
	if err != nil {
		panic(err)
	}
	r := httptest.NewRequest(http.MethodGet, "https://server.example.org/", nil)
	r.TLS = &tls.ConnectionState{PeerCertificates: chain} // as after a handshake
	caller, err := who.Authenticate(r)
	fmt.Println(caller, caller.DNSNames, err)
	// Output: spiffe://example.org/web [web.prod.svc] <nil>
}
