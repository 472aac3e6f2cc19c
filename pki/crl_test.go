package pki_test

import (
	"cmp"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

var crlReasons = map[int]string{0: "unspecified", 1: "keyCompromise", 4: "superseded", 6: "certificateHold"}

// parseCRL reads one list.
func parseCRL(der []byte) (*x509.RevocationList, error) {
	lists, err := readCRLs([]byte(block("X509 CRL", der)))
	if err != nil {
		return nil, err
	}
	return lists[0], nil
}

func crlLines(c *x509.RevocationList) string {
	var lines []string
	for _, r := range c.RevokedCertificateEntries {
		text := r.SerialNumber.Text(16)
		if len(text)%2 == 1 {
			text = "0" + text
		}
		lines = append(lines, text+" "+crlReasons[r.ReasonCode])
	}
	slices.SortFunc(lines, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return strings.Join(lines, ", ")
}

func TestCheckCRL(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	ca := testCA{foreignRoot(t, key, func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign }), key}
	list := ca.crl(t)
	crl := must.Get(readCRLs(list))(t)[0]
	with := func(key crypto.Signer, edit func(*x509.Certificate)) keyCertPEM {
		c := *ca.cert()
		c.PublicKey, c.SignatureAlgorithm, c.ExtraExtensions = key.Public(), 0, nil
		edit(&c)
		root := certsPEM(createCertificate(t, &c, key))
		return keyCertPEM{Cert: root, Signer: key, Roots: root, CRL: list}
	}
	same := func(*x509.Certificate) {}
	for name, tc := range map[string]struct {
		p    keyCertPEM
		want string // "" for a list that counts
	}{
		"another name":       {with(ca.key, func(c *x509.Certificate) { c.RawSubject, c.Subject.CommonName = nil, "Other" }), "none is of this name"},
		"another key":        {with(p256Key, same), "the signature is not by"},
		"another key ID":     {with(ca.key, func(c *x509.Certificate) { c.SubjectKeyId = []byte("other") }), "by another key of"},
		"may not sign lists": {with(ca.key, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCertSign }), "does not include CRL signing"},
		"another kind":       {with(rsaKey(), same), "the signature is not by"},
		"the CA":             {with(ca.key, same), ""},
		"any key usage":      {with(ca.key, func(c *x509.Certificate) { c.KeyUsage = 0 }), ""},
		"no key ID": {with(ca.key, func(c *x509.Certificate) { // which crypto/x509 gives each CA that it knows of
			c.SubjectKeyId, c.IsCA, c.BasicConstraintsValid = nil, false, false
			id := asn1.ObjectIdentifier{2, 5, 29, 19}
			c.ExtraExtensions = []pkix.Extension{{Id: id, Critical: true, Value: unhex("30030101ff")}}
		}), ""},
	} {
		root := must.Get(pki.ParseCertificatesPEM(tc.p.Roots))(t)[0]
		require.Equal(t, name == "no key ID", root.SubjectKeyId == nil)
		if err := checkCRL(crl, root); tc.want == "" {
			require.NoError(t, err, name)
			continue
		} else {
			requireIs(t, err, errCRL, name)
		}
		err := must.Err(tc.p.read(during))
		requireIs(t, err, errCRL, name)
		require.ErrorContains(t, err, tc.want, name)
	}
	back := must.Get(readCRLs(crlsPEM(crl, crl)))(t)
	require.Len(t, back, 2)
	require.Equal(t, crl.Raw, back[1].Raw)
}

// TestCRLFiles reads what another program makes: the header of each file says what is expected.
func TestCRLFiles(t *testing.T) {
	t.Parallel()
	files := must.Get(filepath.Glob("testdata/crl/openssl-*.pem"))(t)
	require.Greater(t, len(files), 20)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			data := must.Get(os.ReadFile(file))(t)
			head := map[string]string{}
			for line := range strings.Lines(string(data)) {
				if k, v, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ":"); ok {
					head[k] = strings.TrimSpace(v)
				}
			}
			lists, err := readCRLs(data)
			if head["expect"] != "ok" {
				require.Equal(t, "ErrCRL", head["expect"])
				requireIs(t, err, errCRL)
				return
			}
			require.NoError(t, err)
			require.Len(t, lists, 1)
			require.Equal(t, head["entries"], crlLines(lists[0]))
			caPEM := must.Get(os.ReadFile("testdata/crl/ca-" + head["ca"] + ".pem"))(t)
			require.NoError(t, checkCRL(lists[0], must.Get(pki.ParseCertificatesPEM(caPEM))(t)[0]))
			require.Equal(t, time.Date(2026, 4, 1, 12, 0, 0, 0, time.UTC), lists[0].NextUpdate)
		})
	}
}

