package sds_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const (
	service = "/envoy.service.secret.v3.SecretDiscoveryService/"
	typeURL = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
	patient = time.Minute // for what takes no time unless something is broken
)

// fakeSource is a source that tests fill.
type fakeSource struct {
	mu      sync.Mutex
	secrets map[string]*pki.Secret
	errs    map[string]error
	calls   map[string]int
	subs    map[int]func(string)
	next    int
}

func newFakeSource() *fakeSource {
	return &fakeSource{
		secrets: make(map[string]*pki.Secret), errs: make(map[string]error), calls: make(map[string]int), subs: make(map[int]func(string)),
	}
}

func (f *fakeSource) GenerateSecret(_ context.Context, name string) (*pki.Secret, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[name]++
	if err := f.errs[name]; err != nil {
		return nil, err
	}
	if s := f.secrets[name]; s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("fake: %q: %w", name, fs.ErrNotExist)
}

func (f *fakeSource) Subscribe(fn func(string)) (cancel func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := f.next
	f.next++
	f.subs[id] = fn
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.subs, id)
	}
}

// put sets a secret and announces it. A nil one is removed.
func (f *fakeSource) put(name string, s *pki.Secret) {
	f.mu.Lock()
	if f.secrets[name] = s; s == nil {
		delete(f.secrets, name)
	}
	delete(f.errs, name)
	var subs []func(string)
	for _, fn := range f.subs {
		subs = append(subs, fn)
	}
	f.mu.Unlock()
	for _, fn := range subs {
		fn(name)
	}
}

// fail makes look-ups of a name fail, without telling.
func (f *fakeSource) fail(name string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs[name] = err
}

func (f *fakeSource) count(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[name]
}

func (f *fakeSource) subscribers() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.subs)
}

// mint makes secrets of one trust domain.
type mint struct {
	t  testing.TB
	ca *spiffetest.CA
}

func newMint(t testing.TB) mint { return mint{t, spiffetest.NewCA(t, "example.org")} }

func (m mint) pair(name string) *pki.Secret {
	m.t.Helper()
	return must.Do(pki.NewKeyPairSecret(name, m.ca.SVID("/web")))
}

func (m mint) roots(name string) *pki.Secret {
	m.t.Helper()
	return must.Do(pki.NewTrustSecret(name, m.ca.Bundle()))
}

// withPair has a mint and a source, which has a pair of it.
func withPair(t testing.TB, name string) (mint, *fakeSource, *pki.Secret) {
	t.Helper()
	m, src := newMint(t), newFakeSource()
	s := m.pair(name)
	src.put(name, s)
	return m, src, s
}

// socketDir is short enough for a socket, which the directories of t.TempDir are not.
func socketDir(t testing.TB) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "sds"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// serve runs a handler on a socket until the test ends or stop is called, and returns the socket.
func serve(t testing.TB, h http.Handler, edit ...func(*unixsocket.Server)) (socket string, stop func()) {
	t.Helper()
	s := &unixsocket.Server{Path: filepath.Join(socketDir(t), "s"), Handler: h}
	for _, f := range edit {
		f(s)
	}
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patient):
			t.Error("the server did not stop")
		}
	})
	t.Cleanup(stop)
	return s.Path, stop
}

func handler(t testing.TB, src sds.Source, opts *sds.Options) *sds.Handler {
	t.Helper()
	h := must.Get(sds.NewHandler(src, opts))(t)
	t.Cleanup(func() { require.NoError(t, h.Close()) })
	return h
}

// serving has a handler that is served until the test ends, and a client of it.
func serving(t testing.TB, src sds.Source, opts *sds.Options) (*sds.Handler, *http.Client) {
	t.Helper()
	h := handler(t, src, opts)
	socket, _ := serve(t, h)
	return h, dial(t, socket)
}

