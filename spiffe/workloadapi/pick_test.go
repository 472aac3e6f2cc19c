package workloadapi_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// several is a response with an identity for each path and hint, in turn.
func (d domain) several(t testing.TB, pathsAndHints ...string) *wire.X509SVIDResponse {
	t.Helper()
	m := &wire.X509SVIDResponse{}
	for i := 0; i < len(pathsAndHints); i += 2 {
		m.Svids = append(m.Svids, d.message(t, d.SVID(pathsAndHints[i]), pathsAndHints[i+1]))
	}
	return m
}

func pick(t testing.TB, s *workloadapi.Source, c workloadapi.Choice) *workloadapi.Source {
	t.Helper()
	p, err := s.Pick(c)
	require.NoError(t, err)
	return p
}

func TestPick(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := newDomain(t, "example.org")
		only := func(path string) spiffe.Policy {
			return spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org" + path))
		}
		streams := make(feed)
		opened := 0
		s, err := workloadapi.New(workloadapi.Config{Client: inMemory(t, fake(t, func(c *call) { opened++; streams.serve(c) }))})
		require.NoError(t, err)
		type row struct {
			name   string
			choice workloadapi.Choice
			want   [3]string // path in each state; "" for none, with * for the fall-back
			err    string    // in the last state
		}
		rows := []row{
			{"zero", workloadapi.Choice{}, [3]string{"/web", "/web", "/new"}, ""},
			{"hint", workloadapi.Choice{Hint: "internal"}, [3]string{"/db", "/db2", ""}, `not ready: the server has no identity with the hint "internal"; it has "spiffe://example.org/new" with the hint "x", "spiffe://example.org/job" with the hint "batch"`},
			{"hint or default", workloadapi.Choice{Hint: "internal", OrDefault: true}, [3]string{"/db", "/db2", "*/new"}, ""},
			{"policy", workloadapi.Choice{Policy: only("/job")}, [3]string{"/job", "", "/job"}, ""},
			{"policy or default", workloadapi.Choice{Policy: only("/job"), OrDefault: true}, [3]string{"/job", "*/web", "/job"}, ""},
			{"first that the policy allows", workloadapi.Choice{Policy: spiffe.AnyOf(only("/db"), only("/db2"), only("/new"))}, [3]string{"/db", "/db2", "/new"}, ""},
			{"hint and policy", workloadapi.Choice{Hint: "internal", Policy: only("/db")}, [3]string{"/db", "", ""}, `no identity with the hint "internal" and that the policy allows (`},
			{"a hint in other case", workloadapi.Choice{Hint: "Internal"}, [3]string{}, `with the hint "Internal"`},
		}
		picked := make([]*workloadapi.Source, len(rows))
		for i, r := range rows {
			picked[i] = pick(t, s, r.choice)
			_, err := picked[i].SVID()
			require.ErrorIs(t, err, spiffe.ErrNotReady)
			require.ErrorContains(t, err, "neither called Start nor Run", r.name)
		}
		run(t, s)
		states := []*wire.X509SVIDResponse{
			home.several(t, "/web", "", "/db", "internal", "/job", "batch"),
			home.several(t, "/web", "", "/db2", "internal"),
			home.several(t, "/new", "x", "/job", "batch"),
		}
		for n, state := range states {
			streams.send(state)
			synctest.Wait()
			for i, r := range rows {
				p, want := picked[i], r.want[n]
				status := p.Status()
				if want == "" {
					_, err := p.SVID()
					require.ErrorIs(t, err, spiffe.ErrNotReady, r.name)
					if n == len(states)-1 {
						assert.ErrorContains(t, err, r.err, r.name)
					}
					_, err = p.Snapshot()
					require.ErrorIs(t, err, spiffe.ErrNotReady, r.name)
					assert.False(t, status.Ready)
					assert.Zero(t, status.ID)
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					err = p.Ready(ctx)
					cancel()
					require.ErrorIs(t, err, spiffe.ErrNotReady)
					require.ErrorIs(t, err, context.DeadlineExceeded)
				} else {
					snap, err := p.Snapshot()
					require.NoError(t, err, r.name)
					svid, _ := snap.SVID()
					shown := svid.ID().Path()
					if status.Fallback {
						shown = "*" + shown
					}
					assert.Equal(t, want, shown, "%s in state %d", r.name, n)
					assert.Equal(t, svid.ID(), status.ID)
					assert.Equal(t, svid.NotAfter(), status.NotAfter)
					assert.True(t, status.Ready)
					require.NoError(t, p.Ready(t.Context()))
					again, err := p.Snapshot()
					require.NoError(t, err)
					assert.Same(t, snap, again)
				}
				_, err := p.Bundle(home.TrustDomain())
				require.NoError(t, err, "bundles do not depend on the choice")
			}
			assert.False(t, s.Status().Fallback)
		}
		assert.Equal(t, 1, opened, "there is one stream")

		// A renewal of another identity leaves the snapshot as it is.
		before, err := picked[3].Snapshot()
		require.NoError(t, err)
		state := home.several(t, "/new", "x")
		state.Svids = append(state.Svids, states[2].Svids[1])
		streams.send(state)
		synctest.Wait()
		after, err := picked[3].Snapshot()
		require.NoError(t, err)
		assert.Same(t, before, after)

		// What the server takes back, no choice keeps.
		streams.do(func(c *call) { c.end(codePermissionDenied, "gone") })
		synctest.Wait()
		for i, r := range rows {
			_, err := picked[i].SVID()
			require.ErrorIs(t, err, workloadapi.ErrDenied, r.name)
		}
	})
}

