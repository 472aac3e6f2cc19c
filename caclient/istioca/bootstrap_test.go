package istioca_test

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// machine is a virtual machine with a folder that is both PROV_CERT and OUTPUT_CERTS, and a token beside it.
type machine struct {
	dir, token string
	url        string
}

func (m *machine) write(t testing.TB, name string, data []byte) {
	t.Helper()
	file := filepath.Join(m.dir, name)
	require.NoError(t, os.WriteFile(file+".tmp", data, 0o600))
	require.NoError(t, os.Rename(file+".tmp", file))
}

// start returns what a process that starts on the machine asks the CA with.
func (m *machine) start(t testing.TB, l *logtest.Buffer) *istioca.CA {
	t.Helper()
	client := must.Get(caclient.NewHTTPClient(caclient.TLSOptions{
		RootsFile: filepath.Join(m.dir, "root-cert.pem"), ServerName: "ca.test", Logger: l.Logger(),
		CertificateFile: filepath.Join(m.dir, "cert-chain.pem"), KeyFile: filepath.Join(m.dir, "key.pem"),
	}))(t)
	t.Cleanup(client.CloseIdleConnections)
	return newCA(t, istioca.Options{Endpoint: caclient.Endpoint{
		URL: m.url, HTTPClient: client, TrustDomain: domain, Token: tokensource.File(m.token).Token, Logger: l.Logger(),
	}})
}

// renew obtains a certificate and writes it as Istio's agent does: the key, and then the chain.
func (m *machine) renew(t testing.TB, c *istioca.CA, lifetime time.Duration) ([]*x509.Certificate, crypto.Signer, error) {
	t.Helper()
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	chain, err := c.Sign(t.Context(), newCSR(t, key), lifetime)
	if err != nil {
		return nil, nil, err
	}
	keyPEM := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	m.write(t, "key.pem", keyPEM)
	m.write(t, "cert-chain.pem", pki.MarshalCertificatesPEM(chain...))
	return chain, key, nil
}

// A machine proves itself by a token once, and then by what it was given: in the same process, after restarts, and while the
// CA replaces its root. When its certificate has expired, a token counts again.
func TestBootstrap(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.6-2", "IST-6.6-3", "IST-6.6-5")
	// The CA, and the certificate that it serves with, which is of another hierarchy.
	authority, host := newAuthority(t, ca.Config{}), spiffetest.NewCA(t, "server.test")
	v := must.Get(spiffe.NewVerifier(authority.Bundle(), spiffe.AllowMembersOf(domain), nil))(t)
	var method atomic.Value
	either := authn.FirstOf(authn.ClientCertificate(v), tokens)
	srv, err := server.New(server.Options{Signer: authority, Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
		caller, err := either.Authenticate(r)
		if err == nil {
			method.Store(caller.Method)
		}
		return caller, err
	})})
	require.NoError(t, err)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	serve(t, srv, tls.NewListener(l, &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			chain, key := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{"ca.test"} })
			return &tls.Certificate{Certificate: raw(chain), PrivateKey: key}, nil
		},
	}))
	m := &machine{dir: t.TempDir(), token: filepath.Join(t.TempDir(), "istio-token"), url: "https://" + l.Addr().String()}
	writeRoots := func() {
		var roots []*x509.Certificate
		for c := range host.Bundle().X509Authorities() {
			roots = append(roots, c)
		}
		m.write(t, "root-cert.pem", pki.MarshalCertificatesPEM(roots...))
	}
	writeRoots()
	out := new(logtest.Buffer)
	requireRenewal := func(c *istioca.CA, how string) {
		t.Helper()
		method.Store("")
		_, _, err := m.renew(t, c, time.Hour)
		require.NoError(t, err)
		require.Equal(t, how, method.Load())
	}
	const byToken, byCertificate = "test-token", "client-certificate"

	// Neither a token nor a certificate: the error says why there is none.
	first := m.start(t, out)
	_, _, err = m.renew(t, first, time.Hour)
	requireKind(t, err, caclient.ErrUnauthenticated)
	require.ErrorContains(t, err, "there was no token to send")
	require.ErrorIs(t, err, tokensource.ErrNoToken)

	// The token, and from the next call on the certificate, though the token is still sent.
	require.NoError(t, os.WriteFile(m.token, []byte(token+"\n"), 0o600))
	requireRenewal(first, byToken)
	requireRenewal(first, byCertificate)
	require.NoError(t, os.Remove(m.token))
	requireRenewal(first, byCertificate)

	// A restart needs no token.
	second := m.start(t, out)
	requireRenewal(second, byCertificate)
	requireRenewal(second, byCertificate)

	// The root that the server's certificate leads to is replaced, in three steps.
	stale := *m // has the old root only
	stale.dir = t.TempDir()
	for _, name := range []string{"root-cert.pem", "cert-chain.pem", "key.pem"} {
		b := must.Get(os.ReadFile(filepath.Join(m.dir, name)))(t)
		stale.write(t, name, b)
	}
	for _, step := range []func(){host.Prepare, host.Rotate, host.DropOldRoots} {
		step()
		writeRoots()
		requireRenewal(second, byCertificate)
	}
	_, _, err = stale.renew(t, stale.start(t, out), time.Hour)
	require.ErrorContains(t, err, "certificate signed by unknown authority", "the new root was needed")

	// The certificate expires: a machine that was off for too long.
	chain, _, err := m.renew(t, second, 2*time.Second)
	require.NoError(t, err)
	time.Sleep(time.Until(chain[0].NotAfter.Add(10 * time.Millisecond)))
	for _, c := range []*istioca.CA{second, m.start(t, out)} {
		_, _, err = m.renew(t, c, time.Hour)
		requireKind(t, err, caclient.ErrUnauthenticated)
	}
	require.NoError(t, os.WriteFile(m.token, []byte(token), 0o600))
	requireRenewal(second, byToken)
	requireRenewal(second, byCertificate)

	// A pair that is damaged while there is no other: the token counts.
	m.write(t, "key.pem", []byte("damaged"))
	requireRenewal(m.start(t, out), byToken)
	assert.Contains(t, out.String(), "reason=expired")
	assert.NotContains(t, out.String(), token)
}
