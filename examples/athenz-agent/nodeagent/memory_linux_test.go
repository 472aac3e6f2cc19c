package nodeagent_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// The agent, the signing service and the callback of the provider work in a process that cannot write a file as long as a document, and in which no
// environment has one.
func TestDocumentsInMemory(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "ATH-1-6")
	if !programtest.Sealed(t) {
		return
	}
	c := newCluster(t)
	const limit = 1000 // what the agent knows of a pod is shorter
	key := must.Get(rsa.GenerateKey(rand.Reader, 4096))(t)
	c.Keys.Add(t, "v2", key) // its signatures are long
	var documents []string
	c.config.Signer = func(ctx context.Context, subject athenz.PodSubject) (string, error) {
		document, err := c.Signer(ctx, subject)
		documents = append(documents, document)
		return document, err
	}
	c.start()
	pod := c.pod("web-0")
	before := os.Environ()

	programtest.Seal(t, limit)
	first := must.Get(pod.Init(t.Context()))(t)
	must.Get(pod.Refresh(t.Context(), first.Credential))(t)
	require.Len(t, documents, 1)
	require.Greater(t, len(documents[0]), limit)
	assert.Equal(t, before, os.Environ())
}
