package linkerdproxy

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Endpoint is where a connection leads.
type Endpoint struct {
	// Addr is where to connect to, host:port.
	Addr string

	// Identity is what the server has to prove: a DNS name, or a URI with a ServerName. Empty means a connection without TLS.
	Identity string

	// ServerName is the name that is asked for in the TLS handshake. Empty means Identity.
	ServerName string
}

// ServerConfig returns a configuration for the server side of the mesh, for connections with the server name of the
// workload. [PeerName] tells the identity of the client. Handshakes fail before there is a certificate and after it has
// expired, with an error that wraps [spiffe.ErrNotReady] or [ErrExpired], and for other server names with [ErrOtherName].
func (id *Identity) ServerConfig() *tls.Config {
	client := pki.ExpectLeaf(id.td, "a client of the mesh", nil, func(leaf *x509.Certificate) error {
		_, err := identities(leaf)
		return err
	})
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequestClientCert, // VerifyConnection verifies it
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if hello.ServerName != id.cfg.Name {
				return nil, fmt.Errorf("linkerdproxy: %q: %w, %q", hello.ServerName, ErrOtherName, id.cfg.Name)
			}
			c, err := id.valid()
			if err != nil {
				return nil, err
			}
			return c.TLSCertificate(), nil
		},
		SessionTicketsDisabled: true, // a session would outlive the certificate
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 {
				return nil
			}
			return id.verify(client, cs.PeerCertificates, spiffe.ClientRole, "client")
		},
	}
}

// ClientConfig returns a configuration for connections to an endpoint that has an Identity. Handshakes fail once the
// certificate of the proxy has expired, with an error that wraps [ErrExpired], unless [Config].AnonymousAfterExpiry is set.
func (id *Identity) ClientConfig(e Endpoint) (*tls.Config, error) {
	name := e.ServerName
	if name == "" {
		name = e.Identity
	}
	switch {
	case e.Identity == "":
		return nil, errors.New("linkerdproxy: the endpoint has no Identity to expect of the server")
	case strings.ContainsAny(name, ":/") || net.ParseIP(name) != nil: // crypto/tls sends none of these
		return nil, fmt.Errorf("linkerdproxy: the server name %.300q is not a DNS name: set the ServerName of the endpoint", name)
	}
	server := pki.ExpectLeaf(id.td, "the server "+e.Identity, nil, func(leaf *x509.Certificate) error {
		got, err := identities(leaf)
		if err == nil && !slices.Contains(got, e.Identity) {
			err = fmt.Errorf("it is for %.300q, and not for %q", got, e.Identity)
		}
		return err
	})
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			c, err := id.valid()
			switch {
			case err == nil:
				return c.TLSCertificate(), nil
			case errors.Is(err, ErrExpired) && !id.cfg.AnonymousAfterExpiry: // since VerifyConnection has looked
				return nil, err
			}
			return new(tls.Certificate), nil // crypto/tls sends none
		},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies: identities that are not names of hosts
		VerifyConnection: func(cs tls.ConnectionState) error {
			if err := id.state(); errors.Is(err, ErrExpired) && !id.cfg.AnonymousAfterExpiry {
				return err
			}
			return id.verify(server, cs.PeerCertificates, spiffe.ServerRole, "server")
		},
	}, nil
}

// verify verifies the chain of a peer.
func (id *Identity) verify(want pki.Expectation, chain []*x509.Certificate, role spiffe.Role, who string) error {
	if _, err := want.Verify(chain, id.bundles, role, time.Now()); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: chain, Err: fmt.Errorf("linkerdproxy: the certificate of the %s: %w", who, err)}
	}
	return nil
}

// identities returns the DNS names and URIs of a certificate, in its order. A DNS name with a trailing dot is none.
func identities(leaf *x509.Certificate) (all []string, err error) {
	sans, err := pki.CertificateSANs(leaf)
	if err != nil {
		return nil, err
	}
	for _, s := range sans {
		if s.Type == pki.URI || s.Type == pki.DNS && !strings.HasSuffix(s.Value, ".") {
			all = append(all, s.Value)
		}
	}
	return all, nil
}

// PeerName returns the identity of a client that has presented a certificate in a handshake by [Identity.ServerConfig]: the
// first DNS name or URI of its certificate. It reports false for a client without one.
func PeerName(cs tls.ConnectionState) (name string, ok bool) {
	if !cs.HandshakeComplete || len(cs.PeerCertificates) == 0 {
		return "", false
	}
	all, err := identities(cs.PeerCertificates[0])
	if err != nil || len(all) == 0 {
		return "", false
	}
	return all[0], true
}
