package spiffe

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Limits on bundle documents (BND-33).
const (
	MaxBundleSize = 1 << 20 // bytes of a document
	MaxBundleKeys = 1000    // entries of a document, and authorities of a Bundle
)

// Values of a JWK's "use" that this package understands.
const (
	useX509 = "x509-svid"
	useJWT  = "jwt-svid"
)

// BundleError says why a bundle document is refused or, if Index is not negative, why one of its
// entries is not used. Unwrap gives the cause, if there is one, such as [ErrTooLarge].
type BundleError struct {
	TrustDomain TrustDomain
	Index       int    // of the entry in "keys", counted from 0; -1 if it is about the whole document
	KeyID       string // of the entry or entries that it is about, if known
	Offset      int    // in the document, in bytes: the fault, or the beginning of the entry
	Rule        string // the rule's id, as in testdata and the conformance table, such as "BND-9"
	Reason      string // the rule in words
	Err         error  // the cause, or nil
}

func (e *BundleError) Error() string {
	what := "document"
	if e.Index >= 0 {
		what = fmt.Sprintf("skipped entry %d", e.Index)
	}
	if e.KeyID != "" {
		what += ", key ID " + short(e.KeyID)
	}
	why := e.Reason
	if e.Err != nil {
		cause := e.Err.Error()
		if len(cause) > 128 { // parsers of certificates quote what they do not like
			cause = strings.ToValidUTF8(cause[:128], "") + "…"
		}
		why += ": " + cause
	}
	return fmt.Sprintf("spiffe: bundle of %q: %s, at byte %d: %s (%s)", e.TrustDomain, what, e.Offset, why, e.Rule)
}

func (e *BundleError) Unwrap() error { return e.Err }

// ParseBundle parses the bundle document of td: a JWK Set in JSON, as [Bundle.Marshal] writes it
// and bundle endpoints serve it. The document does not name the trust domain; td must come from
// where the document's address comes from.
//
// A document that breaks the format is refused with a [*BundleError]: keep the last good bundle
// then. One that is over [MaxBundleSize] or [MaxBundleKeys] is refused before more of it is read,
// and the error wraps [ErrTooLarge]. The zero trust domain is an error that wraps [ErrZero].
//
// A single entry that is unknown or damaged is skipped, and does not hide the others (BND-15);
// [Bundle.Skipped] tells. If nothing is left, the bundle is valid and nothing of the domain is
// trusted any more: do not keep the last one then (BND-11).
//
// Entries of WIT-SVID are skipped as an unknown use (WIT-64). The result shares no memory with doc.
func ParseBundle(td TrustDomain, doc []byte) (*Bundle, error) {
	if td.IsZero() {
		return nil, errZero("trust domain")
	}
	p := bundleParser{b: &Bundle{td: td}, doc: doc}
	if err := p.parse(); err != nil {
		err.TrustDomain = td
		return nil, err
	}
	return p.b, nil
}

// bundleParser reads the whole document before it looks into the entries: certificates are the
// costly part, and not worth it if the document is refused.
type bundleParser struct {
	b       *Bundle
	doc     []byte
	r       *strictjson.Reader
	entries []jwk
	seen    bool // the member "keys"
}

// jwk is an entry as it is in the document. A member that is missing or not a string is nil.
type jwk struct {
	offset                            int
	object                            bool
	use, kid, kty, crv, x, y, n, e, c []byte // c is the first value of x5c
}

func (p *bundleParser) parse() *BundleError {
	if len(p.doc) > MaxBundleSize {
		return &BundleError{Index: -1, Offset: MaxBundleSize, Rule: "BND-33", Reason: fmt.Sprintf("longer than %d bytes", MaxBundleSize), Err: ErrTooLarge}
	}
	p.r = strictjson.NewReader(p.doc)
	object := p.r.Kind() == strictjson.Object
	if !object {
		p.r.Skip()
	}
	for name := range p.r.Members() {
		var fault *BundleError
		switch string(name) {
		case "keys":
			fault = p.keys()
		case "spiffe_sequence":
			fault = p.sequence()
		case "spiffe_refresh_hint":
			fault = p.refreshHint()
		}
		if fault != nil {
			return fault
		}
	}
	switch err := p.r.End(); {
	case err != nil:
		return jsonFault(err)
	case !object:
		return documentFault(0, "BND-8", "not a JSON object")
	case !p.seen:
		return documentFault(0, "BND-9", `the member "keys" is missing`)
	}
	return p.authorities()
}

