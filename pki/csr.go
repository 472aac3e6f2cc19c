package pki

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/mldsa"
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
		c.asks("its subject has an attribute of the kind ", oidOrganization())
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
// (64 KiB), form and key ([ErrWeakKey]), then the signature. It copies der.
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
	if err := c.read(); err != nil {
		return nil, csrError("%w", err)
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
	id, uris, err := findID(c.sans)
	if err == nil && (uris != 1 || id.IsZero()) {
		err = fmt.Errorf("it has %d URI names, want one SPIFFE ID", uris)
	}
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
func (c *CSR) asks(what string, id encasn1.ObjectIdentifier) {
	if c.more == "" {
		c.more = what + id.String()
	}
}

// The object identifiers that we compare.
func oidCommonName() encasn1.ObjectIdentifier   { return encasn1.ObjectIdentifier{2, 5, 4, 3} }
func oidOrganization() encasn1.ObjectIdentifier { return encasn1.ObjectIdentifier{2, 5, 4, 10} }
func oidSAN() encasn1.ObjectIdentifier          { return encasn1.ObjectIdentifier{2, 5, 29, 17} }
func oidExtensionRequest() encasn1.ObjectIdentifier {
	return encasn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}
}

// knownExtensions may be critical in a request: key identifier, key usage, basic constraints and extended key usage.
func knownExtensions() []string { return []string{"2.5.29.14", "2.5.29.15", "2.5.29.19", "2.5.29.37"} }

// certificationRequest is a request in RFC 2986, section 4.
type certificationRequest struct {
	Info      encasn1.RawValue
	Algorithm pkix.AlgorithmIdentifier
	Signature encasn1.BitString
}

type requestInfo struct {
	Version    int
	Subject    []rdnSET
	PublicKey  encasn1.RawValue
	Attributes []attribute `asn1:"tag:0"`
}

// rdnSET is a part of a name. Package asn1 knows a SET by the end of the type's name.
type rdnSET []struct {
	Type  encasn1.ObjectIdentifier
	Value encasn1.RawValue
}

type attribute struct {
	Type   encasn1.ObjectIdentifier
	Values []encasn1.RawValue `asn1:"set"`
}

// decode decodes a value in DER that has no bytes beside the fields of T. Package asn1 and crypto/x509 ignore what
// follows the last field of a SEQUENCE, where a wish or a restriction could hide.
func decode[T any](der []byte) (v T, err error) {
	if _, err := encasn1.Unmarshal(der, &v); err != nil {
		return v, errors.New("it is not in DER, or of another form")
	}
	if again, err := encasn1.Marshal(v); err != nil || !bytes.Equal(again, der) {
		return v, errors.New("it is not in DER, or has something that crypto/x509 passes over")
	}
	return v, nil
}

// read reads c.der.
func (c *CSR) read() error {
	r, err := decode[certificationRequest](c.der)
	if err != nil {
		return err
	}
	info, err := decode[requestInfo](r.Info.FullBytes)
	if err != nil {
		return err
	}
	if info.Version != 0 {
		return fmt.Errorf("version %d, want 0", info.Version)
	}
	if c.key, err = parsePublicKey(info.PublicKey.FullBytes); err != nil {
		return err
	}
	if err := c.readSubject(info.Subject); err != nil {
		return err
	}
	if err := c.readAttributes(info.Attributes); err != nil {
		return err
	}
	std := &x509.CertificateRequest{
		RawTBSCertificateRequest: r.Info.FullBytes,
		Signature:                r.Signature.Bytes,
		PublicKey:                c.key,
	}
	if std.SignatureAlgorithm, err = c.signatureAlgorithm(r.Algorithm); err != nil {
		return err
	}
	if r.Signature.BitLength%8 != 0 || std.CheckSignature() != nil {
		return errors.New("the signature is not by the key in the request")
	}
	return nil
}

