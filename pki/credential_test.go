package pki_test

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const linkerdName = "web.shop.serviceaccount.identity.linkerd.example.org"

// dnsOnly makes a leaf of a workload of Linkerd.
func dnsOnly(c *x509.Certificate) {
	c.URIs, c.DNSNames, c.ExtraExtensions = nil, []string{linkerdName}, nil
}

func TestCredential(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	chain, key := ca.Intermediate().Certificate("/web", dnsOnly)
	c := must.Get(pki.NewCredential(chain, key))(t)
	assert.Equal(t, chain[0], c.Leaf())
	assert.Equal(t, chain, c.Chain())
	assert.Equal(t, chain[0].NotAfter, c.NotAfter())
	assert.Len(t, c.TLSCertificate().Certificate, 2)

	certs, keyPEM, err := c.MarshalPEM()
	require.NoError(t, err)
	assert.True(t, must.Get(pki.ParseCredentialPEM(certs, keyPEM))(t).Leaf().Equal(c.Leaf()))

	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("it", "credential", c)
	for _, text := range []string{c.String(), fmt.Sprintf("%v %+v %#v %s", c, c, c, c), log.String()} {
		assert.Contains(t, text, linkerdName)
		assert.NotContains(t, text, "ecdsa")
		assert.NotContains(t, text, "PrivateKey")
	}

	_, otherKey := ca.Certificate("/web")
	for name, tt := range map[string]struct {
		chain []*x509.Certificate
		err   string
		is    error
	}{
		"no chain":             {nil, "empty", nil},
		"a CA":                 {chain[1:], "is a CA certificate", nil},
		"too many":             {slices.Repeat(chain[:1], 17), "limit is 16", spiffe.ErrTooLarge},
		"the key of another":   {chain, "", pki.ErrKeyMismatch},
		"a certificate is nil": {[]*x509.Certificate{chain[0], nil}, "nil certificate", nil},
	} {
		_, err := pki.NewCredential(tt.chain, otherKey)
		require.ErrorContains(t, err, tt.err, name)
		if tt.is != nil {
			require.ErrorIs(t, err, tt.is, name)
		}
	}
	require.ErrorContains(t, must.ErrorOf(pki.NewCredential(chain, nil)), "no private key")
	for _, bad := range [][2][]byte{{nil, keyPEM}, {certs, nil}, {certs, certs}, {keyPEM, keyPEM}} {
		_, err := pki.ParseCredentialPEM(bad[0], bad[1])
		require.Error(t, err)
		assert.NotContains(t, err.Error(), "BEGIN")
	}
}

