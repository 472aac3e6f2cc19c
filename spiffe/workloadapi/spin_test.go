package workloadapi_test

import (
	"crypto/ecdsa"
	"flag"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var long = flag.Bool("long", false, "readers spin for 30 s")

// Eight readers that never rest, in real time: at no moment of a rotation is there nothing, or a mixture of two
// states. In virtual time readers and writer never meet.
func TestSpinningReaders(t *testing.T) {
	rounds.NotShort(t)
	duration := time.Duration(rounds.Of(rounds.Of(25))) * time.Millisecond
	if *long {
		duration = 30 * time.Second
	}
	states := make([]*wire.X509SVIDResponse, 3) // each has roots, leaf and keys of its own
	jwts := make([]*wire.JWTBundlesResponse, len(states))
	var td spiffe.TrustDomain
	for i := range states {
		home := workloadtest.NewDomain(t, "example.org")
		td = home.TrustDomain()
		states[i] = response(t, home, home.SVID("/web"), workloadtest.NewDomain(t, "other.test"))
		states[i].Crl = [][]byte{{byte(i)}}
		jwts[i] = &wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): jwks(t, nil, &workloadtest.NewKey(t).PublicKey)}}
	}
	s := must.Get(workloadapi.New(workloadapi.Config{JWTBundles: true, Client: inMemory(t, fake(t, func(c *call) {
		for i := 0; c.ctx.Err() == nil; i++ {
			switch {
			case c.rpc == "FetchJWTBundles":
				c.send(jwts[i%len(jwts)])
			case i%20 == 19:
				c.sendRaw([]byte("junk"))
			default:
				c.send(states[i%len(states)])
			}
			c.sleep(time.Millisecond)
		}
	}))}))(t)
	workloadtest.Run(t, s)
	require.NoError(t, s.Ready(t.Context()))

	var reads, misses, mixtures atomic.Int64
	var stop atomic.Bool
	var last atomic.Pointer[spiffe.Snapshot] // each is looked at once
	count := func(ok bool, n *atomic.Int64) {
		if !ok {
			n.Add(1)
		}
	}
	readers := []func(){
		func() {
			svid, err := s.SVID()
			count(err == nil && svid != nil, &misses)
		},
		func() {
			snap, err := s.Snapshot()
			if err != nil || snap == nil {
				misses.Add(1)
				return
			}
			if last.Swap(snap) == snap {
				return
			}
			svid, _ := snap.SVID()
			b, err := snap.Bundle(td)
			if err != nil {
				misses.Add(1)
				return
			}
			signer, _ := svid.Signer().Public().(*ecdsa.PublicKey)
			own := signer != nil && signer.Equal(svid.Leaf().PublicKey)
			rooted := false
			for root := range b.X509Authorities() {
				rooted = rooted || svid.Leaf().CheckSignatureFrom(root) == nil
			}
			count(own && rooted, &mixtures)
		},
		func() {
			b, err := s.Bundle(td)
			if err != nil {
				misses.Add(1)
				return
			}
			c := b.Contents()
			count(len(c.X509Authorities) == 1 && len(c.JWTAuthorities) == 1, &mixtures)
		},
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			n := int64(0)
			for !stop.Load() {
				for range 1000 {
					readers[i%len(readers)]()
				}
				runtime.Gosched() // to the updates
				n += 1000
			}
			reads.Add(n)
		})
	}
	time.Sleep(duration)
	updates := uint64(rounds.Of(40))
	for end := time.Now().Add(patient); time.Now().Before(end); time.Sleep(5 * time.Millisecond) { // on a machine that is busy
		if st := s.Status(); st.X509.Updates >= updates && st.JWT.Updates >= updates {
			break
		}
	}
	stop.Store(true)
	all.Wait()
	st := s.Status()
	assert.Zero(t, misses.Load(), "of %d reads while there were %d updates", reads.Load(), st.X509.Updates)
	assert.Zero(t, mixtures.Load())
	assert.GreaterOrEqual(t, st.X509.Updates, updates)
	assert.GreaterOrEqual(t, st.JWT.Updates, updates)
	assert.Greater(t, reads.Load(), int64(rounds.Of(2_500)))
	t.Logf("%d reads, %d and %d updates", reads.Load(), st.X509.Updates, st.JWT.Updates)
}
