package ra_test

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
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
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// family is what the answers of these tests are made of.
type family struct {
	root, between, foreign *authority
}

func newFamily(t testing.TB) *family {
	root := newAuthority(t, "root", nil)
	return &family{root, newAuthority(t, "between", root), newAuthority(t, "root", nil)}
}

// answers runs a request against a signer with one answer.
func answers(t *testing.T, f *family, r ca.Request, answer func(csr *x509.CertificateRequest) []byte, edit ...func(*ra.Config)) ([]*x509.Certificate, error) {
	t.Helper()
	c := start(t, bubble(t), func(o *object) { o.Status.Certificate = answer(o.csr(t)) })
	chain, err := c.ra(append([]func(*ra.Config){trust(t, f.root)}, edit...)...).Sign(t.Context(), r)
	assert.Equal(t, 1, c.Count("DELETE", csrs))
	return chain, err
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	f, web := newFamily(t), web(t)
	leaf := func(csr *x509.CertificateRequest, edit ...func(*x509.Certificate)) *x509.Certificate {
		return f.root.leaf(t, csr, time.Hour, edit...)
	}
	below := func(csr *x509.CertificateRequest) *x509.Certificate { return f.between.leaf(t, csr, time.Hour) }
	root, between := f.root.cert, f.between.cert
	for _, c := range []struct {
		name   string
		answer func(csr *x509.CertificateRequest) []byte
		rest   []*x509.Certificate // behind the leaf
	}{
		{"leaf", func(r *x509.CertificateRequest) []byte { return encode(leaf(r)) }, nil},
		{"with the root", func(r *x509.CertificateRequest) []byte { return encode(leaf(r), root) }, nil},
		{"with an intermediate", func(r *x509.CertificateRequest) []byte { return encode(below(r), between) }, []*x509.Certificate{between}},
		{"with all, some twice", func(r *x509.CertificateRequest) []byte { return encode(below(r), between, root, between, root) }, []*x509.Certificate{between}},
		{"in another order", func(r *x509.CertificateRequest) []byte { return encode(below(r), root, between) }, []*x509.Certificate{between}},
		{"with a root of old", func(r *x509.CertificateRequest) []byte { return encode(leaf(r), f.foreign.cert) }, nil},
		{"with text around", func(r *x509.CertificateRequest) []byte {
			return slices.Concat([]byte("subject=web\n"), encode(below(r)), []byte("# issuer\n"), encode(between), []byte("\nBye.\n"))
		}, []*x509.Certificate{between}},
		{"without a line break at the end", func(r *x509.CertificateRequest) []byte { return bytes.TrimSpace(encode(leaf(r))) }, nil},
		{"with CRLF", func(r *x509.CertificateRequest) []byte {
			return bytes.ReplaceAll(encode(leaf(r)), []byte("\n"), []byte("\r\n"))
		}, nil},
		{"no extended key usage", func(r *x509.CertificateRequest) []byte {
			return encode(leaf(r, func(c *x509.Certificate) { c.ExtKeyUsage = nil }))
		}, nil},
		{"any extended key usage", func(r *x509.CertificateRequest) []byte {
			return encode(leaf(r, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} }))
		}, nil},
		{"an organization of the signer's", func(r *x509.CertificateRequest) []byte {
			return encode(leaf(r, func(c *x509.Certificate) { c.Subject.Organization = []string{"Example"} }))
		}, nil},
		{"shorter than asked for", func(r *x509.CertificateRequest) []byte {
			return encode(leaf(r, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(time.Minute) }))
		}, nil},
		{"the longest", func(r *x509.CertificateRequest) []byte {
			return encode(leaf(r, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(90 * 24 * time.Hour) }))
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			chain := must.Get(answers(t, f, web, c.answer))(t)
			assert.Equal(t, c.rest, nilIfEmpty(chain[1:]))
			id := must.Get(spiffe.IDFromCertificate(chain[0]))(t)
			assert.Equal(t, webID, id)
		})
	}
}

func nilIfEmpty(c []*x509.Certificate) []*x509.Certificate {
	if len(c) == 0 {
		return nil
	}
	return c
}

