package compare

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tls "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretservice "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cache "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	controlplane "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const secretType = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

// secretSource is a source for our server.
type secretSource struct {
	mu      sync.Mutex
	secrets map[string]*pki.Secret
	changed func(string)
}

func (s *secretSource) GenerateSecret(_ context.Context, name string) (*pki.Secret, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if secret := s.secrets[name]; secret != nil {
		return secret, nil
	}
	return nil, fs.ErrNotExist
}

func (s *secretSource) Subscribe(f func(string)) func() {
	s.changed = f
	return func() {}
}

func (s *secretSource) put(secret *pki.Secret) {
	s.mu.Lock()
	if s.secrets == nil {
		s.secrets = make(map[string]*pki.Secret)
	}
	s.secrets[secret.Name()] = secret
	s.mu.Unlock()
	if s.changed != nil {
		s.changed(secret.Name())
	}
}

func keyPair(t testing.TB, ca *spiffetest.CA, name string) *pki.Secret {
	t.Helper()
	return must.Get(pki.NewKeyPairSecret(name, ca.SVID("/web")))(t)
}

// envoySecret is the secret in Envoy's own words.
func envoySecret(s *pki.Secret) *tls.Secret {
	inline := func(b []byte) *core.DataSource {
		return &core.DataSource{Specifier: &core.DataSource_InlineBytes{InlineBytes: b}}
	}
	if chain, key, ok := s.KeyPair(); ok {
		return &tls.Secret{Name: s.Name(), Type: &tls.Secret_TlsCertificate{
			TlsCertificate: &tls.TlsCertificate{CertificateChain: inline(chain), PrivateKey: inline(key)},
		}}
	}
	if chain, provider, ok := s.KeyProvider(); ok {
		var p tls.PrivateKeyProvider
		if err := proto.Unmarshal(provider, &p); err != nil {
			panic(err)
		}
		return &tls.Secret{Name: s.Name(), Type: &tls.Secret_TlsCertificate{
			TlsCertificate: &tls.TlsCertificate{CertificateChain: inline(chain), PrivateKeyProvider: &p},
		}}
	}
	if keys, ok := s.TicketKeys(); ok {
		var m tls.TlsSessionTicketKeys
		for _, key := range keys {
			m.Keys = append(m.Keys, inline(key))
		}
		return &tls.Secret{Name: s.Name(), Type: &tls.Secret_SessionTicketKeys{SessionTicketKeys: &m}}
	}
	if values, ok := s.Generic(); ok {
		var m tls.GenericSecret
		for key, value := range values {
			if key == "" {
				m.Secret = inline(value)
				continue
			}
			if m.Secrets == nil {
				m.Secrets = make(map[string]*core.DataSource)
			}
			m.Secrets[key] = inline(value)
		}
		return &tls.Secret{Name: s.Name(), Type: &tls.Secret_GenericSecret{GenericSecret: &m}}
	}
	m := &tls.CertificateValidationContext{}
	if domains, ok := s.TrustDomains(); ok {
		var config tls.SPIFFECertValidatorConfig
		byName := func(a, b spiffe.TrustDomain) int { return strings.Compare(a.String(), b.String()) }
		for _, td := range slices.SortedFunc(maps.Keys(domains), byName) {
			config.TrustDomains = append(config.TrustDomains, &tls.SPIFFECertValidatorConfig_TrustDomain{Name: td.String(), TrustBundle: inline(domains[td])})
		}
		packed := must.Do(anypb.New(&config))
		m.CustomValidatorConfig = &core.TypedExtensionConfig{Name: "envoy.tls.cert_validator.spiffe", TypedConfig: packed}
	} else {
		roots, _ := s.Roots()
		m.TrustedCa = inline(roots)
		var crls []byte
		if crls, m.OnlyVerifyLeafCertCrl = s.CRLs(); crls != nil {
			m.Crl = inline(crls)
		}
	}
	return &tls.Secret{Name: s.Name(), Type: &tls.Secret_ValidationContext{ValidationContext: m}}
}

