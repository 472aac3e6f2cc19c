package cafake

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// mutation is one way to spoil an answer that is good otherwise. One of its functions is set.
type mutation struct {
	name     string
	template func(*x509.Certificate)                             // before the leaf is signed
	chain    func(chain []*x509.Certificate) []*x509.Certificate // after it
	body     func([]byte) []byte                                 // on the wire
	says     string                                              // part of the error for an X.509-SVID; "" for any
}

// apply has f answer so, until the next.
func (f *Fake) apply(m mutation) {
	f.ca.EditTemplates(m.template)
	f.ca.EditAnswers(m.chain)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.editBody = m.body
}

// forger signs with crypto/x509 what a CA would not.
type forger struct {
	t     testing.TB
	chain []*x509.Certificate // of the issuer
	key   *ecdsa.PrivateKey
}

// newForger returns one that signs below an intermediate of ca.
func newForger(t testing.TB, ca *spiffetest.CA, edit ...func(*x509.Certificate)) *forger {
	t.Helper()
	asCA := func(c *x509.Certificate) {
		c.URIs, c.IsCA, c.ExtKeyUsage = []*url.URL{ca.TrustDomain().ID().URL()}, true, nil
		c.KeyUsage = x509.KeyUsageCertSign
		c.Subject = pkix.Name{CommonName: "forger " + rand.Text()}
		c.NotAfter = c.NotAfter.Add(48 * time.Hour)
	}
	chain, key := ca.Certificate("/forger", append([]func(*x509.Certificate){asCA}, edit...)...)
	return &forger{t, chain, key.(*ecdsa.PrivateKey)}
}

// again returns a leaf like the one given, for the same key, with the issuer.
func (f *forger) again(leaf *x509.Certificate, edit ...func(*x509.Certificate)) []*x509.Certificate {
	template := &x509.Certificate{
		URIs: leaf.URIs, DNSNames: leaf.DNSNames, NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter, KeyUsage: leaf.KeyUsage,
		ExtKeyUsage: leaf.ExtKeyUsage, BasicConstraintsValid: true,
	}
	for _, e := range edit {
		e(template)
	}
	return append([]*x509.Certificate{f.sign(template, leaf.PublicKey)}, f.chain...)
}

func (f *forger) sign(template *x509.Certificate, key any) *x509.Certificate {
	der, err := x509.CreateCertificate(rand.Reader, template, f.chain[0], key, f.key)
	if err == nil {
		var c *x509.Certificate
		if c, err = x509.ParseCertificate(der); err == nil {
			return c
		}
	}
	f.t.Errorf("caclienttest: forge: %v", err) // on the goroutine of the server
	return f.chain[0]
}

// below returns an intermediate below f.
func (f *forger) below(edit func(*x509.Certificate)) *forger {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.t.Fatalf("caclienttest: %v", err)
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "below"}, NotBefore: f.chain[0].NotBefore, NotAfter: f.chain[0].NotAfter, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	edit(template)
	return &forger{f.t, append([]*x509.Certificate{f.sign(template, key.Public())}, f.chain...), key}
}

