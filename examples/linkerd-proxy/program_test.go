package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// started runs the program until the test is over, and returns where it listens.
func started(t *testing.T, args, environ []string, log io.Writer) (at map[string]string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	written, done := make(chan string, 10), make(chan error, 1)
	go func() {
		done <- run(ctx, append(args, "-inbound", "127.0.0.1:0", "-outbound", "127.0.0.1:0", "-admin", "127.0.0.1:0"), environ, lines(func(line string) { written <- line }), log)
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	at = map[string]string{}
	for range 3 {
		select {
		case <-time.After(20 * time.Second):
			require.FailNow(t, "the program does not listen")
		case line := <-written:
			name, addr, ok := strings.Cut(strings.TrimSpace(line), ": ")
			require.True(t, ok)
			at[name] = addr
		case err := <-done:
			done <- nil
			require.FailNow(t, "the program has ended", "%v", err)
		}
	}
	return at
}

func isReady(t *testing.T, at map[string]string) {
	t.Helper()
	eventually(t, func() bool {
		status, _ := programtest.Page(t, "http://"+at["admin"]+"/ready")
		return status == http.StatusOK
	}, "readiness")
}

// In a pod whose identity is disabled nothing names the workload. The program forwards without TLS both ways then, also to a server
// of which the destination service says that it has an identity, and says so in its log. What needs an identity is
// refused.
func TestWithoutIdentity(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-1")
	app := application(t)
	there := must.Get(netip.ParseAddrPort(app))(t)
	d := meshtest.NewDestination(t, nil)
	d.Begin("app.mesh:80", meshtest.Added(linkerdproxy.Endpoint{Addr: there, Identity: voting}))
	var log quietLog
	at := started(t, []string{"-app", app, "-route", "app.test=" + app}, []string{"LINKERD2_PROXY_DESTINATION_SVC_ADDR=" + d.Service.Addr}, &log)
	assert.Contains(t, log.String(), "the proxy has no identity, and forwards without TLS both ways")
	isReady(t, at)

	for _, c := range []struct{ server, host string }{{"inbound", "app.test"}, {"outbound", "app.test"}, {"outbound", "app.mesh"}} {
		status, body := ask(t, browser(t, at[c.server], false, nil), "http://"+c.host+"/")
		assert.Equal(t, 200, status, body)
		assert.Contains(t, body, `client=[]`)
	}
	status, body := ask(t, browser(t, at["outbound"], false, nil), "http://app.mesh/", "l5d-require-id", voting)
	assert.Equal(t, 502, status, "the request asks for an identity")
	assert.Contains(t, body, "l5d-require-id")

	// TLS is for the application, whatever its server name, and none at all.
	for _, name := range []string{web, ""} {
		c, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", at["inbound"], &tls.Config{ServerName: name, InsecureSkipVerify: true})
		if err == nil {
			_ = c.Close()
		}
		require.Error(t, err, "the application speaks no TLS")
	}
	_, text := programtest.Page(t, "http://"+at["admin"]+"/metrics")
	metricstest.Require(t, text)
	assert.Contains(t, text, `svidkit_linkerdproxy_inbound_connections_total{part="proxy",kind="passthrough"} 2`)
	assert.Contains(t, text, `svidkit_linkerdproxy_inbound_connections_total{part="proxy",kind="tls"} 0`)

	for _, c := range []struct {
		args []string
		env  string
		want string
	}{
		{[]string{"-client-id"}, "", "-client-id cannot be set"},
		{[]string{"-route", "other.test=127.0.0.1:1=" + voting}, "", "cannot verify"},
		{nil, "LINKERD2_PROXY_IDENTITY_TOKEN_FILE=/token", "LINKERD2_PROXY_LOCAL_IDENTITY_NAME: it is not set, and is required"},
		{nil, "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=1", "LINKERD2_PROXY_LOCAL_IDENTITY_NAME: it is not set, and is required"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a program that does not refuse it
		err := run(ctx, ports(c.args...), []string{c.env}, io.Discard, io.Discard)
		cancel()
		require.ErrorContains(t, err, c.want)
		require.ErrorAs(t, err, new(program.UsageError))
	}
}

// The destination service of the mesh says where requests go: to a server with an identity by TLS with that identity, and to one
// without in plaintext, as each address changes. A route of the program comes first. While there is no answer, nothing is sent
// without TLS, also with -plaintext, which is for hosts that are not of the mesh.
func TestDestination(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-12.1-6", "LNK-15-1", "LNK-15-3")
	p := newPlace(t)
	d := meshtest.NewDestination(t, p.Controller)
	other := certified(t, p.Controller, voting)
	meshed, _ := inbound(t, other, func(c *config) { c.clientID = true })
	bare := application(t)
	at := func(addr, identity string) linkerdproxy.Endpoint {
		return linkerdproxy.Endpoint{Addr: netip.MustParseAddrPort(addr), Identity: identity}
	}
	external := linkerdproxy.Endpoint{Addr: netip.MustParseAddrPort(meshed), Identity: voting, ServerName: "external.test"}
	d.Begin("meshed.mesh:80", meshtest.Added(at(meshed, voting)))
	d.Begin("bare.mesh:80", meshtest.Added(at(bare, "")))
	d.Begin("wrong.mesh:80", meshtest.Added(at(meshed, web)))
	d.Begin("named.mesh:80", meshtest.Added(external))
	d.Begin("empty.mesh:80", meshtest.None(true))
	d.Begin(bare, meshtest.None(false))
	d.Refuse("down.mesh:80", grpchttp.Errorf(grpchttp.Unavailable, "it is down"))
	env := append(p.environ(), "LINKERD2_PROXY_DESTINATION_ADDR="+d.Service.Addr, "LINKERD2_PROXY_DESTINATION_IDENTITY="+d.Service.Name)

	strict := started(t, []string{"-app", bare, "-route", "routed.mesh=" + bare}, env, t.Output())
	isReady(t, strict)
	out := browser(t, strict["outbound"], false, nil)
	status, body := ask(t, out, "http://meshed.mesh/")
	assert.Equal(t, 200, status, body)
	assert.Contains(t, body, `client=["`+web+`"]`, "by mutual TLS")
	status, body = ask(t, out, "http://meshed.mesh/", "l5d-require-id", voting)
	assert.Equal(t, 200, status, body)
	status, body = ask(t, out, "http://bare.mesh/")
	assert.Equal(t, 200, status, body)
	assert.Contains(t, body, `client=[]`)
	status, body = ask(t, out, "http://routed.mesh/")
	assert.Equal(t, 200, status, body)
	for host, why := range map[string]string{
		"wrong.mesh": "TLS with", "named.mesh": "TLS with", "empty.mesh": "no endpoints", bare: "-plaintext is not set",
	} {
		status, body = ask(t, out, "http://"+host+"/")
		assert.Equal(t, 502, status, host)
		assert.Contains(t, body, why, host)
	}
	for _, asked := range d.Asked() {
		assert.NotEqual(t, "routed.mesh:80", asked.Authority)
	}
	proven := false
	for _, asked := range d.Asked() {
		proven = proven || asked.Client == web
	}
	assert.True(t, proven, "the proxy proves itself to the destination service")

	// The server gets an identity: the next request is by TLS.
	d.Push("bare.mesh:80", meshtest.Added(at(meshed, voting)), meshtest.Removed(netip.MustParseAddrPort(bare)))
	eventually(t, func() bool {
		_, body := ask(t, out, "http://bare.mesh/")
		return strings.Contains(body, `client=["`+web+`"]`)
	}, "TLS")

	p.store = t.TempDir()
	env = append(p.environ(), "LINKERD2_PROXY_DESTINATION_ADDR="+d.Service.Addr, "LINKERD2_PROXY_DESTINATION_IDENTITY="+d.Service.Name)
	open := started(t, []string{"-app", bare, "-plaintext"}, env, io.Discard)
	isReady(t, open)
	out = browser(t, open["outbound"], false, nil)
	status, body = ask(t, out, "http://"+bare+"/")
	assert.Equal(t, 200, status, body)
	for _, host := range []string{"empty.mesh", "wrong.mesh"} {
		status, body = ask(t, out, "http://"+host+"/")
		assert.Equal(t, 502, status, body)
	}
	destinations, err := linkerdproxy.NewDestinations(t.Context(), other.Identity, d.Service, nil)
	require.NoError(t, err)
	eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // and not dialTime
		defer cancel()
		_, err = (&options{plaintext: true}).find(ctx, destinations, "down.mesh:80")
		require.Error(t, err)
		return strings.Contains(err.Error(), "it is down")
	}, "the reason")
}

