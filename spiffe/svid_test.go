package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

// hardware is a key that cannot be exported.
type hardware struct{ crypto.Signer }

func p256Chain(t testing.TB) ([]*x509.Certificate, crypto.Signer) {
	t.Helper()
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	mid := caSpec("int1", "spiffe://example.org").issue(root)
	leaf := leafSpec(webID.String()).issue(mid)
	return []*x509.Certificate{leaf.parse(t), mid.parse(t)}, leaf.key
}

func TestSVID(t *testing.T) {
	t.Parallel()
	chain, key := p256Chain(t)
	given := []*x509.Certificate{chain[0], chain[1]}
	s := must.Get(spiffe.NewSVID(given, key))(t)
	given[0] = nil

	assert.Equal(t, webID, s.ID())
	assert.Equal(t, webID.String(), s.String())
	assert.Same(t, chain[0], s.Leaf())
	assert.Equal(t, chain, s.Chain())
	s.Chain()[0] = nil
	assert.Same(t, chain[0], s.Chain()[0])
	assert.Equal(t, key, s.Signer())
	assert.Equal(t, chain[0].NotBefore, s.Leaf().NotBefore)
	assert.Equal(t, chain[0].NotAfter, s.NotAfter())
	assert.Same(t, s.TLSCertificate(), s.TLSCertificate(), "built once")
	assert.Equal(t, &tls.Certificate{Certificate: [][]byte{chain[0].Raw, chain[1].Raw}, PrivateKey: key, Leaf: chain[0]}, s.TLSCertificate())
	self := must.Get(s.SVID())(t)
	assert.Same(t, s, self)
	assert.Equal(t, webID.String(), s.GoString())
}

func TestSVIDRoundTrip(t *testing.T) {
	t.Parallel()
	chain, key := p256Chain(t)
	s := must.Get(spiffe.NewSVID(chain, key))(t)

	certs, der := must.Get2(s.MarshalDER())(t)
	fromDER := must.Get(spiffe.ParseSVID(certs, der))(t)
	certsPEM, keyPEM := must.Get2(s.MarshalPEM())(t)
	fromPEM := must.Get(spiffe.ParseSVIDPEM(certsPEM, keyPEM))(t)
	for _, got := range []*spiffe.SVID{fromDER, fromPEM} {
		assert.Equal(t, webID, got.ID())
		assert.Equal(t, s.TLSCertificate().Certificate, got.TLSCertificate().Certificate)
		assert.Equal(t, key, got.Signer())
	}

	sec1 := must.Get(x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey)))(t)
	_, err := spiffe.ParseSVIDPEM(certsPEM, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: sec1}))
	assert.NoError(t, err, "SEC1 is fine in PEM")

	kept, err := spiffe.NewSVID(chain, hardware{key})
	require.NoError(t, err, "any signer will do")
	_, _, err = kept.MarshalDER()
	assert.EqualError(t, err, `spiffe: SVID: "spiffe://example.org/ns/prod/sa/web": a key of type spiffe_test.hardware cannot be exported`)
	_, _, err = kept.MarshalPEM()
	assert.EqualError(t, err, `spiffe: SVID: "spiffe://example.org/ns/prod/sa/web": a key of type spiffe_test.hardware cannot be exported`)
}

