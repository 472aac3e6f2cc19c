package linkerdproxy_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A proxy is certified by the identity service over TLS, renews with the one key and the one request, and reads its token anew.
func TestCertify(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "LNK-1-2", "LNK-1-4", "LNK-4-10", "LNK-8-5", "LNK-8-7", "LNK-10-2", "LNK-10-3", "LNK-10-12", "LNK-11-15", "LNK-3.3-13")
	c := meshtest.New(t, meshtest.Options{Life: 10 * time.Second})
	cfg := c.Config(t, web)
	cfg.Dir, cfg.MaxRefresh = t.TempDir(), 300*time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	id := must.Get(linkerdproxy.Start(ctx, cfg))(t)
	defer id.Close()
	first := must.Get(id.Credential())(t)
	assert.Equal(t, []string{web}, first.Leaf().DNSNames)

	key := must.Get(os.ReadFile(filepath.Join(cfg.Dir, "key.der")))(t)
	request := must.Get(os.ReadFile(filepath.Join(cfg.Dir, "csr.p8")))(t)

	// The kubelet replaces the token, and the old one is good no longer.
	require.NoError(t, os.WriteFile(cfg.TokenFile, []byte("another"), 0o600))
	c.Account("another", "web")
	c.Account(meshtest.Token(web), "")
	for changed := id.Changed(); ; changed = id.Changed() {
		now := must.Get(id.Credential())(t)
		if !now.Leaf().Equal(first.Leaf()) && slices.Contains(c.Seen(), "another") {
			assert.True(t, pki.PublicKeysEqual(now.Leaf().PublicKey, first.Leaf().PublicKey), "the key is constant")
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatal(id.Report().Identities[0].Err)
		}
	}
	assert.Equal(t, meshtest.Token(web), c.Seen()[0])
	again := must.Get(os.ReadFile(filepath.Join(cfg.Dir, "key.der")))(t)
	assert.Equal(t, key, again)
	again = must.Get(os.ReadFile(filepath.Join(cfg.Dir, "csr.p8")))(t)
	assert.Equal(t, request, again)
	parsed := must.Get(x509.ParsePKCS8PrivateKey(key))(t)
	assert.True(t, pki.PublicKeysEqual(parsed.(*ecdsa.PrivateKey).Public(), first.Leaf().PublicKey))

	var metrics strings.Builder
	require.NoError(t, id.Report().Metrics(&metrics))
	assert.Contains(t, metrics.String(), `control_identity_cert_refreshes_total{result="error"} 0`)
	assert.Contains(t, metrics.String(), "control_identity_cert_expiration_timestamp_seconds ")
	assert.Contains(t, metrics.String(), "control_identity_cert_refresh_timestamp_seconds ")
}

// In the pod of the certifier the connection is in the clear, and no name is expected.
func TestCertifyLoopback(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-9", "LNK-11-14")
	c := meshtest.New(t, meshtest.Options{Life: time.Minute, Plaintext: true})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, must.Get(linkerdproxy.Start(ctx, c.Config(t, web)))(t).Close())
}

// The names of this host, as Linkerd writes them, too, lead to it, and not to where a name server says.
func TestLoopbackNames(t *testing.T) {
	t.Parallel()
	c := meshtest.New(t, meshtest.Options{Life: time.Minute, Plaintext: true})
	_, port := must.Get2(net.SplitHostPort(c.Addr))(t)
	for _, host := range []string{"localhost", "localhost.", "LOCALHOST", "[::ffff:127.0.0.1]"} {
		cfg := c.Config(t, web)
		cfg.Certifier.Addr = host + ":" + port
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		id, err := linkerdproxy.Start(ctx, cfg)
		cancel()
		require.NoError(t, err, host)
		require.NoError(t, id.Close())
	}
}

// A server that does not prove to be the certifier gets no token.
func TestRogueCertifier(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-16")
	c, other := meshtest.New(t, meshtest.Options{Life: time.Minute}), meshtest.New(t, meshtest.Options{Life: time.Minute})
	cfg := c.Config(t, web)
	cfg.Certifier.Addr = other.Addr // it has another root
	id := must.Get(linkerdproxy.New(cfg))(t)
	run(t, id)
	eventually(t, func() bool { return id.Report().Identities[0].Err != nil }, "a failure")
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := id.Ready(ctx)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorContains(t, err, "certificate")
	assert.NotContains(t, err.Error(), "token-of-")
	assert.Empty(t, other.Seen())
}