// With -anonymous-after-expiry a proxy whose certificate has expired goes on as a client without one, which servers then do not
// know; without it no new connection is made. Once there is a certificate again, it is used.
func TestAnonymousAfterExpiry(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "LNK-10-9")
	for _, anonymous := range []bool{false, true} {
		c := meshtest.New(t, meshtest.Options{Life: 2 * time.Second})
		peers := meshtest.New(t, meshtest.Options{Life: time.Hour, Authority: c.Authority})
		there, _ := inbound(t, certified(t, peers, voting), func(c *config) { c.clientID = true })
		p := &place{Controller: c, store: t.TempDir()}
		p.token = c.Config(t, web).TokenFile
		args := []string{"-app", "127.0.0.1:1", "-route", "app.test=" + there + "=" + voting}
		if anonymous {
			args = append(args, "-anonymous-after-expiry")
		}
		at := started(t, args, append(p.environ(), "LINKERD2_PROXY_IDENTITY_MIN_REFRESH=100ms"), io.Discard)
		isReady(t, at)
		out := browser(t, at["outbound"], false, nil)
		status, body := ask(t, out, "http://app.test/")
		require.Equal(t, 200, status, body)
		require.Contains(t, body, `client=["`+web+`"]`)
		c.Stop()
		eventually(t, func() bool {
			status, _ := programtest.Page(t, "http://"+at["admin"]+"/live")
			return status == http.StatusServiceUnavailable
		}, "expiry")
		// A connection that has proven the workload stays open; by HTTP/2 there is none yet.
		h2 := browser(t, at["outbound"], true, nil)
		status, body = ask(t, h2, "http://app.test/")
		if !anonymous {
			assert.Equal(t, 502, status)
			assert.Contains(t, body, "expired")
			continue
		}
		assert.Equal(t, 200, status, body)
		assert.Contains(t, body, `client=[]`)
		c.Start(t)
		eventually(t, func() bool {
			status, body := ask(t, h2, "http://app.test/")
			return status == 200 && strings.Contains(body, `client=["`+web+`"]`)
		}, "a certificate")
	}
}

