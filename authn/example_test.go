package authn_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/svidkit/svidkit/authn"
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
