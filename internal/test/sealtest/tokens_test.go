package sealtest

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
)

// httpClient returns a client that presents a certificate with the key, and has read its files.
func httpClient(t *testing.T, leaf *x509.Certificate, key crypto.Signer) *http.Client {
	t.Helper()
	dir := t.TempDir()
	pem := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	cert, private := filepath.Join(dir, "cert-chain.pem"), filepath.Join(dir, "key.pem")
	require.NoError(t, os.WriteFile(cert, pki.MarshalCertificatesPEM(leaf), 0o600))
	require.NoError(t, os.WriteFile(private, pem, 0o600))
	c := must.Get(caclient.NewHTTPClient(caclient.TLSOptions{CertificateFile: cert, KeyFile: private}))(t)
	_, err := c.Get("https://127.0.0.1:1/")
	require.Error(t, err)
	return c
}

// TestNoTokenPrints prints a value of each exported type that holds a token, in every way, and the errors that come out of it.
func TestNoTokenPrints(t *testing.T) {
	t.Parallel()
	if rounds.Race {
		t.Skip("package fmt reads the fields of values that goroutines are changing")
	}
	const token = "sesame-open-sesame-open"
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/good" {
			_, _ = fmt.Fprintf(w, `{"access_token":%q,"expires_in":3600}`, token)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		_, _ = fmt.Fprintf(w, `{"error":%q,"error_description":%q}`, token, string(body)+r.Header.Get("Authorization"))
	}))
	t.Cleanup(echo.Close)
	static := tokensource.Static(token)
	exchange := func(path string) *tokensource.Source {
		s := must.Get(tokensource.Exchange(static, tokensource.ClientOptions{URL: echo.URL + path}))(t)
		return s
	}
	kept, refused := exchange("/good"), exchange("/bad")
	require.Equal(t, token, must.Get(kept.Token(t.Context()))(t))
	_, refusal := refused.Token(t.Context())
	require.Error(t, refusal)
	ca, err := istioca.New(istioca.Options{Endpoint: caclient.Endpoint{
		URL: "https://127.0.0.1:1", TrustDomain: td, Token: func(context.Context) (string, error) { return token, nil },
	}})
	require.NoError(t, err)
	for name, v := range map[string]any{
		"a static token": static, "a token that is kept": kept, "a token that was refused": refused, "the refusal": refusal,
		"options": &tokensource.ClientOptions{Issuer: "i", ClientAssertion: static}, "a CA client": ca,
	} {
		for how, v := range wrapped(v) {
			for printer, out := range printed(v) {
				for _, needle := range []string{token[3:], hex.EncodeToString([]byte(token[3:])), strings.ToUpper(hex.EncodeToString([]byte(token[3:]))), base64.StdEncoding.EncodeToString([]byte(token[3:18])), strings.Trim(fmt.Sprint([]byte(token[3:])), "[]")} {
					assert.NotContains(t, out, needle, "%s, %s: %s", name, how, printer)
				}
			}
		}
	}
}
