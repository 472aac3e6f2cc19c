package proofs

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/testtree"
)

// pain is what users of SPIFFE libraries have reported in issues, and the tests that prove that it is gone. A test is
// named by the folder of its package and its function.
type pain struct {
	report string
	tests  []string
}

var pains = []pain{
	{"A client has one policy for all hosts, so that an allowed neighbour can answer for another host, also after a redirect, on a pooled connection or in a resumed session.", []string{
		"spiffe/spiffetls.TestNeighbourCannotAnswer", "spiffe/spiffetls.TestRedirectIsCheckedByItsHost",
		"spiffe/spiffetls.TestPooledConnectionIsOfOneHost", "spiffe/spiffetls.TestSessionIsOfOneAddress", "spiffe/spiffegrpc.TestHosts",
	}},
	{"A source that waits for an agent that does not answer says that nothing was tried, or nothing at all.", []string{
		"internal/test/proofs.TestMuteAgent",
	}},
	{"A server of grpc-go has no verified peer, no policy for its methods, and keeps connections whose proof no longer holds.", []string{
		"spiffe/spiffegrpc.TestPeers", "spiffe/spiffegrpc.TestRequirePeer", "spiffe/spiffegrpc.TestRotation",
	}},
	{"A server that sets its TLSConfig itself has no peer, and a handler that does not look panics.", []string{
		"spiffe/spiffetls.TestPeerFromRequest", "spiffe/spiffetls.TestNoPeerFromRequest",
	}},
	{"A server that is not net/http's does the handshakes in its own loop, without a time limit, and has no peer.", []string{
		"spiffe/spiffetls.TestListenerAndDialer", "spiffe/spiffetls.TestSilentClients", "spiffe/spiffetls.TestMaxHandshakes",
	}},
	{"A driver that begins TLS itself, such as that of PostgreSQL, keeps the certificate that it was started with.", []string{
		"internal/peers.TestPostgreSQL", "spiffe/spiffetls.TestPeerFromState",
	}},
	{"A program that has an identity on one side only, and a certificate of the web on the other, has to write its own verification.", []string{
		"spiffe/spiffetls.TestWebCertificate", "spiffe/spiffetls.TestWebTransport", "spiffe/spiffetls.TestClientWithoutIdentity",
		"spiffe/spiffetls.TestAnonymousClients",
	}},
	{"A policy cannot be written as text with a wildcard for one segment.", []string{
		"spiffe.TestPolicyText", "spiffe.TestParsePolicyRefuses",
	}},
	{"A workload with several identities has to find its own among them by its position, with a stream for each.", []string{
		"spiffe/workloadapi.TestPick", "spiffe/workloadapi.TestPickRefuses", "spiffe/workloadapi.TestSpinningReadersOfPicked",
	}},
	{"An orchestrator and the monitoring cannot see that an identity or a bundle is about to expire, or why handshakes fail.", []string{
		"spiffe/health.TestOutage", "spiffe/health.TestMetrics", "spiffe/health.TestServeHTTP", "examples/service.TestDashboard",
	}},
	{"A service whose certificates are in files, from cert-manager, spiffe-helper, a CSI driver or volumes of Kubernetes, has to follow them by itself, and sees a new key beside an old certificate.", []string{
		"spiffe/filesource.TestLayouts", "spiffe/filesource.TestRotation", "spiffe/filesource.TestFilesThatDoNotGoTogether",
	}},
	{"A service that restarts while its agent or its CA is away has no bundle, although it had one a minute ago.", []string{
		"spiffe/source.TestRestartDuringAnOutage", "spiffe/source.TestStoredEnds",
	}},
	{"A program with two sources writes the choice between them, and the merge of its own and of federated bundles, by itself.", []string{
		"spiffe/source.TestFirstOfAgentAndFiles", "spiffe/source.TestMerge",
	}},
	{"The keys of another issuer of tokens are refused, as they are for signatures in general and not for JWT-SVIDs.", []string{
		"spiffe/federation.TestJWKS",
	}},
	{"An operator at night cannot see which step fails between the environment, the socket, the identity, the bundle and the clock.", []string{
		"examples/svid.TestDoctor", "examples/svid.TestDoctorSteps", "examples/svid.TestGolden",
	}},
	{"A program that uses go-spiffe cannot move one package at a time.", []string{
		"spiffe/gospiffe.TestMutualTLS", "spiffe/gospiffe.TestTokensOfWorkloadAPI", "spiffe/gospiffe.TestPeers",
	}},
	{"A service needs three calls and a goroutine of its own to have an identity, and the error of a clean stop is a special case.", []string{
		"internal/test/proofs.TestStartInOneCall",
	}},
	{"A test passes for the wrong reason, as its own client refuses to present the bad identity, and a handler cannot be tested without a connection.", []string{
		"spiffe/spiffetest.TestRecipes", "spiffe/spiffetest.TestRecipeCAOutage", "spiffe/spiffetest.TestRequestFrom",
		"spiffe/spiffetest.TestNoForgery", "spiffe/spiffetls.TestHTTPTest",
	}},
	{"An error of the first day does not name the thing, or what to do.", []string{
		"spiffe/spiffetls.TestMessages", "spiffe/spiffetls.TestErrorsNameWhatIsMissing",
	}},
}

// TestPains: each pain has a test that go test runs.
func TestPains(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	files, err := testtree.Files(os.DirFS("../../.."))
	require.NoError(t, err)
	skipped := make(map[string]bool) // every test, and whether it is always skipped
	for _, f := range files {
		for _, fn := range f.Functions() {
			if name, runs := f.Test(fn); runs {
				skipped[name] = testtree.Skipped(fn)
			}
		}
	}
	seen := make(map[string]bool)
	assert.Len(t, pains, 20)
	for _, p := range pains {
		assert.NotEmpty(t, p.tests, p.report)
		for _, name := range append(p.tests, p.report) {
			assert.False(t, seen[name], "%s: it is there twice", name)
			seen[name] = true
		}
		for _, name := range p.tests {
			skips, exists := skipped[name]
			assert.True(t, exists, "%s: there is no such test: %s", name, p.report)
			assert.False(t, skips, "%s: it is always skipped: %s", name, p.report)
		}
	}
}
