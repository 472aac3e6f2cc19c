package workloadserver_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

type issuer func(ctx context.Context, id spiffe.ID, audience []string) (string, error)

// later is an error that says when to come back.
type later time.Duration

func (later) Error() string                      { return "kaputt" }
func (l later) Retryable() (time.Duration, bool) { return time.Duration(l), true }

// What an issuer says of a failure decides what the caller is told.
func TestIssuerErrors(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	src := fixed(snapshot(t, home.SVID("/web"), home))
	fails := func(err error) issuer {
		return func(context.Context, spiffe.ID, []string) (string, error) { return "", err }
	}
	narrow := must.Get(jwtsvid.NewIssuer(home.TrustDomain(), "k", workloadtest.NewKey(t), nil))(t)
	authority, err := ca.New(ca.Config{TrustDomain: home.TrustDomain()}) // without JWT
	require.NoError(t, err)
	upstream := func(i issuer) issuer { // an agent's agent
		c := inMemory(t, handler(t, src, &workloadserver.Options{IssueJWTSVID: i}))
		return func(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
			all, err := c.FetchJWTSVIDs(ctx, id, audience...)
			if err != nil {
				return "", err
			}
			return all[0].Token(), nil
		}
	}
	for name, c := range map[string]struct {
		issue    issuer
		audience []string
		code     int
		message  string
		after    time.Duration
	}{
		"two audiences, a default Issuer":    {narrow.IssueJWTSVID, []string{"a", "b"}, workloadtest.InvalidArgument, "issue one token for each", 0},
		"the same of another server":         {upstream(narrow.IssueJWTSVID), []string{"a", "b"}, workloadtest.InvalidArgument, "the issuer refuses the request", 0},
		"a whole trust domain":               {narrow.IssueJWTSVID, []string{"spiffe://example.org"}, workloadtest.InvalidArgument, "name the receiving service", 0},
		"an audience twice":                  {narrow.IssueJWTSVID, []string{"a", "a"}, workloadtest.InvalidArgument, "twice", 0},
		"invalid":                            {fails(fmt.Errorf("not %w", fs.ErrInvalid)), []string{"a"}, workloadtest.InvalidArgument, "not invalid argument", 0},
		"invalid, and not a text":            {fails(fmt.Errorf("\xff %w", fs.ErrInvalid)), []string{"a"}, workloadtest.InvalidArgument, "is not a text", 0},
		"denied":                             {fails(fmt.Errorf("kaputt: %w", workloadserver.ErrDenied)), []string{"a"}, workloadtest.PermissionDenied, `no identity of this caller may have a token for ["a"]; have the audience permitted`, 0},
		"later":                              {fails(fmt.Errorf("x: %w", later(7*time.Second))), []string{"a"}, workloadtest.Unavailable, "cannot issue tokens now; its log says why; try again later", 7 * time.Second},
		"invalid, but later":                 {fails(errors.Join(fs.ErrInvalid, later(7*time.Second))), []string{"a"}, workloadtest.Unavailable, "cannot issue tokens now; its log says why; try again later", 7 * time.Second},
		"later, of another server":           {upstream(fails(later(7 * time.Second))), []string{"a"}, workloadtest.Unavailable, "cannot issue tokens now; its log says why; try again later", 7 * time.Second},
		"never":                              {authority.IssueJWTSVID, []string{"a"}, workloadtest.Unimplemented, "no tokens of this kind are issued here", 0},
		"never, of another server":           {upstream(authority.IssueJWTSVID), []string{"a"}, workloadtest.Unimplemented, "no tokens of this kind are issued here", 0},
		"anything else":                      {fails(errors.New("kaputt")), []string{"a"}, workloadtest.Unavailable, "cannot issue tokens now; its log says why; try again later", 0},
		"audiences that no token could have": {narrow.IssueJWTSVID, []string{strings.Repeat("a", 9<<10)}, workloadtest.InvalidArgument, "8 KiB", 0},
	} {
		raw := http2(t, handler(t, src, &workloadserver.Options{IssueJWTSVID: c.issue}))
		r := post(t, raw, service+"FetchJWTSVID", frame(&wire.JWTSVIDRequest{Audience: c.audience}), header, "true")
		code, message := r.Status()
		assert.Equal(t, c.code, code, name)
		assert.Contains(t, message, c.message, name)
		assert.NotContains(t, message, "kaputt", name)
		if c.after == 0 {
			assert.Empty(t, r.Pushback(), name)
		} else {
			assert.Contains(t, r.Pushback(), fmt.Sprint(c.after.Milliseconds())[:1], name)
		}
	}
}

