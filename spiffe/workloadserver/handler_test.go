package workloadserver_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// provider is a Provider that a test fills.
type provider struct {
	mu      sync.Mutex
	snap    *spiffe.Snapshot
	err     error
	changed chan struct{}
	crls    [][]byte
}

func (p *provider) Snapshot() (*spiffe.Snapshot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.snap, p.err
}

func (p *provider) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

func (p *provider) CRLs() [][]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.crls
}

func (p *provider) set(snap *spiffe.Snapshot, err error, crls ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.snap, p.err, p.crls = snap, err, crls
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// snapshot has svid and the bundles of its domain and of others.
func snapshot(t testing.TB, svid *spiffe.SVID, domains ...domain) *spiffe.Snapshot {
	t.Helper()
	var bundles []*spiffe.Bundle
	for _, d := range domains {
		bundles = append(bundles, d.Bundle())
	}
	return spiffe.NewSnapshot(svid, must.Get(spiffe.NewBundleSet(bundles...))(t))
}

// fixed returns a Provider that always has the same snapshot.
func fixed(s *spiffe.Snapshot) workloadserver.Provider { return fixedSnapshot{s} }

type fixedSnapshot struct{ snap *spiffe.Snapshot }

func (f fixedSnapshot) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixedSnapshot) Changed() <-chan struct{}            { return nil }

// streams returns how many streams are open and calls are being answered.
func streams(h *workloadserver.Handler) int { return h.Report().Servers[0].Streams }

func handler(t testing.TB, p workloadserver.Provider, opts *workloadserver.Options) *workloadserver.Handler {
	t.Helper()
	h := must.Get(workloadserver.NewHandler(p, opts))(t)
	t.Cleanup(func() { _ = h.Close() })
	return h
}

// From a SecretManager to a workload, and what changes on the way.
func TestHandler(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-1", "WAPI-7", "WAPI-8", "WAPI-10", "WAPI-30", "WAPI-34", "WAPI-44", "WEP-1", "WEP-7", "WEP-19")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		id := spiffe.MustParseID("spiffe://example.org/web")
		m := must.Get(secretcache.New(secretcache.Config{ID: id, CA: home.CA}))(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = m.Run(ctx)
		}()
		h := handler(t, m, nil)
		c := inMemory(t, h)
		s := must.Get(workloadapi.New(workloadapi.Config{Client: c, JWTBundles: true}))(t)
		stop := workloadtest.Run(t, s)
		require.NoError(t, s.Ready(t.Context()))
		same := func() {
			t.Helper()
			want := must.Get(m.Snapshot())(t)
			got := must.Get(s.Snapshot())(t)
			w, _ := want.SVID()
			g, _ := got.SVID()
			assert.Equal(t, w.Chain(), g.Chain())
			workloadtest.SameRoots(t, home, must.Get(got.Bundle(home.TrustDomain()))(t))
		}
		same()
		assert.Equal(t, 2, streams(h))
		assert.Equal(t, 1, updatesOf(s, "x509"))
		time.Sleep(10 * time.Minute)
		assert.Equal(t, 1, updatesOf(s, "x509"), "nothing has changed")
		home.Rotate()
		synctest.Wait()
		same()
		updates := updatesOf(s, "x509")
		time.Sleep(2 * time.Hour) // of leaves that live one
		same()
		assert.Greater(t, updatesOf(s, "x509"), updates+2)
		assert.Equal(t, 1, updatesOf(s, "jwt"))
		require.NoError(t, stop())
		synctest.Wait()
		assert.Zero(t, streams(h))
		cancel()
		<-done
	})
}

// The first response comes at once, and no other while nothing changes.
func TestFirstResponse(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-7", "WAPI-8")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		src := &provider{}
		snap := snapshot(t, home.SVID("/web", func(c *x509.Certificate) { c.NotAfter = c.NotAfter.Add(100 * 24 * time.Hour) }), home)
		src.set(snap, nil)
		h := handler(t, src, nil)
		start := time.Now()
		for range 3 {
			s := must.Get(workloadapi.New(workloadapi.Config{Client: inMemory(t, h), JWTBundles: true}))(t)
			stop := workloadtest.Run(t, s)
			require.NoError(t, s.Ready(t.Context()))
			assert.Zero(t, time.Since(start))
			src.set(snap, nil) // a change that is none
			h.Refresh()
			time.Sleep(24 * time.Hour)
			assert.Equal(t, []int{1, 1}, []int{updatesOf(s, "x509"), updatesOf(s, "jwt")})
			require.NoError(t, stop())
			start = time.Now()
		}
	})
}

// Without the header nothing is served or even looked at, whatever the method.
func TestHeaderRequired(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-6", "AMB-13", "DIV-13")
	home := workloadtest.NewDomain(t, "example.org")
	asked := false
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{
		Identities:   func(context.Context) ([]workloadserver.Identity, error) { asked = true; return nil, nil },
		IssueJWTSVID: new(tokens).IssueJWTSVID, ValidateJWTSVID: new(tokens).ValidateJWTSVID,
	})
	c := http2(t, h)
	for _, path := range []string{
		service + "FetchX509SVID", service + "FetchX509Bundles", service + "FetchJWTSVID", service + "FetchJWTBundles",
		service + "ValidateJWTSVID", service + "FetchWITSVID", service + "Unknown", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
		"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/Check", "/",
	} {
		for _, values := range [][]string{{}, {""}, {"True"}, {"TRUE"}, {"1"}, {" true x"}, {"true,true"}, {"true", "true"}, {"false", "true"}} {
			var headers []string
			for _, v := range values {
				headers = append(headers, header, v)
			}
			code, message := post(t, c, path, frame(&wire.X509SVIDRequest{}), headers...).Status()
			require.Equal(t, workloadtest.InvalidArgument, code, "%s %q", path, values)
			assert.Contains(t, message, "workload.spiffe.io")
		}
	}
	assert.False(t, asked)
}

