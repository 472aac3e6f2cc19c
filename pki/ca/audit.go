package ca

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// The kinds of an [Issuance].
const (
	KindSVID = "x509-svid" // an X.509-SVID
	KindDNS  = "dns"       // a certificate without SPIFFE ID
	KindCA   = "ca"        // a certificate for a CA below this one
	KindJWT  = "jwt-svid"  // a token
)

// Issuance is the record of one certificate or token that was signed. It holds no secret. An
// [Auditor] may keep it, as nobody changes it.
type Issuance struct {
	Time time.Time // of the signature
	Kind string    // KindSVID, KindDNS, KindCA or KindJWT

	// Serial is the serial number in hexadecimal; of a token, its claim "jti".
	Serial string

	ID       spiffe.ID // zero for KindDNS
	DNSNames []string
	IPs      []net.IP
	Audience []string // of a token

	NotBefore, NotAfter time.Time

	// Issuer is the serial number, in hexadecimal, of the CA certificate that signed; of a token,
	// the ID of the key.
	Issuer string

	// Fingerprint is the SHA-256 of the certificate's DER in hexadecimal; of a token, of its text.
	Fingerprint string

	// PublicKey is the SHA-256 of the certified key (its SubjectPublicKeyInfo in DER) in
	// hexadecimal; empty for a token.
	PublicKey string

	Caller, Method string // who asked, and how that was proven; see [Request]
}

// Auditor makes records of what an [Authority] signs; see [Config]. It must be safe for concurrent
// use.
type Auditor interface {
	// Record returns nil when i is durable: the certificate leaves the authority only then. An
	// error means that it never does. It should return when ctx is done, and may take its time
	// before: whoever asked for the certificate waits, and so pays for a slow or a full sink.
	Record(ctx context.Context, i *Issuance) error
}

// audit returns nil when there is a durable record of i, or none is wanted. The ID is for the error.
func (a *Authority) audit(ctx context.Context, i *Issuance) error {
	if a.cfg.Auditor == nil {
		return nil
	}
	err := a.cfg.Auditor.Record(ctx, i)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))):
		return signCanceled(ctx, i.ID)
	}
	return &SignError{Kind: ErrAudit, ID: i.ID, Err: err}
}

// certificateIssuance describes cert, which issuer signed.
func certificateIssuance(kind string, now time.Time, cert, issuer *x509.Certificate) *Issuance {
	der, key := sha256.Sum256(cert.Raw), sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return &Issuance{
		Time: now.Round(0), Kind: kind, Serial: serial(cert), DNSNames: cert.DNSNames, IPs: cert.IPAddresses,
		NotBefore: cert.NotBefore, NotAfter: cert.NotAfter, Issuer: serial(issuer),
		Fingerprint: hex.EncodeToString(der[:]), PublicKey: hex.EncodeToString(key[:]),
	}
}
