package spiffetls_test

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

var versions = []uint16{tls.VersionTLS12, tls.VersionTLS13}

// result is what one side of a connection got out of it.
type result struct {
	err   error // of the handshake, or of what follows
	state tls.ConnectionState
}

// peer returns the ID in the other side's leaf.
func (r result) peer(t *testing.T) spiffe.ID {
	t.Helper()
	require.NoError(t, r.err)
	id := must.Get(spiffe.IDFromCertificate(r.state.PeerCertificates[0]))(t)
	return id
}

// connect makes a connection in memory and sends one byte from the server to the client, as in
// TLS 1.3 only that tells the client whether it was accepted.
func connect(t testing.TB, server, client *tls.Config) (s, c result) {
	t.Helper()
	a, b := memconn.Pipe()
	sc, cc := tls.Server(a, server), tls.Client(b, client)
	var wg sync.WaitGroup
	wg.Go(func() {
		if s.err = sc.HandshakeContext(t.Context()); s.err == nil {
			_, s.err = sc.Write([]byte("x"))
		}
		s.state = sc.ConnectionState()
		_ = sc.Close()
	})
	if c.err = cc.HandshakeContext(t.Context()); c.err == nil {
		_, c.err = io.ReadFull(cc, make([]byte, 1))
	}
	c.state = cc.ConnectionState()
	_ = cc.Close()
	wg.Wait()
	return s, c
}

// party has an identity and bundles that a test can replace.
type party struct {
	now atomic.Pointer[spiffe.Snapshot]
}

func newParty(svid *spiffe.SVID, bundles *spiffe.BundleSet) *party {
	p := &party{}
	p.now.Store(spiffe.NewSnapshot(svid, bundles))
	return p
}

func (p *party) SVID() (*spiffe.SVID, error)                          { return p.now.Load().SVID() }
func (p *party) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return p.now.Load().Bundle(td) }
func (p *party) renew(svid *spiffe.SVID) {
	p.now.Store(spiffe.NewSnapshot(svid, p.now.Load().Bundles()))
}
func (p *party) learn(bundles *spiffe.BundleSet) {
	svid, _ := p.now.Load().SVID()
	p.now.Store(spiffe.NewSnapshot(svid, bundles))
}

func (p *party) server(t testing.TB, allow spiffe.Policy, opts *spiffetls.Config) *tls.Config {
	t.Helper()
	c := must.Get(serverConfig(with(opts, p, p, allow)))(t)
	return c
}

func (p *party) client(t testing.TB, allow spiffe.Policy, opts *spiffetls.Config) *tls.Config {
	t.Helper()
	c := must.Get(clientConfig(with(opts, p, p, allow)))(t)
	return c
}

// resuming is client with a session cache.
func (p *party) resuming(t testing.TB, allow spiffe.Policy, opts *spiffetls.Config) *tls.Config {
	t.Helper()
	c := p.client(t, allow, opts)
	c.ServerName = "server.test" // the key in the cache
	c.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	return c
}

// verifyError wants err to be a refusal at a stage.
func verifyError(t *testing.T, err error, stage string) *spiffe.VerifyError {
	t.Helper()
	e, ok := errors.AsType[*spiffe.VerifyError](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, stage, e.Stage, "%v", err)
	return e
}

// refusedBy wants err to be the other side's alert.
func refusedBy(t *testing.T, err error) {
	t.Helper()
	alert, ok := errors.AsType[tls.AlertError](err)
	if ok {
		assert.EqualValues(t, 42, alert)
		return
	}
	assert.EqualError(t, err, "remote error: tls: bad certificate")
}

func TestMutualTLS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-5")
	ca := spiffetest.NewCA(t, "example.org")
	db, web := newParty(ca.Intermediate().SVID("/db"), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles())
	for _, version := range versions {
		opts := &spiffetls.Config{MinVersion: version, NextProtos: []string{"test"}}
		server, client := db.server(t, spiffe.AllowIDs(ca.SVID("/web").ID()), opts), web.client(t, spiffe.AllowIDs(ca.SVID("/db").ID()), opts)
		server.MaxVersion = version
		s, c := connect(t, server, client)
		assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
		assert.Equal(t, "spiffe://example.org/db", c.peer(t).String())
		assert.Equal(t, version, c.state.Version)
		assert.Equal(t, "test", c.state.NegotiatedProtocol)
		assert.Len(t, c.state.PeerCertificates, 2)
	}
}

