package spiffe

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
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

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// Limits on bundle documents, and on the authorities of a Bundle.
const (
	maxBundleSize = jws.MaxSetSize
	maxBundleKeys = jws.MaxSetKeys
)

// Values of a JWK's "use" that this package understands.
const (
	useX509 = "x509-svid"
	useJWT  = "jwt-svid"
	useWIT  = "wit-svid" // only for ParseBundleWIT and ParseJWKSWIT
)

var knownUses = [...]string{useX509, useJWT, useWIT}

// ParseBundle parses the bundle document of td: a JWK Set in JSON, as [Bundle.Marshal] writes it and bundle
// endpoints serve it. The document does not name its trust domain: take td from the configuration that has the
// document's address. The result shares no memory with doc.
//
// A document that breaks the format is refused with a [*ParseError]: keep the last good bundle. A
// document of more than 1 MiB or 1,000 entries is refused before more of it is read, and the error
// wraps [ErrTooLarge]. The zero trust domain is an error that wraps [ErrZero].
//
// An entry that is unknown or damaged is skipped and does not hide the others (Trust Domain and Bundle section
// 4.2.2); see [Bundle.Skipped]. A refresh hint that is not a number of seconds is reported there, too, and counts as
// absent. If no entry is left, the bundle is valid and no peer of the domain is trusted: do not keep the previous
// bundle. Keys that sign WIT-SVIDs are skipped as an unknown use; see [ParseBundleWIT].
func ParseBundle(td TrustDomain, doc []byte) (*Bundle, error) {
	p := bundleParser{doc: doc, uses: knownUses[:2]}
	return p.parse(td)
}

// ParseBundleWIT is like [ParseBundle], and also reads the keys that sign WIT-SVIDs. Their standard is Incubating
// and may change. A WIT key and a JWT key may share an ID, as each is looked up by its use; [NewBundle] refuses the
// [Bundle.Contents] of such a bundle.
func ParseBundleWIT(td TrustDomain, doc []byte) (*Bundle, error) {
	p := bundleParser{doc: doc, uses: knownUses[:]}
	return p.parse(td)
}

// ParseJWKS parses a JWK Set (RFC 7517) of another issuer of tokens, such as the key document of an OpenID Connect
// provider, as the JWT authorities of td: any holder of one of its private keys can issue JWT-SVIDs of that trust
// domain. Unlike in a bundle document, "use" may be missing or "sig". Keys of other uses are skipped, as are secret
// keys and keys whose "key_ops" or "alg" forbids verification with the algorithms of JWT-SVID.
//
// The result never has X.509 authorities, a sequence number or a refresh hint. Limits and errors are as in
// [ParseBundle].
func ParseJWKS(td TrustDomain, doc []byte) (*Bundle, error) {
	p := bundleParser{doc: doc, issuer: true, uses: knownUses[1:2]}
	return p.parse(td)
}

// ParseJWKSWIT is like [ParseJWKS], for the keys that sign WIT-SVIDs: it parses a JWK Set as the Workload API sends
// it (section 7.2.2), where "use" may be missing, as the WIT authorities of td. The standard is Incubating and may
// change.
func ParseJWKSWIT(td TrustDomain, doc []byte) (*Bundle, error) {
	p := bundleParser{doc: doc, issuer: true, uses: knownUses[2:]}
	return p.parse(td)
}

// bundleParser reads the whole document before it looks into the entries: certificates are the costly
// part, and are not parsed if the document is refused.
type bundleParser struct {
	b       *Bundle
	doc     []byte
	base    int // added to offsets
	entries []jwk
	seen    bool     // the member "keys"
	issuer  bool     // the document is a JWK Set, where a key without "use" has the first of uses: see ParseJWKS
	uses    []string // the elements of knownUses that this document may have

	conflict *ParseError // two different keys have one ID
}

// jwk is an entry, with its members as in the document. A member that is missing or not a string is nil.
type jwk struct {
	offset      int
	object      bool
	use, kid, c []byte // c is the first value of x5c
	jws.JWK

	unfit string // of other issuers: why it is skipped
}

// fault returns the error that refuses the whole document.
func (p *bundleParser) fault(offset int, rule, reason string) *ParseError {
	what := "bundle"
	if p.issuer {
		what = "JWK Set"
	}
	what += fmt.Sprintf(" of %q", p.b.td)
	return &ParseError{What: what, Offset: p.base + offset, Rule: rule, Reason: reason}
}

// tooLarge is like fault, for a document over a limit.
func (p *bundleParser) tooLarge(offset int, reason string) *ParseError {
	e := p.fault(offset, "BND-33", reason)
	e.Err = ErrTooLarge
	return e
}

