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

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
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

// hostile is what the faults in the tables below are made of.
type hostile struct {
	t       testing.TB
	ca      *spiffetest.CA
	td      spiffe.TrustDomain
	hasID   bool    // the leaf has a SPIFFE ID, and no DNS name
	name    pki.SAN // of the leaf
	good    *forger
	earlier []*x509.Certificate // the answer to another request
}

func newHostile(t testing.TB, f *Fake) *hostile {
	t.Helper()
	h := &hostile{
		t: t, ca: f.ca, td: f.ca.TrustDomain(), hasID: !f.want.ID().IsZero(), name: f.want.Names()[0],
		good: newForger(t, f.ca),
	}
	h.earlier, _ = f.ca.Certificate(f.id.Path())
	return h
}

// leafFaults are those of a leaf, before it is signed.
var leafFaults = []struct {
	name, says string
	edit       func(h *hostile, c *x509.Certificate)
}{
	{"the names of another workload", "the leaf is for", func(h *hostile, c *x509.Certificate) {
		if h.hasID {
			c.URIs = []*url.URL{{Scheme: "spiffe", Host: h.td.String(), Path: "/ns/kube-system/sa/admin"}}
		} else {
			c.DNSNames = []string{"admin" + h.name.Value}
		}
	}},
	{"two names", "2 URI names", func(_ *hostile, c *x509.Certificate) {
		c.URIs, c.DNSNames = append(c.URIs, c.URIs...), append(c.DNSNames, c.DNSNames...)
	}},
	{"no name", "no subject alternative name", func(h *hostile, c *x509.Certificate) {
		c.URIs, c.DNSNames, c.Subject.CommonName = nil, nil, h.name.Value
	}},
	{"an ID of another trust domain", `the leaf is for "spiffe://foreign.test/web"`, uri("spiffe://foreign.test/web")},
	{"the ID of the trust domain", `for "spiffe://example.org"`, uri("spiffe://example.org")},
	{"an ID in capitals", "upper case", uri("spiffe://EXAMPLE.ORG/web")},
	{"an ID with a query", "invalid ID", uri("spiffe://example.org/web?admin")},
	{"a URI that is no ID", "invalid ID", uri("https://example.org/web")},
	{"a CA's leaf", "CA", func(_ *hostile, c *x509.Certificate) { c.IsCA = true }},
	{"a leaf that may sign certificates", "keyCertSign", func(_ *hostile, c *x509.Certificate) {
		c.KeyUsage |= x509.KeyUsageCertSign
	}},
	{"a leaf that may sign revocation lists", "cRLSign", func(_ *hostile, c *x509.Certificate) {
		c.KeyUsage |= x509.KeyUsageCRLSign
	}},
	{"a leaf that may not sign in a handshake", "digitalSignature", func(_ *hostile, c *x509.Certificate) {
		c.KeyUsage = x509.KeyUsageKeyAgreement
	}},
	{"no key usage", "no key usage", func(_ *hostile, c *x509.Certificate) { c.KeyUsage = 0 }},
	{"usage for signing code", "incompatible key usage", ofLeaf(usage(x509.ExtKeyUsageCodeSigning))},
	{"usage for clients alone", "key usage", ofLeaf(usage(x509.ExtKeyUsageClientAuth))},
	{"usage for servers alone", "key usage", ofLeaf(usage(x509.ExtKeyUsageServerAuth))},
	{"expired", "expired", ofLeaf(valid(-48*time.Hour, -time.Hour))},
	{"not yet valid", "not yet valid", ofLeaf(valid(time.Hour, 2*time.Hour))},
	{"an unknown critical extension", "unhandled critical extension", func(_ *hostile, c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: []int{1, 3, 6, 1, 4, 1, 99999, 1}, Critical: true,
			Value: []byte{5, 0}}}
	}},
	{"a leaf of 70 KiB", "the limit is", func(_ *hostile, c *x509.Certificate) {
		c.Subject.OrganizationalUnit = []string{strings.Repeat("x", 70<<10)}
	}},
}

