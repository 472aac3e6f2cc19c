//go:build go1.27

package spiffetls_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// quantumDomain is a trust domain with a classical root and one of ML-DSA.
type quantumDomain struct {
	bundle           *spiffe.Bundle
	classical, mldsa *pki.Issuer
}

func newQuantumDomain(t *testing.T) *quantumDomain {
	td := spiffe.MustParseTrustDomain("example.org")
	root := func(alg string) *pki.Issuer {
		return must.Get(pki.NewRoot(must.Get(pki.NewKey(alg))(t), pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())},
			NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(2 * time.Hour)}))(t)
	}
	d := &quantumDomain{classical: root("ecdsa-p256"), mldsa: root("ml-dsa-65")}
	d.bundle = must.Get(spiffe.NewBundle(td, spiffe.BundleContents{
		X509Authorities: []*x509.Certificate{d.classical.Certificate(), d.mldsa.Certificate()}}))(t)
	return d
}

func (d *quantumDomain) svid(t *testing.T, issuer *pki.Issuer, alg, path string) *spiffe.SVID {
	key := must.Get(pki.NewKey(alg))(t)
	leaf := must.Get(issuer.Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org" + path))},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}))(t)
	return must.Get(spiffe.NewSVID([]*x509.Certificate{leaf}, key))(t)
}

func (d *quantumDomain) both(t *testing.T, path string) *spiffe.SVID {
	return must.Get(d.svid(t, d.classical, "ecdsa-p256", path).WithAlternative(d.svid(t, d.mldsa, "ml-dsa-44", path)))(t)
}

// config returns the Config of a workload in a state of examples/QUANTUM.md.
func (d *quantumDomain) config(t *testing.T, state, path string) spiffetls.Config {
	c := spiffetls.Config{Self: d.svid(t, d.classical, "ecdsa-p256", path), Peers: d.bundle, Allow: spiffe.AllowAnyPeer(), Algorithms: spiffe.AnyAlgorithm()}
	switch state {
	case "default":
		c.Algorithms = spiffe.Algorithms{}
	case "verifies":
	case "both":
		c.Self = d.both(t, path)
	case "new":
		c.Self, c.Algorithms = d.svid(t, d.mldsa, "ml-dsa-65", path), must.Get(spiffe.ParseAlgorithms("ml-dsa-44,ml-dsa-65"))(t)
	default:
		require.FailNow(t, state)
	}
	return c
}

// tallied returns what an endpoint has counted, without zeros, one line each.
func tallied(t *testing.T, m *spiffetls.Metrics) string {
	var lines []string
	text := must.Get(metricstest.Of(m.Report().Metrics))(t)
	for _, key := range slices.Sorted(maps.Keys(text.Samples)) {
		if n := text.Samples[key]; n != 0 {
			lines = append(lines, fmt.Sprintf("%s %v", strings.TrimPrefix(key, "svidkit_tls_"), n))
		}
	}
	return strings.Join(lines, "\n")
}

// requireTally waits until m has counted this: a server notices the end of a handshake a moment later.
func requireTally(t *testing.T, want string, m *spiffetls.Metrics) {
	t.Helper()
	if !assert.Eventually(t, func() bool { return strings.HasPrefix(tallied(t, m), want) }, time.Minute, time.Millisecond) {
		require.Equal(t, want, tallied(t, m))
	}
}

// connecting is how a client makes a connection over another.
type connecting func(ctx context.Context, below net.Conn) (*tls.Conn, error)

func dial(e *spiffetls.Endpoint) connecting {
	return func(ctx context.Context, below net.Conn) (*tls.Conn, error) { return e.Client(ctx, below, "peer:443") }
}

// meet makes a connection on which the server returns a byte, and returns the client's state.
func meet(t *testing.T, server *spiffetls.Endpoint, client connecting) (state tls.ConnectionState, err error) {
	near, far := memconn.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer far.Close()
		if conn, err := server.Server(t.Context(), far); err == nil {
			_, _ = io.CopyN(conn, conn, 1)
		}
	})
	defer wg.Wait()
	defer near.Close()
	conn, err := client(t.Context(), near)
	if err != nil {
		return state, err
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		return state, err
	}
	_, err = conn.Read(make([]byte, 1))
	return conn.ConnectionState(), err
}

