package workloadserver_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"maps"
	"math/big"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// A witsvid.Issuer makes the WIT-SVIDs of a handler.
func ExampleOptions_witSVIDs() {
	ca := spiffetest.NewCA(workloadtest.ExampleTB{}, "example.org")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		log.Fatal(err)
	}
	issuer, err := witsvid.NewIssuer(ca.TrustDomain(), "wit-1", key, nil)
	if err != nil {
		log.Fatal(err)
	}
	contents := ca.Bundle().Contents()
	contents.WITAuthorities = map[string]crypto.PublicKey{"wit-1": key.Public()}
	bundle, err := spiffe.NewBundle(ca.TrustDomain(), contents)
	if err != nil {
		log.Fatal(err)
	}

	snap := spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles().With(bundle))
	handler, err := workloadserver.NewHandler(fixed(snap), &workloadserver.Options{IssueWITSVID: issuer.IssueWITSVID})
	if err != nil {
		log.Fatal(err)
	}
	address, stop := workloadtest.ServeOnSocket(handler, nil)
	defer stop()

	client, err := workloadapi.NewClient(address, nil)
	if err != nil {
		log.Fatal(err)
	}
	for all, err := range client.WatchWITSVIDs(context.Background(), spiffe.ID{}) {
		if err != nil {
			log.Fatal(err)
		}
		claims, err := witsvid.ParseUnverified(all[0].Token())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("a token for", claims.ID, "by the key of the issuer:", claims.KeyID == "wit-1")
		break
	}
	// Output:
	// a token for spiffe://example.org/web by the key of the issuer: true
}

// wits is an issuer that counts, and fails when it is told to.
type wits struct {
	t      testing.TB
	issuer *witsvid.Issuer
	keyID  string
	key    crypto.PublicKey

	mu    sync.Mutex
	err   map[string]error // by path; "" is for all
	asked []string
	hang  bool
}

func newWITs(t testing.TB, d domain) *wits { return namedWITs(t, d, rand.Text()) }

func namedWITs(t testing.TB, d domain, keyID string) *wits {
	key := workloadtest.NewKey(t)
	issuer := must.Get(witsvid.NewIssuer(d.TrustDomain(), keyID, key, nil))(t)
	return &wits{t: t, issuer: issuer, keyID: keyID, key: key.Public(), err: map[string]error{}}
}

func (w *wits) IssueWITSVID(ctx context.Context, id spiffe.ID, hint string) (string, crypto.Signer, error) {
	w.mu.Lock()
	w.asked = append(w.asked, id.Path()+hint)
	err, hang := cmp.Or(w.err[""], w.err[id.Path()]), w.hang
	w.mu.Unlock()
	if hang {
		<-ctx.Done()
		err = ctx.Err()
	}
	if err != nil {
		return "", nil, err
	}
	return w.issuer.IssueWITSVID(ctx, id, hint)
}

func (w *wits) fail(path string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err[path] = err
}

// calls returns for whom the issuer was asked since the last time.
func (w *wits) calls() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	asked := w.asked
	w.asked = nil
	return asked
}

// withWIT returns the domain's bundle with WIT authorities.
func withWIT(t testing.TB, d domain, issuers ...*wits) *spiffe.Bundle {
	t.Helper()
	c := d.Bundle().Contents()
	c.WITAuthorities = make(map[string]crypto.PublicKey)
	for _, i := range issuers {
		c.WITAuthorities[i.keyID] = i.key
	}
	return must.Get(spiffe.NewBundle(d.TrustDomain(), c))(t)
}

func bundleSet(t testing.TB, bundles ...*spiffe.Bundle) *spiffe.BundleSet {
	t.Helper()
	return must.Get(spiffe.NewBundleSet(bundles...))(t)
}

// witWatch is a watch that runs in the background of a bubble, and what it has brought since it was
// asked last: tokens by path and hint, or an error.
type witWatch struct {
	mu  sync.Mutex
	all [][]workloadapi.TokenSVID
	err []error
}

