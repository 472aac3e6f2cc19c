package istioca_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// inMemory serves a handler without TLS inside a synctest bubble, and returns a client of it.
func inMemory(t testing.TB, h http.Handler) *http.Client {
	t.Helper()
	l := memconn.Listen()
	serve(t, h, l)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: &protocols, DialContext: l.DialContext}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// follow returns a handler that signs below ca and answers with the roots that roots returns.
func follow(t testing.TB, from *spiffetest.CA, lifetime time.Duration, roots func() string) http.Handler {
	t.Helper()
	return fake(func(r call) (*wire.IstioCertificateResponse, error) {
		csr, err := pki.ParseCSRPEM([]byte(r.msg.GetCsr()))
		if err != nil {
			return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "%w", err)
		}
		if len(csr.SANs()) == 0 { // the request of FetchBundles
			return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "no names")
		}
		chain, err := from.Sign(context.Background(), csr, lifetime)
		if err != nil {
			return nil, grpchttp.Errorf(grpchttp.Internal, "%w", err)
		}
		return &wire.IstioCertificateResponse{CertChain: []string{pem(chain...), roots()}}, nil
	})
}

// The bundle before the first certificate, by where the roots come from.
func TestFirstBundle(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.5-8", "IST-6.1-2")
	a := newAuthority(t, ca.Config{})
	srv := newServer(t, server.Options{Signer: a})
	url, client := listen(t, srv)
	want := raw(rootsOf(t, must.Get(spiffe.NewBundleSet(a.Bundle()))(t)))

	// Nothing configured: a certificate is asked for, once.
	c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client, Token: cafake.Give(token)}})
	for range 3 {
		assert.Equal(t, want, raw(rootsOf(t, must.Get(c.FetchBundles(t.Context()))(t))))
	}
	assert.Equal(t, "1", issued(t, srv))
	_, err := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client}}).FetchBundles(t.Context())
	requireKind(t, err, caclient.ErrUnauthenticated)

	// A source, or a file: the CA is not asked.
	c = newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "https://127.0.0.1:1", Roots: a.Bundle()}})
	assert.Equal(t, want, raw(rootsOf(t, must.Get(c.FetchBundles(t.Context()))(t))))
	file := filepath.Join(t.TempDir(), "root-cert.pem")
	c = newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "https://127.0.0.1:1", RootsFile: file}})
	_, err = c.FetchBundles(t.Context())
	requireKind(t, err, caclient.ErrUnavailable)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	_, err = c.FetchBundles(t.Context())
	requireKind(t, err, caclient.ErrUnavailable)
	require.NoError(t, os.WriteFile(file, a.Bundle().MarshalPEM(), 0o600))
	assert.Equal(t, want, raw(rootsOf(t, must.Get(c.FetchBundles(t.Context()))(t))))

	// A file that is broken later takes nothing away.
	l := new(logtest.Buffer)
	c = newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client, RootsFile: file, Logger: l.Logger()}})
	before := must.Get(c.FetchBundles(t.Context()))(t)
	for _, text := range []string{"", "x", string(make([]byte, 2<<20))} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		assert.True(t, before.Equal(must.Get(c.FetchBundles(t.Context()))(t)))
	}
	assert.Contains(t, l.String(), "the roots cannot be read")

	// A source of another trust domain is none.
	c = newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client, Roots: spiffetest.NewCA(t, "other.test").Bundle()}})
	_, err = c.FetchBundles(t.Context())
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	requireKind(t, err, caclient.ErrUnavailable)
}

func issued(t testing.TB, s *server.Server) string {
	t.Helper()
	var b metricsBuffer
	require.NoError(t, s.Report().Metrics(&b))
	return b.value("citadel_server_success_cert_issuance_count")
}