// TestAlternative: each side presents the SVID that the other can verify, and refuses a kind of key that it does not
// allow. The rows are those of the table in examples/QUANTUM.md, for programs of one Go release.
func TestAlternative(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	d := newQuantumDomain(t)
	ended := func(outcome, side, key string) string {
		return `algorithms_total{key_exchange="X25519MLKEM768",peer_key="` + key + `",side="` + side + "\"} 1\n" +
			`handshakes_total{outcome="` + outcome + `",side="` + side + `"} 1`
	}
	failed := func(side, reason string) string {
		return `handshakes_total{outcome="failed",reason="` + reason + `",side="` + side + `"} 1`
	}
	for _, c := range []struct {
		client, server     string
		toClient, toServer string // the key that each sees of the other, or "refuses", or "is refused"
	}{
		{"default", "default", "ecdsa", "ecdsa"},
		{"default", "verifies", "ecdsa", "ecdsa"},
		{"verifies", "default", "ecdsa", "ecdsa"},
		{"default", "both", "refuses", "is refused"},
		{"both", "default", "ecdsa", "refuses"},
		{"default", "new", "refuses", "is refused"},
		{"new", "default", "refuses", "is refused"},
		{"verifies", "verifies", "ecdsa", "ecdsa"},
		{"verifies", "both", "ml-dsa-44", "ecdsa"},
		{"both", "verifies", "ecdsa", "ml-dsa-44"},
		{"verifies", "new", "ml-dsa-65", "refuses"},
		{"new", "verifies", "refuses", "is refused"},
		{"both", "both", "ml-dsa-44", "ml-dsa-44"},
		{"both", "new", "ml-dsa-65", "ml-dsa-44"},
		{"new", "both", "ml-dsa-44", "ml-dsa-65"},
		{"new", "new", "ml-dsa-65", "ml-dsa-65"},
	} {
		t.Run(c.client+" to "+c.server, func(t *testing.T) {
			t.Parallel()
			var counts [2]spiffetls.Metrics
			var log logtest.Buffer
			sides := [2]spiffetls.Config{d.config(t, c.client, "/web"), d.config(t, c.server, "/db")}
			for i := range sides {
				sides[i].Metrics, sides[i].Logger = &counts[i], log.Logger()
			}
			_, err := meet(t, must.Get(spiffetls.New(sides[1]))(t), dial(must.Get(spiffetls.New(sides[0]))(t)))
			for i, saw := range []string{c.toClient, c.toServer} {
				side := []string{"client", "server"}[i]
				want := ended("full", side, saw)
				switch saw {
				case "refuses":
					want = failed(side, "algorithm")
				case "is refused":
					want = failed(side, "not_verified") // the client has refused
				}
				requireTally(t, want, &counts[i])
			}
			refused := c.toClient == "refuses" || c.toServer == "refuses"
			assert.Equal(t, refused, err != nil, "%v", err)
			if !refused {
				classical := c.toClient == "ecdsa" && sides[0].Algorithms != (spiffe.Algorithms{}) ||
					c.toServer == "ecdsa" && sides[1].Algorithms != (spiffe.Algorithms{})
				assert.Equal(t, classical, strings.Contains(log.String(), "a peer without ML-DSA"), log.String())
			}
		})
	}
}

// TestAlternativeOnly: an alternative is presented only if it is allowed, not expired, and fits TLS 1.3 and what the other side
// verifies.
func TestAlternativeOnly(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	d := newQuantumDomain(t)
	over := func(c *tls.Config) connecting {
		c.InsecureSkipVerify = true
		c.Certificates = []tls.Certificate{*d.svid(t, d.classical, "ecdsa-p256", "/web").TLSCertificate()}
		return func(ctx context.Context, below net.Conn) (*tls.Conn, error) {
			conn := tls.Client(below, c)
			return conn, conn.HandshakeContext(ctx)
		}
	}
	short := d.both(t, "/db").Alternative()
	for _, c := range []struct {
		name   string
		change func(*spiffetls.Config)
		client connecting
		want   x509.PublicKeyAlgorithm
	}{
		{name: "as it is", want: x509.MLDSA},
		{name: "not allowed", change: func(c *spiffetls.Config) { c.Algorithms = spiffe.Algorithms{} }, want: x509.ECDSA},
		{name: "another size allowed", change: func(c *spiffetls.Config) {
			c.Algorithms = must.Get(spiffe.ParseAlgorithms("ecdsa,ml-dsa-65"))(t)
		}, want: x509.ECDSA},
		{name: "TLS 1.2", change: func(c *spiffetls.Config) { c.MinVersion = tls.VersionTLS12 },
			client: over(&tls.Config{MaxVersion: tls.VersionTLS12}), want: x509.ECDSA},
		{name: "expired", change: func(c *spiffetls.Config) {
			leaf := must.Get(d.mldsa.Issue(pki.CertificateOptions{PublicKey: short.Leaf().PublicKey, SANs: []pki.SAN{pki.IDSAN(short.ID())},
				NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(-time.Minute)}))(t)
			expired := must.Get(spiffe.NewSVID([]*x509.Certificate{leaf}, short.TLSCertificate().PrivateKey.(crypto.Signer)))(t)
			c.Self = must.Get(d.svid(t, d.classical, "ecdsa-p256", "/db").WithAlternative(expired))(t)
		}, want: x509.ECDSA},
		{name: "the first expired", change: func(c *spiffetls.Config) { // which has no say in what is presented
			key := must.Get(pki.NewKey(""))(t)
			leaf := must.Get(d.classical.Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(short.ID())},
				NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(-time.Minute)}))(t)
			c.Self = must.Get(must.Get(spiffe.NewSVID([]*x509.Certificate{leaf}, key))(t).WithAlternative(short))(t)
		}, want: x509.MLDSA},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			config := d.config(t, "both", "/db")
			if c.change != nil {
				c.change(&config)
			}
			client := c.client
			if client == nil {
				client = dial(must.Get(spiffetls.New(d.config(t, "verifies", "/web")))(t))
			}
			state := must.Get(meet(t, must.Get(spiffetls.New(config))(t), client))(t)
			assert.Equal(t, c.want, state.PeerCertificates[0].PublicKeyAlgorithm)
		})
	}
}