// A mistake shows when the program starts.
func TestPickRefuses(t *testing.T) {
	t.Parallel()
	s, err := workloadapi.New(workloadapi.Config{Address: "unix:///nowhere.sock"})
	require.NoError(t, err)
	_, err = s.Pick(workloadapi.Choice{Policy: spiffe.AllowIDs(spiffe.ID{})})
	require.ErrorContains(t, err, "workloadapi: pick: ")
	s, err = workloadapi.New(workloadapi.Config{Address: "unix:///nowhere.sock", BundlesOnly: true})
	require.NoError(t, err)
	_, err = s.Pick(workloadapi.Choice{})
	require.ErrorContains(t, err, "bundles only")
}

// The tokens are those of the identity that was picked.
func TestPickFetch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := newDomain(t, "example.org")
		state := home.several(t, "/web", "", "/db", "internal")
		s, err := workloadapi.New(workloadapi.Config{Client: inMemory(t, fake(t, func(c *call) {
			if c.rpc == "FetchX509SVID" {
				c.send(state)
				c.wait()
				return
			}
			var asked wire.JWTSVIDRequest
			assert.NoError(t, proto.Unmarshal(c.request, &asked))
			m := &wire.JWTSVIDResponse{}
			for _, svid := range state.Svids {
				if asked.SpiffeId == "" || asked.SpiffeId == svid.SpiffeId {
					m.Svids = append(m.Svids, &wire.JWTSVID{SpiffeId: svid.SpiffeId, Svid: "token of " + svid.SpiffeId, Hint: svid.Hint})
				}
			}
			c.send(m)
		}))})
		require.NoError(t, err)
		internal := pick(t, s, workloadapi.Choice{Hint: "internal"})
		none := pick(t, s, workloadapi.Choice{Hint: "none"})
		instead := pick(t, s, workloadapi.Choice{Hint: "none", OrDefault: true})
		for _, running := range []bool{false, true} {
			if running {
				run(t, s)
				synctest.Wait()
			}
			token, err := internal.Fetch(t.Context(), "db")
			require.NoError(t, err)
			assert.Equal(t, "token of spiffe://example.org/db", token)
			_, err = none.Fetch(t.Context(), "db")
			require.ErrorIs(t, err, spiffe.ErrNotReady)
			token, err = instead.Fetch(t.Context(), "db")
			require.NoError(t, err)
			assert.Equal(t, "token of spiffe://example.org/web", token)
		}
	})
}

