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
	err = certpem.Each(data, "X509 CRL", "list", maxCRLs, nil, func(der []byte) error {
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
	if err := checkSignatureAlgorithm(list.SignatureAlgorithm); err != nil {
		return nil, err
	}
	switch {
	case len(list.RawIssuer) <= 2:
		return nil, errors.New("the issuer has no name")
	case list.NextUpdate.IsZero() || list.NextUpdate.Before(list.ThisUpdate):
		return nil, errors.New("nextUpdate is missing, or before thisUpdate")
	case list.Number != nil && !validSerial(list.Number):
		return nil, errors.New("the number is negative, or has more than 20 octets")
	}
	if _, err := decode[certificateList](der); err != nil {
		return nil, err
	}
	if err := checkScope(list.Extensions); err != nil {
		return nil, err
	}
	return list, checkEntries(list.RevokedCertificateEntries)
}

// certificateList is a list in RFC 5280, section 5.1, with a next update.
type certificateList struct {
	List struct {
		Version                int `asn1:"optional"`
		Algorithm, Issuer      encasn1.RawValue
		ThisUpdate, NextUpdate encasn1.RawValue
		Entries                []encasn1.RawValue `asn1:"optional"`
		Extensions             []encasn1.RawValue `asn1:"optional,explicit,tag:0"`
	}
	Algorithm encasn1.RawValue
	Signature encasn1.BitString
}

// checkScope refuses lists for a part of what their issuer has revoked, and extensions of a list that are not known.
func checkScope(exts []pkix.Extension) error {
	delta, point := encasn1.ObjectIdentifier{2, 5, 29, 27}, encasn1.ObjectIdentifier{2, 5, 29, 28}
	for _, e := range exts {
		if e.Id.Equal(delta) {
			return errors.New("this is a delta list, which does not stand alone")
		}
		if e.Id.Equal(point) {
			if err := readIssuingPoint(e.Value, e.Critical); err != nil {
				return err
			}
		}
	}
	return checkExtensions(exts, point)
}

func checkEntries(entries []x509.RevocationListEntry) error {
	serials := make(map[string]bool, len(entries))
	for n, e := range entries {
		serial := e.SerialNumber.String()
		switch {
		case !validSerial(e.SerialNumber):
			return fmt.Errorf("entry %d: the serial number is negative, or has more than 20 octets", n+1)
		case serials[serial]:
			return fmt.Errorf("entry %d: serial number %s is there twice", n+1, serial)
		// RFC 5280 does not use 7; 8 (removeFromCRL) is for delta lists.
		case e.ReasonCode < 0 || e.ReasonCode > 10 || e.ReasonCode == 7 || e.ReasonCode == 8:
			return fmt.Errorf("entry %d: reason %d is not one that a complete list can have", n+1, e.ReasonCode)
		}
		if err := checkExtensions(e.Extensions, nil); err != nil {
			return fmt.Errorf("entry %d: %w", n+1, err)
		}
		serials[serial] = true
	}
	return nil
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

// validSerial reports whether RFC 5280 requires users to handle n.
func validSerial(n *big.Int) bool { return n.Sign() >= 0 && n.BitLen() <= maxSerialBits }

// readIssuingPoint reads the issuing distribution point (RFC 5280, section 5.2.5), which says what a list covers. It
// refuses a list for some reasons, for other issuers' certificates or for attribute certificates.
func readIssuingPoint(value []byte, critical bool) error {
	type issuingPoint struct {
		Name      encasn1.RawValue `asn1:"optional,tag:0"`
		OnlyUsers bool             `asn1:"optional,tag:1"`
		OnlyCAs   bool             `asn1:"optional,tag:2"`
	}
	p, err := decode[issuingPoint](value)
	if err != nil || !critical || len(value) == 2 || p.OnlyUsers && p.OnlyCAs {
		return errors.New("the issuing distribution point is not critical, empty, not in DER, or for a part of the " +
			"certificates, which is not supported")
	}
	return nil
}

// checkCRL verifies that ca signed list: names and key identifiers agree, ca is a CA whose key usages, if any,
// include CRL signing, its key is acceptable ([ErrWeakKey]), and the signature verifies. It does not look at
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
