package linkerdproxy

import (
	"cmp"
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

// ServerConfig returns the configuration of a server of the mesh. [PeerName] returns the identity of its client. A
// handshake fails if the client asks for a server name other than the workload's, and while there is no valid
// certificate, with the error of [Identity.Credential].
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
				return nil, fmt.Errorf("linkerdproxy: the client asks for the server name %.300q, and this is %q",
					hello.ServerName, id.cfg.Name)
			}
			c, err := id.Credential()
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

// ClientConfig returns a configuration for connections to a server with an identity, a DNS name or a URI. The TLS
// handshake asks for serverName; empty means the identity, unless that is a URI. Once the workload's certificate has
// expired, a handshake fails with an error that wraps [ErrExpired], unless [Config].AnonymousAfterExpiry is set.
func (id *Identity) ClientConfig(identity, serverName string) (*tls.Config, error) {
	name := cmp.Or(serverName, identity)
	switch {
	case identity == "":
		return nil, errors.New("linkerdproxy: the identity to expect of the server is empty")
	case strings.ContainsAny(name, ":/") || net.ParseIP(name) != nil: // crypto/tls sends none of these as SNI
		return nil, fmt.Errorf("linkerdproxy: the server name %.300q is not a DNS name: give the one that the "+
			"server answers to", name)
	}
	server := pki.ExpectLeaf(id.td, "the server "+identity, nil, func(leaf *x509.Certificate) error {
		got, err := identities(leaf)
		if err == nil && !slices.Contains(got, identity) {
			err = fmt.Errorf("it is for %.300q, and not for %q", got, identity)
		}
		return err
	})
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			c, err := id.Credential()
			switch {
			case err == nil:
				return c.TLSCertificate(), nil
			case errors.Is(err, ErrExpired) && !id.cfg.AnonymousAfterExpiry: // expired since VerifyConnection
				return nil, err
			}
			return new(tls.Certificate), nil // makes crypto/tls send none
		},
		InsecureSkipVerify: true, // VerifyConnection verifies: identities are no host names
		VerifyConnection: func(cs tls.ConnectionState) error {
			if _, err := id.Credential(); errors.Is(err, ErrExpired) && !id.cfg.AnonymousAfterExpiry {
				return err
			}
			return id.verify(server, cs.PeerCertificates, spiffe.ServerRole, "server")
		},
	}, nil
}

// verify verifies the chain of a peer.
func (id *Identity) verify(want pki.Expectation, chain []*x509.Certificate, role spiffe.Role, who string) error {
	if _, err := want.Verify(chain, id.bundles, role, time.Now()); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: chain,
			Err: fmt.Errorf("linkerdproxy: the certificate of the %s: %w", who, err)}
	}
	return nil
}

// identities returns a certificate's DNS names and URIs, in its order, without DNS names that end with a dot.
func identities(leaf *x509.Certificate) (all []string, err error) {
	sans, err := pki.ParseSANs(leaf.Extensions)
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

// PeerName returns the identity of a client that presented a certificate in a handshake by [Identity.ServerConfig]:
// the first DNS name or URI of its certificate. It reports false for a client without one.
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
