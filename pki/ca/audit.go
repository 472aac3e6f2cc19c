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
// [Auditor] may keep it: it is not changed later. Its JSON form is a line of package auditlog without
// the last member.
type Issuance struct {
	Time time.Time `json:"time"`           // of the signature
	Kind string    `json:"kind,omitempty"` // "x509-svid" or "dns", as of [Profile], or "jwt-svid"

	// Serial is the serial number in hexadecimal; of a token, its claim "jti".
	Serial string `json:"serial,omitempty"`

	ID       spiffe.ID `json:"id,omitzero"` // zero for "dns"
	DNSNames []string  `json:"dns_names,omitempty"`
	IPs      []net.IP  `json:"ips,omitempty"`
	Audience []string  `json:"audience,omitempty"` // of a token

	NotBefore time.Time `json:"not_before,omitzero"`
	NotAfter  time.Time `json:"not_after,omitzero"`

	// Issuer is the serial number, in hexadecimal, of the CA certificate that signed; of a token,
	// the ID of the key.
	Issuer string `json:"issuer,omitempty"`

	// Fingerprint is the SHA-256 of the certificate's DER in hexadecimal; of a token, of its text.
	Fingerprint string `json:"fingerprint,omitempty"`

	// PublicKey is the SHA-256 of the certified key (its SubjectPublicKeyInfo in DER) in
	// hexadecimal; empty for a token.
	PublicKey string `json:"public_key,omitempty"`

	Caller     string `json:"caller,omitempty"` // the authenticated caller; see [Request]
	Method     string `json:"method,omitempty"` // how it authenticated
	spiffe.Pod        // where it runs, as far as its proof says

	// PodRequest is the name of the PodCertificateRequest in the Namespace; empty for other requests.
	PodRequest string `json:"request,omitempty"`
}

// Auditor makes records of what an [Authority] signs; see [Config]. It must be safe for concurrent use. It may have
// two more methods:
//
//	RecordKeyEvent(context.Context, *KeyEvent) error
//	Err() error
//
// RecordKeyEvent records what becomes of the keys of the CA. It returns nil when the event is durable, and should
// return when its context is done. An error prevents nothing, as the event has happened, and an emergency must not
// wait for a disk: the log has all of it, [Authority.Health] the error, and it is recorded again when that may work.
//
// Err says whether records can be made at this moment. [Authority.Health] asks it, so that an authority that was taken
// out of service for a full disk comes back. Without it the error of the last record counts, for ten seconds.
type Auditor interface {
	// Record returns nil when i is durable: the certificate leaves the authority only then. An error means that it
	// never does. Record should return when ctx is done, and may take its time before: the caller waits for its
	// certificate.
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
		a.audited.Note(nil)
		return nil
	case ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))):
		return signCanceled(ctx, i.ID)
	}
	a.audited.Note(err)
	return &SignError{Kind: ErrAudit, ID: i.ID, Err: err}
}

// newIssuance describes a certificate that the CA of the certificate issuer has signed for r at now.
func newIssuance(r *Request, cert, issuer *x509.Certificate, now time.Time) *Issuance {
	der, key := sha256.Sum256(cert.Raw), sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return &Issuance{
		Time: now.Round(0), Kind: r.Profile.kind(), Serial: rotation.Serial(cert),
		ID: r.ID, DNSNames: cert.DNSNames, IPs: cert.IPAddresses, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
		Fingerprint: hex.EncodeToString(der[:]), PublicKey: hex.EncodeToString(key[:]),
		Issuer: rotation.Serial(issuer), Caller: r.Caller, Method: r.Method, Pod: r.Pod, PodRequest: r.PodRequest,
	}
}