// Readers that never rest, in real time, of picked identities while the server sends one set after the other: at no
// moment is there nothing, another identity, or a mixture of two sets.
func TestSpinningReadersOfPicked(t *testing.T) {
	rounds.Slow(t)
	duration, enough := 500*time.Millisecond, min(rounds.Of(50), 100)
	if enough > 50 {
		duration = time.Second
	}
	if *long {
		duration = 30 * time.Second
	}
	states := make([]*wire.X509SVIDResponse, 4) // each has roots, leaves and keys of its own
	made := make(map[string]int)                // of which state a leaf or a root is
	var td spiffe.TrustDomain
	for i := range states {
		home := newDomain(t, "example.org")
		td = home.TrustDomain()
		if i%2 == 0 {
			states[i] = home.several(t, "/web", "", "/job", "batch", "/db", "internal")
		} else {
			states[i] = home.several(t, "/db", "internal", "/web", "")
		}
		for _, svid := range states[i].Svids {
			made[string(svid.X509Svid)], made[string(svid.Bundle)] = i, i
		}
	}
	s, err := workloadapi.New(workloadapi.Config{Client: inMemory(t, fake(t, func(c *call) {
		for i := 0; c.ctx.Err() == nil; i++ {
			c.send(states[i%len(states)])
		}
	}))})
	require.NoError(t, err)
	run(t, s)
	require.NoError(t, s.Ready(t.Context()))
	type wanted struct {
		picked *workloadapi.Source
		want   map[string]bool
	}
	var picks []wanted
	for range 200 { // each is picked anew after each change, by whichever reader comes first
		picks = append(picks,
			wanted{pick(t, s, workloadapi.Choice{Hint: "internal"}), map[string]bool{"/db": true}},
			wanted{pick(t, s, workloadapi.Choice{Policy: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/web"))}), map[string]bool{"/web": true}},
			wanted{pick(t, s, workloadapi.Choice{Hint: "batch", OrDefault: true}), map[string]bool{"/job": true, "/db": true}}, // which is the default of the states without it
		)
	}
	var reads, misses, mixtures atomic.Int64
	var stop atomic.Bool
	var all sync.WaitGroup
	for range 3 { // the writer needs its share of a small machine
		all.Go(func() {
			n, seen := int64(0), make([]*spiffe.Snapshot, len(picks))
			for ; !stop.Load(); n++ {
				i := int(n) % len(picks)
				p := picks[i]
				snap, err := p.picked.Snapshot()
				if err != nil {
					misses.Add(1)
					continue
				}
				if snap == seen[i] {
					continue
				}
				seen[i] = snap
				svid, _ := snap.SVID()
				b, err := snap.Bundle(td)
				if err != nil || !p.want[svid.ID().Path()] {
					misses.Add(1)
					continue
				}
				roots := bundleOf(b)
				if from, ok := made[string(svid.Leaf().Raw)]; !ok || len(roots) != 1 || made[string(roots[0])] != from {
					mixtures.Add(1)
				}
			}
			reads.Add(n)
		})
	}
	time.Sleep(duration)
	for end := time.Now().Add(patient); time.Now().Before(end) && s.Status().X509.Updates < uint64(enough); time.Sleep(10 * time.Millisecond) { // on a machine that is busy
	}
	stop.Store(true)
	all.Wait()
	updates := s.Status().X509.Updates
	assert.Zero(t, misses.Load(), "of %d reads while there were %d updates", reads.Load(), updates)
	assert.Zero(t, mixtures.Load())
	assert.GreaterOrEqual(t, updates, uint64(enough))
	assert.Greater(t, reads.Load(), int64(200*enough))
	t.Logf("%d reads, %d updates", reads.Load(), updates)
}

// A service that answers strangers with one identity and calls its own kind with another.
func ExampleSource_Pick() {
	address, stop := agentForExample()
	defer stop()

	src, err := workloadapi.Start(context.Background(), workloadapi.Config{Address: address})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close()
	internal, err := src.Pick(workloadapi.Choice{Hint: "internal", OrDefault: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: internal, Peers: internal, Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db"))})
	if err != nil {
		fmt.Println(err)
		return
	}
	transport, err := endpoint.Transport()
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	defer client.CloseIdleConnections()
	status := internal.Status()
	fmt.Println(status.ID, "instead of another:", status.Fallback)
	// Output: spiffe://example.org/web instead of another: true
}

// A Source that was picked has secrets of its own identity, tells of their changes, and is run and closed by the one it was
// picked from.
func TestPickSecrets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := newDomain(t, "example.org")
		web, db, db2 := home.SVID("/web"), home.SVID("/db"), home.SVID("/db2")
		response := func(db *spiffe.SVID, hint string) *wire.X509SVIDResponse {
			return &wire.X509SVIDResponse{Svids: []*wire.X509SVID{home.message(t, web, ""), home.message(t, db, hint)}}
		}
		streams := make(feed)
		s, err := workloadapi.New(workloadapi.Config{Client: inMemory(t, fake(t, streams.serve))})
		require.NoError(t, err)
		internal := pick(t, s, workloadapi.Choice{Hint: "internal"})
		again, err := internal.Pick(workloadapi.Choice{})
		require.NoError(t, err)
		var all, own told
		s.Subscribe(all.add)
		cancel := internal.Subscribe(own.add)
		require.ErrorContains(t, internal.Run(t.Context()), "was picked from another")
		run(t, s)

		streams.send(response(db, "internal"))
		synctest.Wait()
		isPair(t, s, "default", web)
		isPair(t, again, "default", web)
		isPair(t, internal, "default", db)
		isPair(t, internal, webName, web)
		isRoots(t, internal, "ROOTCA", home)
		assert.ElementsMatch(t, []string{"ALL", "ROOTCA", homeName, "default", webName, dbName}, all.take())
		assert.ElementsMatch(t, []string{"ALL", "ROOTCA", homeName, "default", webName, dbName}, own.take())

		streams.send(response(db2, "internal"))
		synctest.Wait()
		isPair(t, internal, "default", db2)
		assert.ElementsMatch(t, []string{dbName, dbName + "2"}, all.take())
		assert.ElementsMatch(t, []string{"default", dbName, dbName + "2"}, own.take())

		streams.send(response(db2, "other"))
		synctest.Wait()
		assert.Empty(t, all.take())
		assert.ElementsMatch(t, []string{"default", "ROOTCA"}, own.take())
		gone(t, internal, "default")
		var text bytes.Buffer
		require.NoError(t, internal.Report().Metrics(&text))
		assert.Contains(t, text.String(), "svidkit_workloadapi_ready 0\n")

		require.NoError(t, internal.Close())
		streams.send(response(db, "internal"))
		synctest.Wait()
		isPair(t, internal, "default", db)
		assert.NotEmpty(t, own.take())
		cancel()
		streams.send(response(db2, "internal"))
		synctest.Wait()
		assert.Empty(t, own.take())
	})
}