// ---- lists made by hand

// crlParts is a list in parts; what is nil is as it should be, and what is empty is left out.
type crlParts struct {
	version, inner, issuer, this, next, entries, exts, tail []byte
	alg, sig, end, after                                    []byte
	outer                                                   byte
}

const (
	tagUTC, tagGeneralized, tagEnum = 0x17, 0x18, 0x0a
)

func utc(s string) []byte             { return der(tagUTC, []byte(s)) }
func generalized(s string) []byte     { return der(tagGeneralized, []byte(s)) }
func integer(b ...byte) []byte        { return der(tagInt, b) }
func crlEntries(e ...[]byte) []byte   { return der(tagSeq, e...) }
func crlEntry(parts ...[]byte) []byte { return der(tagSeq, parts...) }
func crlExts(e ...[]byte) []byte      { return der(0xa0, der(tagSeq, e...)) }

var (
	oidReason    = der(tagOID, unhex("551d15"))
	oidNumber    = der(tagOID, unhex("551d14"))
	oidDelta     = der(tagOID, unhex("551d1b"))
	oidPoint     = der(tagOID, unhex("551d1c"))
	oidCRLIssuer = der(tagOID, unhex("551d1d"))
	oidAKI       = der(tagOID, unhex("551d23"))
	algEd25519   = der(tagSeq, der(tagOID, unhex("2b6570")))
	crlDate      = "260301120000Z"
	goodEntry    = crlEntry(integer(5), utc(crlDate))
)

func (p crlParts) der(t testing.TB) []byte {
	t.Helper()
	or := func(b []byte, otherwise []byte) []byte {
		if b != nil {
			return b
		}
		return otherwise
	}
	tbs := der(tagSeq, or(p.version, integer(1)), or(p.inner, algEd25519), or(p.issuer, der(tagSeq, rdn(oidCN, tagUTF8, "CA"))),
		or(p.this, utc(crlDate)), or(p.next, utc("260401120000Z")), or(p.entries, crlEntries(goodEntry)),
		or(p.exts, crlExts(ext(oidNumber, value(integer(1))))), p.tail)
	sig := must.Get(edKey.Sign(rand.Reader, tbs, crypto.Hash(0)))(t)
	out := der(cmp.Or(p.outer, tagSeq), tbs, or(p.alg, algEd25519), or(p.sig, der(tagBits, []byte{0}, sig)), p.end)
	return append(out, p.after...)
}

func reasonExt(v ...byte) []byte { return der(tagSeq, ext(oidReason, value(der(tagEnum, v)))) }

func pointExt(parts ...[]byte) []byte {
	return crlExts(ext(oidPoint, yes, value(der(tagSeq, parts...))))
}

