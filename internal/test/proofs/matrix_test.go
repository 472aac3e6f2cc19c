package proofs

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	istiocaserver "github.com/svidkit/svidkit/pki/caserver/istioca"
	linkerdserver "github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
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
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	trusted, step := 0, max(1, 4/rounds.Of(1)) // of roles, handshakes and forgeries
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
			for _, role := range []spiffe.Role{spiffe.AnyRole, spiffe.ServerRole, spiffe.ClientRole, spiffe.BothRoles}[(i+j)%step:] {
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
			if (i+j)%step != 0 {
				continue
			}
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
			if i == j || (i+j)%step != 0 {
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
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
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
			_, err := verifiers[i].VerifyChain(must.Get(to.manager.SVID())(t).Chain(), spiffe.ClientRole)
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
	events, rotations := rounds.Of(20_000), rounds.Of(12)
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
		require.Error(t, must.Err(conns[i].Read(make([]byte, 1))))
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

var errGivenUp = errors.New("the program has given up")

// TestMuteAgent: while the agent takes requests and does not answer, the error of the wait says that, at any moment.
func TestMuteAgent(t *testing.T) {
	t.Parallel()
	for _, patience := range []time.Duration{time.Millisecond, time.Second, 10 * time.Second, time.Minute, 10 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			api := workloadapitest.NewInMemory(t, spiffetest.NewCA(t, "example.org"), "/web")
			api.Hang()
			ctx, cancel := context.WithTimeoutCause(t.Context(), patience, errGivenUp)
			defer cancel()
			_, err := workloadapi.Start(ctx, api.Config())
			require.ErrorIs(t, err, spiffe.ErrNotReady, patience)
			require.ErrorIs(t, err, errGivenUp, patience)
			assert.NotContains(t, err.Error(), "nothing was tried", patience)
			assert.Contains(t, err.Error(), "answer", patience)
			api.Mend()
		})
	}
}

// source is what Start returns, of an agent or of a CA.
type source interface {
	spiffe.SVIDSource
	spiffe.BundleSource
	Run(context.Context) error
	Ready(context.Context) error
	Close() error
}

// TestStartInOneCall: one call gives an identity that is there, and Close ends all of it; the explicit form ends without
// an error, too; and a source that was not started says so.
func TestStartInOneCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		agent := workloadapitest.NewInMemory(t, ca, "/web")
		id := spiffe.MustParseID("spiffe://example.org/web")
		for name, c := range map[string]struct {
			start func(context.Context) (source, error)
			make  func() (source, error)
			fail  func(error)
		}{
			"agent": {
				func(ctx context.Context) (source, error) { return workloadapi.Start(ctx, agent.Config()) },
				func() (source, error) { return workloadapi.New(agent.Config()) },
				func(err error) {
					if agent.Mend(); err != nil {
						agent.Deny()
					}
				},
			},
			"CA": {
				func(ctx context.Context) (source, error) {
					return secretcache.Start(ctx, secretcache.Config{ID: id, CA: ca})
				},
				func() (source, error) { return secretcache.New(secretcache.Config{ID: id, CA: ca}) },
				func(err error) {
					if ca.FailNext(0, nil); err != nil {
						ca.FailNext(-1, err)
					}
				},
			},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			me := must.Get(c.start(ctx))(t, name)
			cancel()
			time.Sleep(3 * time.Hour) // renewals
			svid := must.Get(me.SVID())(t, name)
			assert.Equal(t, id, svid.ID(), name)
			if agent.Rotate(); name == "CA" { // the agent of a test renews when it is told
				assert.True(t, svid.NotAfter().After(time.Now()), "it runs on after the context of the start has ended")
			}
			require.NoError(t, me.Close(), name)
			must.Get(me.Bundle(id.TrustDomain()))(t, "%s: what was received stays", name)

			me = must.Get(c.make())(t, name)
			ctx, cancel = context.WithTimeout(t.Context(), time.Second)
			err := me.Ready(ctx)
			cancel()
			assert.ErrorContains(t, err, "this program has neither called Start nor Run", name)
			ctx, cancel = context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- me.Run(ctx) }()
			require.NoError(t, me.Ready(t.Context()), name)
			cancel()
			require.NoError(t, <-ended, "%s: a clean stop", name)

			c.fail(errors.New("the power is out"))
			ctx, cancel = context.WithTimeoutCause(t.Context(), time.Minute, errGivenUp)
			_, err = c.start(ctx)
			cancel()
			require.ErrorIs(t, err, errGivenUp, name)
			if name == "CA" {
				require.ErrorContains(t, err, "the power is out")
			} else {
				require.ErrorIs(t, err, workloadapi.ErrDenied)
			}
			c.fail(nil)
		}
	})
}