func watchWIT(t testing.TB, c *workloadapi.Client, id spiffe.ID) *witWatch {
	w := &witWatch{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for all, err := range c.WatchWITSVIDs(ctx, id) {
			w.mu.Lock()
			if err != nil {
				w.err = append(w.err, err)
			} else {
				w.all = append(w.all, all)
			}
			w.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return w
}

// one returns the only update there was, and no error.
func (w *witWatch) one(t testing.TB) []workloadapi.TokenSVID {
	t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Empty(t, w.err)
	require.Len(t, w.all, 1)
	all := w.all[0]
	w.all = nil
	return all
}

// none says that nothing has come.
func (w *witWatch) none(t testing.TB) {
	t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Empty(t, w.err)
	require.Empty(t, w.all)
}

// failed returns the last error, and that nothing else has come.
func (w *witWatch) failed(t testing.TB) error {
	t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	require.NotEmpty(t, w.err)
	require.Empty(t, w.all)
	err := w.err[len(w.err)-1]
	w.err = nil
	return err
}

func paths(all []workloadapi.TokenSVID) (out []string) {
	for _, s := range all {
		out = append(out, s.ID.Path()+s.Hint)
	}
	return out
}

// signer makes a key of the JWK that was sent, with no code of the package.
func signer(t testing.TB, s workloadapi.TokenSVID) crypto.Signer {
	t.Helper()
	var k struct{ Kty, Crv, X, Y, D, Alg string }
	require.NoError(t, json.Unmarshal(s.KeyJWK(), &k))
	assert.Equal(t, []string{"EC", "P-256", "ES256"}, []string{k.Kty, k.Crv, k.Alg})
	return must.Get(ecdsa.ParseRawPrivateKey(elliptic.P256(), must.Get(base64.RawURLEncoding.DecodeString(k.D))(t)))(t)
}

// WIT-SVIDs from the issuer to a workload that proves itself with one, for a day.
func TestServeWIT(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-60", "WAPI-62", "WAPI-63", "WAPI-64", "WAPI-7", "WAPI-8", "WAPI-10", "WAPI-21", "WAPI-26",
		"STAB-2", "WIT-52")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		issuer := newWITs(t, home)
		src := &provider{}
		web, db := home.SVID("/web"), home.SVID("/db")
		ids := []workloadserver.Identity{{SVID: web, Hint: "front"}, {SVID: db}, {SVID: web}, {SVID: home.SVID("/db")}}
		src.set(spiffe.NewSnapshot(web, bundleSet(t, withWIT(t, home, issuer))), nil)
		h := handler(t, src, &workloadserver.Options{
			Identities:   func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
			IssueWITSVID: issuer.IssueWITSVID,
		})
		c := inMemory(t, h)
		all, one := watchWIT(t, c, spiffe.ID{}), watchWIT(t, c, db.ID())
		start := time.Now()
		first := all.one(t)
		assert.Equal(t, []string{"/webfront", "/db", "/web"}, paths(first), "one for each identity, in order")
		assert.Equal(t, []string{"/db"}, paths(one.one(t)))
		assert.Zero(t, time.Since(start), "at once")
		issuer.calls()

		// Each is good for a verifier that has the bundles of the other method, and only there.
		var bundles *spiffe.BundleSet
		for u, err := range c.WatchWITBundles(t.Context()) {
			require.NoError(t, err)
			require.Empty(t, u.Skipped)
			bundles = u.Bundles
			break
		}
		validator := must.Get(witsvid.NewValidator(bundles, spiffe.AllowIDs(web.ID(), db.ID()), nil))(t)
		seen := map[string]bool{}
		for _, s := range first {
			svid := must.Get(witsvid.NewSVID(s.Token(), signer(t, s)))(t, "token and key fit")
			prover := &witsvid.Prover{Source: func() (*witsvid.SVID, error) { return svid, nil }}
			call := witsvid.Call{Target: "https://db.example.org/"}
			token, proof := must.Get2(prover.Prove(call))(t)
			assert.Equal(t, s.ID, must.Get(validator.Validate(token, proof, call))(t).ID())
			seen[string(s.KeyJWK())] = true
		}
		assert.Len(t, seen, 3, "no key is there twice")

		// What does not change the WIT-SVIDs brings none: a new bundle of others, renewed X.509-SVIDs.
		ids[0].SVID = home.SVID("/web")
		src.set(spiffe.NewSnapshot(home.SVID("/web"), bundleSet(t, withWIT(t, home, issuer), workloadtest.NewDomain(t, "other.test").Bundle())), nil)
		h.Refresh()
		all.none(t)
		assert.Empty(t, issuer.calls())

		// They come due at half their life, all with new keys.
		time.Sleep(time.Hour/2 - time.Second)
		all.none(t)
		time.Sleep(time.Second)
		second := all.one(t)
		one.one(t)
		assert.Equal(t, paths(first), paths(second))
		for i := range first {
			assert.NotEqual(t, first[i].Token(), second[i].Token())
			assert.NotEqual(t, first[i].KeyJWK(), second[i].KeyJWK())
		}
		assert.Len(t, issuer.calls(), 4)

		// One more identity: the others keep theirs.
		ids = append(slices.Clip(ids), workloadserver.Identity{SVID: home.SVID("/new"), Hint: "n"})
		h.Refresh()
		third := all.one(t)
		assert.Equal(t, []string{"/webfront", "/db", "/web", "/newn"}, paths(third))
		assert.Equal(t, second[0].Token(), third[0].Token())
		assert.Equal(t, []string{"/newn"}, issuer.calls())
		one.none(t)

		// The key of the issuer leaves the bundle: all are issued anew at once.
		next := newWITs(t, home)
		issuer.issuer, issuer.keyID, issuer.key = next.issuer, next.keyID, next.key
		src.set(spiffe.NewSnapshot(web, bundleSet(t, withWIT(t, home, issuer))), nil)
		fourth := all.one(t)
		for _, s := range fourth {
			assert.Equal(t, issuer.keyID, must.Get(witsvid.ParseUnverified(s.Token()))(t).KeyID)
		}
		one.one(t)
		issuer.calls()

		// Renewals of each, in CI a day long, and nothing else.
		n := rounds.Of(12)
		time.Sleep(time.Duration(n) * time.Hour / 2)
		synctest.Wait()
		all.mu.Lock()
		assert.Len(t, all.all, n)
		all.mu.Unlock()
		assert.Len(t, issuer.calls(), n*5)
		assert.Equal(t, 2, streams(h))
	})
}