// A caller that names no identity has tokens of those that may have the audience. If there are none, the answer, the log and the
// error of the client name the audience.
func TestAudienceOfSome(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	web, db, admin := home.SVID("/web"), home.SVID("/db"), home.SVID("/admin")
	var log syncBuffer
	issue := func(_ context.Context, id spiffe.ID, audience []string) (string, error) {
		switch {
		case id == web.ID() || audience[0] == "none":
			return "", fmt.Errorf("the rule says so: %w", workloadserver.ErrDenied)
		case audience[0] == "later" && id == admin.ID():
			return "", later(time.Second)
		}
		return id.Path() + audience[0], nil
	}
	h := handler(t, fixed(snapshot(t, web, home)), &workloadserver.Options{
		Identities: func(context.Context) ([]workloadserver.Identity, error) {
			return []workloadserver.Identity{{SVID: web}, {SVID: db, Hint: "data"}, {SVID: admin}}, nil
		},
		IssueJWTSVID: issue, Logger: workloadtest.Logger(&log),
	})
	c := inMemory(t, h)
	all := must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a"))(t)
	require.Len(t, all, 2)
	assert.Equal(t, "/dba", all[0].Token())
	assert.Equal(t, "data", all[0].Hint)
	assert.Equal(t, "/admina", all[1].Token())
	assert.Empty(t, log.String())

	_, err := c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "later")
	require.ErrorContains(t, err, "cannot issue tokens now", "what fails is not left out")
	for _, id := range []spiffe.ID{web.ID(), {}} {
		_, err = c.FetchJWTSVIDs(t.Context(), id, "none", "other")
		must.Fail(t, err, workloadapi.ErrDenied, `for the audience ["none" "other"]: no token for this caller`)
		assert.ErrorContains(t, err, `have the audience permitted`)
		assert.NotContains(t, err.Error(), "register the workload")
		assert.NotContains(t, err.Error(), "no identity for this caller")
	}
	assert.Contains(t, log.String(), `reason=audience`)
	assert.Contains(t, log.String(), `for [\"none\" \"other\"]: the rule says so`)
	assert.Contains(t, log.String(), "id=spiffe://example.org/web")
	_, err = c.FetchJWTSVIDs(t.Context(), spiffe.MustParseID("spiffe://example.org/other"), "a")
	require.ErrorContains(t, err, "register the workload", "which is not one of the caller's")
	var metrics strings.Builder
	require.NoError(t, h.Report().Metrics(&metrics))
	assert.Contains(t, metrics.String(), `svidkit_workloadserver_refused_requests_total{reason="audience"} 2`)
}

// An Authority with its usual configuration answers for one audience, refuses two, and says when to come back
// when it has a limit.
func TestAuthorityIssues(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		authority, err := ca.New(ca.Config{TrustDomain: home.TrustDomain(), JWT: &ca.JWTConfig{}, Limits: ca.Limits{CallerRate: 0.1, CallerBurst: 1}})
		require.NoError(t, err)
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{IssueJWTSVID: authority.IssueJWTSVID})
		c := inMemory(t, h)
		_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a", "b")
		must.Fail(t, err, workloadapi.ErrRefused, "ask for one token for each")
		must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a"))(t)
		_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")
		require.ErrorContains(t, err, "status unavailable")
		e, ok := errors.AsType[*workloadapi.Error](err)
		require.True(t, ok)
		after, again := e.Retryable()
		assert.True(t, again)
		assert.InDelta(t, 10*time.Second, after, float64(time.Second))
	})
}

// A first WIT-SVID that is refused as a mistake is no reason to come back.
func TestWITRefused(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	w := newWITs(t, home)
	w.err[""] = fmt.Errorf("no such hint: %w", fs.ErrInvalid)
	c := inMemory(t, handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{IssueWITSVID: w.IssueWITSVID}))
	for _, err := range c.WatchWITSVIDs(t.Context(), spiffe.ID{}) {
		must.Fail(t, err, workloadapi.ErrRefused, "no such hint")
		e, _ := errors.AsType[*workloadapi.Error](err)
		assert.True(t, e.Final)
	}
}
