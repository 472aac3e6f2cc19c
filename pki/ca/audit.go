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

// Issuance is the record of one signed certificate or token. It holds no secret. An [Auditor] may keep it: it never
// changes. Its JSON form is a line of package auditlog without the last member.
type Issuance struct {
	Time time.Time `json:"time"`           // of the signature
	Kind string    `json:"kind,omitempty"` // "x509-svid" or "dns", after the [Profile], or "jwt-svid"

	// Serial is the serial number in hexadecimal, or a token's claim "jti".
	Serial string `json:"serial,omitempty"`

	ID       spiffe.ID `json:"id,omitzero"` // zero for "dns"
	DNSNames []string  `json:"dns_names,omitempty"`
	IPs      []net.IP  `json:"ips,omitempty"`
	Audience []string  `json:"audience,omitempty"` // of a token

	NotBefore time.Time `json:"not_before,omitzero"`
	NotAfter  time.Time `json:"not_after,omitzero"`

	// Issuer is the serial number, in hexadecimal, of the CA certificate that signed, or the ID of the key that
	// signed a token.
	Issuer string `json:"issuer,omitempty"`

	// Fingerprint is the SHA-256 of the certificate's DER, or of the token's text, in hexadecimal.
	Fingerprint string `json:"fingerprint,omitempty"`

	// PublicKey is the SHA-256 of the certified key (its SubjectPublicKeyInfo in DER) in hexadecimal; empty for a
	// token.
	PublicKey string `json:"public_key,omitempty"`

	Caller     string `json:"caller,omitempty"` // the authenticated caller; see [Request]
	Method     string `json:"method,omitempty"` // how it authenticated
	spiffe.Pod        // where it runs, as far as its proof says

	// PodRequest is the name of the PodCertificateRequest in the Namespace; empty for other requests.
	PodRequest string `json:"request,omitempty"`
}

// Auditor records everything that an [Authority] signs; see [Config]. It must be safe for concurrent use. It may have
// two more methods:
//
//	RecordKeyEvent(context.Context, *KeyEvent) error
//	Err() error
//
// RecordKeyEvent records a change of the CA's keys. It returns nil when the event is durable, and should return when
// its context is done. An error prevents nothing: the event has already happened, and an emergency must not wait for
// a disk. The event is in the log, [Authority.Health] has the error, and the authority tries to record it again
// later.
//
// Err says whether records can be made now. [Authority.Health] calls it, so that an authority that was taken out of
// service for a full disk comes back. Without Err, the error of the last record counts for ten seconds.
type Auditor interface {
	// Record returns nil when i is durable. Only then does the certificate leave the authority; after an error it
	// never does. Record should return when ctx is done. Until then it may take its time: the caller waits for its
	// certificate.
	Record(ctx context.Context, i *Issuance) error
}

// audit returns nil when a durable record of i exists or there is no Auditor. The ID is for the error.
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

// newIssuance describes a certificate that was signed for r at now by the CA with the certificate issuer.
func newIssuance(r *Request, cert, issuer *x509.Certificate, now time.Time) *Issuance {
	der, key := sha256.Sum256(cert.Raw), sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return &Issuance{
		Time: now.Round(0), Kind: r.Profile.kind(), Serial: rotation.Serial(cert),
		ID: r.ID, DNSNames: cert.DNSNames, IPs: cert.IPAddresses, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
		Fingerprint: hex.EncodeToString(der[:]), PublicKey: hex.EncodeToString(key[:]),
		Issuer: rotation.Serial(issuer), Caller: r.Caller, Method: r.Method, Pod: r.Pod, PodRequest: r.PodRequest,
	}
}
