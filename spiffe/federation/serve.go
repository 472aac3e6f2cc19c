package federation

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/documents"
)

// NewHandler returns a handler that serves the bundle of td: a bundle endpoint. Every answer has the
// bundle that the source gives at that moment; it is encoded when it has changed, and equal
// bundles have equal bytes. The handler does not look at the path of the request.
//
// It answers GET and HEAD, does not authenticate clients, supports conditional requests by a
// strong entity tag, and lets caches keep an answer for the refresh hint, or five minutes without one.
// While the source has no bundle, or one that cannot be encoded, the status is 503.
func NewHandler(source spiffe.BundleSource, td spiffe.TrustDomain) (http.Handler, error) {
	current, err := documents.Bundle(source, td)
	if err != nil {
		return nil, fmt.Errorf("federation: handler: %w", err)
	}
	return documents.Handler(func() (documents.Document, time.Duration) {
		if b, hint := current(); b != nil {
			return b, hint
		}
		return nil, 0
	}), nil
}

// NewMapHandler returns a handler that serves the bundles of many trust domains as a bundle map. The
// function returns the current set, nil for none, and must not block, such as [Manager.Bundles] or one
// that selects what the consumer may have. Members have no refresh hint of their own
// : refresh is how long caches may keep the map, in whole seconds; 0 means five minutes.
// Everything else is as for [NewHandler].
func NewMapHandler(bundles func() *spiffe.BundleSet, refresh time.Duration) (http.Handler, error) {
	switch {
	case bundles == nil:
		return nil, errors.New("federation: map handler: no bundles")
	case refresh < 0:
		return nil, fmt.Errorf("federation: map handler: refresh is %v, and must not be negative", refresh)
	case refresh == 0:
		refresh = renew.UsualPoll
	}
	return documents.Handler(func() (documents.Document, time.Duration) {
		if set := bundles(); set != nil {
			return set, refresh
		}
		return nil, 0
	}), nil
}

// ServerConfig returns a new TLS configuration for a bundle endpoint with the profile https_spiffe:
// it presents the identity of self, which is asked at every handshake and must not block, and asks
// clients for nothing. Consumers configure the ID of self. An SVID that has expired is
// not presented: the handshake fails.
//
// TLS 1.2 and 1.3, with forward-secret AEAD cipher suites and curves, is what the standard asks for
// .
func ServerConfig(self spiffe.SVIDSource) (*tls.Config, error) {
	if self == nil {
		return nil, errors.New("federation: server: no source of the identity to present")
	}
	return WebServerConfig(func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
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
	})
}

// WebServerConfig returns a new TLS configuration for a bundle endpoint with the profile https_web,
// as [ServerConfig] does but for the certificate: the function returns it at every handshake, and it must
// have the host of the endpoint's URL as a DNS name or IP address and be issued by an
// authority that consumers trust for websites.
func WebServerConfig(certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) (*tls.Config, error) {
	if certificate == nil {
		return nil, errors.New("federation: server: no certificate to present")
	}
	c := baseConfig()
	c.GetCertificate = certificate
	c.SessionTicketsDisabled = true // consumers come once per interval, and are to see the newest certificate
	return c, nil
}

// baseConfig has what FED-25 asks for: six cipher suites of TLS 1.2 and three curves, after a post-quantum
// hybrid. The suites of TLS 1.3 are all good.
func baseConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		Time:       certchain.Now,
		CipherSuites: []uint16{
			tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
			tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
		},
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256, tls.CurveP384},
	}
}