// parsePublicKey reads a SubjectPublicKeyInfo in DER and refuses weak keys.
func parsePublicKey(spki []byte) (crypto.PublicKey, error) {
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

// signatureAlgorithms has the algorithms that are accepted, except ML-DSA, which only some Go releases know. RSA-PSS is
// one identifier for three algorithms; its parameters tell them apart.
var signatureAlgorithms = map[string]x509.SignatureAlgorithm{
	"1.2.840.10045.4.3.2":   x509.ECDSAWithSHA256,
	"1.2.840.10045.4.3.3":   x509.ECDSAWithSHA384,
	"1.2.840.10045.4.3.4":   x509.ECDSAWithSHA512,
	"1.3.101.112":           x509.PureEd25519,
	"1.2.840.113549.1.1.10": x509.SHA256WithRSAPSS,
	"1.2.840.113549.1.1.11": x509.SHA256WithRSA,
	"1.2.840.113549.1.1.12": x509.SHA384WithRSA,
	"1.2.840.113549.1.1.13": x509.SHA512WithRSA,
}

// signatureAlgorithm returns the algorithm of the signature.
func (c *CSR) signatureAlgorithm(id pkix.AlgorithmIdentifier) (x509.SignatureAlgorithm, error) {
	a := signatureAlgorithms[id.Algorithm.String()]
	switch parameters := id.Parameters.FullBytes; {
	case a == x509.SHA256WithRSAPSS, a == x509.UnknownSignatureAlgorithm:
		std, err := x509.ParseCertificateRequest(c.der)
		if err != nil {
			return a, certpem.Short(err)
		}
		a = std.SignatureAlgorithm
	case len(parameters) == 0, a >= x509.SHA256WithRSA && a <= x509.SHA512WithRSA &&
		bytes.Equal(parameters, encasn1.NullBytes): // RFC 4055, section 5
	default:
		return a, errors.New("the signature algorithm has parameters that it cannot have")
	}
	return a, checkSignatureAlgorithm(a)
}

// checkSignatureAlgorithm refuses signatures that are weaker than with SHA-256.
func checkSignatureAlgorithm(a x509.SignatureAlgorithm) error {
	switch a {
	case x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512, x509.PureEd25519,
		x509.SHA256WithRSA, x509.SHA384WithRSA, x509.SHA512WithRSA,
		x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS:
		return nil
	}
	if mldsa.Signs(a) {
		return nil
	}
	return fmt.Errorf("the signature algorithm %v is not accepted, use SHA-256 or better", a)
}

// readSubject reads the common name in a name and skips other attributes, such as the organization that some clients
// always send.
func (c *CSR) readSubject(rdns []rdnSET) error {
	found := false
	for _, rdn := range rdns {
		if len(rdn) == 0 {
			return errors.New("the subject has an empty part")
		}
		for _, a := range rdn {
			text := string(a.Value.Bytes)
			if !a.Type.Equal(oidCommonName()) {
				if !a.Type.Equal(oidOrganization()) || text != "" {
					c.asks("its subject has an attribute of the kind ", a.Type)
				}
				continue
			}
			if found {
				return errors.New("the subject has two common names")
			}
			found = true
			switch {
			case a.Value.Tag == encasn1.TagUTF8String:
			case a.Value.Tag != encasn1.TagPrintableString && a.Value.Tag != encasn1.TagIA5String:
				return fmt.Errorf("the common name is a string with tag %d", a.Value.Tag)
			case !printable(text):
				return errors.New("the common name has bytes that its string type does not allow")
			}
			if err := checkText("common name", text, maxReadCommonName); err != nil {
				return err
			}
			c.commonName = text // some clients always send an empty one
		}
	}
	return nil
}

// readAttributes reads the requested extensions and skips other attributes, such as a challenge password.
func (c *CSR) readAttributes(attrs []attribute) error {
	found := false
	for _, a := range attrs {
		if !a.Type.Equal(oidExtensionRequest()) {
			c.asks("it has the attribute ", a.Type)
			continue
		}
		if found || len(a.Values) != 1 {
			return errors.New("there is not exactly one list of extensions")
		}
		found = true
		exts, err := decode[[]pkix.Extension](a.Values[0].FullBytes)
		if err != nil {
			return fmt.Errorf("extensions: %w", err)
		}
		if len(exts) > maxCSRExtensions {
			return fmt.Errorf("more than %d extensions: %w", maxCSRExtensions, spiffe.ErrTooLarge)
		}
		for n, e := range exts {
			if slices.ContainsFunc(exts[:n], func(o pkix.Extension) bool { return o.Id.Equal(e.Id) }) {
				return fmt.Errorf("extension %s is there twice", e.Id)
			}
			if err := c.readExtension(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// readExtension reads a requested extension.
func (c *CSR) readExtension(e pkix.Extension) (err error) {
	if e.Id.Equal(oidSAN()) {
		c.sans, err = parseSANs(e.Value)
		return err
	}
	if e.Critical && !slices.Contains(knownExtensions(), e.Id.String()) {
		return fmt.Errorf("extension %s is critical and not known", e.Id)
	}
	c.asks("it asks for the extension ", e.Id)
	return nil
}

func csrError(format string, args ...any) error {
	return fmt.Errorf("pki: %w: %w", errCSR, fmt.Errorf(format, args...))
}

func csrTooLarge(form string, n, limit int) error {
	return csrError("%d bytes%s, the limit is %d: %w", n, form, limit, spiffe.ErrTooLarge)
}
