package workloadagent_test

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// owned says which identities a Source has been told of.
func owned(m *secretcache.Manager) (paths []string) {
	for _, one := range m.Report().Identities {
		if id, err := spiffe.ParseID(one.Name); err == nil {
			paths = append(paths, id.Path())
		}
	}
	slices.Sort(paths)
	return paths
}

// A version of the file that is refused leaves nothing behind: no identity that it alone has is asked for, and those in force
// are kept, also those that it has, too.
func TestRefusedVersionLeavesNothing(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	m, err := secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	p := newPlace(t)
	wantsTokens := `"files": [{"folder": "` + filepath.Join(p.dir, "out") + `", "tokens": {"db.token": "db"}}]` // of an agent that has none
	bad := me(id("/web"), id("/new", wantsTokens), id("/newer"))
	p.write(bad)
	_, err = workloadagent.New(workloadagent.Config{File: p.file, Source: m, TrustDomain: exampleOrg})
	require.ErrorContains(t, err, "is to have tokens, and the CA of this agent issues none: take them out")
	require.Empty(t, owned(m), "the first version")

	p.write(me(id("/web"), id("/old")))
	p.run(workloadagent.Config{Source: m, TrustDomain: exampleOrg}, m.Run)
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)
	updates, errs := p.updates()
	first := next(t, updates)
	require.Equal(t, "/web /old", told(first))

	for range 2 {
		p.write(bad)
		require.Eventually(t, func() bool { return p.agent.Report().Upstreams[0].Err != nil }, passing, often)
		assert.Equal(t, []string{"/old", "/web"}, owned(m))

		p.write(me(id("/web"), id("/old")), me(id("/web")))
		require.Eventually(t, func() bool { return p.agent.Report().Upstreams[0].Err == nil }, passing, often, "it is good again")
		assert.Equal(t, []string{"/old", "/web"}, owned(m))
	}
	p.write(me(id("/web"), id("/newer")))
	require.Eventually(t, func() bool { return slices.Equal([]string{"/newer", "/web"}, owned(m)) }, passing, often)
	u := first
	for told(u) != "/web /newer" {
		u = next(t, updates)
		require.Equal(t, first.Identities[0].SVID.Leaf(), u.Identities[0].SVID.Leaf(), "it was kept all the time")
	}
	noneDenied(t, errs)
}

// deltaStream is one of an Envoy, which takes all that comes.
type deltaStream struct {
	t      *testing.T
	stream *grpchttp.Stream
	has    map[string]bool // by name: whether it is there, or was removed
}

func (p *place) delta(t *testing.T, names ...string) *deltaStream {
	c := sds.UnixClient(p.sock)
	t.Cleanup(c.CloseIdleConnections)
	ctx, cancel := context.WithTimeoutCause(t.Context(), passing, errors.New("the test has waited long enough"))
	t.Cleanup(cancel)
	d := &deltaStream{t, grpchttp.NewClient(c, "http://localhost", 1<<20).Open(ctx, "/envoy.service.secret.v3.SecretDiscoveryService/DeltaSecrets", nil), map[string]bool{}}
	t.Cleanup(func() { _ = d.stream.Close() })
	d.send(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: names})
	return d
}

func (d *deltaStream) send(r *envoysds.DeltaDiscoveryRequest) {
	require.NoError(d.t, d.stream.Send(must.Get(proto.Marshal(r))(d.t)))
}

// until reads until the stream has what is wanted.
func (d *deltaStream) until(want map[string]bool) {
	d.t.Helper()
	for !maps.Equal(want, d.has) {
		message := must.Get(d.stream.Receive())(d.t, "wanted %v, has %v", want, d.has)
		var r envoysds.DeltaDiscoveryResponse
		require.NoError(d.t, proto.Unmarshal(message, &r))
		for _, one := range r.GetResources() {
			d.has[one.GetName()] = true
		}
		for _, name := range r.GetRemovedResources() {
			d.has[name] = false
		}
		d.send(&envoysds.DeltaDiscoveryRequest{ResponseNonce: r.GetNonce()})
	}
}

// Open streams of SDS are judged again when the file changes, without a new certificate: what is granted comes, what "default"
// is follows, and what is withdrawn is told so.
func TestFileChangesOpenStreams(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	const web, late, roots, hint = "spiffe://example.org/web", "spiffe://example.org/late", "ROOTCA", "late.example"
	other := `{"match": {"uid": 4000000}, "identities": [` + id("/web") + `, ` + id("/late") + `]}` // so that each is always there
	p := newPlace(t, other, me(id("/web"))).serve(time.Hour)
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)

	ctx, cancel := context.WithCancel(t.Context())
	defaults, done := make(chan string, 100), make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		c := sds.UnixClient(p.sock)
		defer c.CloseIdleConnections()
		for s, err := range sds.NewClient(c, "http://localhost").Watch(ctx, "default") {
			if err != nil {
				continue
			}
			if certs, key, ok := s.KeyPair(); ok {
				if svid, err := spiffe.ParseSVIDPEM(certs, key); err == nil {
					defaults <- svid.ID().Path()
				}
			}
		}
	}()
	require.Equal(t, "/web", next(t, defaults))
	d := p.delta(t, "default", web, late, hint, roots)
	d.until(map[string]bool{"default": true, web: true, late: false, hint: false, roots: true})

	p.write(other, me(id("/late", `"hint": "`+hint+`"`)))
	require.Equal(t, "/late", next(t, defaults))
	d.until(map[string]bool{"default": true, web: false, late: true, hint: true, roots: true})

	p.write(other)
	d.until(map[string]bool{"default": false, web: false, late: false, hint: false, roots: false})
	require.Empty(t, defaults, "in SotW there is no word for it")

	p.write(other, me(id("/web"), id("/late")))
	require.Equal(t, "/web", next(t, defaults))
	d.until(map[string]bool{"default": true, web: true, late: true, hint: false, roots: true})
}