// TestAlert: a proxy that the server refuses says so in its answer, however quick it is to write, and whatever it writes.
func TestAlert(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	server, client := certified(t, s, web), certified(t, s, voting)
	config := server.ServerConfig().Clone()
	config.VerifyConnection = func(tls.ConnectionState) error { return errors.New("not of this mesh") }
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_ = tls.Server(c, config).HandshakeContext(t.Context())
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
	var wg sync.WaitGroup
	for _, http2 := range []bool{false, true} {
		for i := range rounds.Of(20) {
			// Of requests that share a connection of HTTP/2, net/http tries those again that had not begun, and fails for their bodies.
			size := []int{0, 1, 1 << 10}[i%3] // of HTTP/1 one write
			c := browser(t, outbound(t, client, endpoint{addr: l.Addr().String(), identity: web}), http2, nil)
			wg.Go(func() {
				resp, err := c.Post("http://app.test/", "", strings.NewReader(strings.Repeat("x", size)))
				if !assert.NoError(t, err) {
					return
				}
				defer resp.Body.Close()
				said, _ := io.ReadAll(resp.Body)
				assert.Equal(t, http.StatusBadGateway, resp.StatusCode)
				assert.Contains(t, string(said), "remote error: tls: bad certificate", "by HTTP/2: %v, %d bytes", http2, size)
			})
		}
	}
	wg.Wait()
}

