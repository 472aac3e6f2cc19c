package proofs

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

var long = flag.Bool("long", false, "run the soaks")

// domains is how many trust domains there are: each has a relation with each, in each direction.
const domains = 20

// domain is one of them, with all that it runs.
type domain struct {
	td        spiffe.TrustDomain
	id        spiffe.ID
	authority *ca.Authority
	trusts    [domains]bool // those whose bundles it has
	foreign   foreign
	manager   *secretcache.Manager
	agent     *sds.Handler
}

// foreign has the bundles of other trust domains, as a federation.Manager has.
type foreign struct {
	mu      sync.Mutex
	set     *spiffe.BundleSet
	changed renew.Signal
}

func (f *foreign) Bundles() *spiffe.BundleSet {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.set
}

func (f *foreign) Changed() <-chan struct{} { return f.changed.Changed() }

func (f *foreign) put(set *spiffe.BundleSet) {
	f.mu.Lock()
	f.set = set
	f.mu.Unlock()
	f.changed.Notify()
}

// world makes the trust domains, of which each trusts itself and the others that trust chooses.
func world(t *testing.T, trust func(from, to int) bool) []*domain {
	all := make([]*domain, domains)
	for i := range all {
		td := spiffe.MustParseTrustDomain(fmt.Sprintf("d%02d.test", i))
		id := must.Get(td.WorkloadID("web"))(t)
		authority := must.Get(ca.New(ca.Config{TrustDomain: td}))(t)
		all[i] = &domain{td: td, id: id, authority: authority}
	}
	for i, d := range all {
		var bundles []*spiffe.Bundle
		for j, other := range all {
			if d.trusts[j] = i == j || trust(i, j); d.trusts[j] && i != j {
				bundles = append(bundles, other.authority.Bundle())
			}
		}
		set := must.Get(spiffe.NewBundleSet(bundles...))(t)
		d.foreign.set = set
		source := must.Get(local.New(d.authority, d.id))(t)
		d.manager = must.Get(secretcache.New(secretcache.Config{ID: d.id, CA: source, Federated: &d.foreign}))(t)
		must.Get(d.manager.GenerateSecret(t.Context(), "default"))(t)
		d.agent = must.Get(sds.NewHandler(d.manager, nil))(t)
		t.Cleanup(func() { assert.NoError(t, d.agent.Close()) })
	}
	return all
}

// roots asks the agent of d for the roots of a trust domain.
func (d *domain) roots(t *testing.T, of spiffe.TrustDomain) (pem []byte, ok bool) {
	t.Helper()
	in := must.Get(proto.Marshal(&envoysds.DiscoveryRequest{ResourceNames: []string{of.ID().String()}}))(t)
	r := httptest.NewRequest(http.MethodPost, "/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets", prefixed(in)())
	r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
	r.Header.Set("Content-Type", "application/grpc")
	w := httptest.NewRecorder()
	d.agent.ServeHTTP(w, r)
	if w.Body.Len() == 0 {
		return nil, false
	}
	var answer envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(w.Body.Bytes()[5:], &answer))
	require.Len(t, answer.GetResources(), 1)
	var secret envoysds.Secret
	require.NoError(t, proto.Unmarshal(answer.GetResources()[0].GetValue(), &secret))
	return secret.GetValidationContext().GetTrustedCa().GetInlineBytes(), true
}

// shake makes a handshake of two workloads, and reports what each side has to say.
func shake(t *testing.T, server, client *domain) (serverErr, clientErr error) {
	t.Helper()
	endpoint, err := spiffetls.New(spiffetls.Config{Self: server.manager, Peers: server.manager, Allow: spiffe.AllowAnyPeer()})
	require.NoError(t, err)
	serving := must.Get(endpoint.ServerConfig())(t)
	endpoint, err = spiffetls.New(spiffetls.Config{Self: client.manager, Peers: client.manager, Allow: spiffe.AllowAnyPeer()})
	require.NoError(t, err)
	dialling := must.Get(endpoint.ClientConfig())(t)
	a, b := memconn.Pipe()
	s, c := tls.Server(a, serving), tls.Client(b, dialling)
	var wg sync.WaitGroup
	wg.Go(func() {
		if serverErr = s.HandshakeContext(t.Context()); serverErr == nil {
			_, serverErr = s.Write([]byte("x"))
		}
		_ = s.Close()
	})
	if clientErr = c.HandshakeContext(t.Context()); clientErr == nil {
		_, clientErr = io.ReadFull(c, make([]byte, 1))
	}
	_ = c.Close()
	wg.Wait()
	return serverErr, clientErr
}