// Each answer has one thing wrong.
func TestAnswersRefused(t *testing.T) {
	t.Parallel()
	f, web := newFamily(t), web(t)
	edit := func(e func(*x509.Certificate)) func(*x509.CertificateRequest) []byte {
		return func(r *x509.CertificateRequest) []byte {
			return encode(f.root.leaf(t, r, time.Hour, func(c *x509.Certificate) { c.URIs = r.URIs; e(c) }))
		}
	}
	good := func(r *x509.CertificateRequest) *x509.Certificate { return f.root.leaf(t, r, time.Hour) }
	uris := func(ids ...string) []*url.URL {
		var out []*url.URL
		for _, id := range ids {
			out = append(out, mustURL(t, id))
		}
		return out
	}
	const same = "spiffe://example.org/ns/prod/sa/web"
	for _, c := range []struct {
		name   string
		answer func(*x509.CertificateRequest) []byte
		text   string
	}{
		{"no PEM", func(*x509.CertificateRequest) []byte { return []byte("signed!") }, "no certificate in PEM"},
		{"DER", func(r *x509.CertificateRequest) []byte { return good(r).Raw }, "no certificate in PEM"},
		{"another block", func(r *x509.CertificateRequest) []byte {
			return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: r.Raw})
		}, "no certificate in PEM"},
		{"a key in it", func(r *x509.CertificateRequest) []byte {
			return slices.Concat(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte{1}}), encode(good(r)))
		}, "not CERTIFICATE"},
		{"cut PEM", func(r *x509.CertificateRequest) []byte {
			whole := encode(good(r))
			return append(whole[:100:100], whole[200:]...)
		}, ""},
		{"cut DER", func(r *x509.CertificateRequest) []byte {
			return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: good(r).Raw[:100]})
		}, ""},
		{"bytes after the DER", func(r *x509.CertificateRequest) []byte {
			return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: append(slices.Clone(good(r).Raw), 0)})
		}, ""},
		{"empty certificate", func(*x509.CertificateRequest) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE"}) }, ""},
		{"huge text", func(r *x509.CertificateRequest) []byte {
			return append(bytes.Repeat([]byte("x"), 128<<10), encode(good(r))...)
		}, "the limit is 131072"},
		{"too many bytes of certificates", func(r *x509.CertificateRequest) []byte {
			return bytes.Repeat(encode(good(r)), 300)
		}, "the limit is 131072"},
		{"17 certificates", func(r *x509.CertificateRequest) []byte {
			return append(encode(good(r)), bytes.Repeat(encode(f.root.cert), 16)...)
		}, "17 certificates, the limit is 16"},
		{"over 64 KiB", func(r *x509.CertificateRequest) []byte {
			big := newAuthority(t, strings.Repeat("x", 40_000), f.root)
			return encode(good(r), big.cert, big.cert)
		}, "the limit is 65536"},

		{"the root alone", func(*x509.CertificateRequest) []byte { return encode(f.root.cert) }, "public key is not that of the request"},
		{"the leaf last", func(r *x509.CertificateRequest) []byte { return encode(f.root.cert, good(r)) }, "certificate 2 of 2 is not a CA"},
		{"two leaves", func(r *x509.CertificateRequest) []byte { return encode(good(r), good(r)) }, "certificate 2 of 2 is not a CA"},
		{"another key", func(r *x509.CertificateRequest) []byte {
			return encode(f.root.leaf(t, r, time.Hour, func(c *x509.Certificate) { c.URIs, c.PublicKey = r.URIs, newKey(t).Public() }))
		}, "public key is not that of the request"},
		{"the signer's own key", edit(func(c *x509.Certificate) { c.PublicKey = f.root.key.Public() }), "public key is not that of the request"},
		{"a CA", edit(func(c *x509.Certificate) { c.IsCA = true }), "CA"},
		{"may sign certificates", edit(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign }), "keyCertSign"},
		{"may sign CRLs", edit(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign }), "cRLSign"},
		{"may not sign", edit(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment }), "lacks digitalSignature"},
		{"no key usage", edit(func(c *x509.Certificate) { c.KeyUsage = 0 }), "no key usage"},
		{"servers only", edit(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), "both servers and clients"},
		{"clients only", edit(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }), "both servers and clients"},
		{"for code only", edit(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} }), "both servers and clients"},
		{"for something unknown only", edit(func(c *x509.Certificate) {
			c.ExtKeyUsage, c.UnknownExtKeyUsage = nil, []asn1.ObjectIdentifier{{1, 2, 3}}
		}), "both servers and clients"},
		{"expired", edit(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) }), "expired"},
		{"not yet valid", edit(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }), "not yet valid"},
		{"too long", edit(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(90*24*time.Hour + 6*time.Minute) }), "have the signer give less, or allow more"},
		{"a common name", edit(func(c *x509.Certificate) { c.Subject.CommonName = "admin" }), `its common name is "admin"`},
		{"a common name that is the ID", edit(func(c *x509.Certificate) { c.Subject.CommonName = same }), "its common name"},
		{"two common names", edit(func(c *x509.Certificate) {
			c.Subject.ExtraNames = []pkix.AttributeTypeAndValue{
				{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "admin"}, {Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: ""},
			}
		}), `its common name is "admin"`},

		{"no name", edit(func(c *x509.Certificate) { c.URIs = nil }), "it is for [], and [URI:" + same + "] were asked for"},
		{"another ID", edit(func(c *x509.Certificate) { c.URIs = uris("spiffe://example.org/ns/prod/sa/db") }), "sa/db], and [URI:"},
		{"another trust domain", edit(func(c *x509.Certificate) { c.URIs = uris("spiffe://example.com/ns/prod/sa/web") }), "were asked for"},
		{"a longer ID", edit(func(c *x509.Certificate) { c.URIs = uris(same + "/x") }), "were asked for"},
		{"two IDs", edit(func(c *x509.Certificate) { c.URIs = uris(same, "spiffe://example.org/ns/prod/sa/db") }), "were asked for"},
		{"the ID twice", edit(func(c *x509.Certificate) { c.URIs = uris(same, same) }), "twice"},
		{"another scheme, too", edit(func(c *x509.Certificate) { c.URIs = uris(same, "https://example.org") }), "were asked for"},
		{"a DNS name, too", edit(func(c *x509.Certificate) { c.DNSNames = []string{"web"} }), "[DNS:web URI:"},
		{"an address, too", edit(func(c *x509.Certificate) { c.IPAddresses = []net.IP{ip("192.0.2.1")} }), "were asked for"},
		{"an e-mail, too", edit(func(c *x509.Certificate) { c.EmailAddresses = []string{"a@example.org"} }), "were asked for"},
		{"the ID as a DNS name", edit(func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{same} }), "were asked for"},

		{"a foreign root of the same name", func(r *x509.CertificateRequest) []byte {
			return encode(f.foreign.leaf(t, r, time.Hour))
		}, "signed by unknown authority"},
		{"a foreign root that comes with it", func(r *x509.CertificateRequest) []byte {
			return encode(f.foreign.leaf(t, r, time.Hour), f.foreign.cert)
		}, "signed by unknown authority"},
		{"the intermediate is missing", func(r *x509.CertificateRequest) []byte {
			return encode(f.between.leaf(t, r, time.Hour))
		}, "signed by unknown authority"},
		{"an unknown critical extension", edit(func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}}}
		}), "critical extension"},
		{"constraints of the CA", func(r *x509.CertificateRequest) []byte {
			limited := &authority{key: newKey(t)}
			limited.cert = f.root.certify(t, limited.key.Public(), &x509.Certificate{
				Subject: pkix.Name{CommonName: "limited"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
				NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
				PermittedURIDomains: []string{"example.com"}, PermittedDNSDomainsCritical: true,
			}, f.root)
			return encode(limited.leaf(t, r, time.Hour), limited.cert)
		}, "not permitted by any constraint"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			chain, err := answers(t, f, web, c.answer)
			signError(t, err, ca.ErrGeneration, `the answer of the signer "example.com/mesh": `, c.text)
			assert.Nil(t, chain)
		})
	}
}