// Each leaf differs in one thing from what is expected.
func TestExpectDNSName(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	td := ca.TrustDomain()
	want := pki.ExpectDNSName(td, linkerdName)
	assert.Equal(t, linkerdName, want.String())
	assert.Equal(t, []pki.SAN{pki.DNSSAN(linkerdName)}, want.Names())
	assert.Equal(t, td, want.TrustDomain())
	assert.True(t, want.ID().IsZero())

	deep := ca.Intermediate()
	good, _ := deep.Certificate("/web", dnsOnly)
	path := must.Get(want.Verify(good, ca.Bundle(), spiffe.BothRoles, time.Now()))(t)
	require.Len(t, path, 3)
	assert.True(t, path[2].Equal(ca.Root()))

	uri, _ := url.Parse("spiffe://example.org/web")
	for name, tt := range map[string]struct {
		change func(c *x509.Certificate)
		stage  string
	}{
		"an X.509-SVID":            {func(*x509.Certificate) {}, "leaf"},
		"a SPIFFE ID beside it":    {func(c *x509.Certificate) { dnsOnly(c); c.URIs = []*url.URL{uri} }, "leaf"},
		"another name":             {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{"x" + linkerdName} }, "leaf"},
		"another case":             {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{strings.ToUpper(linkerdName)} }, "leaf"},
		"a wildcard":               {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{"*" + linkerdName[3:]} }, "leaf"},
		"two names":                {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{linkerdName, "api.example.org"} }, "leaf"},
		"the name twice":           {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{linkerdName, linkerdName} }, "leaf"},
		"an address beside it":     {func(c *x509.Certificate) { dnsOnly(c); c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }, "leaf"},
		"a mail address beside it": {func(c *x509.Certificate) { dnsOnly(c); c.EmailAddresses = []string{"web@example.org"} }, "leaf"},
		"the common name only":     {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = nil; c.Subject.CommonName = linkerdName }, "leaf"},
		"a CA":                     {func(c *x509.Certificate) { dnsOnly(c); c.IsCA, c.BasicConstraintsValid = true, true }, "leaf"},
		"a key usage that signs":   {func(c *x509.Certificate) { dnsOnly(c); c.KeyUsage |= x509.KeyUsageCertSign }, "leaf"},
		"no digital signature":     {func(c *x509.Certificate) { dnsOnly(c); c.KeyUsage = x509.KeyUsageKeyEncipherment }, "leaf"},
		"no key usage":             {func(c *x509.Certificate) { dnsOnly(c); c.KeyUsage = 0 }, "leaf"},
		"a client only":            {func(c *x509.Certificate) { dnsOnly(c); c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }, "chain"},
		"expired":                  {func(c *x509.Certificate) { dnsOnly(c); c.NotAfter = time.Now().Add(-time.Minute) }, "chain"},
		"not valid yet":            {func(c *x509.Certificate) { dnsOnly(c); c.NotBefore = time.Now().Add(time.Minute) }, "chain"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chain, _ := deep.Certificate("/web", tt.change)
			_, err := want.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
			assert.Equal(t, tt.stage, must.As[*spiffe.VerifyError](err)(t).Stage, "%v", err)
		})
	}
	stage := func(chain []*x509.Certificate, e pki.Expectation, b spiffe.BundleSource, role spiffe.Role) string {
		t.Helper()
		_, err := e.Verify(chain, b, role, time.Now())
		return must.As[*spiffe.VerifyError](err)(t).Stage
	}
	empty := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{}))(t)
	assert.Equal(t, "leaf", stage(nil, want, ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.Expectation{}, ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.ExpectDNSName(td, ""), ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.ExpectLeaf(td, "any", nil, nil), ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, want, nil, spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, want, ca.Bundle(), 4))
	assert.Equal(t, "bundle", stage(good, want, spiffetest.NewCA(t, "example.com").Bundle(), spiffe.BothRoles))
	assert.Equal(t, "bundle", stage(good, want, empty, spiffe.BothRoles))
	assert.Equal(t, "chain", stage(good, want, other.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "chain", stage(good[:1], want, ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.ExpectID(spiffe.MustParseID("spiffe://example.org/web")), ca.Bundle(), spiffe.BothRoles), "a credential passes for no SVID")
}

func TestExpectIDAndForm(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := spiffe.MustParseID("spiffe://example.org/web")
	chain, _ := ca.Certificate("/web")
	want := pki.ExpectID(web)
	assert.Equal(t, web, want.ID())
	assert.False(t, want.IsZero())
	path, err := want.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
	require.NoError(t, err)
	assert.Len(t, path, 2)
	_, err = pki.ExpectID(spiffe.MustParseID("spiffe://example.org/db")).Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
	require.ErrorIs(t, err, spiffe.ErrDenied)
	assert.True(t, pki.ExpectID(spiffe.ID{}).IsZero())

	// A form may be anything that a program can say about a leaf, such as Athenz's principal.
	service, _ := ca.Certificate("/web", func(c *x509.Certificate) {
		c.Subject.CommonName = "sports.api"
		a, _ := url.Parse("spiffe://example.org/ns/sports/sa/api")
		b, _ := url.Parse("athenz://instanceid/provider/1")
		c.URIs = []*url.URL{a, b}
	})
	athenz := pki.ExpectLeaf(ca.TrustDomain(), "sports.api", nil, func(leaf *x509.Certificate) error {
		if leaf.Subject.CommonName != "sports.api" {
			return errors.New("another principal")
		}
		return nil
	})
	must.Get(athenz.Verify(service, ca.Bundle(), spiffe.BothRoles, time.Now()))(t)
	_, err = athenz.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
	require.ErrorContains(t, err, "another principal")
}
