package linkerdproxy_test

import (
	"bytes"
	"encoding/base64"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
)

const (
	seedWeb       = "web.emojivoto.sa.linkerd-identity.linkerd.cluster.local"
	seedCertifier = "linkerd-identity.linkerd.sa.linkerd-identity.linkerd.cluster.local"
	seedDst       = "linkerd-controller.linkerd.sa.linkerd-identity.linkerd.cluster.local"
)

// seed is the environment of the first design, with the names of today so that one certifier serves all tests.
func seed(t testing.TB, s *service) []string {
	t.Helper()
	cfg := config(t, web, nil)
	return []string{
		"LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(s.ca.Bundle().MarshalPEM()),
		"LINKERD2_PROXY_IDENTITY_STORE_DIR=/var/run/linkerd/identity",
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=" + cfg.TokenFile,
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web,
		"LINKERD2_PROXY_IDENTITY_ADDR=linkerd-identity.linkerd.svc.cluster.local",
		"LINKERD2_PROXY_IDENTITY_IDENTITY=" + certifier,
		"LINKERD2_PROXY_DESTINATION_ADDR=linkerd-destination.linkerd.svc.cluster.local",
		"LINKERD2_PROXY_DESTINATION_IDENTITY=linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local",
	}
}

// The environment of the first design, as an injector writes it.
func TestFirstDesign(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-1", "LNK-12.1-1", "LNK-12.1-2", "LNK-12.1-3", "LNK-12.1-4", "LNK-12.1-5", "LNK-12.1-6", "LNK-12.1-8", "LNK-17-2")
	s := newService(t, time.Hour)
	anchors := s.ca.Bundle().MarshalPEM()
	e := must.Get(linkerdproxy.FromEnviron([]string{
		"PATH=/bin",
		"LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(anchors),
		"LINKERD2_PROXY_IDENTITY_STORE_DIR=/var/run/linkerd/identity",
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=/var/run/secrets/kubernetes.io/serviceaccount",
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + seedWeb,
		"LINKERD2_PROXY_DESTINATION_ADDR=linkerd-destination.linkerd.svc.cluster.local",
		"LINKERD2_PROXY_DESTINATION_IDENTITY=" + seedDst,
		"LINKERD2_PROXY_IDENTITY_ADDR=linkerd-identity.linkerd.svc.cluster.local",
		"LINKERD2_PROXY_IDENTITY_IDENTITY=" + seedCertifier,
		"LINKERD2_PROXY_POD_NAMESPACE=emojivoto", "LINKERD2_PROXY_TLS_CERT=/cert", // of the injector before
	}, nil))(t)
	assert.Equal(t, &linkerdproxy.Environment{
		Config: linkerdproxy.Config{
			Name: seedWeb, Anchors: anchors, TokenFile: "/var/run/secrets/kubernetes.io/serviceaccount", Dir: "/var/run/linkerd/identity",
			Certifier:  linkerdproxy.Service{Addr: "linkerd-identity.linkerd.svc.cluster.local", Name: seedCertifier},
			MinRefresh: 10 * time.Second, MaxRefresh: 24 * time.Hour,
		},
		Destination: linkerdproxy.Service{Addr: "linkerd-destination.linkerd.svc.cluster.local", Name: seedDst},
	}, e)
	must.Get(linkerdproxy.New(e.Config))(t)
}

