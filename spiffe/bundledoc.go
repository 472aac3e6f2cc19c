package spiffe

import (
	"bytes"
	"cmp"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/jws"
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
	useWIT  = "wit-svid" // if asked for
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
// Entries of WIT-SVID are skipped as an unknown use (WIT-64); [ParseBundleWith] reads them too. The
// result shares no memory with doc.
func ParseBundle(td TrustDomain, doc []byte) (*Bundle, error) {
	return ParseBundleWith(td, doc, ParseOptions{})
}

// ParseOptions are what [ParseBundleWith] does beyond [ParseBundle]. The zero value is nothing.
type ParseOptions struct {
	// WIT says to read the keys that sign WIT-SVIDs, whose standard is Incubating and may change.
	WIT bool
}

// ParseBundleWith is [ParseBundle] with options. A WIT key whose ID is also that of a JWT key is its
// publisher's fault and is tolerated, as each is looked up by its use (WIT-61); [NewBundle] refuses
// the [Bundle.Contents] of such a bundle.
func ParseBundleWith(td TrustDomain, doc []byte, o ParseOptions) (*Bundle, error) {
	if td.IsZero() {
		return nil, errZero("trust domain")
	}
	p := bundleParser{b: &Bundle{td: td}, doc: doc, wit: o.WIT}
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
	wit     bool // read WIT keys
}

// jwk is an entry as it is in the document. A member that is missing or not a string is nil.
type jwk struct {
	offset      int
	object      bool
	use, kid, c []byte // c is the first value of x5c
	jws.JWK
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
		case "x5c":
			for i := range p.r.Elements() {
				if i == 0 {
					k.c, _ = p.r.Text()
				}
			}
		default:
			k.Member(name, p.r)
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
	var tokens []numbered
	for i := range p.entries {
		e := &p.entries[i]
		var fault *entryFault
		use, known := p.use(e)
		switch {
		case !e.object:
			fault = &entryFault{rule: "BND-8", reason: "the entry is not an object"}
		case !known:
			fault = p.unknownUse(e)
		case !e.knownType():
			fault = &entryFault{rule: "BND-14", reason: fmt.Sprintf(`"kty" is missing or unknown: %s`, short(string(e.Kty)))}
		case use == useX509:
			var cert *x509.Certificate
			if cert, fault = e.certificate(); fault == nil {
				p.b.x509 = append(p.b.x509, cert)
			}
		case len(e.kid) == 0:
			fault = &entryFault{rule: "BND-30", reason: `"kid" is missing, empty or not a string`}
		default:
			key, reason := e.PublicKey()
			if reason != "" {
				fault = &entryFault{rule: "BND-32", reason: reason}
				break
			}
			tokens = append(tokens, numbered{authority{string(e.kid), key}, use, i})
		}
		if fault != nil {
			p.b.skipped = append(p.b.skipped, &BundleError{
				TrustDomain: p.b.td, Index: i, KeyID: string(e.kid), Offset: e.offset,
				Rule: fault.rule, Reason: fault.reason, Err: fault.err,
			})
		}
	}
	p.b.x509 = distinct(p.b.x509)

	slices.SortFunc(tokens, func(a, b numbered) int { // "jwt-svid" before "wit-svid"
		return cmp.Or(strings.Compare(a.use, b.use), strings.Compare(a.id, b.id), cmp.Compare(a.index, b.index))
	})
	all := make([]authority, 0, len(tokens))
	jwts := 0
	for i, a := range tokens {
		if i > 0 && a.use == tokens[i-1].use && a.id == tokens[i-1].id {
			if sameKey(a.key, tokens[i-1].key) {
				continue
			}
			f := documentFault(p.entries[a.index].offset, "BND-30", "two different keys have this key ID")
			f.KeyID = a.id
			return f
		}
		all = append(all, a.authority)
		if a.use == useJWT {
			jwts++
		}
	}
	p.b.jwt, p.b.wit = all[:jwts:jwts], all[jwts:]
	return nil
}

// numbered is an authority with its use and the index of its entry.
type numbered struct {
	authority
	use   string
	index int
}

// use returns the use of an entry, if it is one to look at.
func (p *bundleParser) use(k *jwk) (string, bool) {
	switch string(k.use) {
	case useX509:
		return useX509, true
	case useJWT:
		return useJWT, true
	case useWIT:
		return useWIT, p.wit
	}
	return "", false
}

// entryFault says why an entry is skipped.
type entryFault struct {
	rule, reason string
	err          error
}

func (p *bundleParser) unknownUse(k *jwk) *entryFault {
	if use := string(k.use); strings.EqualFold(use, useX509) || strings.EqualFold(use, useJWT) || p.wit && strings.EqualFold(use, useWIT) {
		return &entryFault{rule: "BND-13", reason: fmt.Sprintf(`"use" is written %s: it is case-sensitive`, short(use))}
	}
	return &entryFault{rule: "BND-12", reason: fmt.Sprintf(`"use" is missing or unknown: %s`, short(string(k.use)))}
}

func (k *jwk) knownType() bool {
	switch string(k.Kty) {
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
		return size > 0 && string(k.Kty) == "EC" && string(k.Crv) == pub.Params().Name &&
			jws.EqualURL(k.X, point[1:1+size]) && jws.EqualURL(k.Y, point[1+size:])
	case *rsa.PublicKey:
		return string(k.Kty) == "RSA" && jws.EqualURL(k.N, pub.N.Bytes()) && jws.EqualURL(k.E, jws.Exponent(pub))
	case ed25519.PublicKey:
		return string(k.Kty) == "OKP" && string(k.Crv) == "Ed25519" && jws.EqualURL(k.X, pub)
	}
	return false
}

// Marshal returns the bundle document: compact JSON with the X.509 authorities in order, then the JWT
// and then the WIT authorities by key ID, so that equal contents in equal order give the same bytes.
// It has only the members that the standards define (BND-24), and [ParseBundle] reads it back, or
// [ParseBundleWith] if there are WIT authorities. The result is the caller's own.
//
// Some consumers refuse a document with an entry of a use that they do not know. To publish to those,
// make another bundle from [Bundle.Contents] with nil WITAuthorities.
//
// It fails for a certificate whose key a JWK cannot hold, such as one on P-224, and for a document
// over [MaxBundleSize], which wraps [ErrTooLarge].
func (b *Bundle) Marshal() ([]byte, error) { return b.marshal(b.hint) }

// marshal is Marshal with another refresh hint.
func (b *Bundle) marshal(hint time.Duration) ([]byte, error) {
	size := 64
	for _, c := range b.x509 {
		size += 192 + base64.StdEncoding.EncodedLen(len(c.Raw)) + len(c.RawSubjectPublicKeyInfo)
	}
	for _, list := range [][]authority{b.jwt, b.wit} {
		for _, a := range list {
			size += 192 + len(a.id)
			if k, ok := a.key.(*rsa.PublicKey); ok {
				size += k.N.BitLen() / 6
			}
		}
	}
	doc := append(make([]byte, 0, size), '{')
	if b.seq != nil {
		doc = append(doc, `"spiffe_sequence":`...)
		doc = append(strconv.AppendUint(doc, *b.seq, 10), ',')
	}
	if hint > 0 {
		doc = append(doc, `"spiffe_refresh_hint":`...)
		doc = append(strconv.AppendInt(doc, int64(hint/time.Second), 10), ',')
	}
	doc = append(doc, `"keys":[`...)
	for i, c := range b.x509 {
		if i > 0 {
			doc = append(doc, ',')
		}
		doc = append(doc, `{"use":"`+useX509+`",`...)
		ok := true
		if pub, isEC := c.PublicKey.(*ecdsa.PublicKey); isEC {
			doc, ok = jws.AppendPoint(doc, pub.Curve, certificatePoint(c, pub))
		} else {
			doc, ok = jws.AppendKey(doc, c.PublicKey)
		}
		if !ok {
			return nil, b.errorf("X.509 authority %d, %s: a bundle document cannot hold its kind of key", i+1, short(c.Subject.String()))
		}
		doc = append(doc, `,"x5c":["`...)
		doc = base64.StdEncoding.AppendEncode(doc, c.Raw)
		doc = append(doc, `"]}`...)
	}
	var err error
	if doc, err = b.appendTokens(doc, useJWT, b.jwt); err != nil {
		return nil, err
	}
	if doc, err = b.appendTokens(doc, useWIT, b.wit); err != nil {
		return nil, err
	}
	doc = append(doc, "]}"...)
	if len(doc) > MaxBundleSize {
		return nil, b.errorf("the document would have %d bytes, the limit is %d: %w", len(doc), MaxBundleSize, ErrTooLarge)
	}
	return doc, nil
}

// appendTokens appends the entries of keys that sign one kind of token.
func (b *Bundle) appendTokens(doc []byte, use string, list []authority) ([]byte, error) {
	for _, a := range list {
		if doc[len(doc)-1] != '[' {
			doc = append(doc, ',')
		}
		doc = append(doc, `{"use":"`...)
		doc = append(doc, use...)
		doc = append(doc, `","kid":`...)
		doc = append(strictjson.AppendText(doc, a.id), ',')
		var ok bool
		if doc, ok = jws.AppendKey(doc, a.key); !ok {
			return nil, b.errorf("%s authority %s: the key was changed and is not valid any more", strings.ToUpper(use[:3]), short(a.id))
		}
		doc = append(doc, '}')
	}
	return doc, nil
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
	if spki := cert.RawSubjectPublicKeyInfo; len(spki) == header+1+2*jws.CurveSize(key.Curve) {
		return spki[header:]
	}
	point, err := key.Bytes()
	if err != nil {
		return nil
	}
	return point
}

// strictStd refuses stray bits at the end; it still ignores line breaks, which shows in the length.
var strictStd = base64.StdEncoding.Strict()
