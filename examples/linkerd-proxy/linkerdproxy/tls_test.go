package linkerdproxy_test

import (
	"crypto"
	"crypto/fips140"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// shake does a handshake in memory, and returns the states and errors of both sides. The client reads a byte, as in TLS 1.3 it
// learns of a refusal only then.
func shake(t testing.TB, client, server *tls.Config) (c, s tls.ConnectionState, clientErr, serverErr error) {
	t.Helper()
	a, b := memconn.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		tc := tls.Server(b, server)
		if serverErr = tc.Handshake(); serverErr == nil {
			_, _ = tc.Write([]byte{1})
		}
		s = tc.ConnectionState()
	}()
	tc := tls.Client(a, client)
	if clientErr = tc.Handshake(); clientErr == nil {
		_, clientErr = tc.Read(make([]byte, 1))
	}
	if clientErr != nil {
		_ = a.Close()
	}
	c = tc.ConnectionState()
	<-done
	return c, s, clientErr, serverErr
}

// endpoint is what a client expects.
type endpoint struct{ identity, serverName string }

func clientConfig(t testing.TB, id *linkerdproxy.Identity, e endpoint) *tls.Config {
	t.Helper()
	return must.Get(id.ClientConfig(e.identity, e.serverName))(t)
}

// presents returns a configuration with a certificate of s that is changed by edit, and that of a client that trusts anything.
func presents(t testing.TB, s *service, edit func(*x509.Certificate)) (server, client *tls.Config) {
	t.Helper()
	chain, key := s.ca.Certificate("/x", func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{web} }, edit)
	raw := make([][]byte, len(chain))
	for i, c := range chain {
		raw[i] = c.Raw
	}
	cert := tls.Certificate{Certificate: raw, PrivateKey: key.(crypto.PrivateKey)}
	return &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequestClientCert},
		&tls.Config{ServerName: web, InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }}
}

// Two proxies prove their identities to each other, by TLS 1.3 without ALPN and without resumption.
func TestMutual(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-1", "LNK-11-6", "LNK-11-7", "LNK-11-10", "LNK-11-11")
	s := newService(t, time.Hour)
	client, server := certified(t, s, web), certified(t, s, voting)
	config := clientConfig(t, client, endpoint{identity: voting})
	assert.Equal(t, voting, config.ServerName)
	assert.Nil(t, config.ClientSessionCache)
	offered := config.Clone()
	offered.NextProtos = []string{"h2", "transport.l5d.io/v1"}
	for _, c := range []*tls.Config{config, offered} {
		cs, ss, clientErr, serverErr := shake(t, c, server.ServerConfig())
		require.NoError(t, errors.Join(clientErr, serverErr))
		assert.Equal(t, uint16(tls.VersionTLS13), ss.Version)
		assert.Equal(t, voting, ss.ServerName)
		assert.Empty(t, cs.NegotiatedProtocol)
		name, ok := linkerdproxy.PeerName(ss)
		assert.True(t, ok)
		assert.Equal(t, web, name)
	}
	resuming := config.Clone()
	resuming.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	once := server.ServerConfig()
	for range 2 {
		cs, _, clientErr, serverErr := shake(t, resuming, once)
		require.NoError(t, errors.Join(clientErr, serverErr))
		assert.False(t, cs.DidResume, "a session would outlive the certificate")
	}
	old := config.Clone()
	old.MaxVersion, old.MinVersion = tls.VersionTLS12, tls.VersionTLS12
	_, _, clientErr, _ := shake(t, old, server.ServerConfig())
	require.ErrorContains(t, clientErr, "protocol version")
}