// What is not of the stable profiles, or not switched on, answers Unimplemented.
func TestUnimplemented(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-2", "WAPI-3", "WAPI-4", "WEP-18", "AMB-7", "DIV-13")
	home := workloadtest.NewDomain(t, "example.org")
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), nil)
	c := http2(t, h)
	for _, path := range []string{
		service + "FetchWITSVID", service + "FetchWITBundles", service + "FetchJWTSVID", service + "ValidateJWTSVID",
		service + "Other", "/spiffe.WorkloadAPI/FetchX509SVID", "/grpc.health.v1.Health/Check", "/",
	} {
		code, _ := post(t, c, path, frame(&wire.X509SVIDRequest{}), header, "true").Status()
		assert.Equal(t, workloadtest.Unimplemented, code, path)
	}
	for _, media := range []string{"", "text/plain", "application/json", "application/grpc-web", "application/grpc+json", "application/proto"} {
		req := must.Get(http.NewRequest(http.MethodPost, "http://localhost"+service+"FetchX509SVID", nil))(t)
		req.Header.Set("Content-Type", media)
		req.Header.Set("workload.spiffe.io", "true")
		resp := must.Get(c.Do(req))(t)
		assert.Equal(t, http.StatusUnsupportedMediaType, resp.StatusCode, media)
		require.NoError(t, resp.Body.Close())
	}
}

func TestNewHandler(t *testing.T) {
	t.Parallel()
	assert.ErrorContains(t, must.Err(workloadserver.NewHandler(nil, nil)), "provider is nil")
	_, err := workloadserver.NewHandler(fixed(nil), &workloadserver.Options{MaxStreams: -1})
	assert.ErrorContains(t, err, "MaxStreams")
}

// Identities is called at the beginning of a stream and again before each push.
func TestIdentities(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-20", "WAPI-23", "WAPI-25", "WAPI-31", "WAPI-35", "WAPI-47", "WEP-8", "WEP-16")
	synctest.Test(t, func(t *testing.T) {
		home, other, unknown := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test"), workloadtest.NewDomain(t, "unknown.test")
		agent, web, db := home.SVID("/agent"), home.SVID("/web"), home.SVID("/db")
		src := &provider{}
		src.set(snapshot(t, agent, home, other), nil, []byte("crl"))
		var mu sync.Mutex
		var ids []workloadserver.Identity
		var failure error
		var log syncBuffer
		h := handler(t, src, &workloadserver.Options{
			Identities: func(context.Context) ([]workloadserver.Identity, error) {
				mu.Lock()
				defer mu.Unlock()
				return ids, failure
			},
			Logger: workloadtest.Logger(&log),
		})
		grant := func(err error, list ...workloadserver.Identity) {
			mu.Lock()
			ids, failure = list, err
			mu.Unlock()
			h.Refresh()
			synctest.Wait()
		}
		c := inMemory(t, h)
		s := source(t, workloadapi.Config{Client: c, JWTBundles: true})
		synctest.Wait()
		for _, up := range s.Report().Upstreams {
			require.ErrorIs(t, up.Err, workloadapi.ErrDenied)
		}
		for _, err := range c.WatchX509Bundles(t.Context()) {
			require.ErrorIs(t, err, workloadapi.ErrDenied)
			break
		}
		grant(nil, workloadserver.Identity{SVID: db, Hint: "data"}, workloadserver.Identity{SVID: web, Hint: "front"}, workloadserver.Identity{SVID: web})
		require.NoError(t, s.Ready(t.Context()))
		var got []string
		for u, err := range c.WatchX509SVIDs(t.Context()) {
			require.NoError(t, err)
			for _, id := range u.Identities {
				got = append(got, id.SVID.ID().Path()+" "+id.Hint)
			}
			break
		}
		assert.Equal(t, []string{"/db data", "/web front", "/web "}, got, "in order")
		assert.Equal(t, [][]byte{[]byte("crl")}, s.CRLs())
		assert.Equal(t, 2, s.Bundles().Len())
		for bundles, err := range c.WatchX509Bundles(t.Context()) {
			require.NoError(t, err)
			assert.Equal(t, 2, bundles.Bundles.Len())
			assert.Equal(t, [][]byte{[]byte("crl")}, bundles.CRLs)
			break
		}

		// What the hook must not return, or fails with, ends the streams, and clients keep what they have.
		snap := must.Get(s.Snapshot())(t)
		for want, bad := range map[string][]workloadserver.Identity{
			"two identities have the hint": {{SVID: web, Hint: "x"}, {SVID: db, Hint: "x"}},
			"the limit is 1024":            {{SVID: web, Hint: strings.Repeat("x", 1024+1)}},
			"is not UTF-8":                 {{SVID: web, Hint: "\xff"}},
			"has no SVID":                  {{Hint: "x"}},
			"no trust bundle":              {{SVID: unknown.SVID("/web")}},
			"kaputt":                       nil,
		} {
			var failure error
			if bad == nil {
				failure = errors.New("kaputt")
			}
			grant(failure, bad...)
			assert.Contains(t, log.String(), want)
			assert.ErrorContains(t, s.Report().Upstreams[0].Err, "status unavailable")
			assert.NotContains(t, s.Report().Upstreams[0].Err.Error(), want, "the caller is not told")
			assert.Same(t, snap, must.Get(s.Snapshot())(t))
			grant(nil, workloadserver.Identity{SVID: db, Hint: "data"}, workloadserver.Identity{SVID: web, Hint: "front"}, workloadserver.Identity{SVID: web})
			time.Sleep(4 * time.Minute) // the log is silent about the next failure of this kind until then
			require.NoError(t, s.Report().Upstreams[0].Err)
		}

		// A hint of the length that is allowed.
		grant(nil, workloadserver.Identity{SVID: db, Hint: strings.Repeat("x", 1024)})
		require.NoError(t, s.Report().Upstreams[0].Err)

		// The entry is removed: everything is withdrawn, at once.
		for _, denied := range []error{nil, fmt.Errorf("kaputt: %w", workloadapi.ErrDenied)} {
			grant(denied)
			require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
			must.Fail(t, must.Err(s.Bundle(home.TrustDomain())), spiffe.ErrNotReady, "register the workload")
			grant(nil, workloadserver.Identity{SVID: db})
			require.NoError(t, s.Ready(t.Context()))
		}
	})
}

