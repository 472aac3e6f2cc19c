package spiffetls_test

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// These stand for fields of a Config among the arguments of with.
type (
	noSVID       struct{ spiffe.SVIDSource } // OptionalIdentity
	site_        func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	siteRoots    func() (*x509.CertPool, error)
	hostPolicies map[string]spiffe.PolicySource
)

func (site_) SVID() (*spiffe.SVID, error)                               { panic("never asked") }
func (siteRoots) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error)     { panic("never asked") }
func (hostPolicies) Policy() spiffe.Policy                              { panic("never asked") }
func noIdentity() spiffe.SVIDSource                                     { return noSVID{} }
func webRoots(roots func() (*x509.CertPool, error)) spiffe.BundleSource { return siteRoots(roots) }
func webCertificate(get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) spiffe.SVIDSource {
	return site_(get)
}

// with returns a copy of config, which may be nil, with the other arguments.
func with(config *spiffetls.Config, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource) spiffetls.Config {
	var c spiffetls.Config
	if config != nil {
		c = *config
	}
	switch self := self.(type) {
	case noSVID:
		c.Self, c.OptionalIdentity = self.SVIDSource, true
	case site_:
		c.WebCertificate = self
	default:
		c.Self = self
	}
	if roots, ok := peers.(siteRoots); ok {
		c.WebRoots = roots
	} else {
		c.Peers = peers
	}
	if hosts, ok := allow.(hostPolicies); ok {
		c.Hosts = hosts
	} else {
		c.Allow = allow
	}
	return c
}

func serverConfig(c spiffetls.Config) (*tls.Config, error) {
	e, err := spiffetls.New(c)
	if err != nil {
		return nil, err
	}
	return e.ServerConfig()
}

func clientConfig(c spiffetls.Config) (*tls.Config, error) {
	e, err := spiffetls.New(c)
	if err != nil {
		return nil, err
	}
	return e.ClientConfig()
}

func configureServer(s *http.Server, c spiffetls.Config) error {
	e, err := spiffetls.New(c)
	if err != nil {
		return err
	}
	return e.ConfigureServer(s)
}

func newListener(l net.Listener, c spiffetls.Config) (net.Listener, error) {
	e, err := spiffetls.New(c)
	if err != nil {
		return nil, err
	}
	return e.Listener(l)
}

func newTransport(c spiffetls.Config) (*http.Transport, error) {
	e, err := spiffetls.New(c)
	if err != nil {
		return nil, err
	}
	return e.Transport()
}

// inMemory serves TLS with s until the test ends.
func inMemory(t testing.TB, s *http.Server) *memconn.Listener {
	l := memconn.Listen()
	var wg sync.WaitGroup
	wg.Go(func() { assert.ErrorIs(t, s.ServeTLS(l, "", ""), http.ErrServerClosed) })
	t.Cleanup(func() {
		_ = s.Close()
		wg.Wait()
	})
	return l
}
