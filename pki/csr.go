package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/spiffe"
)

// Limits on a request.
const (
	maxCSR           = 64 << 10 // bytes of DER
	maxCSRPEM        = 128 << 10
	maxCSRExtensions = 32

	maxReadCommonName = 253 // bytes; Linkerd's proxies put the whole DNS name there
)

// errCSR says that a certificate signing request is not valid, or cannot be made.
var errCSR = errors.New("invalid certificate signing request")

// CSR is a certificate signing request (PKCS#10) whose signature was verified and whose key is
// acceptable. Only [NewCSR], [ParseCSR] and [ParseCSRPEM] make one. It never changes.
//
// A CSR proves only that its sender holds the private key of [CSR.PublicKey]. The names in it are a wish: the
// sender's identity must come from its authentication.
type CSR struct {
	der        []byte
	key        crypto.PublicKey
	sans       []SAN
	commonName string
	more       string // the first item requested beside names; empty for none
}

// CSROptions are the contents of a request. Every field may be empty.
type CSROptions struct {
	// Organization is the organization in the subject, at most 64 bytes. Some CAs expect it.
	Organization string

	// CommonName is for old readers that do not know alternative names: at most 64 bytes, not an identity. Without it
	// and an organization the subject is empty and the alternative names are critical.
	CommonName string

	// SANs are the requested names: DNS, URI and IP. NewCSR refuses names that no certificate should have: an empty
	// name, an invalid DNS name, a URI without a scheme, a SPIFFE ID that [spiffe.ParseID] refuses, or an IPv4
	// address in 16 bytes.
	SANs []SAN
}

// NewCSR makes a request for key, which may live in hardware, and signs it with key. Errors about the key wrap
// [ErrWeakKey]; too many names give an error that wraps [spiffe.ErrTooLarge].
func NewCSR(key crypto.Signer, opts CSROptions) (*CSR, error) {
	if key == nil {
		return nil, csrError("no private key")
	}
	pub := key.Public()
	if err := certpem.CheckKey(pub); err != nil {
		return nil, csrError("%w", err)
	}
	name, err := subject(opts.Organization, opts.CommonName)
	if err != nil {
		return nil, csrError("%w", err)
	}
	tmpl := &x509.CertificateRequest{Subject: name}
	if len(opts.SANs) > 0 {
		ext, err := sanExtension(opts.SANs, opts.Organization == "" && opts.CommonName == "")
		if err != nil {
			return nil, csrError("%w", err)
		}
		tmpl.ExtraExtensions = []pkix.Extension{ext}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, tmpl, signer{key, pub}) // verifies its own signature
	if err != nil {
		return nil, csrError("sign: %w", err)
	}
	if len(der) > maxCSR {
		return nil, csrTooLarge("", len(der), maxCSR)
	}
	c := &CSR{der: der, key: pub, sans: slices.Clone(opts.SANs), commonName: opts.CommonName}
	if opts.Organization != "" {
		c.asks("its subject has an attribute of the kind ", cryptobyte.String(rawOrganization))
	}
	return c, nil
}

// ParseCSRPEM is [ParseCSR] for a request in PEM: exactly one block, CERTIFICATE REQUEST or NEW CERTIFICATE REQUEST,
// without headers. Text around it is allowed, as tools write comments there. The limit is 128 KiB of PEM.
func ParseCSRPEM(data []byte) (*CSR, error) {
	if len(data) > maxCSRPEM {
		return nil, csrTooLarge(" in PEM", len(data), maxCSRPEM)
	}
	blocks, err := certpem.Read(data, certpem.MaxCertificates)
	if err != nil {
		return nil, csrError("%w", err)
	}
	if len(blocks) != 1 {
		return nil, csrError("%d PEM blocks, want one", len(blocks))
	}
	switch b := blocks[0]; {
	case b.Type != "CERTIFICATE REQUEST" && b.Type != "NEW CERTIFICATE REQUEST":
		return nil, csrError("the PEM block is %.40q, want CERTIFICATE REQUEST", b.Type)
	case len(b.Headers) > 0:
		return nil, csrError("the PEM block has headers")
	}
	return ParseCSR(blocks[0].Bytes)
}