// mutations returns what [Run] has every client refuse, for answers of ca to requests for what f certifies.
func mutations(t testing.TB, f *Fake) []mutation {
	t.Helper()
	ca := f.ca
	id := !f.want.ID().IsZero()
	td := ca.TrustDomain()
	name := f.want.Names()[0]
	other := func(c *x509.Certificate) { // the certificate of another workload
		if id {
			c.URIs = []*url.URL{{Scheme: "spiffe", Host: td.String(), Path: "/ns/kube-system/sa/admin"}}
		} else {
			c.DNSNames = []string{"admin" + name.Value}
		}
	}
	two := func(c *x509.Certificate) {
		c.URIs = append(c.URIs, c.URIs...)
		c.DNSNames = append(c.DNSNames, c.DNSNames...)
	}
	uri := func(s string) func(*x509.Certificate) {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatalf("caclienttest: %v", err)
		}
		return func(c *x509.Certificate) { c.URIs, c.DNSNames = []*url.URL{u}, nil }
	}
	usage := func(u ...x509.ExtKeyUsage) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.ExtKeyUsage = u }
	}
	ends := func(from, to time.Duration) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			now := time.Now()
			c.NotBefore, c.NotAfter = now.Add(from), now.Add(to)
		}
	}
	stranger := spiffetest.NewCA(t, td.String())
	foreign := spiffetest.NewCA(t, "foreign."+td.String())
	by := func(fo *forger, edit ...func(*x509.Certificate)) func([]*x509.Certificate) []*x509.Certificate {
		return func(chain []*x509.Certificate) []*x509.Certificate { return fo.again(chain[0], edit...) }
	}
	earlier, _ := ca.Certificate(f.id.Path()) // for another key
	good := newForger(t, ca)
	many := make([]*x509.Certificate, 17)
	for i := range many {
		many[i] = good.below(func(*x509.Certificate) {}).chain[0]
	}
	// A key of which there is no half that signs: that it is large is enough to keep verifiers busy.
	modulus := new(big.Int).SetBit(new(big.Int).Lsh(big.NewInt(1), 16383), 0, 1)
	giant := good.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "giant"}, NotBefore: good.chain[0].NotBefore, NotAfter: good.chain[0].NotAfter, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, &rsa.PublicKey{N: modulus, E: 65537})
	all := []mutation{
		{name: "the names of another workload", template: other, says: "the leaf is for"},
		{name: "two names", template: two, says: "2 URI names"},
		{name: "no name", template: func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, nil; c.Subject.CommonName = name.Value }, says: "no subject alternative name"},
		{name: "an ID of another trust domain", template: uri("spiffe://foreign.test/web"), says: `the leaf is for "spiffe://foreign.test/web"`},
		{name: "the ID of the trust domain", template: uri("spiffe://" + td.String()), says: `for "spiffe://example.org"`},
		{name: "an ID in capitals", template: uri("spiffe://" + strings.ToUpper(td.String()) + "/web"), says: "upper case"},
		{name: "an ID with a query", template: uri("spiffe://" + td.String() + "/web?admin"), says: "invalid ID"},
		{name: "a URI that is no ID", template: uri("https://" + td.String() + "/web"), says: "invalid ID"},
		{name: "a CA's leaf", template: func(c *x509.Certificate) { c.IsCA = true }, says: "CA"},
		{name: "a leaf that may sign certificates", template: func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign }, says: "keyCertSign"},
		{name: "a leaf that may sign revocation lists", template: func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign }, says: "cRLSign"},
		{name: "a leaf that may not sign in a handshake", template: func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }, says: "digitalSignature"},
		{name: "no key usage", template: func(c *x509.Certificate) { c.KeyUsage = 0 }, says: "no key usage"},
		{name: "usage for signing code", template: usage(x509.ExtKeyUsageCodeSigning), says: "incompatible key usage"},
		{name: "usage for clients alone", template: usage(x509.ExtKeyUsageClientAuth), says: "key usage"},
		{name: "usage for servers alone", template: usage(x509.ExtKeyUsageServerAuth), says: "key usage"},
		{name: "expired", template: ends(-48*time.Hour, -time.Hour), says: "expired"},
		{name: "not yet valid", template: ends(time.Hour, 2*time.Hour), says: "not yet valid"},
		{name: "an unknown critical extension", template: func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: []int{1, 3, 6, 1, 4, 1, 99999, 1}, Critical: true, Value: []byte{5, 0}}}
		}, says: "unhandled critical extension"},
		{name: "a leaf of 70 KiB", template: func(c *x509.Certificate) { c.Subject.OrganizationalUnit = []string{strings.Repeat("x", 70<<10)} }, says: "the limit is"},

		{name: "no certificate", chain: func([]*x509.Certificate) []*x509.Certificate { return nil }},
		{name: "the answer to another request", chain: func([]*x509.Certificate) []*x509.Certificate { return earlier }, says: "public key"},
		{name: "the root in the place of the leaf", chain: func([]*x509.Certificate) []*x509.Certificate { return []*x509.Certificate{ca.Root()} }, says: "public key"},
		{name: "two leaves", chain: func(c []*x509.Certificate) []*x509.Certificate { return append(slices.Clone(c), earlier[0]) }, says: "is not a CA"},
		{name: "another root", chain: by(newForger(t, stranger)), says: "signed by unknown authority"},
		{name: "another root, and that root", chain: func(c []*x509.Certificate) []*x509.Certificate {
			return append(newForger(t, stranger).again(c[0]), stranger.Root())
		}, says: "signed by unknown authority"},
		{name: "the root of another trust domain", chain: by(newForger(t, foreign)), says: "signed by unknown authority"},
		{name: "a missing intermediate", chain: func(c []*x509.Certificate) []*x509.Certificate { return good.again(c[0])[:1] }, says: "signed by unknown authority"},
		{name: "another intermediate than the issuer", chain: func(c []*x509.Certificate) []*x509.Certificate {
			return append(good.again(c[0])[:1], newForger(t, ca).chain...)
		}, says: "signed by unknown authority"},
		{name: "an intermediate that is no CA", chain: by(newForger(t, ca, func(c *x509.Certificate) { c.IsCA = false; c.KeyUsage = x509.KeyUsageDigitalSignature })), says: "is not a CA"},
		{name: "an intermediate that may not sign", chain: by(newForger(t, ca, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign })), says: "chain"},
		{name: "an expired intermediate", chain: by(newForger(t, ca, ends(-48*time.Hour, -time.Hour))), says: "expired"},
		{name: "an intermediate of tomorrow", chain: by(newForger(t, ca, ends(24*time.Hour, 48*time.Hour))), says: "not yet valid"},
		{name: "an intermediate too deep", chain: by(newForger(t, ca, func(c *x509.Certificate) { c.MaxPathLenZero = true }).below(func(*x509.Certificate) {})), says: "too many intermediates"},
		{name: "an intermediate for other names", chain: by(newForger(t, ca, func(c *x509.Certificate) {
			c.PermittedURIDomains, c.PermittedDNSDomains, c.PermittedDNSDomainsCritical = []string{"foreign.test"}, []string{"foreign.test"}, true
		})), says: "not permitted"},
		{name: "an intermediate for signing code", chain: by(newForger(t, ca, usage(x509.ExtKeyUsageCodeSigning))), says: "key usage"},
		{name: "a forged signature", chain: func(c []*x509.Certificate) []*x509.Certificate {
			der := slices.Clone(c[0].Raw)
			der[len(der)-1] ^= 1
			leaf, err := x509.ParseCertificate(der)
			if err != nil {
				t.Errorf("caclienttest: %v", err)
				return nil
			}
			return append([]*x509.Certificate{leaf}, c[1:]...)
		}, says: "signed by unknown authority"},
		{name: "17 certificates", chain: func(c []*x509.Certificate) []*x509.Certificate { return append(slices.Clone(c), many...) }, says: "16"},
		{name: "an RSA key of 16,384 bits", chain: func(c []*x509.Certificate) []*x509.Certificate { return append(slices.Clone(c), giant) }, says: "bits"},
	}
	if f.dial == nil {
		return all
	}
	all = append(all,
		mutation{name: "nothing", body: func([]byte) []byte { return nil }},
		mutation{name: "noise", body: func(b []byte) []byte { return bytes.Repeat([]byte{0xa5, 0x5a, '"', 0}, len(b)/4) }},
		mutation{name: "the first half", body: func(b []byte) []byte { return b[:len(b)/2] }},
		mutation{name: "3 MiB behind it", body: func(b []byte) []byte { return append(slices.Clone(b), bytes.Repeat([]byte{' '}, 3<<20)...) }},
		mutation{name: "a private key", body: func(b []byte) []byte {
			key, err := pki.NewKey(pki.ECDSAP256)
			if err != nil {
				t.Errorf("caclienttest: %v", err)
			}
			text, err := pki.MarshalPrivateKeyPEM(key)
			if err != nil {
				t.Errorf("caclienttest: %v", err)
			}
			return text
		}},
		mutation{name: "a certificate that is damaged", body: func(b []byte) []byte {
			if bytes.Contains(b, []byte("-----BEGIN CERTIFICATE-----")) {
				return bytes.Replace(b, []byte("MII"), []byte("AII"), 1)
			}
			return bytes.Replace(b, []byte{0x30, 0x82}, []byte{0x31, 0x82}, 1) // DER
		}},
	)
	if !f.api.GRPC {
		for text, name := range map[string]string{"null": "null", "{}": "no fields", "[]": "a list", `"x"`: "a text"} {
			all = append(all, mutation{name: name, body: func([]byte) []byte { return []byte(text) }})
		}
		all = append(all, mutation{name: "a million brackets", body: func([]byte) []byte { return bytes.Repeat([]byte{'['}, 1<<20) }})
	}
	return all
}

// harmless are answers that a client puts in order.
func harmless(ca *spiffetest.CA) []mutation {
	return []mutation{
		{name: "the root behind it", chain: func(c []*x509.Certificate) []*x509.Certificate { return append(slices.Clone(c), ca.Root()) }},
		{name: "the leaf twice", chain: func(c []*x509.Certificate) []*x509.Certificate { return append(c[:1:1], c...) }},
		{name: "everything twice, and the roots", chain: func(c []*x509.Certificate) []*x509.Certificate {
			return slices.Concat(c, []*x509.Certificate{ca.Root()}, c, []*x509.Certificate{ca.Root()})
		}},
	}
}