var update = flag.Bool("update", false, "write the table in README.md")

func TestMain(m *testing.M) {
	rounds.Parallel(16)
	m.Run()
}

// README.md has the table of the environment.
func TestTable(t *testing.T) {
	t.Parallel()
	var table bytes.Buffer
	require.NoError(t, linkerdproxy.WriteEnviron(&table, true))
	programtest.Section(t, *update, "README.md", "<!-- environment -->\n", "<!-- /environment -->\n", "\n"+table.String()+"\n")
}

// What is wrong with the flags or the environment is told before anything listens or is written.
func TestRefuses(t *testing.T) {
	t.Parallel()
	busy := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-route", "x"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "=127.0.0.1:1"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "app.test=127.0.0.1:1="}, "HOST:PORT=ADDRESS=IDENTITY"}, // which was to be by TLS
		{[]string{"-route", "app.test:http=127.0.0.1:1"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "app.test=127.0.0.1:1=" + web, "-route", "APP.test.:80=127.0.0.1:2"}, "another route for app.test:80"},
		{[]string{"-unknown"}, "unknown"},
		{[]string{"surplus"}, "surplus"},
		{[]string{"-admin", busy.Addr().String()}, "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB"},
	} {
		err := run(t.Context(), c.args, []string{"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web}, io.Discard, io.Discard)
		require.ErrorAs(t, err, new(program.UsageError))
		require.ErrorContains(t, err, c.want)
	}
	var out, help bytes.Buffer
	require.ErrorIs(t, run(t.Context(), []string{"-help"}, nil, &help, io.Discard), flag.ErrHelp)
	programtest.Help(t, help.String(), "")
	assert.NotContains(t, help.String(), "\nFlags:\n", "each is in a group")
	assert.Contains(t, help.String(), "LINKERD2_PROXY_IDENTITY_STORE_DIR")
	require.ErrorIs(t, run(t.Context(), []string{"-version"}, nil, &out, io.Discard), flag.ErrHelp)
	assert.Regexp(t, `^linkerd-proxy \S.*, go\S+\n$`, out.String())
}

// place is what the program of a workload has to be given.
type place struct {
	*meshtest.Controller
	token, store string
}

func newPlace(t *testing.T) *place {
	t.Helper()
	p := &place{Controller: meshtest.New(t, meshtest.Options{Life: time.Hour}), store: t.TempDir()}
	p.token = p.Config(t, web).TokenFile
	return p
}

// environ is the environment of a workload.
func (p *place) environ() []string {
	return []string{
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web,
		"LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(p.Authority.Bundle().MarshalPEM()),
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=" + p.token,
		"LINKERD2_PROXY_IDENTITY_STORE_DIR=" + p.store,
		"LINKERD2_PROXY_IDENTITY_ADDR=" + p.Addr,
		"LINKERD2_PROXY_IDENTITY_IDENTITY=" + certifier,
		"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=1",
	}
}

// ports has the flags for any ports.
func ports(more ...string) []string {
	return append([]string{"-app", "127.0.0.1:1", "-inbound", "127.0.0.1:0", "-outbound", "127.0.0.1:0", "-admin", "127.0.0.1:0"}, more...)
}

// A port that is taken, and a store that is missing, end the program with their reason.
func TestEnds(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	err := run(t.Context(), ports("-admin", p.listener(t)), p.environ(), io.Discard, io.Discard)
	require.ErrorContains(t, err, "-admin: listen")
	require.ErrorContains(t, err, "in use")
	require.NotErrorAs(t, err, new(program.UsageError))
	err = run(t.Context(), ports("-opaque", "-client-id"), p.environ(), io.Discard, io.Discard)
	require.ErrorContains(t, err, "-client-id is for HTTP")
	p.store = filepath.Join(t.TempDir(), "missing")
	require.ErrorContains(t, run(t.Context(), ports(), p.environ(), io.Discard, io.Discard), "mount a directory in memory")
	require.NoFileExists(t, p.store)
}

func (p *place) listener(t *testing.T) string {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// lines passes on each line that is written.
type lines func(string)

func (f lines) Write(p []byte) (int, error) {
	f(string(p))
	return len(p), nil
}

// The program says where it listens, and requires TLS for the ports of the environment. A signal ends it well.
func TestRunPorts(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	ctx, cancel := context.WithCancel(t.Context())
	at, done := make(chan string, 10), make(chan error, 1)
	go func() {
		done <- run(ctx, ports("-v"), p.environ(), lines(func(line string) { at <- line }), io.Discard)
	}()
	addrs := map[string]string{}
	for range 3 {
		name, addr, ok := strings.Cut(strings.TrimSpace(<-at), ": ")
		require.True(t, ok)
		addrs[name] = addr
	}
	c := must.Get(net.Dial("tcp", addrs["inbound"]))(t)
	defer c.Close()
	must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\n\r\n"))(t)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err, "it is without TLS")
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	status, body := ask(t, browser(t, addrs["outbound"], false, nil), "http://127.0.0.1:1/")
	assert.Equal(t, 502, status)
	assert.Contains(t, body, "linkerd-proxy: outbound request not forwarded")
	eventually(t, func() bool {
		resp, err := browser(t, addrs["admin"], false, nil).Get("http://admin/ready")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == 200
	}, "readiness")
	cancel()
	require.NoError(t, <-done)
}

// TestInject: the webhook answers the API server over TLS, and follows its certificate and the trust anchors.
func TestInject(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	anchors, cert, key := filepath.Join(dir, "ca-bundle.crt"), filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	put := func(file string, data []byte) { require.NoError(t, os.WriteFile(file, data, 0o600)) }
	certify := func(ca *spiffetest.CA, edit ...func(*x509.Certificate)) *x509.CertPool {
		chain, signer := ca.Certificate("/injector", append(edit, func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{"linkerd-proxy-injector.linkerd.svc"} })...)
		keyPEM := must.Get(pki.MarshalPrivateKeyPEM(signer))(t)
		put(cert, pki.MarshalCertificatesPEM(chain...))
		put(key, keyPEM)
		pool := x509.NewCertPool()
		pool.AddCert(ca.Root())
		return pool
	}
	first, second := spiffetest.NewCA(t, "cluster.local"), spiffetest.NewCA(t, "cluster.local")
	put(anchors, pki.MarshalCertificatesPEM(first.Root()))
	trusted := certify(first)

	out, in := io.Pipe()
	log := new(quietLog)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		assert.NoError(t, runInjector(ctx, []string{"-addr", "127.0.0.1:0", "-cert", cert, "-key", key, "-anchors", anchors}, in, log))
		_ = in.Close()
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	line := make([]byte, 100)
	n := must.Get(out.Read(line))(t)
	url := strings.TrimSpace(strings.TrimPrefix(string(line[:n]), "webhook: "))

	review := func(roots *x509.CertPool) (patch string) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "linkerd-proxy-injector.linkerd.svc"}}
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport}).Post(url, "application/json", strings.NewReader(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview",
			"request":{"uid":"1","kind":{"kind":"Pod"},"namespace":"emojivoto","operation":"CREATE","object":{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web-1"},
			"spec":{"serviceAccountName":"web","containers":[{"name":"web"},{"name":"linkerd-proxy"}]}}}}`))
		require.NoError(t, err)
		defer resp.Body.Close()
		var answer struct {
			Response struct {
				Allowed bool
				Patch   []byte
			}
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
		assert.True(t, answer.Response.Allowed)
		return string(answer.Response.Patch)
	}
	patched := func(ca *spiffetest.CA, patch string) bool {
		pem := pki.MarshalCertificatesPEM(ca.Root())
		text := must.Get(json.Marshal(string(pem)))(t)
		return strings.Contains(patch, strings.Trim(string(text), `"`)) || strings.Contains(patch, base64.StdEncoding.EncodeToString(pem))
	}
	patch := review(trusted)
	assert.Contains(t, patch, "web.emojivoto.serviceaccount.identity.linkerd.cluster.local")
	assert.True(t, patched(first, patch), patch)

	put(anchors, pki.MarshalCertificatesPEM(second.Root()))
	trusted = certify(second)
	assert.True(t, patched(second, review(trusted)))

	put(anchors, []byte("no PEM"))
	put(cert, []byte("no PEM"))
	put(key, nil)
	assert.True(t, patched(second, review(trusted)), "what was good before stays in use")
	assert.Contains(t, log.String(), "the trust anchors before stay in use")

	// A pair that is torn, not the own, weak, over or not begun leaves the last good one in use, and the log says why.
	third := spiffetest.NewCA(t, "cluster.local")
	for says, spoil := range map[string]func(){
		"damaged PEM block": func() {
			certify(third)
			data := must.Get(os.ReadFile(cert))(t)
			put(cert, append(data, data[:len(data)/2]...)) // torn behind the leaf
		},
		"private key does not match": func() {
			certify(third)
			pem := must.Get(pki.MarshalPrivateKeyPEM(third.SVID("/other").Signer()))(t)
			put(key, pem)
		},
		"weak": func() {
			small := must.Get(rsa.GenerateKey(rand.Reader, 1024))(t)
			self := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
			der := must.Get(x509.CreateCertificate(rand.Reader, self, self, small.Public(), small))(t)
			put(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
			put(key, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(small)}))
		},
		"has expired at": func() {
			certify(third, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
			})
		},
		"is valid from": func() {
			certify(third, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
			})
		},
	} {
		spoil()
		assert.True(t, patched(second, review(trusted)), says)
		pair := &ownPair{cert: cert, key: key}
		if says != "is valid from" { // without another it may be the clock
			assert.ErrorContains(t, pair.read(), says)
			assert.Nil(t, pair.last.Load())
		} else {
			assert.NoError(t, pair.read())
		}
	}
	assert.Equal(t, 1, strings.Count(log.String(), "the certificate before stays in use"), "one line for what each handshake meets: %s", log)
	review(certify(third))
}