func TestSVIDAndBundleAreSources(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	allow := spiffe.AllowMembersOf(ca.TrustDomain())
	server := must.Get(serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: allow}))(t)
	client := must.Get(clientConfig(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: allow}))(t)
	s, c := connect(t, server, client)
	assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
	assert.Equal(t, "spiffe://example.org/db", c.peer(t).String())
}

func TestNew(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	svid, bundle, any := ca.SVID("/web"), ca.Bundle(), spiffe.AllowAnyPeer()
	site, roots := newSite(webLeaf(ca, nil, "a.test")).get, x509.SystemCertPool
	hosts := map[string]spiffe.PolicySource{"a": any}
	const self, peers, allow = "no Self to present", "no Peers", "no Allow"
	for name, c := range map[string]struct {
		config         spiffetls.Config
		server, client string // the error of the methods, or of New if both are the same; "" for none
	}{
		"both":                            {spiffetls.Config{Self: svid, Peers: bundle, Allow: any}, "", ""},
		"TLS 1.2":                         {spiffetls.Config{Self: svid, Peers: bundle, Allow: any, MinVersion: tls.VersionTLS12}, "", ""},
		"hosts, too":                      {spiffetls.Config{Self: svid, Peers: bundle, Allow: any, Hosts: hosts}, "", ""},
		"hosts":                           {spiffetls.Config{Self: svid, Peers: bundle, Hosts: hosts}, "Hosts is about servers", ""},
		"nothing":                         {spiffetls.Config{}, self, self},
		"no self":                         {spiffetls.Config{Peers: bundle, Allow: any}, self, self},
		"no peers":                        {spiffetls.Config{Self: svid, Allow: any}, peers, peers},
		"no policy":                       {spiffetls.Config{Self: svid, Peers: bundle}, allow, allow},
		"a zero policy":                   {spiffetls.Config{Self: svid, Peers: bundle, Allow: spiffe.Policy{}}, "policy", "policy"},
		"TLS 1.1":                         {spiffetls.Config{Self: svid, Peers: bundle, Allow: any, MinVersion: tls.VersionTLS11}, "TLS 1.1", "TLS 1.1"},
		"TLS 1.4":                         {spiffetls.Config{Self: svid, Peers: bundle, Allow: any, MinVersion: 0x0305}, "0x0305", "0x0305"},
		"SSLv3":                           {spiffetls.Config{Self: svid, Peers: bundle, Allow: any, MinVersion: 0x0300}, "SSLv3", "SSLv3"},
		"no identity":                     {spiffetls.Config{OptionalIdentity: true, Peers: bundle, Allow: any}, self, ""},
		"optional":                        {spiffetls.Config{OptionalIdentity: true, Self: svid, Peers: bundle, Allow: any}, "", ""},
		"web certificate":                 {spiffetls.Config{WebCertificate: site, Peers: bundle, Allow: any}, "", "WebCertificate is for servers"},
		"web certificate and client":      {spiffetls.Config{WebCertificate: site, OptionalIdentity: true, Peers: bundle, Allow: any}, "", ""},
		"web certificate and self":        {spiffetls.Config{WebCertificate: site, Self: svid, Peers: bundle, Allow: any}, "not both", "not both"},
		"web certificate, no bundle":      {spiffetls.Config{WebCertificate: site, Allow: any}, peers, peers},
		"web certificate, no policy":      {spiffetls.Config{WebCertificate: site, Peers: bundle}, allow, allow},
		"web roots":                       {spiffetls.Config{Self: svid, WebRoots: roots}, "WebRoots is for clients", ""},
		"web roots, optional":             {spiffetls.Config{OptionalIdentity: true, Self: svid, WebRoots: roots}, "WebRoots is for clients", ""},
		"web roots with a policy":         {spiffetls.Config{Self: svid, WebRoots: roots, Allow: any}, "must be nil", "must be nil"},
		"web roots with a zero policy":    {spiffetls.Config{Self: svid, WebRoots: roots, Allow: spiffe.Policy{}}, "must be nil", "must be nil"},
		"web roots with hosts":            {spiffetls.Config{Self: svid, WebRoots: roots, Hosts: hosts}, "must be nil", "must be nil"},
		"web roots with peers":            {spiffetls.Config{Self: svid, WebRoots: roots, Peers: bundle}, "must be nil", "must be nil"},
		"neither side":                    {spiffetls.Config{OptionalIdentity: true, WebRoots: roots}, "use crypto/tls", "use crypto/tls"},
		"anonymous":                       {spiffetls.Config{Self: svid, Peers: bundle, Allow: any, AllowAnonymousClients: true}, "", ""},
		"anonymous and web certificate":   {spiffetls.Config{WebCertificate: site, Peers: bundle, Allow: any, AllowAnonymousClients: true}, "", "WebCertificate is for servers"},
		"anonymous, but without a policy": {spiffetls.Config{Self: svid, Peers: bundle, AllowAnonymousClients: true}, allow, allow},
		"anonymous, but without bundles":  {spiffetls.Config{Self: svid, Allow: any, AllowAnonymousClients: true}, peers, peers},
	} {
		check := func(what string, err error, want string) {
			t.Helper()
			if want == "" {
				assert.NoError(t, err, name)
				return
			}
			assert.ErrorContains(t, err, "spiffetls: "+what, name)
			assert.ErrorContains(t, err, want, name)
		}
		e, err := spiffetls.New(c.config)
		if e == nil {
			assert.NotEmpty(t, c.server, name)
			check("", err, c.client)
			continue
		}
		_, err = e.ServerConfig()
		check("server: ", err, c.server)
		check("configure server: ", e.ConfigureServer(&http.Server{}), c.server)
		_, err = e.Listener(memconn.Listen())
		check("listener: ", err, c.server)
		if _, err = e.Transport(); c.config.Hosts == nil {
			check("transport: ", err, c.client)
			_, err = e.ClientConfig()
			check("client: ", err, c.client)
		}
	}
}