func TestSVIDErrors(t *testing.T) {
	t.Parallel()
	chain, key := p256Chain(t)
	certs, keyDER := must.Get2(must.Do(spiffe.NewSVID(chain, key)).MarshalDER())(t)

	huge := *chain[1]
	huge.PublicKey = &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 8192), E: 65537}
	_, other := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	for _, c := range []struct {
		name  string
		chain []*x509.Certificate
		key   crypto.Signer
		text  string
		is    error
	}{
		{"no certificate", nil, key, "spiffe: SVID: no certificate", nil},
		{"nil certificate", []*x509.Certificate{chain[0], nil}, key, "spiffe: SVID: chain: the chain has a nil certificate", nil},
		{"no key", chain, nil, `spiffe: SVID: "spiffe://example.org/ns/prod/sa/web": no private key`, nil},
		{"other key", chain, other, `spiffe: SVID: "spiffe://example.org/ns/prod/sa/web": the private key does not belong to the first certificate`, nil},
		{"too many", append(make([]*x509.Certificate, 16), chain[0]), key, "spiffe: SVID: chain: 17 certificates, the limit is 16: input too large", spiffe.ErrTooLarge},
		{"huge key", []*x509.Certificate{chain[0], &huge}, key, "spiffe: SVID: chain: certificate 2 has an RSA key of 8193 bits, the limit is 8192: input too large", spiffe.ErrTooLarge},
		{"CA first", []*x509.Certificate{chain[1], chain[0]}, key, "spiffe: invalid X.509-SVID: it is a CA certificate", nil},
	} {
		s, err := spiffe.NewSVID(c.chain, c.key)
		assert.Nil(t, s)
		assert.EqualError(t, err, c.text, c.name)
		if c.is != nil {
			assert.ErrorIs(t, err, c.is, c.name)
		}
	}

	_, err := spiffe.ParseSVID(bytes.Repeat(chain[0].Raw, 17), keyDER)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = spiffe.ParseSVID(append(bytes.Clone(certs), 0x30, 0), keyDER)
	assert.ErrorContains(t, err, "spiffe: SVID: certificate 3: x509: ")
	_, err = spiffe.ParseSVID(make([]byte, 1<<20+1), keyDER)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = spiffe.ParseSVID(certs, make([]byte, 1<<20))
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = spiffe.ParseSVIDPEM(make([]byte, 1<<20+1), nil)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = spiffe.ParseSVIDPEM(nil, nil)
	assert.EqualError(t, err, "spiffe: SVID: certificates: no certificate found")

	certsPEM, keyPEM := must.Get2(must.Do(spiffe.NewSVID(chain, key)).MarshalPEM())(t)
	damaged := bytes.Replace(certsPEM, []byte("-----END"), []byte("----END"), 1)
	_, err = spiffe.ParseSVIDPEM(append(damaged, certsPEM...), keyPEM)
	require.ErrorContains(t, err, "damaged", "a block that package pem would skip")
	_, err = spiffe.ParseSVIDPEM(bytes.Repeat(certsPEM, 9), keyPEM)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
}

