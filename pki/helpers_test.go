package pki_test

import (
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors that no caller has to tell from others.
const (
	errOutlivesIssuer text = "the certificate would outlive its issuer"
	errCRL            text = "invalid certificate revocation list"
	errCSR            text = "invalid certificate signing request"
	errSAN            text = "invalid subject alternative name"
	errUnreadable     text = "crypto/x509 cannot read a trust domain name with an empty label"
)

// text is an error that is known by its text.
type text string

func (e text) Error() string { return string(e) }

func is(err, want error) bool {
	if said, ok := want.(text); ok {
		return err != nil && strings.Contains(err.Error(), string(said))
	}
	return errors.Is(err, want)
}

// requireIs tests an error, if one is wanted.
func requireIs(t testing.TB, err, want error, about ...any) {
	t.Helper()
	if want != nil && !is(err, want) {
		require.ErrorIs(t, err, want, about...)
	}
}

// sanValue encodes the value of an extension, whatever the names.
func sanValue(sans ...pki.SAN) []byte {
	var all [][]byte
	for _, s := range sans {
		all = append(all, der(byte(0x80|s.Type), []byte(s.Value)))
	}
	return der(tagSeq, all...)
}

// writeSANs returns the value of the extension in a CSR.
func writeSANs(sans ...pki.SAN) ([]byte, error) {
	csr, err := pki.NewCSR(p256Key, pki.CSROptions{SANs: sans})
	if err != nil {
		return nil, err
	}
	std, err := x509.ParseCertificateRequest(csr.DER())
	if err != nil {
		return nil, err
	}
	return std.Extensions[0].Value, nil
}

func readSANs(value []byte) ([]pki.SAN, error) {
	return pki.ParseSANs([]pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}})
}

var someRoots = sync.OnceValues(func() (*pki.Secret, error) { return trust(newRootOnce()) })

// trust returns roots that may get lists.
func trust(root *x509.Certificate) (*pki.Secret, error) {
	roots := spiffe.BundleContents{X509Authorities: []*x509.Certificate{root}}
	b, err := spiffe.NewBundle(spiffe.MustParseTrustDomain("example.org"), roots)
	if err != nil {
		return nil, err
	}
	return pki.NewTrustSecret("ROOTCA", b)
}

// readCRLs reads revocation lists without a check of their signatures.
func readCRLs(data []byte) (lists []*x509.RevocationList, err error) {
	s, err := someRoots()
	if err == nil {
		s, err = s.WithCRLs(data, true)
	}
	if err != nil {
		return nil, err
	}
	for rest, _ := s.CRLs(); len(rest) > 0; {
		var b *pem.Block
		b, rest = pem.Decode(rest)
		list, err := x509.ParseRevocationList(b.Bytes)
		if err != nil {
			return nil, err
		}
		lists = append(lists, list)
	}
	return lists, nil
}

// checkCRL verifies that a list is of a root.
func checkCRL(list *x509.RevocationList, root *x509.Certificate) error {
	s, err := trust(root)
	if err == nil {
		_, err = s.WithCRLs(crlsPEM(list), false)
	}
	return err
}

func crlsPEM(lists ...*x509.RevocationList) (out []byte) {
	for _, l := range lists {
		out = append(out, block("X509 CRL", l.Raw)...)
	}
	return out
}

// keyCertPEM has the files of a CA.
type keyCertPEM struct {
	Cert, Chain, Key, Roots, CRL []byte
	Signer                       crypto.Signer // in place of Key
}

func (p keyCertPEM) read(now time.Time) (*pki.KeyCertBundle, error) {
	files := fstest.MapFS{}
	for name, data := range map[string][]byte{
		"ca-cert": p.Cert, "cert-chain": p.Chain, "ca-key": p.Key, "root-cert": p.Roots, "ca-crl": p.CRL,
	} {
		files[name+".pem"] = &fstest.MapFile{Data: data}
	}
	return pki.ReadKeyCertBundle(files, p.Signer, now)
}

func newSelfSigned(t testing.TB, key crypto.Signer, o pki.CertificateOptions) *x509.Certificate {
	t.Helper()
	return must.Get(pki.NewRoot(key, o))(t).Certificate()
}
