package compare

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	peerwit "github.com/spiffe/go-spiffe/v2/exp/svid/witsvid"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

func timeout(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// socket returns the path of a socket that is short enough for every system.
func socket(t *testing.T) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "cmp"))(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "api.sock")
}

func newValidator(t *testing.T, a *authority) *jwtsvid.Validator {
	t.Helper()
	return must.Get(jwtsvid.NewAgentValidator(a.bundle(t), nil))(t)
}

// serveOurs runs our server and returns its address.
func serveOurs(t *testing.T, src workloadserver.Provider, opts *workloadserver.Options) string {
	t.Helper()
	h := must.Get(workloadserver.NewHandler(src, opts))(t)
	s := &unixsocket.Server{Path: socket(t), Handler: h}
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		assert.NoError(t, h.Close())
		cancel()
		assert.NoError(t, <-done)
	})
	return "unix://" + s.Path
}

func sameSVID(t *testing.T, want, got *spiffe.SVID) {
	t.Helper()
	wantCerts, wantKey := must.Get2(want.MarshalDER())(t)
	certs, key := must.Get2(got.MarshalDER())(t)
	assert.Equal(t, wantCerts, certs)
	assert.Equal(t, wantKey, key)
}

func TestPeerClientX509(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	first := a.snapshot(t, "/web", other)
	src := newLive(first)
	addr := peerapi.WithAddr(serveOurs(t, src, nil))

	check := func(snap *spiffe.Snapshot, s *peerapi.X509Source) {
		t.Helper()
		want := must.Get(snap.SVID())(t)
		got := must.Get(s.GetX509SVID())(t)
		certs, key := must.Get2(got.MarshalRaw())(t)
		back := must.Get(spiffe.ParseSVID(certs, key))(t)
		sameSVID(t, want, back)
		for b := range snap.Bundles().All() {
			p := must.Get(s.GetX509BundleForTrustDomain(peerDomain(b.TrustDomain())))(t)
			assert.True(t, p.Equal(peerBundle(t, b).X509Bundle()))
		}
	}

	source := must.Get(peerapi.NewX509Source(ctx, peerapi.WithClientOptions(addr)))(t)
	defer source.Close()
	check(first, source)

	// A rotation of the identity and of the authority.
	a.ca.Rotate()
	second := a.snapshot(t, "/web", other)
	fresh := must.Get(second.SVID())(t)
	src.set(second, nil)
	for {
		require.NoError(t, source.WaitUntilUpdated(ctx))
		if got, err := source.GetX509SVID(); err == nil && got.Certificates[0].Equal(fresh.Leaf()) {
			break
		}
	}
	check(second, source)

	svid := must.Get(peerapi.FetchX509SVID(ctx, addr))(t)
	assert.Equal(t, "spiffe://example.org/web", svid.ID.String())
	bundles := must.Get(peerapi.FetchX509Bundles(ctx, addr))(t)
	assert.Equal(t, 2, bundles.Len())

	// Our source has the same from the same provider.
	ours := must.Get(workloadapi.New(workloadapi.Config{Address: serveOurs(t, src, nil)}))(t)
	runSource(t, ours)
	require.NoError(t, ours.Ready(ctx))
	got := must.Get(ours.SVID())(t)
	sameSVID(t, fresh, got)
}

