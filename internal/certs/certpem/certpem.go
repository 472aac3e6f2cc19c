// Package certpem reads and writes certificates and private keys in PEM, with limits. Errors never carry the input,
// which may be a secret.
package certpem

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Limits on the input.
const (
	MaxInput        = 1 << 20 // bytes of PEM
	MaxCertificates = 1000    // certificates in one input
	MaxKey          = 8 << 10 // bytes of DER: an RSA key of 8192 bits has 4.7 KiB

	maxKeyBlocks = 10  // in a file of one key, so that the error can name the other blocks
	maxText      = 300 // bytes of an error of crypto/x509
	maxHeaders   = 8   // of one block; no file that we read needs more than the two of an encrypted key
)

// ErrTooLarge says that input is over a limit; package spiffe exports it.
var ErrTooLarge = errors.New("input too large")

const begin, end = "-----BEGIN", "-----END"

// Read returns the blocks of data in order, at most limit. Text around them is allowed, as tools write comments there
// (RFC 7468, section 5.2). A damaged block is an error, although package pem skips it. So is text on which package
// pem would spend too much memory: too much text, too many blocks, or too many headers, from which it makes a map.
func Read(data []byte, limit int) ([]*pem.Block, error) {
	if len(data) > MaxInput {
		return nil, fmt.Errorf("%d bytes of PEM, the limit is %d: %w", len(data), MaxInput, ErrTooLarge)
	}
	n := bytes.Count(data, []byte(begin))
	if n > limit {
		return nil, fmt.Errorf("%d PEM blocks, the limit is %d: %w", n, limit, ErrTooLarge)
	}
	if err := checkHeaders(data); err != nil {
		return nil, err
	}
	var blocks []*pem.Block
	for b, rest := pem.Decode(data); b != nil; b, rest = pem.Decode(rest) {
		blocks = append(blocks, b)
	}
	damaged := max(n, bytes.Count(data, []byte(end))) - len(blocks)
	if damaged > 0 || len(blocks) == 0 {
		for _, mark := range []string{"\xef\xbb\xbf", "\xff\xfe", "\xfe\xff"} {
			if bytes.HasPrefix(data, []byte(mark)) {
				return nil, errors.New("the text begins with a byte order mark; save it as UTF-8 without one")
			}
		}
	}
	if damaged > 0 {
		return nil, fmt.Errorf("%d damaged PEM blocks", damaged)
	}
	return blocks, nil
}

// checkHeaders refuses a block with too many headers.
func checkHeaders(data []byte) error {
	for rest := data; ; {
		_, block, found := bytes.Cut(rest, []byte(begin))
		if !found {
			return nil
		}
		_, rest, _ = bytes.Cut(block, []byte("\n"))
		for headers := 1; ; headers++ {
			line, next, _ := bytes.Cut(rest, []byte("\n"))
			if !bytes.Contains(line, []byte(":")) {
				break
			}
			if headers > maxHeaders {
				return fmt.Errorf("a PEM block with more than %d headers: %w", maxHeaders, ErrTooLarge)
			}
			rest = next
		}
	}
}

// Each calls read for the contents of each block of data, as [Read] returns them, except blocks whose type skip
// accepts, if it is not nil. All other blocks must have type typ and, unless they are certificates, no headers. Input
// without such a block is an error. Errors call a block noun.
func Each(data []byte, typ, noun string, limit int, skip func(typ string) bool, read func(der []byte) error) error {
	blocks, err := Read(data, limit)
	if err != nil {
		return err
	}
	n := 0
	for i, b := range blocks {
		switch {
		case skip != nil && skip(b.Type):
			continue
		case b.Type != typ:
			return fmt.Errorf("block %d is %s, not %s", i+1, label(b.Type), typ)
		case len(b.Headers) > 0 && typ != certificate:
			return fmt.Errorf("block %d has headers", i+1)
		}
		n++
		if err := read(b.Bytes); err != nil {
			return fmt.Errorf("%s %d: %w", noun, n, Short(err))
		}
	}
	if n == 0 {
		return fmt.Errorf("no %s found", noun)
	}
	return nil
}