// What a provider may answer.
func TestProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-12", "WAPI-17", "BND-10")
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		web := home.SVID("/web")
		src := &provider{}
		h := handler(t, src, nil)
		c := inMemory(t, h)
		s := source(t, workloadapi.Config{Client: c})
		synctest.Wait()
		assert.ErrorContains(t, s.Report().Upstreams[0].Err, "status unavailable", "nil")
		src.set(snapshot(t, web, home, other), nil)
		require.NoError(t, s.Ready(t.Context()))

		set := func(snap *spiffe.Snapshot, err error) {
			src.set(snap, err)
			synctest.Wait()
		}
		// Less, and more again.
		set(snapshot(t, web, home), nil)
		require.ErrorIs(t, must.Err(s.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)
		set(snapshot(t, web, home, other), nil)
		must.Get(s.Bundle(other.TrustDomain()))(t)

		// Revocation lists change, and nothing else.
		same := snapshot(t, web, home, other)
		set(same, nil)
		assert.Empty(t, s.CRLs())
		src.set(same, nil, []byte("crl"))
		synctest.Wait()
		assert.Equal(t, [][]byte{[]byte("crl")}, s.CRLs())
		src.set(same, nil, []byte("CRL"))
		synctest.Wait()
		assert.Equal(t, [][]byte{[]byte("CRL")}, s.CRLs())

		// A bundle for tokens only is no business of this RPC.
		only := must.Get(spiffe.NewBundle(other.TrustDomain(), spiffe.BundleContents{}))(t)
		bundles := must.Get(spiffe.NewBundleSet(home.Bundle(), only))(t)
		set(spiffe.NewSnapshot(web, bundles), nil)
		require.ErrorIs(t, must.Err(s.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)

		// No bundle of the own trust domain is a fault; an empty one says that everything is revoked.
		set(snapshot(t, web, other), nil)
		assert.ErrorContains(t, s.Report().Upstreams[0].Err, "status unavailable")
		must.Get(s.SVID())(t)
		for _, err := range c.WatchX509Bundles(t.Context()) {
			assert.ErrorContains(t, err, "status unavailable")
			break
		}
		set(snapshot(t, web, home), nil)
		time.Sleep(time.Minute)
		require.NoError(t, s.Report().Upstreams[0].Err)
		revoked := must.Get(spiffe.NewBundle(home.TrustDomain(), spiffe.BundleContents{}))(t)
		set(spiffe.NewSnapshot(web, bundles.With(revoked)), nil)
		require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
		for u, err := range c.WatchX509Bundles(t.Context()) {
			require.NoError(t, err)
			assert.Empty(t, must.Get(u.Bundles.Bundle(home.TrustDomain()))(t).Contents().X509Authorities)
			break
		}

		// A provider that fails for a while, and one that has been denied.
		set(snapshot(t, web, home), nil)
		time.Sleep(time.Minute)
		require.NoError(t, s.Ready(t.Context()))
		set(nil, errors.New("not now"))
		must.Get(s.SVID())(t)
		set(nil, fmt.Errorf("agent: %w", workloadapi.ErrDenied))
		time.Sleep(time.Minute)
		require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
	})
}