// An issuer that fails takes nothing away.
func TestWITIssuerFails(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-60", "WAPI-61", "WAPI-17", "WAPI-20", "WEP-15")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		issuer := newWITs(t, home)
		web, db := workloadserver.Identity{SVID: home.SVID("/web")}, workloadserver.Identity{SVID: home.SVID("/db")}
		ids := []workloadserver.Identity{web}
		var log syncBuffer
		kaputt := errors.New("kaputt")
		h := handler(t, fixed(spiffe.NewSnapshot(web.SVID, bundleSet(t, withWIT(t, home, issuer)))), &workloadserver.Options{
			Identities:   func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
			IssueWITSVID: issuer.IssueWITSVID, Logger: workloadtest.Logger(&log),
		})

		// Before the first message it is an error, and the client comes back.
		issuer.fail("", kaputt)
		w := watchWIT(t, inMemory(t, h), spiffe.ID{})
		err := w.failed(t)
		require.ErrorContains(t, err, "status unavailable")
		assert.NotContains(t, err.Error(), "kaputt", "the caller is not told")
		assert.Contains(t, log.String(), "kaputt")
		issuer.fail("", nil)
		time.Sleep(2 * time.Second)
		first := w.one(t)

		// After it the message stays, and the attempts become rare.
		issuer.fail("", kaputt)
		issuer.calls()
		time.Sleep(time.Hour / 2)
		w.none(t)
		assert.Len(t, issuer.calls(), 1)
		for i := range 8 {
			start := time.Now()
			for len(issuer.calls()) == 0 {
				time.Sleep(100 * time.Millisecond)
				synctest.Wait()
			}
			wait := time.Since(start)
			if i > 0 { // the first began before the test looked
				assert.GreaterOrEqual(t, wait, 900*time.Millisecond, "attempt %d", i)
			}
			assert.LessOrEqual(t, wait, min(2*time.Second<<i, lastWait)+100*time.Millisecond, "attempt %d", i)
		}
		for range 10 { // changes in between are no reason to ask more often
			h.Refresh()
			synctest.Wait()
		}
		assert.Empty(t, issuer.calls())
		w.none(t)
		assert.Equal(t, 1, streams(h))
		issuer.fail("", nil)
		time.Sleep(lastWait)
		second := w.one(t)
		assert.NotEqual(t, first[0].Token(), second[0].Token())

		// It hangs: so does nothing else.
		issuer.mu.Lock()
		issuer.hang = true
		issuer.mu.Unlock()
		issuer.calls()
		time.Sleep(time.Hour/2 + 30*time.Second + 500*time.Millisecond)
		w.none(t)
		assert.Contains(t, log.String(), "deadline exceeded")
		issuer.mu.Lock()
		issuer.hang = false
		issuer.mu.Unlock()
		time.Sleep(time.Minute)
		w.one(t)

		// A new identity that cannot be had yet holds nothing up: not the renewal of others …
		issuer.fail("/db", kaputt)
		ids = []workloadserver.Identity{web, db}
		h.Refresh()
		w.none(t)
		time.Sleep(time.Hour / 2)
		assert.Equal(t, []string{"/web"}, paths(w.one(t)))
		issuer.fail("/db", nil)
		time.Sleep(lastWait)
		assert.Equal(t, []string{"/web", "/db"}, paths(w.one(t)))
		// … nor their withdrawal.
		ids = []workloadserver.Identity{db, {SVID: home.SVID("/more")}}
		issuer.fail("/more", kaputt)
		h.Refresh()
		assert.Equal(t, []string{"/db"}, paths(w.one(t)))
		ids = []workloadserver.Identity{{SVID: home.SVID("/more")}}
		h.Refresh()
		require.ErrorIs(t, w.failed(t), workloadapi.ErrDenied, "everything that it had is taken back")
		issuer.fail("/more", nil)
		time.Sleep(time.Minute)
		w.mu.Lock()
		w.err = nil
		w.mu.Unlock()
		assert.Equal(t, []string{"/more"}, paths(w.one(t)))

		// The issuer denies one of two, and then both.
		ids = []workloadserver.Identity{web, db}
		issuer.fail("/db", fmt.Errorf("no WIT-SVIDs for databases: %w", workloadapi.ErrDenied))
		h.Refresh()
		assert.Equal(t, []string{"/web"}, paths(w.one(t)))
		issuer.fail("", workloadapi.ErrDenied)
		time.Sleep(time.Hour / 2)
		require.ErrorIs(t, w.failed(t), workloadapi.ErrDenied)
	})
}