func TestConfigs(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/web"), ca.Bundles())
	protos := []string{"one"}
	opts := &spiffetls.Config{NextProtos: protos}
	for name, make := range map[string]func(testing.TB, spiffe.Policy, *spiffetls.Config) *tls.Config{"server": p.server, "client": p.client} {
		c := make(t, spiffe.AllowAnyPeer(), opts)
		assert.Empty(t, c.Certificates, "%s: else GetCertificate is not asked", name)
		assert.EqualValues(t, tls.VersionTLS13, c.MinVersion, name)
		assert.Nil(t, c.CurvePreferences, "%s: left to crypto/tls", name)
		assert.Nil(t, c.RootCAs, name)
		assert.Nil(t, c.ClientCAs, name)
		assert.Nil(t, c.ClientSessionCache, name)
		assert.NotSame(t, c, make(t, spiffe.AllowAnyPeer(), opts), name)
		protos[0] = "changed"
		assert.Equal(t, []string{"one"}, c.NextProtos, "%s: options are copied", name)
		protos[0] = "one"

		c = make(t, spiffe.AllowAnyPeer(), &spiffetls.Config{MinVersion: tls.VersionTLS12})
		assert.EqualValues(t, tls.VersionTLS12, c.MinVersion, name)
		assert.Len(t, c.CipherSuites, 6, name)
		for _, s := range tls.InsecureCipherSuites() {
			assert.NotContains(t, c.CipherSuites, s.ID, name)
		}
	}
}

// TestRefusals has one side that does not trust or allow the other.
func TestRefusals(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-31", "X5-38", "SVID-1", "IST-1.5-5")
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	both := ca.Bundles().With(other.Bundle())
	at := newParty(ca.SVID("/at"), both)
	for name, c := range map[string]struct {
		trust *spiffe.BundleSet
		allow spiffe.Policy
		stage string
		is    error
	}{
		"foreign domain": {other.Bundles(), spiffe.AllowAnyPeer(), "bundle", spiffe.ErrUnknownTrustDomain},
		"foreign CA":     {spiffetest.NewCA(t, "example.org").Bundles(), spiffe.AllowAnyPeer(), "chain", nil},
		"other ID":       {both, spiffe.AllowIDs(ca.SVID("/web").ID()), "policy", spiffe.ErrDenied},
		"domain policy":  {both, spiffe.AllowMembersOf(other.TrustDomain()), "policy", spiffe.ErrDenied},
	} {
		for _, version := range versions {
			t.Run(name+"/"+tls.VersionName(version), func(t *testing.T) {
				t.Parallel()
				opts := &spiffetls.Config{MinVersion: version}
				strict := newParty(other.SVID("/strict"), c.trust)

				server := strict.server(t, c.allow, opts)
				server.MaxVersion = version
				s, cl := connect(t, server, at.client(t, spiffe.AllowAnyPeer(), opts))
				e := verifyError(t, s.err, c.stage)
				assert.Equal(t, "spiffe://example.org/at", e.ID.String())
				if c.is != nil {
					assert.ErrorIs(t, s.err, c.is)
				}
				refusedBy(t, cl.err)

				server = at.server(t, spiffe.AllowAnyPeer(), opts)
				server.MaxVersion = version
				s, cl = connect(t, server, strict.client(t, c.allow, opts))
				e = verifyError(t, cl.err, c.stage)
				assert.Equal(t, "spiffe://example.org/at", e.ID.String())
				refusedBy(t, s.err)
			})
		}
	}
}