func documentFault(offset int, rule, reason string) *BundleError {
	return &BundleError{Index: -1, Offset: offset, Rule: rule, Reason: reason}
}

func jsonFault(err error) *BundleError {
	e, _ := errors.AsType[*strictjson.Error](err)
	switch e.Code {
	case strictjson.Syntax:
		return documentFault(e.Offset, "BND-8", "not JSON: "+e.Reason)
	case strictjson.TooLarge:
		f := documentFault(e.Offset, "BND-33", e.Reason)
		f.Err = ErrTooLarge
		return f
	}
	return documentFault(e.Offset, "BND-28", e.Reason)
}

// keys reads the entries. A syntax error ends its loops and is found at the end of the document.
func (p *bundleParser) keys() *BundleError {
	if p.r.Kind() != strictjson.Array {
		return documentFault(p.r.Offset(), "BND-9", `"keys" is not an array`)
	}
	p.seen = true
	p.entries = make([]jwk, 0, min(bytes.Count(p.doc, []byte{'{'})-1, MaxBundleKeys)) // a good guess
	for i := range p.r.Elements() {
		if i == MaxBundleKeys {
			f := documentFault(p.r.Offset(), "BND-33", fmt.Sprintf("more than %d keys", MaxBundleKeys))
			f.Err = ErrTooLarge
			return f
		}
		p.entries = append(p.entries, jwk{offset: p.r.Offset(), object: p.r.Kind() == strictjson.Object})
		p.entry(&p.entries[i])
	}
	return nil
}

func (p *bundleParser) entry(k *jwk) {
	for name := range p.r.Members() {
		switch string(name) {
		case "use":
			k.use, _ = p.r.Text()
		case "kid":
			k.kid, _ = p.r.Text()
		case "kty":
			k.kty, _ = p.r.Text()
		case "crv":
			k.crv, _ = p.r.Text()
		case "x":
			k.x, _ = p.r.Text()
		case "y":
			k.y, _ = p.r.Text()
		case "n":
			k.n, _ = p.r.Text()
		case "e":
			k.e, _ = p.r.Text()
		case "x5c":
			for i := range p.r.Elements() {
				if i == 0 {
					k.c, _ = p.r.Text()
				}
			}
		}
	}
}

func (p *bundleParser) sequence() *BundleError {
	offset := p.r.Offset()
	lit, fault := p.integer("spiffe_sequence")
	if lit == nil {
		return fault
	}
	n, err := strconv.ParseUint(string(lit), 10, 64)
	switch {
	case lit[0] == '-':
		return documentFault(offset, "BND-29", `"spiffe_sequence" is negative`)
	case err != nil:
		return documentFault(offset, "BND-18", `"spiffe_sequence" does not fit into 64 bits`)
	}
	p.b.seq = &n
	return nil
}

func (p *bundleParser) refreshHint() *BundleError {
	offset := p.r.Offset()
	lit, fault := p.integer("spiffe_refresh_hint")
	if lit == nil || lit[0] == '-' {
		return fault
	}
	n, err := strconv.ParseInt(string(lit), 10, 64)
	if err != nil || n > int64(math.MaxInt64/time.Second) {
		return documentFault(offset, "BND-29", `"spiffe_refresh_hint" is longer than 292 years`)
	}
	p.b.hint = time.Duration(n) * time.Second
	return nil
}

// integer returns an integer as it is written, or nil after a fault and at a syntax error.
func (p *bundleParser) integer(name string) ([]byte, *BundleError) {
	offset := p.r.Offset()
	if k := p.r.Kind(); k != strictjson.Number && k != strictjson.None {
		return nil, documentFault(offset, "BND-29", strconv.Quote(name)+" is not a number")
	}
	lit, _ := p.r.Number()
	if strings.ContainsAny(string(lit), ".eE") {
		return nil, documentFault(offset, "BND-29", strconv.Quote(name)+" is not an integer without fraction and exponent")
	}
	return lit, nil
}