// Linkerd's proxies know TLS 1.3 alone, with three suites, four groups, and of their own signatures ecdsa_secp256r1_sha256.
func TestCryptography(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-3", "LNK-11-4")
	s := newService(t, time.Hour)
	id := certified(t, s, web)
	client, server := clientConfig(t, id, endpoint{identity: web}), id.ServerConfig()

	hello := make(chan *tls.ClientHelloInfo, 1)
	peer := server.Clone()
	peer.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		hello <- h
		return nil, nil // the configuration that there is
	}
	_, _, clientErr, serverErr := shake(t, client, peer)
	require.NoError(t, errors.Join(clientErr, serverErr))
	h := <-hello
	assert.Equal(t, []uint16{tls.VersionTLS13}, h.SupportedVersions)
	suites := []uint16{tls.TLS_AES_128_GCM_SHA256, tls.TLS_AES_256_GCM_SHA384, tls.TLS_CHACHA20_POLY1305_SHA256}
	groups := []tls.CurveID{tls.X25519MLKEM768, tls.CurveP256, tls.CurveP384, tls.X25519}
	if fips140.Enabled() { // which leaves out the last of both
		suites, groups = suites[:2], groups[:3]
	}
	for _, suite := range suites {
		assert.Contains(t, h.CipherSuites, suite)
	}
	for _, group := range groups {
		assert.Contains(t, h.SupportedCurves, group)
		one := client.Clone()
		one.CurvePreferences = []tls.CurveID{group}
		_, ss, clientErr, serverErr := shake(t, one, server)
		require.NoError(t, errors.Join(clientErr, serverErr), "a client that knows %v alone", group)
		assert.Equal(t, group, ss.CurveID)
		one = server.Clone()
		one.CurvePreferences = []tls.CurveID{group}
		_, ss, clientErr, serverErr = shake(t, client, one)
		require.NoError(t, errors.Join(clientErr, serverErr), "a server that knows %v alone", group)
		assert.Equal(t, group, ss.CurveID)
	}

	// A peer that accepts this signature alone.
	assert.Contains(t, h.SignatureSchemes, tls.ECDSAWithP256AndSHA256)
	asked := &tls.CertificateRequestInfo{Version: tls.VersionTLS13, SignatureSchemes: []tls.SignatureScheme{tls.ECDSAWithP256AndSHA256}}
	cert := must.Get(client.GetClientCertificate(asked))(t)
	require.NoError(t, asked.SupportsCertificate(cert))
	h.SignatureSchemes = asked.SignatureSchemes
	cert = must.Get(server.GetCertificate(h))(t)
	require.NoError(t, h.SupportsCertificate(cert))
}

// What a server may present, and what a client makes of it.
func TestServers(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-7", "LNK-11-9")
	s, stranger := newService(t, time.Hour), newService(t, time.Hour)
	client := certified(t, s, voting)
	spiffeID := must.Get(url.Parse("spiffe://root.linkerd.cluster.local/external-workload"))(t)
	external := endpoint{spiffeID.String(), "external-workload.cluster.local"}
	plain := endpoint{identity: web}
	for name, c := range map[string]struct {
		by   *service
		edit func(*x509.Certificate)
		to   endpoint
		want string // "" if it is accepted
	}{
		"good":              {s, func(*x509.Certificate) {}, plain, ""},
		"any of its names":  {s, func(c *x509.Certificate) { c.DNSNames = []string{"other.test", web} }, plain, ""},
		"a SPIFFE ID":       {s, func(c *x509.Certificate) { c.DNSNames, c.URIs = nil, []*url.URL{spiffeID} }, external, ""},
		"another SPIFFE ID": {s, func(c *x509.Certificate) { c.DNSNames, c.URIs = []string{external.serverName}, nil }, external, "and not for"},
		"another name":      {s, func(c *x509.Certificate) { c.DNSNames = []string{voting} }, plain, "and not for"},
		"a wildcard":        {s, func(c *x509.Certificate) { c.DNSNames = []string{"*" + web[len("web"):]} }, plain, "and not for"},
		"a trailing dot":    {s, func(c *x509.Certificate) { c.DNSNames = []string{web + "."} }, plain, "and not for"},
		"upper case":        {s, func(c *x509.Certificate) { c.DNSNames = []string{"WEB" + web[len("web"):]} }, plain, "and not for"},
		"a common name":     {s, func(c *x509.Certificate) { c.DNSNames, c.Subject.CommonName = []string{"a.test"}, web }, plain, "and not for"},
		"for clients alone": {s, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }, plain, "usage"},
		"expired": {s, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(-time.Second)
		}, plain, "expired"},
		"not valid yet":      {s, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }, plain, "not yet valid"},
		"another mesh":       {stranger, func(*x509.Certificate) {}, plain, "unknown authority"},
		"no digital signing": {s, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment }, plain, "digitalSignature"},
	} {
		server, _ := presents(t, c.by, c.edit)
		_, _, clientErr, _ := shake(t, clientConfig(t, client, c.to), server)
		if c.want == "" {
			require.NoError(t, clientErr, name)
			continue
		}
		var invalid *tls.CertificateVerificationError
		require.ErrorAs(t, clientErr, &invalid, name)
		require.ErrorContains(t, clientErr, c.want, name)
	}
	for _, e := range []endpoint{{}, {identity: "spiffe://x/y"}, {identity: "10.0.0.1"}, {web, "a:1"}} {
		require.Error(t, must.Err(client.ClientConfig(e.identity, e.serverName)), e)
	}
}

