package main

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
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

// read returns the status and the body of an answer.
func read(t *testing.T, url string) (int, string) {
	t.Helper()
	resp := must.Get(http.Get(url))(t)
	defer resp.Body.Close()
	return resp.StatusCode, string(must.Get(io.ReadAll(resp.Body))(t))
}

func isReady(t *testing.T, at map[string]string) {
	t.Helper()
	eventually(t, func() bool {
		status, _ := read(t, "http://"+at["admin"]+"/ready")
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
	_, text := read(t, "http://"+at["admin"]+"/metrics")
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
			status, _ := read(t, "http://"+at["admin"]+"/live")
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