// authorities turns the entries into the authorities of the bundle.
func (p *bundleParser) authorities() *BundleError {
	var jwts []numbered
	for i := range p.entries {
		e := &p.entries[i]
		var fault *entryFault
		switch {
		case !e.object:
			fault = &entryFault{rule: "BND-8", reason: "the entry is not an object"}
		case string(e.use) != useX509 && string(e.use) != useJWT:
			fault = e.unknownUse()
		case !e.knownType():
			fault = &entryFault{rule: "BND-14", reason: fmt.Sprintf(`"kty" is missing or unknown: %s`, short(string(e.kty)))}
		case string(e.use) == useX509:
			var cert *x509.Certificate
			if cert, fault = e.certificate(); fault == nil {
				p.b.x509 = append(p.b.x509, cert)
			}
		case len(e.kid) == 0:
			fault = &entryFault{rule: "BND-30", reason: `"kid" is missing, empty or not a string`}
		default:
			var key crypto.PublicKey
			if key, fault = e.jwtKey(); fault == nil {
				jwts = append(jwts, numbered{jwtAuthority{string(e.kid), key}, i})
			}
		}
		if fault != nil {
			p.b.skipped = append(p.b.skipped, &BundleError{
				TrustDomain: p.b.td, Index: i, KeyID: string(e.kid), Offset: e.offset,
				Rule: fault.rule, Reason: fault.reason, Err: fault.err,
			})
		}
	}
	p.b.x509 = distinct(p.b.x509)

	slices.SortFunc(jwts, func(a, b numbered) int {
		if c := strings.Compare(a.id, b.id); c != 0 {
			return c
		}
		return cmp.Compare(a.index, b.index)
	})
	p.b.jwt = make([]jwtAuthority, 0, len(jwts))
	for i, a := range jwts {
		if i > 0 && a.id == jwts[i-1].id {
			if sameKey(a.key, jwts[i-1].key) {
				continue
			}
			f := documentFault(p.entries[a.index].offset, "BND-30", "two different keys have this key ID")
			f.KeyID = a.id
			return f
		}
		p.b.jwt = append(p.b.jwt, a.jwtAuthority)
	}
	return nil
}

// numbered is an authority with the index of its entry.
type numbered struct {
	jwtAuthority
	index int
}

// entryFault says why an entry is skipped.
type entryFault struct {
	rule, reason string
	err          error
}

func (k *jwk) unknownUse() *entryFault {
	if use := string(k.use); strings.EqualFold(use, useX509) || strings.EqualFold(use, useJWT) {
		return &entryFault{rule: "BND-13", reason: fmt.Sprintf(`"use" is written %s: it is case-sensitive`, short(use))}
	}
	return &entryFault{rule: "BND-12", reason: fmt.Sprintf(`"use" is missing or unknown: %s`, short(string(k.use)))}
}

func (k *jwk) knownType() bool {
	switch string(k.kty) {
	case "EC", "RSA", "OKP":
		return true
	}
	return false
}

// certificate returns the CA certificate of an entry.
func (k *jwk) certificate() (*x509.Certificate, *entryFault) {
	if len(k.c) == 0 {
		return nil, &entryFault{rule: "X5-55", reason: `"x5c" is missing, empty or not an array of strings`}
	}
	der := make([]byte, base64.StdEncoding.DecodedLen(len(k.c)))
	n, err := strictStd.Decode(der, k.c)
	if err != nil || base64.StdEncoding.EncodedLen(n) != len(k.c) { // Decode ignores line breaks
		return nil, &entryFault{rule: "X5-53", reason: `"x5c" is not standard base64 with padding`}
	}
	cert, err := x509.ParseCertificate(der[:n])
	switch {
	case err != nil:
		return nil, &entryFault{rule: "X5-53", reason: `"x5c" is not a certificate`, err: err}
	case !k.isKeyOf(cert):
		return nil, &entryFault{rule: "X5-59", reason: "the key of the entry is not the key of its certificate"}
	}
	if reason := unfitAnchor(cert); reason != "" {
		return nil, &entryFault{rule: "X5-41", reason: "the certificate cannot be an authority: " + reason}
	}
	return cert, nil
}

// isKeyOf reports whether the key members of k are there and say what the certificate says.
func (k *jwk) isKeyOf(cert *x509.Certificate) bool {
	switch pub := cert.PublicKey.(type) {
	case *ecdsa.PublicKey:
		point := certificatePoint(cert, pub)
		size := len(point) / 2 // 0 if the curve is not one of JWKs
		return size > 0 && string(k.kty) == "EC" && string(k.crv) == pub.Params().Name &&
			equalURL(k.x, point[1:1+size]) && equalURL(k.y, point[1+size:])
	case *rsa.PublicKey:
		return string(k.kty) == "RSA" && equalURL(k.n, pub.N.Bytes()) && equalURL(k.e, exponent(pub))
	case ed25519.PublicKey:
		return string(k.kty) == "OKP" && string(k.crv) == "Ed25519" && equalURL(k.x, pub)
	}
	return false
}

