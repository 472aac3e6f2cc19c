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
