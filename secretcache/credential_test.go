package secretcache_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const dnsName = "web.prod.serviceaccount.identity.linkerd.cluster.local"

var dnsOnly = pki.ExpectDNSName(domain, dnsName)

// dnsCA is a CA whose certificates have the DNS names that were asked for and no ID, as Linkerd's. It signs by a
// spiffetest.CA, which wants an ID in each request, so it knows the keys of its Manager.
type dnsCA struct {
	*spiffetest.CA
	*ring
	other atomic.Pointer[dnsCA] // signs instead, if not nil
}

// ring has the keys of a Manager and what was asked for them.
type ring struct {
	mu    sync.Mutex
	keys  []crypto.Signer
	asked []*pki.CSR
}

func newDNSCA(t testing.TB) *dnsCA {
	return (&dnsCA{CA: spiffetest.NewCA(t, "example.org"), ring: &ring{}}).edit(nil)
}

// edit changes what is signed from now on.
func (c *dnsCA) edit(edit func(*x509.Certificate)) *dnsCA {
	c.EditTemplates(func(tmpl *x509.Certificate) {
		tmpl.URIs = nil
		if edit != nil {
			edit(tmpl)
		}
	})
	return c
}

func (r *ring) newKey() (crypto.Signer, error) {
	key, err := pki.NewKey("ecdsa-p256")
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys = append(r.keys, key)
	return key, err
}

func (r *ring) find(csr *pki.CSR) crypto.Signer {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, csr)
	return r.keys[slices.IndexFunc(r.keys, func(k crypto.Signer) bool { return pki.PublicKeysEqual(k.Public(), csr.PublicKey()) })]
}

func (r *ring) requests() []*pki.CSR {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.asked)
}

func (c *dnsCA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	sans := csr.SANs()
	if _, err := csr.ID(); err != nil {
		sans = append(sans, pki.IDSAN(web))
	}
	with, err := pki.NewCSR(c.find(csr), pki.CSROptions{SANs: sans, CommonName: csr.CommonName()})
	if err != nil {
		return nil, err
	}
	if other := c.other.Load(); other != nil {
		return other.CA.Sign(ctx, with, lifetime)
	}
	return c.CA.Sign(ctx, with, lifetime)
}

// manager returns a Manager of a credential.
func (c *dnsCA) manager(t *testing.T, cfg secretcache.Config) *secretcache.Manager {
	t.Helper()
	if cfg.Expect.IsZero() {
		cfg.Expect = dnsOnly
	}
	cfg.CA = cmp.Or[caclient.CA](cfg.CA, c)
	if cfg.NewKey == nil {
		cfg.NewKey = c.newKey
	}
	cfg.Jitter = 0.01
	m := must.Get(secretcache.New(cfg))(t)
	secretcache.Unhurried(m)
	return m
}

// unwatched hides that a CA pushes bundles.
type unwatched struct{ caclient.CA }

func credential(t *testing.T, m *secretcache.Manager) *pki.Credential {
	t.Helper()
	return must.Get(m.Credential())(t)
}

func readyCredential(t *testing.T, m *secretcache.Manager) *pki.Credential {
	t.Helper()
	start(t, m)
	synctest.Wait()
	return credential(t, m)
}

// first returns the state of the default identity.
func first(m *secretcache.Manager) secretcache.Status { return m.Status()[0] }