// A root that the CA no longer gives stays for as long as peers may have certificates of it.
func TestOldRootsStay(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		signer, old, newer := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org").Root(), spiffetest.NewCA(t, "example.org").Root()
		current := pem(signer.Root(), old)
		client := inMemory(t, follow(t, signer, time.Hour, func() string { return current }))
		c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "http://ca.test", HTTPClient: client, AllowPlaintext: true}})
		sign := func() { must.Get(c.Sign(t.Context(), freshCSR(t), 0))(t) }
		roots := func() [][]byte { return raw(rootsOf(t, must.Get(c.FetchBundles(t.Context()))(t))) }
		_, err := c.FetchBundles(t.Context())
		requireKind(t, err, caclient.ErrInvalid) // this CA wants to see names
		sign()
		assert.Equal(t, [][]byte{signer.Root().Raw, old.Raw}, roots())
		time.Sleep(40 * time.Minute)
		current = pem(newer, signer.Root())
		assert.Equal(t, [][]byte{signer.Root().Raw, old.Raw}, roots(), "before the next certificate")
		sign()
		all := [][]byte{signer.Root().Raw, old.Raw, newer.Raw}
		assert.ElementsMatch(t, all, roots())
		time.Sleep(59 * time.Minute)
		sign()
		assert.ElementsMatch(t, all, roots(), "a peer may have renewed a moment before the CA let go of it")
		time.Sleep(2 * time.Minute)
		assert.ElementsMatch(t, [][]byte{signer.Root().Raw, newer.Raw}, roots())
	})
}

// When certificates become shorter, peers still have long ones of the old root.
func TestOldRootsStayForTheLongest(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		signer, old := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org").Root()
		current, short := pem(signer.Root(), old), false
		roots := func() string { return current }
		day, hour := follow(t, signer, 24*time.Hour, roots), follow(t, signer, time.Hour, roots)
		client := inMemory(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if short {
				hour.ServeHTTP(w, r)
			} else {
				day.ServeHTTP(w, r)
			}
		}))
		c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "http://ca.test", HTTPClient: client, AllowPlaintext: true}})
		for range 2 {
			must.Get(c.Sign(t.Context(), freshCSR(t), 0))(t)
			current, short = pem(signer.Root()), true
		}
		began := time.Now()
		for _, test := range []struct {
			at   time.Duration
			want int
		}{{0, 2}, {2 * time.Hour, 2}, {23 * time.Hour, 2}, {25 * time.Hour, 1}} {
			time.Sleep(time.Until(began.Add(test.at)))
			assert.Len(t, rootsOf(t, must.Get(c.FetchBundles(t.Context()))(t)), test.want, "%v", test.at)
		}
	})
}

// source is a spiffe.BundleSource that tests change.
type source struct {
	mu sync.Mutex
	b  *spiffe.Bundle
}

func (s *source) set(b *spiffe.Bundle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b = b
}

func (s *source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.b == nil {
		return nil, errors.New("away")
	}
	return s.b.Bundle(td)
}

// stubborn gives the same bundle, whichever is asked for.
type stubborn struct{ b *spiffe.Bundle }

func (s stubborn) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return s.b, nil }

// What a source gives is looked at.
func TestSourceIsWrong(t *testing.T) {
	t.Parallel()
	for _, b := range []*spiffe.Bundle{nil, spiffetest.NewCA(t, "other.test").Bundle()} {
		c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "https://127.0.0.1:1", Roots: stubborn{b}}})
		_, err := c.FetchBundles(t.Context())
		requireKind(t, err, caclient.ErrUnavailable)
		require.ErrorContains(t, err, "the bundle of the trust domain")
	}
}

// counted counts how often it is asked.
type counted struct {
	source
	n atomic.Int64
}

func (c *counted) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	c.n.Add(1)
	return c.source.Bundle(td)
}

// A hint says how often to look, from once a second to once in five minutes.
func TestWatchFollowsTheHint(t *testing.T) {
	t.Parallel()
	for hint, want := range map[time.Duration][2]int64{ // looks in ten minutes, up to a tenth more
		time.Second:      {600, 680},
		time.Minute:      {10, 13},
		240 * time.Hour:  {2, 5},
		10 * time.Minute: {2, 5},
	} {
		synctest.Test(t, func(t *testing.T) {
			contents := spiffetest.NewCA(t, "example.org").Bundle().Contents()
			contents.RefreshHint = hint
			b := must.Get(spiffe.NewBundle(domain, contents))(t)
			src := &counted{}
			src.set(b)
			c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "https://127.0.0.1:1", Roots: src}})
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			for set, err := range c.WatchBundles(ctx) {
				require.NoError(t, err)
				require.NotNil(t, set)
			}
			assert.GreaterOrEqual(t, src.n.Load(), want[0], hint)
			assert.LessOrEqual(t, src.n.Load(), want[1], hint)
		})
	}
}