const certificate = "CERTIFICATE"

// Certificates parses data by the rules of Each.
func Certificates(data []byte) ([]*x509.Certificate, error) { return certificates(data, nil) }

// Roots parses the certificates of data as [Certificates] does, but calls skip for each certificate that cannot be
// read or that use refuses. At least one must remain.
func Roots(data []byte, use func(c *x509.Certificate) error, skip func(err error)) (certs []*x509.Certificate,
	err error) {
	var first error
	n := 0
	err = Each(data, certificate, "certificate", MaxCertificates, nil, func(der []byte) error {
		n++
		c, err := x509.ParseCertificate(der)
		if err == nil {
			err = use(c)
		}
		if err != nil {
			err = fmt.Errorf("certificate %d: %w", n, Short(err))
			skip(err)
			first = cmp.Or(first, err)
			return nil
		}
		certs = append(certs, c)
		return nil
	})
	if err == nil && len(certs) == 0 {
		err = first
	}
	if err != nil {
		return nil, err
	}
	return certs, nil
}

// Pool returns the readable roots of data, to verify a server with.
func Pool(data []byte) (*x509.CertPool, error) {
	certs, err := Roots(data, func(*x509.Certificate) error { return nil }, func(error) {})
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	for _, c := range certs {
		pool.AddCert(c)
	}
	return pool, nil
}

// CertificatesAmongKeys is Certificates for data that may also have private keys, which it skips.
func CertificatesAmongKeys(data []byte) ([]*x509.Certificate, error) {
	return certificates(data, isKey)
}

func certificates(data []byte, skip func(typ string) bool) (certs []*x509.Certificate, err error) {
	err = Each(data, certificate, "certificate", MaxCertificates, skip, func(der []byte) error {
		c, err := x509.ParseCertificate(der)
		certs = append(certs, c)
		return err
	})
	if err != nil {
		return nil, err
	}
	return certs, nil
}

// EncodeCertificates returns one CERTIFICATE block for each certificate, in order. Package pem takes twice the time and
// four times the memory, and a CA encodes chain and roots for each request.
func EncodeCertificates(certs []*x509.Certificate) []byte {
	var text []byte
	for _, c := range certs {
		text = slices.Grow(text, 60+len(c.Raw)*65/48)
		text = append(text, begin+" "+certificate+"-----\n"...)
		for line := range slices.Chunk(c.Raw, 48) { // 64 characters, RFC 7468, section 2
			text = append(base64.StdEncoding.AppendEncode(text, line), '\n')
		}
		text = append(text, end+" "+certificate+"-----\n"...)
	}
	return text
}

// PublicKey parses the one public key in data, a PUBLIC KEY block, and checks it by [CheckKey].
func PublicKey(data []byte) (key crypto.PublicKey, err error) {
	return key, Each(data, "PUBLIC KEY", "public key", 1, nil, func(der []byte) error {
		if key, err = x509.ParsePKIXPublicKey(der); err != nil {
			return errors.New("it cannot be read")
		}
		return CheckKey(key)
	})
}

// PrivateKey parses the one private key in data: PKCS#8, PKCS#1 or SEC1, whatever its label, as tools write each form
// under the others' labels. It skips an EC PARAMETERS block in front, which some tools write. Any other block, an
// encrypted key, and a key that [CheckKey] refuses are errors.
func PrivateKey(data []byte) (crypto.Signer, error) { return privateKey(data, maxKeyBlocks, nil) }

// PrivateKeyAmongCertificates is PrivateKey for data that may also have certificates, which it skips.
func PrivateKeyAmongCertificates(data []byte) (crypto.Signer, error) {
	return privateKey(data, maxKeyBlocks+MaxCertificates, func(typ string) bool { return typ == certificate })
}