// secretKinds are secrets of every kind, by their names.
func secretKinds(t testing.TB) map[string]*pki.Secret {
	t.Helper()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.example")
	set := must.Get(spiffe.NewBundleSet(ca.Bundle(), other.Bundle()))(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(ca.TrustDomain().ID())}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	der := must.Get(x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour),
		RevokedCertificateEntries: []x509.RevocationListEntry{{SerialNumber: big.NewInt(7), RevocationTime: time.Now()}},
	}, root.Certificate(), key))(t)
	crl := pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
	own, err := spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{X509Authorities: []*x509.Certificate{root.Certificate()}})
	require.NoError(t, err)
	ticket := bytes.Repeat([]byte{1, 2, 3, 4}, 20)
	config, err := anypb.New(&structpb.Struct{Fields: map[string]*structpb.Value{"slot": structpb.NewNumberValue(1)}})
	require.NoError(t, err)
	provider := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(&tls.PrivateKeyProvider{
		ProviderName: "hsm", ConfigType: &tls.PrivateKeyProvider_TypedConfig{TypedConfig: config}, Fallback: true,
	}))(t)
	chain, _, _ := keyPair(t, ca, "x").KeyPair()

	all := make(map[string]*pki.Secret)
	add := func(s *pki.Secret, err error) {
		t.Helper()
		require.NoError(t, err)
		all[s.Name()] = s
	}
	add(keyPair(t, ca, "pair"), nil)
	add(pki.NewKeyProviderSecret("provider", chain, provider))
	add(pki.NewTrustSecret("roots", own))
	for name, leafOnly := range map[string]bool{"roots-crl": false, "roots-leaf-crl": true} {
		renamed := must.Get(pki.NewTrustSecret(name, own))(t)
		add(renamed.WithCRLs(crl, leafOnly))
	}
	add(pki.NewTrustDomainsSecret("ALL", set))
	domains := must.Get(pki.NewTrustDomainsSecret("ALL-crl", set.With(own)))(t)
	add(domains.WithTrustDomainCRLs(map[spiffe.TrustDomain][]byte{own.TrustDomain(): crl}))
	add(pki.NewTicketKeysSecret("tickets", ticket, append([]byte{9}, ticket[1:]...)))
	add(pki.NewGenericSecret("generic", map[string][]byte{"": []byte("hunter2")}))
	add(pki.NewGenericSecret("generics", map[string][]byte{"user": []byte("me"), "password": []byte("hunter2"), "größe": {0xff, 0}}))
	return all
}

// Every kind of secret is, byte for byte, what Envoy's published messages encode to; it passes their validation rules;
// and our client makes the same secret of it.
func TestPeerSDSKinds(t *testing.T) {
	t.Parallel()
	kinds, src := secretKinds(t), &secretSource{}
	for _, s := range kinds {
		src.put(s)
	}
	h := must.Get(sds.NewHandler(src, nil))(t)
	t.Cleanup(func() { _ = h.Close() })
	path := sdsSocket(t, h)
	conn := must.Get(grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { _ = conn.Close() })
	c := secretservice.NewSecretDiscoveryServiceClient(conn)
	hc := sds.UnixClient(path)
	t.Cleanup(hc.CloseIdleConnections)
	for name, secret := range kinds {
		want := envoySecret(secret)
		golden := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(want))(t)
		r, err := c.FetchSecrets(timeout(t), &discovery.DiscoveryRequest{ResourceNames: []string{name}})
		require.NoError(t, err, name)
		require.Len(t, r.GetResources(), 1, name)
		assert.Equal(t, golden, r.GetResources()[0].GetValue(), name)
		var got tls.Secret
		require.NoError(t, r.GetResources()[0].UnmarshalTo(&got), name)
		require.NoError(t, got.ValidateAll(), name)
		require.True(t, proto.Equal(want, &got), name)

		for s, err := range sds.NewClient(hc, "http://localhost").Watch(timeout(t), name) {
			require.NoError(t, err, name)
			assert.True(t, proto.Equal(want, envoySecret(s)), name)
			assert.Equal(t, secret.String(), s.String())
			break
		}
	}
}

// sdsSocket returns the path of a socket on which h is served.
func sdsSocket(t testing.TB, h http.Handler) string {
	t.Helper()
	path := shortPath(t)
	s := &unixsocket.Server{Path: path, Handler: h}
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return path
}

