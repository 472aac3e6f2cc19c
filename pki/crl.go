package pki

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"iter"
	"math/big"
	"slices"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/certpem"
	"github.com/svidkit/svidkit/spiffe"
)

// Limits on revocation lists.
const (
	maxCRLPEM        = certpem.MaxInput
	maxCRL           = 700 << 10 // bytes of DER, which fit into maxCRLPEM
	maxCRLs          = 100       // in one file
	maxCRLExtensions = 32
)

// ErrCRL says that a certificate revocation list is not valid, does not belong to a CA, or cannot be
// made.
var ErrCRL = errors.New("invalid certificate revocation list")

// Revocation is one entry of a CRL.
type Revocation struct {
	SerialNumber *big.Int  // required
	Time         time.Time // required: when the certificate was revoked, or was known to be bad; fractions of a second are cut off

	// Reason is a number of RFC 5280, section 5.3.1, such as 0 for "unspecified", 1 for a compromised
	// key, 4 for "superseded" and 5 for "no longer in operation"; 7 and 8 are not among them here.
	Reason int
}

// CRL is a complete certificate revocation list (RFC 5280, section 5) that is well formed, which says
// nothing of who signed it: that is for [CRL.CheckSignedBy]. Only [NewCRL], [ParseCRL] and
// [ParseCRLsPEM] make one. It never changes.
type CRL struct {
	der, tbs, sig          []byte // the last two are parts of the first
	alg                    x509.SignatureAlgorithm
	issuer                 []byte // the name, in DER
	keyID                  []byte // of the key that signed, if the list says so
	number                 *big.Int
	thisUpdate, nextUpdate time.Time
	revoked                []crlEntry // by serial number
}

// crlEntry is small, because a list of 700 KiB can have 35,000 of them.
type crlEntry struct {
	serial []byte // a part of the list
	unix   int64
	reason int8
}

// CRLOptions is everything that goes into a CRL.
type CRLOptions struct {
	Revoked []Revocation // in any order; no serial number twice

	// Number is required. It grows with every CRL of an issuer, is not negative and has at most 20
	// octets.
	Number *big.Int

	// ThisUpdate and NextUpdate are required: when the list is made, and when there will be another at
	// the latest. Verifiers that insist on a CRL refuse everything after NextUpdate. Fractions of a
	// second are cut off.
	ThisUpdate, NextUpdate time.Time
}

// NewCRL makes a CRL for the certificates that issuer signs, and signs it. The CA certificate must have
// CRL signing among its key usages. Errors wrap [ErrCRL]; a list that would have more than 700 KiB,
// about 15,000 entries, also [spiffe.ErrTooLarge]. A signature that did not verify with the issuer's
// certificate does not get out.
func NewCRL(issuer *Issuer, o CRLOptions) (*CRL, error) {
	if issuer == nil {
		return nil, crlError("no issuer")
	}
	ca := issuer.Certificate()
	switch {
	case ca.KeyUsage&x509.KeyUsageCRLSign == 0:
		return nil, crlError("the key usage of the CA does not include CRL signing: it needs another certificate for that")
	case o.Number == nil || o.Number.Sign() < 0 || o.Number.BitLen() > maxSerialBits:
		return nil, crlError("a number is required, which is not negative and has at most 20 octets")
	case len(o.Revoked) > maxCRL/minCRLEntry:
		return nil, crlError("%d entries: %w", len(o.Revoked), spiffe.ErrTooLarge)
	}
	dates, err := newTemplate(o.ThisUpdate, o.NextUpdate)
	if err != nil {
		return nil, crlError("as ThisUpdate and NextUpdate: %w", err)
	}
	list := &x509.RevocationList{Number: o.Number, ThisUpdate: dates.NotBefore, NextUpdate: dates.NotAfter}
	for n, r := range o.Revoked {
		switch {
		case r.SerialNumber == nil || r.SerialNumber.Sign() < 0 || r.SerialNumber.BitLen() > maxSerialBits:
			return nil, crlError("entry %d: a serial number is required, which is not negative and has at most 20 octets", n+1)
		case r.Time.IsZero() || r.Time.Year() < 1950 || r.Time.Year() > 9999:
			return nil, crlError("entry %d: a time is required, from 1950 to 9999", n+1)
		case !validReason(r.Reason):
			return nil, crlError("entry %d: reason %d", n+1, r.Reason)
		}
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{
			SerialNumber: r.SerialNumber, RevocationTime: r.Time.UTC().Truncate(time.Second), ReasonCode: r.Reason,
		})
	}
	if len(ca.SubjectKeyId) == 0 {
		// A list has to name the key (RFC 5280, section 5.2.1), also that of a CA that does not itself.
		named := *ca
		if named.SubjectKeyId, err = keyID(ca.PublicKey); err != nil {
			return nil, crlError("%w", err)
		}
		ca = &named
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, ca, issuer.key()) // verifies its own signature
	if err != nil {
		return nil, crlError("sign: %w", err)
	}
	return ParseCRL(der)
}