// TestFaults lets every broken identity try, in both roles.
func TestFaults(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-5", "X5-32", "X5-33", "X5-35", "X5-36", "X5-39", "X5-40")
	ca := spiffetest.NewCA(t, "example.org")
	good := newParty(ca.SVID("/good"), ca.Bundles())
	for _, version := range versions {
		opts := &spiffetls.Config{MinVersion: version}
		for _, f := range spiffetest.Faults() {
			t.Run(tls.VersionName(version)+"/"+f.Name, func(t *testing.T) {
				t.Parallel()
				bad := bare(ca.Broken(f.Name))
				bad.MaxVersion = version

				server := good.server(t, spiffe.AllowMembersOf(ca.TrustDomain()), opts)
				server.MaxVersion = version
				s, c := connect(t, server, bad)
				if slices.Contains(f.Refused, spiffe.ClientRole) {
					assert.Equal(t, f.Rule, verifyError(t, s.err, f.Stage).Rule)
					refusedBy(t, c.err)
				} else {
					assert.NoError(t, s.err)
					assert.NoError(t, c.err)
				}

				s, c = connect(t, bad, good.client(t, spiffe.AllowMembersOf(ca.TrustDomain()), opts))
				if slices.Contains(f.Refused, spiffe.ServerRole) {
					assert.Equal(t, f.Rule, verifyError(t, c.err, f.Stage).Rule)
					refusedBy(t, s.err)
				} else {
					assert.NoError(t, s.err)
					assert.NoError(t, c.err)
				}
			})
		}
	}
}

// TestHostilePeers: what a peer sends to make us compute or store is refused unseen, in both roles.
func TestHostilePeers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	good := newParty(ca.SVID("/good"), ca.Bundles())
	chain, key := ca.Certificate("/bad")
	n := new(big.Int).Lsh(big.NewInt(1), 100_000)
	huge := must.Get(x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, Subject: ca.Root().Subject, NotAfter: time.Now().Add(time.Hour),
	}, &x509.Certificate{Subject: ca.Root().Subject}, &rsa.PublicKey{N: n.Sub(n, big.NewInt(1)), E: 1<<31 - 1}, key))(t)
	hugeCert := must.Get(x509.ParseCertificate(huge))(t)
	for name, c := range map[string]struct {
		chain []*x509.Certificate
		want  string
	}{
		"a hundred certificates": {append(chain[:1:1], slices.Repeat([]*x509.Certificate{ca.Root()}, 99)...), "100 certificates, the limit is 16"},
		"a huge RSA key":         {append(chain[:1:1], hugeCert), "RSA key larger than 8192 bits"}, // by crypto/tls, as a Verifier would
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad := bare(c.chain, key)
			s, cl := connect(t, good.server(t, spiffe.AllowAnyPeer(), nil), bad)
			assert.ErrorContains(t, s.err, c.want)
			refusedBy(t, cl.err)
			s, cl = connect(t, bad, good.client(t, spiffe.AllowAnyPeer(), nil))
			assert.ErrorContains(t, cl.err, c.want)
			refusedBy(t, s.err)
		})
	}
}

// bare returns a configuration for either side that presents a chain as it is and accepts anyone.
func bare(chain []*x509.Certificate, key crypto.Signer) *tls.Config {
	cert := tls.Certificate{PrivateKey: key}
	for _, c := range chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return &tls.Config{
		Certificates:       []tls.Certificate{cert},
		ClientAuth:         tls.RequireAnyClientCert,
		InsecureSkipVerify: true,
		// Present the certificate even if crypto/tls thinks that it will not do.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
	}
}

