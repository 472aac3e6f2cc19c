package filesource_test

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The last good state of a bundle file stays its own when other files come and go, before it and behind it.
func TestLastGoodIsOfItsFile(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	others := map[string]*spiffetest.CA{}
	for _, name := range []string{"a.test", "m.test", "z.test"} {
		others[name] = spiffetest.NewCA(t, name)
	}
	const dir = "/run/identity"
	file := func(name string) string { return filepath.Join(dir, name+".spiffe-trust-bundle.x509.pem") }
	for _, torn := range []string{"a.test", "m.test", "z.test"} { // is torn while another comes or goes
		for _, moved := range []string{"a.test", "m.test", "z.test"} {
			if moved == torn {
				continue
			}
			for _, comes := range []bool{true, false} {
				s, take := filesource.Taking(t, filesource.Config{Folder: dir})
				certs, key := must.Get2(ca.SVID("/web").MarshalPEM())(t)
				with := func(without string) map[string][]byte {
					files := map[string][]byte{filepath.Join(dir, credential): append(key, certs...), file("example.org"): ca.Bundle().MarshalPEM()}
					for name, other := range others {
						if name != without {
							files[file(name)] = other.Bundle().MarshalPEM()
						}
					}
					return files
				}
				before, after := moved, ""
				if !comes {
					before, after = "", moved
				}
				require.NoError(t, take(with(before)))
				files := with(after)
				files[file(torn)] = []byte("-----BEGIN CERTIFICATE-----\ntorn")
				require.ErrorContains(t, take(files), file(torn))
				for name, other := range others {
					got, err := s.Bundle(other.TrustDomain())
					if name == after {
						assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain, "%s went while %s was torn", name, torn)
					} else if assert.NoError(t, err, "%s, while %s was torn and %s moved", name, torn, moved) {
						assert.Equal(t, string(other.Bundle().MarshalPEM()), string(got.MarshalPEM()), "%s has its own roots, while %s was torn and %s moved", name, torn, moved)
					}
				}
				require.NoError(t, take(with(after)), "and it is mended")
			}
		}
	}
}