// TestMatrix: of 20 trust domains each trusts those that were configured, in that direction, and no others: for what a
// CA signs, for what a verifier accepts in each role, for handshakes, for what an agent hands out, and for the bundles
// themselves.
func TestMatrix(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	random := rand.New(rand.NewPCG(20, 20))
	all := world(t, func(int, int) bool { return random.IntN(2) == 0 })
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	trusted := 0
	for i, from := range all {
		verifier := must.Get(spiffe.NewVerifier(from.manager, spiffe.AllowAnyPeer(), nil))(t)
		snapshot := must.Get(from.manager.Snapshot())(t)
		for j, to := range all {
			edge := fmt.Sprintf("%s trusts %s: %v", from.td, to.td, from.trusts[j])
			if from.trusts[j] {
				trusted++
			}

			// A CA signs for its own trust domain, whatever trusts whatever.
			_, err := from.authority.Sign(t.Context(), ca.Request{CSR: csr, ID: to.id})
			assert.Equal(t, i == j, err == nil, "%s: %v", edge, err)

			// Bundles.
			b, err := from.manager.Bundle(to.td)
			assert.Equal(t, from.trusts[j], err == nil, edge)
			if err == nil {
				assert.True(t, b.Equal(to.authority.Bundle()), edge)
			}
			_, err = snapshot.Bundle(to.td)
			assert.Equal(t, from.trusts[j], err == nil, edge)

			// What a verifier accepts.
			svid := must.Get(to.manager.SVID())(t)
			for _, role := range []spiffe.Role{spiffe.AnyRole, spiffe.ServerRole, spiffe.ClientRole, spiffe.BothRoles} {
				peer, err := verifier.VerifyChain(svid.Chain(), role)
				assert.Equal(t, from.trusts[j], err == nil, "%s: %v", edge, err)
				if err == nil {
					assert.Equal(t, to.id, peer.ID(), edge)
				}
			}

			// What an agent hands out.
			pem, ok := from.roots(t, to.td)
			assert.Equal(t, from.trusts[j], ok, edge)
			if ok {
				assert.Equal(t, to.authority.Bundle().MarshalPEM(), pem, edge)
			}

			// Handshakes need both directions. The side that does not trust says so.
			serverErr, clientErr := shake(t, from, to)
			if both := from.trusts[j] && to.trusts[i]; !both {
				assert.True(t, serverErr != nil && clientErr != nil, "%s and back: %v", edge, to.trusts[i])
			} else {
				assert.NoError(t, serverErr, edge)
				assert.NoError(t, clientErr, edge)
			}
		}
	}
	assert.Greater(t, trusted, domains*domains/3)
	assert.Less(t, trusted, domains*domains*2/3+domains)

	// No domain's CA makes a leaf that passes for another's.
	for i, from := range all {
		for j, to := range all {
			if i == j {
				continue
			}
			forged := forge(t, from, to.id)
			for _, d := range []*domain{from, to} {
				verifier := must.Get(spiffe.NewVerifier(d.manager, spiffe.AllowAnyPeer(), nil))(t)
				_, err := verifier.VerifyChain(forged, spiffe.AnyRole)
				require.Error(t, err, "%s forged an identity of %s", from.td, to.td)
			}
		}
	}
}

// forge returns the certificate of a workload of from, that says it is id.
func forge(t *testing.T, from *domain, id spiffe.ID) []*x509.Certificate {
	t.Helper()
	svid := must.Get(from.manager.SVID())(t)
	template := *svid.Leaf()
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	template.URIs, template.ExtraExtensions, template.Extensions = slices.Clone(template.URIs), nil, nil
	template.URIs[0] = id.URL()
	// A workload's key signs it, which is all that a workload of from has.
	der := must.Get(x509.CreateCertificate(nil, &template, svid.Leaf(), key.Public(), svid.Signer()))(t)
	leaf := must.Get(x509.ParseCertificate(der))(t)
	return append([]*x509.Certificate{leaf}, svid.Chain()...)
}