// TestAlternativeResumed: a session of one certificate is resumed until the server has another one, or another alternative.
func TestAlternativeResumed(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	d := newQuantumDomain(t)
	first := d.both(t, "/db")
	for _, c := range []struct {
		name, client string
		next         func() *spiffe.SVID
		resumed      bool
	}{
		{"the same", "verifies", func() *spiffe.SVID { return first }, true},
		{"another alternative", "both", func() *spiffe.SVID {
			return must.Get(first.WithAlternative(d.both(t, "/db").Alternative()))(t)
		}, false},
		{"no alternative", "both", func() *spiffe.SVID { return d.svid(t, d.classical, "ecdsa-p256", "/db") }, false},
		{"another first", "both", func() *spiffe.SVID {
			return must.Get(d.svid(t, d.classical, "ecdsa-p256", "/db").WithAlternative(first.Alternative()))(t)
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var self atomic.Pointer[spiffe.SVID]
			self.Store(first)
			config := d.config(t, "both", "/db")
			config.Self = sourceFunc(func() (*spiffe.SVID, error) { return self.Load(), nil })
			server := must.Get(spiffetls.New(config))(t)
			tc := must.Get(must.Get(spiffetls.New(d.config(t, c.client, "/web")))(t).ClientConfig())(t)
			tc.ClientSessionCache, tc.ServerName = tls.NewLRUClientSessionCache(4), "db"
			client := func(ctx context.Context, below net.Conn) (*tls.Conn, error) {
				conn := tls.Client(below, tc)
				return conn, conn.HandshakeContext(ctx)
			}
			state := must.Get(meet(t, server, client))(t)
			assert.False(t, state.DidResume)
			assert.Equal(t, x509.MLDSA, state.PeerCertificates[0].PublicKeyAlgorithm)
			self.Store(c.next())
			state = must.Get(meet(t, server, client))(t)
			assert.Equal(t, c.resumed, state.DidResume)
			want := self.Load()
			if want.Alternative() != nil {
				want = want.Alternative()
			}
			assert.Equal(t, want.Leaf().Raw, state.PeerCertificates[0].Raw)
		})
	}
}

type sourceFunc func() (*spiffe.SVID, error)

func (f sourceFunc) SVID() (*spiffe.SVID, error) { return f() }

// TestRequireMLKEM: a peer without X25519MLKEM768 is refused, by either side.
func TestRequireMLKEM(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	d := newQuantumDomain(t)
	old := &tls.Config{InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{tls.CurveP256},
		Certificates: []tls.Certificate{*d.svid(t, d.classical, "ecdsa-p256", "/web").TLSCertificate()}}
	over := func(ctx context.Context, below net.Conn) (*tls.Conn, error) {
		conn := tls.Client(below, old)
		return conn, conn.HandshakeContext(ctx)
	}
	for _, require := range []bool{false, true} {
		t.Run(fmt.Sprint(require), func(t *testing.T) {
			t.Parallel()
			var counts spiffetls.Metrics
			config := d.config(t, "default", "/db")
			config.RequireMLKEM, config.Metrics = require, &counts
			_, err := meet(t, must.Get(spiffetls.New(config))(t), over)
			assert.Equal(t, require, err != nil, "%v", err)
			want := `algorithms_total{key_exchange="CurveP256",peer_key="ecdsa",side="server"} 1`
			if require {
				want = `handshakes_total{outcome="failed"`
			}
			requireTally(t, want, &counts)
			_ = must.Get(meet(t, must.Get(spiffetls.New(config))(t), dial(must.Get(spiffetls.New(config))(t))))(t)
		})
	}
	config := d.config(t, "default", "/db")
	config.RequireMLKEM, config.MinVersion = true, tls.VersionTLS12
	must.Fail(t, must.Err(spiffetls.New(config)), "RequireMLKEM")
}