// The bar for what faces the network: what any input of a MiB may cost.
const (
	inputSize = 1 << 20
	maxMemory = 4 << 20
	maxTime   = 50 * time.Millisecond
)

// hostile are inputs of a MiB that cost more than others where a parser is careless.
func hostile(t testing.TB) map[string][]byte {
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(svid.ID())}}))(t)
	certPEM, keyPEM := must.Get2(svid.MarshalPEM())(t)
	doc := must.Get(ca.Bundle().Marshal())(t)
	certKey := string(doc[bytes.IndexByte(doc, '[')+1 : bytes.LastIndexByte(doc, ']')])
	// fill repeats a text between two others.
	fill := func(head, body, tail string) []byte {
		n := (inputSize - len(head) - len(tail)) / len(body)
		return []byte(head + strings.Repeat(body, n) + tail)
	}
	// count repeats a text with a number in it.
	count := func(head, format, tail string) []byte {
		b := append(make([]byte, 0, inputSize), head...)
		for i := 0; len(b) < inputSize-len(tail)-64; i++ {
			b = fmt.Appendf(b, format, i)
		}
		return append(b, tail...)
	}
	// field is a field of a protobuf message that fills the input with others.
	field := func(number int, body []byte) []byte {
		return append(binary.AppendUvarint([]byte{byte(number<<3 | 2)}, uint64(len(body))), body...)
	}
	// nested is a message within a message, as deep as fits.
	nested := func(number int) []byte {
		depth := 4000
		b := []byte{}
		for range depth {
			b = field(number, b)
		}
		return b
	}
	base64url := base64.RawURLEncoding.EncodeToString
	token := func(header string, payload []byte) []byte {
		return []byte(base64url([]byte(header)) + "." + base64url(payload) + "." + base64url(make([]byte, 64)))
	}
	sequence := func(inner []byte) []byte { // a SEQUENCE in DER
		return append([]byte{0x30, 0x83, byte(len(inner) >> 16), byte(len(inner) >> 8), byte(len(inner))}, inner...)
	}
	deepDER := bytes.Repeat([]byte{0x30, 0x80}, inputSize/2)
	all := map[string][]byte{
		"zeros":                      make([]byte, inputSize),
		"ones":                       bytes.Repeat([]byte{0xff}, inputSize),
		"spaces":                     fill("", " ", ""),
		"lines":                      fill("", "\n", ""),
		"dots":                       fill("", ".", ""),
		"slashes":                    fill("spiffe://example.org", "/a", ""),
		"a long ID":                  fill("spiffe://example.org/", "a", ""),
		"a long trust domain":        fill("spiffe://", "a.", "a/x"),
		"not UTF-8":                  fill(`{"keys":["`, "\xc3", `"]}`),
		"arrays in arrays":           fill("", "[", ""),
		"objects in objects":         fill("", `{"a":`, ""),
		"arrays in keys":             fill(`{"keys":`, "[", ""),
		"empty keys":                 fill(`{"keys":[{}`, `,{}`, `]}`),
		"numbers for keys":           fill(`{"keys":[1`, `,1`, `]}`),
		"wide objects":               count(`{"keys":[]`, `,"n%d":1`, `}`),
		"escaped names":              count(`{"keys":[]`, `,"\u006e%d":1`, `}`),
		"one name":                   fill(`{"keys":[]`, `,"a":1`, `}`),
		"a long number":              fill(`{"keys":[],"spiffe_sequence":1`, "0", `}`),
		"a long text":                fill(`{"keys":[],"a":"`, `\u00e9`, `"}`),
		"surrogates":                 fill(`{"keys":[],"a":"`, `\ud83d\ude00`, `"}`),
		"certificates in keys":       fill(`{"keys":[`+certKey, ","+certKey, `]}`),
		"many x5c":                   fill(`{"keys":[{"use":"x509-svid","kty":"EC","x5c":["AAAA"`, `,"AAAA"`, `]}]}`),
		"a long x5c":                 fill(`{"keys":[{"use":"x509-svid","kty":"EC","x5c":["`, `AAAA`, `"]}]}`),
		"a long modulus":             fill(`{"keys":[{"use":"jwt-svid","kid":"k","kty":"RSA","e":"AQAB","n":"`, "A", `"}]}`),
		"tokens' keys":               count(`{"keys":[{}`, `,{"use":"jwt-svid","kid":"%d","kty":"EC","crv":"P-256","x":"AA","y":"AA"}`, `]}`),
		"trust domains":              count(`{"trust_domains":{"a.test":{"keys":[]}`, `,"d%d.test":{"keys":[]}`, `}}`),
		"trust domains without keys": count(`{"trust_domains":{"a.test":{}`, `,"d%d.test":{}`, `}}`),
		"a review":                   fill(`{"status":{"authenticated":true,"audiences":["a"`, `,"a"`, `]}}`),
		"a review's extra":           count(`{"status":{"authenticated":true,"user":{"username":"u","extra":{"a":[]`, `,"e%d":["x"]`, `}}}}`),
		"a review's groups":          count(`{"status":{"authenticated":true,"user":{"username":"system:serviceaccount:a:b","groups":["g"`, `,"g%d"`, `]}}}`),
		"names in JSON":              count(`{"resource_names":["a"`, `,"n%d"`, `]}`),
		"PEM":                        fill("", string(certPEM), ""),
		"keys in PEM":                fill("", string(keyPEM), ""),
		"empty blocks":               fill("", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n", ""),
		"headers in PEM":             count("-----BEGIN CERTIFICATE-----\n", "h%d: v\n", "\nAAAA\n-----END CERTIFICATE-----\n"),
		"dashes":                     fill("", "-----BEGIN ", ""),
		"a long block":               fill("-----BEGIN CERTIFICATE-----\n", "AAAA", "\n-----END CERTIFICATE-----\n"),
		"certificates":               fill("", string(svid.Leaf().Raw), ""),
		"requests":                   fill("", string(csr.DER()), ""),
		"a request":                  append(bytes.Clone(csr.DER()), make([]byte, inputSize-len(csr.DER()))...),
		"a request in PEM":           fill(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr.DER()})), "\n", ""),
		"a sequence":                 sequence(make([]byte, inputSize-5)),
		"a sequence of nulls":        sequence(bytes.Repeat([]byte{5, 0}, inputSize/2-3)),
		"a sequence of sequences":    sequence(bytes.Repeat([]byte{0x30, 0}, inputSize/2-3)),
		"deep DER":                   deepDER,
		"a token's header":           token(`{"alg":"ES256","kid":"k","typ":"JWT","x":"`+strings.Repeat("a", inputSize*3/4-1024)+`"}`, []byte("{}")),
		"a token's payload":          token(`{"alg":"ES256","kid":"k","typ":"JWT"}`, fill(`{"sub":"spiffe://example.org/web","aud":["a"`, `,"a"`, `]}`)[:inputSize*3/4-1024]),
		"a token with many dots":     fill("a.b", ".c", ""),
		"fields 1":                   fill("", "\x0a\x00", ""),
		"fields 2":                   fill("", "\x12\x00", ""),
		"fields 3":                   fill("", "\x1a\x00", ""),
		"fields 4":                   fill("", "\x22\x00", ""),
		"fields 5":                   fill("", "\x2a\x00", ""),
		"numbers":                    fill("", "\x08\x01", ""),
		"many field numbers":         fill("", "\xf8\xff\xff\xff\x0f\x01", ""),
		"groups":                     fill("", "\x0b", ""),
		"empty names":                fill("", "\x1a\x01a", ""),
		"names":                      count("", "\x1a\x08%08d", ""),
		"messages in messages 1":     nested(1),
		"messages in messages 4":     nested(4),
		"a field of fields":          field(1, bytes.Repeat([]byte{0x0a, 0}, inputSize/2-8)),
		"a field of certificates":    field(1, field(2, fill("", string(svid.Leaf().Raw), "")[:inputSize-1024])),
		"metadata":                   field(4, bytes.Repeat([]byte("\x0a\x06\x0a\x02ab\x12\x00"), inputSize/8-8)),
		"a map":                      bytes.Repeat([]byte("\x12\x06\x0a\x02ab\x12\x00"), inputSize/8),
		"bundles in a map":           bytes.Repeat(append([]byte("\x12\x1e\x0a\x14spiffe://example.org\x12\x06"), []byte("abcdef")...), inputSize/32),
	}
	for name, in := range all {
		require.LessOrEqual(t, len(in), inputSize, name)
		if name != "messages in messages 1" && name != "messages in messages 4" {
			require.Greater(t, len(in), inputSize*9/10-4096, name)
		}
	}
	return all
}

