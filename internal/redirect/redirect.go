// Package redirect knows where redirects lead, for the transports that put tokens into requests.
package redirect

import (
	"net/http"
	"strings"
)

// Strayed reports whether r comes from a redirect that led to another host or away from TLS, now or
// before: a host must not choose where we show who we are. A response that does not say what it answers,
// as not every RoundTripper sees to that, may have come from anywhere.
func Strayed(r *http.Request) bool {
	at := r.URL
	for r.Response != nil {
		if r = r.Response.Request; r == nil || r.URL == nil {
			return true
		}
		if !strings.EqualFold(r.URL.Host, at.Host) || r.URL.Scheme != at.Scheme {
			return true
		}
	}
	return false
}