// ParseCSR parses a request in DER and verifies that it is signed with its own key. The cheap checks come first: size
// (64 KiB), form and key ([CheckPublicKey]), then the signature. It copies der.
//
// It reads strictly: no trailing bytes at any level, version 1, at most one extension request without repeated
// extensions, at most one common name of at most 253 bytes (proxies put whole DNS names there), alternative names by
// the rules of [ParseSANs], and a signature with SHA-256 or better. It skips the rest of the subject, other
// attributes and other extensions. But it refuses a request with a critical extension outside the usual ones (key
// usage, extended key usage, basic constraints, key identifier), rather than let a CA grant it in part.
//
// Errors wrap [spiffe.ErrTooLarge] or [ErrWeakKey] where that applies.
func ParseCSR(der []byte) (*CSR, error) {
	if len(der) > maxCSR {
		return nil, csrTooLarge("", len(der), maxCSR)
	}
	c := &CSR{der: bytes.Clone(der)}
	in := cryptobyte.String(c.der)
	var body, tbs, alg cryptobyte.String
	var sig []byte
	if !in.ReadASN1(&body, asn1.SEQUENCE) {
		return nil, csrError("not a SEQUENCE in DER")
	}
	if !in.Empty() {
		return nil, csrError("%d bytes after the request", len(in))
	}
	if !body.ReadASN1Element(&tbs, asn1.SEQUENCE) || !body.ReadASN1(&alg, asn1.SEQUENCE) ||
		!body.ReadASN1BitStringAsBytes(&sig) || !body.Empty() {
		return nil, csrError("not information, algorithm and signature in DER")
	}
	if err := c.readInfo(tbs); err != nil {
		return nil, csrError("%w", err)
	}
	sigAlg, err := readSignatureAlgorithm(alg, func() (x509.SignatureAlgorithm, error) {
		std, err := x509.ParseCertificateRequest(c.der)
		if err != nil {
			return 0, err
		}
		return std.SignatureAlgorithm, nil
	})
	if err != nil {
		return nil, csrError("%w", err)
	}
	std := &x509.CertificateRequest{
		RawTBSCertificateRequest: tbs,
		SignatureAlgorithm:       sigAlg,
		Signature:                sig,
		PublicKey:                c.key,
	}
	if err := std.CheckSignature(); err != nil {
		return nil, csrError("the signature is not by the key in the request")
	}
	return c, nil
}

// PublicKey returns the key that the request is for. It is shared and must not be changed.
func (c *CSR) PublicKey() crypto.PublicKey { return c.key }

// DER returns a copy of the request.
func (c *CSR) DER() []byte { return bytes.Clone(c.der) }

// PEM returns the request as a CERTIFICATE REQUEST block.
func (c *CSR) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: c.der})
}

// SANs returns a copy of the names in the request. They are not verified: a CA may compare them with the caller's
// names, to refuse a confused caller early, and must never sign them.
func (c *CSR) SANs() []SAN { return slices.Clone(c.sans) }

// ID returns the SPIFFE ID in the request. A request without exactly one URI name, or whose URI is not a SPIFFE ID,
// gives an error. The ID is not verified: see [CSR.SANs].
func (c *CSR) ID() (spiffe.ID, error) {
	var found []string
	for _, s := range c.sans {
		if s.Type == URI {
			found = append(found, s.Value)
		}
	}
	if len(found) != 1 {
		return spiffe.ID{}, csrError("it has %d URI names, want one SPIFFE ID", len(found))
	}
	id, err := spiffe.ParseID(found[0])
	if err != nil {
		return spiffe.ID{}, csrError("%w", err)
	}
	return id, nil
}

