package federation

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/documents"
)

// NewHandler returns a handler that serves the bundle of td: a bundle endpoint. Every answer has the bundle that
// source returns at that moment. A bundle is encoded once, and equal bundles have equal bytes. The handler does not
// look at the path of the request.
//
// It answers GET and HEAD, does not authenticate clients, supports conditional requests by a
// strong entity tag, and lets caches keep an answer for the refresh hint, or five minutes without one.
//
// Most consumers refuse a whole document if they cannot read one of its keys. So the entries with keys of ML-DSA are
// left out, unless the request has the header "Svidkit-Ml-Dsa: true", as those of this package do, or the bundle has
// no other X.509 authority.
//
// While the source has no bundle, or one that cannot be encoded, the status is 503.
func NewHandler(source spiffe.BundleSource, td spiffe.TrustDomain) (http.Handler, error) {
	current, err := documents.Bundle(source, td)
	if err != nil {
		return nil, fmt.Errorf("federation: handler: %w", err)
	}
	all := documents.Handler(current, (*spiffe.Bundle).Marshal)
	classical := documents.Handler(current, func(b *spiffe.Bundle) ([]byte, error) {
		return documents.Classical(b).Marshal()
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", mldsa.Header)
		if r.Header.Get(mldsa.Header) == "true" {
			all.ServeHTTP(w, r)
			return
		}
		classical.ServeHTTP(w, r)
	}), nil
}

// ServerConfig returns a new TLS configuration for a bundle endpoint with the profile https_spiffe. It presents the
// identity of self, and asks clients for no certificate. Each handshake calls self, which must not block. Consumers
// configure the ID of self. An expired SVID is not presented: the handshake fails. As the standard requires, it
// allows TLS 1.2 and 1.3 with forward-secret AEAD cipher suites and curves.
//
// For the profile https_web set GetCertificate of the configuration: the certificate must have the host of the
// endpoint's URL and be issued by an authority that consumers trust for websites.
func ServerConfig(self spiffe.SVIDSource) (*tls.Config, error) {
	if self == nil {
		return nil, errors.New("federation: server: no source of the identity to present")
	}
	c := baseConfig()
	c.SessionTicketsDisabled = true // consumers come once per interval, and must see the newest certificate
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		svid, err := self.SVID()
		switch {
		case err != nil:
			return nil, fmt.Errorf("federation: no identity to present: %w", err)
		case svid == nil:
			return nil, errors.New("federation: no identity to present: the source gave none")
		case time.Now().After(svid.NotAfter()):
			return nil, fmt.Errorf(
				"federation: no identity to present: the SVID of %q expired at %s; see why it was not renewed",
				svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
		}
		return svid.TLSCertificate(), nil
	}
	return c, nil
}

// baseConfig follows the SPIFFE Federation standard: six cipher suites of TLS 1.2 and three curves, after a
// post-quantum hybrid. The suites of TLS 1.3 are all good.
func baseConfig() *tls.Config {
	return &tls.Config{
		MinVersion:       tls.VersionTLS12,
		Time:             certchain.Now,
		CipherSuites:     tlsalert.Suites(),
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256, tls.CurveP384},
	}
}