// A Source is a Provider: an agent's agent.
func TestChain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		src := &provider{}
		src.set(snapshot(t, home.SVID("/web"), home, other), nil, []byte("crl"))
		var p workloadserver.Provider = src
		var last *workloadapi.Source
		for range 3 {
			s := readySource(t, workloadapi.Config{Client: inMemory(t, handler(t, p, nil))})
			p, last = s, s
		}
		for range 3 {
			home.Rotate()
			svid := home.SVID("/web")
			src.set(snapshot(t, svid, home, other), nil, []byte("crl"))
			synctest.Wait()
			assert.Equal(t, svid.Chain(), must.Get(last.SVID())(t).Chain())
			workloadtest.SameRoots(t, home, must.Get(last.Bundle(home.TrustDomain()))(t))
			assert.Equal(t, [][]byte{[]byte("crl")}, last.CRLs())
		}
		src.set(nil, workloadapi.ErrDenied)
		synctest.Wait()
		require.ErrorIs(t, must.Err(last.SVID()), workloadapi.ErrDenied)
	})
}

// Equal callers share one serialisation, and it is not kept longer than it is good for. TestEncodeOnce is not parallel,
// as it counts allocations.
func TestEncodeOnce(t *testing.T) {
	home := workloadtest.NewDomain(t, "example.org")
	web, db := home.SVID("/web"), home.SVID("/db")
	p := new(provider)
	var ids []workloadserver.Identity
	h := handler(t, p, &workloadserver.Options{
		Identities: func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
	})
	request := frame(&wire.X509SVIDRequest{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the first response is all
	ask := func(of ...workloadserver.Identity) string {
		ids = of
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "POST", service+"FetchX509SVID", bytes.NewReader(request))
		r.ProtoMajor, r.RemoteAddr = 2, "127.0.0.1:1"
		r.Header = http.Header{"Content-Type": {"application/grpc"}, header: {"true"}}
		h.ServeHTTP(w, r)
		return w.Body.String()
	}
	const domains = 300
	bundles := []*spiffe.Bundle{home.Bundle()}
	for i := range domains {
		other := spiffe.MustParseTrustDomain(fmt.Sprint("d", i))
		bundles = append(bundles, must.Get(spiffe.NewBundle(other, home.Bundle().Contents()))(t))
	}
	p.set(spiffe.NewSnapshot(web, must.Get(spiffe.NewBundleSet(bundles...))(t)), nil)
	a, b := workloadserver.Identity{SVID: web}, workloadserver.Identity{SVID: db, Hint: "x"}
	one := ask(a, b)
	assert.Contains(t, one, "spiffe://d299")
	if !rounds.Race { // which allocates
		assert.Less(t, testing.AllocsPerRun(10, func() { assert.Equal(t, one, ask(a, b)) }), float64(domains))
	}
	assert.NotEqual(t, one, ask(b, a))
	assert.NotEqual(t, one, ask(a))
	assert.Equal(t, one, ask(a, b))

	held := func() weak.Pointer[spiffe.SVID] {
		svid := home.SVID("/gone")
		ask(workloadserver.Identity{SVID: svid})
		ids = nil
		return weak.Make(svid)
	}
	old := held()
	runtime.GC()
	assert.NotNil(t, old.Value())
	p.set(snapshot(t, web, home), nil)
	assert.NotEqual(t, one, ask(a, b))
	assert.True(t, collected(old), "with the snapshot")
	for i := range 10 { // the address of an SVID that is gone is not taken for it
		assert.Contains(t, ask(workloadserver.Identity{SVID: home.SVID(fmt.Sprint("/", i))}), fmt.Sprint("/", i))
		runtime.GC()
	}
	old = held()
	for i := range 4096/2 + 10 {
		ask(a, workloadserver.Identity{SVID: db, Hint: strconv.Itoa(i)})
	}
	assert.True(t, collected(old), "with all responses, as there are too many")
}

// collected reports whether nothing holds what p points to.
func collected(p weak.Pointer[spiffe.SVID]) bool {
	for n := 0; n < 100 && p.Value() != nil; n++ {
		runtime.GC() // a stack that is scanned conservatively may hold it for one round
	}
	return p.Value() == nil
}

// opaque is a key that cannot be exported, as one that lives in hardware.
type opaque struct{ crypto.Signer }

func TestKeyThatStays(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	web := home.SVID("/web")
	locked := must.Get(spiffe.NewSVID(web.Chain(), opaque{web.Signer()}))(t)
	var log syncBuffer
	h := handler(t, fixed(snapshot(t, locked, home)), &workloadserver.Options{Logger: workloadtest.Logger(&log)})
	c := inMemory(t, h)
	for range 2 {
		for _, err := range c.WatchX509SVIDs(t.Context()) {
			assert.ErrorContains(t, err, "status unavailable")
			break
		}
	}
	assert.Equal(t, 1, strings.Count(log.String(), "cannot be exported"), "said once")
	for u, err := range c.WatchX509Bundles(t.Context()) {
		require.NoError(t, err)
		assert.Equal(t, 1, u.Bundles.Len())
		break
	}
}

// A caller may limit its own stream.
func TestDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), nil)
		start := time.Now()
		r := post(t, http2(t, h), service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true", "Grpc-Timeout", "200m")
		require.NotEmpty(t, r.Receive())
		code, _ := r.Status()
		assert.Equal(t, workloadtest.DeadlineExceeded, code)
		assert.Equal(t, 200*time.Millisecond, time.Since(start))
		synctest.Wait()
		assert.Zero(t, streams(h))
	})
}