// jsonFault returns e, whose document is not strict JSON, with the offset and the rule of err.
func jsonFault(e *ParseError, err error) *ParseError {
	se, _ := errors.AsType[*strictjson.Error](err)
	e.Offset += se.Offset
	e.Reason = se.Reason
	switch se.Code {
	case strictjson.Syntax:
		e.Rule = cmp.Or(e.Rule, "BND-8")
	case strictjson.TooLarge:
		e.Rule, e.Err = "BND-33", ErrTooLarge
	default:
		e.Rule = "BND-28"
	}
	return e
}

func (p *bundleParser) parse(td TrustDomain) (*Bundle, error) {
	if td.IsZero() {
		return nil, errZero("trust domain")
	}
	p.b = &Bundle{td: td}
	if len(p.doc) > maxBundleSize {
		return nil, p.tooLarge(maxBundleSize, fmt.Sprintf("longer than %d bytes", maxBundleSize))
	}
	var fault *ParseError
	err := strictjson.ReadObject(p.doc, func(name string, r *strictjson.Reader) {
		if f := p.member(name, r); fault == nil {
			fault = f
		}
	})
	switch {
	case fault != nil:
		return nil, fault
	case err != nil:
		return nil, jsonFault(p.fault(0, "", ""), err)
	case !p.seen:
		return nil, p.fault(0, "BND-9", `the member "keys" is missing`)
	}
	if fault := p.addEntries(); fault != nil {
		return nil, fault
	}
	return p.b, nil
}

// member reads the value of a member of the document.
func (p *bundleParser) member(name string, r *strictjson.Reader) *ParseError {
	switch {
	case name == "keys":
		return p.readKeys(r)
	case p.issuer:
	case name == "spiffe_sequence":
		return p.sequence(r)
	case name == "spiffe_refresh_hint":
		if ignored := p.refreshHint(r); ignored != nil { // it does not concern who is trusted
			ignored.Reason += "; it counts as absent"
			p.b.skipped = append(p.b.skipped, ignored)
		}
	}
	return nil
}

// addEntries adds the authorities of all entries to the bundle, and records the entries that it skips.
func (p *bundleParser) addEntries() *ParseError {
	p.b.jwt, p.b.wit = make(map[string]crypto.PublicKey), make(map[string]crypto.PublicKey)
	for i := range p.entries {
		e := &p.entries[i]
		if rule, reason, err := p.add(e); rule != "" {
			skipped := p.fault(e.offset, rule, reason)
			skipped.What += fmt.Sprintf(", entry %d", i)
			if len(e.kid) > 0 {
				skipped.What += " with key ID " + short(string(e.kid))
			}
			skipped.Err = err
			p.b.skipped = append(p.b.skipped, skipped)
		}
	}
	p.b.x509 = distinct(p.b.x509)
	return p.conflict
}

// readKeys reads the entries. A syntax error ends its loops, and End reports it.
func (p *bundleParser) readKeys(r *strictjson.Reader) *ParseError {
	if k := r.Kind(); k != strictjson.Array && k != strictjson.None {
		return p.fault(r.Offset(), "BND-9", `"keys" is not an array`)
	}
	p.seen = true
	p.entries = make([]jwk, 0, min(bytes.Count(p.doc, []byte{'{'})-1, maxBundleKeys)) // a good guess
	for i := range r.Elements() {
		if i == maxBundleKeys {
			return p.tooLarge(r.Offset(), fmt.Sprintf("more than %d keys", maxBundleKeys))
		}
		p.entries = append(p.entries, jwk{offset: r.Offset(), object: r.Kind() == strictjson.Object})
		k := &p.entries[i]
		for name := range r.Members() {
			if p.issuer && k.readIssuer(name, r) {
				continue
			}
			switch string(name) {
			case "use":
				k.use, _ = r.Text()
			case "kid":
				k.kid, _ = r.Text()
			case "x5c":
				for i := range r.Elements() {
					if i == 0 {
						k.c, _ = r.Text()
					}
				}
			default:
				k.Member(name, r)
			}
		}
	}
	return nil
}

// readIssuer reads the member name from r if it restricts how a key of another issuer may be used.
func (k *jwk) readIssuer(name []byte, r *strictjson.Reader) bool {
	switch string(name) {
	case "use":
		var ok bool
		if k.use, ok = r.Text(); !ok {
			k.unfit = `"use" is not a string`
		} else if string(k.use) == "sig" {
			k.use = nil
		}
	case "alg":
		var ok bool
		if k.Alg, ok = r.Text(); !ok {
			k.unfit = `"alg" is not a string`
		}
	case "key_ops":
		verify := false
		for range r.Elements() {
			text, _ := r.Text()
			verify = verify || string(text) == "verify"
		}
		if !verify {
			k.unfit = `"key_ops" has no "verify"`
		}
	case "d", "k", "p", "q", "dp", "dq", "qi", "oth", "priv":
		k.unfit = "it is a secret key, which must not be published: replace it"
	default:
		return false
	}
	return true
}