// TestMatrixChanges: while the configuration changes at random, what was withdrawn is gone from verifiers and agents
// within a second, and what was granted is there.
func TestMatrixChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		random := rand.New(rand.NewPCG(7, 7))
		all := world(t, func(int, int) bool { return random.IntN(2) == 0 })
		var runs sync.WaitGroup
		verifiers := make([]*spiffe.Verifier, domains)
		for i, d := range all {
			var err error
			verifiers[i], err = spiffe.NewVerifier(d.manager, spiffe.AllowAnyPeer(), nil)
			require.NoError(t, err)
			runs.Go(func() { _ = d.manager.Run(ctx) })
		}
		defer runs.Wait()
		defer cancel()
		synctest.Wait()
		events := rounds.Of(500)
		if *long {
			events = 100_000
		}
		for range events {
			i, j := random.IntN(domains), random.IntN(domains)
			if i == j {
				continue
			}
			from, to := all[i], all[j]
			from.trusts[j] = !from.trusts[j]
			var bundles []*spiffe.Bundle
			for k, d := range all {
				if k != i && from.trusts[k] {
					bundles = append(bundles, d.authority.Bundle())
				}
			}
			set := must.Get(spiffe.NewBundleSet(bundles...))(t)
			from.foreign.put(set)
			time.Sleep(time.Duration(random.Int64N(int64(time.Second))))
			synctest.Wait()
			svid := must.Get(to.manager.SVID())(t)
			_, err := verifiers[i].VerifyChain(svid.Chain(), spiffe.ClientRole)
			require.Equal(t, from.trusts[j], err == nil, "%s trusts %s: %v", from.td, to.td, err)
			pem, ok := from.roots(t, to.td)
			require.Equal(t, from.trusts[j], ok)
			if ok {
				require.True(t, bytes.Equal(to.authority.Bundle().MarshalPEM(), pem))
			}
		}
	})
}

// liveBundles is a source whose bundles change.
type liveBundles struct {
	m map[spiffe.TrustDomain]*spiffe.Bundle
}

func (l *liveBundles) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if b := l.m[td]; b != nil {
		return b, nil
	}
	return nil, spiffe.ErrUnknownTrustDomain
}

// TestEntitlementEvents: random changes of bundles and policies, against a model that is two tables: 60,000, 20 million with -long. A verifier
// remembers what it has verified, and never what may no longer be: each change counts at the next question.
func TestEntitlementEvents(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	const peers = 60
	events, rotations := rounds.Of(60_000), rounds.Of(12)
	if *long {
		events, rotations = 20_000_000, 10_000
	}
	if rounds.Race {
		events /= 20
	}
	random := rand.New(rand.NewPCG(60, 60))
	live := &liveBundles{m: map[spiffe.TrustDomain]*spiffe.Bundle{}}
	policy := new(spiffe.LivePolicy)
	verifier := must.Get(spiffe.NewVerifier(live, policy, nil))(t)

	// The model: which trust domains have a bundle, which has the root that signed a peer, and which peers are allowed.
	var (
		cas     [domains]*spiffetest.CA
		bundles [domains]*spiffe.Bundle
		known   [domains]bool
		chains  [peers][]*x509.Certificate
		ids     [peers]spiffe.ID
		signed  [peers]bool // by a root that is in the newest bundle
		allowed [peers]bool
	)
	mint := func(i int) {
		svid := cas[i%domains].SVID(fmt.Sprintf("/w%d", i))
		chains[i], ids[i], signed[i] = svid.Chain(), svid.ID(), true
	}
	for d := range cas {
		cas[d] = spiffetest.NewCA(t, fmt.Sprintf("d%02d.test", d))
		bundles[d] = cas[d].Bundle()
	}
	for i := range chains {
		mint(i)
	}
	leaks, losses, granted := 0, 0, 0
	every := events / rotations
	for n := range events {
		d, p := random.IntN(domains), random.IntN(peers)
		switch {
		case n%every == 0: // a root is replaced, and half of the peers have certificates of the new one
			cas[d].Rotate()
			cas[d].DropOldRoots()
			bundles[d] = cas[d].Bundle()
			for i := d; i < peers; i += domains {
				if signed[i] = false; random.IntN(2) == 0 {
					mint(i)
				}
			}
			if known[d] {
				live.m[cas[d].TrustDomain()] = bundles[d]
			}
		case random.IntN(32) == 0:
			allowed[p] = !allowed[p]
			list := make([]spiffe.ID, 0, peers)
			for i, ok := range allowed {
				if ok {
					list = append(list, ids[i])
				}
			}
			require.NoError(t, policy.Set(spiffe.AllowIDs(list...)))
		case known[d]:
			known[d] = false
			delete(live.m, cas[d].TrustDomain())
		default:
			known[d] = true
			live.m[cas[d].TrustDomain()] = bundles[d]
		}
		_, err := verifier.VerifyChain(chains[p], spiffe.ClientRole)
		switch may := known[p%domains] && signed[p] && allowed[p]; {
		case err == nil && !may:
			leaks++
		case err != nil && may:
			losses++
		case may:
			granted++
		}
	}
	assert.Zero(t, leaks, "peers that are accepted and may not be")
	assert.Zero(t, losses, "peers that are refused and may not be")
	assert.Greater(t, granted, events/50)
	t.Logf("%d events, %d times accepted", events, granted)
}