// ParseCRLsPEM parses a file of CRLs: one or more X509 CRL blocks and no others, by the rules of
// [ParseCRL]. Text in front of a block is allowed, as tools write comments there; text after the last
// one is not. Input of more than 1 MiB or 100 lists gives an error that wraps [spiffe.ErrTooLarge]. All
// errors wrap [ErrCRL].
func ParseCRLsPEM(data []byte) ([]*CRL, error) {
	crls, err := parseCRLs(data)
	if err != nil {
		return nil, crlError("%w", err)
	}
	return crls, nil
}

// parseCRLs is ParseCRLsPEM without the words that all its errors begin with.
func parseCRLs(data []byte) ([]*CRL, error) {
	if err := certpem.Check(data, maxCRLPEM, maxCRLs); err != nil {
		return nil, err
	}
	var crls []*CRL
	for rest := data; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			if len(bytes.TrimSpace(rest)) > 0 {
				return nil, fmt.Errorf("after list %d: text that is not PEM", len(crls))
			}
			break
		}
		switch {
		case b.Type != "X509 CRL":
			return nil, fmt.Errorf("block %d is %.40q, not X509 CRL", len(crls)+1, b.Type)
		case len(b.Headers) > 0:
			return nil, fmt.Errorf("block %d has headers", len(crls)+1)
		}
		c, err := parseCRL(b.Bytes)
		if err != nil {
			return nil, fmt.Errorf("list %d: %w", len(crls)+1, err)
		}
		crls = append(crls, c)
	}
	if damaged := certpem.Blocks(data) - len(crls); damaged != 0 {
		return nil, fmt.Errorf("%d damaged PEM blocks", damaged)
	}
	if len(crls) == 0 {
		return nil, errors.New("no list found")
	}
	return crls, nil
}

// ParseCRL parses a CRL in DER. It copies der.
//
// It is strict about what it reads: no trailing bytes at any level, version 2, the same signature
// algorithm inside and out, with SHA-256 or better, dates in the form that RFC 5280 demands, an end, no
// serial number twice, reasons that exist, no extension twice, and no critical extension but that of
// an issuing distribution point. Lists that are not what they seem are refused: delta lists, lists for
// attribute certificates, for some reasons, or for other issuers' certificates. A list for one
// distribution point, or for CAs or for other certificates only, is read.
//
// More than 700 KiB give an error that wraps [spiffe.ErrTooLarge]. All errors wrap [ErrCRL].
func ParseCRL(der []byte) (*CRL, error) {
	c, err := parseCRL(der)
	if err != nil {
		return nil, crlError("%w", err)
	}
	return c, nil
}