// A WIT-SVID that has expired is not sent again, and its key is not kept (WIT-51): not with those of others,
// and not alone.
func TestWITExpires(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-51")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		issuer := newWITs(t, home)
		web, db := workloadserver.Identity{SVID: home.SVID("/web")}, workloadserver.Identity{SVID: home.SVID("/db")}
		h := handler(t, fixed(spiffe.NewSnapshot(web.SVID, bundleSet(t, withWIT(t, home, issuer)))), &workloadserver.Options{
			Identities: func(context.Context) ([]workloadserver.Identity, error) {
				return []workloadserver.Identity{web, db}, nil
			},
			IssueWITSVID: issuer.IssueWITSVID,
		})
		w := watchWIT(t, inMemory(t, h), spiffe.ID{})
		assert.Equal(t, []string{"/web", "/db"}, paths(w.one(t)))
		issuer.fail("/web", errors.New("kaputt"))
		time.Sleep(time.Hour / 2)
		assert.Equal(t, []string{"/web", "/db"}, paths(w.one(t)), "what cannot be renewed is still good")
		time.Sleep(time.Hour/2 - time.Second)
		w.none(t)
		time.Sleep(time.Second)
		h.Refresh()
		assert.Equal(t, []string{"/db"}, paths(w.one(t)), "not at the end of its last second either")
		time.Sleep(lastWait)
		assert.Equal(t, []string{"/db"}, paths(w.one(t)), "it is renewed")
		issuer.fail("/web", nil)
		time.Sleep(lastWait)
		assert.Equal(t, []string{"/web", "/db"}, paths(w.one(t)))

		issuer.fail("", errors.New("kaputt"))
		time.Sleep(time.Hour/2 - 2*lastWait)
		w.none(t)
		time.Sleep(40 * time.Minute)
		synctest.Wait()
		w.mu.Lock()
		assert.Len(t, w.all, 1, "that of /web ends a little later")
		w.all = nil
		w.mu.Unlock()
		require.ErrorContains(t, w.failed(t), "status unavailable")
		issuer.fail("", nil)
		time.Sleep(lastWait)
		w.mu.Lock()
		w.err = nil
		w.mu.Unlock()
		assert.Equal(t, []string{"/web", "/db"}, paths(w.one(t)))
	})
}