// An operator who takes a root out of the source withdraws it, whatever the last certificate came with.
func TestSourceWithdraws(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		signer, bad := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org").Root()
		current := pem(signer.Root(), bad)
		client := inMemory(t, follow(t, signer, time.Hour, func() string { return current }))
		src := &source{}
		bundle := func(c spiffe.BundleContents) { src.set(must.Get(spiffe.NewBundle(domain, c))(t)) }
		c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "http://ca.test", HTTPClient: client, AllowPlaintext: true, Roots: src}})
		fetch := func() *spiffe.Bundle {
			return must.Get(must.Get(c.FetchBundles(t.Context()))(t).Bundle(domain))(t)
		}
		roots := func() [][]byte { return raw(rootsOf(t, must.Get(spiffe.NewBundleSet(fetch()))(t))) }
		sign := func() { must.Get(c.Sign(t.Context(), freshCSR(t), 0))(t) }
		_, err := c.FetchBundles(t.Context())
		requireKind(t, err, caclient.ErrUnavailable)
		sign() // a source that is away does not matter any more
		assert.Len(t, roots(), 2)
		seven := uint64(7)
		bundle(spiffe.BundleContents{X509Authorities: []*x509.Certificate{signer.Root(), bad}, Sequence: &seven, RefreshHint: time.Minute})
		assert.Len(t, roots(), 2)
		hint, ok := fetch().RefreshHint()
		assert.True(t, ok)
		assert.Equal(t, time.Minute, hint)
		_, ok = fetch().Sequence()
		assert.False(t, ok, "it counts other contents")

		bundle(spiffe.BundleContents{X509Authorities: []*x509.Certificate{signer.Root()}})
		assert.Equal(t, [][]byte{signer.Root().Raw}, roots())
		src.set(nil)
		assert.Equal(t, [][]byte{signer.Root().Raw}, roots(), "an outage of the source changes nothing")
		sign()
		assert.Equal(t, [][]byte{signer.Root().Raw, bad.Raw}, roots(), "the CA still gives it, and later than the source took it away")
		current = pem(signer.Root())
		sign()
		bundle(spiffe.BundleContents{})
		assert.Equal(t, [][]byte{bad.Raw}, roots(), "for the time of its certificates")
		time.Sleep(2 * time.Hour)
		assert.Empty(t, roots(), "an empty source is a statement")

		// The source also withdraws a root that stays only for what peers may have of it.
		bundle(spiffe.BundleContents{X509Authorities: []*x509.Certificate{signer.Root(), bad}})
		require.Len(t, roots(), 2)
		current = pem(signer.Root(), bad)
		sign()
		current = pem(signer.Root())
		sign()
		assert.ElementsMatch(t, [][]byte{signer.Root().Raw, bad.Raw}, roots())
		bundle(spiffe.BundleContents{X509Authorities: []*x509.Certificate{signer.Root()}})
		assert.Equal(t, [][]byte{signer.Root().Raw}, roots())
	})
}

// A CA that has new roots each time does not fill the memory.
func TestManyRoots(t *testing.T) {
	t.Parallel()
	signer := spiffetest.NewCA(t, "example.org")
	var mu sync.Mutex
	var newest string
	url, client := listen(t, follow(t, signer, time.Hour, func() string {
		mu.Lock()
		defer mu.Unlock()
		return newest
	}))
	c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client, Roots: signer.Bundle()}})
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	now := time.Now()
	var last []byte
	for range 6 {
		var many []*x509.Certificate
		for range 50 {
			r, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(domain.ID())}, NotBefore: now, NotAfter: now.Add(time.Hour)})
			require.NoError(t, err)
			many = append(many, r.Certificate())
		}
		mu.Lock()
		newest, last = pem(many...), many[49].Raw
		mu.Unlock()
		must.Get(c.Sign(t.Context(), newCSR(t, key), 0))(t)
	}
	set := must.Get(c.FetchBundles(t.Context()))(t)
	got := rootsOf(t, set)
	assert.Len(t, got, 256)
	assert.Contains(t, pem(got...), pem(signer.Root()), "what the source has stays")
	assert.Contains(t, raw(got), last, "and the newest")
}