// TestInjectFiles: what is missing at the start is named by its flag, and the printed objects are YAML that names what is there.
func TestInjectFiles(t *testing.T) {
	t.Parallel()
	none := filepath.Join(t.TempDir(), "none")
	require.ErrorContains(t, runInjector(t.Context(), []string{"-anchors", none}, io.Discard, io.Discard), "-anchors: ")
	require.ErrorContains(t, runInjector(t.Context(), []string{"-anchors", none, "x"}, io.Discard, io.Discard), `"x" is not understood`)
	anchors := filepath.Join(t.TempDir(), "anchors.pem")
	require.NoError(t, os.WriteFile(anchors, pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root()), 0o600))
	require.ErrorContains(t, runInjector(t.Context(), []string{"-anchors", anchors, "-cert", none}, io.Discard, io.Discard), "-cert and -key: ")

	var out bytes.Buffer
	_ = runInjector(t.Context(), []string{"-install", "kubernetes", "-with", "namespace=mesh"}, &out, io.Discard) // flag.ErrHelp
	kinds := map[string]bool{}
	for d := yaml.NewDecoder(&out); ; {
		var o struct {
			Kind     string
			Metadata struct{ Namespace string }
		}
		if d.Decode(&o) != nil {
			break
		}
		kinds[o.Kind] = true
		assert.Contains(t, []string{"mesh", ""}, o.Metadata.Namespace)
	}
	assert.Equal(t, map[string]bool{"ServiceAccount": true, "Deployment": true, "Service": true, "MutatingWebhookConfiguration": true}, kinds)
}
