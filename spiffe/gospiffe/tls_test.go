package gospiffe_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	theirtls "github.com/spiffe/go-spiffe/v2/spiffetls"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	theirjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	theirapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func timeout(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// sources are both libraries' sources of one Workload API.
type sources struct {
	ours   *workloadapi.Source
	theirs *theirapi.X509Source
	tokens *theirapi.JWTSource
}

func start(t *testing.T, api *workloadapitest.Server) sources {
	t.Helper()
	ctx := timeout(t)
	cfg := api.Config()
	cfg.JWTBundles = true
	ours := must.Get(workloadapi.Start(ctx, cfg))(t)
	t.Cleanup(func() { assert.NoError(t, ours.Close()) })
	at := theirapi.WithClientOptions(theirapi.WithAddr(api.Config().Address))
	theirs := must.Get(theirapi.NewX509Source(ctx, at))(t)
	t.Cleanup(func() { _ = theirs.Close() })
	tokens := must.Get(theirapi.NewJWTSource(ctx, at))(t)
	t.Cleanup(func() { _ = tokens.Close() })
	return sources{ours, theirs, tokens}
}

// sides are the four ways to one end of a connection: a configuration of one library over a source of the
// same or of the other.
var sides = map[string]func(t *testing.T, s sources, allow spiffe.ID, server bool) *tls.Config{
	"svidkit": func(t *testing.T, s sources, allow spiffe.ID, server bool) *tls.Config {
		return ourConfig(t, s.ours, s.ours, allow, server)
	},
	"svidkit over go-spiffe": func(t *testing.T, s sources, allow spiffe.ID, server bool) *tls.Config {
		return ourConfig(t, gospiffe.FromSVIDSource(s.theirs), gospiffe.FromX509BundleSource(s.theirs), allow, server)
	},
	"go-spiffe": func(t *testing.T, s sources, allow spiffe.ID, server bool) *tls.Config {
		return theirConfig(s.theirs, s.theirs, allow, server)
	},
	"go-spiffe over svidkit": func(t *testing.T, s sources, allow spiffe.ID, server bool) *tls.Config {
		return theirConfig(gospiffe.ToSVIDSource(s.ours), gospiffe.ToBundleSource(s.ours), allow, server)
	},
}

func ourConfig(t *testing.T, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.ID, server bool) *tls.Config {
	t.Helper()
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: peers, Allow: spiffe.AllowIDs(allow)}))(t)
	config, err := endpoint.ClientConfig()
	if server {
		config, err = endpoint.ServerConfig()
	}
	require.NoError(t, err)
	return config
}

func theirConfig(self x509svid.Source, peers x509bundle.Source, allow spiffe.ID, server bool) *tls.Config {
	authorize := tlsconfig.AdaptMatcher(gospiffe.ToMatcher(spiffe.AllowIDs(allow)))
	if server {
		return tlsconfig.MTLSServerConfig(self, peers, authorize)
	}
	return tlsconfig.MTLSClientConfig(self, peers, authorize)
}

// serve echoes a byte on each connection until the test ends, and returns the address and what it has seen
// of a failed connection.
func serve(t *testing.T, config *tls.Config) (addr string, failures func() error) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				c := tls.Server(raw, config)
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
				b := make([]byte, 1)
				_, err := io.ReadFull(c, b)
				if err == nil {
					_, err = c.Write(b)
				}
				if err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String(), func() error { mu.Lock(); defer mu.Unlock(); return failed }
}

// call makes a connection and a round trip on it.
func call(addr string, config *tls.Config) (*tls.ConnectionState, error) {
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 20 * time.Second}, "tcp", addr, config)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write([]byte{7}); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return nil, err
	}
	state := c.ConnectionState()
	return &state, nil
}

