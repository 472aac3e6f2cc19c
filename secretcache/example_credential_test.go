package secretcache_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// A workload of Linkerd has a DNS name in place of a SPIFFE ID.
func ExampleManager_Credential() {
	td := spiffe.MustParseTrustDomain("cluster.local")
	const name = "web.prod.serviceaccount.identity.linkerd.cluster.local"
	m, err := secretcache.New(secretcache.Config{Expect: pki.ExpectDNSName(td, name), CA: newNameCA(td)})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := m.GenerateSecret(context.Background(), "default"); err != nil { // or Run
		log.Fatal(err)
	}
	credential, err := m.Credential()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(credential.Leaf().DNSNames[0])
	_, err = m.SVID()
	fmt.Println(errors.Is(err, errors.ErrUnsupported))
	// Output:
	// web.prod.serviceaccount.identity.linkerd.cluster.local
	// true
}

// nameCA certifies the names in a request, as a CA does once it knows that they are its caller's.
type nameCA struct {
	root   *pki.Issuer
	domain spiffe.TrustDomain
}

func newNameCA(td spiffe.TrustDomain) nameCA {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		log.Fatal(err)
	}
	now := time.Now()
	root, err := pki.NewRoot(key, pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: now, NotAfter: now.AddDate(1, 0, 0)})
	if err != nil {
		log.Fatal(err)
	}
	return nameCA{root, td}
}

func (c nameCA) Sign(_ context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	now := time.Now()
	leaf, err := c.root.Issue(pki.CertificateOptions{
		PublicKey: csr.PublicKey(), SANs: csr.SANs(), NotBefore: now, NotAfter: now.Add(24 * time.Hour),
	})
	return []*x509.Certificate{leaf}, err
}

func (c nameCA) FetchBundles(context.Context) (*spiffe.BundleSet, error) {
	b, err := spiffe.NewBundle(c.domain, spiffe.BundleContents{X509Authorities: []*x509.Certificate{c.root.Certificate()}})
	if err != nil {
		return nil, err
	}
	return spiffe.NewBundleSet(b)
}
