package bearer

import (
	"crypto/tls"
	"errors"
	"net"
)

// RedactError returns err if its text is fit for a log by the rule of [Redact], as errors of net/http quote answers that
// are not HTTP. If not, it returns one with the text that is, which wraps only a *net.OpError or a
// *tls.CertificateVerificationError of err: what they quote is from before the secrets were sent.
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
