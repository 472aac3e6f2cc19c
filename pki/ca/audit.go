package ca

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net"
	"time"

	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// Issuance is the record of one certificate or token that was signed. It holds no secret. An
// [Auditor] may keep it: it is not changed later.
type Issuance struct {
	Time time.Time // of the signature
	Kind string    // "x509-svid", "dns" or "ca", as of [Profile], or "jwt-svid"

	// Serial is the serial number in hexadecimal; of a token, its claim "jti".
	Serial string

	ID       spiffe.ID // zero for "dns"
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

	Caller, Method string // the authenticated caller, and how it authenticated; see [Request]
}

// Auditor makes records of what an [Authority] signs; see [Config]. It must be safe for concurrent
// use.
type Auditor interface {
	// Record returns nil when i is durable: the certificate leaves the authority only then. An
	// error means that it never does. It should return when ctx is done, and may take its time
	// before: the caller waits for its certificate, and so pays for a slow or a full sink.
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

// NewIssuance describes a certificate that was signed for r, now, by the CA of the certificate issuer, which
// may be nil.
func NewIssuance(r *Request, cert, issuer *x509.Certificate) *Issuance {
	der, key := sha256.Sum256(cert.Raw), sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	i := &Issuance{
		Time: time.Now().Round(0), Kind: r.Profile.String(), Serial: rotation.Serial(cert),
		ID: r.ID, DNSNames: cert.DNSNames, IPs: cert.IPAddresses, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
		Fingerprint: hex.EncodeToString(der[:]), PublicKey: hex.EncodeToString(key[:]), Caller: r.Caller, Method: r.Method,
	}
	if issuer != nil {
		i.Issuer = rotation.Serial(issuer)
	}
	return i
}
