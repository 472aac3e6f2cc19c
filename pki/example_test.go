package pki_test

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"testing/fstest"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// A workload makes a key and a request; a CA, which knows the workload by other means, answers it.
func Example() {
	// The workload.
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	request, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}

	// The CA.
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	rootKey, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(rootKey, pki.CertificateOptions{
		SANs:      []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))},
		NotBefore: now,
		NotAfter:  now.AddDate(10, 0, 0),
	})
	if err != nil {
		panic(err)
	}
	csr, err := pki.ParseCSRPEM(request.PEM())
	if err != nil {
		panic(err)
	}
	leaf, err := root.Issue(pki.CertificateOptions{
		PublicKey: csr.PublicKey(), // all that a request is good for
		// The caller, as it has authenticated.
		SANs:      []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))},
		NotBefore: now,
		NotAfter:  now.Add(time.Hour),
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(leaf.URIs[0], "until", leaf.NotAfter.Format(time.TimeOnly))
	fmt.Println("belongs to the workload's key:", pki.PublicKeysEqual(leaf.PublicKey, key.Public()))
	// Output:
	// spiffe://example.org/web until 13:00:00
	// belongs to the workload's key: true
}

// A broken rule is named, and nothing is signed.
func ExampleIssuer_Issue() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(key, pki.CertificateOptions{
		SANs:      []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))},
		NotBefore: now,
		NotAfter:  now.AddDate(0, 0, 30),
	})
	if err != nil {
		panic(err)
	}
	leafKey, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	_, err = root.Issue(pki.CertificateOptions{
		PublicKey: leafKey.Public(),
		SANs:      []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))},
		NotBefore: now,
		NotAfter:  now.Add(time.Hour),
	})
	fmt.Println(err)
	if e, ok := errors.AsType[*pki.ProfileError](err); ok {
		fmt.Println(e.Rule)
	}

	_, err = root.Issue(pki.CertificateOptions{
		PublicKey: leafKey.Public(),
		SANs:      []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))},
		NotBefore: now,
		NotAfter:  now.AddDate(0, 0, 31),
	})
	fmt.Println(err)
	// Output:
	// pki: leaf: spiffe://example.org has no path
	// X5-6
	// pki: leaf: NotAfter is 24h0m0s later than the issuer's: the certificate would outlive its issuer
}

func ExampleParseCSRPEM() {
	_, err := pki.ParseCSRPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{1, 2, 3}}))
	fmt.Println(err)
	// Output:
	// pki: invalid certificate signing request: the PEM block is "CERTIFICATE", want CERTIFICATE REQUEST
}

// Files that are being replaced are often seen half-way.
func ExampleNewSecretPEM() {
	now := time.Now()
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))}, NotBefore: now, NotAfter: now.AddDate(1, 0, 0)})
	if err != nil {
		panic(err)
	}
	newKey, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	keyPEM, err := pki.MarshalPrivateKeyPEM(newKey)
	if err != nil {
		panic(err)
	}
	_, err = pki.NewSecretPEM("file-cert:cert.pem~key.pem", pki.MarshalCertificatesPEM(root.Certificate()), keyPEM, nil, time.Time{})
	fmt.Println(err)
	fmt.Println(errors.Is(err, pki.ErrKeyMismatch))
	// Output:
	// pki: secret "file-cert:cert.pem~key.pem": the private key does not belong to the certificate
	// true
}

// A server that is not a workload, with a name in DNS and none in SPIFFE.
func ExampleIssuer_Issue_withoutSPIFFE() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	rootKey, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(rootKey, pki.CertificateOptions{
		SANs:                  []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))},
		PermittedTrustDomains: []spiffe.TrustDomain{spiffe.MustParseTrustDomain("example.org")}, // it signs for no other
		NotBefore:             now.Add(-2 * time.Minute),
		NotAfter:              now.AddDate(10, 0, 0),
	})
	if err != nil {
		panic(err)
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	cert, err := root.Issue(pki.CertificateOptions{
		PublicKey:   key.Public(),
		SANs:        []pki.SAN{pki.DNSSAN("ca.infra.svc")},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		NotBefore:   now.Add(-2 * time.Minute), // for clocks that are slow
		NotAfter:    now.Add(24 * time.Hour),
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(pki.ParseSANs(cert.Extensions))

	_, err = root.Issue(pki.CertificateOptions{
		PublicKey: key.Public(),
		SANs:      []pki.SAN{{Type: pki.URI, Value: "https://other.test"}},
		NotBefore: now,
		NotAfter:  now.Add(24 * time.Hour),
	})
	if e, ok := errors.AsType[*pki.ProfileError](err); ok {
		fmt.Println("not permitted:", e.Rule)
	}
	// Output:
	// [DNS:ca.infra.svc] <nil>
	// not permitted: X5-15
}

// The files of a CA, read as one, and read again when they change.
func ExampleReadKeyCertBundle() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	folder := fstest.MapFS{} // os.DirFS("/etc/cacerts") in a program
	_, err := pki.ReadKeyCertBundle(folder, nil, now)
	fmt.Println("nothing there:", errors.Is(err, fs.ErrNotExist))

	write := func(organization string) {
		key, err := pki.NewKey("ecdsa-p256")
		if err != nil {
			panic(err)
		}
		root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))}, Organization: organization, NotBefore: now, NotAfter: now.AddDate(1, 0, 0)})
		if err != nil {
			panic(err)
		}
		keyPEM, err := pki.MarshalPrivateKeyPEM(key)
		if err != nil {
			panic(err)
		}
		certPEM := pki.MarshalCertificatesPEM(root.Certificate())
		folder["ca-cert.pem"], folder["ca-key.pem"] = &fstest.MapFile{Data: certPEM}, &fstest.MapFile{Data: keyPEM}
		folder["root-cert.pem"], folder["cert-chain.pem"] = &fstest.MapFile{Data: certPEM}, &fstest.MapFile{}
	}
	write("first")
	bundle, err := pki.ReadKeyCertBundle(folder, nil, now)
	if err != nil {
		panic(err)
	}
	fmt.Println(bundle.Issuer().Certificate().Subject.Organization, len(bundle.Roots()), "root")

	write("second")
	next, err := pki.ReadKeyCertBundle(folder, nil, now)
	if err != nil {
		panic(err)
	}
	fmt.Println("the same:", next.Equal(bundle))
	// Output:
	// nothing there: true
	// [first] 1 root
	// the same: false
}

func ExampleIssuer_Renew() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org"))}, NotBefore: now, NotAfter: now.AddDate(0, 0, 100)})
	if err != nil {
		panic(err)
	}
	later := now.AddDate(0, 0, 80)
	renewed, err := root.Renew(later, later.AddDate(0, 0, 100))
	if err != nil {
		panic(err)
	}
	fmt.Println(pki.PublicKeysEqual(root.Certificate().PublicKey, renewed.Certificate().PublicKey), renewed.Certificate().NotAfter.Format(time.DateOnly))
	// Output:
	// true 2026-08-28
}