// TestCredential follows a workload of Linkerd through ten days.
func TestCredential(t *testing.T) {
	conformance.Covers(t, "IST-2.7-1")
	bubble.Test(t, func(t *testing.T) {
		const life = 24 * time.Hour
		ca := newDNSCA(t)
		var out strings.Builder
		m := ca.manager(t, secretcache.Config{Lifetime: life, Logger: slog.New(slog.NewTextHandler(&out, nil))})
		_, err := m.Credential()
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorContains(t, err, `"`+dnsName+`"`)
		var heard told
		m.Subscribe(heard.add)
		stop := start(t, m)
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org", "default"}, heard.take(), "the bundle goes first")

		begin := time.Now()
		var old *pki.Credential
		for range 20 {
			changed := m.Changed()
			c := credential(t, m)
			assert.Equal(t, []string{dnsName}, c.Leaf().DNSNames)
			assert.Empty(t, c.Leaf().URIs)
			assert.Equal(t, time.Now().Add(life).Unix(), c.NotAfter().Unix())
			s := must.Get(m.GenerateSecret(t.Context(), "default"))(t)
			assert.Equal(t, "default", s.Name())
			chain, key, ok := s.KeyPair()
			require.True(t, ok)
			served := must.Get(pki.ParseCredentialPEM(chain, key))(t)
			assert.Equal(t, c.Chain(), served.Chain())
			assert.Equal(t, c.NotAfter(), s.NotAfter())
			if old != nil {
				assert.False(t, pki.PublicKeysEqual(old.Leaf().PublicKey, c.Leaf().PublicKey), "each certificate has a key of its own")
			}
			old = c

			// It never passes for an SVID.
			svid, err := m.SVID()
			assert.Nil(t, svid)
			assert.ErrorIs(t, err, errors.ErrUnsupported)
			assert.NotErrorIs(t, err, spiffe.ErrNotReady)
			assert.ErrorContains(t, err, "is no X.509-SVID, and Credential returns it")
			snap, err := m.Snapshot()
			assert.Nil(t, snap)
			assert.ErrorIs(t, err, errors.ErrUnsupported)
			<-changed
		}
		took := time.Since(begin)
		assert.GreaterOrEqual(t, took, 20*life*49/100-20*time.Second)
		assert.LessOrEqual(t, took, 20*life/2)
		assert.Equal(t, slices.Repeat([]string{"default"}, 20), heard.take())
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		for range updates(ctx, m) {
			t.Error("a snapshot without an SVID")
		}
		for _, csr := range ca.requests() {
			assert.Equal(t, []pki.SAN{pki.DNSSAN(dnsName)}, csr.SANs())
			assert.Empty(t, csr.CommonName())
		}
		st := m.Status()
		require.Len(t, st, 2)
		assert.True(t, st[0].ID.IsZero())
		assert.False(t, st[0].NotAfter.IsZero())
		assert.NoError(t, st[0].Err)
		assert.Equal(t, domain.ID(), st[1].ID)
		assert.Equal(t, "secretcache.Manager("+dnsName+")", m.String())
		for _, name := range []string{dnsName, web.String(), ""} {
			assert.ErrorContains(t, must.Err(m.GenerateSecret(t.Context(), name)), "no secret", name)
		}
		stop()
		last := credential(t, m)
		assert.Contains(t, out.String(), "id="+dnsName)
		assert.NotContains(t, fmt.Sprintf("%v %+v %#v", last, m, m), "PRIVATE")
	})
}

// TestCredentialConfig shows which identities can be configured.
func TestCredentialConfig(t *testing.T) {
	t.Parallel()
	ca := newDNSCA(t)
	for want, cfg := range map[string]secretcache.Config{
		"Config.ID is required, or Config.Expect":                   {CA: ca},
		"want one of them":                                          {CA: ca, ID: web, Expect: dnsOnly},
		`Config.ID is "spiffe://example.org/web" and Config.Expect`: {CA: ca, ID: web, Expect: pki.ExpectID(web)},
		"names no trust domain":                                     {CA: ca, Expect: pki.ExpectDNSName(spiffe.TrustDomain{}, dnsName)},
		"not a workload":                                            {CA: ca, Expect: pki.ExpectID(domain.ID())},
		"Config.CA is required":                                     {Expect: dnsOnly},
		"Config.CommonName has 65 bytes":                            {CA: ca, Expect: dnsOnly, CommonName: strings.Repeat("a", 65)},
	} {
		assert.ErrorContains(t, must.Err(secretcache.New(cfg)), want)
	}

	// An ID by another way is an SVID.
	m := must.Get(secretcache.New(secretcache.Config{CA: spiffetest.NewCA(t, "example.org"), Expect: pki.ExpectID(web)}))(t)
	must.Get(m.GenerateSecret(t.Context(), web.String()))(t)
	assert.Equal(t, web, current(t, m).ID())
	c, err := m.Credential()
	assert.Nil(t, c)
	assert.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, `"spiffe://example.org/web" is an X.509-SVID, which SVID returns`)
}

