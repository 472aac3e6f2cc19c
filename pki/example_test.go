package pki_test

import (
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// A workload makes a key and a request; a CA, which knows the workload by other means, answers it.
func Example() {
	// The workload.
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	request, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}

	// The CA.
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	rootKey, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(rootKey, pki.CAOptions{
		TrustDomain: spiffe.MustParseTrustDomain("example.org"),
		NotBefore:   now,
		NotAfter:    now.AddDate(10, 0, 0),
	})
	if err != nil {
		panic(err)
	}
	csr, err := pki.ParseCSRPEM(request.PEM())
	if err != nil {
		panic(err)
	}
	leaf, err := root.IssueLeaf(pki.LeafOptions{
		PublicKey: csr.PublicKey(),                                // all that a request is good for
		ID:        spiffe.MustParseID("spiffe://example.org/web"), // who the caller is, from its authentication
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
func ExampleIssuer_IssueLeaf() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(key, pki.CAOptions{
		TrustDomain: spiffe.MustParseTrustDomain("example.org"),
		NotBefore:   now,
		NotAfter:    now.AddDate(0, 0, 30),
	})
	if err != nil {
		panic(err)
	}
	leafKey, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	_, err = root.IssueLeaf(pki.LeafOptions{
		PublicKey: leafKey.Public(),
		ID:        spiffe.MustParseID("spiffe://example.org"),
		NotBefore: now,
		NotAfter:  now.Add(time.Hour),
	})
	fmt.Println(err)
	if e, ok := errors.AsType[*pki.ProfileError](err); ok {
		fmt.Println(e.Rule)
	}

	_, err = root.IssueLeaf(pki.LeafOptions{
		PublicKey: leafKey.Public(),
		ID:        spiffe.MustParseID("spiffe://example.org/web"),
		NotBefore: now,
		NotAfter:  now.AddDate(0, 0, 31),
	})
	fmt.Println(err)
	fmt.Println(errors.Is(err, pki.ErrOutlivesIssuer))
	// Output:
	// pki: leaf: spiffe://example.org has no path (X5-6)
	// X5-6
	// pki: leaf: NotAfter is 24h0m0s later than the issuer's: the certificate would outlive its issuer
	// true
}

func ExampleMarshalSANs() {
	ip, err := pki.IPSAN(net.ParseIP("10.0.0.1"))
	if err != nil {
		panic(err)
	}
	der, err := pki.MarshalSANs(pki.DNSSAN("a.com"), pki.IDSAN(spiffe.MustParseID("spiffe://x/y")), ip)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%x\n", der)
	sans, err := pki.ParseSANs(der)
	if err != nil {
		panic(err)
	}
	for _, s := range sans {
		fmt.Println(s)
	}
	// Output:
	// 301b8205612e636f6d860c7370696666653a2f2f782f7987040a000001
	// DNS:a.com
	// URI:spiffe://x/y
	// IP:10.0.0.1
}

func ExampleParseCSRPEM() {
	_, err := pki.ParseCSRPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{1, 2, 3}}))
	fmt.Println(err)
	fmt.Println(errors.Is(err, pki.ErrCSR))
	// Output:
	// pki: invalid certificate signing request: the PEM block is "CERTIFICATE", want CERTIFICATE REQUEST
	// true
}

func ExampleKeyAlgorithm_UnmarshalText() {
	var a pki.KeyAlgorithm
	fmt.Println(a.UnmarshalText([]byte("rsa-3072")), a)
	// Output:
	// <nil> rsa-3072
}

// Files that are being replaced are often seen half-way.
func ExampleNewSecretPEM() {
	now := time.Now()
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(key, pki.CAOptions{TrustDomain: spiffe.MustParseTrustDomain("example.org"), NotBefore: now, NotAfter: now.AddDate(1, 0, 0)})
	if err != nil {
		panic(err)
	}
	newKey, err := pki.NewKey(pki.ECDSAP256)
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