// TestMutualTLS connects each way to a server with each way to a client, over a Workload API, while leaves
// and roots rotate.
func TestMutualTLS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	s := start(t, api)
	web, stranger := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/stranger")

	type pair struct {
		name, addr string
		client     *tls.Config
		failures   func() error
	}
	var pairs []pair
	for server, listen := range sides {
		addr, failures := serve(t, listen(t, s, web, true))
		good, _ := serve(t, listen(t, s, web, true)) // and refused by clients
		refusing, _ := serve(t, listen(t, s, stranger, true))
		for client, dial := range sides {
			p := pair{server + " serves " + client, addr, dial(t, s, web, false), failures}
			pairs = append(pairs, p)
			_, err := call(good, dial(t, s, stranger, false))
			assert.Error(t, err, "%s: the client accepts a server that its policy does not allow", p.name)
			_, err = call(refusing, p.client)
			assert.Error(t, err, "%s: the server accepts a client that its policy does not allow", p.name)
		}
	}
	require.Len(t, pairs, 16)

	stop := make(chan struct{})
	calls := make([]atomic.Int64, len(pairs))
	var failed atomic.Int64
	var leaves sync.Map
	var load sync.WaitGroup
	for i, p := range pairs {
		load.Go(func() {
			for {
				state, err := call(p.addr, p.client)
				calls[i].Add(1)
				if err != nil {
					failed.Add(1)
					t.Errorf("%s: %v", p.name, err)
					return
				}
				leaves.Store(state.PeerCertificates[0].SerialNumber.String(), true)
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		})
	}
	rotations := 0
	for range 2 { // of the root, each with leaves before and after
		for _, step := range []func(){api.Rotate, ca.Prepare, func() { ca.Rotate(); api.Rotate() }, ca.DropOldRoots} {
			step()
			rotations++
			s.follow(t, api)
			before := make([]int64, len(calls))
			for i := range calls {
				before[i] = calls[i].Load()
			}
			for i := range calls { // each way makes a whole call after the step
				for calls[i].Load() < before[i]+2 && failed.Load() == 0 {
					time.Sleep(time.Millisecond)
				}
			}
		}
	}
	close(stop)
	load.Wait()
	seen, total := 0, int64(0)
	for i := range calls {
		total += calls[i].Load()
	}
	leaves.Range(func(any, any) bool { seen++; return true })
	t.Logf("%d steps of rotation, %d connections in %d ways, %d leaves seen, %d failed", rotations, total, len(pairs), seen, failed.Load())
	assert.Zero(t, failed.Load())
	for _, p := range pairs {
		assert.NoError(t, p.failures(), "as the server of %s sees it", p.name)
	}
	assert.GreaterOrEqual(t, seen, 4, "a rotation was not seen")
}

// follow waits until both sources have what the server has, and every adapter with them.
func (s sources) follow(t *testing.T, api *workloadapitest.Server) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		snap := api.Snapshot()
		want := must.Get(snap.SVID())(c)
		bundle := must.Get(snap.Bundle(td))(c)
		roots := bundle.MarshalPEM()
		for _, src := range []struct {
			spiffe.SVIDSource
			spiffe.BundleSource
		}{{s.ours, s.ours}, {gospiffe.FromSVIDSource(s.theirs), gospiffe.FromX509BundleSource(s.theirs)}} {
			svid := must.Get(src.SVID())(c)
			assert.True(c, want.Leaf().Equal(svid.Leaf()))
			b := must.Get(src.Bundle(td))(c)
			assert.Equal(c, string(roots), string(b.MarshalPEM()))
		}
	}, time.Minute, 2*time.Millisecond)
}

// A connection that was made with a configuration of go-spiffe is proved by a configuration of ours, and one
// of ours has the ID for go-spiffe.
func TestPeers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := start(t, workloadapitest.NewServer(t, ca, "/web"))
	web := spiffe.MustParseID("spiffe://example.org/web")
	prove := func(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.ID, cs tls.ConnectionState) (*spiffe.Peer, error) {
		endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: peers, Allow: spiffe.AllowIDs(allow)}))(t)
		return endpoint.PeerFromState(spiffe.ServerRole, cs)
	}
	for name, side := range sides {
		addr, _ := serve(t, side(t, s, web, true))
		state := must.Get(call(addr, side(t, s, web, false)))(t, name)
		for _, over := range []bool{false, true} {
			peer, err := prove(s.ours, s.ours, web, *state)
			if over {
				peer, err = prove(gospiffe.FromSVIDSource(s.theirs), gospiffe.FromX509BundleSource(s.theirs), web, *state)
			}
			require.NoError(t, err, name)
			assert.Equal(t, web, peer.ID(), name)
			theirs := must.Get(gospiffe.ToID(peer.ID()))(t)
			id := must.Get(theirtls.PeerIDFromConnectionState(*state))(t)
			assert.Equal(t, id, theirs)
		}
		_, err := prove(s.ours, s.ours, spiffe.MustParseID("spiffe://example.org/stranger"), *state)
		assert.ErrorIs(t, err, spiffe.ErrDenied, name)
	}
}

