package sidecar_test

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The certificate comes last, and the key just before: a reader that sees a new one finds its key and its roots, wherever the writer stops.
func TestCertificateComesLast(t *testing.T) {
	t.Parallel()
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	require.NoError(t, f.Write(t.Context(), identityOf(t, ca, newKey(t)), discard))
	w := must.Get(fsnotify.NewWatcher())(t)
	defer w.Close()
	require.NoError(t, w.Add(filepath.Dir(f.KeyFile)))
	for range 3 {
		ca.Prepare()
		ca.Rotate() // with new roots
		require.NoError(t, f.Write(t.Context(), identityOf(t, ca, newKey(t)), discard))
		var order []string
		for len(order) < 3 {
			select {
			case e := <-w.Events:
				if e.Has(fsnotify.Create) && slices.Contains([]string{f.KeyFile, f.CertificateFile, f.RootsFile}, e.Name) {
					order = append(order, e.Name)
				}
			case <-time.After(time.Minute):
				require.Fail(t, "the files do not change", "%q", order)
			}
		}
		assert.Equal(t, []string{f.RootsFile, f.KeyFile, f.CertificateFile}, order)
	}
}
