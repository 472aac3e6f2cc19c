package workloadagent_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// until reads updates until one has these identities.
func until(t *testing.T, updates <-chan *workloadapi.Update, want string) *workloadapi.Update {
	t.Helper()
	for {
		if u := next(t, updates); told(u) == want {
			return u
		}
	}
}

// only returns what the only file of a pattern has, or why it cannot be read.
func only(pattern string) string {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) != 1 {
		return fmt.Sprintf("%d files: %v", len(files), err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// An identity that comes late, goes and comes again is told on an open stream, beside the others of its caller, which keep their
// certificates.
func TestIdentitiesComeAndGo(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	home := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, home, "/web")
	src := must.Get(workloadapi.New(api.Config()))(t)
	p := newPlace(t, me(id("/zebra", `"hint": "a"`), id("/web")))
	p.run(workloadagent.Config{Source: upstream{src, sdssource.FromIdentity(src)}}, src.Run)
	updates, errs := p.updates()
	web := until(t, updates, "/web").Identities[0].SVID.Leaf()
	require.ErrorContains(t, p.agent.Report().Problems[0], "spiffe://example.org/zebra")
	current := func() workloadserver.Identity {
		snap := api.Snapshot()
		return workloadserver.Identity{SVID: must.Get(snap.SVID())(t)}
	}()
	for range 2 {
		api.SetIdentities(current, workloadserver.Identity{SVID: home.SVID("/zebra")})
		u := until(t, updates, "/zebraa /web")
		assert.Equal(t, web, u.Identities[1].SVID.Leaf())
		require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)

		api.SetIdentities(current)
		u = until(t, updates, "/web")
		assert.Equal(t, web, u.Identities[0].SVID.Leaf())
		require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 1 }, passing, often)
		assert.ErrorIs(t, p.agent.Report().Problems[0], workloadserver.ErrDenied)
	}
	noneDenied(t, errs)
}

// New bundles come without a new certificate, to callers and into files.
func TestBundlesAlone(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	home := spiffetest.NewCA(t, "example.org")
	m := must.Get(secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: home}))(t)
	p := newPlace(t)
	out := filepath.Join(p.dir, "out")
	p.write(me(id("/web", `"files": [{"folder": "`+out+`"}]`)))
	p.run(workloadagent.Config{Source: m, TrustDomain: exampleOrg}, m.Run)
	updates, errs := p.updates()
	first := until(t, updates, "/web")
	require.Equal(t, 1, first.Bundles.Len())
	for n := range 3 {
		partner := fmt.Sprintf("partner-%d.test", n)
		home.Federate(spiffetest.NewCA(t, partner).Bundle())
		u := next(t, updates)
		for u.Bundles.Len() < n+2 {
			u = next(t, updates)
		}
		assert.Equal(t, first.Identities[0].SVID.Leaf(), u.Identities[0].SVID.Leaf())
		require.Eventually(t, func() bool {
			return strings.Contains(only(filepath.Join(out, partner+".spiffe-trust-bundle*.pem")), "CERTIFICATE")
		}, passing, often)
	}
	noneDenied(t, errs)
}

// The bundles for callers are the same in each order of a map, so that nothing is told when nothing has changed.
func TestNothingChanges(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	home := spiffetest.NewCA(t, "example.org")
	m := must.Get(secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: home}))(t)
	var other []string
	for n := range 30 {
		other = append(other, id(fmt.Sprint("/other-", n)))
	}
	others := `{"match": {"uid": 4000000}, "identities": [` + strings.Join(other, ", ") + `]}`
	p := newPlace(t, others, me(id("/web")))
	p.run(workloadagent.Config{Source: m, TrustDomain: exampleOrg}, m.Run)
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)
	updates, _ := p.updates()
	until(t, updates, "/web")
	c := p.client()
	bundles, done := make(chan *workloadapi.Update, 100), make(chan struct{})
	go func() {
		defer close(done)
		for u, err := range c.WatchX509Bundles(t.Context()) {
			if err == nil {
				bundles <- u
			}
		}
	}()
	t.Cleanup(func() { <-done })
	next(t, bundles)
	for range 10 { // looks at all identities again
		p.write(others, me(id("/web")))
		p.write(others, me(id("/web")), `{"match": {"uid": 4000001}, "identities": [`+id("/web")+`]}`)
	}
	home.Federate(spiffetest.NewCA(t, "partner.test").Bundle())
	for u := next(t, bundles); u.Bundles.Len() != 2; u = next(t, bundles) {
		require.Fail(t, "the bundles were told again, and are the same")
	}
}

