package local_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	_ ca.Signer = (*ca.Authority)(nil)
	_ ca.Signer = (*ra.RA)(nil)
)

const csrs = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// signer answers the approved requests in a cluster with what they ask for, as a signer without any policy would.
func signer(t *testing.T, s *kubetest.Server) *x509.Certificate {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().AddDate(1, 0, 0), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	template.Subject.CommonName = "signer"
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	root := must.Get(x509.ParseCertificate(der))(t)
	api := must.Get(kube.New(kube.Options{URL: s.URL(), Client: s.Client()}))(t)
	answer := func(event kube.Event) {
		var o map[string]any
		if json.Unmarshal(event.Object, &o) != nil || event.Type == kube.Deleted {
			return
		}
		var seen struct {
			Metadata struct{ Name string }
			Spec     struct{ Request []byte }
			Status   struct {
				Conditions  []struct{ Type string }
				Certificate []byte
			}
		}
		if json.Unmarshal(event.Object, &seen) != nil || len(seen.Status.Certificate) > 0 ||
			!slices.Contains(seen.Status.Conditions, struct{ Type string }{"Approved"}) {
			return
		}
		block, _ := pem.Decode(seen.Spec.Request)
		csr, err := x509.ParseCertificateRequest(block.Bytes)
		if !assert.NoError(t, err) {
			return
		}
		serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62))
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
			SerialNumber: serial, URIs: csr.URIs, DNSNames: csr.DNSNames, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}, root, csr.PublicKey, key)
		if !assert.NoError(t, err) {
			return
		}
		o["status"].(map[string]any)["certificate"] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		s.Put(csrs+"/"+seen.Metadata.Name, o)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for event, err := range api.Watch(ctx, csrs, nil) {
				if err != nil {
					break
				}
				answer(event)
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return root
}

// The signers of a cluster serve the programs of this process.
func TestRegistrationAuthority(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	roots, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{signer(t, s)}})
	require.NoError(t, err)
	a, err := ra.New(ra.Config{TrustDomain: td, Signer: "example.com/mesh", Roots: roots, APIServer: s.URL(), HTTPClient: s.Client()})
	require.NoError(t, err)
	c := must.Get(local.New(a, web))(t)

	csr := newCSR(t, pki.IDSAN(web))
	chain := must.Get(c.Sign(t.Context(), csr, time.Hour))(t)
	assert.NoError(t, caclient.Check(chain, csr, pki.ExpectID(web), roots, time.Now()))

	// What was not granted does not get to the signer.
	for name, bad := range map[string]*pki.CSR{
		"another ID":   newCSR(t, pki.IDSAN(api)),
		"a name":       newCSR(t, pki.IDSAN(web), pki.DNSSAN("admin.example.org")),
		"no ID at all": newCSR(t),
	} {
		before := len(s.Requests())
		_, err := c.Sign(t.Context(), bad, 0)
		require.Error(t, err, name)
		assert.Contains(t, []error{caclient.ErrInvalid, caclient.ErrDenied}, kind(t, err), name)
		assert.Len(t, s.Requests(), before, name)
	}
	_, err = c.Sign(t.Context(), csr, time.Minute)
	assert.Equal(t, caclient.ErrInvalid, kind(t, err), "Kubernetes grants ten minutes or more")

	m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: c}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		assert.Equal(t, web, must.Get(m.SVID())(t).ID())
	}, time.Minute, 10*time.Millisecond)
	cancel()
	<-ended
}

// plain is an authority that tells nothing of changes.
type plain struct{ *ca.Authority }

func (plain) Changed() {}

// Roots of an authority without Changed are seen after the next Sign.
func TestWatchWithoutChanged(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t)
		c := must.Get(local.New(plain{a}, web))(t)
		ctx, cancel := context.WithCancel(t.Context())
		var seen []*spiffe.Bundle
		done := make(chan struct{})
		go func() {
			defer close(done)
			for set, err := range c.WatchBundles(ctx) {
				if !assert.NoError(t, err) {
					return
				}
				b, err := set.Bundle(td)
				assert.NoError(t, err)
				seen = append(seen, b)
			}
		}()
		synctest.Wait()
		require.Equal(t, []*spiffe.Bundle{a.Bundle()}, seen)
		must.Get(a.Rotate(ctx))(t)
		must.Get(c.Sign(ctx, newCSR(t), 0))(t)
		synctest.Wait()
		require.Len(t, seen, 2, "after a Sign")
		assert.Same(t, a.Bundle(), seen[1])
		go func() { _ = a.Run(ctx) }()
		time.Sleep(time.Hour) // the new root signs
		synctest.Wait()
		before := len(seen)
		must.Get(a.Rotate(ctx))(t)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.Len(t, seen, before+1, "after half a minute")
		cancel()
		<-done
	})
}