// CommonName returns the common name in the request, or "". It is not verified (see [CSR.SANs]), and may be longer
// than the 64 bytes that a certificate allows.
func (c *CSR) CommonName() string { return c.commonName }

// OnlyNames reports whether the request asks only for alternative names and a common name. It is for programs that
// pass the request to a signer that may grant all of it. The error names another attribute of the subject (except an
// empty organization, which some clients always send), another extension or another attribute of the request, such as
// a challenge password.
func (c *CSR) OnlyNames() error {
	if c.more != "" {
		return csrError("%s, and only names may be asked for", c.more)
	}
	return nil
}

// asks records the first item that the request asks for beside names.
func (c *CSR) asks(what string, oid cryptobyte.String) {
	if c.more == "" {
		c.more = what + oidText(oid)
	}
}

// The object identifiers that we compare, as DER contents.
const (
	rawCommonName       = "\x55\x04\x03"
	rawOrganization     = "\x55\x04\x0a"
	rawExtensionRequest = "\x2a\x86\x48\x86\xf7\x0d\x01\x09\x0e"
	rawSubjectKeyID     = "\x55\x1d\x0e"
	rawKeyUsage         = "\x55\x1d\x0f"
	rawSAN              = "\x55\x1d\x11"
	rawBasicConstraints = "\x55\x1d\x13"
	rawExtKeyUsage      = "\x55\x1d\x25"
	rawECDSAWithSHA256  = "\x2a\x86\x48\xce\x3d\x04\x03\x02"
)

func oidSAN() encasn1.ObjectIdentifier { return encasn1.ObjectIdentifier{2, 5, 29, 17} }

// readInfo reads a CertificationRequestInfo.
func (c *CSR) readInfo(tbs cryptobyte.String) error {
	var info, subject, spki, attrs cryptobyte.String
	var version int64
	if !tbs.ReadASN1(&info, asn1.SEQUENCE) || !info.ReadASN1Integer(&version) ||
		!info.ReadASN1(&subject, asn1.SEQUENCE) ||
		!info.ReadASN1Element(&spki, asn1.SEQUENCE) {
		return errors.New("not version, subject and key in DER")
	}
	if version != 0 {
		return fmt.Errorf("version %d, want 0", version)
	}
	if !info.ReadASN1(&attrs, asn1.Tag(0).ContextSpecific().Constructed()) || !info.Empty() {
		return errors.New("the key is not followed by attributes and the end, in DER")
	}
	var err error
	if c.key, err = parsePublicKey(spki); err != nil {
		return err
	}
	if err := c.readSubject(subject); err != nil {
		return err
	}
	return c.readAttributes(attrs)
}

// prefixP256 precedes the point in a SubjectPublicKeyInfo for an uncompressed P-256 key (RFC 5480).
const prefixP256 = "\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01" +
	"\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00"

// parsePublicKey reads a SubjectPublicKeyInfo in DER and refuses weak keys. Almost all keys are P-256, which it reads
// without package asn1, in a fifth of the time.
func parsePublicKey(spki []byte) (crypto.PublicKey, error) {
	if point, ok := bytes.CutPrefix(spki, []byte(prefixP256)); ok {
		if key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point); err == nil {
			return key, nil
		}
	}
	key, err := x509.ParsePKIXPublicKey(spki)
	if err != nil {
		return nil, errors.New("the public key is malformed or of an unknown kind")
	}
	if err := certpem.CheckKey(key); err != nil {
		return nil, err
	}
	if again, err := x509.MarshalPKIXPublicKey(key); err != nil || !bytes.Equal(again, spki) {
		return nil, errors.New("the public key is not in its one DER form") // the reader above ignores what follows
	}
	return key, nil
}

