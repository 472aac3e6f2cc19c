package sds_test

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

func textLogger(b *syncBuffer) *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

// codeOf returns the code of gRPC that an error has.
func codeOf(t testing.TB, err error) grpchttp.Code {
	t.Helper()
	e, ok := errors.AsType[*grpchttp.Error](err)
	require.True(t, ok, "%v", err)
	return e.Code
}

// server returns a server whose StreamSecrets is m.
func server(m grpchttp.Method) http.Handler {
	return &grpchttp.Handler{Methods: map[string]grpchttp.Method{service + "StreamSecrets": m}, MaxMessage: 1 << 20}
}

// watched is what a Watch yields, one at a time.
type watched struct {
	secret *pki.Secret
	err    error
}

// watch runs Watch in the background; the channel is closed when it ends.
func watch(t testing.TB, c *sds.Client, names ...string) (<-chan watched, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	ch := make(chan watched)
	go func() {
		defer close(ch)
		for s, err := range c.Watch(ctx, names...) {
			select {
			case ch <- watched{s, err}:
			case <-ctx.Done():
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		for range ch { // wait for the end
			continue
		}
	})
	return ch, cancel
}

func receive(t testing.TB, ch <-chan watched) watched {
	t.Helper()
	select {
	case w, ok := <-ch:
		require.True(t, ok, "Watch ended")
		return w
	case <-time.After(patient):
		require.Fail(t, "nothing came")
	}
	return watched{}
}

func equal(t testing.TB, want, got *pki.Secret) {
	t.Helper()
	require.NotNil(t, got)
	assert.Equal(t, want.Name(), got.Name())
	chain, key, _ := want.KeyPair()
	roots, _ := want.Roots()
	gotChain, gotKey, _ := got.KeyPair()
	gotRoots, _ := got.Roots()
	assert.Equal(t, [][]byte{chain, key, roots}, [][]byte{gotChain, gotKey, gotRoots})
	assert.True(t, want.NotAfter().Equal(got.NotAfter()))
}

func TestClient(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, trust := m.pair("default"), m.roots("ROOTCA")
	src.put("default", web)
	dir := socketDir(t)
	h := handler(t, src, &sds.Options{RequireHeader: true})
	start := func() func() error { return run(t, &unixsocket.Server{Path: dir + "/s", Handler: h}) }
	stop := start()
	ch, cancel := watch(t, sds.NewClient(dial(t, dir+"/s"), "http://localhost"), "default", "ROOTCA", "default")
	w := receive(t, ch)
	require.NoError(t, w.err)
	equal(t, web, w.secret)
	src.put("ROOTCA", trust)
	equal(t, trust, receive(t, ch).secret)
	web = m.pair("default")
	src.put("default", web)
	equal(t, web, receive(t, ch).secret)

	// The server goes and comes back: the client says so, and what it has is not yielded again.
	require.NoError(t, stop())
	w = receive(t, ch)
	assert.Equal(t, grpchttp.Unavailable, codeOf(t, w.err))
	assert.ErrorContains(t, w.err, "sds: watch: ")
	start()
	for w.err != nil {
		m.ca.Rotate()
		trust = m.roots("ROOTCA")
		src.put("ROOTCA", trust)
		w = receive(t, ch)
	}
	equal(t, trust, w.secret)
	require.Eventually(t, func() bool { return h.Status().Streams == 1 }, patient, time.Millisecond)
	cancel()
	_, ok := <-ch
	assert.False(t, ok)
	require.Eventually(t, func() bool { return h.Status().Streams == 0 }, patient, time.Millisecond)
	assert.Zero(t, h.Status().NACKs)
}

func TestClientBreak(t *testing.T) {
	t.Parallel()
	_, src, _ := withPair(t, "default")
	h, c := serving(t, src, nil)
	for s, err := range sds.NewClient(c, "http://localhost").Watch(t.Context(), "default") {
		require.NoError(t, err)
		assert.Equal(t, "default", s.Name())
		break
	}
	require.Eventually(t, func() bool { return h.Status().Streams == 0 }, patient, time.Millisecond)

	none := sds.NewClient(dial(t, socketDir(t)+"/none"), "http://localhost")
	for s, err := range none.Watch(t.Context(), "default") {
		assert.Nil(t, s)
		require.Error(t, err)
		break
	}
	for _, names := range [][]string{nil, {""}} {
		n := 0
		for _, err := range none.Watch(t.Context(), names...) {
			require.ErrorContains(t, err, "name the secrets")
			n++
		}
		assert.Equal(t, 1, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range none.Watch(ctx, "default") {
		t.Fatal("the context is done")
	}
}

// A server that sends nonsense is told so, and why.
func TestClientRejects(t *testing.T) {
	t.Parallel()
	m := newMint(t)
	good, other := m.pair("default"), m.pair("default")
	chain, key, _ := good.KeyPair()
	_, wrongKey, _ := other.KeyPair()
	trusted := m.roots("default")
	roots, _ := trusted.Roots()
	inline := func(b []byte) *envoysds.DataSource {
		return &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineBytes{InlineBytes: b}}
	}
	text := func(b []byte) *envoysds.DataSource {
		return &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineString{InlineString: string(b)}}
	}
	pack := func(url string, s *envoysds.Secret) *envoysds.DiscoveryResponse {
		return &envoysds.DiscoveryResponse{
			TypeUrl: typeURL, VersionInfo: "v", Nonce: "1", Resources: []*anypb.Any{{TypeUrl: url, Value: mustMarshal(t, s)}},
		}
	}
	keyPair := func(name string, chain, key *envoysds.DataSource) *envoysds.DiscoveryResponse {
		return pack(typeURL, &envoysds.Secret{Name: name, Type: &envoysds.Secret_TlsCertificate{
			TlsCertificate: &envoysds.TlsCertificate{CertificateChain: chain, PrivateKey: key},
		}})
	}
	trust := func(roots *envoysds.DataSource) *envoysds.DiscoveryResponse {
		return pack(typeURL, &envoysds.Secret{Name: "default", Type: &envoysds.Secret_ValidationContext{
			ValidationContext: &envoysds.CertificateValidationContext{TrustedCa: roots},
		}})
	}
	wrongWire := &envoysds.CertificateValidationContext{TrustedCa: inline(roots)}
	for n, kind := range map[protowire.Number]protowire.Type{7: protowire.VarintType, 12: protowire.VarintType, 14: protowire.Fixed64Type} {
		b := protowire.AppendTag(wrongWire.ProtoReflect().GetUnknown(), n, kind)
		if kind == protowire.VarintType {
			b = protowire.AppendVarint(b, 1)
		} else {
			b = protowire.AppendFixed64(b, 1)
		}
		wrongWire.ProtoReflect().SetUnknown(b)
	}
	file := &envoysds.DataSource{Specifier: &envoysds.DataSource_Filename{Filename: "/etc/passwd"}}
	for name, test := range map[string]struct {
		response *envoysds.DiscoveryResponse
		want     string // empty: it is accepted
	}{
		"as text":         {keyPair("default", text(chain), text(key)), ""},
		"not asked for":   {keyPair("other", inline(chain), inline(wrongKey)), ""},
		"key of another":  {keyPair("default", inline(chain), inline(wrongKey)), "key"},
		"no key":          {keyPair("default", inline(chain), nil), "inline"},
		"a file":          {keyPair("default", inline(chain), file), "inline"},
		"a leaf as root":  {trust(inline(chain)), "CA"},
		"no roots":        {trust(inline(nil)), "neither"},
		"nothing":         {pack(typeURL, &envoysds.Secret{Name: "default"}), "without content"},
		"another type":    {pack("type.googleapis.com/x", &envoysds.Secret{Name: "default"}), "type"},
		"not a secret":    {&envoysds.DiscoveryResponse{Nonce: "1", Resources: []*anypb.Any{{TypeUrl: typeURL, Value: []byte{0xff}}}}, "not a Secret"},
		"wrapped badly":   {keyPair("default", inline(append([]byte("\n"), chain[:len(chain)-40]...)), inline(key)), "default"},
		"wire types":      {pack(typeURL, &envoysds.Secret{Name: "default", Type: &envoysds.Secret_ValidationContext{ValidationContext: wrongWire}}), ""},
		"empty, harmless": {&envoysds.DiscoveryResponse{Nonce: "1"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			answers := make(chan *envoysds.DiscoveryRequest, 1)
			h := server(func(ctx context.Context, c *grpchttp.Call) error {
				receive := func() *envoysds.DiscoveryRequest {
					var r envoysds.DiscoveryRequest
					msg, err := c.Receive()
					if err != nil {
						return nil
					}
					assert.NoError(t, proto.Unmarshal(msg, &r))
					return &r
				}
				if first := receive(); assert.NotNil(t, first) {
					assert.Equal(t, []string{"default"}, first.GetResourceNames())
					assert.Equal(t, typeURL, first.GetTypeUrl())
					assert.NotEmpty(t, first.GetNode().GetId())
					assert.NotEmpty(t, first.GetNode().GetCluster())
					assert.Equal(t, "true", c.Header().Get("workload.spiffe.io"))
				}
				if err := c.Send(mustMarshal(t, test.response)); err != nil {
					return err
				}
				if answer := receive(); answer != nil {
					select {
					case answers <- answer:
					default:
					}
				}
				<-ctx.Done()
				return ctx.Err()
			})
			socket, _ := serve(t, h)
			ch, _ := watch(t, sds.NewClient(dial(t, socket), "http://localhost"), "default")
			if test.want != "" {
				w := receive(t, ch)
				assert.Nil(t, w.secret)
				assert.ErrorContains(t, w.err, "rejected")
				assert.ErrorContains(t, w.err, test.want)
			} else if name == "wire types" { // fields of another type than theirs are skipped
				equal(t, trusted, receive(t, ch).secret)
			} else if name == "as text" {
				equal(t, good, receive(t, ch).secret)
			}
			answer := <-answers
			assert.Equal(t, "1", answer.GetResponseNonce())
			assert.Equal(t, []string{"default"}, answer.GetResourceNames())
			if test.want == "" {
				assert.Nil(t, answer.GetErrorDetail())
				assert.Equal(t, test.response.GetVersionInfo(), answer.GetVersionInfo())
			} else {
				assert.Empty(t, answer.GetVersionInfo(), "the last one accepted")
				assert.Contains(t, answer.GetErrorDetail().GetMessage(), test.want)
				assert.NotContains(t, answer.GetErrorDetail().GetMessage(), string(wrongKey[30:60]))
			}
		})
	}
}

// The errors of a server reach the caller.
func TestClientRefused(t *testing.T) {
	t.Parallel()
	socket, _ := serve(t, http.NotFoundHandler())
	for _, err := range sds.NewClient(dial(t, socket), "http://localhost").Watch(t.Context(), "default") {
		assert.Equal(t, grpchttp.Unimplemented, codeOf(t, err))
		break
	}
}

// inMemory serves h in memory until the test ends, and returns a client of it.
func inMemory(t *testing.T, h http.Handler) *sds.Client {
	t.Helper()
	l := memconn.Listen()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Protocols: &protocols, Handler: h}
	go func() { _ = srv.Serve(l) }()
	transport := &http.Transport{Protocols: &protocols, DialContext: l.DialContext}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		_ = srv.Close()
	})
	return sds.NewClient(&http.Client{Transport: transport}, "http://localhost")
}