// issuerFaults are those of the CA certificates above a leaf that is good.
var issuerFaults = []struct {
	name, says string
	issuer     func(h *hostile) *forger
}{
	{"another root", "signed by unknown authority", func(h *hostile) *forger {
		return newForger(h.t, spiffetest.NewCA(h.t, h.td.String()))
	}},
	{"the root of another trust domain", "signed by unknown authority", func(h *hostile) *forger {
		return newForger(h.t, spiffetest.NewCA(h.t, "foreign."+h.td.String()))
	}},
	{"an intermediate that is no CA", "is not a CA", func(h *hostile) *forger {
		return newForger(h.t, h.ca, func(c *x509.Certificate) {
			c.IsCA, c.KeyUsage = false, x509.KeyUsageDigitalSignature
		})
	}},
	{"an intermediate that may not sign", "chain", func(h *hostile) *forger {
		return newForger(h.t, h.ca, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign })
	}},
	{"an expired intermediate", "expired", func(h *hostile) *forger {
		return newForger(h.t, h.ca, valid(-48*time.Hour, -time.Hour))
	}},
	{"an intermediate of tomorrow", "not yet valid", func(h *hostile) *forger {
		return newForger(h.t, h.ca, valid(24*time.Hour, 48*time.Hour))
	}},
	{"an intermediate too deep", "too many intermediates", func(h *hostile) *forger {
		return newForger(h.t, h.ca, func(c *x509.Certificate) {
			c.MaxPathLenZero = true
		}).below(func(*x509.Certificate) {})
	}},
	{"an intermediate for other names", "not permitted", func(h *hostile) *forger {
		return newForger(h.t, h.ca, func(c *x509.Certificate) {
			c.PermittedURIDomains, c.PermittedDNSDomains, c.PermittedDNSDomainsCritical = []string{"foreign.test"}, []string{"foreign.test"}, true
		})
	}},
	{"an intermediate for signing code", "key usage", func(h *hostile) *forger {
		return newForger(h.t, h.ca, usage(x509.ExtKeyUsageCodeSigning))
	}},
}

// chainFaults are those of a chain that is good otherwise.
var chainFaults = []struct {
	name, says string
	edit       func(h *hostile, chain []*x509.Certificate) []*x509.Certificate
}{
	{"no certificate", "", func(*hostile, []*x509.Certificate) []*x509.Certificate { return nil }},
	{"the answer to another request", "public key", func(h *hostile, _ []*x509.Certificate) []*x509.Certificate {
		return h.earlier
	}},
	{"the root in the place of the leaf", "public key", func(h *hostile, _ []*x509.Certificate) []*x509.Certificate {
		return []*x509.Certificate{h.ca.Root()}
	}},
	{"two leaves", "is not a CA", func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
		return append(slices.Clone(c), h.earlier[0])
	}},
	{"another root, and that root", "signed by unknown authority",
		func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
			stranger := spiffetest.NewCA(h.t, h.td.String())
			return append(newForger(h.t, stranger).again(c[0]), stranger.Root())
		}},
	{"a missing intermediate", "signed by unknown authority",
		func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
			return h.good.again(c[0])[:1]
		}},
	{"another intermediate than the issuer", "signed by unknown authority",
		func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
			return append(h.good.again(c[0])[:1], newForger(h.t, h.ca).chain...)
		}},
	{"a forged signature", "signed by unknown authority", func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
		der := slices.Clone(c[0].Raw)
		der[len(der)-1] ^= 1
		leaf, err := x509.ParseCertificate(der)
		if err != nil {
			h.t.Errorf("caclienttest: %v", err)
			return nil
		}
		return append([]*x509.Certificate{leaf}, c[1:]...)
	}},
	{"17 certificates", "16", func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
		chain := slices.Clone(c)
		for range 17 {
			chain = append(chain, h.good.below(func(*x509.Certificate) {}).chain[0])
		}
		return chain
	}},
	{"an RSA key of 16,384 bits", "bits", func(h *hostile, c []*x509.Certificate) []*x509.Certificate {
		return append(slices.Clone(c), h.good.giant())
	}},
}

// bodyFaults are those of an answer on the wire.
var bodyFaults = []struct {
	name string
	edit func(body []byte) []byte
}{
	{"nothing", func([]byte) []byte { return nil }},
	{"noise", func(b []byte) []byte { return bytes.Repeat([]byte{0xa5, 0x5a, '"', 0}, len(b)/4) }},
	{"the first half", func(b []byte) []byte { return b[:len(b)/2] }},
	{"3 MiB behind it", func(b []byte) []byte { return append(slices.Clone(b), bytes.Repeat([]byte{' '}, 3<<20)...) }},
	{"a private key", func([]byte) []byte {
		key, err := pki.NewKey("ecdsa-p256")
		if err != nil {
			panic(err) // there is no randomness
		}
		text, err := pki.MarshalPrivateKeyPEM(key)
		if err != nil {
			panic(err)
		}
		return text
	}},
	{"a certificate that is damaged", func(b []byte) []byte {
		if bytes.Contains(b, []byte("-----BEGIN CERTIFICATE-----")) {
			return bytes.Replace(b, []byte("MII"), []byte("AII"), 1)
		}
		return bytes.Replace(b, []byte{0x30, 0x82}, []byte{0x31, 0x82}, 1) // DER
	}},
}