func runSource(t *testing.T, s *workloadapi.Source) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func TestPeerClientHints(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a := newAuthority(t, "example.org")
	snap := a.snapshot(t, "/web")
	first := must.Get(snap.SVID())(t)
	var ids []workloadserver.Identity
	addr := peerapi.WithAddr(serveOurs(t, newLive(snap), &workloadserver.Options{
		Identities:   func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
		IssueJWTSVID: a.jwt.IssueJWTSVID,
	}))

	_, err := peerapi.FetchX509SVID(ctx, addr) // no identity
	assert.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	_, err = peerapi.FetchJWTSVID(ctx, peerjwt.Params{Audience: "db"}, addr)
	assert.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)

	ids = []workloadserver.Identity{{SVID: first, Hint: "internal"}, {SVID: a.ca.Intermediate().SVID("/batch"), Hint: "external"}}
	got := must.Get(peerapi.FetchX509SVIDs(ctx, addr))(t)
	require.Len(t, got, 2)
	assert.Equal(t, "internal", got[0].Hint)
	assert.Equal(t, "external", got[1].Hint)
	assert.Equal(t, "spiffe://example.org/batch", got[1].ID.String())
	assert.Len(t, got[1].Certificates, 2)
	tokens := must.Get(peerapi.FetchJWTSVIDs(ctx, peerjwt.Params{Audience: "db"}, addr))(t)
	require.Len(t, tokens, 2)
	assert.Equal(t, "external", tokens[1].Hint)

	_, err = peerapi.FetchWITSVID(ctx, "", addr)
	assert.Equal(t, codes.Unimplemented, status.Code(err), "%v", err)
}

// bundleWatcher is a watcher of the peer.
type bundleWatcher struct{ updates chan *x509bundle.Set }

func (w bundleWatcher) OnX509BundlesUpdate(s *x509bundle.Set) { w.updates <- s }
func (w bundleWatcher) OnX509BundlesWatchError(error)         {}

func TestPeerClientWatch(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(timeout(t))
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	src := newLive(a.snapshot(t, "/web", other))
	client := must.Get(peerapi.New(ctx, peerapi.WithAddr(serveOurs(t, src, nil))))(t)
	defer client.Close()
	w := bundleWatcher{make(chan *x509bundle.Set)}
	done := make(chan error, 1)
	go func() { done <- client.WatchX509Bundles(ctx, w) }()

	require.Equal(t, 2, (<-w.updates).Len())
	a.ca.Rotate()
	src.set(a.snapshot(t, "/web"), nil) // and the federation has ended
	s := <-w.updates
	require.Equal(t, 1, s.Len())
	b := must.Get(s.GetX509BundleForTrustDomain(peerDomain(a.ca.TrustDomain())))(t)
	assert.Equal(t, slices.Collect(a.ca.Bundle().X509Authorities()), b.X509Authorities())
	cancel()
	assert.Error(t, <-done)
}

func TestPeerClientJWT(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	k := newValidator(t, a)
	addr := peerapi.WithAddr(serveOurs(t, newLive(a.snapshot(t, "/web", other)), &workloadserver.Options{IssueJWTSVID: a.jwt.IssueJWTSVID, ValidateJWTSVID: k.ValidateJWTSVID}))

	source := must.Get(peerapi.NewJWTSource(ctx, peerapi.WithClientOptions(addr)))(t)
	defer source.Close()
	svid := must.Get(source.FetchJWTSVID(ctx, peerjwt.Params{Audience: "db"}))(t)
	assert.Equal(t, "spiffe://example.org/web", svid.ID.String())
	_, err := peerjwt.ParseAndValidate(svid.Marshal(), source, []string{"db"})
	assert.NoError(t, err)
	id, _ := must.Get2(k.ValidateJWTSVID(ctx, "db", svid.Marshal()))(t)
	assert.Equal(t, svid.ID.String(), id.String())

	bundles := must.Get(peerapi.FetchJWTBundles(ctx, addr))(t)
	assert.Equal(t, 2, bundles.Len())
	for _, x := range []*authority{a, other} {
		b := must.Get(bundles.GetJWTBundleForTrustDomain(peerDomain(x.ca.TrustDomain())))(t)
		assert.Equal(t, maps.Collect(x.bundle(t).JWTAuthorities()), b.JWTAuthorities())
	}

	back := must.Get(peerapi.ValidateJWTSVID(ctx, svid.Marshal(), "db", addr))(t)
	assert.Equal(t, svid.ID, back.ID)
	_, err = peerapi.ValidateJWTSVID(ctx, svid.Marshal(), "cache", addr)
	assert.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
	_, err = peerapi.FetchJWTSVID(ctx, peerjwt.Params{Audience: "db", Subject: peerID(spiffe.MustParseID("spiffe://example.org/else"))}, addr)
	assert.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
}