// TestWatchKeepsValid: a certificate that has expired or is not valid yet is not yielded, and the others of its response are; one
// that will be valid is yielded then.
func TestWatchKeepsValid(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		issue := func(from, to time.Duration) *pki.Secret {
			s, err := pki.NewKeyPairSecret("web", ca.SVID("/web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(from), time.Now().Add(to) }))
			require.NoError(t, err)
			return s
		}
		roots := func() *pki.Secret {
			ca.Rotate()
			return must.Get(pki.NewTrustSecret("ROOTCA", ca.Bundle()))(t)
		}
		src := newFakeSource()
		good := issue(0, 3*time.Hour)
		src.put("web", good)
		src.put("ROOTCA", roots())
		h := must.Get(sds.NewHandler(src, nil))(t)
		defer h.Close()
		c := inMemory(t, h)
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		secrets, errs, done := map[string]*pki.Secret{}, []string{}, make(chan struct{})
		secret := func(name string) *pki.Secret { mu.Lock(); defer mu.Unlock(); return secrets[name] }
		said := func() (all []string) { mu.Lock(); defer mu.Unlock(); all, errs = errs, nil; return all } // since the last call
		go func() {
			defer close(done)
			for s, err := range c.Watch(ctx, "web", "ROOTCA") {
				mu.Lock()
				if err != nil {
					errs = append(errs, err.Error())
				} else {
					secrets[s.Name()] = s
				}
				mu.Unlock()
			}
		}()
		defer func() {
			cancel()
			<-done
		}()
		synctest.Wait()
		equal(t, good, secret("web"))
		require.Empty(t, said())

		trust := roots()
		src.put("web", issue(-time.Hour, -10*time.Minute))
		src.put("ROOTCA", trust)
		time.Sleep(time.Minute)
		synctest.Wait()
		equal(t, good, secret("web"))
		equal(t, trust, secret("ROOTCA"))
		refused := said()
		require.NotEmpty(t, refused)
		require.Contains(t, refused[0], `sds: watch: secret "web": the certificate has expired at 1999-12-31T23:50:00Z`)

		for _, wait := range []time.Duration{time.Minute, 2 * time.Hour} {
			_ = said()
			next := issue(wait, wait+4*time.Hour)
			src.put("web", next)
			time.Sleep(wait - time.Second)
			synctest.Wait()
			equal(t, good, secret("web"))
			refused := said()
			require.NotEmpty(t, refused)
			require.Contains(t, refused[0], " on; compare the clocks")
			time.Sleep(5 * time.Second)
			synctest.Wait()
			equal(t, next, secret("web"))
			good = next
		}
		assert.Zero(t, h.Status().NACKs)
	})
}