// jwtKey returns the key of an entry for JWT-SVIDs.
func (k *jwk) jwtKey() (crypto.PublicKey, *entryFault) {
	switch string(k.kty) {
	case "EC":
		curve := namedCurve(string(k.crv))
		if curve == nil {
			return nil, &entryFault{rule: "BND-32", reason: fmt.Sprintf("the curve is not P-256, P-384 or P-521: %s", short(string(k.crv)))}
		}
		size := curveSize(curve)
		point := make([]byte, 1+2*size)
		point[0] = 4 // uncompressed
		if !decodeURL(point[1:1+size], k.x) || !decodeURL(point[1+size:], k.y) {
			return nil, &entryFault{rule: "BND-32", reason: fmt.Sprintf(`"x" and "y" are not both %d bytes in base64url`, size)}
		}
		key, err := ecdsa.ParseUncompressedPublicKey(curve, point)
		if err != nil {
			return nil, &entryFault{rule: "BND-32", reason: "the point is not on the curve"}
		}
		return key, nil
	case "RSA":
		n, e := make([]byte, strictURL.DecodedLen(min(len(k.n), 2048))), make([]byte, strictURL.DecodedLen(min(len(k.e), 6)))
		if !decodeURL(n, k.n) || !decodeURL(e, k.e) || len(n) == 0 || len(e) == 0 || n[0] == 0 || e[0] == 0 {
			return nil, &entryFault{rule: "BND-32", reason: `"n" and "e" are not both numbers of usual size in base64url without leading zeros`}
		}
		key := &rsa.PublicKey{N: new(big.Int).SetBytes(n)}
		for _, b := range e {
			key.E = key.E<<8 | int(b)
		}
		if reason := unfitForJWT(key); reason != "" {
			return nil, &entryFault{rule: "BND-32", reason: reason}
		}
		return key, nil
	}
	return nil, &entryFault{rule: "BND-32", reason: "no algorithm of JWT-SVID uses this type of key"}
}

// Marshal returns the bundle document: compact JSON with the X.509 authorities in order and then
// the JWT authorities by key ID, so that equal contents in equal order give the same bytes. It has
// only the members that the standards define (BND-24), and [ParseBundle] reads it back. The result
// is the caller's own.
//
// It fails for a certificate whose key a JWK cannot hold, such as one on P-224, and for a document
// over [MaxBundleSize], which wraps [ErrTooLarge].
func (b *Bundle) Marshal() ([]byte, error) {
	size := 64
	for _, c := range b.x509 {
		size += 192 + base64.StdEncoding.EncodedLen(len(c.Raw)) + len(c.RawSubjectPublicKeyInfo)
	}
	for _, a := range b.jwt {
		size += 192 + len(a.id)
		if k, ok := a.key.(*rsa.PublicKey); ok {
			size += k.N.BitLen() / 6
		}
	}
	doc := append(make([]byte, 0, size), '{')
	if b.seq != nil {
		doc = append(doc, `"spiffe_sequence":`...)
		doc = append(strconv.AppendUint(doc, *b.seq, 10), ',')
	}
	if b.hint > 0 {
		doc = append(doc, `"spiffe_refresh_hint":`...)
		doc = append(strconv.AppendInt(doc, int64(b.hint/time.Second), 10), ',')
	}
	doc = append(doc, `"keys":[`...)
	for i, c := range b.x509 {
		if i > 0 {
			doc = append(doc, ',')
		}
		doc = append(doc, `{"use":"`+useX509+`",`...)
		ok := true
		if pub, isEC := c.PublicKey.(*ecdsa.PublicKey); isEC {
			doc, ok = appendEC(doc, pub, certificatePoint(c, pub))
		} else {
			doc, ok = appendKey(doc, c.PublicKey)
		}
		if !ok {
			return nil, b.errorf("X.509 authority %d, %s: a bundle document cannot hold its kind of key", i+1, short(c.Subject.String()))
		}
		doc = append(doc, `,"x5c":["`...)
		doc = base64.StdEncoding.AppendEncode(doc, c.Raw)
		doc = append(doc, `"]}`...)
	}
	for i, a := range b.jwt {
		if i > 0 || len(b.x509) > 0 {
			doc = append(doc, ',')
		}
		doc = append(doc, `{"use":"`+useJWT+`","kid":`...)
		doc = append(strictjson.AppendText(doc, a.id), ',')
		var ok bool
		if doc, ok = appendKey(doc, a.key); !ok {
			return nil, b.errorf("JWT authority %s: the key was changed and is not valid any more", short(a.id))
		}
		doc = append(doc, '}')
	}
	doc = append(doc, "]}"...)
	if len(doc) > MaxBundleSize {
		return nil, b.errorf("the document would have %d bytes, the limit is %d: %w", len(doc), MaxBundleSize, ErrTooLarge)
	}
	return doc, nil
}