// The times of the requests to the certifier are those of the contract.
func TestRefreshIn(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-10-6", "LNK-12.2-8")
	s := newService(t, time.Hour)
	id := must.Get(linkerdproxy.NewWith(config(t, web, s.ca.Bundle().MarshalPEM()), s))(t)
	for left, want := range map[time.Duration]time.Duration{
		24*time.Hour + 20*time.Second: 16*time.Hour + 48*time.Minute + 14*time.Second,
		10 * time.Second:              10 * time.Second,
		0:                             10 * time.Second,
		time.Minute:                   42 * time.Second,
		365 * 24 * time.Hour:          24 * time.Hour,
	} {
		assert.Equal(t, want, id.RefreshIn(left, 0), left)
	}
	for left, want := range map[time.Duration]time.Duration{
		24 * time.Hour: 57*time.Minute + 36*time.Second, // a 25th
		time.Minute:    10 * time.Second,
		0:              10 * time.Second,
	} {
		assert.Equal(t, want, id.RefreshIn(left, 3), left)
	}
}

// A MIN_REFRESH of 0, which Linkerd's proxies take, is no flood for a certifier that answers no request, nor for one whose issuer
// is about to end.
func TestNoMinRefresh(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-10-6", "LNK-12.2-8")
	for name, life := range map[string]time.Duration{"certified for long": time.Hour, "for a few seconds": 3 * time.Second} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newService(t, life)
				e := must.Get(linkerdproxy.FromEnviron(change(seed(t, s), "LINKERD2_PROXY_IDENTITY_MIN_REFRESH=0"), nil))(t)
				cfg := config(t, e.Name, s.ca.Bundle().MarshalPEM())
				cfg.MinRefresh, cfg.MaxRefresh = e.MinRefresh, e.MaxRefresh
				id := must.Get(linkerdproxy.NewWith(cfg, s))(t)
				run(t, id)
				time.Sleep(time.Second)
				s.fail(&caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: errors.New("down")})
				time.Sleep(life)
				synctest.Wait()
				require.ErrorIs(t, id.Report().Identities[0].Err, caclient.ErrUnavailable)
				n := len(s.asked())
				time.Sleep(time.Minute)
				synctest.Wait()
				asked := s.asked()
				assert.InDelta(t, 60, len(asked)-n, 1)
				for i := range asked[1:] {
					assert.GreaterOrEqual(t, asked[i+1].Sub(asked[i]), time.Second)
				}
			})
		})
	}
}

// Nothing is left of the connection to the certifier once the proxy is certified.
func TestNoConnectionIsKept(t *testing.T) {
	t.Parallel()
	for _, plaintext := range []bool{false, true} {
		c := meshtest.New(t, meshtest.Options{Life: time.Hour, Plaintext: plaintext})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		id, err := linkerdproxy.Start(ctx, c.Config(t, web))
		cancel()
		require.NoError(t, err)
		eventually(t, func() bool { return c.Open() == 0 }, "the end of the connections to the certifier")
		require.NoError(t, id.Close())
	}
}