func TestWatchBundles(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		signer, second := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org").Root()
		current := pem(signer.Root())
		client := inMemory(t, follow(t, signer, time.Hour, func() string { return current }))
		src := &source{}
		c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "http://ca.test", HTTPClient: client, AllowPlaintext: true, Roots: src}})
		for set, err := range c.WatchBundles(t.Context()) {
			assert.Nil(t, set)
			requireKind(t, err, caclient.ErrUnavailable)
		}
		src.set(signer.Bundle())
		ctx, cancel := context.WithCancel(t.Context())
		var seen []int
		var wg sync.WaitGroup
		wg.Go(func() {
			for set, err := range c.WatchBundles(ctx) {
				if assert.NoError(t, err) {
					seen = append(seen, len(rootsOf(t, set)))
				}
			}
		})
		synctest.Wait()
		require.Equal(t, []int{1}, seen)
		must.Get(c.Sign(t.Context(), freshCSR(t), 0))(t)
		synctest.Wait()
		require.Equal(t, []int{1}, seen, "nothing new")
		current = pem(signer.Root(), second)
		must.Get(c.Sign(t.Context(), freshCSR(t), 0))(t)
		synctest.Wait()
		require.Equal(t, []int{1, 2}, seen, "at once")
		signer.Prepare()
		src.set(signer.Bundle())
		synctest.Wait()
		require.Equal(t, []int{1, 2}, seen)
		time.Sleep(5*time.Minute + time.Second)
		synctest.Wait()
		require.Equal(t, []int{1, 2, 3}, seen, "within five minutes")
		cancel()
		wg.Wait()
	})
}

// TestRenewal has two workloads that renew over the API for three days of a root rotation, and that trust
// each other all the time.
func TestRenewal(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, ca.Config{DefaultTTL: time.Hour / 2, Rotation: ca.Rotation{Propagation: time.Hour / 2}})
		srv := newServer(t, server.Options{Signer: a, AllowPlaintext: true})
		client := inMemory(t, srv)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = a.Run(ctx) })
		var managers []*secretcache.Manager
		for _, path := range []string{"/a", "/b"} {
			c, err := caclient.New(newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: "http://ca.test", HTTPClient: client, AllowPlaintext: true, Token: cafake.Give(path)}}), nil)
			require.NoError(t, err)
			m := must.Get(secretcache.New(secretcache.Config{ID: spiffe.MustParseID(domain.ID().String() + path), CA: c}))(t)
			wg.Go(func() { _ = m.Run(ctx) })
			managers = append(managers, m)
		}
		synctest.Wait()
		judge := func() {
			for i, m := range managers {
				peer, err := managers[1-i].SVID()
				require.NoError(t, err)
				v := must.Get(spiffe.NewVerifier(m, spiffe.AllowMembersOf(domain), nil))(t)
				require.NoError(t, must.Err(v.VerifyChain(peer.Chain(), spiffe.AnyRole)), "%s at %v", m, time.Now())
			}
		}
		serials := map[string]bool{}
		signers := map[string]bool{}
		for i := range 4 * 6 {
			if i == 1 || i == 12 {
				must.Get(a.Rotate(ctx))(t)
			}
			judge()
			svid := must.Get(managers[0].SVID())(t)
			serials[svid.Leaf().SerialNumber.String()] = true
			signers[string(svid.Leaf().AuthorityKeyId)] = true
			time.Sleep(10 * time.Minute)
			synctest.Wait()
		}
		assert.GreaterOrEqual(t, len(serials), 8)
		assert.Len(t, signers, 3, "two rotations reached the client")
		set := rootsOf(t, must.Get(spiffe.NewBundleSet(must.Get(managers[0].Bundle(domain))(t)))(t))
		assert.Equal(t, raw(rootsOf(t, must.Get(spiffe.NewBundleSet(a.Bundle()))(t))), raw(set), "and the old roots are gone")
		cancel()
		wg.Wait()
	})
}