// Tokens from a Workload API, by either library's client, validated by either.
func TestTokensOfWorkloadAPI(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	ca := spiffetest.NewCA(t, "example.org")
	s := start(t, workloadapitest.NewServer(t, ca, "/web"))
	cache := must.Get(jwtsvid.NewCache(gospiffe.FromTokenSource(s.tokens), nil))(t)
	ourCache := must.Get(jwtsvid.NewCache(s.ours, nil))(t)
	fetch := map[string]func() (string, error){
		"svidkit":                func() (string, error) { return s.ours.Fetch(ctx, "db") },
		"svidkit over go-spiffe": func() (string, error) { return cache.Fetch(ctx, "db") },
		"go-spiffe": func() (string, error) {
			svid, err := s.tokens.FetchJWTSVID(ctx, theirjwt.Params{Audience: "db"})
			if err != nil {
				return "", err
			}
			return svid.Marshal(), nil
		},
		"go-spiffe over svidkit": func() (string, error) {
			svid, err := gospiffe.ToTokenSource(ourCache).FetchJWTSVID(ctx, theirjwt.Params{Audience: "db"})
			if err != nil {
				return "", err
			}
			return svid.Marshal(), nil
		},
	}
	for name, f := range fetch {
		token := must.Get(f())(t, name)
		for _, bundles := range []spiffe.BundleSource{s.ours, gospiffe.FromJWTBundleSource(s.tokens)} {
			v := must.Get(jwtsvid.NewValidator(bundles, []string{"db"}, nil))(t)
			verified := must.Get(v.Validate(token))(t, name)
			assert.Equal(t, "spiffe://example.org/web", verified.ID().String())
		}
		svid := must.Get(theirjwt.ParseAndValidate(token, gospiffe.ToBundleSource(s.ours), []string{"db"}))(t, name)
		assert.Equal(t, "spiffe://example.org/web", svid.ID.String())
		must.Get(theirjwt.ParseAndValidate(token, s.tokens, []string{"db"}))(t, name)
	}
}

// A source of go-spiffe that was closed is not taken for one that does not know the trust domain.
func TestClosed(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	api := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/web")
	s := start(t, api)
	both := must.Get(theirapi.NewBundleSource(ctx, theirapi.WithClientOptions(theirapi.WithAddr(api.Config().Address))))(t)
	other := spiffe.MustParseTrustDomain("other.test")
	bundles := map[string]spiffe.BundleSource{
		"X.509": gospiffe.FromX509BundleSource(s.theirs), "JWT": gospiffe.FromJWTBundleSource(s.tokens), "both": gospiffe.FromBundleSource(both),
	}
	for name, src := range bundles {
		must.Get(src.Bundle(td))(t, name)
		_, err := src.Bundle(other)
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain, name)
		assert.ErrorContains(t, err, "other.test", name)
	}
	validator := must.Get(jwtsvid.NewValidator(bundles["JWT"], []string{"db"}, nil))(t)
	token := must.Get(s.ours.Fetch(ctx, "db"))(t)
	self := gospiffe.FromSVIDSource(s.theirs)
	require.NoError(t, errors.Join(s.theirs.Close(), s.tokens.Close(), both.Close()))
	for name, src := range bundles {
		_, err := src.Bundle(td)
		require.ErrorContains(t, err, "closed", name)
		assert.NotErrorIs(t, err, spiffe.ErrUnknownTrustDomain, name)
	}
	_, err := validator.Validate(token)
	assert.ErrorIs(t, err, jwtsvid.ErrUnavailable, "so that a client may try again")
	_, err = self.SVID()
	assert.ErrorContains(t, err, "closed")

	require.NoError(t, s.ours.Close())
	_, err = gospiffe.ToBundleSource(s.ours).GetX509BundleForTrustDomain(spiffeid.RequireTrustDomainFromString("other.test"))
	assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
}

// However an adapter is printed, it shows neither a key nor a token.
func TestPrinting(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	_, keyDER := must.Get2(svid.MarshalDER())(t)
	token := issue(t, td, "db")
	theirs := toSVID(t, svid)
	fromSVIDs, toSVIDs := gospiffe.FromSVIDSource(theirs), gospiffe.ToSVIDSource(svid)
	toTokens := gospiffe.ToTokenSource(fixed(token))
	fromTokens := gospiffe.FromTokenSource(toTokens)
	must.Get(fromSVIDs.SVID())(t)
	must.Get(toSVIDs.GetX509SVID())(t)
	must.Get(fromTokens.Fetch(t.Context(), "db"))(t)
	for _, v := range []any{
		fromSVIDs, toSVIDs, toTokens, fromTokens, gospiffe.ToBundleSource(svidAndBundles{svid, ca.Bundle()}), gospiffe.FromX509BundleSource(gospiffe.ToBundleSource(ca.Bundle())),
	} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d"} {
			text := fmt.Sprintf(verb, v) + fmt.Sprintf(verb, struct{ V any }{v})
			assert.NotContains(t, text, token)
			assert.NotContains(t, text, fmt.Sprintf("%x", keyDER[40:60]))
			assert.Less(t, len(text), 200, "%s of %T", verb, v)
		}
	}
}

// svidAndBundles is a source of both, as a Source of package workloadapi is.
type svidAndBundles struct {
	*spiffe.SVID
	spiffe.BundleSource
}