// parseCRL is ParseCRL without the words that all its errors begin with.
func parseCRL(der []byte) (*CRL, error) {
	if len(der) > maxCRL {
		return nil, fmt.Errorf("%d bytes, the limit is %d: %w", len(der), maxCRL, spiffe.ErrTooLarge)
	}
	c := &CRL{der: bytes.Clone(der)}
	in := cryptobyte.String(c.der)
	var body, tbs, alg cryptobyte.String
	if !in.ReadASN1(&body, asn1.SEQUENCE) {
		return nil, errors.New("not a SEQUENCE in DER")
	}
	if !in.Empty() {
		return nil, fmt.Errorf("%d bytes after the list", len(in))
	}
	if !body.ReadASN1Element(&tbs, asn1.SEQUENCE) || !body.ReadASN1(&alg, asn1.SEQUENCE) ||
		!body.ReadASN1BitStringAsBytes(&c.sig) || !body.Empty() {
		return nil, errors.New("not a list, an algorithm and a signature in DER")
	}
	c.tbs = tbs
	if err := c.readList(tbs, alg); err != nil {
		return nil, err
	}
	var err error
	c.alg, err = readSignatureAlgorithm(alg, func() (x509.SignatureAlgorithm, error) {
		list, err := x509.ParseRevocationList(c.der)
		if err != nil {
			return 0, err
		}
		return list.SignatureAlgorithm, nil
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Tags of a list.
const (
	tagCRLExtensions  = asn1.Tag(0x80 | 0x20)
	tagPointName      = asn1.Tag(0x80 | 0x20)
	tagOnlyUserCerts  = asn1.Tag(0x80 | 1)
	tagOnlyCACerts    = asn1.Tag(0x80 | 2)
	minCRLEntry       = 20 // bytes of DER
	maxSerialOctets   = 20
	rawReasonCode     = "\x55\x1d\x15"
	rawCRLNumber      = "\x55\x1d\x14"
	rawDeltaIndicator = "\x55\x1d\x1b"
	rawIssuingPoint   = "\x55\x1d\x1c"
	rawAuthorityKeyID = "\x55\x1d\x23"
)

// readList reads a TBSCertList, whose algorithm must be outer.
func (c *CRL) readList(tbs, outer cryptobyte.String) error {
	var list, inner cryptobyte.String
	var version int64
	if !tbs.ReadASN1(&list, asn1.SEQUENCE) {
		return errors.New("the list is not a SEQUENCE in DER")
	}
	if !list.PeekASN1Tag(asn1.INTEGER) {
		return errors.New("version 1, want 2") // its number is not written
	}
	if !list.ReadASN1Integer(&version) || version != 1 {
		return fmt.Errorf("version number %d, want 1, which means version 2", version)
	}
	if !list.ReadASN1(&inner, asn1.SEQUENCE) || !bytes.Equal(inner, outer) {
		return errors.New("the signature algorithms inside and out are not the same")
	}
	var issuer, name cryptobyte.String
	if !list.ReadASN1Element(&issuer, asn1.SEQUENCE) {
		return errors.New("no issuer in DER")
	}
	c.issuer, name = issuer, issuer
	if !name.ReadASN1(&name, asn1.SEQUENCE) || name.Empty() {
		return errors.New("the issuer has no name")
	}
	var ok bool
	if c.thisUpdate, ok = readTime(&list); !ok {
		return errors.New("thisUpdate is not a time in the form of RFC 5280")
	}
	if c.nextUpdate, ok = readTime(&list); !ok {
		return errors.New("nextUpdate is missing, or not a time in the form of RFC 5280")
	}
	if c.nextUpdate.Before(c.thisUpdate) {
		return errors.New("nextUpdate is before thisUpdate")
	}
	if list.PeekASN1Tag(asn1.SEQUENCE) {
		var entries cryptobyte.String
		if !list.ReadASN1(&entries, asn1.SEQUENCE) || entries.Empty() {
			return errors.New("the entries are not DER, or an empty SEQUENCE")
		}
		if err := c.readEntries(entries); err != nil {
			return err
		}
	}
	if list.PeekASN1Tag(tagCRLExtensions) {
		var wrapped, exts cryptobyte.String
		if !list.ReadASN1(&wrapped, tagCRLExtensions) || !wrapped.ReadASN1(&exts, asn1.SEQUENCE) || !wrapped.Empty() || exts.Empty() {
			return errors.New("the extensions are not one SEQUENCE in DER, or an empty one")
		}
		if err := readExtensions(exts, maxCRLExtensions, c.readExtension); err != nil {
			return err
		}
	}
	if !list.Empty() {
		return errors.New("something that is not DER or not known at the end of the list")
	}
	return nil
}

func (c *CRL) readEntries(entries cryptobyte.String) error {
	count := 0
	for s := entries; s.SkipASN1(asn1.SEQUENCE); count++ {
	}
	c.revoked = make([]crlEntry, 0, count)
	var e crlEntry
	read := e.readExtension // one for all entries
	for !entries.Empty() {
		n := len(c.revoked) + 1
		var entry, serial cryptobyte.String
		if !entries.ReadASN1(&entry, asn1.SEQUENCE) || !entry.ReadASN1(&serial, asn1.INTEGER) || !validSerial(serial) {
			return fmt.Errorf("entry %d does not begin with a serial number in DER, not negative and of at most 20 octets", n)
		}
		at, ok := readTime(&entry)
		if !ok {
			return fmt.Errorf("entry %d: not a time in the form of RFC 5280", n)
		}
		e = crlEntry{serial: serial, unix: at.Unix()}
		if !entry.Empty() {
			var exts cryptobyte.String
			if !entry.ReadASN1(&exts, asn1.SEQUENCE) || exts.Empty() || !entry.Empty() {
				return fmt.Errorf("entry %d: the extensions are not one SEQUENCE in DER, or an empty one", n)
			}
			if err := readExtensions(exts, maxCRLExtensions, read); err != nil {
				return fmt.Errorf("entry %d: %w", n, err)
			}
		}
		c.revoked = append(c.revoked, e)
	}
	slices.SortFunc(c.revoked, func(a, b crlEntry) int { return compareSerials(a.serial, b.serial) })
	for n := range len(c.revoked) - 1 {
		if bytes.Equal(c.revoked[n].serial, c.revoked[n+1].serial) {
			return fmt.Errorf("serial number %x is there twice", c.revoked[n].serial)
		}
	}
	return nil
}

// validSerial reports whether b is the one form in DER of a serial number that RFC 5280 has users
// handle: not negative, at most 20 octets.
func validSerial(b []byte) bool {
	return 0 < len(b) && len(b) <= maxSerialOctets && b[0]&0x80 == 0 && (len(b) == 1 || b[0] != 0 || b[1]&0x80 != 0)
}

// compareSerials compares numbers that are valid serial numbers.
func compareSerials(a, b []byte) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), bytes.Compare(a, b))
}

