package cafake_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestDial(t *testing.T) {
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	f := cafake.NewStepCA(t, authority, "/ns/default/sa/web")
	client := f.Endpoint().HTTPClient
	url := f.Endpoint().URL + "/roots"
	get := func() (int, string, error) {
		resp, err := client.Get(url)
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body), err
	}
	code, _, err := get()
	require.NoError(t, err)
	assert.Equal(t, http.StatusCreated, code)
	f.Deny()
	code, body, err := get()
	require.NoError(t, err)
	assert.Equal(t, http.StatusForbidden, code)
	assert.JSONEq(t, `{"status":403,"message":"denied by the test"}`, body)
	open, err := tls.Dial("tcp", strings.TrimPrefix(f.Endpoint().URL, "https://"), &tls.Config{RootCAs: authority.Bundle().CertPool(), ServerName: "localhost"})
	require.NoError(t, err)
	defer open.Close()
	f.Drop()
	require.NoError(t, open.SetReadDeadline(time.Now().Add(5*time.Second)))
	_, err = open.Read(make([]byte, 1))
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "an open connection is cut")
	require.Error(t, err)
	_, _, err = get()
	assert.Error(t, err)
	f.Hang()
	hung := make(chan error)
	go func() {
		_, _, err := get()
		hung <- err
	}()
	time.Sleep(20 * time.Millisecond)
	f.Mend()
	require.NoError(t, <-hung, "what hung is answered")
	assert.GreaterOrEqual(t, f.Requests(), 3)
	f.Refuse(&caclient.Error{Kind: caclient.ErrUnavailable, Err: errors.New("later"), RetryAfter: 1500 * time.Millisecond})
	resp := must.Get(client.Get(url))(t)
	resp.Body.Close()
	assert.Equal(t, "2", resp.Header.Get("Retry-After"))

	// Another name or another root is not this server.
	tr := client.Transport.(*http.Transport).Clone()
	tr.TLSClientConfig = &tls.Config{RootCAs: x509.NewCertPool()}
	defer tr.CloseIdleConnections()
	assert.ErrorContains(t, must.ErrorOf((&http.Client{Transport: tr}).Get(url)), "unknown authority")
	token := must.Get(f.Endpoint().Token(t.Context()))(t)
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		assert.NotContains(t, fmt.Sprintf(format, f), token)
	}
	assert.NotContains(t, f.LogValue().String(), token)
}

// What the Fake refuses that a client of ours would not ask for.
func TestGoogleCASRules(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	g := cafake.NewGoogleCAS(t, ca, "/web")
	e := g.Endpoint()
	token := must.Get(e.Token(t.Context()))(t)
	type doc = map[string]any
	const (
		create = "/v1/" + cafake.GoogleCASPool + "/certificates"
		one    = "?requestId=00000000-0000-4000-8000-00000000000"
	)
	good := doc{"pemCsr": csrFor(t, pki.SAN{Type: pki.URI, Value: "spiffe://example.org/web"}), "lifetime": "3600s"}
	for _, c := range []struct {
		name, method, path string
		token              string
		body               any
		code               int
		says               string
	}{
		{"good", "POST", create + one + "1&certificateId=a", token, good, 200, `"pemCertificateChain"`},
		{"again", "POST", create + one + "1&certificateId=a", token, good, 200, `"pemCertificateChain"`},
		{"the same ID for another request", "POST", create + one + "1&certificateId=b", token, good, 400, "request ID was used"},
		{"the same name", "POST", create + one + "2&certificateId=a", token, good, 409, "ALREADY_EXISTS"},
		{"without a request ID", "POST", create + "?certificateId=c", token, good, 200, `"pemCertificate"`},
		{"no name", "POST", create + one + "3", token, good, 400, "Certificate ID"},
		{"bad name", "POST", create + one + "3&certificateId=a.b", token, good, 400, "Certificate ID"},
		{"bad request ID", "POST", create + "?requestId=1&certificateId=d", token, good, 400, "Invalid request ID"},
		{"no lifetime", "POST", create + one + "4&certificateId=d", token, doc{"pemCsr": good["pemCsr"]}, 400, "Lifetime is required"},
		{"no CSR", "POST", create + one + "4&certificateId=d", token, doc{"lifetime": "3600s"}, 400, "Malformed CSR"},
		{"no JSON object", "POST", create + one + "5&certificateId=d", token, "x", 400, "Invalid JSON"},
		{"no token", "POST", create + one + "6&certificateId=d", "", good, 401, "UNAUTHENTICATED"},
		{"bad token", "POST", create + one + "6&certificateId=d", "x", good, 401, "UNAUTHENTICATED"},
		{"get", "GET", create, token, nil, 404, "NOT_FOUND"},
		{"other method", "POST", "/v1/" + cafake.GoogleCASPool + ":x", token, nil, 404, "NOT_FOUND"},
		{"other pool", "POST", "/v1/projects/p/locations/l/caPools/x/certificates", token, good, 404, "NOT_FOUND"},
	} {
		code, answer := post(t, e, c.method, c.path, map[string]string{"Authorization": "Bearer " + c.token}, c.body)
		assert.Equal(t, c.code, code, c.name)
		assert.Contains(t, answer, c.says, c.name)
	}
	assert.Equal(t, 2, ca.Signed(), "a repetition is not a second certificate")

	g.Change(func(r *cafake.GoogleCASRules) { r.Quota, r.RetryDelay = 1, 90*time.Second })
	for i, want := range []string{`"pemCertificate"`, `"retryDelay":"90s"`} {
		_, answer := post(t, e, "POST", create+"?certificateId=q"+string(rune('a'+i)), map[string]string{"Authorization": "Bearer " + token}, good)
		assert.Contains(t, answer, want)
	}
}