func shortPath(t testing.TB) string {
	dir := must.Get(os.MkdirTemp("", "cmp"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

// peerSDS is a server of go-control-plane with secrets in its cache.
func peerSDS(t testing.TB, secrets ...*pki.Secret) (path string, c *cache.LinearCache) {
	t.Helper()
	resources := make(map[string]types.Resource)
	for _, s := range secrets {
		resources[s.Name()] = envoySecret(s)
	}
	c = cache.NewLinearCache(secretType, cache.WithInitialResources(resources))
	path = shortPath(t)
	l := must.Get(net.Listen("unix", path))(t)
	ctx, cancel := context.WithCancel(context.Background())
	srv := grpc.NewServer(grpc.MaxConcurrentStreams(100_000))
	secretservice.RegisterSecretDiscoveryServiceServer(srv, controlplane.NewServer(ctx, c, nil))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() { cancel(); srv.Stop(); <-done })
	return path, c
}

// The client of Envoy's published API takes secrets from our server in each way.
func TestPeerSDSClient(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	ca := spiffetest.NewCA(t, "example.org")
	web := keyPair(t, ca, "default")
	roots := must.Get(pki.NewTrustSecret("ROOTCA", ca.Bundle()))(t)
	src := &secretSource{}
	src.put(web)
	src.put(roots)
	h := must.Get(sds.NewHandler(src, nil))(t)
	t.Cleanup(func() { _ = h.Close() })
	path := sdsSocket(t, h)
	conn := must.Get(grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { _ = conn.Close() })
	c := secretservice.NewSecretDiscoveryServiceClient(conn)
	same := func(want *pki.Secret, got *anypb.Any) {
		t.Helper()
		var s tls.Secret
		require.NoError(t, got.UnmarshalTo(&s))
		assert.True(t, proto.Equal(envoySecret(want), &s))
	}
	metadata, err := structpb.NewStruct(map[string]any{"labels": map[string]any{"app": strings.Repeat("x", 60_000)}})
	require.NoError(t, err)
	node := &core.Node{Id: "n", Cluster: "c", Metadata: metadata, UserAgentVersionType: &core.Node_UserAgentVersion{UserAgentVersion: "1.40"}}

	sotw := must.Get(c.StreamSecrets(ctx))(t)
	require.NoError(t, sotw.Send(&discovery.DiscoveryRequest{Node: node, ResourceNames: []string{"default"}, TypeUrl: secretType}))
	first := must.Get(sotw.Recv())(t)
	require.Len(t, first.GetResources(), 1)
	same(web, first.GetResources()[0])
	require.NoError(t, sotw.Send(&discovery.DiscoveryRequest{
		VersionInfo: first.GetVersionInfo(), ResponseNonce: first.GetNonce(), ResourceNames: []string{"default"}, TypeUrl: secretType,
	}))

	delta := must.Get(c.DeltaSecrets(ctx))(t)
	require.NoError(t, delta.Send(&discovery.DeltaDiscoveryRequest{Node: node, ResourceNamesSubscribe: []string{"ROOTCA", "default"}, TypeUrl: secretType}))
	got := make(map[string]*discovery.Resource)
	nonce := ""
	for len(got) < 2 {
		r := must.Get(delta.Recv())(t)
		for _, res := range r.GetResources() {
			got[res.GetName()] = res
		}
		nonce = r.GetNonce()
		require.NoError(t, delta.Send(&discovery.DeltaDiscoveryRequest{ResponseNonce: nonce}))
	}
	same(web, got["default"].GetResource())
	same(roots, got["ROOTCA"].GetResource())
	assert.Equal(t, first.GetVersionInfo(), got["default"].GetVersion())

	web = keyPair(t, ca, "default")
	src.put(web)
	second := must.Get(sotw.Recv())(t)
	same(web, second.GetResources()[0])
	pushed := must.Get(delta.Recv())(t)
	require.Len(t, pushed.GetResources(), 1)
	same(web, pushed.GetResources()[0].GetResource())
	require.NoError(t, sotw.Send(&discovery.DiscoveryRequest{
		ResponseNonce: second.GetNonce(), ResourceNames: []string{"default"}, ErrorDetail: &rpcstatus.Status{Code: 13, Message: "no"},
	}))
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(h.Report().Servers[0].Pushes, func(e report.Push) bool { return e.NACK })
	}, time.Minute, time.Millisecond)

	fetched, err := c.FetchSecrets(ctx, &discovery.DiscoveryRequest{Node: node, ResourceNames: []string{"ROOTCA"}, TypeUrl: secretType})
	require.NoError(t, err)
	same(roots, fetched.GetResources()[0])
}

// Our client takes secrets from go-control-plane's server.
func TestPeerSDSServer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := keyPair(t, ca, "default")
	path, c := peerSDS(t, web)
	hc := sds.UnixClient(path)
	t.Cleanup(hc.CloseIdleConnections)
	n := 0
	for s, err := range sds.NewClient(hc, "http://localhost").Watch(timeout(t), "default") {
		require.NoError(t, err)
		_, key, _ := s.KeyPair()
		_, want, _ := web.KeyPair()
		require.Equal(t, string(want), string(key))
		if n++; n == 3 {
			break
		}
		web = keyPair(t, ca, "default")
		require.NoError(t, c.UpdateResource("default", envoySecret(web)))
	}
	assert.Equal(t, 3, n)
}