// Without an HTTPClient the roots of the file vouch for the CA itself, as they are at each connection.
func TestRootsFileVouchesForServer(t *testing.T) {
	t.Parallel()
	authority := newAuthority(t, ca.Config{})
	srv := httptest.NewUnstartedServer(newServer(t, server.Options{Signer: authority}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)
	file := filepath.Join(t.TempDir(), "root-cert.pem")
	workloads := pki.MarshalCertificatesPEM(authority.Status().Roots[0].Certificate)
	require.NoError(t, os.WriteFile(file, workloads, 0o600))
	c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: srv.URL, RootsFile: file, Token: cafake.Give(token)}})
	_, err := c.Sign(t.Context(), freshCSR(t), 0)
	require.ErrorContains(t, err, "unknown authority")
	require.NoError(t, os.WriteFile(file, append(workloads, pki.MarshalCertificatesPEM(srv.Certificate())...), 0o600))
	must.Get(c.Sign(t.Context(), freshCSR(t), 0))(t)
	require.NoError(t, os.WriteFile(file, []byte("nonsense"), 0o600))
	_, err = newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: srv.URL, RootsFile: file, Token: cafake.Give(token)}}).Sign(t.Context(), freshCSR(t), 0)
	require.ErrorContains(t, err, file)
	_, err = newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: srv.URL, Token: cafake.Give(token)}}).Sign(t.Context(), freshCSR(t), 0)
	require.Error(t, err, "the roots of the host do not vouch for it")
}

// A CA that sends the leaf and its intermediate, and no root, to a client that has the root: what is presented verifies at a peer
// that has the root alone, and only the root is in the bundle.
func TestIntermediateLast(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		return string(must.Get(os.ReadFile(filepath.Join("testdata", "answer", name)))(t))
	}
	leaf, intermediate := read("1-leaf.pem"), read("2-intermediate.pem")
	key := must.Get(pki.ParsePrivateKeyPEM([]byte(read("key.pem"))))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	td := spiffe.MustParseTrustDomain("cluster.local")
	root := must.Get(spiffe.ParseBundlePEM(td, []byte(read("root-cert.pem"))))(t)
	other := spiffetest.NewCA(t, "cluster.local")
	for name, answer := range map[string][]string{
		"as it came":               {leaf, intermediate},
		"the root beside it":       {leaf, intermediate + read("root-cert.pem")},
		"the root last":            {leaf, intermediate, read("root-cert.pem")},
		"a new root beside it":     {leaf, intermediate + pem(other.Root())},
		"all in the chain, anyway": {leaf + intermediate, intermediate},
	} {
		file := filepath.Join(t.TempDir(), "root-cert.pem")
		require.NoError(t, os.WriteFile(file, root.MarshalPEM(), 0o600))
		url, client := listen(t, texts(answer...))
		c := newCA(t, istioca.Options{Endpoint: caclient.Endpoint{URL: url, TrustDomain: td, RootsFile: file, HTTPClient: client, Token: cafake.Give("t")}})
		chain := must.Get(c.Sign(t.Context(), csr, time.Hour))(t, name)
		require.Equal(t, leaf+intermediate, pem(chain...), name)
		v := must.Get(spiffe.NewVerifier(root, spiffe.AllowMembersOf(td), nil))(t)
		require.NoError(t, must.Err(v.VerifyChain(chain, spiffe.AnyRole)), name)
		set := must.Get(c.FetchBundles(t.Context()))(t)
		want := root.MarshalPEM()
		if name == "a new root beside it" {
			want = append(want, pem(other.Root())...)
		}
		b := must.Get(set.Bundle(td))(t)
		require.Equal(t, string(want), string(b.MarshalPEM()), name)
	}
}

// machine is a virtual machine with a directory that is both PROV_CERT and OUTPUT_CERTS, and a token beside it.
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
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
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
