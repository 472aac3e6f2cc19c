package peers_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// answer waits for an agent, and returns the identity that a new stream has of it, and when that was. One with less
// than 30 seconds left is overdue: the agent is about to replace it.
func answer(ctx context.Context, address string) (*spiffe.SVID, time.Time) {
	for ; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		c, err := workloadapi.NewClient(address, nil)
		if err != nil {
			break
		}
		for u, err := range c.WatchX509SVIDs(ctx) {
			if err != nil {
				break
			}
			if svid := u.Identities[0].SVID; time.Until(svid.NotAfter()) > 30*time.Second {
				return svid, time.Now()
			}
		}
		c.CloseIdleConnections()
	}
	return nil, time.Time{}
}

// outages are what happens to a SPIRE while two workloads do their work.
type outages struct {
	t         *testing.T
	s         *peers.SPIRE
	workloads []*workload
	slowest   time.Duration // from the first answer of an agent that is back to the identity in a workload
	count     int
}

// outage takes the agent away at some moment for up to 27 seconds. A source that is started during the outage has its
// identity as soon as the others.
func (o *outages) outage(away, back func()) {
	t := o.t
	t.Helper()
	time.Sleep(rand.N(3 * time.Second))
	o.until("a certificate with 30 s left, as SPIRE replaces it then", func(w *workload) bool {
		return time.Until(must.Get(w.SVID())(t).NotAfter()) > 30*time.Second
	})
	lasts := 15*time.Second + rand.N(12*time.Second)
	away()
	begin := time.Now()
	time.Sleep(lasts / 2)
	late := must.Get(workloadapi.New(workloadapi.Config{Address: o.s.WorkloadAPI(), JWTBundles: true}))(t)
	var running sync.WaitGroup
	running.Go(func() { _ = late.Run(t.Context()) })
	defer running.Wait()
	defer func() { _ = late.Close() }()
	time.Sleep(time.Until(begin.Add(lasts)))

	var svid *spiffe.SVID
	var at time.Time
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var answered sync.WaitGroup
	answered.Go(func() { svid, at = answer(ctx, o.s.WorkloadAPI()) })
	back()
	answered.Wait()
	require.NotNil(t, svid, "the agent is not back")
	for i, src := range []*workloadapi.Source{o.workloads[0].Source, o.workloads[1].Source, late} {
		for {
			changed := src.Changed()
			now, err := src.SVID()
			if err == nil && !now.Leaf().NotBefore.Before(svid.Leaf().NotBefore) {
				break
			}
			select {
			case <-changed:
			case <-ctx.Done():
				t.Fatalf("source %d has no new identity: %v", i, err)
			}
		}
	}
	require.NoError(t, late.Ready(ctx))
	t.Logf("an outage of %v: %v after the first answer all have the identity of the agent", at.Sub(begin),
		time.Since(at))
	o.slowest = max(o.slowest, time.Since(at))
	o.count++
}

// until waits for what all workloads see.
func (o *outages) until(what string, ok func(*workload) bool) {
	o.t.Helper()
	for _, w := range o.workloads {
		eventually(o.t, what, func() bool { return ok(w) })
	}
}

// rotate has SPIRE sign with a new CA and a new key for JWT-SVIDs. What it returns revokes the old CA, once no
// workload has a certificate of it: an agent may deny the identity for some milliseconds while it replaces tainted
// certificates.
func (o *outages) rotate() (revoke func()) {
	t, s := o.t, o.s
	old := must.Get(o.workloads[0].SVID())(t).Leaf().AuthorityKeyId
	roots := func(n int) func(w *workload) bool {
		return func(w *workload) bool {
			return len(slices.Collect(must.Get(w.Bundle(s.TrustDomain))(t).X509Authorities())) == n
		}
	}
	for _, step := range []string{"prepare", "activate"} {
		for _, kind := range []string{"x509", "jwt"} {
			s.LocalAuthority(t, kind, step)
		}
		o.until("both roots", roots(2))
	}
	return func() {
		o.until("certificates of the new root", func(w *workload) bool {
			return !bytes.Equal(must.Get(w.SVID())(t).Leaf().AuthorityKeyId, old)
		})
		s.LocalAuthority(t, "x509", "taint")
		s.LocalAuthority(t, "x509", "revoke")
		o.until("without the old root", roots(1))
	}
}

// TestSPIREOutages has two workloads of a real SPIRE with certificates of a minute shake hands, and one verify the
// tokens of the other, each 100 ms, while the agent is stopped and killed for up to 27 s, the server is started again
// and the CA is replaced. The source of go-spiffe does the same beside, and does not fail the test.
func TestSPIREOutages(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{CATTL: 3 * time.Hour})
	// The agent gives out a token that it has until half of its life is over, and the cache asks again when half of what
	// is then left is over: a quarter, less a tenth, must be longer than an outage.
	s.Register(t, "/web", "-jwtSVIDTTL", "150")
	o := &outages{t: t, s: s, workloads: []*workload{newWorkload(t, s, s.TrustDomain),
		newWorkload(t, s, s.TrustDomain)}}
	cache := must.Get(jwtsvid.NewCache(o.workloads[0], nil))(t)
	validator := must.Get(jwtsvid.NewValidator(o.workloads[1], []string{"db"},
		&jwtsvid.ValidatorOptions{Leeway: new(time.Duration)}))(t)
	peer := must.Get(peerapi.NewX509Source(t.Context(),
		peerapi.WithClientOptions(peerapi.WithAddr(s.WorkloadAPI()))))(t)
	t.Cleanup(func() { _ = peer.Close() })
	same := tlsconfig.AuthorizeMemberOf(spiffeid.RequireTrustDomainFromString(s.TrustDomain.String()))
	peerClient := tlsconfig.MTLSClientConfig(peer, peer, same)
	peerServer := tlsconfig.MTLSServerConfig(peer, peer, same)
	peerServer.SessionTicketsDisabled = true

	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer func() { cancel(); all.Wait() }()
	all.Go(func() { _ = cache.Run(ctx) })
	ours := []*beats{
		beat(ctx, &all, "handshakes", func() error {
			return handshake(o.workloads[0].client, o.workloads[1].server)
		}),
		beat(ctx, &all, "tokens", func() error {
			token, err := cache.Fetch(ctx, "db")
			if err == nil {
				_, err = validator.Validate(token)
			}
			return err
		}),
	}
	judge := beat(ctx, &all, "handshakes of go-spiffe", func() error { return handshake(peerClient, peerServer) })

	// The CA does not rotate by its age, as an agent that is killed and was away when the server prepared a CA has not
	// stored it: after a second kill it trusts the server no more.
	for begin, round := time.Now(), 0; round == 0 || *long && time.Since(begin) < 30*time.Minute; round++ {
		revoke := func() {}
		if round%3 == 0 {
			revoke = o.rotate()
		}
		o.outage(func() { s.Agent.Signal(t, syscall.SIGSTOP) }, func() { s.Agent.Signal(t, syscall.SIGCONT) })
		s.Server.Kill()
		time.Sleep(rand.N(2 * time.Second))
		s.StartServer(t)
		o.outage(s.Agent.Kill, func() { s.StartAgent(t) })
		revoke()
	}
	cancel()
	all.Wait()
	t.Logf("%v; %v; %v; %d outages, a new identity after %v at most", ours[0], ours[1], judge, o.count, o.slowest)
	for _, b := range ours {
		assert.Empty(t, b.failed, b.what)
	}
	assert.Less(t, o.slowest, time.Second)
}