func hostileCRLs() map[string]crlParts {
	entry := func(parts ...[]byte) crlParts { return crlParts{entries: crlEntries(crlEntry(parts...))} }
	at := utc(crlDate)
	nothing := []byte{}
	fullName := der(0xa0, der(0xa0, der(0x86, []byte("http://crl"))))
	return map[string]crlParts{
		// The frame.
		"a SET":                          {outer: tagSet},
		"bytes behind it":                {after: []byte{0}},
		"a second list behind it":        {after: der(tagSeq)},
		"a fourth element":               {end: der(tagNull)},
		"no signature":                   {sig: nothing},
		"an empty BIT STRING":            {sig: der(tagBits)},
		"a signature in an OCTET STRING": {sig: der(tagOctets, make([]byte, 64))},
		"no algorithm":                   {alg: nothing},
		"another algorithm outside":      {alg: algECDSA256},
		"another algorithm inside":       {inner: algECDSA256},
		"an empty algorithm":             {alg: der(tagSeq), inner: der(tagSeq)},
		"an unknown algorithm":           {alg: der(tagSeq, oidUnknown), inner: der(tagSeq, oidUnknown)},
		"Ed25519 with parameters":        {alg: der(tagSeq, der(tagOID, unhex("2b6570")), der(tagNull)), inner: der(tagSeq, der(tagOID, unhex("2b6570")), der(tagNull))},
		"SHA-1":                          {alg: der(tagSeq, der(tagOID, unhex("2a864886f70d010105")), der(tagNull)), inner: der(tagSeq, der(tagOID, unhex("2a864886f70d010105")), der(tagNull))},
		"RSA-PSS without parameters":     {alg: der(tagSeq, der(tagOID, unhex("2a864886f70d01010a"))), inner: der(tagSeq, der(tagOID, unhex("2a864886f70d01010a")))},

		// The list.
		"version 1, not written":     {version: nothing},
		"version number 0":           {version: integer(0)},
		"version number 2":           {version: integer(2)},
		"version number 257":         {version: integer(1, 1)},
		"version with a zero":        {version: integer(0, 1)},
		"version as explicit tag":    {version: der(0xa0, integer(1))},
		"no issuer":                  {issuer: nothing},
		"an empty issuer":            {issuer: der(tagSeq)},
		"no thisUpdate":              {this: nothing, next: nothing},
		"no nextUpdate":              {next: nothing},
		"no nextUpdate and no entry": {next: nothing, entries: nothing},
		"nextUpdate before":          {next: utc("260228120000Z")},
		"entries twice":              {exts: crlEntries(goodEntry)},
		"entries as a SET":           {entries: der(tagSet, goodEntry)},
		"extensions empty":           {exts: der(0xa0)},
		"extensions twice":           {tail: crlExts(ext(oidUnknown, value()))},
		"extensions not wrapped":     {exts: der(tagSeq, ext(oidNumber, value(integer(1))))},
		"extensions and more":        {exts: der(0xa0, der(tagSeq, ext(oidUnknown, value())), der(tagNull))},
		"extensions with tag 1":      {exts: der(0xa1, der(tagSeq, ext(oidUnknown, value())))},
		"something at the end":       {tail: der(tagNull)},

		// Times.
		"a time with offset zero":       {this: utc("260301120000+0000")},
		"a time without a zone":         {this: utc("2603011200000")},
		"a time in lower case":          {this: utc("260301120000z")},
		"month 13":                      {this: utc("261301120000Z")},
		"month 0":                       {this: utc("260001120000Z")},
		"30 February":                   {this: utc("260230120000Z")},
		"hour 24":                       {this: utc("260301240000Z")},
		"second 60":                     {this: utc("260301120060Z")},
		"a letter":                      {this: utc("26030112000aZ")},
		"a sign":                        {this: utc("-60301120000Z")},
		"a blank":                       {this: utc(" 60301120000Z")},
		"an empty time":                 {this: utc("")},
		"generalized with fractions":    {next: generalized("20500401120000.5Z")},
		"generalized without seconds":   {next: generalized("205004011200Z")},
		"a UTC time of 15 bytes":        {next: utc("20500401120000Z")},
		"a generalized one of 13 bytes": {next: generalized("500401120000Z")},
		"a time as text":                {this: der(tagUTF8, []byte(crlDate))},

		// Entries.
		"an entry that is no SEQUENCE": {entries: crlEntries(der(tagSet, integer(5), at))},
		"an empty entry":               entry(),
		"an entry without time":        entry(integer(5)),
		"an entry without number":      entry(at),
		"an empty number":              entry(der(tagInt), at),
		"a negative number":            entry(integer(0xff), at),
		"a number with a zero":         entry(integer(0, 5), at),
		"a number of 21 octets":        entry(integer(append([]byte{1}, make([]byte, 20)...)...), at),
		"a number of 21 with a zero":   entry(integer(append([]byte{0, 0x80}, make([]byte, 19)...)...), at),
		"an ENUM as number":            entry(der(tagEnum, []byte{5}), at),
		"a number twice":               {entries: crlEntries(goodEntry, crlEntry(integer(6), at), goodEntry)},
		"a bad second entry":           {entries: crlEntries(goodEntry, crlEntry(integer(6)))},
		"an entry's bad time":          entry(integer(5), utc("260230120000Z")),
		"reason 7":                     entry(integer(5), at, reasonExt(7)),
		"reason 8, remove":             entry(integer(5), at, reasonExt(8)),
		"reason 11":                    entry(integer(5), at, reasonExt(11)),
		"a reason of two bytes":        entry(integer(5), at, reasonExt(0, 1)),
		"an empty reason":              entry(integer(5), at, reasonExt()),
		"a reason as INTEGER":          entry(integer(5), at, der(tagSeq, ext(oidReason, value(integer(1))))),
		"a critical reason":            entry(integer(5), at, der(tagSeq, ext(oidReason, yes, value(der(tagEnum, []byte{1}))))),
		"two reasons":                  entry(integer(5), at, der(tagSeq, ext(oidReason, value(der(tagEnum, []byte{1}))), ext(oidReason, value(der(tagEnum, []byte{1}))))),
		"an entry of another issuer":   entry(integer(5), at, der(tagSeq, ext(oidCRLIssuer, yes, value(der(tagSeq, der(0xa4, der(tagSeq, rdn(oidCN, tagUTF8, "other")))))))),
		"a critical unknown one":       entry(integer(5), at, der(tagSeq, ext(oidUnknown, yes, value()))),
		"an extension without value":   entry(integer(5), at, der(tagSeq, ext(oidUnknown))),
		"an extension with an odd OID": entry(integer(5), at, der(tagSeq, ext(der(tagOID, []byte{0x80}), value()))),
		"more than 32 extensions":      entry(integer(5), at, der(tagSeq, manyExtensions(33)...)),

		// Extensions of the list.
		"an unknown critical extension": {exts: crlExts(ext(oidUnknown, yes, value()))},
		"an extension twice":            {exts: crlExts(ext(oidUnknown, value()), ext(oidUnknown, value()))},
		"more than 32 of them":          {exts: crlExts(manyExtensions(33)...)},
		"a critical number":             {exts: crlExts(ext(oidNumber, yes, value(integer(1))))},
		"a negative CRL number":         {exts: crlExts(ext(oidNumber, value(integer(0x80))))},
		"a CRL number with a zero":      {exts: crlExts(ext(oidNumber, value(integer(0, 1))))},
		"a CRL number of 21 octets":     {exts: crlExts(ext(oidNumber, value(integer(append([]byte{1}, make([]byte, 20)...)...))))},
		"a CRL number in text":          {exts: crlExts(ext(oidNumber, value(der(tagUTF8, []byte("1")))))},
		"a key identifier in a SET":     {exts: crlExts(ext(oidAKI, value(der(tagSet))))},
		"a key identifier cut off":      {exts: crlExts(ext(oidAKI, value(der(tagSeq, []byte{0x80, 5, 1}))))},
		"a delta list":                  {exts: crlExts(ext(oidDelta, yes, value(integer(1))))},
		"a delta list, not critical":    {exts: crlExts(ext(oidDelta, value(integer(1))))},
		"a point that is not critical":  {exts: crlExts(ext(oidPoint, value(der(tagSeq, fullName))))},
		"an empty point":                {exts: pointExt()},
		"a point that is no SEQUENCE":   {exts: crlExts(ext(oidPoint, yes, value(der(tagSet, fullName))))},
		"a point and more":              {exts: crlExts(ext(oidPoint, yes, value(der(tagSeq, fullName), der(tagNull))))},
		"a point for some reasons":      {exts: pointExt(fullName, der(0x83, []byte{1, 6}))},
		"an indirect list":              {exts: pointExt(der(0x84, []byte{0xff}))},
		"a list for attributes":         {exts: pointExt(der(0x85, []byte{0xff}))},
		"a point with FALSE":            {exts: pointExt(fullName, der(0x81, []byte{0}))},
		"a point with TRUE as 1":        {exts: pointExt(fullName, der(0x81, []byte{1}))},
		"a point with a long TRUE":      {exts: pointExt(fullName, der(0x82, []byte{0xff, 0xff}))},
		"users and CAs":                 {exts: pointExt(der(0x81, []byte{0xff}), der(0x82, []byte{0xff}))},
		"CAs, then users":               {exts: pointExt(der(0x82, []byte{0xff}), der(0x81, []byte{0xff}))},
		"a point with tag 6":            {exts: pointExt(der(0x86, []byte{0xff}))},
		"a name that is cut off":        {exts: pointExt([]byte{0xa0, 9, 1})},
	}
}

