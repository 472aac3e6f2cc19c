package vault_test

import (
	"crypto/x509"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func pem(certs ...*x509.Certificate) string { return string(pki.MarshalCertificatesPEM(certs...)) }

func rootsOf(t testing.TB, c *vault.CA) ([]*x509.Certificate, error) {
	t.Helper()
	set, err := c.FetchBundles(t.Context())
	if err != nil {
		return nil, err
	}
	return must.Get(set.Bundle(domain))(t).Contents().X509Authorities, nil
}

// mount answers as an engine with issuers: a certificate, the chain above it, and when it was revoked.
func mount(issuers ...doc) *cafake.Script {
	return &cafake.Script{Answer: func(c cafake.Call) (int, any) {
		if strings.HasSuffix(c.URL.Path, "/issuers") {
			keys := []string{}
			for i := range issuers {
				keys = append(keys, fmt.Sprint("id-", i))
			}
			return 200, doc{"data": doc{"keys": keys}}
		}
		var i int
		if _, err := fmt.Sscanf(c.URL.Path, "/v1/pki/issuer/id-%d/json", &i); err != nil {
			return 404, ""
		}
		return 200, doc{"data": issuers[i]}
	}}
}

func TestRoots(t *testing.T) {
	t.Parallel()
	a, b := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	middle := func(ca *spiffetest.CA) *x509.Certificate { return ca.Intermediate().SVID("/web").Chain()[1] }
	ma := middle(a)
	for name, c := range map[string]struct {
		issuers []doc
		want    []*x509.Certificate // nil for a bad answer
	}{
		"one":                   {[]doc{{"certificate": pem(a.Root())}}, []*x509.Certificate{a.Root()}},
		"twice":                 {[]doc{{"certificate": pem(a.Root()), "ca_chain": []string{pem(a.Root())}}, {"certificate": pem(a.Root())}}, []*x509.Certificate{a.Root()}},
		"many above":            {[]doc{{"certificate": pem(a.Root()), "ca_chain": []string{pem(many(t, 99)...), strings.Repeat(pem(a.Root()), 99)}}}, []*x509.Certificate{a.Root()}},
		"two":                   {[]doc{{"certificate": pem(a.Root())}, {"certificate": pem(b.Root())}}, []*x509.Certificate{a.Root(), b.Root()}},
		"above an intermediate": {[]doc{{"certificate": pem(ma), "ca_chain": []string{pem(ma), pem(a.Root())}}}, []*x509.Certificate{a.Root()}},
		"revoked":               {[]doc{{"certificate": pem(a.Root()), "revocation_time": 1700000000}, {"certificate": pem(b.Root())}}, []*x509.Certificate{b.Root()}},
		"revoked after another": {[]doc{{"certificate": pem(ma), "ca_chain": []string{pem(ma), pem(a.Root())}},
			{"certificate": pem(a.Root()), "revocation_time": 1}, {"certificate": pem(b.Root())}}, []*x509.Certificate{b.Root()}},
		"revocation as text":   {[]doc{{"certificate": pem(a.Root()), "revocation_time": "7"}, {"certificate": pem(b.Root()), "revocation_time": "0"}}, []*x509.Certificate{b.Root()}},
		"not revoked":          {[]doc{{"certificate": pem(a.Root()), "revocation_time": 0}}, []*x509.Certificate{a.Root()}},
		"no issuers":           {nil, nil},
		"intermediate alone":   {[]doc{{"certificate": pem(ma)}}, nil},
		"all revoked":          {[]doc{{"certificate": pem(a.Root()), "revocation_time": 1}}, nil},
		"no certificate":       {[]doc{{"ca_chain": []string{pem(a.Root())}}}, nil},
		"one of two without":   {[]doc{{"certificate": pem(a.Root())}, {}}, nil},
		"junk":                 {[]doc{{"certificate": "MII"}}, nil},
		"junk above":           {[]doc{{"certificate": pem(a.Root()), "ca_chain": []string{"x"}}}, nil},
		"chain that is a text": {[]doc{{"certificate": pem(a.Root()), "ca_chain": pem(a.Root())}}, nil},
		"workload":             {[]doc{{"certificate": pem(a.SVID("/web").Leaf())}}, nil},
		"long chain":           {[]doc{{"certificate": pem(a.Root()), "ca_chain": []string{pem(many(t, 100)...)}}}, nil},
		"too many":             {make([]doc, 65), nil},
		"signature of another": {[]doc{{"certificate": pem(forged(t, a.Root()))}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := mount(c.issuers...)
			got, err := rootsOf(t, newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web"}))
			if c.want == nil {
				require.ErrorIs(t, err, caclient.ErrBadAnswer)
				assert.LessOrEqual(t, len(s.Paths()), 3)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

// many returns certificates of CAs.
func many(t testing.TB, n int) (out []*x509.Certificate) {
	t.Helper()
	ca := spiffetest.NewCA(t, "example.org")
	for range n {
		out = append(out, forged(t, ca.Root()))
	}
	return out
}

// forged returns a certificate with the names of root and another key, which did not sign itself.
func forged(t testing.TB, root *x509.Certificate) *x509.Certificate {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	signer := must.Get(pki.NewKey("ecdsa-p256"))(t)
	der := must.Get(x509.CreateCertificate(nil, &x509.Certificate{
		SerialNumber: big.NewInt(1), RawSubject: root.RawSubject, NotBefore: root.NotBefore, NotAfter: root.NotAfter, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, &x509.Certificate{RawSubject: root.RawSubject}, key.Public(), signer))(t)
	return must.Get(x509.ParseCertificate(der))(t)
}

// The ID of an issuer is not one to lead elsewhere.
func TestIssuerIDs(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "..", "a/b", "../../sys/health", "a?b", "a%2fb", "a b", "a.", strings.Repeat("a", 256)} {
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 200, doc{"data": doc{"keys": []string{id}}} }}
		require.ErrorIs(t, must.Err(rootsOf(t, newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web"}))), caclient.ErrBadAnswer, id)
		assert.Len(t, s.Paths(), 1, id)
	}
}

// Roots that are known stay when Vault has none, is away, or answers nonsense.
func TestRootsStay(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	good := mount(doc{"certificate": pem(ca.Root())})
	s := &cafake.Script{Answer: good.Answer}
	var log logtest.Buffer
	e := endpoint(s)
	e.Logger = log.Logger()
	c := newCA(t, vault.Options{Endpoint: e, Role: "web"})
	for _, bad := range []*cafake.Script{good, mount(), mount(doc{"certificate": "x"}), {Answer: func(cafake.Call) (int, any) {
		return 503,
			vaultErrors("Vault is sealed")
	}}, {Answer: func(cafake.Call) (int, any) { return 404, vaultErrors() }}} {
		s.Answer = bad.Answer
		got := must.Get(rootsOf(t, c))(t)
		assert.Equal(t, []*x509.Certificate{ca.Root()}, got)
	}
	assert.Equal(t, 4, strings.Count(log.String(), "the roots cannot be read"))
}

// With a source of their own, roots are not asked of Vault.
func TestOwnRoots(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := mount()
	file := filepath.Join(t.TempDir(), "roots.pem")
	require.NoError(t, os.WriteFile(file, []byte(pem(ca.Root())), 0o600))
	fromFile, fromSource := endpoint(s), endpoint(s)
	fromFile.RootsFile, fromSource.Roots = file, ca.Bundle()
	for _, e := range []caclient.Endpoint{fromFile, fromSource} {
		got := must.Get(rootsOf(t, newCA(t, vault.Options{Endpoint: e, Role: "web"})))(t)
		assert.Equal(t, []*x509.Certificate{ca.Root()}, got)
	}
	assert.Empty(t, s.Paths())
}

// An answer with more certificates than any chain has is refused before their signatures are looked at.
func TestLongAnswer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for n, want := range map[int]error{14: nil, 15: caclient.ErrBadAnswer, 900: caclient.ErrBadAnswer} {
		s := &cafake.Script{Answer: func(c cafake.Call) (int, any) {
			code, answer := signed(ca, c)
			answer.(doc)["data"].(doc)["ca_chain"] = []string{strings.Repeat(pem(ca.Root()), n)}
			return code, answer
		}}
		assert.ErrorIs(t, must.Err(newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web"}).Sign(t.Context(), webCSR(t), 0)), want, n)
	}
}

// A root that comes only with a certificate is none: the client would believe what it is to check.
func TestRootOfAnAnswer(t *testing.T) {
	t.Parallel()
	known, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	issuers := mount(doc{"certificate": pem(known.Root())})
	s := &cafake.Script{Answer: func(c cafake.Call) (int, any) {
		if c.Method == http.MethodPost {
			return signed(other, c)
		}
		return issuers.Answer(c)
	}}
	c := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web"})
	require.NoError(t, must.Err(c.Sign(t.Context(), webCSR(t), 0)))
	got := must.Get(rootsOf(t, c))(t)
	assert.Equal(t, []*x509.Certificate{known.Root()}, got)
	checked := must.Get(caclient.New(c, nil))(t)
	require.ErrorIs(t, must.Err(checked.Sign(t.Context(), webCSR(t), 0)), caclient.ErrBadAnswer)
}