// readTime reads a UTCTime up to 2049 or a GeneralizedTime from 2050, in UTC and whole seconds
// (RFC 5280, section 5.1.2.4).
func readTime(s *cryptobyte.String) (time.Time, bool) {
	var text cryptobyte.String
	var tag asn1.Tag
	if !s.ReadAnyASN1(&text, &tag) {
		return time.Time{}, false
	}
	var digits [14]int
	switch {
	case tag == asn1.UTCTime && len(text) == 13:
		digits[0], digits[1] = 1, 9
		if text[0] < '5' {
			digits[0], digits[1] = 2, 0
		}
	case tag == asn1.GeneralizedTime && len(text) == 15:
	default:
		return time.Time{}, false
	}
	for i, d := range text[:len(text)-1] {
		if d < '0' || d > '9' {
			return time.Time{}, false
		}
		digits[i+15-len(text)] = int(d - '0')
	}
	two := func(i int) int { return 10*digits[i] + digits[i+1] }
	year, month, day, hour, minute, second := 100*two(0)+two(2), two(4), two(6), two(8), two(10), two(12)
	t := time.Date(year, time.Month(month), day, hour, minute, second, 0, time.UTC)
	y, m, d := t.Date()
	sound := y == year && int(m) == month && d == day && t.Hour() == hour && t.Minute() == minute && t.Second() == second
	return t, sound && text[len(text)-1] == 'Z' && (tag == asn1.UTCTime || year >= 2050)
}