// One that has expired does not hide that another was taken away.
func TestWITExpiresAndDenied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		issuer := newWITs(t, home)
		web, db := workloadserver.Identity{SVID: home.SVID("/web")}, workloadserver.Identity{SVID: home.SVID("/db")}
		var alone atomic.Bool
		h := handler(t, fixed(spiffe.NewSnapshot(web.SVID, bundleSet(t, withWIT(t, home, issuer)))), &workloadserver.Options{
			Identities: func(context.Context) ([]workloadserver.Identity, error) {
				if alone.Load() {
					return []workloadserver.Identity{web}, nil
				}
				return []workloadserver.Identity{web, db}, nil
			},
			IssueWITSVID: issuer.IssueWITSVID,
		})
		w := watchWIT(t, inMemory(t, h), spiffe.ID{})
		w.one(t)
		issuer.fail("/web", errors.New("kaputt"))
		time.Sleep(time.Hour / 2)
		w.one(t)
		time.Sleep(time.Hour/2 - time.Nanosecond)
		alone.Store(true) // and the Handler asks when the other is due, the moment that this one expires
		time.Sleep(time.Nanosecond)
		require.ErrorIs(t, w.failed(t), workloadapi.ErrDenied)
	})
}

const lastWait = 30 * time.Second // between two attempts, at most