// A server that is away for 45 % of a short life is found again before another 5 % of what is left are gone.
func TestWatchOutage(t *testing.T) {
	t.Parallel()
	for _, life := range []time.Duration{20 * time.Second, time.Minute} {
		for _, percent := range []time.Duration{5, 20, 45} {
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org")
				issue := func() *pki.Secret {
					s, err := pki.NewKeyPairSecret("web", ca.SVID("/web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(life) }))
					require.NoError(t, err)
					return s
				}
				src := newFakeSource()
				src.put("web", issue())
				h := must.Get(sds.NewHandler(src, nil))(t)
				defer h.Close()
				var away atomic.Bool
				down := make(chan struct{}, 1)
				c := inMemory(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if away.Load() {
						w.WriteHeader(http.StatusServiceUnavailable)
						return
					}
					ctx, cancel := context.WithCancel(r.Context())
					defer cancel()
					go func() {
						select {
						case <-down:
							cancel()
						case <-ctx.Done():
						}
					}()
					h.ServeHTTP(w, r.WithContext(ctx))
				}))
				ctx, cancel := context.WithCancel(t.Context())
				var last atomic.Pointer[pki.Secret]
				done := make(chan struct{})
				go func() {
					defer close(done)
					for s, err := range c.Watch(ctx, "web") {
						if err == nil {
							last.Store(s)
						}
					}
				}()
				defer func() {
					cancel()
					<-done
				}()
				synctest.Wait()
				first := last.Load()
				require.NotNil(t, first)
				time.Sleep(life / 2)
				away.Store(true)
				down <- struct{}{}
				time.Sleep(life * percent / 100)
				src.put("web", issue())
				away.Store(false)
				time.Sleep(time.Until(first.NotAfter())/20 + time.Millisecond)
				synctest.Wait()
				assert.NotSame(t, first, last.Load(), "%v, away for %d %%", life, percent)
			})
		}
	}
}