// readSubject reads the common name in a Name and skips other attributes, such as the organization that some clients
// always send.
func (c *CSR) readSubject(rdns cryptobyte.String) error {
	found := false
	for !rdns.Empty() {
		var rdn cryptobyte.String
		if !rdns.ReadASN1(&rdn, asn1.SET) || rdn.Empty() {
			return errors.New("the subject is not DER")
		}
		for !rdn.Empty() {
			var attr, value cryptobyte.String
			var tag asn1.Tag
			if !rdn.ReadASN1(&attr, asn1.SEQUENCE) {
				return errors.New("the subject is not DER")
			}
			oid, ok := readOID(&attr)
			if !ok || !attr.ReadAnyASN1(&value, &tag) || !attr.Empty() {
				return errors.New("the subject is not DER")
			}
			if string(oid) != rawCommonName {
				if string(oid) != rawOrganization || len(value) > 0 {
					c.asks("its subject has an attribute of the kind ", oid)
				}
				continue
			}
			if found {
				return errors.New("the subject has two common names")
			}
			found = true
			if tag != asn1.UTF8String && tag != asn1.PrintableString && tag != asn1.IA5String {
				return fmt.Errorf("the common name is a string with tag %#x", uint8(tag))
			}
			if tag != asn1.UTF8String && !isASCII(value) {
				return errors.New("the common name has bytes that its string type does not allow")
			}
			if len(value) == 0 {
				continue // some clients always send one
			}
			c.commonName = string(value)
			if err := checkText("common name", c.commonName, maxReadCommonName); err != nil {
				return err
			}
		}
	}
	return nil
}

func isASCII(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return c >= utf8.RuneSelf })
}

// readAttributes reads the requested extensions and skips other attributes, such as a challenge password.
func (c *CSR) readAttributes(attrs cryptobyte.String) error {
	found := false
	for !attrs.Empty() {
		var attr, values cryptobyte.String
		if !attrs.ReadASN1(&attr, asn1.SEQUENCE) {
			return errors.New("the attributes are not DER")
		}
		oid, ok := readOID(&attr)
		if !ok || !attr.ReadASN1(&values, asn1.SET) || !attr.Empty() {
			return errors.New("the attributes are not DER")
		}
		if string(oid) != rawExtensionRequest {
			c.asks("it has the attribute ", oid)
			continue
		}
		if found {
			return errors.New("two requests for extensions")
		}
		found = true
		var exts cryptobyte.String
		if !values.ReadASN1(&exts, asn1.SEQUENCE) || !values.Empty() {
			return errors.New("the request for extensions is not one SEQUENCE in DER")
		}
		if err := readExtensions(exts, maxCSRExtensions, c.readExtension); err != nil {
			return err
		}
	}
	return nil
}

// readExtension reads one requested extension.
func (c *CSR) readExtension(oid, value cryptobyte.String, critical bool) error {
	switch string(oid) {
	case rawSAN:
		sans, err := parseSANs(value)
		if err != nil {
			return err
		}
		c.sans = sans
		return nil
	case rawKeyUsage, rawExtKeyUsage, rawBasicConstraints, rawSubjectKeyID:
	default:
		if critical {
			return fmt.Errorf("extension %s is critical and not known", oidText(oid))
		}
	}
	c.asks("it asks for the extension ", oid)
	return nil
}

// readExtensions calls read with each extension in exts, the contents of a SEQUENCE: the contents of its OID and of
// its OCTET STRING.
func readExtensions(exts cryptobyte.String, limit int,
	read func(oid, value cryptobyte.String, critical bool) error) error {
	var few [8]cryptobyte.String
	seen := few[:0]
	for !exts.Empty() {
		var ext, value cryptobyte.String
		if !exts.ReadASN1(&ext, asn1.SEQUENCE) {
			return errors.New("the extensions are not DER")
		}
		oid, ok := readOID(&ext)
		critical := false
		if ok && ext.PeekASN1Tag(asn1.BOOLEAN) {
			ok = ext.ReadASN1Boolean(&critical) && critical // DER leaves out a default value
		}
		if !ok || !ext.ReadASN1(&value, asn1.OCTET_STRING) || !ext.Empty() {
			return errors.New("the extensions are not DER")
		}
		if len(seen) == limit {
			return fmt.Errorf("more than %d extensions: %w", limit, spiffe.ErrTooLarge)
		}
		if slices.ContainsFunc(seen, func(o cryptobyte.String) bool { return bytes.Equal(o, oid) }) {
			return fmt.Errorf("extension %s is there twice", oidText(oid))
		}
		seen = append(seen, oid)
		if err := read(oid, value, critical); err != nil {
			return err
		}
	}
	return nil
}