func TestNoClientCertificate(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	server := newParty(ca.SVID("/db"), ca.Bundles()).server(t, spiffe.AllowAnyPeer(), nil)
	s, c := connect(t, server, &tls.Config{InsecureSkipVerify: true})
	assert.ErrorContains(t, s.err, "didn't provide a certificate")
	assert.Error(t, c.err)
}

// TestStolenCertificate presents a good chain with another key: the check of the chain passes, the
// handshake must not.
func TestStolenCertificate(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	good := newParty(ca.SVID("/good"), ca.Bundles())
	thief := bare(ca.SVID("/stolen").Chain(), ca.SVID("/thief").Signer())
	s, c := connect(t, good.server(t, spiffe.AllowAnyPeer(), nil), thief)
	assert.ErrorContains(t, s.err, "invalid signature")
	assert.Error(t, c.err)
	s, c = connect(t, thief, good.client(t, spiffe.AllowAnyPeer(), nil))
	assert.ErrorContains(t, c.err, "invalid signature")
	assert.Error(t, s.err)
}

func TestVersions(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/web"), ca.Bundles())
	any, tls12 := spiffe.AllowAnyPeer(), &spiffetls.Config{MinVersion: tls.VersionTLS12}
	old := func(c *tls.Config) *tls.Config {
		c.MaxVersion = tls.VersionTLS12
		return c
	}
	s, c := connect(t, p.server(t, any, nil), old(p.client(t, any, tls12)))
	assert.ErrorContains(t, s.err, "unsupported versions", "the server refuses TLS 1.2 by default")
	assert.Error(t, c.err)
	s, c = connect(t, old(p.server(t, any, tls12)), p.client(t, any, nil))
	assert.Error(t, s.err)
	assert.Error(t, c.err, "and so does the client")

	for _, suite := range []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256} {
		weak := old(p.client(t, any, tls12))
		weak.CipherSuites = []uint16{suite}
		s, _ = connect(t, p.server(t, any, tls12), weak)
		assert.ErrorContains(t, s.err, "no cipher suite", tls.CipherSuiteName(suite))
	}

	s, c = connect(t, p.server(t, any, nil), p.client(t, any, nil))
	require.NoError(t, s.err)
	require.NoError(t, c.err)
	assert.EqualValues(t, tls.VersionTLS13, c.state.Version)
	assert.Equal(t, tls.X25519MLKEM768, c.state.CurveID, "post-quantum by default")
}

// source is an SVIDSource that is a func.
type source func() (*spiffe.SVID, error)

func (f source) SVID() (*spiffe.SVID, error) { return f() }

func TestNoIdentity(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	good := newParty(ca.SVID("/good"), ca.Bundles())
	notReady := errors.New("not ready")
	for want, self := range map[string]spiffe.SVIDSource{
		"not ready":                source(func() (*spiffe.SVID, error) { return nil, notReady }),
		"the source returned none": source(func() (*spiffe.SVID, error) { return nil, nil }),
		"expired at": ca.SVID("/old", func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Second)
		}),
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			server := must.Get(serverConfig(spiffetls.Config{Self: self, Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
			s, c := connect(t, server, good.client(t, spiffe.AllowAnyPeer(), nil))
			assert.ErrorContains(t, s.err, "spiffetls: no identity to present: ")
			assert.ErrorContains(t, s.err, want)
			assert.EqualError(t, c.err, "remote error: tls: internal error")

			client := must.Get(clientConfig(spiffetls.Config{Self: self, Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
			s, c = connect(t, good.server(t, spiffe.AllowAnyPeer(), nil), client)
			assert.ErrorContains(t, c.err, "spiffetls: no identity to present: ")
			assert.ErrorContains(t, c.err, want)
			assert.Error(t, s.err)
			if want == "not ready" {
				assert.ErrorIs(t, c.err, notReady)
			}
		})
	}
}

// TestPresentedToTheLastSecond also shows that everything works in a bubble.
func TestPresentedToTheLastSecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		db, web := newParty(ca.SVID("/db"), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles())
		server, client := db.server(t, spiffe.AllowAnyPeer(), nil), web.client(t, spiffe.AllowAnyPeer(), nil)
		time.Sleep(time.Hour)
		s, c := connect(t, server, client)
		assert.NoError(t, s.err, "the last moment")
		assert.NoError(t, c.err)
		time.Sleep(time.Second)
		s, c = connect(t, server, client)
		assert.ErrorContains(t, s.err, `the SVID of "spiffe://example.org/db" expired at 2000-01-01T01:00:00Z`)
		assert.Error(t, c.err)
		db.renew(ca.SVID("/db"))
		s, c = connect(t, server, client)
		assert.ErrorContains(t, c.err, `the SVID of "spiffe://example.org/web" expired at 2000-01-01T01:00:00Z`)
		assert.Error(t, s.err)
		web.renew(ca.SVID("/web"))
		s, c = connect(t, server, client)
		assert.NoError(t, s.err, "the same configurations go on")
		assert.NoError(t, c.err)
	})
}