// What stands above the leaf has to be a CA certificate: NewSVID and the parsers refuse it as the Verifier does.
func TestSVIDSigners(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-13", "X5-17", "X5-30")
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	bundle, err := spiffe.NewBundle(webID.TrustDomain(), spiffe.BundleContents{X509Authorities: []*x509.Certificate{root.parse(t)}})
	require.NoError(t, err)
	verifier := must.Get(spiffe.NewVerifier(bundle, spiffe.AllowAnyPeer(), atNow))(t)
	for _, c := range []struct {
		name, rule, text string
		edit             func(*certSpec)
	}{
		{"good", "", "", func(*certSpec) {}},
		{"without key usage", "", "", func(s *certSpec) { s.usage = 0 }}, // restricts nothing
		{"no CA", "X5-13", "spiffe: invalid X.509-SVID: certificate 2 of the chain is not a CA certificate", func(s *certSpec) { s.ca, s.usage = false, x509.KeyUsageDigitalSignature }},
		{"no CA, but the key usage of one", "X5-13", "spiffe: invalid X.509-SVID: certificate 2 of the chain is not a CA certificate", func(s *certSpec) { s.ca = false }},
		{"without basic constraints", "X5-13", "spiffe: invalid X.509-SVID: certificate 2 of the chain is not a CA certificate", func(s *certSpec) { s.ca, s.noBasic = false, true }},
		{"without keyCertSign", "X5-17", "spiffe: invalid X.509-SVID: the key usage of certificate 2 of the chain lacks keyCertSign",
			func(s *certSpec) { s.usage = x509.KeyUsageCRLSign }},
	} {
		mid := caSpec("int1", "spiffe://example.org").with(c.edit).issue(root)
		leaf := leafSpec(webID.String()).issue(mid)
		chain := []*x509.Certificate{leaf.parse(t), mid.parse(t)}
		_, verifyErr := verifier.VerifyChain(chain, spiffe.AnyRole)
		keyDER := must.Get(x509.MarshalPKCS8PrivateKey(leaf.key))(t)
		_, newErr := spiffe.NewSVID(chain, leaf.key)
		_, derErr := spiffe.ParseSVID(slices.Concat(leaf.der, mid.der), keyDER)
		_, pemErr := spiffe.ParseSVIDPEM([]byte(pemOf(leaf, mid)), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
		for _, err := range []error{newErr, derErr, pemErr} {
			if c.rule == "" {
				require.NoError(t, err, c.name)
				require.NoError(t, verifyErr, c.name)
				continue
			}
			require.Error(t, verifyErr, c.name)
			assert.EqualError(t, err, c.text, c.name)
			e := must.As[*spiffe.ParseError](err)(t, c.name)
			assert.Equal(t, c.rule, e.Rule, c.name)
		}
	}
}

// One file may have both, and be given twice. Each argument has one job all the same.
func TestParseSVIDPEMOfOneFile(t *testing.T) {
	t.Parallel()
	chain, key := p256Chain(t)
	certs, pkcs8 := must.Get2(must.Do(spiffe.NewSVID(chain, key)).MarshalPEM())(t)
	block := func(typ string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}) }
	sec1 := slices.Concat(block("EC PARAMETERS", []byte{6, 1, 1}),
		block("EC PRIVATE KEY", must.Do(x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey)))))
	otherKey := must.Do(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	other := block("PRIVATE KEY", must.Do(x509.MarshalPKCS8PrivateKey(otherKey)))
	damaged := bytes.Replace(certs, []byte("-----END"), []byte("----END"), 1)
	many := bytes.Repeat(certs[:bytes.Index(certs, []byte("-----END"))+len("-----END CERTIFICATE-----\n")], 20)
	both := func(parts ...[]byte) []byte { return slices.Concat(parts...) }
	for name, file := range map[string][]byte{
		"key last":              both(certs, pkcs8),
		"key first":             both(pkcs8, certs),
		"key in the middle":     both(certs[:bytes.Index(certs[1:], []byte("-----BEGIN"))+1], pkcs8, certs[bytes.Index(certs[1:], []byte("-----BEGIN"))+1:]),
		"with parameters":       both(sec1, certs),
		"parameters at the end": both(certs, sec1),
		"with comments":         both([]byte("the chain\n"), certs, []byte("the key\n"), pkcs8),
	} {
		s, err := spiffe.ParseSVIDPEM(file, file)
		require.NoError(t, err, name)
		assert.Equal(t, chain, s.Chain(), name)
		assert.Equal(t, key, s.Signer(), name)
	}
	for name, c := range map[string]struct {
		certs, key []byte
		ok         bool
	}{
		"another key among the certificates":       {both(other, certs), pkcs8, true},
		"other certificates beside the key":        {certs, both(many, pkcs8), true},
		"text at the end":                          {both(certs, pkcs8, []byte("x")), both(pkcs8, []byte("# end\n")), true},
		"a key that is damaged, where none counts": {both(certs, block("PRIVATE KEY", []byte("x"))), pkcs8, true},
	} {
		_, err := spiffe.ParseSVIDPEM(c.certs, c.key)
		assert.NoError(t, err, name)
	}
	for _, c := range []struct {
		name       string
		certs, key []byte
		text       string
	}{
		{"no key", certs, certs, "spiffe: SVID: private key: no private key found"},
		{"no certificates", pkcs8, pkcs8, "spiffe: SVID: certificates: no certificate found"},
		{"certificates in the place of the key only", pkcs8, both(certs, pkcs8), "spiffe: SVID: certificates: no certificate found"},
		{"the key in the place of the certificates only", both(certs, pkcs8), certs, "spiffe: SVID: private key: no private key found"},
		{"two keys", certs, both(pkcs8, certs, other), `spiffe: SVID: private key: a block "PRIVATE KEY" after the private key`},
		{"the same key twice", certs, both(pkcs8, pkcs8), `spiffe: SVID: private key: a block "PRIVATE KEY" after the private key`},
		{"a key of another certificate", both(certs, pkcs8), both(certs, other),
			`spiffe: SVID: "spiffe://example.org/ns/prod/sa/web": the private key does not belong to the first certificate`},
		{"an encrypted key", certs, both(certs, block("ENCRYPTED PRIVATE KEY", []byte{0x30, 0})), "spiffe: SVID: private key: the private key is encrypted; decrypt it first"},
		{"a damaged certificate", both(damaged, certs, pkcs8), pkcs8, "spiffe: SVID: certificates: 1 damaged PEM blocks"},
		{"something else", both(certs, block("CERTIFICATE REQUEST", nil)), pkcs8, `spiffe: SVID: certificates: block 3 is "CERTIFICATE REQUEST", not CERTIFICATE`},
		{"something else beside the key", certs, both(pkcs8, block("X509 CRL", nil)), `spiffe: SVID: private key: a block "X509 CRL" after the private key`},
	} {
		_, err := spiffe.ParseSVIDPEM(c.certs, c.key)
		assert.EqualError(t, err, c.text, c.name)
	}
	assert.ErrorIs(t, func() error { _, err := spiffe.ParseSVIDPEM(certs, bytes.Repeat(pkcs8, 1011)); return err }(), spiffe.ErrTooLarge)
}