// hasty is a Provider whose snapshot has changed by the time that it is looked at, once.
type hasty struct {
	provider
	next *spiffe.Snapshot
}

func (p *hasty) Snapshot() (*spiffe.Snapshot, error) {
	snap, err := p.provider.Snapshot()
	if next := p.next; next != nil {
		p.next = nil
		p.set(next, nil)
	}
	return snap, err
}

// No change is missed, not even one in the moment of looking.
func TestHastyProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-8")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		src := &hasty{next: snapshot(t, home.SVID("/new"), home)}
		src.set(snapshot(t, home.SVID("/old"), home), nil)
		s := source(t, workloadapi.Config{Client: inMemory(t, handler(t, src, nil))})
		synctest.Wait()
		assert.Equal(t, "/new", must.Get(s.SVID())(t).ID().Path())
	})
}

// A caller that does not read gets the newest when it reads again, and delays no other caller.
func TestCoalescing(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-10")
	home := workloadtest.NewDomain(t, "example.org")
	src := &provider{}
	big := bytes.Repeat([]byte("x"), 1<<20) // more than a connection buffers
	src.set(snapshot(t, home.SVID("/web"), home), nil, big)
	h := handler(t, src, nil)
	slow := post(t, http2(t, h), service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
	quick := readySource(t, workloadapi.Config{Client: inMemory(t, h)})
	var last *spiffe.SVID
	for i := range 20 {
		last = home.SVID("/web")
		src.set(snapshot(t, last, home), nil, append(big, byte(i)))
		require.Eventually(t, func() bool {
			svid, err := quick.SVID()
			return err == nil && bytes.Equal(svid.Leaf().Raw, last.Leaf().Raw)
		}, patient, 5*time.Millisecond)
	}
	n := 0
	for {
		var m wire.X509SVIDResponse
		require.NoError(t, proto.Unmarshal(slow.Receive(), &m))
		n++
		if bytes.Equal(m.GetSvids()[0].GetX509Svid(), last.Leaf().Raw) {
			break
		}
	}
	assert.Less(t, n, 15)
}

func TestMaxStreams(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{MaxStreams: 2, IssueJWTSVID: new(tokens).IssueJWTSVID})
	c := http2(t, h)
	open := func() *rpc {
		return post(t, c, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
	}
	first, second := open(), open()
	require.NotEmpty(t, first.Receive())
	require.NotEmpty(t, second.Receive())
	code, _ := open().Status()
	assert.Equal(t, workloadtest.ResourceExhausted, code)
	assert.Equal(t, 2, streams(h))
	require.NoError(t, first.Response.Body.Close())
	require.Eventually(t, func() bool { return streams(h) == 1 }, patient, time.Millisecond)
	require.NotEmpty(t, open().Receive())

	// Close ends all, and lets in none.
	require.NoError(t, h.Close())
	require.NoError(t, h.Close())
	code, _ = second.Status()
	assert.Equal(t, workloadtest.Unavailable, code)
	code, _ = open().Status()
	assert.Equal(t, workloadtest.Unavailable, code)
	code, _ = post(t, c, service+"FetchJWTSVID", frame(&wire.JWTSVIDRequest{Audience: []string{"a"}}), header, "true").Status()
	assert.Equal(t, workloadtest.Unavailable, code, "not even a single answer")
	require.Eventually(t, func() bool { return streams(h) == 0 }, patient, time.Millisecond)
}

// tokens issues and judges tokens that are easy to read.
type tokens struct{ err error }

func (i *tokens) IssueJWTSVID(_ context.Context, id spiffe.ID, audience []string) (string, error) {
	return fmt.Sprint(id.Path(), audience), i.err
}

func (i *tokens) ValidateJWTSVID(_ context.Context, audience, token string) (spiffe.ID, map[string]any, error) {
	id, claims := spiffe.MustParseID("spiffe://example.org/web"), map[string]any{"aud": []any{audience}, "sub": "spiffe://example.org/web", "exp": 1.5}
	switch token {
	case "good":
		return id, claims, nil
	case "no-id":
		return spiffe.ID{}, claims, nil
	case "no-claims":
		return id, nil, nil
	case "odd-claims":
		return id, map[string]any{"x": make(chan int)}, nil
	case "bad-text":
		return spiffe.ID{}, nil, errors.New("\xff")
	}
	return spiffe.ID{}, nil, i.err
}

func TestServeJWTSVID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-13", "WAPI-40", "WAPI-41", "WAPI-42", "WAPI-43", "WAPI-47")
	home := workloadtest.NewDomain(t, "example.org")
	web, db := home.SVID("/web"), home.SVID("/db")
	ids := []workloadserver.Identity{{SVID: web, Hint: "h"}, {SVID: db}}
	issuer := &tokens{}
	var log syncBuffer
	src := &provider{}
	src.set(snapshot(t, home.SVID("/agent"), home), nil)
	h := handler(t, src, &workloadserver.Options{
		Identities:   func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
		IssueJWTSVID: issuer.IssueJWTSVID, Logger: workloadtest.Logger(&log),
	})
	c := inMemory(t, h)
	all := must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a", "b"))(t)
	require.Len(t, all, 2)
	assert.Equal(t, "/web[a b]", all[0].Token())
	assert.Equal(t, "h", all[0].Hint)
	assert.Equal(t, db.ID(), all[1].ID)
	all = must.Get(c.FetchJWTSVIDs(t.Context(), db.ID(), "a"))(t)
	require.Len(t, all, 1)
	assert.Equal(t, "/db[a]", all[0].Token())
	_, err := c.FetchJWTSVIDs(t.Context(), spiffe.MustParseID("spiffe://example.org/other"), "a")
	require.ErrorIs(t, err, workloadapi.ErrDenied)

	raw := http2(t, h)
	for name, body := range map[string][]byte{
		"no audience":         frame(&wire.JWTSVIDRequest{}),
		"an empty audience":   frame(&wire.JWTSVIDRequest{Audience: []string{"a", ""}}),
		"too many audiences":  frame(&wire.JWTSVIDRequest{Audience: strings.Split(strings.Repeat("a,", 64)+"a", ",")}),
		"a million audiences": frame(&wire.JWTSVIDRequest{Audience: strings.Split(strings.Repeat("a,", 50_000)+"a", ",")}),
		"not an ID":           frame(&wire.JWTSVIDRequest{Audience: []string{"a"}, SpiffeId: "web"}),
		"junk":                append([]byte{0, 0, 0, 0, 4}, "junk"...),
	} {
		code, _ := post(t, raw, service+"FetchJWTSVID", body, header, "true").Status()
		assert.Equal(t, workloadtest.InvalidArgument, code, name)
	}

	issuer.err = errors.New("kaputt")
	_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")
	require.ErrorContains(t, err, "cannot issue tokens now")
	assert.NotContains(t, err.Error(), "kaputt")
	assert.Contains(t, log.String(), "kaputt")
	issuer.err = fmt.Errorf("x: %w", workloadapi.ErrDenied)
	require.ErrorIs(t, must.Err(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")), workloadapi.ErrDenied)
	issuer.err = nil
	ids = []workloadserver.Identity{{SVID: web, Hint: "h"}, {SVID: db, Hint: "h"}}
	_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")
	require.ErrorContains(t, err, "cannot tell now which identities this caller has")
	ids = nil
	require.ErrorIs(t, must.Err(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")), workloadapi.ErrDenied)
	src.set(nil, errors.New("not ready"))
	_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")
	require.ErrorIs(t, err, workloadapi.ErrDenied, "whatever the provider has")
	ids = []workloadserver.Identity{{SVID: web}}
	_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")
	require.ErrorContains(t, err, "no identity and trust bundles to serve now")
}

func TestServeValidateJWTSVID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-50", "WAPI-51", "WAPI-52", "WAPI-53")
	const token = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJzcGlmZmU6Ly9leGFtcGxlLm9yZy93ZWIifQ.c2lnbmF0dXJlIG9mIGl0"
	home := workloadtest.NewDomain(t, "example.org")
	v := &tokens{err: errors.New("it has expired")}
	h := handler(t, fixed(snapshot(t, home.SVID("/agent"), home)), &workloadserver.Options{ValidateJWTSVID: v.ValidateJWTSVID})
	c := inMemory(t, h)
	id, claims := must.Get2(c.ValidateJWTSVID(t.Context(), "a", "good"))(t)
	assert.Equal(t, "/web", id.Path())
	assert.Equal(t, map[string]any{"aud": []any{"a"}, "sub": "spiffe://example.org/web", "exp": 1.5}, claims)
	_, _, err := c.ValidateJWTSVID(t.Context(), "a", token)
	must.Fail(t, err, workloadapi.ErrRefused, "it has expired")
	_, _, err = c.ValidateJWTSVID(t.Context(), "a", "bad-text")
	require.ErrorIs(t, err, workloadapi.ErrRefused)
	for _, bad := range []string{"no-id", "no-claims", "odd-claims"} {
		_, _, err = c.ValidateJWTSVID(t.Context(), "a", bad)
		require.ErrorContains(t, err, "status unavailable", bad)
	}
	raw := http2(t, h)
	for name, body := range map[string][]byte{
		"no audience": frame(&wire.ValidateJWTSVIDRequest{Svid: "good"}),
		"no svid":     frame(&wire.ValidateJWTSVIDRequest{Audience: "a"}),
		"junk":        append([]byte{0, 0, 0, 0, 4}, "junk"...),
	} {
		code, _ := post(t, raw, service+"ValidateJWTSVID", body, header, "true").Status()
		assert.Equal(t, workloadtest.InvalidArgument, code, name)
	}
	// A Client is a validator that asks another server.
	chain := inMemory(t, handler(t, fixed(snapshot(t, home.SVID("/agent"), home)), &workloadserver.Options{ValidateJWTSVID: c.ValidateJWTSVID}))
	id, _ = must.Get2(chain.ValidateJWTSVID(t.Context(), "a", "good"))(t)
	assert.Equal(t, "/web", id.Path())
}

// That a token cannot be judged now is not the token's fault, and no secret goes to the caller.
func TestValidatorFails(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-53", "WEP-15")
	home := workloadtest.NewDomain(t, "example.org")
	type validate func(ctx context.Context, audience, token string) (spiffe.ID, map[string]any, error)
	serve := func(v validate) *workloadapi.Client {
		return inMemory(t, handler(t, fixed(snapshot(t, home.SVID("/agent"), home)), &workloadserver.Options{ValidateJWTSVID: v}))
	}
	gone := must.Get(workloadapi.NewClient("unix://"+workloadtest.SocketDir(t)+"/gone", nil))(t)
	_, notReady := must.Get(workloadapi.New(workloadapi.Config{Client: gone}))(t).SVID()
	for name, v := range map[string]validate{
		"another server that is gone":             gone.ValidateJWTSVID,
		"another server that cannot judge itself": serve(gone.ValidateJWTSVID).ValidateJWTSVID,
		"another server that judges nothing":      serve(nil).ValidateJWTSVID,
		"a source that has nothing yet":           (&tokens{fmt.Errorf("no bundle: %w", notReady)}).ValidateJWTSVID,
		"no time":                                 (&tokens{fmt.Errorf("waited: %w", context.DeadlineExceeded)}).ValidateJWTSVID,
		"canceled":                                (&tokens{fmt.Errorf("waited: %w", context.Canceled)}).ValidateJWTSVID,
		"says itself that it passes":              (&tokens{fmt.Errorf("kaputt: %w", passing(true))}).ValidateJWTSVID,
	} {
		_, _, err := serve(v).ValidateJWTSVID(t.Context(), "a", "token")
		require.ErrorContains(t, err, "cannot check tokens now", name)
		assert.NotErrorIs(t, err, workloadapi.ErrRefused, name)
		assert.NotContains(t, err.Error(), "gone", name)
		e, ok := errors.AsType[*workloadapi.Error](err)
		require.True(t, ok)
		assert.False(t, e.Final, name)
	}
	for name, v := range map[string]validate{
		"says that it does not pass": (&tokens{passing(false)}).ValidateJWTSVID,
		"another server refuses":     serve((&tokens{errors.New("it has expired")}).ValidateJWTSVID).ValidateJWTSVID,
	} {
		_, _, err := serve(v).ValidateJWTSVID(t.Context(), "a", "token")
		require.ErrorIs(t, err, workloadapi.ErrRefused, name)
	}
	_, _, err := serve((&tokens{fmt.Errorf("not for you: %w", workloadapi.ErrDenied)}).ValidateJWTSVID).ValidateJWTSVID(t.Context(), "a", "token")
	require.ErrorIs(t, err, workloadapi.ErrRefused, "a policy of the validator's")
}

// passing is an error that says whether it passes.
type passing bool

func (passing) Error() string                      { return "kaputt" }
func (p passing) Retryable() (time.Duration, bool) { return 0, bool(p) }

// Bundles for tokens are plain JWK Sets, with nothing but the keys for tokens.
func TestServeJWTBundles(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-44", "WAPI-45", "DIV-12")
	home, other, third := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test"), workloadtest.NewDomain(t, "third.test")
	withKey := func(d domain, kid string) *spiffe.Bundle {
		c := d.Bundle().Contents()
		c.JWTAuthorities = map[string]crypto.PublicKey{kid: workloadtest.NewKey(t).Public()}
		return must.Get(spiffe.NewBundle(d.TrustDomain(), c))(t)
	}
	tricky := `"use":"jwt-svid",`
	set := must.Get(spiffe.NewBundleSet(withKey(home, tricky), withKey(other, "k"), third.Bundle()))(t)
	h := handler(t, fixed(spiffe.NewSnapshot(home.SVID("/web"), set)), nil)
	var m wire.JWTBundlesResponse
	require.NoError(t, proto.Unmarshal(post(t, http2(t, h), service+"FetchJWTBundles", frame(&wire.JWTBundlesRequest{}), header, "true").Receive(), &m))
	require.Len(t, m.GetBundles(), 2)
	for _, doc := range m.GetBundles() {
		assert.NotContains(t, string(doc), "x5c")
		assert.NotContains(t, string(doc), `"use":"`)
		assert.NotContains(t, string(doc), "spiffe_")
	}
	for u, err := range inMemory(t, h).WatchJWTBundles(t.Context()) {
		require.NoError(t, err)
		assert.Empty(t, u.Skipped)
		for _, td := range []domain{home, other} {
			got := must.Get(u.Bundles.Bundle(td.TrustDomain()))(t)
			want, _ := set.Bundle(td.TrustDomain())
			assert.Equal(t, want.Contents().JWTAuthorities, got.Contents().JWTAuthorities)
		}
		break
	}
	// The own trust domain is there even without keys.
	h = handler(t, fixed(snapshot(t, third.SVID("/web"), third, home)), nil)
	m.Reset()
	require.NoError(t, proto.Unmarshal(post(t, http2(t, h), service+"FetchJWTBundles", frame(&wire.JWTBundlesRequest{}), header, "true").Receive(), &m))
	assert.Equal(t, map[string][]byte{third.Key(): []byte(`{"keys":[]}`)}, m.GetBundles())
}

// Clients that want to do harm.
func TestHostileClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-6", "WAPI-13")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{IssueJWTSVID: new(tokens).IssueJWTSVID, ValidateJWTSVID: new(tokens).ValidateJWTSVID})
		c := http2(t, h)
		prefix := func(flags byte, n uint32, b ...byte) []byte {
			return append(binary.BigEndian.AppendUint32([]byte{flags}, n), b...)
		}
		for name, body := range map[string][]byte{
			"nothing":           nil,
			"half a prefix":     {0, 0},
			"half a message":    prefix(0, 100, 1, 2, 3),
			"4 GiB":             prefix(0, 1<<32-1, make([]byte, 1000)...),
			"compressed":        prefix(1, 3, 1, 2, 3),
			"unknown flags":     prefix(0x42, 3, 1, 2, 3),
			"too large":         prefix(0, 300<<10, make([]byte, 300<<10)...),
			"two messages":      append(frame(&wire.X509SVIDRequest{}), frame(&wire.X509SVIDRequest{})...),
			"junk of 100 KiB":   prefix(0, 100<<10, bytes.Repeat([]byte{0xff}, 100<<10)...),
			"a million strings": prefix(0, 200<<10, bytes.Repeat([]byte{0x0a, 0x00}, 100<<10)...),
		} {
			for _, method := range []string{"FetchX509SVID", "FetchX509Bundles", "FetchJWTBundles", "FetchJWTSVID", "ValidateJWTSVID"} {
				r := post(t, c, service+method, body, header, "true")
				// Streams have an empty request, and whatever is in it may be ignored.
				if b := r.Receive(); b != nil {
					assert.Contains(t, method, "Fetch", name)
					assert.NotEqual(t, "FetchJWTSVID", method, name)
					require.NoError(t, r.Response.Body.Close())
					continue
				}
				code, _ := r.Status()
				assert.NotEqual(t, workloadtest.OK, code, "%s %s", method, name)
			}
		}
		// Many that come and go leave nothing behind, or the bubble would not end.
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				for range 20 {
					r := post(t, c, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
					_ = r.Response.Body.Close()
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		assert.Zero(t, streams(h))
		readySource(t, workloadapi.Config{Client: inMemory(t, h)})
	})
}

// Callers that begin a request and never end it hold resources of the server for 30 seconds at most, and no
// other caller waits for them.
func TestHalfRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{IssueJWTSVID: new(tokens).IssueJWTSVID, ValidateJWTSVID: new(tokens).ValidateJWTSVID})
		running, stop := context.WithCancel(t.Context())
		c := http2(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // as a server has it that is told to stop
			ctx, cancel := context.WithCancel(r.Context())
			defer cancel()
			defer context.AfterFunc(running, cancel)()
			h.ServeHTTP(w, r.WithContext(ctx))
		}))
		begin := func(method, sent string) (code int) {
			in, out := io.Pipe()
			defer out.Close()
			go func() { _, _ = out.Write([]byte(sent)) }()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost"+method, in)
			if !assert.NoError(t, err) {
				return 0
			}
			req.Header.Set("Content-Type", "application/grpc")
			req.Header.Set("workload.spiffe.io", "true")
			resp, err := c.Do(req)
			if !assert.NoError(t, err) {
				return 0
			}
			defer resp.Body.Close()
			code, _ = (&rpc{T: t, Response: resp}).Status()
			return code
		}
		start := time.Now()
		var wg sync.WaitGroup
		for _, method := range []string{
			service + "FetchX509SVID", service + "FetchX509Bundles", service + "FetchJWTBundles", service + "FetchJWTSVID",
			service + "ValidateJWTSVID", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
		} {
			for _, sent := range []string{"", "\x00\x00", "\x00\x00\x00\x00\x05ab", "\x00\x00\x00\x00\x00"} {
				wg.Go(func() {
					assert.Equal(t, workloadtest.DeadlineExceeded, begin(method, sent), "%s %q", method, sent)
					assert.Equal(t, 30*time.Second, time.Since(start), "%s %q", method, sent)
				})
			}
		}
		readySource(t, workloadapi.Config{Client: inMemory(t, h)})
		assert.Zero(t, time.Since(start))
		wg.Wait()

		time.AfterFunc(time.Second, stop)
		start = time.Now()
		assert.Equal(t, workloadtest.Unavailable, begin(service+"FetchX509SVID", "\x00"))
		assert.Equal(t, time.Second, time.Since(start))
	})
}

// Identities finds the process that is calling.
func TestPeer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-8", "WEP-9")
	home := workloadtest.NewDomain(t, "example.org")
	svid := home.SVID("/web")
	var got atomic.Pointer[unixsocket.Peer]
	h := handler(t, fixed(snapshot(t, svid, home)), &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			caller, ok := unixsocket.PeerFromContext(ctx)
			if !ok {
				return nil, nil
			}
			got.Store(&caller)
			return []workloadserver.Identity{{SVID: svid}}, nil
		},
	})
	socket := listen(t, &unixsocket.Server{Handler: h})
	for _, err := range dial(t, socket).WatchX509SVIDs(t.Context()) {
		if runtime.GOOS != "linux" {
			require.ErrorIs(t, err, workloadapi.ErrDenied)
			return
		}
		require.NoError(t, err)
		break
	}
	assert.Equal(t, unixsocket.Peer{PID: int32(os.Getpid()), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}, *got.Load())
	_, ok := unixsocket.PeerFromContext(t.Context())
	assert.False(t, ok)

	// On other networks the peer is not known.
	for _, err := range inMemory(t, h).WatchX509SVIDs(t.Context()) {
		require.ErrorIs(t, err, workloadapi.ErrDenied)
		break
	}
}