// A caller without an identity, or without that one, is denied; a malformed request is refused.
func TestServeWITRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-61", "WAPI-64", "WAPI-23", "WEP-6", "WEP-16")
	home := workloadtest.NewDomain(t, "example.org")
	issuer := newWITs(t, home)
	ids := []workloadserver.Identity{{SVID: home.SVID("/web")}}
	var log syncBuffer
	h := handler(t, fixed(spiffe.NewSnapshot(home.SVID("/agent"), bundleSet(t, withWIT(t, home, issuer)))), &workloadserver.Options{
		Identities:   func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
		IssueWITSVID: issuer.IssueWITSVID, Logger: workloadtest.Logger(&log),
	})
	raw := http2(t, h)
	for name, c := range map[string]struct {
		body []byte
		want int
	}{
		"another identity":    {frame(&wire.WITSVIDRequest{SpiffeId: "spiffe://example.org/db"}), workloadtest.PermissionDenied},
		"another of a prefix": {frame(&wire.WITSVIDRequest{SpiffeId: "spiffe://example.org/we"}), workloadtest.PermissionDenied},
		"the agent's own":     {frame(&wire.WITSVIDRequest{SpiffeId: "spiffe://example.org/agent"}), workloadtest.PermissionDenied},
		"not an ID":           {frame(&wire.WITSVIDRequest{SpiffeId: "web"}), workloadtest.InvalidArgument},
		"a long ID":           {frame(&wire.WITSVIDRequest{SpiffeId: "spiffe://example.org/" + strings.Repeat("x", 3000)}), workloadtest.InvalidArgument},
		"junk":                {append([]byte{0, 0, 0, 0, 4}, "junk"...), workloadtest.InvalidArgument},
		"many fields":         {append([]byte{0, 0, 0, 0, 200}, make([]byte, 200)...), workloadtest.InvalidArgument},
	} {
		code, _ := post(t, raw, service+"FetchWITSVID", c.body, header, "true").Status()
		assert.Equal(t, c.want, code, name)
	}
	assert.Empty(t, issuer.calls())
	for _, rpc := range []string{"FetchWITSVID", "FetchWITBundles"} {
		code, _ := post(t, raw, service+rpc, frame(&wire.WITSVIDRequest{})).Status()
		assert.Equal(t, workloadtest.InvalidArgument, code, "without the header")
	}
	for want, bad := range map[int][]workloadserver.Identity{
		workloadtest.PermissionDenied: nil,
		workloadtest.Unavailable:      {{SVID: home.SVID("/web"), Hint: "x"}, {SVID: home.SVID("/db"), Hint: "x"}},
	} {
		ids = bad
		for _, rpc := range []string{"FetchWITSVID", "FetchWITBundles"} {
			code, _ := post(t, raw, service+rpc, frame(&wire.WITSVIDRequest{}), header, "true").Status()
			assert.Equal(t, want, code)
		}
	}
	assert.Empty(t, issuer.calls())
}

// What each caller is told of whose WIT-SVIDs it may trust.
func TestServeWITBundles(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-62", "WAPI-61", "WAPI-20", "WIT-61", "WIT-63")
	home, other, third := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test"), workloadtest.NewDomain(t, "third.test")
	i1, i2, i3 := newWITs(t, home), newWITs(t, home), newWITs(t, other)
	tricky := namedWITs(t, home, `"use":"wit-svid",`)
	both := withWIT(t, home, i1, i2, tricky).Contents()
	both.JWTAuthorities = map[string]crypto.PublicKey{"jwt": workloadtest.NewKey(t).Public()}
	own := must.Get(spiffe.NewBundle(home.TrustDomain(), both))(t)
	src := &provider{}
	ids := []workloadserver.Identity{{SVID: home.SVID("/web")}}
	h := handler(t, src, &workloadserver.Options{
		Identities:   func(context.Context) ([]workloadserver.Identity, error) { return ids, nil },
		IssueWITSVID: newWITs(t, home).IssueWITSVID,
	})
	raw := http2(t, h)
	kids := func() map[string][]string {
		t.Helper()
		r := post(t, raw, service+"FetchWITBundles", frame(&wire.WITBundlesRequest{}), header, "true")
		defer r.Response.Body.Close()
		var m wire.WITBundlesResponse
		require.NoError(t, proto.Unmarshal(r.Receive(), &m))
		all := map[string][]string{}
		for key, doc := range m.GetBundles() {
			var set struct{ Keys []map[string]string }
			require.NoError(t, json.Unmarshal([]byte(doc), &set))
			all[key] = []string{}
			for _, k := range set.Keys {
				assert.Subset(t, []string{"kid", "kty", "crv", "x", "y"}, slices.Collect(maps.Keys(k)), "a plain JWK Set of public keys")
				assert.NotContains(t, all[key], k["kid"])
				all[key] = append(all[key], k["kid"])
			}
		}
		return all
	}
	kid := func(issuers ...*wits) (all []string) {
		for _, i := range issuers {
			all = append(all, i.keyID)
		}
		slices.Sort(all)
		return all
	}

	src.set(spiffe.NewSnapshot(home.SVID("/agent"), bundleSet(t, own, withWIT(t, other, i3), third.Bundle())), nil)
	want := map[string][]string{home.Key(): kid(i1, i2, tricky), other.Key(): kid(i3)}
	for range 2 {
		assert.Equal(t, want, kids())
	}
	// All callers get the same, whatever their trust domains.
	ids = []workloadserver.Identity{{SVID: home.SVID("/web")}, {SVID: third.SVID("/web")}}
	assert.Equal(t, want, kids())
	// The server's own trust domain is there, without keys, if others have some.
	src.set(spiffe.NewSnapshot(third.SVID("/agent"), bundleSet(t, withWIT(t, other, i3), third.Bundle())), nil)
	assert.Equal(t, map[string][]string{other.Key(): want[other.Key()], third.Key(): {}}, kids())
	// Without any keys every caller is denied.
	src.set(snapshot(t, home.SVID("/agent"), home, third), nil)
	code, _ := post(t, raw, service+"FetchWITBundles", frame(&wire.WITBundlesRequest{}), header, "true").Status()
	assert.Equal(t, workloadtest.PermissionDenied, code)
	// A bundle that is missing is a fault of the server's.
	src.set(spiffe.NewSnapshot(home.SVID("/agent"), bundleSet(t, withWIT(t, other, i3))), nil)
	code, _ = post(t, raw, service+"FetchWITBundles", frame(&wire.WITBundlesRequest{}), header, "true").Status()
	assert.Equal(t, workloadtest.Unavailable, code)
}

