package authn_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestNamedCertificate(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "cluster.local")
	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
	name := must.Get(mesh.Name("emojivoto", "web"))(t)
	a, err := authn.NamedCertificate(ca.TrustDomain(), ca.Bundle(), func(leaf *x509.Certificate) (string, error) {
		if len(leaf.DNSNames) != 1 || len(leaf.URIs) != 0 {
			return "", errors.New("it has not one DNS name")
		}
		if _, _, err := mesh.Parse(leaf.DNSNames[0]); err != nil {
			return "", err
		}
		return leaf.DNSNames[0], nil
	})
	require.NoError(t, err)
	linkerd := func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{name} }
	request := func(ca *spiffetest.CA, edit ...func(*x509.Certificate)) *http.Request {
		chain, _ := ca.Certificate("/web", append([]func(*x509.Certificate){linkerd}, edit...)...)
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.TLS = &tls.ConnectionState{PeerCertificates: chain}
		return r
	}
	for _, issuer := range []*spiffetest.CA{ca, ca.Intermediate()} {
		r := request(issuer)
		caller := must.Get(a.Authenticate(r))(t)
		assert.Equal(t, "named-certificate:"+name, caller.String())
		assert.True(t, caller.ID.IsZero())
		assert.Equal(t, r.TLS.PeerCertificates[0].NotAfter, caller.NotAfter)
		assert.Same(t, r.TLS.PeerCertificates[0], caller.Certificate)
		assert.Equal(t, []string{name}, caller.DNSNames)
	}
	plain := httptest.NewRequest(http.MethodGet, "/", nil)
	require.ErrorIs(t, must.Err(a.Authenticate(plain)), authn.ErrNoCredential)
	plain.TLS = &tls.ConnectionState{}
	require.ErrorIs(t, must.Err(a.Authenticate(plain)), authn.ErrNoCredential)
	many := request(ca)
	for range 20 {
		many.TLS.PeerCertificates = append(many.TLS.PeerCertificates, many.TLS.PeerCertificates[0])
	}
	for says, r := range map[string]*http.Request{
		"unknown authority": request(spiffetest.NewCA(t, "cluster.local")),
		"expired": request(ca, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
		}),
		"key usage":    request(ca, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }),
		"of a CA":      request(ca, func(c *x509.Certificate) { c.IsCA, c.KeyUsage = true, x509.KeyUsageCertSign }),
		"one DNS name": request(ca, func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "other") }),
		"linkerdname":  request(ca, func(c *x509.Certificate) { c.DNSNames = []string{"other"} }),
		"certificates": many,
	} {
		caller, err := a.Authenticate(r)
		require.ErrorIs(t, err, authn.ErrRefused, says)
		require.ErrorContains(t, err, says)
		assert.Nil(t, caller)
		assert.False(t, authn.Unavailable(err))
	}
	nameless := must.Get(authn.NamedCertificate(ca.TrustDomain(), ca.Bundle(), func(*x509.Certificate) (string, error) { return "", nil }))(t)
	require.ErrorIs(t, must.Err(nameless.Authenticate(request(ca))), authn.ErrRefused)

	// Without a bundle nothing is known of the caller.
	other := spiffetest.NewCA(t, "other.example")
	empty := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{}))(t)
	for _, bundles := range []bundleFunc{
		func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, errors.New("not ready") },
		func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, nil },
		func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return other.Bundle(), nil },
		func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return empty, nil },
	} {
		a := must.Get(authn.NamedCertificate(ca.TrustDomain(), bundles, func(*x509.Certificate) (string, error) { return "x", nil }))(t)
		_, err = a.Authenticate(request(ca))
		assert.True(t, authn.Unavailable(err), err)
	}
	require.Error(t, must.Err(authn.NamedCertificate(spiffe.TrustDomain{}, ca.Bundle(), func(*x509.Certificate) (string, error) { return "x", nil })))
	require.Error(t, must.Err(authn.NamedCertificate(ca.TrustDomain(), nil, func(*x509.Certificate) (string, error) { return "x", nil })))
	require.Error(t, must.Err(authn.NamedCertificate(ca.TrustDomain(), ca.Bundle(), nil)))
}
