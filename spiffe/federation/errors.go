package federation

import (
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode"

	"github.com/svidkit/svidkit/spiffe"
)

// Code is the kind of a failed fetch. The zero Code is not used.
type Code int

// The codes.
const (
	Connection     Code = iota + 1 // no connection, or it broke, or what came was neither TLS nor HTTP
	Timeout                        // not done in time, or silent for too long
	Canceled                       // the caller's context ended
	Authentication                 // the endpoint did not prove what its profile asks for
	Redirect                       // to a place that is not allowed, too often, or switched off
	BadStatus                      // an HTTP status other than 200
	TooLarge                       // a document over [spiffe.MaxBundleSize]
	Document                       // not a bundle document
	Sequence                       // a bundle with a lower sequence number than a known one
)

// String returns the code in words, such as "timed out".
func (c Code) String() string {
	switch c {
	case Connection:
		return "connection failed"
	case Timeout:
		return "timed out"
	case Canceled:
		return "cancelled"
	case Authentication:
		return "endpoint not authenticated"
	case Redirect:
		return "redirect refused"
	case BadStatus:
		return "bad status"
	case TooLarge:
		return "too large"
	case Document:
		return "bad document"
	case Sequence:
		return "older than a known bundle"
	}
	return fmt.Sprintf("Code(%d)", int(c))
}

// FetchError is a failed fetch. Whatever its code, the bundle that was in force stays. Unwrap gives
// the cause: for Authentication a [*spiffe.VerifyError], a tls.CertificateVerificationError or the
// error of a [spiffe.BundleSource]; for Timeout [context.DeadlineExceeded]; for TooLarge
// [spiffe.ErrTooLarge]; for Document a [*spiffe.BundleError].
type FetchError struct {
	TrustDomain spiffe.TrustDomain
	URL         string // that was asked last, without its query
	Code        Code
	Status      int // the HTTP status, if one was received
	Err         error
}

// Error names the trust domain, the URL, the kind and the cause, which is made fit for a log line: it may
// quote what a stranger sent, such as the names in a certificate that failed to verify. So it is cut, and
// what does not print is replaced.
func (e *FetchError) Error() string {
	why := fmt.Sprint(e.Err)
	if len(why) > 512 {
		why = strings.ToValidUTF8(why[:512], "") + "…"
	}
	why = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, why)
	return fmt.Sprintf("federation: bundle of %q from %s: %v: %s", e.TrustDomain, e.URL, e.Code, why)
}

// Unwrap returns e.Err.
func (e *FetchError) Unwrap() error { return e.Err }

// Retryable reports whether the failure may go away by itself within seconds: the network's, and an
// endpoint's that is overloaded or broken, which are statuses 408, 429 and from 500. How long to
// wait is always 0, for unknown.
func (e *FetchError) Retryable() (after time.Duration, ok bool) {
	switch e.Code {
	case Connection, Timeout:
		return 0, true
	case BadStatus:
		return 0, e.Status >= 500 || e.Status == http.StatusTooManyRequests || e.Status == http.StatusRequestTimeout
	}
	return 0, false
}

// Errors are the failed fetches of [FetchAll], sorted by trust domain: at least one.
type Errors []*FetchError

// Error joins the texts by "; ".
func (e Errors) Error() string {
	texts := make([]string, len(e))
	for i, one := range e {
		texts[i] = one.Error()
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns all of them, so that errors.Is and errors.As find each.
func (e Errors) Unwrap() []error {
	all := make([]error, len(e))
	for i, one := range e {
		all[i] = one
	}
	return all
}