// What a client may present, and what a server makes of it.
func TestClients(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-6", "LNK-11-8")
	s, stranger := newService(t, time.Hour), newService(t, time.Hour)
	server := certified(t, s, web).ServerConfig()
	spiffeID := must.Get(url.Parse("spiffe://root.linkerd.cluster.local/external-workload"))(t)
	for name, c := range map[string]struct {
		by   *service
		edit func(*x509.Certificate)
		id   string
		want string
	}{
		"good":              {s, func(*x509.Certificate) {}, web, ""},
		"the first name":    {s, func(c *x509.Certificate) { c.DNSNames = []string{voting, web} }, voting, ""},
		"a trailing dot":    {s, func(c *x509.Certificate) { c.DNSNames = []string{voting + ".", web} }, web, ""},
		"a SPIFFE ID":       {s, func(c *x509.Certificate) { c.DNSNames, c.URIs = nil, []*url.URL{spiffeID} }, spiffeID.String(), ""},
		"no name at all":    {s, func(c *x509.Certificate) { c.DNSNames, c.EmailAddresses = nil, []string{"web@cluster.local"} }, "", ""},
		"for servers alone": {s, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }, "", "usage"},
		"expired": {s, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(-time.Second)
		}, "", "expired"},
		"another mesh": {stranger, func(*x509.Certificate) {}, "", "unknown authority"},
	} {
		_, client := presents(t, c.by, c.edit)
		_, ss, clientErr, serverErr := shake(t, client, server)
		if c.want != "" {
			require.ErrorContains(t, serverErr, c.want, name)
			require.Error(t, clientErr, name)
			_, ok := linkerdproxy.PeerName(ss)
			require.False(t, ok, name)
			continue
		}
		require.NoError(t, errors.Join(clientErr, serverErr), name)
		got, ok := linkerdproxy.PeerName(ss)
		assert.Equal(t, c.id, got, name)
		assert.Equal(t, c.id != "", ok, name)
	}
	anonymous := &tls.Config{ServerName: web, InsecureSkipVerify: true}
	_, ss, clientErr, serverErr := shake(t, anonymous, server)
	require.NoError(t, errors.Join(clientErr, serverErr))
	_, ok := linkerdproxy.PeerName(ss)
	assert.False(t, ok)
	for _, name := range []string{voting, "*", ""} {
		_, _, _, serverErr := shake(t, &tls.Config{ServerName: name, InsecureSkipVerify: true}, server)
		require.ErrorContains(t, serverErr, "asks for the server name", name)
	}
}