// The whole life of a certificate of a day, in virtual time: renewal, an outage, expiry, and recovery.
func TestLife(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "LNK-8-6", "LNK-10-6", "LNK-10-10", "LNK-10-11", "LNK-16-4", "LNK-16-10")
	synctest.Test(t, func(t *testing.T) {
		s := newService(t, time.Duration(rounds.Of(5))*time.Hour)
		s.fail(&caclient.Error{Op: "sign", Kind: caclient.ErrInvalid, MayPass: true, Err: errors.New("invalid argument")})
		id := must.Get(linkerdproxy.NewWith(config(t, web, s.ca.Bundle().MarshalPEM()), s))(t)
		run(t, id)
		admin := id.Handler()

		// A token that the cluster does not know yet: asked for at once, and then every ten seconds.
		time.Sleep(35 * time.Second)
		synctest.Wait()
		asked := s.asked()
		require.Len(t, asked, 4)
		for i := range asked[1:] {
			assert.Equal(t, 10*time.Second, asked[i+1].Sub(asked[i]))
		}
		assert.Equal(t, "503 not ready", get(t, admin, "/ready"))
		assert.Equal(t, "200 live", get(t, admin, "/live"))
		require.ErrorIs(t, must.Err(id.Credential()), spiffe.ErrNotReady)

		s.fail(nil)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.Equal(t, "200 ready", get(t, admin, "/ready"))
		must.Get(metricstest.Page(strings.TrimPrefix(get(t, admin, "/metrics"), "200 ") + "\n"))(t)
		for host, code := range map[string]int{"127.0.0.1:4191": 200, "localhost:4191": 200, "rebound.test:4191": 421} {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "http://"+host+"/metrics", nil)
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 4191}))
			admin.ServeHTTP(w, r)
			assert.Equal(t, code, w.Code, host)
		}
		first := must.Get(id.Credential())(t)

		// 0.7 of what is left.
		n := len(s.asked())
		time.Sleep(time.Until(s.asked()[n-1].Add(s.life/10*7)) - time.Second)
		synctest.Wait()
		require.Len(t, s.asked(), n)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Len(t, s.asked(), n+1)
		second := must.Get(id.Credential())(t)
		require.True(t, second.NotAfter().After(first.NotAfter()))

		// The certifier is down for longer than the certificate lasts: what there is stays until its end.
		s.fail(&caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: errors.New("the certifier is down")})
		time.Sleep(time.Until(second.NotAfter()) - time.Second)
		synctest.Wait()
		assert.Same(t, second, must.Get(id.Credential())(t))
		assert.Equal(t, "200 ready", get(t, admin, "/ready"))
		assert.Equal(t, "200 live", get(t, admin, "/live"))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.Equal(t, "503 not ready", get(t, admin, "/ready"))
		assert.Equal(t, "503 expired", get(t, admin, "/live"))
		require.ErrorIs(t, must.Err(id.Credential()), linkerdproxy.ErrExpired)
		require.ErrorContains(t, id.Report().Identities[0].Err, "the certifier is down")

		s.fail(nil)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.Equal(t, "200 ready", get(t, admin, "/ready"))
		assert.Equal(t, "200 live", get(t, admin, "/live"))
		for _, csr := range s.csrs {
			require.Equal(t, s.csrs[0], csr, "the request is constant")
		}
	})
}

// An outage of 45 % of a life of hours, before the renewal and over it, expires nothing.
func TestOutage(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, begin := range []float64{0.3, 0.45, 0.54} {
		synctest.Test(t, func(t *testing.T) {
			life := time.Duration(rounds.Of(4)) * time.Hour
			s := newService(t, life)
			id := certified(t, s, web)
			first := must.Get(id.Credential())(t)
			time.Sleep(time.Duration(begin * float64(life)))
			s.fail(&caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: errors.New("down")})
			time.Sleep(life / 100 * 45)
			s.fail(nil)
			for time.Now().Before(first.NotAfter()) {
				require.True(t, time.Now().Before(must.Get(id.Credential())(t).NotAfter()))
				time.Sleep(time.Minute)
			}
			c := must.Get(id.Credential())(t)
			require.True(t, time.Now().Before(c.NotAfter()), "renewed before the end, after an outage from %v", begin)
		})
	}
}

