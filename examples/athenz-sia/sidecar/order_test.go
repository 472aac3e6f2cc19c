package sidecar_test

import (
	"io/fs"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A service token is a secret as the key is: what is public for all readers is the certificate and the roots.
func TestModesOfFiles(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no modes")
	}
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	i := identityOf(t, ca, newKey(t))
	given := sidecar.IdentityFrom(&agentapi.Answer{Credential: i.Credential, Roots: i.Roots, Token: func() string { return "v=S1;s=x" }})
	for range 2 { // made, and replaced
		require.NoError(t, f.Write(t.Context(), given, discard))
		for name, mode := range map[string]fs.FileMode{f.KeyFile: 0o440, f.TokenFile: 0o440, f.CertificateFile: 0o444, f.RootsFile: 0o444} {
			assert.Equal(t, mode, must.Get(os.Stat(name))(t).Mode(), name)
		}
	}
}