func manyExtensions(n int) (exts [][]byte) {
	for i := range n {
		exts = append(exts, ext(der(tagOID, []byte{0x2a, 3, byte(i)}), value()))
	}
	return exts
}

func TestHostileCRL(t *testing.T) {
	t.Parallel()
	for name, p := range hostileCRLs() {
		in := p.der(t)
		crl, err := parseCRL(in)
		requireIs(t, err, errCRL, name)
		require.Nil(t, crl, name)
		require.Equal(t, 1, strings.Count(err.Error(), "pki:"), "%v", err)
		requireIs(t, must.Err(readCRLs([]byte(block("X509 CRL", in)))), errCRL, name)
	}
	in := crlParts{}.der(t)
	_, err := parseCRL(in)
	require.NoError(t, err, "where all of them start")
	for n := range in {
		requireIs(t, must.Err(parseCRL(in[:n])), errCRL, "the first %d bytes", n)
	}
	_, err = parseCRL(slices.Concat([]byte{0x30, 0x80}, in[2:], []byte{0, 0}))
	requireIs(t, err, errCRL, "an indefinite length")
}

// What else is valid.
func TestTolerantCRL(t *testing.T) {
	t.Parallel()
	fullName := der(0xa0, der(0xa0, der(0x86, []byte("http://crl"))))
	for name, tc := range map[string]struct {
		p    crlParts
		want string
	}{
		"plain":                    {crlParts{}, "05 unspecified"},
		"no entries":               {crlParts{entries: []byte{}}, ""},
		"no extensions":            {crlParts{exts: []byte{}}, "05 unspecified"},
		"neither":                  {crlParts{entries: []byte{}, exts: []byte{}}, ""},
		"1950":                     {crlParts{this: utc("500101000000Z")}, "05 unspecified"},
		"2049 and 2050":            {crlParts{this: utc("491231235959Z"), next: generalized("20500101000000Z")}, "05 unspecified"},
		"29 February":              {crlParts{this: utc("240229000000Z")}, "05 unspecified"},
		"next is this":             {crlParts{next: utc(crlDate)}, "05 unspecified"},
		"serial number 0":          {crlParts{entries: crlEntries(crlEntry(integer(0), utc(crlDate)))}, "00 unspecified"},
		"in any order":             {crlParts{entries: crlEntries(crlEntry(integer(2, 0), utc(crlDate)), crlEntry(integer(0, 0xff), utc(crlDate)), crlEntry(integer(3), utc(crlDate)))}, "03 unspecified, ff unspecified, 0200 unspecified"},
		"reason 0, written":        {crlParts{entries: crlEntries(crlEntry(integer(5), utc(crlDate), reasonExt(0)))}, "05 unspecified"},
		"32 extensions":            {crlParts{exts: crlExts(manyExtensions(32)...)}, "05 unspecified"},
		"for one point":            {crlParts{exts: pointExt(fullName)}, "05 unspecified"},
		"for users":                {crlParts{exts: pointExt(der(0x81, []byte{0xff}))}, "05 unspecified"},
		"for CAs, at one point":    {crlParts{exts: pointExt(fullName, der(0x82, []byte{0xff}))}, "05 unspecified"},
		"key identifier of no key": {crlParts{exts: crlExts(ext(oidAKI, value(der(tagSeq, der(0x82, []byte{1})))))}, "05 unspecified"},
	} {
		crl, err := parseCRL(tc.p.der(t))
		require.NoError(t, err, name)
		assert.Equal(t, tc.want, crlLines(crl), name)
		tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), RawSubject: der(tagSeq, rdn(oidCN, tagUTF8, "CA")), IsCA: true, BasicConstraintsValid: true, NotBefore: base, NotAfter: base.Add(time.Hour)}
		b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, edKey.Public(), edKey))(t)
		require.NoError(t, checkCRL(crl, must.Get(x509.ParseCertificate(b))(t)), name)
	}
}