// sending gives a handler a request with one message of gRPC, as a client would that sends nothing more.
func sending(h http.Handler, path string) func([]byte) {
	return func(in []byte) {
		r := httptest.NewRequest(http.MethodPost, path, io.NopCloser(prefixed(in)()))
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
		r.Header.Set("Content-Type", "application/grpc")
		r.Header.Set("Authorization", "Bearer token")
		r.Header.Set("Workload.spiffe.io", "true")
		r.RemoteAddr = "127.0.0.1:1"
		// A stream waits for more.
		ctx, cancel := context.WithTimeout(r.Context(), 10*time.Millisecond)
		defer cancel()
		h.ServeHTTP(httptest.NewRecorder(), r.WithContext(ctx))
	}
}

// answering is an HTTP client of a server that answers every request with the same bytes.
type answering struct {
	body        func() io.Reader
	contentType string
	trailer     http.Header
}

func (a *answering) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
	return &http.Response{
		StatusCode: http.StatusOK, Proto: "HTTP/2.0", ProtoMajor: 2, Header: http.Header{"Content-Type": {a.contentType}},
		Trailer: a.trailer, Body: io.NopCloser(a.body()), ContentLength: -1, Request: r,
	}, nil
}

// receiving calls a client whose server answers with one message of gRPC.
func receiving(call func(c *http.Client)) func([]byte) {
	return func(in []byte) {
		call(&http.Client{Transport: &answering{prefixed(in), "application/grpc", http.Header{"Grpc-Status": {"0"}}}})
	}
}