// What the certifier answers takes the place of nothing unless it is what was asked for.
func TestBadAnswers(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-8-3", "LNK-8-4", "LNK-8-6")
	synctest.Test(t, func(t *testing.T) {
		s := newService(t, time.Hour)
		id := certified(t, s, web)
		first := must.Get(id.Credential())(t)
		for name, edit := range map[string]func(*x509.Certificate){
			"another name": func(c *x509.Certificate) { c.DNSNames = []string{voting} },
			"two names":    func(c *x509.Certificate) { c.DNSNames = []string{web, voting} },
			"a wildcard":   func(c *x509.Certificate) { c.DNSNames = []string{"*" + strings.TrimPrefix(web, "web")} },
			"expired": func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(-time.Second)
			},
			"for clients only":    func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} },
			"of a certificate CA": func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true },
		} {
			s.ca.EditTemplates(edit)
			n := len(s.asked())
			for len(s.asked()) < n+2 { // two attempts
				time.Sleep(time.Minute)
				synctest.Wait()
				require.True(t, time.Now().Before(first.NotAfter()), name)
			}
			require.Same(t, first, must.Get(id.Credential())(t), name)
			require.ErrorIs(t, id.Report().Identities[0].Err, caclient.ErrBadAnswer, name)
		}
		s.ca.EditTemplates(nil)
		time.Sleep(time.Until(first.NotAfter()) - time.Second)
		synctest.Wait()
		require.True(t, must.Get(id.Credential())(t).NotAfter().After(first.NotAfter()))
		var metrics strings.Builder
		require.NoError(t, id.Report().Metrics(&metrics))
		assert.NotContains(t, metrics.String(), `{result="error"} 0`)
	})
}

// Configurations that cannot work are refused by New, with the field and what to do.
func TestNewRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-2", "LNK-11-14", "LNK-11-15")
	s := newService(t, time.Hour)
	anchors := s.ca.Bundle().MarshalPEM()
	chain, _ := s.ca.Certificate("/web")
	leaf := pki.MarshalCertificatesPEM(chain[0])
	for name, c := range map[string]struct {
		edit func(*linkerdproxy.Config)
		want string
	}{
		"no name":            {func(c *linkerdproxy.Config) { c.Name = "" }, "Config.Name"},
		"one label":          {func(c *linkerdproxy.Config) { c.Name = "web" }, "SERVICEACCOUNT"},
		"upper case":         {func(c *linkerdproxy.Config) { c.Name = "W" + web[1:] }, "RFC 1123"},
		"trailing dot":       {func(c *linkerdproxy.Config) { c.Name = web + "." }, "subdomain"},
		"dot in the account": {func(c *linkerdproxy.Config) { c.Name = "v1." + web }, "Config.Name"},
		"no trust domain":    {func(c *linkerdproxy.Config) { c.Name = "web.emojivoto.serviceaccount.identity.linkerd" }, "TRUSTDOMAIN"},
		"another marker":     {func(c *linkerdproxy.Config) { c.Name = "web.emojivoto.user.identity.linkerd.cluster.local" }, "does not end"},
		"no anchors":         {func(c *linkerdproxy.Config) { c.Anchors = nil }, "Config.Anchors"},
		"anchors of no CA":   {func(c *linkerdproxy.Config) { c.Anchors = leaf }, "CA"},
		"anchors in DER":     {func(c *linkerdproxy.Config) { c.Anchors = chain[0].Raw }, "Config.Anchors"},
		"garbage after anchors": {func(c *linkerdproxy.Config) {
			c.Anchors = append(c.Anchors[:len(c.Anchors):len(c.Anchors)], "-----BEGIN"...)
		}, "Config.Anchors"},
		"two anchors":            {func(c *linkerdproxy.Config) { c.AnchorsFile = "/anchors.pem" }, "one of them"},
		"no anchors file":        {func(c *linkerdproxy.Config) { c.Anchors, c.AnchorsFile = nil, "/does/not/exist" }, "Config.AnchorsFile"},
		"no token file":          {func(c *linkerdproxy.Config) { c.TokenFile = "" }, "Config.TokenFile"},
		"no certifier":           {func(c *linkerdproxy.Config) { c.Certifier = linkerdproxy.Service{} }, "Config.Certifier"},
		"no name of certifier":   {func(c *linkerdproxy.Config) { c.Certifier.Name = "" }, "set the name"},
		"loopback with a name":   {func(c *linkerdproxy.Config) { c.Certifier.Addr = "127.0.0.1:8080" }, "leave the name empty"},
		"localhost. with a name": {func(c *linkerdproxy.Config) { c.Certifier.Addr = "localhost.:8080" }, "leave the name empty"},
		"::1 with a name":        {func(c *linkerdproxy.Config) { c.Certifier.Addr = "[::1]:8080" }, "leave the name empty"},
		"bad port":               {func(c *linkerdproxy.Config) { c.Certifier.Addr = "linkerd-identity:port" }, "host:port"},
		"URL":                    {func(c *linkerdproxy.Config) { c.Certifier.Addr = "https://linkerd-identity:8080" }, "host:port"},
		"another certifier":      {func(c *linkerdproxy.Config) { c.Certifier.Name = voting }, "want \"" + certifier},
		"refresh":                {func(c *linkerdproxy.Config) { c.MinRefresh = 48 * time.Hour }, "MinRefresh"},
		"negative refresh":       {func(c *linkerdproxy.Config) { c.MinRefresh = -1 }, "MinRefresh"},
		"tiny refresh":           {func(c *linkerdproxy.Config) { c.MinRefresh = 99 * time.Millisecond }, "100ms"},
		"key without request":    {func(c *linkerdproxy.Config) { c.KeyFile = "/key.der" }, "CSRFile"},
		"key and store":          {func(c *linkerdproxy.Config) { c.KeyFile, c.CSRFile, c.Dir = "/key.der", "/csr.p8", "/store" }, "one of them"},
	} {
		cfg := config(t, web, anchors)
		c.edit(&cfg)
		require.ErrorContains(t, must.Err(linkerdproxy.New(cfg)), c.want, name)
	}
	require.ErrorContains(t, must.Err(linkerdproxy.New(linkerdproxy.Config{Name: "web"})), "is not SERVICEACCOUNT.NAMESPACE")
	for _, addr := range []string{"linkerd-identity", "linkerd-identity.linkerd.svc.cluster.local.:8080", "10.0.0.1", "[fd00::1]:8080", "fd00::1"} {
		cfg := config(t, web, anchors)
		cfg.Certifier.Addr = addr
		must.Get(linkerdproxy.New(cfg))(t, addr)
	}
	seed := config(t, "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local", anchors)
	seed.Certifier.Name = "linkerd-identity.linkerd.sa.linkerd-identity.linkerd.cluster.local"
	must.Get(linkerdproxy.New(seed))(t)
}

// An Identity runs once at a time, ends well, and does not print its key.
func TestRun(t *testing.T) {
	t.Parallel()
	s := newService(t, time.Hour)
	id := must.Get(linkerdproxy.NewWith(config(t, web, s.ca.Bundle().MarshalPEM()), s))(t)
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err := id.Ready(short)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	ctx, stop := context.WithCancel(t.Context())
	for range 2 { // the key stays
		done := make(chan error, 1)
		go func() { done <- id.Run(ctx) }()
		require.NoError(t, id.Ready(t.Context()))
		stop()
		require.NoError(t, <-done)
		ctx, stop = context.WithCancel(t.Context())
	}
	stop()
	for _, text := range []string{fmt.Sprint(id), fmt.Sprintf("%#v", id), slog.AnyValue(id).Resolve().String()} {
		assert.Equal(t, "linkerdproxy.Identity("+web+")", text)
	}
	require.NoError(t, id.Close())
	require.Error(t, id.Run(t.Context()))
	assert.Equal(t, elliptic.P256(), must.Get(id.Credential())(t).Leaf().PublicKey.(*ecdsa.PublicKey).Curve)
}

// A certifier that changes its issuer before the proxies have the anchor of the new one replaces nothing.
func TestIssuerBeforeAnchors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, next := newService(t, 2*time.Second), newService(t, time.Hour)
		id := certified(t, s, web, func(c *linkerdproxy.Config) { c.MinRefresh = 100 * time.Millisecond })
		first := must.Get(id.Credential())(t)
		s.sign(next.ca)
		eventually(t, func() bool { return id.Report().Identities[0].Err != nil }, "a refusal")
		assert.Same(t, first, must.Get(id.Credential())(t))
		assert.Equal(t, "200 ready", get(t, id.Handler(), "/ready"))
	})
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}

