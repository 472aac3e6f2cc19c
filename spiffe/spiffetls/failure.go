package spiffetls

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// HandshakeError says why this side ended a handshake: it refused the other side's certificate, or had no
// certificate to present.
type HandshakeError struct {
	// Server says that this side is the server.
	Server bool

	// Err is the [*spiffe.VerifyError] of a refusal, with the stage, the rule and the ID, or the
	// [*tls.CertificateVerificationError] of a client with WebRoots. Otherwise it says why there is no identity to
	// present.
	Err error

	refused bool   // the other side
	hint    string // a remedy, or why a clock may be wrong
}

// Error names the side that was refused, and the reason. It says so if a clock may be wrong, which is a guess.
func (e *HandshakeError) Error() string {
	text := "spiffetls: no identity to present: "
	if e.refused {
		text = "spiffetls: the " + sides[!e.Server] + " is refused: "
	}
	text += strings.TrimPrefix(strings.TrimPrefix(e.Err.Error(), "spiffetls: "), "spiffe: ")
	if e.hint != "" {
		text += "; " + e.hint
	}
	return text
}

// Unwrap returns e.Err.
func (e *HandshakeError) Unwrap() error { return e.Err }

// clockSkew is the largest difference that is blamed on a clock.
const clockSkew = 5 * time.Minute

// clockHint returns how a clock may be the cause of err, or "".
func (e *Endpoint) clockHint(err error) string {
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	if !ok || invalid.Reason != x509.Expired || invalid.Cert == nil {
		return ""
	}
	now := e.now()
	early, late := invalid.Cert.NotBefore.Sub(now), now.Sub(invalid.Cert.NotAfter)
	switch {
	case early > 0:
		return fmt.Sprintf("the certificate becomes valid only in %s: compare the clocks", early.Round(time.Second))
	case late > 0 && late <= clockSkew:
		return fmt.Sprintf("the certificate expired %s ago: if the other side renews in time, compare the clocks",
			late.Round(time.Second))
	}
	return ""
}

// failure is a handshake that failed, or a request that [RequirePeer] denied.
type failure struct {
	count
	remote string // the address of the other side, or the name that a client dialled

	// id is a claim in a handshake, which is judged before the other side has proved that it holds its key. In a
	// request it is proven.
	id  spiffe.ID
	err error
	at  time.Time
}

// ended records the end of a handshake, and returns err.
func (e *Endpoint) ended(server bool, remote string, cs tls.ConnectionState, err error) error {
	if err == nil {
		outcome := map[bool]string{true: "resumed", false: "full"}[cs.DidResume]
		e.config.Metrics.add(failure{count: count{sides[server], outcome, ""}})
		e.algorithms(server, remote, cs)
	}
	return e.failed(server, remote, err)
}

// algorithms counts and logs the algorithms of a handshake.
func (e *Endpoint) algorithms(server bool, remote string, cs tls.ConnectionState) {
	peer := "none"
	if len(cs.PeerCertificates) > 0 {
		peer = cmp.Or(certpem.Kind(cs.PeerCertificates[0].PublicKey), "other")
	}
	exchange := "none" // of a session that TLS 1.2 resumes
	if cs.CurveID != 0 {
		exchange = cs.CurveID.String()
	}
	e.config.Metrics.add(failure{count: count{sides[server], exchange, peer}})
	if e.quantum && !strings.HasPrefix(peer, "ml-dsa") && peer != "none" {
		what, name := "name", cs.ServerName // of a web server, which proves no ID
		if e.config.WebRoots == nil {
			id, _ := spiffe.IDFromCertificate(cs.PeerCertificates[0])
			what, name = "id", id.String()
		}
		e.log.LogOf(slog.LevelInfo, name, "spiffetls: a peer without ML-DSA", "classical",
			slog.String(what, name), slog.String("remote", remote), slog.String("key", peer),
			slog.String("key_exchange", exchange))
	}
}

// failed records the failure of a handshake, if err is not nil, and returns err.
func (e *Endpoint) failed(server bool, remote string, err error) error {
	if err != nil {
		f := failure{count: count{sides[server], "failed", reasonFor(err)}, remote: remote, err: err}
		if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
			f.id = ve.ID
		}
		e.record(f)
	}
	return err
}

const maxReason = 1024

// record counts and logs f.
func (e *Endpoint) record(f failure) {
	f.at, f.remote = e.now(), cmp.Or(f.remote, "unknown")
	e.config.Metrics.add(f)
	if f.reason == "canceled" { // by the program itself
		return
	}
	key, name := "unverified_id", ""
	if f.outcome == "denied" {
		key = "id"
	}
	if key == "id" || f.reason == "denied" { // before that any peer could make up names
		name = f.id.String()
	}
	attrs := []slog.Attr{slog.String("remote", f.remote)}
	if !f.id.IsZero() {
		attrs = append(attrs, slog.String(key, f.id.String()))
	}
	text := redact.Clip(strings.TrimPrefix(f.err.Error(), "spiffetls: "), maxReason)
	e.log.LogOf(slog.LevelWarn, name, messages[f.outcome], f.reason, append(attrs, slog.String("err", text))...)
}

// messages are the messages of failures, by the outcome.
var messages = map[string]string{"failed": "spiffetls: handshake failed", "denied": "spiffetls: request denied"}

// sides are the labels of this side.
var sides = map[bool]string{true: "server", false: "client"}

// reasonFor returns the reason of a handshake that failed, or of a connection that is refused later.
func reasonFor(err error) string {
	if he, ok := errors.AsType[*HandshakeError](err); ok && !he.refused {
		return "no_identity"
	}
	if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		switch ve.Stage {
		case "leaf":
			return "not_an_svid"
		case "bundle":
			return reasonOf(err, "no_bundle", []known{
				{spiffe.ErrUnknownTrustDomain, "unknown_trust_domain"}, {spiffe.ErrNoAuthority, "no_authority"},
			})
		case "policy":
			return "denied"
		}
		return chainReason(err)
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return chainReason(err)
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return "not_tls"
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "remote error" { // the wording of crypto/tls
		return "refused"
	}
	return reasonOf(err, "other", []known{
		{errNotJudged, "not_verified"}, {errUnproven, "not_proven"},
		{errTooMany, "too_many"}, {errForeign, "ungoverned"}, {errProofEnds, "proof_ends"},
		{context.DeadlineExceeded, "timeout"}, {os.ErrDeadlineExceeded, "timeout"}, {context.Canceled, "canceled"},
		{io.EOF, "closed"}, {io.ErrUnexpectedEOF, "closed"}, {syscall.ECONNRESET, "closed"}, {syscall.EPIPE, "closed"},
	})
}

// known is an error with its reason.
type known struct {
	err    error
	reason string
}

// reasonOf returns the reason of the first error in all that err wraps, or otherwise.
func reasonOf(err error, otherwise string, all []known) string {
	for _, k := range all {
		if errors.Is(err, k.err) {
			return k.reason
		}
	}
	return otherwise
}

// chainReason returns the reason why a chain does not verify.
func chainReason(err error) string {
	if errors.Is(err, errNoWebRoots) {
		return "no_roots"
	}
	if errors.Is(err, spiffe.ErrAlgorithm) {
		return "algorithm"
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return "wrong_host"
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return "unknown_authority"
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		switch e.Reason {
		case x509.Expired:
			return "expired"
		case x509.IncompatibleUsage:
			return "wrong_role"
		}
	}
	return "invalid"
}
