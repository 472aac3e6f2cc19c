package pki

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"errors"
	"fmt"
	"math/big"
	"slices"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/spiffe"
)

// Limits on revocation lists.
const (
	maxCRL           = 700 << 10 // bytes of DER
	maxCRLs          = 100       // in one file
	maxCRLExtensions = 32        // of a list, or of an entry
	maxSerialBits    = 20*8 - 1  // of a positive number in 20 octets; RFC 5280, section 4.1.2.2
)

// errCRL says that a certificate revocation list is not valid, or does not belong to a CA.
var errCRL = errors.New("invalid certificate revocation list")

// parseCRLs parses a file of certificate revocation lists (RFC 5280, section 5): one or more X509 CRL blocks and no
// others. Text in front of a block is allowed, as tools write comments there; text after the last block is not.
// parseCRLs does not verify signatures: see checkCRL.
//
// Beyond the checks of [x509.ParseRevocationList], a list must have a signature with SHA-256 or better, an issuer, a
// next update no earlier than this update, no repeated serial number or extension, only reasons that a complete list
// can have, and no critical extension other than an issuing distribution point. Partial lists are refused: delta
// lists, and lists for attribute certificates, for some reasons, or for other issuers' certificates.
//
// More than 1 MiB of input, 700 KiB for a list, or 100 lists give an error that wraps [spiffe.ErrTooLarge].
func parseCRLs(data []byte) (crls []*x509.RevocationList, err error) {
	err = certpem.Each(data, "X509 CRL", "list", maxCRLs, func(der []byte) error {
		list, err := parseCRL(der)
		crls = append(crls, list)
		return err
	})
	return crls, err
}

func parseCRL(der []byte) (*x509.RevocationList, error) {
	if len(der) > maxCRL {
		return nil, fmt.Errorf("%d bytes, the limit is %d: %w", len(der), maxCRL, spiffe.ErrTooLarge)
	}
	list, err := x509.ParseRevocationList(der)
	if err != nil {
		return nil, certpem.Short(err)
	}
	if !isWhole(list, der) {
		return nil, errors.New("there is something in the list, or after it, that crypto/x509 passes over")
	}
	switch list.SignatureAlgorithm {
	case x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512, x509.PureEd25519,
		x509.SHA256WithRSA, x509.SHA384WithRSA,
		x509.SHA512WithRSA, x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS:
	default:
		return nil, fmt.Errorf("the signature algorithm %v is not accepted, use SHA-256 or better",
			list.SignatureAlgorithm)
	}
	switch {
	case len(list.RawIssuer) <= 2:
		return nil, errors.New("the issuer has no name")
	case list.NextUpdate.IsZero() || list.NextUpdate.Before(list.ThisUpdate):
		return nil, errors.New("nextUpdate is missing, or before thisUpdate")
	case list.Number != nil && !validSerial(list.Number):
		return nil, errors.New("the number is negative, or has more than 20 octets")
	}
	delta, point := encasn1.ObjectIdentifier{2, 5, 29, 27}, encasn1.ObjectIdentifier{2, 5, 29, 28}
	for _, e := range list.Extensions {
		if e.Id.Equal(delta) {
			return nil, errors.New("this is a delta list, which does not stand alone")
		}
		if e.Id.Equal(point) {
			if err := readIssuingPoint(e.Value, e.Critical); err != nil {
				return nil, err
			}
		}
	}
	if err := checkExtensions(list.Extensions, point); err != nil {
		return nil, err
	}
	serials := make([][]byte, 0, len(list.RevokedCertificateEntries))
	for n, e := range list.RevokedCertificateEntries {
		switch {
		case !validSerial(e.SerialNumber):
			return nil, fmt.Errorf("entry %d: the serial number is negative, or has more than 20 octets", n+1)
		// RFC 5280 does not use 7; 8 (removeFromCRL) is for delta lists.
		case e.ReasonCode < 0 || e.ReasonCode > 10 || e.ReasonCode == 7 || e.ReasonCode == 8:
			return nil, fmt.Errorf("entry %d: reason %d is not one that a complete list can have", n+1, e.ReasonCode)
		}
		if err := checkExtensions(e.Extensions, nil); err != nil {
			return nil, fmt.Errorf("entry %d: %w", n+1, err)
		}
		serials = append(serials, e.SerialNumber.Bytes())
	}
	slices.SortFunc(serials, bytes.Compare)
	for n := range serials {
		if n > 0 && bytes.Equal(serials[n-1], serials[n]) {
			return nil, fmt.Errorf("serial number %x is there twice", serials[n])
		}
	}
	return list, nil
}

// checkExtensions refuses too many extensions, a repeated one, and a critical one other than known.
func checkExtensions(exts []pkix.Extension, known encasn1.ObjectIdentifier) error {
	if len(exts) > maxCRLExtensions {
		return fmt.Errorf("more than %d extensions: %w", maxCRLExtensions, spiffe.ErrTooLarge)
	}
	for n, e := range exts {
		if e.Critical && !e.Id.Equal(known) {
			return fmt.Errorf("extension %v is critical and not known", e.Id)
		}
		if slices.ContainsFunc(exts[:n], func(other pkix.Extension) bool { return other.Id.Equal(e.Id) }) {
			return fmt.Errorf("extension %v is there twice", e.Id)
		}
	}
	return nil
}

// isWhole reports whether crypto/x509 has read all of a list. It ignores trailing bytes, even inside, where
// revocations or a critical extension could hide.
func isWhole(list *x509.RevocationList, der cryptobyte.String) bool {
	const extensions = asn1.Tag(0x80 | 0x20)
	var body, tbs, exts cryptobyte.String
	var time asn1.Tag
	if !der.ReadASN1(&body, asn1.SEQUENCE) || !der.Empty() || !body.ReadASN1(&tbs, asn1.SEQUENCE) ||
		!body.SkipASN1(asn1.SEQUENCE) || !body.SkipASN1(asn1.BIT_STRING) || !body.Empty() ||
		!tbs.SkipASN1(asn1.INTEGER) || !tbs.SkipASN1(asn1.SEQUENCE) || !tbs.SkipASN1(asn1.SEQUENCE) ||
		!tbs.ReadAnyASN1(&exts, &time) {
		return false
	}
	if !list.NextUpdate.IsZero() && !tbs.ReadAnyASN1(&exts, &time) {
		return false
	}
	if !tbs.SkipOptionalASN1(asn1.SEQUENCE) {
		return false
	}
	if tbs.PeekASN1Tag(extensions) && (!tbs.ReadASN1(&exts, extensions) || !exts.SkipASN1(asn1.SEQUENCE) ||
		!exts.Empty()) {
		return false
	}
	return tbs.Empty()
}

// validSerial reports whether RFC 5280 requires users to handle n.
func validSerial(n *big.Int) bool { return n.Sign() >= 0 && n.BitLen() <= maxSerialBits }

// readIssuingPoint reads the issuing distribution point (RFC 5280, section 5.2.5), which says what a list covers.
func readIssuingPoint(value cryptobyte.String, critical bool) error {
	const name, onlyUsers, onlyCAs = asn1.Tag(0x80 | 0x20), asn1.Tag(0x80 | 1), asn1.Tag(0x80 | 2)
	var point cryptobyte.String
	if !critical || !value.ReadASN1(&point, asn1.SEQUENCE) || !value.Empty() || point.Empty() {
		return errors.New("the issuing distribution point is not critical, not a SEQUENCE in DER, or empty")
	}
	if point.PeekASN1Tag(name) && !point.SkipASN1(name) {
		return errors.New("the issuing distribution point is not DER")
	}
	for _, tag := range []asn1.Tag{onlyUsers, onlyCAs} {
		var only cryptobyte.String
		if point.PeekASN1Tag(tag) && (!point.ReadASN1(&only, tag) || string(only) != "\xff" || !point.Empty()) {
			return errors.New("the issuing distribution point is not DER, or for more than one kind of certificates")
		}
	}
	if !point.Empty() {
		return errors.New("the list is for some reasons, for other issuers' certificates or for attribute " +
			"certificates, which is not supported")
	}
	return nil
}

// checkCRL verifies that ca signed list: names and key identifiers agree, ca is a CA whose key usages, if any,
// include CRL signing, its key is acceptable ([CheckPublicKey]), and the signature verifies. It does not look at
// dates.
func checkCRL(list *x509.RevocationList, ca *x509.Certificate) error {
	switch {
	case list == nil || ca == nil:
		return errors.New("no list, or no CA")
	case !bytes.Equal(ca.RawSubject, list.RawIssuer):
		return fmt.Errorf("the list is of %.300q, not of %.300q", list.Issuer, ca.Subject)
	case len(list.AuthorityKeyId) > 0 && len(ca.SubjectKeyId) > 0 &&
		!bytes.Equal(list.AuthorityKeyId, ca.SubjectKeyId):
		return fmt.Errorf("the list is by another key of %.300q", ca.Subject)
	case !isCA(ca):
		return fmt.Errorf("%.300q is not a CA", ca.Subject)
	case ca.KeyUsage != 0 && ca.KeyUsage&x509.KeyUsageCRLSign == 0:
		return fmt.Errorf("the key usage of %.300q does not include CRL signing", ca.Subject)
	}
	if err := certpem.CheckKey(ca.PublicKey); err != nil {
		return fmt.Errorf("%.300q: %w", ca.Subject, err)
	}
	if err := ca.CheckSignature(list.SignatureAlgorithm, list.RawTBSRevocationList, list.Signature); err != nil {
		return fmt.Errorf("the signature is not by %.300q", ca.Subject)
	}
	return nil
}