func dial(t testing.TB, socket string) *http.Client {
	c := sds.UnixClient(socket)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// raw is a gRPC stream as the wire has it: the messages, and nothing that obeys the protocol.
type raw struct {
	t      testing.TB
	in     *io.PipeWriter
	resp   *http.Response
	cancel context.CancelFunc
	asked  []string // the names of the last request
}

// open begins a stream. Edits change the request before it goes.
func open(t testing.TB, c *http.Client, method string, edit ...func(*http.Request)) *raw {
	t.Helper()
	ctx, cancelContext := context.WithCancel(context.Background())
	r, w := io.Pipe()
	cancel := func() {
		cancelContext()
		_ = w.CloseWithError(context.Canceled) // the transport does not look at ctx while it reads the body
	}
	t.Cleanup(cancel)
	req := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+service+method, r))(t)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	for _, f := range edit {
		f(req)
	}
	timer := time.AfterFunc(patient, cancel)
	resp := must.Get(c.Do(req))(t)
	timer.Stop()
	t.Cleanup(func() { _ = resp.Body.Close() })
	return &raw{t: t, in: w, resp: resp, cancel: cancel}
}

func frame(flags byte, msg []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(msg)))
	return append(b, msg...)
}

func (s *raw) send(m proto.Message) {
	s.t.Helper()
	must.Do(s.in.Write(frame(0, must.Do(proto.Marshal(m)))))
}

// read reads one message, or fails after some time.
func (s *raw) read(m proto.Message) {
	s.t.Helper()
	b, err := s.next()
	require.NoError(s.t, err, "status %v %v", s.resp.Trailer, s.resp.Header)
	require.NoError(s.t, proto.Unmarshal(b, m))
}

func (s *raw) next() ([]byte, error) {
	timer := time.AfterFunc(patient, s.cancel)
	defer timer.Stop()
	var head [5]byte
	if _, err := io.ReadFull(s.resp.Body, head[:]); err != nil {
		return nil, err
	}
	if head[0] != 0 {
		return nil, fmt.Errorf("flags %#x", head[0])
	}
	b := make([]byte, binary.BigEndian.Uint32(head[1:]))
	_, err := io.ReadFull(s.resp.Body, b)
	return b, err
}

// status waits for the end of the stream and returns its gRPC status, and whether there was a message
// before it.
func (s *raw) status() (code string, messages int) {
	s.t.Helper()
	for {
		_, err := s.next()
		if err == io.EOF {
			break
		}
		require.NoError(s.t, err)
		messages++
	}
	code = s.resp.Trailer.Get("Grpc-Status")
	if code == "" {
		code = s.resp.Header.Get("Grpc-Status")
	}
	return code, messages
}

// ends waits for the end of the stream, which has that status.
func (s *raw) ends(want string) {
	s.t.Helper()
	code, _ := s.status()
	assert.Equal(s.t, want, code)
}

// The gRPC codes that we answer with.
const (
	codeOK                = "0"
	codeInvalidArgument   = "3"
	codeNotFound          = "5"
	codeResourceExhausted = "8"
	codeUnimplemented     = "12"
	codeInternal          = "13"
	codeUnavailable       = "14"
)

// sotw is a state-of-the-world stream.
type sotw struct{ *raw }

func openSotW(t testing.TB, c *http.Client, edit ...func(*http.Request)) sotw {
	t.Helper()
	return sotw{open(t, c, "StreamSecrets", edit...)}
}

// asking is a stream that asks for names.
func asking(t testing.TB, c *http.Client, names ...string) sotw {
	t.Helper()
	s := openSotW(t, c)
	s.ask(names...)
	return s
}

// takes has the next response with exactly these secrets, and acknowledges it.
func (s sotw) takes(wanted ...*pki.Secret) {
	s.t.Helper()
	r := s.recv()
	want(s.t, r, wanted...)
	s.ack(r, s.asked...)
}

func (s sotw) ask(names ...string) {
	s.t.Helper()
	s.asked = names
	s.send(&envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "raw", Cluster: "test"}, ResourceNames: names, TypeUrl: typeURL})
}

func (s sotw) ack(r *envoysds.DiscoveryResponse, names ...string) {
	s.t.Helper()
	s.asked = names
	s.send(&envoysds.DiscoveryRequest{VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce(), ResourceNames: names, TypeUrl: typeURL})
}