func TestNow(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	any := spiffe.AllowAnyPeer()
	lasting := func(d time.Duration) *party {
		return newParty(ca.SVID("/web", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(d) }), ca.Bundles())
	}
	opts := &spiffetls.Config{Now: func() time.Time { return time.Now().Add(2 * time.Hour) }}
	short, long := lasting(time.Hour), lasting(3*time.Hour)
	assert.WithinDuration(t, opts.Now(), long.server(t, any, opts).Time(), time.Minute)
	assert.WithinDuration(t, opts.Now(), long.client(t, any, opts).Time(), time.Minute)

	s, c := connect(t, long.server(t, any, opts), long.client(t, any, opts))
	assert.NoError(t, s.err)
	assert.NoError(t, c.err)
	s, _ = connect(t, long.server(t, any, opts), short.client(t, any, nil))
	verifyError(t, s.err, "chain")
	_, c = connect(t, short.server(t, any, nil), long.client(t, any, opts))
	verifyError(t, c.err, "chain")
	s, _ = connect(t, short.server(t, any, opts), long.client(t, any, nil))
	assert.ErrorContains(t, s.err, "no identity to present")
	_, c = connect(t, long.server(t, any, nil), short.client(t, any, opts))
	assert.ErrorContains(t, c.err, "no identity to present")
}

// TestAllocs is not parallel, as others would count.
func TestAllocs(t *testing.T) {
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/web"), ca.Bundles())
	server, client := p.server(t, spiffe.AllowAnyPeer(), nil), p.client(t, spiffe.AllowAnyPeer(), nil)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = server.GetCertificate(nil) }))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = client.GetClientCertificate(nil) }))
	cs := tls.ConnectionState{PeerCertificates: ca.Intermediate().SVID("/db").Chain()}
	require.NoError(t, server.VerifyConnection(cs))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = server.VerifyConnection(cs) }), "a client that comes again")
	require.NoError(t, client.VerifyConnection(cs))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = client.VerifyConnection(cs) }))
}

// TestRotation rotates the root fifty times, with a renewal of both leaves in each round, while
// connections are made all the time. None may fail. The order is the careful one: every workload learns the
// new root before it signs, and has renewed before the old root goes.
func TestRotation(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	db, web := newParty(ca.SVID("/db"), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles())
	server, client := db.server(t, spiffe.AllowIDs(ca.SVID("/web").ID()), nil), web.client(t, spiffe.AllowIDs(ca.SVID("/db").ID()), nil)

	steps, clients := rounds.Of(13), rounds.Of(1)
	ctx, cancel := context.WithCancel(t.Context())
	var made atomic.Int64
	var inFlight sync.RWMutex // held for reading while a connection is made
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				inFlight.RLock()
				s, c := connect(t, server, client)
				inFlight.RUnlock()
				assert.NoError(t, s.err)
				assert.NoError(t, c.err)
				made.Add(1)
			}
		})
	}
	for range steps {
		ca.Prepare()
		db.learn(ca.Bundles())
		web.learn(ca.Bundles())
		ca.Rotate()
		web.renew(ca.SVID("/web"))
		s, c := connect(t, server, client) // one side has renewed
		assert.NoError(t, s.err)
		assert.NoError(t, c.err)
		db.renew(ca.SVID("/db"))
		// An identity that was presented a moment ago has still to be checked: the old root goes no
		// sooner. In life there are hours between these steps.
		inFlight.Lock()
		ca.DropOldRoots()
		inFlight.Unlock()
		web.learn(ca.Bundles())
		db.learn(ca.Bundles())
	}
	cancel()
	wg.Wait()
	assert.Positive(t, made.Load())
}
