package statuspage_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// secrets are what no page may have.
type secrets struct {
	mu  sync.Mutex
	all []string
}

func (s *secrets) add(t testing.TB, key crypto.Signer) {
	t.Helper()
	pem := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, strings.Split(string(pem), "\n")[1])
	if k, ok := key.(*ecdsa.PrivateKey); ok {
		b := must.Get(k.Bytes())(t)
		s.all = append(s.all, hex.EncodeToString(b), base64.StdEncoding.EncodeToString(b))
	}
}

// absent fails if a page has one of them, in any of its forms.
func (s *secrets) absent(t testing.TB, h http.Handler) {
	t.Helper()
	var all strings.Builder
	all.WriteString(page(t, h) + body(t, ask(t, h, http.MethodGet, "/status.json")))
	for _, e := range events(t, h, 1) {
		all.WriteString(e.data)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	require.NotEmpty(t, s.all)
	for _, secret := range s.all {
		assert.NotContains(t, strings.ToLower(all.String()), strings.ToLower(secret))
	}
	assert.NotContains(t, all.String(), "PRIVATE KEY")
}

// http2 serves h without TLS.
func http2(t testing.TB, h http.Handler) (client *http.Client, address string) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	server := &http.Server{Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute}
	server.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	tr := &http.Transport{Protocols: server.Protocols}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}, "http://" + l.Addr().String()
}

// discovery opens a stream and sends a request.
func discovery(t testing.TB, h http.Handler, method string, r *envoysds.DiscoveryRequest) (s *grpchttp.Stream, send func(*envoysds.DiscoveryRequest)) {
	t.Helper()
	c, address := http2(t, h)
	s = grpchttp.NewClient(c, address, 1<<20).Open(t.Context(), method, nil)
	t.Cleanup(func() { _ = s.Close() })
	send = func(r *envoysds.DiscoveryRequest) {
		require.NoError(t, s.Send(must.Get(proto.Marshal(r))(t)))
	}
	send(r)
	return s, send
}

const streamSecrets = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"

func TestManager(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var keys secrets
	ca := spiffetest.NewCA(t, "example.org")
	m, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca, NewKey: func() (crypto.Signer, error) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		keys.add(t, key)
		return key, err
	}})
	require.NoError(t, err)
	handler := must.Get(sds.NewHandler(m, nil))(t)
	t.Cleanup(func() { require.NoError(t, handler.Close()) })
	h := newPage(t, statuspage.Part{Name: "identity", Source: m}, statuspage.Part{Name: "envoy", Source: handler})

	s := read(t, h)
	require.Len(t, s.Identities.Rows, 1)
	assert.Equal(t, "missing", s.Identities.Rows[0].State)
	assert.Equal(t, "waiting", s.Upstreams.Rows[0].State)
	assert.Empty(t, s.Roots.Rows)
	assert.Empty(t, s.Problems.Rows, "it is about to be asked")

	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { defer close(done); _ = m.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	require.NoError(t, m.Add(spiffe.MustParseID("spiffe://example.org/db")))
	require.NoError(t, m.Ready(t.Context()))
	must.Get(m.GenerateSecret(t.Context(), "spiffe://example.org/db"))(t)

	stream, send := discovery(t, handler, streamSecrets, &envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "<b>envoy"}, ResourceNames: []string{"default"}})
	b := must.Get(stream.Receive())(t)
	var r envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(b, &r))
	send(&envoysds.DiscoveryRequest{ResponseNonce: r.GetNonce(), ResourceNames: []string{"default"}, ErrorDetail: &envoysds.Status{Message: "KEY_VALUES_MISMATCH"}})
	require.Eventually(t, func() bool { return len(handler.Report().Servers[0].Pushes) == 2 }, time.Minute, time.Millisecond)

	// A page is kept for twenty times as long as it took to make.
	require.Eventually(t, func() bool { s = read(t, h); return len(s.Events.Rows) == 2 }, time.Minute, 10*time.Millisecond)
	require.Len(t, s.Identities.Rows, 2)
	for i, name := range []string{"spiffe://example.org/db", "spiffe://example.org/web"} {
		row := s.Identities.Rows[i]
		assert.Equal(t, name, row.Name)
		assert.Equal(t, "valid", row.State)
		assert.NotEmpty(t, row.NotBefore)
		assert.NotEmpty(t, row.NotAfter)
		assert.NotEmpty(t, row.Renewal)
	}
	require.Len(t, s.Roots.Rows, 1)
	assert.Equal(t, []string{"identity (CA)"}, s.Roots.Rows[0].From)
	require.Len(t, s.Upstreams.Rows, 1)
	assert.Equal(t, "ok", s.Upstreams.Rows[0].State)
	assert.NotEmpty(t, s.Upstreams.Rows[0].LastSuccess)
	require.Len(t, s.Servers.Rows, 1)
	assert.Equal(t, 1, s.Servers.Rows[0].Streams)
	assert.Equal(t, 1, s.Servers.Rows[0].Served)
	require.Len(t, s.Events.Rows, 2)
	assert.Equal(t, "NACK", s.Events.Rows[0].Kind)
	assert.Equal(t, "<b>envoy", s.Events.Rows[0].Client)
	assert.Equal(t, "KEY_VALUES_MISMATCH", s.Events.Rows[0].Message)
	assert.Equal(t, "push", s.Events.Rows[1].Kind)
	assert.Equal(t, []string{"default"}, s.Events.Rows[1].Names)
	keys.absent(t, h)

	ca.FailNext(-1, errCA)
	require.NoError(t, m.Add(spiffe.MustParseID("spiffe://example.org/late")))
	require.Eventually(t, func() bool { return m.Report().Upstreams[0].Err != nil }, time.Minute, time.Millisecond)
	require.Eventually(t, func() bool { s = read(t, h); return s.Upstreams.Rows[0].State == "failing" }, time.Minute, 10*time.Millisecond)
	assert.Contains(t, s.Upstreams.Rows[0].Error, "the CA is down")
	assert.NotEmpty(t, s.Upstreams.Rows[0].NextAttempt)
	assert.NotZero(t, s.Upstreams.Rows[0].Failures)
	assert.Equal(t, "missing", s.Identities.Rows[1].State)
	require.Len(t, s.Problems.Rows, 1)
	assert.Equal(t, "spiffe://example.org/late", s.Problems.Rows[0].What)
	keys.absent(t, h)
}