func privateKey(data []byte, limit int, skip func(typ string) bool) (key crypto.Signer, err error) {
	blocks, err := Read(data, limit)
	if err != nil {
		return nil, err
	}
	for _, b := range blocks {
		switch {
		case b.Type == parameters && key == nil || skip != nil && skip(b.Type):
			continue
		case key != nil:
			return nil, fmt.Errorf("a block %.40q after the private key", b.Type)
		case b.Headers["DEK-Info"] != "" || b.Type == encrypted:
			return nil, errors.New("the private key is encrypted; decrypt it first")
		case !isKey(b.Type):
			return nil, fmt.Errorf("block %.40q is not a private key", b.Type)
		}
		if key, err = PrivateKeyDER(b.Bytes); err != nil {
			return nil, fmt.Errorf("%s: %w", b.Type, err)
		}
	}
	if key == nil {
		return nil, errors.New("no private key found")
	}
	return key, nil
}

const parameters, encrypted = "EC PARAMETERS", "ENCRYPTED PRIVATE KEY"

// isKey reports whether a block of this type is part of a file with a private key.
func isKey(typ string) bool {
	switch typ {
	case "PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", parameters, encrypted,
		"ECDSA PRIVATE KEY": // not standard; early tools of Athenz wrote it
		return true
	}
	return false
}

// PrivateKeyDER parses a private key in DER, in any form that a PEM block may have.
func PrivateKeyDER(der []byte) (crypto.Signer, error) {
	var first error
	for _, parse := range []func(der []byte) (any, error){
		x509.ParsePKCS8PrivateKey,
		func(der []byte) (any, error) { return x509.ParseECPrivateKey(der) },
		func(der []byte) (any, error) { return x509.ParsePKCS1PrivateKey(der) },
	} {
		key, err := readKey(der, parse)
		if err == nil || errors.Is(err, ErrWeakKey) {
			return key, err
		}
		first = cmp.Or(first, err)
	}
	return nil, first
}

// PKCS8 parses a PKCS#8 private key in DER.
func PKCS8(der []byte) (crypto.Signer, error) { return readKey(der, x509.ParsePKCS8PrivateKey) }

func readKey(der []byte, parse func([]byte) (any, error)) (crypto.Signer, error) {
	if len(der) > MaxKey {
		return nil, fmt.Errorf("private key of %d bytes, the limit is %d: %w", len(der), MaxKey, ErrTooLarge)
	}
	var value asn1.RawValue
	if rest, err := asn1.Unmarshal(der, &value); err != nil || len(rest) > 0 { // which some parsers ignore
		return nil, errors.New("the private key is not one value in DER")
	}
	k, err := parse(der)
	if err != nil {
		return nil, Short(err)
	}
	s, ok := k.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a key of type %T cannot sign", k)
	}
	if err := CheckKey(s.Public()); err != nil {
		return nil, err
	}
	return s, nil
}

// Short returns err, cut to the beginning of its text if that is long: crypto/x509 quotes whole names and object
// identifiers, and the author of a certificate must not fill the log.
func Short(err error) error {
	if text := err.Error(); len(text) > maxText {
		return errors.New(strings.ToValidUTF8(text[:maxText], "") + "…")
	}
	return err
}

// EncodePrivateKey returns key as an unencrypted PRIVATE KEY block (PKCS#8). A key in hardware cannot be exported and
// gives an error.
func EncodePrivateKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("a key of type %T cannot be exported", key)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// TraditionalKey converts a block of [EncodePrivateKey] to the form before PKCS#8: PKCS#1 for an RSA key (RSA PRIVATE
// KEY) and SEC 1 for an ECDSA key (EC PRIVATE KEY). Other keys have no such form, and stay as they are.
func TraditionalKey(block []byte) ([]byte, error) {
	key, err := PrivateKey(block)
	if err != nil {
		return nil, err
	}
	b := &pem.Block{}
	switch k := key.(type) {
	case *rsa.PrivateKey:
		b.Type, b.Bytes = "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(k)
	case *ecdsa.PrivateKey:
		b.Type = "EC PRIVATE KEY"
		b.Bytes, err = x509.MarshalECPrivateKey(k)
	default:
		return block, nil
	}
	return pem.EncodeToMemory(b), err
}

// label returns the label of a block for an error. It quotes only usual labels: a server that was sent a token could
// repeat it as a label.
func label(typ string) string {
	if len(typ) > 40 || strings.Trim(typ, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ") != "" {
		return "something else"
	}
	return strconv.Quote(typ)
}