// TestCredentialBesideSVIDs has a default that is a credential, and identities that were added.
func TestCredentialBesideSVIDs(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := newDNSCA(t)
		ca.EditTemplates(func(c *x509.Certificate) {
			if len(c.DNSNames) > 0 {
				c.URIs = nil
			}
		})
		m := ca.manager(t, secretcache.Config{Names: []pki.SAN{pki.DNSSAN("web.test")}, CommonName: "web", Expect: pki.ExpectLeaf(domain, "two names",
			[]pki.SAN{pki.DNSSAN(dnsName)}, func(leaf *x509.Certificate) error {
				if !slices.Equal(leaf.DNSNames, []string{dnsName, "web.test"}) || leaf.Subject.CommonName != "web" {
					return errors.New("other names")
				}
				return nil
			})})
		assert.ErrorContains(t, m.Add(spiffe.MustParseID("spiffe://other.test/web")), "not in the trust domain")
		require.NoError(t, m.Add(worker))
		readyCredential(t, m)
		s := must.Get(m.GenerateSecret(t.Context(), worker.String()))(t)
		chain, key, _ := s.KeyPair()
		assert.Equal(t, worker, must.Get(spiffe.ParseSVIDPEM(chain, key))(t).ID())
		assert.ErrorIs(t, must.Err(m.SVID()), errors.ErrUnsupported, "another identity is not the default one")
		for _, csr := range ca.requests() {
			if _, err := csr.ID(); err == nil {
				assert.Equal(t, []pki.SAN{pki.IDSAN(worker)}, csr.SANs())
				assert.Empty(t, csr.CommonName())
			} else {
				assert.Equal(t, []pki.SAN{pki.DNSSAN(dnsName), pki.DNSSAN("web.test")}, csr.SANs())
				assert.Equal(t, "web", csr.CommonName())
			}
		}
		st := m.Status()
		require.Len(t, st, 3)
		assert.True(t, st[0].ID.IsZero())
		assert.Equal(t, worker, st[2].ID)
		m.Remove(spiffe.ID{})
		assert.Len(t, m.Status(), 3, "the default identity stays")
	})
}

// TestCredentialOfAPrincipal has the form of Athenz: the common name is the principal, and there are two URIs, which
// no SVID has.
func TestCredentialOfAPrincipal(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const principal = "sports.api"
		instance := &url.URL{Scheme: "athenz", Host: "instanceid", Path: "/k8s.provider/1234"}
		athenz := pki.ExpectLeaf(domain, "the principal "+principal, nil, func(leaf *x509.Certificate) error {
			if leaf.Subject.CommonName != principal {
				return fmt.Errorf("its principal is %q", leaf.Subject.CommonName)
			}
			return nil
		})
		ca := newDNSCA(t)
		ca.EditTemplates(func(c *x509.Certificate) { c.URIs = append(c.URIs, instance) })
		m := ca.manager(t, secretcache.Config{Expect: athenz, CommonName: principal})
		c := readyCredential(t, m)
		assert.Len(t, c.Leaf().URIs, 2)
		assert.Equal(t, principal, c.Leaf().Subject.CommonName)
		assert.Empty(t, ca.requests()[0].SANs())
		assert.Equal(t, `secretcache.Manager(the principal sports.api)`, m.String())

		ca.EditTemplates(func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: "sports.admin"} })
		time.Sleep(50 * time.Minute)
		assert.Same(t, c, credential(t, m))
		assert.ErrorContains(t, first(m).Err, `its principal is "sports.admin"`)
	})
}