// prefixed reads as a message of gRPC, without a copy of it.
func prefixed(message []byte) func() io.Reader {
	prefix := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	return func() io.Reader { return io.MultiReader(bytes.NewReader(prefix), bytes.NewReader(message)) }
}

// noSecrets is a source without names.
type noSecrets struct{}

func (noSecrets) GenerateSecret(context.Context, string) (*pki.Secret, error) {
	return nil, fs.ErrNotExist
}
func (noSecrets) Subscribe(func(string)) func() { return func() {} }

// TestHostileInput: no input of a MiB costs a parser that faces the network more than 50 ms and 4 MiB.
func TestHostileInput(t *testing.T) { // not parallel: it counts what is allocated
	rounds.Slow(t)
	if rounds.Race {
		t.Skip("the race detector takes time and memory of its own")
	}
	ctx := t.Context()
	td := spiffe.MustParseTrustDomain("example.org")
	fixture := spiffetest.NewCA(t, "example.org")
	web := fixture.SVID("/web")
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(web.ID())}}))(t)
	certDER, keyDER := must.Get2(web.MarshalDER())(t)
	certPEM, keyPEM := must.Get2(web.MarshalPEM())(t)

	jwtValidator := must.Get(jwtsvid.NewValidator(fixture.Bundle(), []string{"a"}, nil))(t)
	witValidator := must.Get(witsvid.NewValidator(fixture.Bundle(), spiffe.AllowAnyPeer(), nil))(t)
	authority := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")}))(t)
	caller := authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{ID: web.ID()}, nil })
	istioServer, err := istiocaserver.New(istiocaserver.Options{Signer: authority, Authenticator: caller, AllowPlaintext: true})
	require.NoError(t, err)
	linkerdServer := must.Get(linkerdserver.New(linkerdserver.Options{
		Mesh: linkerdname.Mesh{TrustDomain: "cluster.local", ControlNamespace: "linkerd"}, Signer: authority,
		Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
			return nil, kube.ErrNotAuthenticated
		},
		AllowPlaintext: true,
	}))(t)
	sdsHandler := must.Get(sds.NewHandler(noSecrets{}, nil))(t)
	workload, err := workloadserver.NewHandler(fixed{spiffe.NewSnapshot(web, fixture.Bundles())}, &workloadserver.Options{
		IssueJWTSVID:    func(context.Context, spiffe.ID, []string) (string, error) { return "", workloadserver.ErrDenied },
		ValidateJWTSVID: jwtValidator.ValidateJWTSVID,
	})
	require.NoError(t, err)
	workloadClient := func(call func(*workloadapi.Client)) func([]byte) {
		return receiving(func(c *http.Client) {
			client := must.Get(workloadapi.NewClient("", c))(t)
			call(client)
		})
	}
	const api = "/SpiffeWorkloadAPI/"

	parsers := map[string]func([]byte){
		"spiffe.ParseID":           func(in []byte) { _, _ = spiffe.ParseID(string(in)) },
		"spiffe.ParseTrustDomain":  func(in []byte) { _, _ = spiffe.ParseTrustDomain(string(in)) },
		"spiffe.ParsePolicy":       func(in []byte) { _, _ = spiffe.ParsePolicy(string(in)) },
		"spiffe.ParseBundle":       func(in []byte) { _, _ = spiffe.ParseBundle(td, in) },
		"spiffe.ParseBundleWIT":    func(in []byte) { _, _ = spiffe.ParseBundleWIT(td, in) },
		"spiffe.ParseBundleMap":    func(in []byte) { _, _ = spiffe.ParseBundleMap(in) },
		"spiffe.ParseBundlePEM":    func(in []byte) { _, _ = spiffe.ParseBundlePEM(td, in) },
		"spiffe.ParseSVID":         func(in []byte) { _, _ = spiffe.ParseSVID(in, keyDER) },
		"spiffe.ParseSVID, key":    func(in []byte) { _, _ = spiffe.ParseSVID(certDER, in) },
		"spiffe.ParseSVIDPEM":      func(in []byte) { _, _ = spiffe.ParseSVIDPEM(in, keyPEM) },
		"spiffe.ParseSVIDPEM, key": func(in []byte) { _, _ = spiffe.ParseSVIDPEM(certPEM, in) },
		"pki.ParseCSR":             func(in []byte) { _, _ = pki.ParseCSR(in) },
		"pki.ParseCSRPEM":          func(in []byte) { _, _ = pki.ParseCSRPEM(in) },
		"pki.ParseCertificatesPEM": func(in []byte) { _, _ = pki.ParseCertificatesPEM(in) },
		"pki.ParsePrivateKeyPEM":   func(in []byte) { _, _ = pki.ParsePrivateKeyPEM(in) },
		"jws.Parse":                func(in []byte) { _, _ = jws.Parse(string(in)) },
		"strictjson":               func(in []byte) { strictjson.NewReader(in).Skip() },
		"protofield": func(in []byte) {
			_ = protofield.Read(in, func(f *protofield.Field) { f.Message(func(*protofield.Field) {}) })
		},
		"jwtsvid.ParseUnverified": func(in []byte) { _, _ = jwtsvid.ParseUnverified(string(in)) },
		"jwtsvid.Validate":        func(in []byte) { _, _ = jwtValidator.Validate(string(in)) },
		"witsvid.Validate":        func(in []byte) { _, _ = witValidator.Validate(string(in), string(in), witsvid.Call{}) },
		"authn.Bearer": func(in []byte) {
			_, _ = authn.BearerOverPlaintext(&http.Request{Header: http.Header{"Authorization": {string(in)}}})
		},
		"federation.ParseIstio":  func(in []byte) { _, _ = federation.ParseIstioString(string(in)) },
		"Istio's CA":             sending(istioServer, istiocaserver.CreateCertificate),
		"Linkerd's identity":     sending(linkerdServer, linkerdserver.Certify),
		"SDS":                    sending(sdsHandler, "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"),
		"SDS delta":              sending(sdsHandler, "/envoy.service.secret.v3.SecretDiscoveryService/DeltaSecrets"),
		"SDS fetch":              sending(sdsHandler, "/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets"),
		"Workload API, token":    sending(workload, api+"FetchJWTSVID"),
		"Workload API, validate": sending(workload, api+"ValidateJWTSVID"),
		"Workload API, X.509":    sending(workload, api+"FetchX509Bundles"),
		"a Workload API, SVIDs": workloadClient(func(c *workloadapi.Client) {
			for range c.WatchX509SVIDs(ctx) {
				break
			}
		}),
		"a Workload API, bundles": workloadClient(func(c *workloadapi.Client) {
			for range c.WatchX509Bundles(ctx) {
				break
			}
		}),
		"a Workload API, token bundles": workloadClient(func(c *workloadapi.Client) {
			for range c.WatchJWTBundles(ctx) {
				break
			}
		}),
		"a Workload API, tokens": workloadClient(func(c *workloadapi.Client) { _, _ = c.FetchJWTSVIDs(ctx, spiffe.ID{}, "a") }),
		"a Workload API, claims": workloadClient(func(c *workloadapi.Client) { _, _, _ = c.ValidateJWTSVID(ctx, "a", "t") }),
		"an Istio CA": receiving(func(c *http.Client) {
			client, err := istioca.New(istioca.Options{Endpoint: caclient.Endpoint{URL: "https://ca.test", HTTPClient: c, TrustDomain: td, Roots: fixture.Bundle()}})
			require.NoError(t, err)
			_, _ = client.Sign(ctx, csr, 0)
		}),
		"an SDS server": receiving(func(c *http.Client) {
			for range sds.NewClient(c, "https://sds.test").Watch(ctx, "default") {
				break
			}
		}),
		"an API server": func(in []byte) {
			c := &http.Client{Transport: &answering{func() io.Reader { return bytes.NewReader(in) }, "application/json", nil}}
			reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: "https://kube.test", HTTPClient: c})
			require.NoError(t, err)
			_, _ = reviewer.Review(ctx, "token", []string{"a"})
		},
	}
	inputs := hostile(t)
	usual := time.Hour // for a harmless MiB by encoding/json: about 4 ms where maxTime was set
	harmless := []byte("[" + strings.Repeat("0,", inputSize/2) + "0]")
	for range 20 {
		start := processTime()
		require.True(t, json.Valid(harmless))
		usual = min(usual, processTime()-start)
	}
	maxTime := max(maxTime, 12*usual) // on a slower machine
	var worst struct {
		time   time.Duration
		memory uint64
	}
	for what, parse := range parsers {
		parse(inputs["zeros"]) // what is made once
		for name, in := range inputs {
			var before, after runtime.MemStats
			least, memory := time.Hour, uint64(1<<63)
			for range 30 { // the machine may be busy
				runtime.ReadMemStats(&before)
				start := processTime()
				parse(in)
				least = min(least, processTime()-start)
				runtime.ReadMemStats(&after)
				if memory = min(memory, after.TotalAlloc-before.TotalAlloc); memory <= maxMemory && least <= maxTime {
					break
				}
			}
			assert.LessOrEqual(t, memory, uint64(maxMemory), "%s: %s", what, name)
			assert.LessOrEqual(t, least, maxTime, "%s: %s", what, name)
			worst.time, worst.memory = max(worst.time, least), max(worst.memory, memory)
		}
	}
	t.Logf("%d parsers, %d inputs, at worst %v and %d bytes", len(parsers), len(inputs), worst.time, worst.memory)
}

// fixed is a Provider that always has the same snapshot.
type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }
