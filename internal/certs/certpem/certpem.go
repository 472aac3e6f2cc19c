// Package certpem reads and writes certificates and private keys in PEM, with limits. Errors never carry the input, which
// may be a secret.
package certpem

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Limits on the input.
const (
	MaxInput        = 1 << 20 // bytes of PEM
	MaxCertificates = 1000    // certificates in one input
	MaxKey          = 8 << 10 // bytes of DER: an RSA key of 8192 bits has 4.7 KiB

	maxKeyBlocks = 10  // in a file of one key, so that the error can say what else there is
	maxText      = 300 // bytes of an error of crypto/x509
	maxHeaders   = 8   // of one block; no file that we read needs more than the two of an encrypted key
)

// ErrTooLarge says that input is over a limit; package spiffe exports it.
var ErrTooLarge = errors.New("input too large")

const begin = "-----BEGIN "

// Blocks counts the beginnings of PEM blocks. Package pem takes a damaged block for a comment in front of the next one,
// so a caller that parses fewer blocks has met a damaged one.
func Blocks(data []byte) int { return bytes.Count(data, []byte(begin)) }

// Check refuses text that would make package pem spend memory out of proportion: too much of it, too
// many blocks, or too many headers, of which it makes a map.
func Check(data []byte, size, blocks int) error {
	if len(data) > size {
		return fmt.Errorf("%d bytes of PEM, the limit is %d: %w", len(data), size, ErrTooLarge)
	}
	if n := Blocks(data); n > blocks {
		return fmt.Errorf("%d PEM blocks, the limit is %d: %w", n, blocks, ErrTooLarge)
	}
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

// Each calls read for the contents of each block of data, all of which must be of one type, without headers
// unless they are certificates. Text before a block is allowed, as tools write comments there; text after
// the last one is not, nor is a damaged block anywhere. Input without any block is an error. Errors call a
// block by its noun.
func Each(data []byte, typ, noun string, limit int, read func(der []byte) error) error {
	return each(data, typ, noun, limit, read, nil)
}

// each is Each, without the blocks of the types that skip knows.
func each(data []byte, typ, noun string, limit int, read func(der []byte) error, skip func(typ string) bool) error {
	if err := Check(data, MaxInput, limit); err != nil {
		return err
	}
	n, skipped := 0, 0
	for rest := data; ; n++ {
		var b *pem.Block
		for b, rest = pem.Decode(rest); b != nil && skip != nil && skip(b.Type); b, rest = pem.Decode(rest) {
			skipped++
		}
		if b == nil {
			if len(bytes.TrimSpace(rest)) > 0 {
				return fmt.Errorf("after %s %d: text that is not PEM", noun, n)
			}
			break
		}
		switch {
		case b.Type != typ:
			return fmt.Errorf("block %d is %s, not %s", n+skipped+1, label(b.Type), typ)
		case len(b.Headers) > 0 && typ != certificate:
			return fmt.Errorf("block %d has headers", n+skipped+1)
		}
		if err := read(b.Bytes); err != nil {
			return fmt.Errorf("%s %d: %w", noun, n+1, Short(err))
		}
	}
	if damaged := Blocks(data) - n - skipped; damaged != 0 {
		return fmt.Errorf("%d damaged PEM blocks", damaged)
	}
	if n == 0 {
		return fmt.Errorf("no %s found", noun)
	}
	return nil
}

const certificate = "CERTIFICATE"

// Certificates parses data by the rules of Each.
func Certificates(data []byte) ([]*x509.Certificate, error) { return certificates(data, nil) }

// CertificatesAmongKeys is Certificates for data that may have private keys too, which are skipped.
func CertificatesAmongKeys(data []byte) ([]*x509.Certificate, error) {
	return certificates(data, isKey)
}

func certificates(data []byte, skip func(typ string) bool) (certs []*x509.Certificate, err error) {
	err = each(data, certificate, "certificate", MaxCertificates, func(der []byte) error {
		c, err := x509.ParseCertificate(der)
		certs = append(certs, c)
		return err
	}, skip)
	if err != nil {
		return nil, err
	}
	return certs, nil
}

// EncodeCertificates returns one CERTIFICATE block for each certificate, in order.
func EncodeCertificates(certs []*x509.Certificate) []byte {
	var buf bytes.Buffer
	for _, c := range certs {
		_ = pem.Encode(&buf, &pem.Block{Type: certificate, Bytes: c.Raw}) // a Buffer does not fail
	}
	return buf.Bytes()
}

// PrivateKey parses the one private key in data: PKCS#8, PKCS#1 or SEC1. An EC PARAMETERS block in
// front, as some tools write it, is skipped; anything else is an error, and so is an encrypted key.
func PrivateKey(data []byte) (crypto.Signer, error) { return privateKey(data, maxKeyBlocks, nil) }

// PrivateKeyAmongCertificates is PrivateKey for data that may have certificates too, which are skipped.
func PrivateKeyAmongCertificates(data []byte) (crypto.Signer, error) {
	return privateKey(data, maxKeyBlocks+MaxCertificates, func(typ string) bool { return typ == certificate })
}

func privateKey(data []byte, limit int, skip func(typ string) bool) (crypto.Signer, error) {
	if err := Check(data, MaxInput, limit); err != nil {
		return nil, err
	}
	var key crypto.Signer
	for rest := data; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			if len(bytes.TrimSpace(rest)) > 0 {
				return nil, errors.New("text that is not PEM after the private key")
			}
			break
		}
		if b.Type == "EC PARAMETERS" && key == nil || skip != nil && skip(b.Type) {
			continue
		}
		if key != nil {
			return nil, fmt.Errorf("a block %.40q after the private key", b.Type)
		}
		if b.Headers["DEK-Info"] != "" || b.Type == "ENCRYPTED PRIVATE KEY" {
			return nil, errors.New("the private key is encrypted; decrypt it first")
		}
		parse := keyParsers[b.Type]
		if parse == nil {
			return nil, fmt.Errorf("block %.40q is not a private key", b.Type)
		}
		var err error
		if key, err = readKey(b.Bytes, parse); err != nil {
			return nil, fmt.Errorf("%s: %w", b.Type, err)
		}
	}
	if key == nil {
		return nil, errors.New("no private key found")
	}
	return key, nil
}

// isKey reports whether a block of this type is part of a file with a private key.
func isKey(typ string) bool {
	return keyParsers[typ] != nil || typ == "EC PARAMETERS" || typ == "ENCRYPTED PRIVATE KEY"
}

// keyParsers are the forms of private keys by the type of their block.
var keyParsers = map[string]func(der []byte) (any, error){
	"PRIVATE KEY":     x509.ParsePKCS8PrivateKey,
	"RSA PRIVATE KEY": func(der []byte) (any, error) { return x509.ParsePKCS1PrivateKey(der) },
	"EC PRIVATE KEY":  func(der []byte) (any, error) { return x509.ParseECPrivateKey(der) },
}

// PrivateKeyDER parses a private key in DER, in any of the forms that a block of PEM may have.
func PrivateKeyDER(der []byte) (crypto.Signer, error) {
	var first error
	for _, typ := range []string{"PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY"} {
		key, err := readKey(der, keyParsers[typ])
		if err == nil {
			return key, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// PKCS8 parses a PKCS#8 private key in DER.
func PKCS8(der []byte) (crypto.Signer, error) { return readKey(der, x509.ParsePKCS8PrivateKey) }

func readKey(der []byte, parse func([]byte) (any, error)) (crypto.Signer, error) {
	if len(der) > MaxKey {
		return nil, fmt.Errorf("private key of %d bytes, the limit is %d: %w", len(der), MaxKey, ErrTooLarge)
	}
	if err := whole(der); err != nil {
		return nil, err
	}
	k, err := parse(der)
	if err != nil {
		return nil, Short(err)
	}
	s, ok := k.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a key of type %T cannot sign", k)
	}
	return s, nil
}

// Short returns err, or an error with the beginning of its text if that is long: crypto/x509 quotes whole names and
// object identifiers, and the author of a certificate must not fill the log.
func Short(err error) error {
	if text := err.Error(); len(text) > maxText {
		return errors.New(strings.ToValidUTF8(text[:maxText], "") + "…")
	}
	return err
}

// whole refuses bytes after the one DER value, which some parsers of crypto/x509 ignore.
func whole(der []byte) error {
	var v asn1.RawValue
	rest, err := asn1.Unmarshal(der, &v)
	if err != nil {
		return errors.New("not DER")
	}
	if len(rest) > 0 {
		return fmt.Errorf("%d bytes after the private key", len(rest))
	}
	return nil
}

// EncodePrivateKey returns key as a PRIVATE KEY block (PKCS#8), in the clear. A key that lives in
// hardware cannot be exported and is an error.
func EncodePrivateKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("a key of type %T cannot be exported", key)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// TraditionalKey returns the form from before PKCS#8 of a block that [EncodePrivateKey] has made: PKCS#1 for an RSA key
// (RSA PRIVATE KEY) and SEC 1 for an ECDSA key (EC PRIVATE KEY). Other keys have none, and stay as they are.
func TraditionalKey(block []byte) ([]byte, error) {
	key, err := PrivateKey(block)
	if err != nil {
		return nil, err
	}
	typ, der := "", []byte(nil)
	switch k := key.(type) {
	case *rsa.PrivateKey:
		typ, der = "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(k)
	case *ecdsa.PrivateKey:
		typ = "EC PRIVATE KEY"
		der, err = x509.MarshalECPrivateKey(k)
	default:
		return block, nil
	}
	if err != nil {
		return nil, fmt.Errorf("a key of type %T cannot be exported", key)
	}
	return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), nil
}

// label returns the label of a block for an error. It is quoted only if it looks usual: a server that was sent a token
// could repeat it as a label.
func label(typ string) string {
	if len(typ) > 40 || strings.Trim(typ, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ") != "" {
		return "something else"
	}
	return strconv.Quote(typ)
}
