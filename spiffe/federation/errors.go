package federation

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// Causes in a fetchError, besides the causes that [Fetch] lists.
var (
	errNotAuthenticated = errors.New("endpoint not authenticated") // nothing that it sent was read
	errRedirect         = errors.New("redirect refused")
	errSequence         = errors.New("does not follow the known bundle") // see Status.Refused
)

// fetchError is a failed fetch.
type fetchError struct {
	TrustDomain spiffe.TrustDomain
	URL         string // of the last request, without its query
	Err         error
}

// Error names the trust domain, the URL and the cause. The cause may quote input from the endpoint, such as the
// names in a certificate that failed to verify, so it is cut to 512 bytes, and unprintable characters are replaced.
func (e *fetchError) Error() string {
	why := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, redact.Clip(e.Err.Error(), 512))
	return fmt.Sprintf("federation: bundle of %q from %s: %s", e.TrustDomain, e.URL, why)
}

func (e *fetchError) Unwrap() error { return e.Err }