// An answer on the wire that says that it has ended already, and each refusal, leaves what there is, and is followed by another
// request ten seconds later.
func TestAnswersOnTheWire(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-8-2", "LNK-8-6", "LNK-16-4", "LNK-16-10", "LNK-17-15")
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "cluster.local")
		fake := caclienttest.NewLinkerd(caclienttest.InMemory(t), ca, "/ns/emojivoto/sa/web")
		service := must.Get(linkerd.New(linkerd.Options{Endpoint: fake.Endpoint(), Mesh: meshtest.Mesh()}))(t)
		id := must.Get(linkerdproxy.NewWith(config(t, web, ca.Bundle().MarshalPEM()), service))(t)
		const life = 10 * time.Minute
		lives := func(d time.Duration) {
			ca.EditTemplates(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(d) })
		}
		lives(life)
		run(t, id)
		require.NoError(t, id.Ready(t.Context()))
		first := must.Get(id.Credential())(t)

		// keeps waits for the next three requests, which change nothing.
		keeps := func(what string) {
			t.Helper()
			n := fake.Requests()
			for fake.Requests() == n {
				time.Sleep(time.Second)
				synctest.Wait()
			}
			n = fake.Requests()
			time.Sleep(20 * time.Second)
			synctest.Wait()
			assert.Equal(t, 2, fake.Requests()-n, what)
			require.Same(t, first, must.Get(id.Credential())(t), what)
			require.Error(t, id.Report().Identities[0].Err, what)
		}
		lives(-time.Second)
		keeps("valid until a second ago")
		for kind, code := range map[error]string{caclient.ErrInvalid: "invalid argument", caclient.ErrUnavailable: "unavailable"} {
			fake.Refuse(&caclient.Error{Op: "sign", Kind: kind, Err: caclient.ErrInvalid})
			keeps(code)
		}
		fake.Refuse(nil)
		lives(life)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.True(t, must.Get(id.Credential())(t).NotAfter().After(first.NotAfter()))
		assert.True(t, time.Now().Before(first.NotAfter()), "nothing has expired")
	})
}

const (
	web       = meshtest.Web
	voting    = meshtest.Voting
	certifier = meshtest.Certifier
)

// service is a certifier in this process.
type service struct {
	ca      *spiffetest.CA
	life    time.Duration     // of certificates
	anchors *spiffe.BundleSet // of the proxies

	mu   sync.Mutex
	csrs [][]byte
	at   []time.Time
	err  error
}

func newService(t testing.TB, life time.Duration) *service {
	ca := spiffetest.NewCA(t, "cluster.local")
	return &service{ca: ca, life: life, anchors: ca.Bundles()}
}

func (s *service) Sign(ctx context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	s.mu.Lock()
	s.csrs, s.at = append(s.csrs, csr.DER()), append(s.at, time.Now())
	err, life, ca := s.err, s.life, s.ca
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return ca.Certify(ctx, csr, csr.SANs(), life)
}

func (s *service) FetchBundles(context.Context) (*spiffe.BundleSet, error) {
	return s.anchors, nil
}

// fail has requests fail, until fail(nil).
func (s *service) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// sign has another CA sign.
func (s *service) sign(ca *spiffetest.CA) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ca = ca
}

// asked returns when requests came.
func (s *service) asked() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Time(nil), s.at...)
}

// config is a good configuration for a certifier elsewhere.
func config(t testing.TB, name string, anchors []byte) linkerdproxy.Config {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte(meshtest.Token(name)+"\n"), 0o600))
	return linkerdproxy.Config{
		Name: name, Anchors: anchors, TokenFile: token,
		Certifier: linkerdproxy.Service{Addr: "linkerd-identity.linkerd.svc.cluster.local", Name: certifier},
	}
}

// run runs an identity until the test is over.
func run(t testing.TB, id *linkerdproxy.Identity) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- id.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
}

// certified returns an identity that has a certificate of s.
func certified(t testing.TB, s *service, name string, edit ...func(*linkerdproxy.Config)) *linkerdproxy.Identity {
	t.Helper()
	cfg := config(t, name, s.ca.Bundle().MarshalPEM())
	for _, e := range edit {
		e(&cfg)
	}
	id := must.Get(linkerdproxy.NewWith(cfg, s))(t)
	run(t, id)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, id.Ready(ctx))
	return id
}

// get returns the status and the body of an answer.
func get(t testing.TB, h http.Handler, path string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

// eventually waits until f is true.
func eventually(t testing.TB, f func() bool, what string) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come: " + what)
		}
	}
}
