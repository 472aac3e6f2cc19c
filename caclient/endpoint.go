package caclient

import (
	"context"
	"log/slog"
	"net/http"

	"github.com/svidkit/svidkit/spiffe"
)

// Endpoint says where a CA is, how its client recognises it, and how the client proves itself. The options of every
// remote CA's client include one. URL and TrustDomain are required. It is copied.
type Endpoint struct {
	// URL is the URL of the CA, such as https://istiod.istio-system.svc:15012, without a path.
	URL string

	// HTTPClient reaches the CA. Its transport decides which servers are trusted and which client certificate is
	// presented; use [NewHTTPClient] or the Transport of a spiffetls.Endpoint. Nil means a client of [NewHTTPClient]
	// that trusts the roots in RootsFile or, without it, the host's roots; packages linkerd and stepca describe their
	// own defaults. It is copied; the copy follows no redirects and keeps no cookies.
	HTTPClient *http.Client

	// TrustDomain is the trust domain that the CA's roots speak for.
	TrustDomain spiffe.TrustDomain

	// Roots provides the bundle of TrustDomain from another source, such as a federation.Manager or a bundle that
	// never changes. Each FetchBundles reads it. Set at most one of Roots and RootsFile.
	Roots spiffe.BundleSource

	// RootsFile is a file of CA certificates in PEM that is read at each FetchBundles, such as Istio's
	// /var/run/secrets/istio/root-cert.pem.
	RootsFile string

	// Token returns the token for each call; empty means none. Its error fails the call, except for an
	// fs.ErrNotExist: then the call is made without a token, as with TokenFile. The method Token of a
	// *tokensource.Source fits. Set at most one of Token and TokenFile.
	Token func(ctx context.Context) (string, error)

	// TokenFile is a file with the token, which is read for each call, without the white space around it. If it
	// cannot be read, the call is made without a token, because the transport may have a certificate. If the CA then
	// does not authenticate the caller, the error contains the reason.
	TokenFile string

	// AllowPlaintext lets URL begin with http, for tests and for a proxy on the same host that adds TLS. The token is
	// readable on the connection.
	AllowPlaintext bool

	// Logger gets failures that do not end a call, at level Warn. Nil discards them.
	Logger *slog.Logger
}