// A directory that the file has no more is written no more, and one that it has in another form is written in that form alone. One
// that stays keeps its writer.
func TestFoldersChange(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	home := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, home, "/web")
	src := must.Get(workloadapi.New(api.Config()))(t)
	p := newPlace(t)
	folder := func(name string) string { return filepath.Join(p.dir, name) }
	files := func(form string, names ...string) string {
		var all []string
		for _, name := range names {
			all = append(all, `{"folder": "`+folder(name)+`"`+form+`}`)
		}
		return `"files": [` + strings.Join(all, ", ") + `]`
	}
	const delivery, split = "credential-bundle*.pem", "key.pem"
	read := func(folderName, name string) string { return only(filepath.Join(folder(folderName), name)) }
	p.write(me(id("/web", files("", "stays", "goes", "changes"))))
	p.run(workloadagent.Config{Source: upstream{src, sdssource.FromIdentity(src)}}, src.Run)
	for _, name := range []string{"stays", "goes", "changes"} {
		require.Eventually(t, func() bool { return strings.Contains(read(name, delivery), "CERTIFICATE") }, passing, often)
	}
	sinks := func() int { return len(p.agent.Report().Upstreams) - 1 }
	require.Equal(t, 3, sinks())

	p.write(me(id("/web", strings.TrimSuffix(files("", "stays"), "]")+", "+strings.TrimPrefix(files(`, "layout": "split", "mode": "0400", "key_mode": "0400"`, "changes"), `"files": [`))))
	require.Eventually(t, func() bool { return strings.Contains(read("changes", split), "PRIVATE KEY") }, passing, often)
	require.Equal(t, 2, sinks())
	gone, old := read("goes", delivery), "0 files: <nil>"
	require.Eventually(t, func() bool { return read("changes", delivery) == old }, passing, often)
	for range 5 {
		stays, changes := read("stays", delivery), read("changes", split)
		api.Rotate()
		require.Eventually(t, func() bool { return read("stays", delivery) != stays && read("changes", split) != changes }, passing, often)
		require.Equal(t, gone, read("goes", delivery), "it stays as it was")
		require.Equal(t, old, read("changes", delivery), "what is no part of the new form is written no more")
	}
	mode := func(path ...string) fs.FileMode {
		files := must.Get(filepath.Glob(filepath.Join(path...)))(t)
		require.Len(t, files, 1)
		return must.Get(os.Stat(files[0]))(t).Mode().Perm()
	}
	assert.Equal(t, fs.FileMode(0o400), mode(folder("changes"), split))
	assert.Equal(t, fs.FileMode(0o600), mode(folder("stays"), delivery))

	// The mode of what all may read is not that of the key.
	p.write(me(id("/web", files(`, "layout": "split", "mode": "0644"`, "modes"))))
	for _, name := range []string{split, "cert-chain.pem", "root-cert.pem"} {
		require.Eventually(t, func() bool { return strings.Contains(read("modes", name), "BEGIN") }, passing, often, name)
	}
	assert.Equal(t, fs.FileMode(0o600), mode(folder("modes"), split))
	assert.Equal(t, fs.FileMode(0o644), mode(folder("modes"), "cert-chain.pem"))
	assert.Equal(t, fs.FileMode(0o644), mode(folder("modes"), "root-cert.pem"))

	p.write(me(id("/web")))
	require.Eventually(t, func() bool { return sinks() == 0 }, passing, often)
	p.write(me(id("/web", files("", "goes"))))
	require.Eventually(t, func() bool { return sinks() == 1 && read("goes", delivery) != gone }, passing, often, "and it is written again")
}

// A directory that stays in the file keeps its writer: nothing is fetched anew for it.
func TestFoldersStay(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	m, err := secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	authority := must.Get(ca.New(ca.Config{TrustDomain: exampleOrg, JWT: &ca.JWTConfig{}}))(t)
	var issued atomic.Int32
	p := newPlace(t)
	files := `"files": [{"folder": "` + filepath.Join(p.dir, "out") + `", "tokens": {"db.token": "db"}}]`
	p.write(me(id("/web", files)))
	p.run(workloadagent.Config{
		Source: m, TrustDomain: exampleOrg,
		IssueJWTSVID: func(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
			issued.Add(1)
			return authority.IssueJWTSVID(ctx, id, audience)
		},
	}, m.Run)
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(p.dir, "out", "db.token")); return err == nil }, passing, often)
	require.EqualValues(t, 1, issued.Load())
	updates, _ := p.updates()
	until(t, updates, "/web")
	for n := range 3 {
		more := id(fmt.Sprint("/more-", n))
		p.write(me(id("/web", files), more))
		until(t, updates, fmt.Sprint("/web /more-", n))
	}
	second := strings.ReplaceAll(files, "out", "second")
	p.write(me(id("/web", files), id("/more", second)))
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(p.dir, "second", "db.token")); return err == nil }, passing, often)
	assert.EqualValues(t, 2, issued.Load(), "one for each directory")
}