// secretForms are the ways in which a number or bytes of a key could be printed.
func secretForms(key crypto.Signer, verbs []string) []string {
	var parts []any
	switch k := key.(type) {
	case *ecdsa.PrivateKey:
		d := must.Do(k.Bytes())
		parts = append(parts, new(big.Int).SetBytes(d), d[:8])
	case ed25519.PrivateKey:
		parts = append(parts, []byte(k)[:8], []byte(k.Seed())[8:16])
	case *rsa.PrivateKey:
		parts = append(parts, k.D, k.Primes[0])
	}
	var forms []string
	for _, p := range parts {
		for _, verb := range verbs {
			forms = append(forms, strings.Trim(fmt.Sprintf(verb, p), "[]{}"))
		}
		if b, ok := p.([]byte); ok {
			forms = append(forms, base64.StdEncoding.EncodeToString(b[:6]))
		}
	}
	return forms
}

// However an SVID is printed, logged or compared, its key does not show.
func TestSVIDDoesNotPrintItsKey(t *testing.T) {
	t.Parallel()
	verbs := []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%#x", "%d", "%o", "%b", "%c", "%U"}
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	keys := map[string]crypto.Signer{
		"P-256":   must.Do(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)),
		"Ed25519": leafSpec("").with(func(s *certSpec) { s.ed25519 = true }).signer(),
		"RSA":     must.Do(rsa.GenerateKey(rand.Reader, 2048)),
	}
	for name, key := range keys {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tmpl := leafSpec(webID.String()).issue(root).parse(t)
			tmpl.ExtraExtensions = tmpl.Extensions
			der := must.Do(x509.CreateCertificate(rand.Reader, tmpl, root.tmpl, key.Public(), root.key))
			leaf := must.Do(x509.ParseCertificate(der))
			s := must.Do(spiffe.NewSVID([]*x509.Certificate{leaf}, key))
			again := must.Do(spiffe.NewSVID([]*x509.Certificate{leaf}, key))

			var out strings.Builder
			values := []any{
				s, &s, *s, []*spiffe.SVID{s}, []spiffe.SVID{*s}, map[string]*spiffe.SVID{"a": s}, map[string]spiffe.SVID{"a": *s},
				struct{ S *spiffe.SVID }{s}, struct{ s *spiffe.SVID }{s}, struct{ S spiffe.SVID }{*s}, &struct{ s spiffe.SVID }{*s},
				struct{ S any }{s}, struct{ S any }{*s}, struct{ s spiffe.SVIDSource }{s}, fmt.Errorf("%v", s),
			}
			for _, v := range values {
				for _, verb := range verbs {
					fmt.Fprintf(&out, verb+"\n", v)
				}
				text := must.Get(json.Marshal(v))(t)
				out.Write(text)
				for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
					log := slog.New(h).With("with", v)
					log.Info("x", "svid", v, slog.Group("g", "svid", v), slog.Any("list", []any{v}))
				}
			}
			// testify prints through reflection, unexported fields too, without calling String.
			assert.Equal(failed{&out}, s, must.Do(spiffe.NewSVID([]*x509.Certificate{leaf}, hardware{key})))
			assert.Equal(failed{&out}, *s, *again)

			text := out.String()
			looked := 0
			for _, secret := range secretForms(key, verbs) {
				if len(secret) >= 8 { // a shorter one, of a number with zeros in front, may be there by chance
					looked++
					assert.False(t, strings.Contains(text, secret), "%q is in the output", secret)
				}
			}
			assert.GreaterOrEqual(t, looked, len(verbs)/2)
			assert.Contains(t, fmt.Sprintf("%v", s), webID.String())
			assert.Equal(t, webID.String(), fmt.Sprintf("%#v", s))

			// The test can fail: the parts do show the key.
			if _, ok := key.(ed25519.PrivateKey); ok {
				assert.Contains(t, fmt.Sprintf("%v", s.TLSCertificate()), secretForms(key, verbs)[0])
			}
		})
	}
}

// failed is a test that has failed and writes why.
type failed struct{ *strings.Builder }

func (f failed) Errorf(format string, args ...any) { fmt.Fprintf(f, format, args...) }