func (p *bundleParser) sequence(r *strictjson.Reader) *ParseError {
	offset := r.Offset()
	lit, fault := p.integer(r, "spiffe_sequence")
	if lit == nil {
		return fault
	}
	n, err := strconv.ParseUint(string(lit), 10, 64)
	switch {
	case lit[0] == '-':
		return p.fault(offset, "BND-29", `"spiffe_sequence" is negative`)
	case err != nil:
		return p.fault(offset, "BND-18", `"spiffe_sequence" does not fit into 64 bits`)
	}
	p.b.seq = sequence{n, true}
	return nil
}

func (p *bundleParser) refreshHint(r *strictjson.Reader) *ParseError {
	offset := r.Offset()
	lit, fault := p.integer(r, "spiffe_refresh_hint")
	if lit == nil || lit[0] == '-' {
		return fault
	}
	n, err := strconv.ParseInt(string(lit), 10, 64)
	if err != nil || n > int64(math.MaxInt64/time.Second) {
		return p.fault(offset, "BND-29", `"spiffe_refresh_hint" is longer than 292 years`)
	}
	p.b.hint = time.Duration(n) * time.Second
	return nil
}

// integer returns an integer as it is written, or nil after a fault and at a syntax error.
func (p *bundleParser) integer(r *strictjson.Reader, name string) ([]byte, *ParseError) {
	offset := r.Offset()
	if k := r.Kind(); k != strictjson.Number && k != strictjson.None {
		return nil, p.fault(offset, "BND-29", strconv.Quote(name)+" is not a number")
	}
	lit, _ := r.Number()
	if strings.ContainsAny(string(lit), ".eE") {
		return nil, p.fault(offset, "BND-29", strconv.Quote(name)+" is not an integer without fraction and exponent")
	}
	return lit, nil
}

// add adds the authority of an entry to the bundle, or returns the rule that the entry breaks.
func (p *bundleParser) add(e *jwk) (rule, reason string, err error) {
	use := ""
	if i := slices.IndexFunc(p.uses, func(u string) bool { return u == string(e.use) }); i >= 0 {
		use = p.uses[i]
	} else if p.issuer && e.use == nil {
		use = p.uses[0]
	}
	switch {
	case !e.object:
		return "BND-8", "the entry is not an object", nil
	case e.unfit != "":
		return "BND-12", e.unfit, nil
	case use == "":
		named := string(e.use)
		if slices.ContainsFunc(p.uses, func(u string) bool { return strings.EqualFold(named, u) }) {
			return "BND-13", fmt.Sprintf(`"use" is written %s: it is case-sensitive`, short(named)), nil
		}
		return "BND-12", fmt.Sprintf(`"use" is missing or unknown: %s`, short(named)), nil
	case string(e.Kty) != "EC" && string(e.Kty) != "RSA" && string(e.Kty) != "OKP" && string(e.Kty) != "AKP":
		return "BND-14", fmt.Sprintf(`"kty" is missing or unknown: %s`, short(string(e.Kty))), nil
	case use == useX509:
		return p.addCertificate(e)
	case len(e.kid) == 0:
		return "BND-30", `"kid" is missing, empty or not a string`, nil
	}
	key, reason := e.PublicKey()
	switch {
	case reason != "" && string(e.Kty) == "AKP": // of other parameters, or for a newer program
		return "BND-14", reason, nil
	case reason != "":
		return "BND-32", reason, nil
	}
	if alg, ok := jws.ParseAlgorithm(string(e.Alg)); p.issuer && e.Alg != nil && !(ok && alg.Fits(key)) {
		return "BND-32", fmt.Sprintf(`"alg" is %s, which is not one for its key`, short(string(e.Alg))), nil
	}
	keys, id := p.b.jwt, string(e.kid)
	if use == useWIT {
		keys = p.b.wit
	}
	if old, twice := keys[id]; twice && !jws.SameKey(old, key) && p.conflict == nil {
		p.conflict = p.fault(e.offset, "BND-30", "two different keys have the key ID "+short(id))
	}
	keys[id] = key
	return "", "", nil
}

