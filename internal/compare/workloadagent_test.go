package compare

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// serveMachine runs our agent for a machine, whose file has two identities for this user. write replaces the file.
func serveMachine(t *testing.T) (address string, write func(identities string)) {
	t.Helper()
	td := spiffe.MustParseTrustDomain("example.org")
	authority := must.Get(ca.New(ca.Config{TrustDomain: td, JWT: &ca.JWTConfig{}}))(t)
	issuer, err := local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) { return csr.ID() })
	require.NoError(t, err)
	m := must.Get(secretcache.New(secretcache.Config{TrustDomain: td, CA: issuer}))(t)
	validator := must.Get(jwtsvid.NewAgentValidator(m, nil))(t)
	s := &unixsocket.Server{Path: socket(t)}
	file := filepath.Join(filepath.Dir(s.Path), "workloads.json")
	write = func(identities string) {
		data := fmt.Appendf(nil, `{"workloads": [{"match": {"uid": %d}, "identities": [%s]}]}`, os.Getuid(), identities)
		require.NoError(t, os.WriteFile(file, data, 0o600))
	}
	write(`{"id": "spiffe://example.org/web", "hint": "internal", "audiences": ["db"]}, {"id": "spiffe://example.org/batch"}`)
	agent, err := workloadagent.New(workloadagent.Config{
		File: file, Source: m, TrustDomain: td, IssueJWTSVID: authority.IssueJWTSVID, ValidateJWTSVID: validator.ValidateJWTSVID,
	})
	require.NoError(t, err)
	s.Handler = agent
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 3)
	for _, run := range []func(context.Context) error{m.Run, agent.Run, s.Run} {
		go func() { done <- run(ctx) }()
	}
	t.Cleanup(func() {
		assert.NoError(t, agent.Close())
		cancel()
		for range 3 {
			assert.NoError(t, <-done)
		}
	})
	require.Eventually(t, func() bool { return len(agent.Report().Problems) == 0 }, time.Minute, 10*time.Millisecond)
	return "unix://" + s.Path, write
}

// TestMachinePeerClient has the peer's sources take what the file of our agent for a machine gives this user, and follow it.
func TestMachinePeerClient(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	address, write := serveMachine(t)
	addr := peerapi.WithAddr(address)
	source := must.Get(peerapi.NewX509Source(ctx, peerapi.WithClientOptions(addr)))(t)
	defer source.Close()
	svids := must.Get(peerapi.FetchX509SVIDs(ctx, addr))(t)
	require.Len(t, svids, 2)
	assert.Equal(t, "spiffe://example.org/web", svids[0].ID.String())
	assert.Equal(t, "internal", svids[0].Hint)
	assert.Equal(t, "spiffe://example.org/batch", svids[1].ID.String())

	tokens := must.Get(peerapi.NewJWTSource(ctx, peerapi.WithClientOptions(addr)))(t)
	defer tokens.Close()
	token := must.Get(tokens.FetchJWTSVID(ctx, peerjwt.Params{Audience: "db", Subject: svids[0].ID}))(t)
	must.Get(peerjwt.ParseAndValidate(token.Marshal(), tokens, []string{"db"}))(t)
	_, err := tokens.FetchJWTSVID(ctx, peerjwt.Params{Audience: "bank", Subject: svids[0].ID})
	assert.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	_, err = tokens.FetchJWTSVID(ctx, peerjwt.Params{Audience: "db", Subject: svids[1].ID})
	assert.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)

	write(`{"id": "spiffe://example.org/batch"}`)
	require.NoError(t, source.WaitUntilUpdated(ctx))
	svid := must.Get(source.GetX509SVID())(t)
	assert.Equal(t, "spiffe://example.org/batch", svid.ID.String())
	assert.Equal(t, svids[1].Certificates, svid.Certificates, "it keeps its certificate")
}