// credentialFaults are the ways to spoil an answer about a credential, by what the error says.
var credentialFaults = []struct {
	name, want string
	spoil      func(*dnsCA)
}{
	{"an SVID", "and not for the DNS name", func(c *dnsCA) {
		c.EditTemplates(func(c *x509.Certificate) { c.DNSNames = nil })
	}},
	{"an SVID with the name", "and not for the DNS name", func(c *dnsCA) { c.EditTemplates(nil) }},
	{"an SVID of another", "and not for the DNS name", func(c *dnsCA) {
		c.EditTemplates(func(c *x509.Certificate) { c.URIs, c.DNSNames = []*url.URL{worker.URL()}, nil })
	}},
	{"another name", "and not for the DNS name", names("db.prod.serviceaccount.identity.linkerd.cluster.local")},
	{"a longer name", "and not for the DNS name", names("a." + dnsName)},
	{"a shorter name", "and not for the DNS name", names(dnsName[1:])},
	{"a wildcard", "and not for the DNS name", names("*" + dnsName[3:])},
	{"upper case", "and not for the DNS name", names(strings.ToUpper(dnsName))},
	{"two names", "and not for the DNS name", names(dnsName, "db.test")},
	{"two names, the other first", "and not for the DNS name", names("db.test", dnsName)},
	{"the name twice", "and not for the DNS name", names(dnsName, dnsName)},
	{"no name", "and not for the DNS name", names()},
	{"the common name only", "and not for the DNS name", dnsTemplate(func(c *x509.Certificate) {
		c.DNSNames, c.Subject = nil, pkix.Name{CommonName: dnsName}
	})},
	{"an address", "and not for the DNS name", dnsTemplate(func(c *x509.Certificate) { c.IPAddresses = []net.IP{{127, 0, 0, 1}} })},
	{"a mail address", "and not for the DNS name", dnsTemplate(func(c *x509.Certificate) { c.EmailAddresses = []string{"a@b.test"} })},
	{"another URI", "and not for the DNS name", dnsTemplate(func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "https", Host: "a.test"}} })},
	{"a CA", "is a CA certificate", dnsTemplate(func(c *x509.Certificate) { c.IsCA = true })},
	{"may sign certificates", "the leaf is a CA", dnsTemplate(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign })},
	{"may sign lists", "the leaf is a CA", dnsTemplate(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign })},
	{"no signatures", "lacks digitalSignature", dnsTemplate(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement })},
	{"for servers only", "incompatible key usage", dnsTemplate(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })},
	{"for code", "incompatible key usage", dnsTemplate(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} })},
	{"expired", "it is valid from 1999-12-31", dnsTemplate(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore })},
	{"from the future", "compare the clocks", dnsTemplate(func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(time.Minute) })},
	{"an unknown extension", "unhandled critical extension", dnsTemplate(func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: []int{1, 3, 6, 1, 4, 1, 99999, 1}, Critical: true, Value: []byte{5, 0}}}
	})},
	{"another key", "does not belong", dnsChain(func(c *dnsCA, _ answer) answer {
		other, _ := c.Certificate("/x", func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{dnsName} })
		return other
	})},
	{"the root", "is a CA certificate", dnsChain(func(c *dnsCA, _ answer) answer { return answer{c.Root()} })},
	{"nothing", "the chain is empty", dnsChain(func(*dnsCA, answer) answer { return nil })},
	{"a nil certificate", "the chain has a nil certificate", dnsChain(func(_ *dnsCA, a answer) answer { return append(a, nil) })},
	{"17 certificates", "17 certificates", dnsChain(func(_ *dnsCA, a answer) answer { return slices.Repeat(a, 17) })},
	{"much", "bytes of certificates", dnsTemplate(func(c *x509.Certificate) {
		c.DNSNames = slices.Repeat([]string{strings.Repeat("a", 60) + ".test"}, 1000)
	})},
	{"another root", "signed by unknown authority", func(c *dnsCA) { c.other.Store((&dnsCA{CA: strangerTo(c.CA)}).edit(nil)) }},
	{"an expired intermediate", "expired", func(c *dnsCA) {
		c.other.Store((&dnsCA{CA: c.Intermediate(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore })}).edit(nil))
	}},
	{"no answer", "sign: the CA is down", func(c *dnsCA) { c.FailNext(1<<30, errDown) }},
}