// The environment that an injector of today writes.
func TestToday(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-12.2-1", "LNK-12.2-2", "LNK-12.2-3", "LNK-12.2-4", "LNK-12.2-6", "LNK-12.2-7", "LNK-12.2-8", "LNK-12.2-12", "LNK-12.2-13", "LNK-12.2-14", "LNK-12.2-15")
	s := newService(t, time.Hour)
	anchors := string(s.ca.Bundle().MarshalPEM())
	const dst = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"
	env := []string{
		"LINKERD2_PROXY_IDENTITY_DIR=/var/run/linkerd/identity/end-entity",
		"LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS=" + anchors,
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=/var/run/secrets/tokens/linkerd-identity-token",
		"LINKERD2_PROXY_IDENTITY_SVC_ADDR=linkerd-identity-headless.linkerd.svc.cluster.local.:8080",
		"LINKERD2_PROXY_IDENTITY_LOCAL_NAME=" + web,
		"LINKERD2_PROXY_IDENTITY_SVC_NAME=" + certifier,
		"LINKERD2_PROXY_DESTINATION_SVC_ADDR=linkerd-dst-headless.linkerd.svc.cluster.local.:8086",
		"LINKERD2_PROXY_DESTINATION_SVC_NAME=" + dst,
		"LINKERD2_PROXY_POLICY_SVC_ADDR=linkerd-policy.linkerd.svc.cluster.local.:8090",
		"LINKERD2_PROXY_POLICY_SVC_NAME=" + dst,
		"LINKERD2_PROXY_IDENTITY_MIN_REFRESH=500ms", "LINKERD2_PROXY_IDENTITY_MAX_REFRESH=1d",
		"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=8080,9000-9002", "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_IDENTITY=9001",
		"_pod_sa=web", "_pod_ns=emojivoto", "_l5d_ns=linkerd", "_l5d_trustdomain=cluster.local",
		"LINKERD2_PROXY_LOG=info", // not of the identity
	}
	e := must.Get(linkerdproxy.FromEnviron(env, nil))(t)
	assert.Equal(t, &linkerdproxy.Environment{
		Config: linkerdproxy.Config{
			Name: web, Anchors: []byte(anchors), TokenFile: "/var/run/secrets/tokens/linkerd-identity-token",
			Dir: "/var/run/linkerd/identity/end-entity", CurrentNames: true,
			Certifier:  linkerdproxy.Service{Addr: "linkerd-identity-headless.linkerd.svc.cluster.local.:8080", Name: certifier},
			MinRefresh: 500 * time.Millisecond, MaxRefresh: 24 * time.Hour,
		},
		Destination: linkerdproxy.Service{Addr: "linkerd-dst-headless.linkerd.svc.cluster.local.:8086", Name: dst},
		Policy:      linkerdproxy.Service{Addr: "linkerd-policy.linkerd.svc.cluster.local.:8090", Name: dst},
		RequireTLS:  []int{8080, 9000, 9001, 9002}, RequireIdentity: []int{9001},
	}, e)
	must.Get(linkerdproxy.New(e.Config))(t)

	// In the pod of the certifier today's name is there, and counts for nothing.
	e = must.Get(linkerdproxy.FromEnviron(change(env, "LINKERD2_PROXY_IDENTITY_SVC_ADDR=localhost.:8080"), nil))(t)
	assert.Equal(t, linkerdproxy.Service{Addr: "localhost.:8080"}, e.Certifier)

	// SERVER_ID and SERVER_NAME in the place of LOCAL_NAME.
	env = change(env, "LINKERD2_PROXY_IDENTITY_LOCAL_NAME=", "LINKERD2_PROXY_IDENTITY_SERVER_ID="+web, "LINKERD2_PROXY_IDENTITY_SERVER_NAME="+web)
	e = must.Get(linkerdproxy.FromEnviron(env, nil))(t)
	assert.Equal(t, web, e.Name)
}

// change returns an environment in which other values take the place of those of the same name.
func change(env []string, other ...string) []string {
	var out []string
	for _, line := range env {
		name, _, _ := strings.Cut(line, "=")
		kept := true
		for _, o := range other {
			kept = kept && !strings.HasPrefix(o, name+"=")
		}
		if kept {
			out = append(out, line)
		}
	}
	return append(out, other...)
}