func (c *CRL) readExtension(oid, value cryptobyte.String, critical bool) error {
	if critical && string(oid) != rawIssuingPoint {
		if string(oid) == rawDeltaIndicator {
			return errors.New("this is a delta list, which does not stand alone")
		}
		return fmt.Errorf("extension %s is critical and not known", oidText(oid))
	}
	switch string(oid) {
	case rawCRLNumber:
		var number cryptobyte.String
		if !value.ReadASN1(&number, asn1.INTEGER) || !value.Empty() || !validSerial(number) {
			return errors.New("the number is not one in DER, not negative and of at most 20 octets")
		}
		c.number = new(big.Int).SetBytes(number)
	case rawAuthorityKeyID:
		var id cryptobyte.String
		if !value.ReadASN1(&id, asn1.SEQUENCE) || !value.Empty() {
			return errors.New("the authority key identifier is not a SEQUENCE in DER")
		}
		if id.PeekASN1Tag(asn1.Tag(0).ContextSpecific()) {
			var key cryptobyte.String
			if !id.ReadASN1(&key, asn1.Tag(0).ContextSpecific()) {
				return errors.New("the authority key identifier is not DER")
			}
			c.keyID = key
		}
	case rawDeltaIndicator:
		return errors.New("this is a delta list, which does not stand alone")
	case rawIssuingPoint:
		return readIssuingPoint(value, critical)
	}
	return nil
}

// readIssuingPoint reads the extension that says what a list is for (RFC 5280, section 5.2.5).
func readIssuingPoint(value cryptobyte.String, critical bool) error {
	var point cryptobyte.String
	if !critical || !value.ReadASN1(&point, asn1.SEQUENCE) || !value.Empty() || point.Empty() {
		return errors.New("the issuing distribution point is not critical, not a SEQUENCE in DER, or empty")
	}
	if point.PeekASN1Tag(tagPointName) && !point.SkipASN1(tagPointName) {
		return errors.New("the issuing distribution point is not DER")
	}
	for _, tag := range []asn1.Tag{tagOnlyUserCerts, tagOnlyCACerts} {
		var only cryptobyte.String
		if point.PeekASN1Tag(tag) {
			if !point.ReadASN1(&only, tag) || string(only) != "\xff" || !point.Empty() {
				return errors.New("the issuing distribution point is not DER, or for more than one kind of certificates")
			}
		}
	}
	if !point.Empty() {
		return errors.New("the list is for some reasons, for other issuers' certificates or for attribute certificates, which is not supported")
	}
	return nil
}

func (e *crlEntry) readExtension(oid, value cryptobyte.String, critical bool) error {
	if critical {
		return fmt.Errorf("extension %s is critical and not known", oidText(oid))
	}
	if string(oid) != rawReasonCode {
		return nil
	}
	var reason cryptobyte.String
	if !value.ReadASN1(&reason, asn1.ENUM) || !value.Empty() || len(reason) != 1 || !validReason(int(reason[0])) {
		return errors.New("the reason is not one that a complete list can have")
	}
	e.reason = int8(reason[0])
	return nil
}

// validReason: 7 was never given out, and 8 takes an entry of another list back.
func validReason(r int) bool { return r >= 0 && r <= 10 && r != 7 && r != 8 }

// DER returns a copy of the list.
func (c *CRL) DER() []byte { return bytes.Clone(c.der) }

// PEM returns the list as an X509 CRL block.
func (c *CRL) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: c.der})
}

// ThisUpdate returns when the list was made.
func (c *CRL) ThisUpdate() time.Time { return c.thisUpdate }

// NextUpdate returns when there is another list at the latest. After that, verifiers that insist on a
// CRL refuse every certificate of its issuer.
func (c *CRL) NextUpdate() time.Time { return c.nextUpdate }

// Number returns the number of the list, which grows with every list of an issuer, or nil if it has
// none.
func (c *CRL) Number() *big.Int {
	if c.number == nil {
		return nil
	}
	return new(big.Int).Set(c.number)
}