// pushed is a server on a socket whose streams all get what push has.
type pushed struct {
	path string
	push func(n int)
}

// sdsServers are measured beside each other: ours, that of go-control-plane, and as little as a server with
// net/http can do, which answers with a ready frame, waits for a change, and writes the next one.
var sdsServers = map[string]func(b *testing.B) pushed{
	"svidkit": func(b *testing.B) pushed {
		ca, src := spiffetest.NewCA(b, "example.org"), &secretSource{}
		pairs := []*pki.Secret{keyPair(b, ca, "default"), keyPair(b, ca, "default")}
		src.put(pairs[0])
		h := must.Get(sds.NewHandler(src, &sds.Options{MaxPeerStreams: 20_000}))(b)
		b.Cleanup(func() { _ = h.Close() })
		return pushed{sdsSocket(b, h), func(n int) { src.put(pairs[n%2]) }}
	},
	"go-control-plane": func(b *testing.B) pushed {
		ca := spiffetest.NewCA(b, "example.org")
		pairs := []*pki.Secret{keyPair(b, ca, "default"), keyPair(b, ca, "default")}
		path, c := peerSDS(b, pairs[0])
		return pushed{path, func(n int) { _ = c.UpdateResource("default", envoySecret(pairs[n%2])) }}
	},
	"bare": func(b *testing.B) pushed {
		ca := spiffetest.NewCA(b, "example.org")
		var frames [2][]byte
		for i := range frames {
			packed := must.Get(anypb.New(envoySecret(keyPair(b, ca, "default"))))(b)
			frames[i] = frameOf(b, &discovery.DiscoveryResponse{
				VersionInfo: strings.Repeat("0", 32), TypeUrl: secretType, Nonce: "0123456-7", Resources: []*anypb.Any{packed},
			})
		}
		var mu sync.Mutex
		newest, changed := 0, make(chan struct{})
		current := func() (int, chan struct{}) {
			mu.Lock()
			defer mu.Unlock()
			return newest, changed
		}
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			ctl := http.NewResponseController(w)
			_ = ctl.Flush()
			for sent := -1; ; {
				var head [5]byte
				if _, err := io.ReadFull(r.Body, head[:]); err != nil {
					return
				}
				_, _ = io.CopyN(io.Discard, r.Body, int64(binary.BigEndian.Uint32(head[1:])))
				n, changed := current()
				for n == sent {
					select {
					case <-changed:
					case <-r.Context().Done():
						return
					}
					n, changed = current()
				}
				_, _ = w.Write(frames[n%2])
				_ = ctl.Flush()
				sent = n
			}
		})
		return pushed{sdsSocket(b, h), func(n int) {
			mu.Lock()
			defer mu.Unlock()
			newest = n
			close(changed)
			changed = make(chan struct{})
		}}
	},
}

func frameOf(b testing.TB, m proto.Message) []byte {
	msg := must.Get(proto.Marshal(m))(b)
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)
}

// rawStream is a stream of a client that does as little as can be.
type rawStream struct {
	in   *io.PipeWriter
	body io.ReadCloser
	r    *bufio.Reader
	buf  []byte
	resp discovery.DiscoveryResponse
}

// openRaw begins a stream with a first request.
func openRaw(b *testing.B, c *http.Client, first []byte) *rawStream {
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	b.Cleanup(func() {
		cancel()
		_ = w.CloseWithError(context.Canceled)
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", r)
	require.NoError(b, err)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	go func() { _, _ = w.Write(first) }() // grpc-go answers only then
	resp := must.Get(c.Do(req))(b)
	b.Cleanup(func() { _ = resp.Body.Close() })
	return &rawStream{in: w, body: resp.Body, r: bufio.NewReaderSize(resp.Body, 16)}
}

// receive receives a response.
func (s *rawStream) receive() error {
	var head [5]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return err
	}
	n := int(binary.BigEndian.Uint32(head[1:]))
	if cap(s.buf) < n {
		s.buf = make([]byte, n)
	}
	_, err := io.ReadFull(s.r, s.buf[:n])
	s.buf = s.buf[:n]
	return err
}

// acknowledge answers the response that was received.
func (s *rawStream) acknowledge() error {
	if err := proto.Unmarshal(s.buf, &s.resp); err != nil {
		return err
	}
	ack, err := proto.Marshal(&discovery.DiscoveryRequest{
		VersionInfo: s.resp.GetVersionInfo(), ResponseNonce: s.resp.GetNonce(), ResourceNames: []string{"default"}, TypeUrl: secretType,
	})
	if err != nil {
		return err
	}
	_, err = s.in.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(ack))), ack...))
	return err
}