// jsonFaults are those of an answer in JSON.
var jsonFaults = map[string]string{
	"null": "null", "no fields": "{}", "a list": "[]", "a text": `"x"`,
	"a million brackets": strings.Repeat("[", 1<<20),
}

// uri returns a fault: the one name of the leaf is a URI.
func uri(text string) func(*hostile, *x509.Certificate) {
	u, err := url.Parse(text)
	if err != nil {
		panic(err) // a constant
	}
	return func(_ *hostile, c *x509.Certificate) { c.URIs, c.DNSNames = []*url.URL{u}, nil }
}

// usage returns an edit of the extended key usages.
func usage(u ...x509.ExtKeyUsage) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.ExtKeyUsage = u }
}

// valid returns an edit of the dates, which are given from now.
func valid(from, to time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		now := time.Now()
		c.NotBefore, c.NotAfter = now.Add(from), now.Add(to)
	}
}

func ofLeaf(edit func(*x509.Certificate)) func(*hostile, *x509.Certificate) {
	return func(_ *hostile, c *x509.Certificate) { edit(c) }
}

// giant returns a CA certificate with a key of which there is no half that signs: that it is large is enough to keep
// verifiers busy.
func (f *forger) giant() *x509.Certificate {
	modulus := new(big.Int).SetBit(new(big.Int).Lsh(big.NewInt(1), 16383), 0, 1)
	return f.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "giant"}, NotBefore: f.chain[0].NotBefore, NotAfter: f.chain[0].NotAfter, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, &rsa.PublicKey{N: modulus, E: 65537})
}

// step is 1 if [Run] tries all answers, and 4 if it tries every fourth of those that package caclient judges, which
// does so alike for all clients.
var step = 1

// Fewer sets step to 4, unless SVIDKIT_ROUNDS is 4, and skips a test with -short.
func Fewer(t testing.TB) {
	t.Helper()
	rounds.NotShort(t)
	step = max(1, 4/rounds.Of(1))
}

// mutations returns what [Run] has every client refuse, for answers to requests for what f certifies.
func mutations(t testing.TB, f *Fake) []mutation {
	t.Helper()
	h := newHostile(t, f)
	var all []mutation
	for i := 0; i < len(leafFaults); i += step {
		fault := leafFaults[i]
		all = append(all, mutation{name: fault.name, says: fault.says, template: func(c *x509.Certificate) {
			fault.edit(h, c)
		}})
	}
	for i := 0; i < len(issuerFaults); i += step {
		issuer := issuerFaults[i].issuer(h)
		all = append(all, mutation{name: issuerFaults[i].name, says: issuerFaults[i].says,
			chain: func(chain []*x509.Certificate) []*x509.Certificate {
				return issuer.again(chain[0])
			}})
	}
	for _, fault := range chainFaults {
		all = append(all, mutation{name: fault.name, says: fault.says,
			chain: func(chain []*x509.Certificate) []*x509.Certificate {
				return fault.edit(h, chain)
			}})
	}
	if f.dial == nil {
		return all
	}
	for _, fault := range bodyFaults {
		all = append(all, mutation{name: fault.name, body: fault.edit})
	}
	if !f.api.GRPC {
		for name, text := range jsonFaults {
			all = append(all, mutation{name: name, body: func([]byte) []byte { return []byte(text) }})
		}
	}
	return all
}

// harmless are answers that a client puts in order.
func harmless(ca *spiffetest.CA) []mutation {
	return []mutation{
		{name: "the root behind it", chain: func(c []*x509.Certificate) []*x509.Certificate {
			return append(slices.Clone(c), ca.Root())
		}},
		{name: "the leaf twice", chain: func(c []*x509.Certificate) []*x509.Certificate {
			return append(c[:1:1], c...)
		}},
		{name: "everything twice, and the roots", chain: func(c []*x509.Certificate) []*x509.Certificate {
			return slices.Concat(c, []*x509.Certificate{ca.Root()}, c, []*x509.Certificate{ca.Root()})
		}},
	}
}