// appendKey appends the JWK members of a public key.
func appendKey(doc []byte, key crypto.PublicKey) ([]byte, bool) {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		point, err := k.Bytes()
		if err != nil {
			return doc, false
		}
		return appendEC(doc, k, point)
	case *rsa.PublicKey:
		doc = append(doc, `"kty":"RSA","n":"`...)
		doc = strictURL.AppendEncode(doc, k.N.Bytes())
		doc = append(doc, `","e":"`...)
		doc = strictURL.AppendEncode(doc, exponent(k))
		return append(doc, '"'), true
	case ed25519.PublicKey:
		doc = append(doc, `"kty":"OKP","crv":"Ed25519","x":"`...)
		doc = strictURL.AppendEncode(doc, k)
		return append(doc, '"'), true
	}
	return doc, false
}

func appendEC(doc []byte, k *ecdsa.PublicKey, point []byte) ([]byte, bool) {
	size := curveSize(k.Curve)
	if size == 0 || len(point) != 1+2*size {
		return doc, false
	}
	doc = append(doc, `"kty":"EC","crv":"`...)
	doc = append(doc, k.Params().Name...)
	doc = append(doc, `","x":"`...)
	doc = strictURL.AppendEncode(doc, point[1:1+size])
	doc = append(doc, `","y":"`...)
	doc = strictURL.AppendEncode(doc, point[1+size:])
	return append(doc, '"'), true
}

// certificatePoint returns the uncompressed point of a certificate's key, or nil if a JWK cannot
// hold its curve. The key's own method checks again that the point is on the curve, which
// ParseCertificate did. So the point is taken from the end of the SubjectPublicKeyInfo, if that is
// as short as it can be and nothing else fits in.
func certificatePoint(cert *x509.Certificate, key *ecdsa.PublicKey) []byte {
	header := 0 // of the SubjectPublicKeyInfo
	switch key.Curve {
	case elliptic.P256():
		header = 26
	case elliptic.P384():
		header = 23
	case elliptic.P521():
		header = 25
	default:
		return nil
	}
	if spki := cert.RawSubjectPublicKeyInfo; len(spki) == header+1+2*curveSize(key.Curve) {
		return spki[header:]
	}
	point, err := key.Bytes()
	if err != nil {
		return nil
	}
	return point
}

// namedCurve returns the curve that a JWK's "crv" means, or nil.
func namedCurve(crv string) elliptic.Curve {
	switch crv {
	case "P-256":
		return elliptic.P256()
	case "P-384":
		return elliptic.P384()
	case "P-521":
		return elliptic.P521()
	}
	return nil
}

// curveSize returns the size of a coordinate in bytes, or 0 for a curve that JWKs do not know.
func curveSize(curve elliptic.Curve) int {
	switch curve {
	case elliptic.P256():
		return 32
	case elliptic.P384():
		return 48
	case elliptic.P521():
		return 66
	}
	return 0
}

// exponent returns the public exponent as big-endian bytes without leading zeros.
func exponent(key *rsa.PublicKey) []byte {
	return bytes.TrimLeft(binary.BigEndian.AppendUint64(nil, uint64(key.E)), "\x00")
}

// The encodings of JWKs. Strict refuses stray bits at the end; both still ignore line breaks, which
// shows in the length.
var (
	strictStd = base64.StdEncoding.Strict()
	strictURL = base64.RawURLEncoding.Strict()
)

// decodeURL fills dst with what src says, and reports whether it fits exactly.
func decodeURL(dst, src []byte) bool {
	if len(src) != strictURL.EncodedLen(len(dst)) {
		return false
	}
	n, err := strictURL.Decode(dst, src)
	return err == nil && n == len(dst)
}

// equalURL reports whether text is the encoding of data.
func equalURL(text, data []byte) bool {
	if len(text) != strictURL.EncodedLen(len(data)) {
		return false
	}
	var buf [128]byte
	return bytes.Equal(strictURL.AppendEncode(buf[:0], data), text)
}