func TestSVIDLog(t *testing.T) {
	t.Parallel()
	chain, key := p256Chain(t)
	s := must.Do(spiffe.NewSVID(chain, key))
	var out bytes.Buffer
	slog.New(slog.NewJSONHandler(&out, nil)).Info("renewed", "svid", s)
	var line struct {
		SVID struct {
			ID       string `json:"id"`
			NotAfter string `json:"not_after"`
		}
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &line))
	assert.Equal(t, webID.String(), line.SVID.ID)
	assert.Equal(t, "2026-01-01T01:00:00Z", line.SVID.NotAfter)
}

func TestSnapshot(t *testing.T) {
	t.Parallel()
	chain, key := p256Chain(t)
	s := must.Do(spiffe.NewSVID(chain, key))
	home := bundleOf(t, "example.org", caSpec("ca1", "spiffe://example.org").issue(nil).parse(t))
	set := must.Do(spiffe.NewBundleSet(home))
	snap := spiffe.NewSnapshot(s, set)
	got := must.Get(snap.SVID())(t)
	assert.Same(t, s, got)
	assert.Same(t, set, snap.Bundles())
	b := must.Get(snap.Bundle(home.TrustDomain()))(t)
	assert.Same(t, home, b)
	_, err := snap.Bundle(spiffe.MustParseTrustDomain("other.test"))
	assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	assert.Panics(t, func() { spiffe.NewSnapshot(nil, set) })
	assert.Panics(t, func() { spiffe.NewSnapshot(s, nil) })
}

// checkParsed holds what came through a parser to the promises of an SVID.
func checkParsed(t *testing.T, s *spiffe.SVID, err error) {
	t.Helper()
	if err != nil {
		if s != nil || !strings.HasPrefix(err.Error(), "spiffe: ") {
			t.Fatalf("%v, %v", s, err)
		}
		return
	}
	if id, err := spiffe.IDFromCertificate(s.Leaf()); err != nil || id != s.ID() || id.Path() == "" || s.Leaf().IsCA {
		t.Fatalf("%v: %v, %v", s, id, err)
	}
	certs, key, err := s.MarshalDER()
	if err != nil {
		t.Fatal(err)
	}
	again, err := spiffe.ParseSVID(certs, key)
	if err != nil {
		t.Fatalf("%v does not come back: %v", s, err)
	}
	if again.ID() != s.ID() || len(again.Chain()) != len(s.Chain()) {
		t.Fatalf("%v came back as %v", s, again)
	}
}

func FuzzParseSVID(f *testing.F) {
	files := must.Get(filepath.Glob("testdata/x509/*.txt"))(f)
	for _, file := range files {
		v := readX509Vector(f, file)
		if certs, ok := v.sections["svid"]; ok {
			f.Add(must.Do(base64.StdEncoding.DecodeString(certs)), must.Do(base64.StdEncoding.DecodeString(v.sections["key"])))
		}
	}
	f.Fuzz(func(t *testing.T, certs, key []byte) {
		s, err := spiffe.ParseSVID(certs, key)
		checkParsed(t, s, err)
	})
}

func FuzzParseSVIDPEM(f *testing.F) {
	chain, key := p256Chain(f)
	certs, keyPEM := must.Get2(must.Do(spiffe.NewSVID(chain, key)).MarshalPEM())(f)
	sec1 := must.Do(x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey)))
	f.Add(certs, keyPEM)
	f.Add(append([]byte("a comment\n"), certs...), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: sec1}))
	f.Add(keyPEM, certs)
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n"), []byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, certs, key []byte) {
		s, err := spiffe.ParseSVIDPEM(certs, key)
		checkParsed(t, s, err)
	})
}

// A leaf's faults are told apart by their rule.
func TestLeafRules(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.4-2")
	files := must.Get(filepath.Glob("testdata/x509/*.txt"))(t)
	rules := make(map[string]int)
	for _, file := range files {
		v := readX509Vector(t, file)
		if v.header["stage"] != "leaf" {
			continue
		}
		chain := must.Get(parseBlocks(v.sections["chain"]))(t)
		_, err := spiffe.NewSVID(chain, leafSpec("").signer())
		e := must.As[*spiffe.ParseError](err)(t, v.header["id"])
		assert.Equal(t, v.header["rule"], e.Rule, v.header["id"])
		rules[e.Rule]++
	}
	for _, rule := range []string{"X5-3", "X5-32", "X5-33", "X5-34", "X5-35", "X5-36", "X5-37", "X5-40"} {
		assert.NotZero(t, rules[rule], rule)
	}
}