func (s sotw) nack(r *envoysds.DiscoveryResponse, reason string, names ...string) {
	s.t.Helper()
	s.send(&envoysds.DiscoveryRequest{
		ResponseNonce: r.GetNonce(), ResourceNames: names, TypeUrl: typeURL, ErrorDetail: &envoysds.Status{Code: 13, Message: reason},
	})
}

func (s sotw) recv() *envoysds.DiscoveryResponse {
	s.t.Helper()
	var r envoysds.DiscoveryResponse
	s.read(&r)
	require.Equal(s.t, typeURL, r.GetTypeUrl())
	require.NotEmpty(s.t, r.GetNonce())
	require.NotEmpty(s.t, r.GetVersionInfo())
	return &r
}

// secrets unpacks a response by name.
func secrets(t testing.TB, r *envoysds.DiscoveryResponse) map[string]*envoysds.Secret {
	t.Helper()
	m := make(map[string]*envoysds.Secret)
	for _, a := range r.GetResources() {
		require.Equal(t, typeURL, a.GetTypeUrl())
		var s envoysds.Secret
		require.NoError(t, proto.Unmarshal(a.GetValue(), &s))
		require.NotContains(t, m, s.GetName())
		m[s.GetName()] = &s
	}
	return m
}

// want asserts that a response has exactly these secrets.
func want(t testing.TB, r *envoysds.DiscoveryResponse, wanted ...*pki.Secret) {
	t.Helper()
	got := secrets(t, r)
	require.Len(t, got, len(wanted))
	for _, s := range wanted {
		same(t, s, got[s.Name()])
	}
}

func same(t testing.TB, want *pki.Secret, got *envoysds.Secret) {
	t.Helper()
	require.NotNil(t, got, want.Name())
	require.Equal(t, want.Name(), got.GetName())
	if chain, key, ok := want.KeyPair(); ok {
		require.Equal(t, chain, got.GetTlsCertificate().GetCertificateChain().GetInlineBytes())
		require.Equal(t, key, got.GetTlsCertificate().GetPrivateKey().GetInlineBytes())
		require.Nil(t, got.GetValidationContext())
		return
	}
	roots, _ := want.Roots()
	require.Equal(t, roots, got.GetValidationContext().GetTrustedCa().GetInlineBytes())
	require.Nil(t, got.GetTlsCertificate())
}

// delta is an incremental stream.
type delta struct{ *raw }

func openDelta(t testing.TB, c *http.Client, edit ...func(*http.Request)) delta {
	t.Helper()
	return delta{open(t, c, "DeltaSecrets", edit...)}
}

func (s delta) subscribe(names ...string) {
	s.t.Helper()
	s.send(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: names})
}

func (s delta) ack(r *envoysds.DeltaDiscoveryResponse) {
	s.t.Helper()
	s.send(&envoysds.DeltaDiscoveryRequest{ResponseNonce: r.GetNonce()})
}

// takes has the next response with what is removed and exactly these secrets, and acknowledges it.
func (s delta) takes(removed []string, wanted ...*pki.Secret) {
	s.t.Helper()
	r := s.recv()
	wantDelta(s.t, r, removed, wanted...)
	s.ack(r)
}

func (s delta) recv() *envoysds.DeltaDiscoveryResponse {
	s.t.Helper()
	var r envoysds.DeltaDiscoveryResponse
	s.read(&r)
	require.Equal(s.t, typeURL, r.GetTypeUrl())
	require.NotEmpty(s.t, r.GetNonce())
	return &r
}

// wantDelta asserts what a response has and what it removes.
func wantDelta(t testing.TB, r *envoysds.DeltaDiscoveryResponse, removed []string, wanted ...*pki.Secret) {
	t.Helper()
	require.Equal(t, removed, r.GetRemovedResources())
	require.Len(t, r.GetResources(), len(wanted))
	for i, s := range wanted {
		res := r.GetResources()[i]
		require.Equal(t, s.Name(), res.GetName())
		require.Len(t, res.GetVersion(), 32)
		require.Equal(t, typeURL, res.GetResource().GetTypeUrl())
		var got envoysds.Secret
		require.NoError(t, proto.Unmarshal(res.GetResource().GetValue(), &got))
		same(t, s, &got)
	}
}
