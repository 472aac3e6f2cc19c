package spiffetest_test

import (
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestJWTSVID: a token holds with the bundle of its CA, of an intermediate's too and after a rotation, and with no other.
func TestJWTSVID(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	assert.Empty(t, ca.Bundle().Contents().JWTAuthorities)
	token, source := ca.JWTSVID("/web", "db", "cache"), ca.Source("/db")
	other.JWTSVID("/web", "db")
	validate := func(bundles spiffe.BundleSource, audience, token string) (*jwtsvid.Verified, error) {
		v := must.Get(jwtsvid.NewValidator(bundles, []string{audience}, nil))(t)
		return v.Validate(token)
	}
	for _, audience := range []string{"db", "cache"} {
		proof := must.Get(validate(ca.Bundle(), audience, token))(t)
		assert.Equal(t, "spiffe://example.org/web", proof.ID().String())
	}
	_, err := validate(ca.Bundle(), "queue", token)
	require.Error(t, err)
	_, err = validate(other.Bundle(), "db", token)
	require.Error(t, err)
	ca.Rotate()
	ca.DropOldRoots()
	must.Get(validate(source, "db", token))(t)
	must.Get(validate(source, "db", ca.Intermediate().JWTSVID("/web", "db")))(t)
	assert.Len(t, ca.Bundle().Contents().JWTAuthorities, 1)
}

// TestServe: a server of spiffetls runs in one line, and has ended when its test has.
func TestServe(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web, db := ca.SVID("/web"), ca.SVID("/db")
	endpoint, err := spiffetls.New(spiffetls.Config{Self: web, Peers: ca.Bundle(), Allow: spiffe.AllowIDs(db.ID())})
	require.NoError(t, err)
	transport := must.Get(endpoint.Transport())(t)
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	var url string
	t.Run("inner", func(t *testing.T) {
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			peer, _ := spiffetls.PeerFromContext(r.Context())
			_, _ = io.WriteString(w, peer.String())
		})}
		endpoint, err := spiffetls.New(spiffetls.Config{Self: db, Peers: ca.Bundle(), Allow: spiffe.AllowIDs(web.ID())})
		require.NoError(t, err)
		require.NoError(t, endpoint.ConfigureServer(server))
		url = spiffetest.Serve(t, server)
		resp := must.Get(client.Get(url))(t)
		defer resp.Body.Close()
		body := must.Get(io.ReadAll(resp.Body))(t)
		assert.Equal(t, web.ID().String(), string(body))
	})
	_, err = client.Get(url) // there is none
	assert.Error(t, err)
}