// For a self-signed leaf there is no signer.
func TestAnswerSelfSigned(t *testing.T) {
	t.Parallel()
	f := newFamily(t)
	key := newKey(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
	own := &authority{key: key, cert: &x509.Certificate{Subject: pkix.Name{CommonName: "self"}}}
	chain, err := answers(t, f, ca.Request{CSR: csr, ID: webID}, func(r *x509.CertificateRequest) []byte {
		return encode(own.leaf(t, r, time.Hour))
	})
	signError(t, err, ca.ErrGeneration, "signed by unknown authority")
	assert.Nil(t, chain)
}

// Names beside the ID: the certificate has those that were asked for, no more and no less.
func TestAnswerNames(t *testing.T) {
	t.Parallel()
	f := newFamily(t)
	asks := func(sans ...pki.SAN) ca.Request {
		return ca.Request{
			CSR: newCSR(t, append([]pki.SAN{pki.IDSAN(webID)}, sans...)...), ID: webID,
			DNSNames: []string{"a.test", "b.test", "*.c.test"}, IPs: []net.IP{ip("192.0.2.1"), ip("2001:db8::1")},
		}
	}
	a, v4, v6 := pki.DNSSAN("a.test"), pki.SAN{Type: pki.IP, Value: "\xc0\x00\x02\x01"}, pki.SAN{Type: pki.IP, Value: string(ip("2001:db8::1"))}
	mapped := pki.SAN{Type: pki.IP, Value: string(ip("192.0.2.1").To16())}
	for _, c := range []struct {
		name string
		r    ca.Request
		edit func(*x509.Certificate)
		text string // "" for yes
	}{
		{"none of them", asks(), nil, ""},
		{"some", asks(a, v6), nil, ""},
		{"all", asks(a, pki.DNSSAN("b.test"), pki.DNSSAN("*.c.test"), v4, v6), nil, ""},
		{"IPv4 in the form of IPv6", asks(mapped), func(c *x509.Certificate) { c.IPAddresses = []net.IP{ip("192.0.2.1").To4()} }, ""},
		{"in another order", asks(a, pki.DNSSAN("b.test")), func(c *x509.Certificate) { slices.Reverse(c.DNSNames) }, ""},
		{"one that was granted and not asked for", asks(a), func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "b.test") }, "were asked for"},
		{"one is missing", asks(a, pki.DNSSAN("b.test")), func(c *x509.Certificate) { c.DNSNames = c.DNSNames[:1] }, "were asked for"},
		{"one in upper case", asks(a), func(c *x509.Certificate) { c.DNSNames = []string{"A.test"} }, "were asked for"},
		{"one is twice", asks(a), func(c *x509.Certificate) { c.DNSNames = []string{"a.test", "a.test"} }, "twice"},
		{"the ID is missing", asks(a), func(c *x509.Certificate) { c.URIs = nil }, "were asked for"},
		{"an address is missing", asks(v4, v6), func(c *x509.Certificate) { c.IPAddresses = c.IPAddresses[:1] }, "were asked for"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if _, err := x509.ParseCertificateRequest(c.r.CSR.DER()); err != nil { // crypto/x509 refuses some names from Go 1.27 on
				_, err := start(t, bubble(t), nil).ra(trust(t, f.root)).Sign(t.Context(), c.r)
				signError(t, err, ca.ErrCSR)
				return
			}
			_, err := answers(t, f, c.r, func(r *x509.CertificateRequest) []byte {
				return encode(f.root.leaf(t, r, time.Hour, func(l *x509.Certificate) {
					if c.edit != nil {
						c.edit(l)
					}
				}))
			})
			if c.text == "" {
				require.NoError(t, err)
				return
			}
			signError(t, err, ca.ErrGeneration, c.text)
		})
	}
}