// TestWithdrawalEndsConnections: an open connection ends within a second after its peer lost the bundle or the policy
// that let it in, and others stay.
func TestWithdrawalEndsConnections(t *testing.T) {
	t.Parallel()
	synctest.Test(t, withdrawalEndsConnections)
}

func withdrawalEndsConnections(t *testing.T) {
	ours := spiffetest.NewCA(t, "ours.test")
	theirs := [4]*spiffetest.CA{}
	var bundles foreign
	set := ours.Bundles()
	var ids []spiffe.ID
	for i := range theirs {
		theirs[i] = spiffetest.NewCA(t, fmt.Sprintf("d%d.test", i))
		set = set.With(theirs[i].Bundle())
		ids = append(ids, theirs[i].SVID("/web").ID())
	}
	bundles.put(set)
	policy := new(spiffe.LivePolicy)
	require.NoError(t, policy.Set(spiffe.AllowIDs(ids...)))
	governor := &spiffetls.Governor{Grace: -1, Jitter: -1}
	source := struct {
		*foreign
		spiffe.BundleSource
	}{&bundles, current{&bundles}}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ours.SVID("/db"), Peers: source, Allow: policy, Governor: governor})
	require.NoError(t, err)
	l := memconn.Listen()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); _ = l.Close(); wg.Wait() })
	wg.Go(func() { _ = governor.Run(ctx) })
	governed := must.Get(endpoint.Listener(l))(t)
	wg.Go(func() {
		for {
			conn, err := governed.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.Copy(conn, conn) // an echo
				_ = conn.Close()
			})
		}
	})
	var conns [4]*tls.Conn
	for i := range conns {
		endpoint, err := spiffetls.New(spiffetls.Config{Self: theirs[i].SVID("/web"), Peers: ours.Bundle(), Allow: spiffe.AllowAnyPeer()})
		require.NoError(t, err)
		client := must.Get(endpoint.ClientConfig())(t)
		conns[i] = tls.Client(must.Get(l.DialContext(ctx, "", ""))(t), client)
		echo(t, conns[i])
	}
	ends := func(i int, withdraw func()) {
		t.Helper()
		start := time.Now()
		withdraw()
		require.NoError(t, conns[i].SetReadDeadline(start.Add(30*time.Second)))
		_, err := conns[i].Read(make([]byte, 1))
		require.Error(t, err)
		assert.LessOrEqual(t, time.Since(start), time.Second)
	}
	ends(0, func() { require.NoError(t, policy.Set(spiffe.AllowIDs(ids[1:]...))) })
	for _, c := range conns[1:] {
		echo(t, c)
	}
	ends(1, func() {
		without := must.Get(spiffe.NewBundleSet(ours.Bundle(), theirs[2].Bundle(), theirs[3].Bundle()))(t)
		bundles.put(without)
	})
	for _, c := range conns[2:] {
		echo(t, c)
		_ = c.Close()
	}
}

// current returns the bundles of a foreign one by one.
type current struct{ *foreign }

func (c current) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return c.Bundles().Bundle(td) }

func echo(t *testing.T, c *tls.Conn) {
	t.Helper()
	must.Get(c.Write([]byte("x")))(t)
	must.Get(io.ReadFull(c, make([]byte, 1)))(t)
}