func TestParseCRLsPEM(t *testing.T) {
	t.Parallel()
	good := block("X509 CRL", crlParts{}.der(t))
	one := block("X509 CRL", crlParts{entries: []byte{}, exts: []byte{}}.der(t))
	for name, tc := range map[string]struct {
		in   string
		want int
		also error
	}{
		"one":            {good, 1, nil},
		"two":            {good + good, 2, nil},
		"comments":       {"# a\n" + good + "# b\n" + good + "\n \n", 2, nil},
		"CRLF":           {strings.ReplaceAll(good, "\n", "\r\n"), 1, nil},
		"100":            {strings.Repeat(one, 100), 100, nil},
		"101":            {strings.Repeat(one, 101), 0, spiffe.ErrTooLarge},
		"empty":          {"", 0, nil},
		"text":           {"hello", 0, nil},
		"text behind":    {good + "hello", 1, nil},
		"a certificate":  {block("CERTIFICATE", []byte{1}) + good, 0, nil},
		"another type":   {block("CRL", crlParts{}.der(t)), 0, nil},
		"headers":        {string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Headers: map[string]string{"a": "b"}, Bytes: crlParts{}.der(t)})), 0, nil},
		"a damaged one":  {string(damaged([]byte(good))) + good, 0, nil},
		"the last bad":   {good + string(damaged([]byte(good))), 0, nil},
		"cut off":        {good[:len(good)-20], 0, nil},
		"DER":            {string(crlParts{}.der(t)), 0, nil},
		"over 1 MiB":     {strings.Repeat("#", 1<<20-len(good)) + "\n" + good, 0, spiffe.ErrTooLarge},
		"over 700 KiB":   {block("X509 CRL", make([]byte, 700<<10+1)), 0, spiffe.ErrTooLarge},
		"bytes in block": {block("X509 CRL", append(crlParts{}.der(t), 0)), 0, nil},
	} {
		crls, err := readCRLs([]byte(tc.in))
		if tc.want > 0 {
			require.NoError(t, err, name)
			require.Len(t, crls, tc.want, name)
			continue
		}
		requireIs(t, err, errCRL, name)
		require.Nil(t, crls, name)
		require.Equal(t, tc.also != nil, strings.Contains(err.Error(), spiffe.ErrTooLarge.Error()), "%s: %v", name, err)
	}
	require.ErrorIs(t, must.Err(parseCRL(make([]byte, 700<<10+1))), spiffe.ErrTooLarge)
}