// A token is for audiences that the file permits all of, for the identity that it is for, and no others.
func TestAudiencesOfTokens(t *testing.T) {
	t.Parallel()
	p := newPlace(t, me(id("/web", `"audiences": ["db", "cache"]`), id("/any", `"audiences": ["*"]`), id("/none")), me(id("/web", `"audiences": ["more"]`)))
	p.serve(time.Hour)
	require.Eventually(t, func() bool { return len(p.agent.Report().Problems) == 0 }, passing, often)
	c := p.client()
	for path, audiences := range map[string]map[string]bool{
		"/web":  {"db": true, "cache": true, "more": true, "db cache more": true, "db bank": false, "bank db": false, "bank": false, "*": false, "db *": false},
		"/any":  {"db": true, "bank": true, "bank db": true, "*": true},
		"/none": {"db": false, "*": false},
	} {
		for audience, want := range audiences {
			of := spiffe.MustParseID("spiffe://example.org" + path)
			tokens, err := c.FetchJWTSVIDs(t.Context(), of, strings.Fields(audience)...)
			switch {
			case !want:
				assert.ErrorIs(t, err, workloadapi.ErrDenied, "%s for %s", path, audience)
			case strings.Contains(audience, " "): // of which this CA issues none
				assert.Error(t, err)
				assert.NotErrorIs(t, err, workloadapi.ErrDenied, "%s for %s", path, audience)
			case assert.NoError(t, err, "%s for %s", path, audience):
				require.Len(t, tokens, 1)
				assert.Equal(t, of, tokens[0].ID)
			}
		}
	}
}

// A file without identities is in force at once, and the report says of each file and identity what is wrong, as long as it is.
func TestReportOfAgent(t *testing.T) {
	t.Parallel()
	m, err := secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	p := newPlace(t)
	p.run(workloadagent.Config{Source: m, TrustDomain: exampleOrg}, m.Run)
	ctx, cancel := context.WithTimeout(t.Context(), passing)
	defer cancel()
	require.NoError(t, p.agent.Ready(ctx), "nothing is waited for")
	require.NoError(t, p.agent.Report().NotReady)
	good := p.agent.Report().Upstreams[0].LastSuccess
	require.False(t, good.IsZero())
	refused := func() string {
		var metrics strings.Builder
		require.NoError(t, p.agent.Report().Metrics(&metrics))
		for line := range strings.Lines(metrics.String()) {
			if value, ok := strings.CutPrefix(line, "svidkit_workloadagent_file_refused "); ok {
				return strings.TrimSpace(value)
			}
		}
		return "missing"
	}
	for range 2 {
		require.Equal(t, "0", refused())
		p.raw(`{"workloads": [}`)
		require.Eventually(t, func() bool { return p.agent.Report().Upstreams[0].Err != nil }, passing, often)
		require.Equal(t, "1", refused())
		require.False(t, p.agent.Report().Upstreams[0].OK)
		p.write()
		require.Eventually(t, func() bool { return p.agent.Report().Upstreams[0].OK }, passing, often, "and it is good again")
		require.NoError(t, p.agent.Report().Upstreams[0].Err)
	}
	require.True(t, p.agent.Report().Upstreams[0].LastSuccess.After(good))

	var waiting []string
	for n := range 12 {
		waiting = append(waiting, id(fmt.Sprint("/waits-", n)))
	}
	down := spiffetest.NewCA(t, "example.org")
	down.FailNext(1<<30, errors.New("away"))
	refusing := must.Get(secretcache.New(secretcache.Config{TrustDomain: exampleOrg, CA: down}))(t)
	other := newPlace(t, me(waiting...))
	other.run(workloadagent.Config{Source: refusing, TrustDomain: exampleOrg}, refusing.Run)
	require.ErrorIs(t, other.agent.Report().NotReady, spiffe.ErrNotReady)
	problems := other.agent.Report().Problems
	require.Len(t, problems, 10, "and no more")
	for i, want := range []string{"/waits-0 ", "/waits-1 ", "/waits-10 ", "/waits-11 ", "/waits-2 "} {
		require.ErrorContains(t, problems[i], want, "in order")
	}
}

// noneDenied checks that a stream was told nothing that takes identities away.
func noneDenied(t *testing.T, errs <-chan error) {
	t.Helper()
	for {
		select {
		case err := <-errs:
			require.NotErrorIs(t, err, workloadapi.ErrDenied)
			t.Logf("a stream began anew: %v", err)
		default:
			return
		}
	}
}