// A common name that was granted and asked for is in the certificate, or is not.
func TestAnswerCommonName(t *testing.T) {
	t.Parallel()
	f := newFamily(t)
	csr := must.Get(pki.NewCSR(newKey(t), pki.CSROptions{CommonName: webID.String(), SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
	r := ca.Request{CSR: csr, ID: webID, CommonName: webID.String()}
	for cn, ok := range map[string]bool{webID.String(): true, "": true, "web": false} {
		chain, err := answers(t, f, r, func(r *x509.CertificateRequest) []byte {
			return encode(f.root.leaf(t, r, time.Hour, func(c *x509.Certificate) { c.Subject.CommonName = cn }))
		})
		if ok {
			require.NoError(t, err, cn)
			assert.Equal(t, cn, chain[0].Subject.CommonName)
		} else {
			signError(t, err, ca.ErrGeneration, "common name")
		}
	}
}

// Certificates without ID, as Linkerd's proxies have them.
func TestDNSOnly(t *testing.T) {
	t.Parallel()
	f := newFamily(t)
	const name = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	r := func() ca.Request {
		csr := must.Get(pki.NewCSR(newKey(t), pki.CSROptions{CommonName: name, SANs: []pki.SAN{pki.DNSSAN(name)}}))(t)
		return ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{name}, CommonName: name}
	}
	chain := must.Get(answers(t, f, r(), func(r *x509.CertificateRequest) []byte {
		return encode(f.between.leaf(t, r, time.Hour), f.between.cert, f.root.cert)
	}))(t)
	require.Len(t, chain, 2)
	assert.Equal(t, []string{name}, chain[0].DNSNames)
	assert.Equal(t, name, chain[0].Subject.CommonName)

	for _, c := range []struct {
		edit func(*x509.Certificate)
		by   *authority
		text string
	}{
		{func(c *x509.Certificate) { c.DNSNames = []string{"db" + name[3:]} }, f.root, "were asked for"},
		{func(c *x509.Certificate) { c.URIs = []*url.URL{mustURL(t, webID.String())} }, f.root, "were asked for"},
		{func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) }, f.root, "expired"},
		{func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }, f.root, "not yet valid"},
		{func(c *x509.Certificate) { c.IsCA = true }, f.root, "is a CA"},
		{func(*x509.Certificate) {}, f.foreign, "signed by unknown authority"},
		{func(*x509.Certificate) {}, f.between, "signed by unknown authority"},
	} {
		_, err := answers(t, f, r(), func(r *x509.CertificateRequest) []byte { return encode(c.by.leaf(t, r, time.Hour, c.edit)) })
		signError(t, err, ca.ErrGeneration, c.text)
	}
}