// firstRequest is as large as that of a real Envoy, which lists its extensions.
func firstRequest(b *testing.B, size int) []byte {
	return frameOf(b, &discovery.DiscoveryRequest{
		Node:          &core.Node{Id: "n", Cluster: "c", UserAgentName: strings.Repeat("x", size)},
		ResourceNames: []string{"default"}, TypeUrl: secretType,
	})
}

// BenchmarkSDSPush is the time from a change until a stream has it, over all streams: the median, the 99th percentile and the
// last. The servers take turns, and what is reported is the median of their turns. The clients run on the same cores, and
// acknowledge.
func BenchmarkSDSPush(b *testing.B) {
	for _, bench := range []struct{ streams, conns, request int }{{1000, 1, 1000}, {10_000, 10, 60_000}} {
		b.Run(fmt.Sprintf("streams=%d/conns=%d/request=%dkB", bench.streams, bench.conns, bench.request/1000), func(b *testing.B) {
			names := slices.Sorted(maps.Keys(sdsServers))
			turns := make(map[string]func() []time.Duration)
			for _, name := range names {
				turns[name] = audience(b, sdsServers[name](b), bench.streams, bench.conns, firstRequest(b, bench.request))
			}
			quantiles := []struct {
				name string
				per  int // mille
			}{{"p50", 500}, {"p99", 990}, {"last", 1000}}
			took := make(map[string][]time.Duration)
			for b.Loop() {
				runtime.GC() // is nothing of a server's, and takes longer than a push
				mathrand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
				for _, name := range names {
					time.Sleep(100 * time.Millisecond) // the acknowledgements of the turn before
					all := turns[name]()
					for _, q := range quantiles {
						took[name+"-"+q.name] = append(took[name+"-"+q.name], all[len(all)*q.per/1000-1])
					}
				}
			}
			b.ReportMetric(0, "ns/op") // of all of them, and the garbage collection
			var ratios []float64
			for i, d := range took["svidkit-p99"] {
				ratios = append(ratios, float64(d)/float64(took["go-control-plane-p99"][i]))
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "svidkit-p99/go-control-plane-p99")
			for what, each := range took {
				slices.Sort(each)
				b.ReportMetric(float64(each[len(each)/2].Microseconds())/1000, "ms-"+what)
			}
		})
	}
}

// audience opens streams that have what the server has. The function that it returns makes a change, and returns how long
// that took to each stream, in ascending order.
func audience(b *testing.B, server pushed, streams, conns int, first []byte) (push func() []time.Duration) {
	arrived := make(chan time.Time, streams)
	wait := func(begun time.Time) (took []time.Duration) {
		for range streams {
			took = append(took, (<-arrived).Sub(begun))
		}
		slices.Sort(took)
		return took
	}
	for range conns {
		c := sds.UnixClient(server.path)
		b.Cleanup(c.CloseIdleConnections)
		for range streams / conns {
			s := openRaw(b, c, first)
			go func() {
				for s.receive() == nil {
					arrived <- time.Now()
					if s.acknowledge() != nil {
						return
					}
				}
			}()
		}
	}
	wait(time.Now())
	n := 0
	return func() []time.Duration {
		n++
		begun := time.Now()
		server.push(n)
		return wait(begun)
	}
}

// BenchmarkSDSIdleStream is the memory of one more stream that has its secret and waits, at both ends.
func BenchmarkSDSIdleStream(b *testing.B) {
	for _, size := range []int{60_000, 870_000} {
		for name, newServer := range sdsServers {
			b.Run(fmt.Sprintf("request=%dkB/%s", size/1000, name), func(b *testing.B) {
				s := newServer(b)
				c := sds.UnixClient(s.path)
				b.Cleanup(c.CloseIdleConnections)
				first := firstRequest(b, size)
				start := func() {
					s := openRaw(b, c, first)
					require.NoError(b, s.receive())
					require.NoError(b, s.acknowledge())
				}
				start()
				measure := func() uint64 {
					var m runtime.MemStats
					for range 3 { // a sync.Pool needs more than one round
						time.Sleep(20 * time.Millisecond)
						runtime.GC()
					}
					runtime.ReadMemStats(&m)
					return m.HeapAlloc + m.StackInuse
				}
				goroutines, before := runtime.NumGoroutine(), measure()
				const n = 1000
				for range n {
					start()
				}
				after := measure()
				for b.Loop() { // nothing happens to an idle stream
					continue
				}
				b.ReportMetric(float64(after-before)/n/1024, "KiB/stream")
				b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/stream")
			})
		}
	}
}
