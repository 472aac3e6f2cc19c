package spiffetls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

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

	// Clock is empty, or says in words why a clock may be wrong. It is a guess.
	Clock string

	hint string // another remedy
}

// Error names the side that was refused, the reason, and Clock if it is set.
func (e *HandshakeError) Error() string {
	text := "spiffetls: "
	if !e.refusal() {
		text += "no identity to present: "
	} else if e.Server {
		text += "the client is refused: "
	} else {
		text += "the server is refused: "
	}
	text += strings.TrimPrefix(strings.TrimPrefix(e.Err.Error(), "spiffetls: "), "spiffe: ") + e.hint
	if e.Clock != "" {
		text += "; " + e.Clock
	}
	return text
}

// Unwrap returns e.Err.
func (e *HandshakeError) Unwrap() error { return e.Err }

func (e *HandshakeError) refusal() bool {
	_, ok := errors.AsType[*spiffe.VerifyError](e.Err)
	return ok || webRefusal(e.Err)
}

// webRefusal reports whether err is from a client with WebRoots that refused the server's certificate.
func webRefusal(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// clockSkew is the largest difference that is blamed on a clock.
const clockSkew = 5 * time.Minute

// refused returns the error for a peer that was not accepted.
func (e *Endpoint) refused(role spiffe.Role, err error) *HandshakeError {
	he := &HandshakeError{Server: role == spiffe.ClientRole, Err: err}
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	if !ok || invalid.Reason != x509.Expired || invalid.Cert == nil {
		return he
	}
	now, cert := e.now(), invalid.Cert
	var own time.Time // when this side's identity was issued, by the CA's clock
	if e.config.Self != nil {
		if svid, err := e.config.Self.SVID(); err == nil && svid != nil {
			own = svid.Leaf().NotBefore
		}
	}
	switch early, late := cert.NotBefore.Sub(now), now.Sub(cert.NotAfter); {
	case early > 0:
		he.Clock = fmt.Sprintf("the certificate becomes valid only in %s: compare the clocks", readable(early))
		if now.Before(own) {
			he.Clock += "; this side's is slow, as its own certificate is not valid yet either"
		}
	case late > 0 && late <= clockSkew && !own.After(cert.NotAfter): // otherwise it has expired by the CA's clock too
		he.Clock = fmt.Sprintf(
			"the certificate expired %s ago: if the other side renews in time, compare the clocks", readable(late))
	}
	return he
}

func readable(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}

// failure is a handshake that failed, or a request that [RequirePeer] denied.
type failure struct {
	server bool   // this side
	remote string // the address of the other side, or the name that a client dialled

	// stage is as in a [spiffe.VerifyError]; or "identity" if this side had none to present, "web" if a client with
	// WebRoots refused the server, "request" if a request was denied, and "tls" if TLS itself failed or the other
	// side ended the handshake.
	stage string

	// id is a claim in a handshake, which is judged before the other side has proved that it holds its key. In a
	// request it is proven.
	id  spiffe.ID
	err error
}

// failed records the failure of a handshake, if err is not nil, and returns err.
func (e *Endpoint) failed(server bool, remote string, err error) error {
	if err != nil && e.notes() {
		e.record(failureOf(server, remote, err))
	}
	return err
}

// notes reports whether failures are recorded.
func (e *Endpoint) notes() bool { return e.log != nil || e.config.Metrics != nil }

// record counts f, and notes it.
func (e *Endpoint) record(f failure) {
	e.config.Metrics.failed(f)
	e.note(f)
}

// note logs f, and keeps it for the report.
func (e *Endpoint) note(f failure) {
	e.config.Metrics.keep(e.now(), f)
	if e.log == nil {
		return
	}
	var name string
	if f.stage == "policy" || f.stage == "request" { // before that any peer could make up names
		name = f.id.String()
	}
	e.log.LogOf(slog.LevelWarn, name, f.message(), causeOf(f.stage, f.err), f.attrs()...)
}

// failureOf returns the failure of a handshake.
func failureOf(server bool, remote string, err error) failure {
	f := failure{server: server, remote: remote, stage: stageOf(err), err: err}
	if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		f.id = ve.ID
	}
	return f
}

// stageOf returns the stage at which a handshake, or the judgement of a connection, has failed.
func stageOf(err error) string {
	if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		return ve.Stage
	}
	if webRefusal(err) {
		return "web"
	}
	if _, ok := errors.AsType[*HandshakeError](err); ok {
		return "identity"
	}
	return "tls"
}

// message is the text of the log line.
func (f *failure) message() string {
	switch {
	case f.stage == "request":
		return "spiffetls: request denied"
	case f.stage == "identity":
		return "spiffetls: handshake failed: no identity to present"
	case f.stage == "tls":
		return "spiffetls: handshake failed"
	case f.server:
		return "spiffetls: client refused"
	}
	return "spiffetls: server refused"
}

// sides are the labels of this side.
var sides = map[bool]string{true: "server", false: "client"}

const maxReason = 1024

// attrs are the attributes for a Logger.
func (f *failure) attrs() []slog.Attr {
	attrs := []slog.Attr{slog.String("remote", f.remote)}
	if !f.id.IsZero() {
		key := "unverified_id"
		if f.stage == "request" {
			key = "id"
		}
		attrs = append(attrs, slog.String(key, f.id.String()))
	}
	he, ok := errors.AsType[*HandshakeError](f.err)
	if !ok {
		return append(attrs, slog.String("err", redact.Clip(f.err.Error(), maxReason)))
	}
	attrs = append(attrs, slog.String("err", redact.Clip(he.Err.Error(), maxReason)))
	if he.Clock != "" {
		attrs = append(attrs, slog.String("clock", he.Clock))
	}
	return attrs
}

// Limits on the failures in a report.
const (
	maxKept = 8
	keptFor = time.Hour
)

// kept is the latest of several similar failures.
type kept struct {
	failure
	count int
	last  time.Time
}

// keep records f for the report. A nil Metrics keeps nothing.
func (m *Metrics) keep(now time.Time, f failure) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	k := kept{f, 1, now}
	i := slices.IndexFunc(m.kept, func(old kept) bool {
		return old.server == f.server && old.stage == f.stage && old.id == f.id && host(old.remote) == host(f.remote)
	})
	if i >= 0 {
		k.count += m.kept[i].count
		m.kept = slices.Delete(m.kept, i, i+1)
	}
	m.kept = slices.Insert(m.kept, 0, k)[:min(len(m.kept)+1, maxKept)]
}

// problems returns the last failures, the newest first.
func (m *Metrics) problems() (all []error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kept {
		if time.Since(k.last) < keptFor {
			all = append(all, fmt.Errorf("%s: from %s, %d times, the last at %s: %w",
				k.message(), k.remote, k.count, k.last.UTC().Format(time.RFC3339), k.err))
		}
	}
	return all
}

func host(addr string) string { return addressOf(addr).host }