// Before the first certificate a proxy serves no TLS and connects without a certificate; once it has expired it does neither,
// unless it is told to go on as a client without one. New certificates count in the next handshake.
func TestHandshakesOverALife(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-10-4", "LNK-10-5", "LNK-10-8", "LNK-10-9")
	synctest.Test(t, func(t *testing.T) {
		const life = time.Hour
		s := newService(t, life)
		other := certified(t, s, voting) // it renews, unlike what the test looks at
		mine := newService(t, life)
		mine.ca, mine.anchors = s.ca, s.anchors
		mine.fail(&caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: errors.New("down")})
		strict := must.Get(linkerdproxy.NewWith(config(t, web, s.ca.Bundle().MarshalPEM()), mine))(t)
		cfg := config(t, web, s.ca.Bundle().MarshalPEM())
		cfg.AnonymousAfterExpiry = true
		first, err := linkerdproxy.NewWith(cfg, mine) // by the first design
		require.NoError(t, err)
		run(t, strict)
		run(t, first)

		// client returns what the server knows of the client, and the error of the client.
		client := func(id *linkerdproxy.Identity) (string, error) {
			_, ss, clientErr, serverErr := shake(t, clientConfig(t, id, endpoint{identity: voting}), other.ServerConfig())
			if clientErr == nil {
				require.NoError(t, serverErr)
			}
			name, _ := linkerdproxy.PeerName(ss)
			return name, clientErr
		}
		server := func(id *linkerdproxy.Identity) error {
			_, _, clientErr, serverErr := shake(t, clientConfig(t, other, endpoint{identity: web}), id.ServerConfig())
			if serverErr == nil {
				require.NoError(t, clientErr)
			}
			return serverErr
		}
		synctest.Wait()
		for _, id := range []*linkerdproxy.Identity{strict, first} {
			assert.Empty(t, must.Get(client(id))(t))
			require.ErrorIs(t, server(id), spiffe.ErrNotReady)
		}

		mine.fail(nil)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		mine.fail(&caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: errors.New("down")})
		for _, id := range []*linkerdproxy.Identity{strict, first} {
			assert.Equal(t, web, must.Get(client(id))(t))
			require.NoError(t, server(id))
		}

		time.Sleep(life + time.Minute)
		synctest.Wait()
		require.ErrorIs(t, must.Err(client(strict)), linkerdproxy.ErrExpired)
		assert.Empty(t, must.Get(client(first))(t))
		require.ErrorIs(t, server(strict), linkerdproxy.ErrExpired)
		require.ErrorIs(t, server(first), linkerdproxy.ErrExpired)

		mine.fail(nil)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		for _, id := range []*linkerdproxy.Identity{strict, first} {
			assert.Equal(t, web, must.Get(client(id))(t))
			require.NoError(t, server(id))
			c := must.Get(id.Credential())(t)
			cs, _, _, _ := shake(t, clientConfig(t, other, endpoint{identity: web}), id.ServerConfig())
			assert.True(t, cs.PeerCertificates[0].Equal(c.Leaf()))
			assert.True(t, pki.PublicKeysEqual(c.Leaf().PublicKey, cs.PeerCertificates[0].PublicKey))
		}
	})
}

// A certificate that expires between the two looks at it in a handshake does not make it an anonymous one.
func TestExpiryInHandshake(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newService(t, time.Minute)
		for _, anonymous := range []bool{false, true} {
			s.fail(nil)
			id := certified(t, s, web, func(c *linkerdproxy.Config) { c.AnonymousAfterExpiry = anonymous })
			cfg := clientConfig(t, id, endpoint{identity: voting})
			c := must.Get(cfg.GetClientCertificate(nil))(t)
			require.NotEmpty(t, c.Certificate)
			s.fail(errors.New("down"))
			time.Sleep(2 * time.Minute)
			c, err := cfg.GetClientCertificate(nil)
			server, _ := presents(t, s, func(c *x509.Certificate) { c.DNSNames = []string{voting} })
			server.ClientAuth = tls.NoClientCert
			_, _, clientErr, _ := shake(t, cfg, server)
			if anonymous {
				require.NoError(t, err)
				require.Empty(t, c.Certificate)
				require.NoError(t, clientErr)
				continue
			}
			require.ErrorIs(t, err, linkerdproxy.ErrExpired)
			require.ErrorIs(t, clientErr, linkerdproxy.ErrExpired, "also of a server that asks for no certificate")
		}
	})
}