// odd is a WIT-SVID as no issuer should make it.
type odd struct {
	token string
	key   crypto.Signer
}

func (o odd) IssueWITSVID(context.Context, spiffe.ID, string) (string, crypto.Signer, error) {
	return o.token, o.key, nil
}

// hardware is a key that cannot be sent.
type hardware struct{ crypto.Signer }

// compact makes a token by hand.
func compact(t testing.TB, head string, claims map[string]any) string {
	t.Helper()
	payload := must.Get(json.Marshal(claims))(t)
	return b64([]byte(head)) + "." + b64(payload) + "." + b64(make([]byte, 64)) // the server does not check signatures
}

// What an issuer must not return reaches no caller, and the log says why without the token.
func TestHostileWITIssuer(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "WIT-1", "WIT-10", "WIT-16")
	const head = `{"alg":"ES256","kid":"k","typ":"wit+jwt"}`
	home := workloadtest.NewDomain(t, "example.org")
	id := spiffe.MustParseID("spiffe://example.org/web")
	key := workloadtest.NewKey(t)
	jwkOf := func(k *ecdsa.PublicKey) map[string]any {
		point := must.Get(k.Bytes())(t)
		return map[string]any{"kty": "EC", "crv": "P-256", "x": b64(point[1:33]), "y": b64(point[33:]), "alg": "ES256"}
	}
	claims := func(edit func(c, jwk map[string]any)) map[string]any {
		jwk := jwkOf(&key.PublicKey)
		c := map[string]any{"sub": id.String(), "exp": time.Now().Add(time.Hour).Unix(), "cnf": map[string]any{"jwk": jwk}}
		edit(c, jwk)
		return c
	}
	with := func(edit func(c, jwk map[string]any)) odd { return odd{compact(t, head, claims(edit)), key} }
	good := with(func(c, jwk map[string]any) {})
	small := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	_, edwards := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	rsaJWK := func(k *rsa.PublicKey, alg string) map[string]any {
		return map[string]any{"kty": "RSA", "n": b64(k.N.Bytes()), "e": b64(big.NewInt(int64(k.E)).Bytes()), "alg": alg}
	}
	rsaToken := compact(t, head, claims(func(c, _ map[string]any) { c["cnf"] = map[string]any{"jwk": rsaJWK(&small.PublicKey, "PS256")} }))
	broken := *small
	broken.D = new(big.Int).Add(small.D, big.NewInt(2))
	broken.Precomputed = rsa.PrecomputedValues{}
	threePrimes := &rsa.PrivateKey{PublicKey: small.PublicKey, D: small.D, Primes: append(slices.Clone(small.Primes), big.NewInt(3))}

	serve := func(svid odd) (code int, m *wire.WITSVIDResponse, log string) {
		t.Helper()
		var b syncBuffer
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{IssueWITSVID: svid.IssueWITSVID, Logger: workloadtest.Logger(&b)})
		r := post(t, http2(t, h), service+"FetchWITSVID", frame(&wire.WITSVIDRequest{}), header, "true")
		defer r.Response.Body.Close()
		if data := r.Receive(); data != nil {
			m = &wire.WITSVIDResponse{}
			require.NoError(t, proto.Unmarshal(data, m))
			return 0, m, b.String()
		}
		code, _ = r.Status()
		return code, nil, b.String()
	}
	for _, svid := range []odd{good, {rsaToken, small}, with(func(c, _ map[string]any) { c["x"], c["nbf"] = []any{map[string]any{}}, 1.5 })} {
		code, m, log := serve(svid)
		require.Zero(t, code, log)
		require.Len(t, m.GetSvids(), 1)
		assert.Equal(t, svid.token, m.GetSvids()[0].GetWitSvid())
		assert.NotContains(t, log, svid.token)
	}
	_, m, _ := serve(odd{rsaToken, small})
	var k map[string]string
	require.NoError(t, json.Unmarshal([]byte(m.GetSvids()[0].GetWitSvidKey()), &k))
	small.Precompute()
	for name, v := range map[string]*big.Int{
		"n": small.N, "e": big.NewInt(int64(small.E)), "d": small.D, "p": small.Primes[0], "q": small.Primes[1],
		"dp": small.Precomputed.Dp, "dq": small.Precomputed.Dq, "qi": small.Precomputed.Qinv,
	} {
		assert.Equal(t, b64(v.Bytes()), k[name], name)
	}
	assert.Equal(t, "RSA", k["kty"])

	for name, c := range map[string]struct {
		svid odd
		want string
	}{
		"nothing":           {odd{}, "spiffe://example.org/web"},
		"no token":          {odd{"", key}, "spiffe://example.org/web"},
		"not UTF-8":         {odd{good.token + "\xff", key}, "spiffe://example.org/web"},
		"another sub":       {with(func(c, _ map[string]any) { c["sub"] = "spiffe://example.org/db" }), "of another ID"},
		"no exp":            {with(func(c, _ map[string]any) { delete(c, "exp") }), "has expired"},
		"expired":           {with(func(c, _ map[string]any) { c["exp"] = time.Now().Unix() - 1 }), "expired"},
		"no cnf":            {with(func(c, _ map[string]any) { delete(c, "cnf") }), "not a WIT-SVID"},
		"no key":            {odd{good.token, nil}, "cannot be sent"},
		"an Ed25519 key":    {odd{good.token, edwards}, "cannot be sent"},
		"a key in hardware": {odd{good.token, hardware{key}}, "cannot be sent"},
		"a broken RSA key":  {odd{rsaToken, &broken}, "not a valid RSA key"},
		"three primes":      {odd{rsaToken, threePrimes}, "not a valid RSA key"},
	} {
		code, _, log := serve(c.svid)
		log = strings.ReplaceAll(log, `\"`, `"`)
		assert.Equal(t, workloadtest.Unavailable, code, name)
		assert.Contains(t, log, c.want, name)
		assert.NotContains(t, log, good.token[:40], name)
	}
}

// An issuer that hands out the same token again and again is not asked in a hurry, and a caller hears of
// it once.
func TestWITThatStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		issuer := newWITs(t, home)
		token, key, err := issuer.issuer.IssueWITSVID(t.Context(), spiffe.MustParseID("spiffe://example.org/web"), "")
		require.NoError(t, err)
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{IssueWITSVID: odd{token, key}.IssueWITSVID})
		w := watchWIT(t, inMemory(t, h), spiffe.ID{})
		w.one(t)
		time.Sleep(time.Hour - time.Second)
		w.none(t)
		time.Sleep(lastWait)
		require.ErrorContains(t, w.failed(t), "status unavailable", "it has expired")
	})
}