// Whatever a signer answers, what is accepted is for the key and the names of the request.
func FuzzAnswer(f *testing.F) {
	root := newAuthority(f, "root", nil)
	between := newAuthority(f, "between", root)
	key := newKey(f)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(f)
	std := must.Get(x509.ParseCertificateRequest(csr.DER()))(f)
	var answer []byte
	a := instant(func(*object) []byte { return answer }).ra(f, trust(f, root))
	leaf := root.leaf(f, std, time.Hour)
	answer = encode(leaf)
	must.Get(a.Sign(f.Context(), ca.Request{CSR: csr, ID: webID}))(f)
	f.Add(answer)
	f.Add(encode(leaf, root.cert))
	f.Add(encode(between.leaf(f, std, time.Hour), between.cert, root.cert))
	f.Add(encode(root.leaf(f, std, time.Hour, func(c *x509.Certificate) { c.URIs, c.IsCA = std.URIs, true })))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----"))
	f.Add([]byte("-----END CERTIFICATE-----"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		answer = data
		chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: webID})
		if err != nil {
			if chain != nil {
				t.Fatal("a chain with an error")
			}
			return
		}
		if id, err := spiffe.IDFromCertificate(chain[0]); err != nil || id != webID || len(chain[0].DNSNames)+len(chain[0].IPAddresses)+len(chain[0].EmailAddresses) > 0 {
			t.Fatalf("accepted for %v: %v", id, err)
		}
		if !chain[0].PublicKey.(interface{ Equal(crypto.PublicKey) bool }).Equal(key.Public()) || chain[0].IsCA {
			t.Fatal("accepted with another key, or as a CA")
		}
		for _, c := range chain[1:] {
			if c.Equal(root.cert) {
				t.Fatal("the root is in the chain")
			}
		}
	})
}