// A list as large as they come costs a bounded amount of memory.
// A list comes from a file of an operator and not from the network, so that the bound is not that of the
// parsers that face it (4 MiB): crypto/x509 makes 1.2 KiB or so of each entry, and a limit on the number of
// entries would refuse lists that are in use. What this holds is that nothing grows faster than the list.
func TestCRLMemory(t *testing.T) {
	var entries [][]byte
	for n := range 19_000 {
		entries = append(entries, crlEntry(integer(1, byte(n>>16), byte(n>>8), byte(n)), utc(crlDate), reasonExt(byte(n%2))))
	}
	in := crlParts{entries: crlEntries(entries...)}.der(t)
	require.Greater(t, len(in), 680<<10)
	roots, list := must.Get(someRoots())(t), []byte(block("X509 CRL", in))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := roots.WithCRLs(list, true)
	runtime.ReadMemStats(&after)
	require.NoError(t, err)
	assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(32<<20))
	assert.Len(t, must.Get(parseCRL(in))(t).RevokedCertificateEntries, 19_000)
}

// FuzzParseCRL takes its input as a list, as PEM, and as entries and extensions of a list that is well
// signed.
func FuzzParseCRL(f *testing.F) {
	for _, p := range hostileCRLs() {
		in := p.der(f)
		f.Add(in)
		for _, part := range [][]byte{p.entries, p.exts, p.this} {
			if len(part) > 0 {
				f.Add(part)
			}
		}
	}
	files := must.Get(filepath.Glob("testdata/crl/openssl-*.pem"))(f)
	for _, file := range files {
		data := must.Get(os.ReadFile(file))(f)
		b, _ := pem.Decode(data)
		f.Add(b.Bytes)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if crls, err := readCRLs(data); err == nil {
			require.Len(t, must.Get(readCRLs(crlsPEM(crls...)))(t), len(crls))
		} else {
			require.Nil(t, crls)
		}
		inputs := [][]byte{data}
		if len(data) > 0 {
			inputs = append(inputs, crlParts{entries: data}.der(t), crlParts{exts: data}.der(t), crlParts{this: data}.der(t), crlParts{entries: crlEntries(data)}.der(t), crlParts{issuer: data}.der(t))
		}
		for _, in := range inputs {
			c, err := parseCRL(in)
			if err != nil {
				requireIs(t, err, errCRL)
				require.Nil(t, c)
				continue
			}
			require.Equal(t, in, c.Raw)
			require.Error(t, checkCRL(c, newRootOnce()))
		}
	})
}

// newRootOnce is a CA that signed no list.
var newRootOnce = sync.OnceValue(func() *x509.Certificate {
	root, err := pki.NewRoot(p256Key, rootOptions())
	if err != nil {
		panic(err)
	}
	return root.Certificate()
})
