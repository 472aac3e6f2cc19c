package filesource_test

import (
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
)

// FuzzFiles gives a source that has good files other ones. It never loses what it has, never hands out anything that
// does not verify, and goes back to the good files.
func FuzzFiles(f *testing.F) {
	ca := newCA(f)
	good := secret(f, ca.SVID("/web"), ca.Bundle())
	next := secret(f, ca.SVID("/web"), ca.Bundle())
	f.Add(next["tls.crt"], next["tls.key"], next["ca.crt"], must.Get(ca.Bundle().Marshal())(f))
	f.Add(next["tls.crt"], good["tls.key"], []byte(nil), []byte(`{"keys":[{"use":"sig"}]}`))
	f.Add(slices.Concat(next["tls.key"], next["tls.crt"]), slices.Concat(next["tls.key"], next["tls.crt"]), good["ca.crt"][:200], []byte(`{"keys":[]}`))
	f.Add(good["ca.crt"], next["tls.key"], good["tls.crt"], []byte(`{`))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"), []byte("-----BEGIN PRIVATE KEY-----\n"), []byte("\x00"), []byte("[]"))
	f.Fuzz(func(t *testing.T, certs, key, roots, jwks []byte) {
		dir := t.TempDir()
		paths := []string{"tls.crt", "tls.key", "ca.crt"}
		cfg := layout(dir)
		cfg.Bundles = append(cfg.Bundles, filesource.BundleFile{Path: filepath.Join(dir, "jwks"), JWKS: true})
		s, take := filesource.Taking(t, cfg)
		files := map[string][]byte{filepath.Join(dir, "jwks"): []byte(`{"keys":[]}`)}
		for _, name := range paths {
			files[filepath.Join(dir, name)] = good[name]
		}
		require.NoError(t, take(files))
		first := must.Get(s.Snapshot())(t)

		_ = take(map[string][]byte{cfg.CertFile: certs, cfg.KeyFile: key, cfg.Bundles[0].Path: roots, cfg.Bundles[1].Path: jwks})
		snap := must.Get(s.Snapshot())(t)
		svid := must.Get(snap.SVID())(t)
		was := must.Get(first.SVID())(t)
		require.Equal(t, td, svid.ID().TrustDomain())
		if svid != was {
			v := must.Get(spiffe.NewVerifier(snap, spiffe.AllowIDs(svid.ID()), nil))(t)
			must.Get(v.VerifyChain(svid.Chain(), spiffe.AnyRole))(t)
			require.True(t, time.Now().Before(svid.NotAfter()))
		}
		// A part that is missing takes nothing away.
		err := take(map[string][]byte{})
		require.True(t, errors.Is(err, fs.ErrNotExist))
		require.Same(t, snap, must.Get(s.Snapshot())(t))

		require.NoError(t, take(files))
		snap = must.Get(s.Snapshot())(t)
		svid = must.Get(snap.SVID())(t)
		require.Equal(t, number(was), number(svid))
		require.True(t, snap.Bundles().Equal(first.Bundles()))
	})
}