// A default identity that is no SVID has its roots as well.
func TestManagerOfCredential(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	m, err := secretcache.New(secretcache.Config{Expect: pki.ExpectDNSName(spiffe.MustParseTrustDomain("example.org"), "web.example.org"), CA: ca})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = m.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	require.Eventually(t, func() bool { return !m.Report().Upstreams[0].LastSuccess.IsZero() }, time.Minute, time.Millisecond)
	s := read(t, newPage(t, statuspage.Part{Name: "identity", Source: m}))
	require.Len(t, s.Identities.Rows, 1)
	assert.Equal(t, "default", s.Identities.Rows[0].Name)
	assert.Len(t, s.Roots.Rows, 1)
}

func TestSources(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var keys secrets
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/files")
	certs, key := must.Get2(svid.MarshalPEM())(t)
	keys.add(t, svid.Signer())
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		return path
	}
	certFile, keyFile, rootFile := write("cert.pem", certs), write("key.pem", key), write("root.pem", ca.Bundle().MarshalPEM())

	api := workloadapitest.NewServer(t, ca, "/workload")
	agent := must.Get(workloadapi.Start(t.Context(), api.Config()))(t)
	t.Cleanup(func() { require.NoError(t, agent.Close()) })
	workload := must.Get(agent.SVID())(t)
	keys.add(t, workload.Signer())

	files := must.Get(filesource.Start(t.Context(), filesource.Config{
		CertFile: certFile, KeyFile: keyFile, Bundles: []filesource.BundleFile{{Path: rootFile, TrustDomain: ca.Bundle().TrustDomain()}},
	}))(t)
	t.Cleanup(func() { require.NoError(t, files.Close()) })

	sink := must.Get(filesink.Start(t.Context(), filesink.Config{Source: agent, Dir: t.TempDir()}))(t)
	t.Cleanup(func() { require.NoError(t, sink.Close()) })

	named := must.Get(sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{dir}}))(t)
	go func() { _ = named.Run(context.Background()) }()
	t.Cleanup(func() { require.NoError(t, named.Close()) })
	for _, name := range []string{"file-cert:" + certFile + "~" + keyFile, "file-root:" + rootFile} {
		must.Get(named.GenerateSecret(t.Context(), name))(t)
	}

	partner := federationtest.NewEndpoint(t, spiffetest.NewCA(t, "partner.test"))
	partners := must.Get(federation.Start(t.Context(), federation.Config{
		Relationships: []federation.Relationship{partner.Relationship()}, DialContext: federationtest.Dial(partner),
	}))(t)
	t.Cleanup(func() { require.NoError(t, partners.Close()) })

	lastGood, err := source.NewLastGood(source.LastGoodConfig{Source: agent, Dir: filepath.Join(t.TempDir(), "last"), MaxAge: time.Hour, Identity: true})
	require.NoError(t, err)
	fixture := ca.Source("/fixture")
	own := must.Get(fixture.SVID())(t)
	keys.add(t, own.Signer())

	const token = "sesame-sesame-sesame-sesame"
	keys.all = append(keys.all, token)
	control, address := http2(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "7")
		w.Header().Set("Grpc-Message", "refused: "+r.Header.Get("Authorization"))
	}))
	proxy := must.Get(xdsproxy.NewHandler(xdsproxy.Config{
		URL: address, HTTPClient: control, AllowPlaintext: true, Token: func(context.Context) (string, error) { return token, nil },
	}))(t)
	t.Cleanup(func() { require.NoError(t, proxy.Close()) })
	stream, _ := discovery(t, proxy, "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources", &envoysds.DiscoveryRequest{})
	require.Error(t, must.Err(stream.Receive()))

	h := newPage(t,
		statuspage.Part{Name: "agent", Source: agent},
		statuspage.Part{Name: "files", Source: files},
		statuspage.Part{Name: "sink", Source: sink},
		statuspage.Part{Name: "named", Source: named},
		statuspage.Part{Name: "federation", Source: partners},
		statuspage.Part{Name: "last good", Source: lastGood},
		statuspage.Part{Name: "fixture", Source: health.FromSources(fixture, fixture)},
		statuspage.Part{Name: "bundle", Source: health.FromSources(nil, ca.Bundle())},
		statuspage.Part{Name: "svid", Source: health.FromSources(svid, nil)},
		statuspage.Part{Name: "xds", Source: proxy},
	)
	s := read(t, h)
	states := map[string]string{}
	for _, i := range s.Identities.Rows {
		states[i.Part+" "+i.Name] = i.State
	}
	assert.Equal(t, map[string]string{
		"agent spiffe://example.org/workload":         "valid",
		"files spiffe://example.org/files":            "valid",
		"sink spiffe://example.org/workload":          "valid",
		"named file-cert:" + certFile + "~" + keyFile: "valid",
		"last good spiffe://example.org/workload":     "valid",
		"fixture spiffe://example.org/fixture":        "valid",
		"svid spiffe://example.org/files":             "valid",
	}, states)
	upstreams := map[string]string{}
	for _, u := range s.Upstreams.Rows {
		if u.Part == "files" {
			assert.Equal(t, certFile, u.Name, "what to renew")
		}
		upstreams[u.Part] += u.State + " "
	}
	assert.Equal(t, map[string]string{
		"agent": "ok ", "files": "ok ", "sink": "ok ", "named": "ok ok ", "federation": "ok ", "last good": "waiting ", "xds": "failing ",
	}, upstreams)
	froms := map[string][]string{}
	for _, r := range s.Roots.Rows {
		froms[r.TrustDomain+" "+r.Kind] = r.From
	}
	assert.Contains(t, froms["partner.test X.509"][0], "federation (https://")
	assert.Subset(t, froms["example.org X.509"], []string{"agent (" + api.Config().Address + ")", "files", "fixture", "bundle", "last good"})
	require.Len(t, s.Problems.Rows, 1)
	assert.Contains(t, s.Problems.Rows[0].Error, "permission_denied: refused: Bearer [redacted]")
	keys.absent(t, h)

	// Each of them fails.
	fixture.Fail(errors.New("withdrawn"))
	partner.Garble()
	write("cert.pem", []byte("garbage"))
	write("root.pem", []byte("garbage"))
	api.Deny()
	api.Rotate()
	require.Eventually(t, func() bool {
		parts := map[string]bool{}
		for _, p := range read(t, h).Problems.Rows {
			parts[p.Part] = true
		}
		return parts["fixture"] && parts["files"] && parts["named"] && parts["xds"]
	}, time.Minute, 100*time.Millisecond)
	keys.absent(t, h)
	assert.True(t, slices.ContainsFunc(read(t, h).Identities.Rows, func(i identity) bool {
		return i.Part == "files" && i.State == "valid"
	}), "the last good one stays")
}
