package jwt_test

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A token that is bound to a client certificate is of use to the client alone that has its key, also when it was seen before; one
// that is bound in another way is refused.
func TestBoundTokens(t *testing.T) {
	t.Parallel()
	a := newAuthenticator(t, newIssuer("p256"))
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := a.Authenticate(r); err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
		}
	}))
	server.TLS = &tls.Config{ClientAuth: tls.RequestClientCert} // of any CA, as RFC 8705 permits
	server.StartTLS()
	defer server.Close()
	ca := spiffetest.NewCA(t, "example.org")
	client := func(path string) (*http.Client, string) {
		c := server.Client()
		transport := c.Transport.(*http.Transport).Clone()
		if path == "" {
			return &http.Client{Transport: transport}, ""
		}
		chain, key := ca.Certificate(path)
		transport.TLSClientConfig.Certificates = []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}}
		sum := sha256.Sum256(chain[0].Raw)
		return &http.Client{Transport: transport}, base64.RawURLEncoding.EncodeToString(sum[:])
	}
	holder, thumbprint := client("/web")
	thief, another := client("/thief")
	without, _ := client("")

	type m = map[string]any
	const certificate, none, other = "it is bound to another client certificate", "has presented none", `by another way than "x5t#S256" alone`
	for name, c := range map[string]struct {
		cnf                    any
		holder, thief, without string // why it is refused; empty if it is not
	}{
		"bearer":             {nil, "", "", ""},
		"bound":              {m{"x5t#S256": thumbprint}, "", certificate, none},
		"bound to the thief": {m{"x5t#S256": another}, certificate, "", none},
		"padded":             {m{"x5t#S256": thumbprint + "="}, certificate, certificate, none},
		"DPoP":               {m{"jkt": thumbprint}, other, other, other},
		"both":               {m{"x5t#S256": thumbprint, "jkt": thumbprint}, other, other, other},
		"a key":              {m{"jwk": m{"kty": "EC"}}, other, other, other},
		"the name of a key":  {m{"kid": "1"}, other, other, other},
		"nothing":            {m{}, other, other, other},
		"no text":            {m{"x5t#S256": 1}, other, other, other},
		"no object":          {"x5t#S256", other, other, other},
	} {
		changes := m{}
		if c.cnf != nil {
			changes["cnf"] = c.cnf
		}
		text := sign("p256", changes)
		for range 2 { // the second is remembered
			for _, who := range []struct {
				client *http.Client
				says   string
			}{{holder, c.holder}, {thief, c.thief}, {without, c.without}} {
				r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil))(t)
				r.Header.Set("Authorization", "Bearer "+text)
				resp := must.Get(who.client.Do(r))(t)
				body := must.Get(io.ReadAll(resp.Body))(t)
				require.NoError(t, resp.Body.Close())
				if who.says == "" {
					assert.Equal(t, http.StatusOK, resp.StatusCode, "%s: %s", name, body)
				} else {
					assert.Equal(t, http.StatusUnauthorized, resp.StatusCode, name)
					assert.Contains(t, string(body), who.says, name)
				}
			}
		}
	}
	null := sign("p256", m{"cnf": m(nil)})
	require.ErrorContains(t, must.Err(a.Authenticate(request(t, null))), other)
}