// Revocations returns the entries, by serial number.
func (c *CRL) Revocations() iter.Seq[Revocation] {
	return func(yield func(Revocation) bool) {
		for _, e := range c.revoked {
			if !yield(e.revocation()) {
				return
			}
		}
	}
}

func (e crlEntry) revocation() Revocation {
	return Revocation{SerialNumber: new(big.Int).SetBytes(e.serial), Time: time.Unix(e.unix, 0).UTC(), Reason: int(e.reason)}
}

// Revoked returns the entry for cert, if the list is of the issuer of cert, by name, and has one. No
// entry does not mean that cert is good: the list may be old, unsigned ([CRL.CheckSignedBy]), or only for
// other certificates of the issuer.
func (c *CRL) Revoked(cert *x509.Certificate) (Revocation, bool) {
	if cert == nil || cert.SerialNumber == nil || cert.SerialNumber.Sign() < 0 || !bytes.Equal(cert.RawIssuer, c.issuer) {
		return Revocation{}, false
	}
	serial := cert.SerialNumber.Bytes()
	if len(serial) == 0 || serial[0]&0x80 != 0 {
		serial = append([]byte{0}, serial...)
	}
	n, found := slices.BinarySearchFunc(c.revoked, serial, func(e crlEntry, serial []byte) int {
		return compareSerials(e.serial, serial)
	})
	if !found {
		return Revocation{}, false
	}
	return c.revoked[n].revocation(), true
}

// CheckSignedBy verifies that the list is of ca: that names and key identifiers agree, that ca is a CA
// whose key usages, if it has any, include CRL signing, that its key is acceptable ([CheckPublicKey])
// and that the signature is by it. It does not look at dates. Errors wrap [ErrCRL], and for the key
// [ErrWeakKey].
func (c *CRL) CheckSignedBy(ca *x509.Certificate) error {
	if err := c.checkSignedBy(ca); err != nil {
		return crlError("%w", err)
	}
	return nil
}

// checkSignedBy is CheckSignedBy without the words that all its errors begin with.
func (c *CRL) checkSignedBy(ca *x509.Certificate) error {
	switch {
	case ca == nil:
		return errors.New("no CA")
	case !bytes.Equal(ca.RawSubject, c.issuer):
		return fmt.Errorf("the list is of %.300q, not of %.300q", nameText(c.issuer), ca.Subject)
	case len(c.keyID) > 0 && len(ca.SubjectKeyId) > 0 && !bytes.Equal(c.keyID, ca.SubjectKeyId):
		return fmt.Errorf("the list is by another key of %.300q", ca.Subject)
	case !isCA(ca):
		return fmt.Errorf("%.300q is not a CA", ca.Subject)
	case ca.KeyUsage != 0 && ca.KeyUsage&x509.KeyUsageCRLSign == 0:
		return fmt.Errorf("the key usage of %.300q does not include CRL signing", ca.Subject)
	}
	if err := checkKey(ca.PublicKey); err != nil {
		return fmt.Errorf("%.300q: %w", ca.Subject, err)
	}
	if err := ca.CheckSignature(c.alg, c.tbs, c.sig); err != nil {
		return fmt.Errorf("the signature is not by %.300q", ca.Subject)
	}
	return nil
}

// String returns the issuer, the number of entries and the end.
func (c *CRL) String() string {
	return fmt.Sprintf("pki.CRL(%.300q, %d entries, until %s)", nameText(c.issuer), len(c.revoked), c.nextUpdate.Format(time.RFC3339))
}

// nameText returns a name in DER for people.
func nameText(der []byte) string {
	var rdns pkix.RDNSequence
	if rest, err := encasn1.Unmarshal(der, &rdns); err != nil || len(rest) > 0 {
		return "a name that cannot be read"
	}
	return rdns.String()
}

func crlError(format string, args ...any) error {
	return fmt.Errorf("pki: %w: %w", ErrCRL, fmt.Errorf(format, args...))
}