func names(names ...string) func(*dnsCA) {
	return dnsTemplate(func(c *x509.Certificate) { c.DNSNames = names })
}

func dnsTemplate(edit func(*x509.Certificate)) func(*dnsCA) { return func(c *dnsCA) { c.edit(edit) } }

func dnsChain(edit func(*dnsCA, answer) answer) func(*dnsCA) {
	return func(c *dnsCA) { c.EditAnswers(func(a answer) answer { return edit(c, a) }) }
}

// TestBrokenCredentials has the CA answer badly, one fault at a time, at first or from the first renewal on. What works
// stays, the fault is reported, and the first good answer is taken.
func TestBrokenCredentials(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	for _, f := range credentialFaults {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := newDNSCA(t)
				m := ca.manager(t, secretcache.Config{CA: unwatched{ca}})
				had := readyCredential(t, m)
				secret := must.Get(m.GenerateSecret(t.Context(), "default"))(t)
				var heard told
				m.Subscribe(heard.add)

				f.spoil(ca)
				time.Sleep(50 * time.Minute)
				assert.Empty(t, heard.take())
				assert.Same(t, had, credential(t, m))
				assert.Same(t, secret, must.Get(m.GenerateSecret(t.Context(), "default"))(t))
				assert.ErrorContains(t, first(m).Err, f.want)
				assert.Greater(t, first(m).Failures, 1)

				ca.edit(nil)
				ca.EditAnswers(nil)
				ca.FailNext(0, nil)
				ca.other.Store(nil)
				time.Sleep(5 * time.Minute)
				assert.Equal(t, []string{"default"}, heard.take())
				assert.NotSame(t, had, credential(t, m))
				assert.NoError(t, first(m).Err)
			})
			synctest.Test(t, func(t *testing.T) {
				ca := newDNSCA(t)
				m := ca.manager(t, secretcache.Config{CA: unwatched{ca}})
				require.NoError(t, must.Err(m.GenerateSecret(t.Context(), "ROOTCA")))
				f.spoil(ca)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				assert.ErrorIs(t, must.Err(m.GenerateSecret(ctx, "default")), spiffe.ErrNotReady)
				c, err := m.Credential()
				assert.Nil(t, c)
				assert.ErrorIs(t, err, spiffe.ErrNotReady)
				assert.ErrorContains(t, err, f.want)
				assert.ErrorIs(t, must.Err(m.SVID()), errors.ErrUnsupported, "even if it is an SVID that the CA has sent")
			})
		})
	}
}

// TestCredentialChains are answers that are unusual and good.
func TestCredentialChains(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(*dnsCA)
		role    spiffe.Role
		length  int
	}{
		"an intermediate": {func(c *dnsCA) { c.other.Store((&dnsCA{CA: c.Intermediate()}).edit(nil)) }, 0, 2},
		"with the root, twice, in any order": {func(c *dnsCA) {
			below := (&dnsCA{CA: c.Intermediate()}).edit(nil)
			below.EditAnswers(func(a answer) answer { return append(answer{c.Root(), c.Root()}, a...) })
			c.other.Store(below)
		}, 0, 2},
		"no extended key usage": {dnsTemplate(func(c *x509.Certificate) { c.ExtKeyUsage = nil }), 0, 1},
		"for servers only":      {dnsTemplate(func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }), spiffe.ServerRole, 1},
		"with a common name":    {dnsTemplate(func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: dnsName} }), 0, 1},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca := newDNSCA(t)
			ca.edit(func(c *x509.Certificate) {
				c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
			})
			c.prepare(ca)
			assert.Len(t, readyCredential(t, ca.manager(t, secretcache.Config{Role: c.role})).Chain(), c.length)
		})
	}
}
