package bearer

import (
	"crypto/tls"
	"errors"
	"net"
)

// RedactError returns err, or an error with the text of [Redact] if that differs: errors of net/http quote answers
// that are not HTTP. The new error wraps only a *net.OpError or a *tls.CertificateVerificationError in err, whose
// texts predate the sending of the secrets.
func RedactError(err error, secrets ...string) error {
	text := Redact(err.Error(), secrets...)
	if text == err.Error() {
		return err
	}
	e := &redacted{text: text}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		e.cause = op
	} else if v, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		e.cause = v
	}
	return e
}

type redacted struct {
	text  string
	cause error // may be nil
}

func (e *redacted) Error() string { return e.text }
func (e *redacted) Unwrap() error { return e.cause }
