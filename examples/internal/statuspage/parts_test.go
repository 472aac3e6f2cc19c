package statuspage_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"io"
	"log"
	"net"
	"net/http"
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
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
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