// Every bad value is refused with the name of its variable, and all at once.
func TestEnvironRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-2", "LNK-11-14", "LNK-11-15", "LNK-12.2-5", "LNK-12.2-9", "LNK-12.2-10", "LNK-12.2-11")
	s := newService(t, time.Hour)
	good := seed(t, s)
	must.Get(linkerdproxy.FromEnviron(good, nil))(t)
	const p = "LINKERD2_PROXY_IDENTITY_"
	for _, c := range []struct{ set, name, want string }{
		{p + "TRUST_ANCHORS_BLOB=", p + "TRUST_ANCHORS_BLOB", "required"},
		{p + "TRUST_ANCHORS_BLOB=-----BEGIN CERTIFICATE-----", p + "TRUST_ANCHORS_BLOB", "base64"},
		{p + "TRUST_ANCHORS_BLOB=aGVsbG8=", p + "TRUST_ANCHORS_BLOB", "trust anchors"},
		{p + "TRUST_ANCHORS=" + string(s.ca.Bundle().MarshalPEM()), p + "TRUST_ANCHORS", "one of them"},
		{"LINKERD_PROXY_TRUST_ANCHORS_BLOB=x", "LINKERD_PROXY_TRUST_ANCHORS_BLOB", p + "TRUST_ANCHORS_BLOB"},
		{p + "STORE_DIR=", p + "STORE_DIR", "required"},
		{p + "DIR=/elsewhere", p + "DIR", "another value"},
		{p + "TOKEN_FILE=", p + "TOKEN_FILE", "required"},
		{"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=", "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", "required"},
		{"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=web", "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", "SERVICEACCOUNT"},
		{"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=Web" + web[3:], "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", "RFC 1123"},
		{"LINKERD2_PROXY_LOCAL_IDENTITY=" + voting, "LINKERD2_PROXY_LOCAL_IDENTITY", "another value"},
		{p + "LOCAL_NAME=" + voting, p + "LOCAL_NAME", "another value"},
		{p + "ADDR=", p + "ADDR", "required"},
		{p + "ADDR=linkerd-identity:0", p + "ADDR", "host:port"},
		{p + "ADDR=localhost:8080", p + "ADDR", "leave the name empty"},
		{p + "ADDR=127.0.0.1", p + "ADDR", "leave the name empty"},
		{p + "IDENTITY=", p + "ADDR", "set the name"},
		{p + "IDENTITY=" + voting, p + "IDENTITY", "certifier of the mesh"},
		{p + "IDENTITY=" + seedCertifier, p + "IDENTITY", "does not end"},
		{p + "SVC_ADDR=elsewhere:8080", p + "SVC_ADDR", "another value"},
		{"LINKERD2_PROXY_DESTINATION_ADDR=localhost", "LINKERD2_PROXY_DESTINATION_ADDR", "leave the name empty"},
		{"LINKERD2_PROXY_DESTINATION_IDENTITY=", "LINKERD2_PROXY_DESTINATION_ADDR", "set the name"},
		{"LINKERD2_PROXY_DESTINATION_ADDR=", "LINKERD2_PROXY_DESTINATION_ADDR", "it is not set, and LINKERD2_PROXY_DESTINATION_IDENTITY is"},
		{p + "KEY_FILE=/key.der", p + "CSR_FILE", "required"},
		{p + "MIN_REFRESH=1.5h", p + "MIN_REFRESH", "digits"},
		{p + "MIN_REFRESH=10", p + "MIN_REFRESH", "digits"},
		{p + "MIN_REFRESH=-1s", p + "MIN_REFRESH", "digits"},
		{p + "MIN_REFRESH=99999999999999999999d", p + "MIN_REFRESH", "digits"},
		{p + "MIN_REFRESH=99ms", p + "MIN_REFRESH", "100ms"},
		{p + "MAX_REFRESH=9s", p + "MAX_REFRESH", "MIN_REFRESH, 10s"},
		{p + "MIN_REFRESH=25h", p + "MAX_REFRESH", "less"},
		{p + "DISABLED=false", p + "DISABLED", "cannot be disabled"},
		{p + "SPIRE_WORKLOAD_API_ADDRESS=/s.sock", p + "SPIRE_WORKLOAD_API_ADDRESS", "SPIFFE"},
		{p + "SPIRE_SOCKET=/s.sock", p + "SPIRE_SOCKET", "SPIFFE"},
		{"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=0", "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS", "port"},
		{"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=90-80", "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS", "port"},
		{"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_IDENTITY=65536", "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_IDENTITY", "port"},
	} {
		_, err := linkerdproxy.FromEnviron(change(good, c.set), nil)
		require.Error(t, err, c.set)
		require.ErrorContains(t, err, "environment variable "+c.name, c.set)
		require.ErrorContains(t, err, c.want, c.set)
	}
	_, err := linkerdproxy.FromEnviron(change(good, "LINKERD2_PROXY_LOCAL_IDENTITY_NAME=", p+"SERVER_ID=spiffe://root.linkerd.cluster.local/x", p+"SERVER_NAME="+web), nil)
	require.ErrorContains(t, err, p+"SERVER_ID")
	_, err = linkerdproxy.FromEnviron(change(good, "LINKERD2_PROXY_LOCAL_IDENTITY_NAME=", p+"SERVER_ID=x", p+"SERVER_NAME=x"), nil)
	require.ErrorContains(t, err, p+"SERVER_ID")
	_, err = linkerdproxy.FromEnviron([]string{"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web}, nil)
	for _, name := range []string{p + "TOKEN_FILE", p + "ADDR", p + "STORE_DIR", p + "TRUST_ANCHORS_BLOB"} {
		require.ErrorContains(t, err, name)
	}

	var log bytes.Buffer
	e := must.Get(linkerdproxy.FromEnviron(append(good, p+"TOKENFILE=/x", p+"MIN_REFRESH=0"), slog.New(slog.NewTextHandler(&log, nil))))(t)
	assert.Contains(t, log.String(), p+"TOKENFILE")
	assert.Equal(t, time.Second, e.MinRefresh, "no bound is not the default, and no tight loop")
}

// FuzzFromEnviron: any value of any variable is refused or is one that New takes.
func FuzzFromEnviron(f *testing.F) {
	s := newService(f, time.Hour)
	good := seed(f, s)
	var table bytes.Buffer
	require.NoError(f, linkerdproxy.WriteEnviron(&table, true))
	var names []string
	for line := range strings.Lines(table.String()) {
		if cells := strings.Split(line, "`"); len(cells) > 1 {
			names = append(names, cells[1])
		}
	}
	require.Greater(f, len(names), 25)
	f.Add(uint8(6), "%")
	for i, seed := range []string{"", "0", "10s", "1d", "-", "localhost", "127.0.0.1:1", "[::1]", "a:b:c", web, certifier, "8080-9090,1", "%", "fe80::1%eth0", "a b", "[", "]:1", "a%zz", "xn--a.test:1", "99999999999999999999999d"} {
		f.Add(uint8(i), seed)
	}
	f.Fuzz(func(t *testing.T, i uint8, value string) {
		if strings.ContainsRune(value, 0) {
			return
		}
		e, err := linkerdproxy.FromEnviron(change(good, names[int(i)%len(names)]+"="+value), nil)
		if err != nil {
			return
		}
		require.NotEmpty(t, e.Name, "an environment with an identity is not taken for one without")
		if e.AnchorsFile != "" {
			return // New reads it
		}
		must.Get(linkerdproxy.New(e.Config))(t)
	})
}

// A list of ports that repeats itself takes the memory of one.
func TestPorts(t *testing.T) {
	t.Parallel()
	e, err := linkerdproxy.FromEnviron(append(seed(t, newService(t, time.Hour)), "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS="+strings.Repeat("1-65535,", 200)), nil)
	require.NoError(t, err)
	assert.Len(t, e.RequireTLS, 65535)
	assert.Less(t, cap(e.RequireTLS), 100_000)
}

// Nothing names the workload, as in a pod whose identity is disabled: the proxy has no identity. The services of the control plane
// have addresses then, and no names. What only a proxy with an identity needs is refused: somebody has forgotten the name.
func TestWithoutIdentity(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-1")
	const p = "LINKERD2_PROXY_IDENTITY_"
	e := must.Get(linkerdproxy.FromEnviron([]string{"PATH=/bin"}, nil))(t)
	assert.Equal(t, new(linkerdproxy.Environment), e)
	require.ErrorContains(t, must.Err(linkerdproxy.New(e.Config)), "Config.Name")
	e = must.Get(linkerdproxy.FromEnviron([]string{
		"LINKERD2_PROXY_DESTINATION_SVC_ADDR=linkerd-dst.linkerd:8086", "LINKERD2_PROXY_POLICY_SVC_ADDR=linkerd-policy.linkerd:8090",
		p + "MIN_REFRESH=10s", "_pod_ns=emojivoto", p + "LOCAL_NAME=",
	}, nil))(t)
	assert.Empty(t, e.Name)
	assert.Equal(t, linkerdproxy.Service{Addr: "linkerd-dst.linkerd:8086"}, e.Destination)
	assert.Equal(t, linkerdproxy.Service{Addr: "linkerd-policy.linkerd:8090"}, e.Policy)

	anchors := newService(t, time.Hour).ca.Bundle().MarshalPEM()
	for _, half := range []string{
		p + "TRUST_ANCHORS=" + string(anchors), p + "TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(anchors), p + "TRUST_ANCHORS_FILE=/anchors",
		p + "STORE_DIR=/store", p + "DIR=/store", p + "TOKEN_FILE=/token", p + "KEY_FILE=/key", p + "CSR_FILE=/csr",
		p + "ADDR=a:1", p + "SVC_ADDR=a:1", p + "IDENTITY=" + certifier, p + "SVC_NAME=" + certifier,
		"LINKERD2_PROXY_DESTINATION_IDENTITY=" + certifier, "LINKERD2_PROXY_DESTINATION_SVC_NAME=" + certifier, "LINKERD2_PROXY_POLICY_SVC_NAME=" + certifier,
		"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=80", "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_IDENTITY=80",
	} {
		name, _, _ := strings.Cut(half, "=")
		_, err := linkerdproxy.FromEnviron([]string{half}, nil)
		require.ErrorContains(t, err, "LINKERD2_PROXY_LOCAL_IDENTITY_NAME: it is not set, and is required with "+name, name)
	}
	for bad, want := range map[string]string{
		p + "DISABLED=true": "cannot be disabled so", p + "SPIRE_SOCKET=/s": "SPIFFE",
		p + "SERVER_NAME=" + web: p + "SERVER_ID",
	} {
		require.ErrorContains(t, must.Err(linkerdproxy.FromEnviron([]string{bad}, nil)), want, bad)
	}
}