// addCertificate is like add, for an entry with a certificate.
func (p *bundleParser) addCertificate(k *jwk) (rule, reason string, err error) {
	if len(k.c) == 0 {
		return "X5-55", `"x5c" is missing, empty or not an array of strings`, nil
	}
	der := make([]byte, base64.StdEncoding.DecodedLen(len(k.c)))
	n, err := strictStd.Decode(der, k.c)
	if err != nil || base64.StdEncoding.EncodedLen(n) != len(k.c) { // Decode ignores line breaks
		return "X5-53", `"x5c" is not standard base64 with padding`, nil
	}
	cert, err := x509.ParseCertificate(der[:n])
	switch {
	case err != nil:
		return "X5-53", `"x5c" is not a certificate`, err
	case !k.isKeyOf(cert):
		return "X5-59", "the key of the entry is not the key of its certificate", nil
	}
	if reason := certchain.UnfitAnchor(cert); reason != "" {
		return "X5-41", "the certificate cannot be an authority: " + reason, nil
	}
	p.b.x509 = append(p.b.x509, cert)
	return "", "", nil
}

// isKeyOf reports whether k holds the public key of cert.
func (k *jwk) isKeyOf(cert *x509.Certificate) bool {
	switch pub := cert.PublicKey.(type) {
	case *ecdsa.PublicKey:
		size := jws.CurveSize(pub.Curve)
		point, err := pub.Bytes() // uncompressed
		return err == nil && size > 0 && string(k.Kty) == "EC" && string(k.Crv) == pub.Params().Name &&
			jws.EqualURL(k.X, point[1:1+size]) && jws.EqualURL(k.Y, point[1+size:])
	case *rsa.PublicKey:
		return string(k.Kty) == "RSA" && jws.EqualURL(k.N, pub.N.Bytes()) && jws.EqualURL(k.E, jws.Exponent(pub))
	case ed25519.PublicKey:
		return string(k.Kty) == "OKP" && string(k.Crv) == "Ed25519" && jws.EqualURL(k.X, pub)
	}
	alg, pub := mldsa.InCertificate(cert)
	return alg != "" && string(k.Kty) == "AKP" && string(k.Alg) == alg && jws.EqualURL(k.Pub, pub)
}

// MarshalJWKS returns the JWT authorities as a JWK Set (RFC 7517), by key ID, as the Workload API sends them: without
// "use" and the other members of a bundle document. [ParseJWKS] reads it back. A set of more than 1 MiB gives an error
// that wraps [ErrTooLarge].
func (b *Bundle) MarshalJWKS() ([]byte, error) {
	doc, err := jws.MarshalSet(b.jwt, false)
	if err != nil {
		return nil, b.errorf("%w", err)
	}
	return doc, nil
}

// Marshal returns the bundle document: compact JSON with the X.509 authorities in order, then the JWT and then the
// WIT authorities by key ID, so that equal contents in equal order give the same bytes. It has only the members that
// the standards define. [ParseBundle] reads it back, or [ParseBundleWIT] if there are WIT authorities. The caller
// owns the result.
//
// Some consumers refuse a document with an entry of an unknown use. For them, make another bundle from
// [Bundle.Contents] with nil WITAuthorities.
//
// It fails for a certificate whose key a JWK cannot hold, such as one on P-224. A document of more
// than 1 MiB gives an error that wraps [ErrTooLarge].
func (b *Bundle) Marshal() ([]byte, error) { return b.marshal(b.hint) }

// marshal is Marshal with another refresh hint.
func (b *Bundle) marshal(hint time.Duration) ([]byte, error) {
	size := 256 * (1 + len(b.jwt) + len(b.wit)) // a guess
	for _, c := range b.x509 {
		size += 2 * len(c.Raw)
	}
	doc := append(make([]byte, 0, size), '{')
	if b.seq.ok {
		doc = append(doc, `"spiffe_sequence":`...)
		doc = append(strconv.AppendUint(doc, b.seq.n, 10), ',')
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
		var ok bool
		if alg, pub := mldsa.InCertificate(c); alg != "" {
			doc = jws.AppendAKP(doc, alg, pub)
		} else if doc, ok = jws.AppendKey(doc, c.PublicKey); !ok {
			return nil, b.errorf("X.509 authority %d, %s: a bundle document cannot hold its kind of key", i+1,
				short(c.Subject.String()))
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
	if len(doc) > maxBundleSize {
		return nil, b.errorf("the document would have %d bytes, the limit is %d: %w", len(doc), maxBundleSize,
			ErrTooLarge)
	}
	return doc, nil
}

// appendTokens appends the entries for keys that sign one kind of token.
func (b *Bundle) appendTokens(doc []byte, use string, keys map[string]crypto.PublicKey) ([]byte, error) {
	for id, key := range sorted(keys) {
		if doc[len(doc)-1] != '[' {
			doc = append(doc, ',')
		}
		var ok bool
		if doc, ok = jws.AppendJWK(doc, use, "", id, key); !ok {
			return nil, b.errorf("%s authority %s: the key was changed and is no longer valid",
				strings.ToUpper(use[:3]), short(id))
		}
	}
	return doc, nil
}

// strictStd refuses stray bits at the end. It ignores line breaks, so callers compare the length.
var strictStd = base64.StdEncoding.Strict()
