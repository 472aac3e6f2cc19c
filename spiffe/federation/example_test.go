package federation_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// Two organisations. The other one serves its bundle with an SVID of its own, and gave us the first
// bundle on another way.
func Example() {
	theirs := spiffe.MustParseTrustDomain("partner.test")
	endpoint := spiffe.MustParseID("spiffe://partner.test/bundle-endpoint")
	authority, err := ca.New(ca.Config{TrustDomain: theirs})
	if err != nil {
		log.Fatal(err)
	}
	initial := authority.Bundle()
	url, stop := serveBundle(authority, endpoint)
	defer stop()

	m, err := federation.Start(context.Background(), federation.Config{Relationships: []federation.Relationship{{
		TrustDomain: theirs,
		URL:         url,
		Profile:     federation.SPIFFE{EndpointID: endpoint, Initial: initial},
	}}})
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()

	// The Manager is a source of bundles for whatever verifies peers.
	v, err := spiffe.NewVerifier(m, spiffe.AllowMembersOf(theirs), nil)
	if err != nil {
		log.Fatal(err)
	}
	peer, err := v.VerifyChain(identity(authority, "spiffe://partner.test/web").Chain(), spiffe.ClientRole)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("hello", peer)
	for _, s := range m.Status() {
		fmt.Println(s.TrustDomain, "is fresh:", s.Fresh)
	}

	// The end of the relationship takes effect at once.
	if err := m.Remove(theirs); err != nil {
		log.Fatal(err)
	}
	_, err = v.VerifyChain(identity(authority, "spiffe://partner.test/web").Chain(), spiffe.ClientRole)
	fmt.Println("still trusted:", !errors.Is(err, spiffe.ErrUnknownTrustDomain))
	// Output:
	// hello spiffe://partner.test/web
	// partner.test is fresh: true
	// still trusted: false
}

// serveBundle is what the other organisation runs.
func serveBundle(authority *ca.Authority, id spiffe.ID) (url string, stop func()) {
	td := id.TrustDomain()
	handler, err := federation.NewHandler(rotating{authority}, td)
	if err != nil {
		log.Fatal(err)
	}
	config, err := federation.ServerConfig(identity(authority, id.String()))
	if err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	server := &http.Server{Handler: handler, TLSConfig: config}
	go func() { _ = server.ServeTLS(l, "", "") }()
	return "https://" + l.Addr().String() + "/", func() { _ = server.Close() }
}

// rotating makes an authority a source of its bundle, which changes when roots rotate.
type rotating struct{ *ca.Authority }

func (s rotating) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return s.Authority.Bundle().Bundle(td)
}

// identity has the authority issue an SVID.
func identity(authority *ca.Authority, name string) *spiffe.SVID {
	id := spiffe.MustParseID(name)
	issuer, err := local.New(authority, id)
	if err != nil {
		log.Fatal(err)
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		log.Fatal(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{{Type: pki.URI, Value: name}}})
	if err != nil {
		log.Fatal(err)
	}
	chain, err := issuer.Sign(context.Background(), csr, 0)
	if err != nil {
		log.Fatal(err)
	}
	svid, err := spiffe.NewSVID(chain, key)
	if err != nil {
		log.Fatal(err)
	}
	return svid
}

// A handler serves whatever bundle its source has, and answers 304 to clients that have it
// already.
func ExampleNewHandler() {
	td := spiffe.MustParseTrustDomain("example.org")
	bundle, err := spiffe.ParseBundle(td, []byte(`{"spiffe_sequence": 7, "spiffe_refresh_hint": 300, "keys": []}`))
	if err != nil {
		log.Fatal(err)
	}
	handler, err := federation.NewHandler(bundle, td)
	if err != nil {
		log.Fatal(err)
	}
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/bundle", nil)
	handler.ServeHTTP(w, r)
	fmt.Println(w.Code, w.Header().Get("Content-Type"), w.Header().Get("Cache-Control"))
	fmt.Println(w.Body)

	r.Header.Set("If-None-Match", w.Header().Get("Etag"))
	w = httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	fmt.Println(w.Code)
	// Output:
	// 200 application/json max-age=300
	// {"spiffe_sequence":7,"spiffe_refresh_hint":300,"keys":[]}
	// 304
}

// The bundle endpoints that Istio had in its configuration.
func ExampleParseIstioString() {
	relationships, err := federation.ParseIstioString("foo|https://foo.test/bundle||bar|bar.test/bundle")
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range relationships {
		fmt.Println(r.TrustDomain, "at", r.URL)
	}
	_, err = federation.ParseIstioString("foo")
	fmt.Println(err)
	// Output:
	// foo at https://foo.test/bundle
	// bar at https://bar.test/bundle
	// federation: Istio's bundle endpoints: tuple "foo": want TRUST-DOMAIN|URL, and || between tuples
}

// Parameters are checked before anything is sent.
func ExampleFetch() {
	_, err := federation.Fetch(context.Background(), federation.Relationship{
		TrustDomain: spiffe.MustParseTrustDomain("partner.test"),
		URL:         "http://partner.test/bundle",
		Profile:     federation.Web{},
	}, nil)
	fmt.Println(err)
	// Output:
	// federation: fetch: relationship with "partner.test": URL does not begin with https://
}