// peerServer is a server made of the peer's generated code and its values.
type peerServer struct {
	workload.UnimplementedSpiffeWorkloadAPIServer
	t    *testing.T
	src  *live
	a    *authority
	hint string
	wit  crypto.Signer // signs WIT-SVIDs, with the ID that its key has in the bundle; may be nil
}

// servePeer runs it over grpc-go and returns its address.
func servePeer(t *testing.T, p *peerServer) string {
	t.Helper()
	secured := func(ctx context.Context) error {
		if md, _ := metadata.FromIncomingContext(ctx); !slices.Equal(md.Get("workload.spiffe.io"), []string{"true"}) {
			return status.Error(codes.InvalidArgument, "security header missing from request")
		}
		return nil
	}
	s := grpc.NewServer(
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := secured(ctx); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if err := secured(stream.Context()); err != nil {
				return err
			}
			return next(srv, stream)
		}))
	workload.RegisterSpiffeWorkloadAPIServer(s, p)
	path := socket(t)
	l := must.Get(net.Listen("unix", path))(t)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); assert.NoError(t, <-done) })
	return "unix://" + path
}

// push sends what make has now and after each change.
func push[T any](p *peerServer, stream grpc.ServerStreamingServer[T], make func(*spiffe.Snapshot) *T) error {
	for {
		changed := p.src.Changed()
		snap, err := p.src.Snapshot()
		if err != nil {
			return status.Error(codes.PermissionDenied, err.Error())
		}
		if err := stream.Send(make(snap)); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (p *peerServer) FetchX509SVID(_ *workload.X509SVIDRequest, stream grpc.ServerStreamingServer[workload.X509SVIDResponse]) error {
	return push(p, stream, func(snap *spiffe.Snapshot) *workload.X509SVIDResponse {
		svid, err := snap.SVID()
		assert.NoError(p.t, err)
		self := peerSVID(p.t, svid)
		certs, key, err := self.MarshalRaw()
		assert.NoError(p.t, err)
		m := &workload.X509SVIDResponse{FederatedBundles: map[string][]byte{}}
		entry := &workload.X509SVID{SpiffeId: self.ID.String(), X509Svid: certs, X509SvidKey: key, Hint: p.hint}
		for b := range snap.Bundles().All() {
			if b.TrustDomain() == svid.ID().TrustDomain() {
				entry.Bundle = roots(peerBundle(p.t, b).X509Bundle())
			} else {
				m.FederatedBundles[peerDomain(b.TrustDomain()).IDString()] = roots(peerBundle(p.t, b).X509Bundle())
			}
		}
		m.Svids = []*workload.X509SVID{entry}
		return m
	})
}

func roots(b *x509bundle.Bundle) []byte {
	var der []byte
	for _, c := range b.X509Authorities() {
		der = append(der, c.Raw...)
	}
	return der
}

func (p *peerServer) FetchX509Bundles(_ *workload.X509BundlesRequest, stream grpc.ServerStreamingServer[workload.X509BundlesResponse]) error {
	return push(p, stream, func(snap *spiffe.Snapshot) *workload.X509BundlesResponse {
		m := &workload.X509BundlesResponse{Bundles: map[string][]byte{}}
		for b := range snap.Bundles().All() {
			m.Bundles[peerDomain(b.TrustDomain()).IDString()] = roots(peerBundle(p.t, b).X509Bundle())
		}
		return m
	})
}

func (p *peerServer) FetchJWTBundles(_ *workload.JWTBundlesRequest, stream grpc.ServerStreamingServer[workload.JWTBundlesResponse]) error {
	return push(p, stream, func(snap *spiffe.Snapshot) *workload.JWTBundlesResponse {
		m := &workload.JWTBundlesResponse{Bundles: map[string][]byte{}}
		for b := range snap.Bundles().All() {
			doc, err := peerBundle(p.t, b).JWTBundle().Marshal()
			assert.NoError(p.t, err)
			m.Bundles[peerDomain(b.TrustDomain()).IDString()] = doc
		}
		return m
	})
}

func (p *peerServer) FetchJWTSVID(_ context.Context, r *workload.JWTSVIDRequest) (*workload.JWTSVIDResponse, error) {
	snap, err := p.src.Snapshot()
	if err != nil {
		return nil, status.Error(codes.PermissionDenied, err.Error())
	}
	svid, err := snap.SVID()
	if err != nil || r.SpiffeId != "" && r.SpiffeId != svid.ID().String() {
		return nil, status.Error(codes.PermissionDenied, "no such identity")
	}
	token, err := p.a.jwt.Issue(jwtsvid.Request{ID: svid.ID(), Audience: r.Audience})
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &workload.JWTSVIDResponse{Svids: []*workload.JWTSVID{{SpiffeId: svid.ID().String(), Svid: token, Hint: p.hint}}}, nil
}

func (p *peerServer) ValidateJWTSVID(_ context.Context, r *workload.ValidateJWTSVIDRequest) (*workload.ValidateJWTSVIDResponse, error) {
	svid, err := peerjwt.ParseAndValidate(r.Svid, peerBundle(p.t, p.a.bundle(p.t)).JWTBundle(), []string{r.Audience})
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	claims, err := structpb.NewStruct(svid.Claims)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &workload.ValidateJWTSVIDResponse{SpiffeId: svid.ID.String(), Claims: claims}, nil
}

func (p *peerServer) FetchWITSVID(r *workload.WITSVIDRequest,
	stream grpc.ServerStreamingServer[workload.WITSVIDResponse]) error {
	snap, err := p.src.Snapshot()
	switch {
	case p.wit == nil:
		return p.UnimplementedSpiffeWorkloadAPIServer.FetchWITSVID(r, stream)
	case err == nil && r.SpiffeId != "" && r.SpiffeId != must.Get(snap.SVID())(p.t).ID().String():
		return status.Error(codes.PermissionDenied, "no such identity")
	}
	return push(p, stream, func(snap *spiffe.Snapshot) *workload.WITSVIDResponse {
		svid, err := snap.SVID()
		assert.NoError(p.t, err)
		id := peerID(svid.ID())
		b, err := snap.Bundle(svid.ID().TrustDomain())
		assert.NoError(p.t, err)
		private := jose.JSONWebKey{Key: tokenKey(p.t, "ES256"), Algorithm: "ES256"}
		key, err := private.MarshalJSON()
		assert.NoError(p.t, err)
		entry := &workload.WITSVID{SpiffeId: id.String(), WitSvidKey: string(key), Hint: p.hint}
		for kid := range b.Contents().WITAuthorities {
			entry.WitSvid = peerWIT(p.t, kid, "ES384", p.wit, id, private)
		}
		return &workload.WITSVIDResponse{Svids: []*workload.WITSVID{entry}}
	})
}

func (p *peerServer) FetchWITBundles(_ *workload.WITBundlesRequest,
	stream grpc.ServerStreamingServer[workload.WITBundlesResponse]) error {
	return push(p, stream, func(snap *spiffe.Snapshot) *workload.WITBundlesResponse {
		m := &workload.WITBundlesResponse{Bundles: map[string]string{}}
		for b := range snap.Bundles().All() {
			doc, err := peerBundle(p.t, b).WITBundle().Marshal()
			assert.NoError(p.t, err)
			m.Bundles[peerDomain(b.TrustDomain()).IDString()] = string(doc)
		}
		return m
	})
}

// sameAuthorities compares what the Workload API can say of bundles, which is their authorities.
func sameAuthorities(a, b *spiffe.BundleSet) bool {
	only := func(s *spiffe.BundleSet) *spiffe.BundleSet {
		out := new(spiffe.BundleSet)
		for b := range s.All() {
			c := b.Contents()
			c.Sequence, c.RefreshHint = nil, 0
			if b, err := spiffe.NewBundle(b.TrustDomain(), c); err == nil {
				out = out.With(b)
			}
		}
		return out
	}
	return only(a).Equal(only(b))
}

func TestPeerServerSource(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	first := a.snapshot(t, "/web", other)
	p := &peerServer{t: t, src: newLive(first), a: a, hint: "internal"}
	source, err := workloadapi.New(workloadapi.Config{Address: servePeer(t, p), JWTBundles: true, Hint: "internal"})
	require.NoError(t, err)
	runSource(t, source)
	require.NoError(t, source.Ready(ctx))

	// until waits for the source to be as is wanted.
	until := func(ok func() bool) {
		t.Helper()
		for {
			changed := source.Changed()
			if ok() {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				require.Fail(t, "the source does not change", "%+v", source.Report())
			}
		}
	}
	has := func(snap *spiffe.Snapshot) func() bool {
		want := must.Get(snap.SVID())(t)
		return func() bool {
			got, err := source.SVID()
			if err != nil || !got.Leaf().Equal(want.Leaf()) {
				return false
			}
			now, err := source.Snapshot()
			return err == nil && sameAuthorities(snap.Bundles(), now.Bundles())
		}
	}
	until(has(first))
	want := must.Get(first.SVID())(t)
	got := must.Get(source.SVID())(t)
	sameSVID(t, want, got)

	a.ca.Rotate()
	second := a.snapshot(t, "/web")
	p.src.set(second, nil)
	until(has(second))

	p.src.set(nil, errors.New("not registered"))
	until(func() bool { _, err := source.SVID(); return errors.Is(err, spiffe.ErrNotReady) })
	_, err = source.SVID()
	assert.ErrorIs(t, err, workloadapi.ErrDenied)
}

func TestPeerServerCalls(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	p := &peerServer{t: t, src: newLive(a.snapshot(t, "/web", other)), a: a, hint: "internal"}
	client := must.Get(workloadapi.NewClient(servePeer(t, p), nil))(t)
	defer client.CloseIdleConnections()

	for u, err := range client.WatchX509SVIDs(ctx) {
		require.NoError(t, err)
		require.Len(t, u.Identities, 1)
		assert.Equal(t, "internal", u.Identities[0].Hint)
		assert.Equal(t, 2, u.Bundles.Len())
		assert.Empty(t, u.Skipped)
		break
	}
	updates := 0
	for u, err := range client.WatchX509Bundles(ctx) {
		require.NoError(t, err)
		assert.Empty(t, u.Skipped)
		if updates++; updates == 2 {
			assert.Equal(t, 1, u.Bundles.Len())
			break
		}
		assert.Equal(t, 2, u.Bundles.Len())
		p.src.set(a.snapshot(t, "/web"), nil)
	}
	for u, err := range client.WatchJWTBundles(ctx) {
		require.NoError(t, err)
		b := must.Get(u.Bundles.Bundle(a.ca.TrustDomain()))(t)
		_, ok := b.JWTAuthority(keyID)
		assert.True(t, ok)
		break
	}

	_, err := client.FetchJWTSVIDs(ctx, spiffe.ID{}, "db", "cache") // the issuer makes tokens for one receiver
	require.ErrorIs(t, err, workloadapi.ErrRefused)
	all := must.Get(client.FetchJWTSVIDs(ctx, spiffe.ID{}, "db"))(t)
	require.Len(t, all, 1)
	svid := all[0]
	assert.Equal(t, "spiffe://example.org/web", svid.ID.String())
	assert.Equal(t, "internal", svid.Hint)
	id, claims := must.Get2(client.ValidateJWTSVID(ctx, "db", svid.Token()))(t)
	assert.Equal(t, svid.ID, id)
	assert.Equal(t, "spiffe://example.org/web", claims["sub"])
	_, _, err = client.ValidateJWTSVID(ctx, "cache", svid.Token())
	assert.ErrorIs(t, err, workloadapi.ErrRefused)
	_, err = client.FetchJWTSVIDs(ctx, spiffe.MustParseID("spiffe://example.org/else"), "db")
	assert.ErrorIs(t, err, workloadapi.ErrDenied)

	for _, err := range client.WatchWITSVIDs(ctx, spiffe.ID{}) {
		assert.ErrorIs(t, err, errors.ErrUnsupported)
	}
}

// withWIT returns snap with these keys for WIT-SVIDs, and no others, in the bundle of its own trust domain.
func withWIT(t testing.TB, snap *spiffe.Snapshot, keys map[string]crypto.PublicKey) *spiffe.Snapshot {
	t.Helper()
	svid := must.Get(snap.SVID())(t)
	c := must.Get(snap.Bundle(svid.ID().TrustDomain()))(t).Contents()
	c.WITAuthorities = keys
	return spiffe.NewSnapshot(svid, snap.Bundles().With(must.Get(spiffe.NewBundle(svid.ID().TrustDomain(), c))(t)))
}

// The peer's client takes WIT-SVIDs, keys and bundles from our server.
func TestPeerClientWIT(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	key, next := tokenKey(t, "ES256"), tokenKey(t, "ES256")
	var issuer atomic.Pointer[witsvid.Issuer]
	issuer.Store(must.Get(witsvid.NewIssuer(a.ca.TrustDomain(), "wit-1", key, nil))(t))
	snap := a.snapshot(t, "/web", other)
	svid := must.Get(snap.SVID())(t)
	src := newLive(withWIT(t, snap, map[string]crypto.PublicKey{"wit-1": key.Public()}))
	var ids atomic.Pointer[[]workloadserver.Identity]
	ids.Store(&[]workloadserver.Identity{{SVID: svid, Hint: "front"}, {SVID: a.ca.SVID("/db")}})
	addr := peerapi.WithAddr(serveOurs(t, src, &workloadserver.Options{
		Identities: func(context.Context) ([]workloadserver.Identity, error) { return *ids.Load(), nil },
		IssueWITSVID: func(ctx context.Context, id spiffe.ID, hint string) (string, crypto.Signer, error) {
			return issuer.Load().IssueWITSVID(ctx, id, hint)
		},
	}))
	client := must.Get(peerapi.New(ctx, addr))(t)
	defer client.Close()

	bundles := must.Get(client.FetchWITBundles(ctx))(t)
	assert.Equal(t, 1, bundles.Len(), "others have no keys for it")
	all := must.Get(client.FetchWITSVIDs(ctx, ""))(t)
	require.Len(t, all, 2)
	assert.Equal(t, "front", all[0].Hint)
	for _, s := range all {
		good := must.Get(peerwit.ParseAndValidate(s.Marshal(), bundles))(t)
		private, ok := s.PrivateKey.(*ecdsa.PrivateKey)
		require.True(t, ok)
		assert.True(t, private.PublicKey.Equal(good.PublicKey))
	}
	one := must.Get(client.FetchWITSVID(ctx, "spiffe://example.org/db"))(t)
	assert.Equal(t, "spiffe://example.org/db", one.ID.String())
	_, err := client.FetchWITSVID(ctx, "spiffe://example.org/mail")
	assert.Equal(t, codes.PermissionDenied, status.Code(err))

	// The key of the issuer is replaced: the source has new WIT-SVIDs, and the bundle that verifies them alone.
	source := must.Get(peerapi.NewWITSource(ctx, peerapi.WithClient(client)))(t)
	defer source.Close()
	w := witWatcher{make(chan []*peerwit.SVID, 2), make(chan error, 2)}
	watching, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- client.WatchWITSVIDs(watching, w, "") }()
	require.Len(t, <-w.updates, 2)
	before := must.Get(source.GetWITSVIDForID(peerID(svid.ID())))(t)
	must.Get(peerwit.ParseAndValidate(before.Marshal(), source))(t)
	issuer.Store(must.Get(witsvid.NewIssuer(a.ca.TrustDomain(), "wit-2", next, nil))(t))
	src.set(withWIT(t, snap, map[string]crypto.PublicKey{"wit-2": next.Public()}), nil)
	for {
		s := must.Get(source.GetWITSVIDForID(peerID(svid.ID())))(t)
		if _, err := peerwit.ParseAndValidate(s.Marshal(), source); err == nil && s.KeyID == "wit-2" {
			break
		}
		require.NoError(t, source.WaitUntilUpdated(ctx))
	}
	_, err = peerwit.ParseAndValidate(before.Marshal(), source)
	require.ErrorContains(t, err, `no WIT authority "wit-1"`)
	for _, s := range <-w.updates {
		assert.Equal(t, "wit-2", s.KeyID)
	}

	// The caller has no identity any more, of which each stream and call is told.
	ids.Store(new([]workloadserver.Identity))
	src.set(withWIT(t, snap, map[string]crypto.PublicKey{"wit-2": next.Public()}), nil)
	assert.Equal(t, codes.PermissionDenied, status.Code(<-w.errors))
	_, err = client.FetchWITSVIDs(ctx, "")
	assert.Equal(t, codes.PermissionDenied, status.Code(err))
	_, err = client.FetchWITBundles(ctx)
	assert.Equal(t, codes.PermissionDenied, status.Code(err))
	stop()
	assert.Error(t, <-done)

	off := must.Get(peerapi.New(ctx, peerapi.WithAddr(serveOurs(t, newLive(snap), nil))))(t)
	defer off.Close()
	_, err = off.FetchWITBundles(ctx)
	assert.Equal(t, codes.Unimplemented, status.Code(err))
	assert.Equal(t, codes.Unimplemented, status.Code(off.WatchWITSVIDs(ctx, w, "")), "and it ends")
}

// witWatcher is a watcher of the peer.
type witWatcher struct {
	updates chan []*peerwit.SVID
	errors  chan error
}

func (w witWatcher) OnWITSVIDsUpdate(all []*peerwit.SVID) { w.updates <- all }

func (w witWatcher) OnWITSVIDsWatchError(err error) {
	select {
	case w.errors <- err:
	default:
	}
}

// Our client takes WIT-SVIDs, keys and bundles from the peer's server, and withdraws them when it is told to.
func TestPeerServerWIT(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a, other := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	p := &peerServer{t: t, a: a, hint: "internal", wit: tokenKey(t, "ES384")}
	snap := func(kid string) *spiffe.Snapshot {
		return withWIT(t, a.snapshot(t, "/web", other), map[string]crypto.PublicKey{kid: p.wit.Public()})
	}
	p.src = newLive(snap("wit-1"))
	client := must.Get(workloadapi.NewClient(servePeer(t, p), nil))(t)
	defer client.CloseIdleConnections()

	web := spiffe.MustParseID("spiffe://example.org/web")
	bundles := func() *spiffe.BundleSet {
		for u, err := range client.WatchWITBundles(ctx) {
			require.NoError(t, err)
			assert.Empty(t, u.Skipped)
			assert.Equal(t, 2, u.Bundles.Len())
			return u.Bundles
		}
		return nil
	}
	updates := 0
	for all, err := range client.WatchWITSVIDs(ctx, spiffe.ID{}) {
		if updates == 2 {
			require.ErrorIs(t, err, workloadapi.ErrDenied)
			break
		}
		require.NoError(t, err)
		require.Len(t, all, 1)
		assert.Equal(t, "internal", all[0].Hint)
		var key jose.JSONWebKey
		require.NoError(t, key.UnmarshalJSON(all[0].KeyJWK()))
		assert.Equal(t, web, must.Get(prove(t, bundles(), all[0].Token(), key.Key.(crypto.Signer)))(t))
		kid := must.Get(witsvid.ParseUnverified(all[0].Token()))(t).KeyID
		if updates++; updates == 1 {
			assert.Equal(t, "wit-1", kid)
			p.src.set(snap("wit-2"), nil)
		} else {
			assert.Equal(t, "wit-2", kid)
			p.src.set(nil, errors.New("not registered"))
		}
	}
	p.src.set(snap("wit-3"), nil)
	for _, err := range client.WatchWITSVIDs(ctx, spiffe.MustParseID("spiffe://example.org/db")) {
		require.ErrorIs(t, err, workloadapi.ErrDenied)
		break
	}
	for all, err := range client.WatchWITSVIDs(ctx, web) {
		require.NoError(t, err)
		assert.Equal(t, web, all[0].ID)
		break
	}
}
