package peers_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
)

// TestStepCA has the wire of a real step-ca: a one-time token for a certificate, renewal by that certificate, and
// roots.
func TestStepCA(t *testing.T) {
	t.Parallel()
	s := peers.NewStepCA(t, domain)
	call := func(client *http.Client, path string, body any) (status int, chain []*x509.Certificate) {
		t.Helper()
		method, data := http.MethodGet, []byte(nil)
		if body != nil {
			var err error
			method = http.MethodPost
			data, err = json.Marshal(body)
			require.NoError(t, err)
		}
		r := must.Get(http.NewRequestWithContext(t.Context(), method, s.URL+path, bytes.NewReader(data)))(t)
		response := must.Get(client.Do(r))(t)
		defer response.Body.Close() // all of it is read
		data = must.Get(io.ReadAll(response.Body))(t)
		var answer struct {
			Chain []string `json:"certChain"`
			Roots []string `json:"crts"`
		}
		require.NoError(t, json.Unmarshal(data, &answer), "%s", data)
		for _, text := range append(answer.Chain, answer.Roots...) {
			certs := must.Get(pki.ParseCertificatesPEM([]byte(text)))(t)
			chain = append(chain, certs...)
		}
		return response.StatusCode, chain
	}

	status, roots := call(s.Client(nil), "/roots", nil)
	require.Equal(t, http.StatusCreated, status)
	require.Equal(t, s.Roots(), roots)

	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
	request := map[string]any{"csr": string(csr.PEM()), "ott": s.Token(t, "web", webID.String()), "notAfter": "10m"}
	status, chain := call(s.Client(nil), "/1.0/sign", request)
	require.Equal(t, http.StatusCreated, status)
	require.Equal(t, webID.String(), chain[0].URIs[0].String())
	verifies(t, bundleOf(t, s.Roots()...), chain)
	status, _ = call(s.Client(nil), "/1.0/sign", request)
	assert.Equal(t, http.StatusUnauthorized, status, "a token is good once")

	own := &tls.Certificate{PrivateKey: key}
	for _, c := range chain {
		own.Certificate = append(own.Certificate, c.Raw)
	}
	status, renewed := call(s.Client(own), "/1.0/renew", map[string]any{})
	require.Equal(t, http.StatusCreated, status)
	verifies(t, bundleOf(t, s.Roots()...), renewed)
	require.NotEqual(t, chain[0].SerialNumber, renewed[0].SerialNumber)

	s.Prepare(t)
	_, roots = call(s.Client(nil), "/roots", nil)
	require.Len(t, roots, 2)
	require.Equal(t, s.Roots(), roots)
	s.Activate(t)
	status, renewed = call(s.Client(own), "/1.0/renew", map[string]any{})
	require.Equal(t, http.StatusCreated, status, "a certificate under the old root proves its holder")
	verifies(t, bundleOf(t, s.Roots()[0]), renewed)
}
