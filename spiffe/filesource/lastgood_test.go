package filesource_test

import (
	"crypto/x509"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

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

// A certificate that may less than the one in force is refused as long as that is valid, to the last second, and taken then.
func TestNarrowerCertificate(t *testing.T) {
	t.Parallel()
	usages := func(all ...x509.ExtKeyUsage) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.ExtKeyUsage = all }
	}
	const server, client = x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth
	for _, c := range []struct{ have, next []x509.ExtKeyUsage }{
		{[]x509.ExtKeyUsage{server, client}, []x509.ExtKeyUsage{server}},
		{[]x509.ExtKeyUsage{server, client}, []x509.ExtKeyUsage{client}},
		{[]x509.ExtKeyUsage{server}, []x509.ExtKeyUsage{client}},
		{[]x509.ExtKeyUsage{client}, []x509.ExtKeyUsage{server}},
	} {
		synctest.Test(t, func(t *testing.T) {
			ca := newCA(t)
			cfg := layout("/run")
			s, take := filesource.Taking(t, cfg)
			put := func(svid *spiffe.SVID) error {
				files := secret(t, svid, ca.Bundle())
				return take(map[string][]byte{cfg.CertFile: files["tls.crt"], cfg.KeyFile: files["tls.key"], cfg.Bundles[0].Path: files["ca.crt"]})
			}
			short := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(10 * time.Minute) }
			have := ca.SVID("/web", usages(c.have...), short)
			require.NoError(t, put(have))
			next := ca.SVID("/web", usages(c.next...), func(c *x509.Certificate) { c.NotAfter = time.Now().Add(time.Hour) })
			require.ErrorContains(t, put(next), "permit less than those of the certificate in force")
			require.Equal(t, number(have), serial(t, s))
			wider := ca.SVID("/web", usages(server, client), short)
			require.NoError(t, put(wider), "more is no harm")
			require.Equal(t, number(wider), serial(t, s))

			time.Sleep(10*time.Minute - time.Nanosecond)
			require.Error(t, put(next))
			require.Equal(t, number(wider), serial(t, s))
			time.Sleep(time.Nanosecond)
			require.NoError(t, put(next), "there is nothing to lose")
			require.Equal(t, number(next), serial(t, s))
		})
	}
}