// signatureAlgorithms has the algorithms with SHA-256 or better, and Ed25519, by the contents of their identifiers.
// RSA-PSS has one identifier for three algorithms; its parameters tell them apart.
var signatureAlgorithms = map[string]x509.SignatureAlgorithm{
	rawECDSAWithSHA256:                     x509.ECDSAWithSHA256,
	"\x2a\x86\x48\xce\x3d\x04\x03\x03":     x509.ECDSAWithSHA384,
	"\x2a\x86\x48\xce\x3d\x04\x03\x04":     x509.ECDSAWithSHA512,
	"\x2b\x65\x70":                         x509.PureEd25519,
	"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0b": x509.SHA256WithRSA,
	"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0c": x509.SHA384WithRSA,
	"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0d": x509.SHA512WithRSA,
	"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0a": x509.SHA256WithRSAPSS,
}

// readSignatureAlgorithm reads an identifier listed in signatureAlgorithms. For RSA-PSS it asks std.
func readSignatureAlgorithm(alg cryptobyte.String,
	std func() (x509.SignatureAlgorithm, error)) (x509.SignatureAlgorithm, error) {
	const null = "\x05\x00" // the parameters of RSA are this or absent (RFC 4055, section 5)
	oid, ok := readOID(&alg)
	if !ok {
		return 0, errors.New("the signature algorithm is not DER")
	}
	switch a := signatureAlgorithms[string(oid)]; {
	case a == x509.UnknownSignatureAlgorithm:
		return 0, fmt.Errorf("the signature algorithm %s is not accepted, use SHA-256 or better", oidText(oid))
	case a == x509.SHA256WithRSAPSS:
		// Rare, with complex parameters: leave them to the standard library.
		switch a, _ := std(); a {
		case x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS:
			return a, nil
		}
		return 0, errors.New("the parameters of RSA-PSS are not those of SHA-256, SHA-384 or SHA-512")
	case alg.Empty() || string(alg) == null && a >= x509.SHA256WithRSA && a <= x509.SHA512WithRSA:
		return a, nil
	}
	return 0, errors.New("the signature algorithm has parameters that it cannot have")
}

// readOID reads an object identifier and returns its contents, which compare faster than decoded ones.
func readOID(s *cryptobyte.String) (raw cryptobyte.String, ok bool) {
	again := *s
	if !s.ReadASN1(&raw, asn1.OBJECT_IDENTIFIER) {
		return nil, false
	}
	switch string(raw) {
	case rawCommonName, rawExtensionRequest, rawSAN, rawECDSAWithSHA256:
		return raw, true // the usual ones are well formed
	}
	var oid encasn1.ObjectIdentifier
	return raw, again.ReadASN1ObjectIdentifier(&oid)
}

// oidText formats contents that readOID returned, for errors.
func oidText(raw cryptobyte.String) string {
	var oid encasn1.ObjectIdentifier
	element := append(cryptobyte.String{byte(asn1.OBJECT_IDENTIFIER), byte(len(raw))}, raw...)
	if len(raw) > 0x7f || !element.ReadASN1ObjectIdentifier(&oid) {
		return "of a long name"
	}
	return oid.String()
}

func csrError(format string, args ...any) error {
	return fmt.Errorf("pki: %w: %w", errCSR, fmt.Errorf(format, args...))
}

func csrTooLarge(form string, n, limit int) error {
	return csrError("%d bytes%s, the limit is %d: %w", n, form, limit, spiffe.ErrTooLarge)
}
