package spiffetls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/spiffe"
)

// serverConfig returns the configuration of a server.
func (e *Endpoint) serverConfig() *tls.Config {
	c := e.baseConfig()
	c.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) { return e.serverCertificate(hello) }
	// crypto/tls accepts any certificate, as its own check has one pool of roots for all peers. VerifyConnection
	// checks it.
	c.ClientAuth = tls.RequireAnyClientCert
	if e.config.AllowAnonymousClients {
		c.ClientAuth = tls.RequestClientCert
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ClientRole, hostport{})
		return err
	}
	if e.config.WebCertificate != nil { // it depends on the hello, which a ticket does not have
		c.SessionTicketsDisabled = true
	} else {
		e.checkTickets(c)
	}
	return c
}

// clientConfig returns a configuration that accepts no SVID: a caller sets InsecureSkipVerify and a VerifyConnection.
func (e *Endpoint) clientConfig() *tls.Config {
	c := e.baseConfig()
	c.GetClientCertificate = e.clientCertificate
	// A session may be resumed after this client has obtained, or lost, its identity.
	c.SessionTicketsDisabled = e.config.OptionalIdentity && e.config.Self != nil
	return c
}

// configFor returns base for the handshake of one client. verified gets the proof of the client, before the client has
// proved that it holds its key. conn is the connection of the handshake, or nil if it is not known.
func (e *Endpoint) configFor(base *tls.Config, hello *tls.ClientHelloInfo, conn *tls.Conn,
	verified func(proof, tls.ConnectionState)) (*tls.Config, error) {
	client := remote(hello.Conn)
	cert, err := e.serverCertificate(hello)
	if err != nil {
		return nil, e.failed(true, client, err)
	}
	c := base.Clone()
	c.GetConfigForClient = nil
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return cert, nil }
	var result atomic.Pointer[verdict] // nil until the client is verified
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		p, err := e.verify(cs, spiffe.ClientRole, hostport{})
		if err == nil {
			err = base.VerifyConnection(cs) // the caller may have wrapped it
		}
		result.Store(&verdict{refused: err != nil, peer: p.peer, state: cs})
		if err != nil {
			return e.failed(true, client, err)
		}
		if cert.Leaf != nil {
			p.own = cert.Leaf.NotAfter
		}
		verified(p, cs)
		return nil
	}
	if e.config.Logger != nil || e.config.Metrics != nil {
		context.AfterFunc(hello.Context(), func() { e.settle(client, result.Load(), conn) })
	}
	return c, nil
}

// verdict is the outcome of verifying a client.
type verdict struct {
	refused bool         // which was recorded
	peer    *spiffe.Peer // nil for a client without a certificate
	state   tls.ConnectionState
}

// settle records the outcome of a server's handshake that has ended. v is nil if its client was not verified, and conn
// if it is not known.
func (e *Endpoint) settle(client string, v *verdict, conn *tls.Conn) {
	switch {
	case v == nil:
		_ = e.failed(true, client, errNotJudged)
	case v.refused:
	case conn == nil || conn.ConnectionState().HandshakeComplete:
		_ = e.ended(true, client, v.state, nil)
	case v.peer == nil:
		_ = e.failed(true, client, errUnproven)
	default:
		_ = e.failed(true, client, fmt.Errorf("%w; its certificate is that of %q", errUnproven, v.peer.ID()))
	}
}

var (
	errNotJudged = errors.New("the handshake ended before the client was verified: no common TLS version, " +
		"or the client refused this server, presented no certificate, closed the connection or took too long")
	errUnproven = errors.New("the handshake failed after the client's certificate was verified: " +
		"the client does not hold its key, or closed the connection")
)

func remote(c net.Conn) string {
	if c == nil || c.RemoteAddr() == nil {
		return ""
	}
	return c.RemoteAddr().String()
}

// serverCertificate returns the certificate that a server presents to this client.
func (e *Endpoint) serverCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	if e.config.WebCertificate != nil {
		cert, err := e.webCertificate(hello)
		if err != nil {
			return nil, &HandshakeError{Server: true, Err: err}
		}
		return cert, nil
	}
	return e.certificate(true, func(alternative *tls.Certificate) bool {
		nameless := *hello
		nameless.ServerName = "" // an SVID need not have it
		return nameless.SupportsCertificate(alternative) == nil
	})
}

// clientCertificate returns the certificate that a client presents to a server that has asked for one.
func (e *Endpoint) clientCertificate(asked *tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return e.certificate(false, func(alternative *tls.Certificate) bool {
		return asked.SupportsCertificate(alternative) == nil
	})
}

// certificate returns the certificate of Self to present in this handshake, the alternative if it fits. Only an expired
// one is withheld; the rest is for the peer to decide.
func (e *Endpoint) certificate(server bool, fits func(alternative *tls.Certificate) bool) (*tls.Certificate, error) {
	if e.config.Self == nil { // the Config has OptionalIdentity
		return new(tls.Certificate), nil // crypto/tls sends none
	}
	svid, err := e.config.Self.SVID()
	switch {
	case err != nil:
	case svid == nil:
		err = errors.New("the source returned none")
	case e.presents(svid.Alternative(), fits):
		return svid.Alternative().TLSCertificate(), nil
	case e.now().After(svid.NotAfter()):
		err = fmt.Errorf("the SVID of %q expired at %s and was not renewed",
			svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	default:
		if err = e.chainExpired(svid); err == nil {
			return svid.TLSCertificate(), nil
		}
	}
	if e.config.OptionalIdentity && !server {
		e.log.Warn("spiffetls: no identity presented", "no_identity", slog.Any("err", err))
		return new(tls.Certificate), nil
	}
	return nil, &HandshakeError{Server: server, Err: err}
}

// presents reports whether to present an alternative, which may be nil.
func (e *Endpoint) presents(alternative *spiffe.SVID, fits func(*tls.Certificate) bool) bool {
	return alternative != nil && e.config.Algorithms.Check(alternative.Leaf().PublicKey) == nil &&
		certchain.InTime(alternative.Leaf(), e.now()) == nil && fits(alternative.TLSCertificate()) &&
		e.vouched(alternative)
}

// vouched reports whether peers with our own bundle accept svid; without one they decide.
func (e *Endpoint) vouched(svid *spiffe.SVID) bool {
	if e.anyone == nil {
		return true
	}
	_, err := e.anyone.VerifyChain(svid.Chain(), spiffe.AnyRole)
	refused, ok := errors.AsType[*spiffe.VerifyError](err)
	return err == nil || ok && refused.Stage == "bundle"
}

// chainExpired returns an error if an intermediate has expired that a peer with our own bundle needs.
func (e *Endpoint) chainExpired(svid *spiffe.SVID) error {
	if e.config.Peers == nil || len(svid.TLSCertificate().Certificate) == 1 {
		return nil
	}
	chain := svid.Chain()
	if !e.now().After(certchain.End(chain)) {
		return nil
	}
	b, err := e.config.Peers.Bundle(svid.ID().TrustDomain())
	if err != nil || b == nil {
		return nil // the peer decides
	}
	_, err = certchain.Path(chain, b.CertPool(), certchain.Usages(int(spiffe.AnyRole)), e.now(), spiffe.AnyAlgorithm().Check)
	if err != nil {
		err = fmt.Errorf("a certificate in the chain of the SVID of %q has expired and was not renewed: %w",
			svid.ID(), err)
	}
	return err
}

// webCertificate returns the certificate for one handshake, with its leaf.
func (e *Endpoint) webCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	cert, err := e.config.WebCertificate(hello)
	switch {
	case err != nil:
		return nil, fmt.Errorf("web certificate: %w", err)
	case cert == nil || len(cert.Certificate) == 0:
		return nil, errors.New("the function of WebCertificate returned none")
	}
	leaf := cert.Leaf
	if leaf == nil {
		if leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return nil, fmt.Errorf("web certificate: %w", err)
		}
	}
	if e.now().After(leaf.NotAfter) {
		return nil, fmt.Errorf("the web certificate for %.300q expired at %s and was not renewed",
			leaf.DNSNames, leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return cert, nil
}

// proof is the identity or name that the other side has proved in a handshake.
type proof struct {
	chain    []*x509.Certificate // as presented
	peer     *spiffe.Peer        // nil for a client without a certificate, and for a web server
	name     string              // of a web server
	addr     hostport            // of a server, if it is known
	notAfter time.Time           // zero for a client without a certificate
	own      time.Time           // when the certificate that a server has presented expires; zero if that is not known
}

// String names the other side in logs.
func (p proof) String() string {
	if p.peer != nil {
		return p.peer.ID().String()
	}
	return p.name
}

// verify runs before crypto/tls has checked that the peer holds its key, so the proof that it returns is valid only
// once the handshake has succeeded. at is the address of a server.
func (e *Endpoint) verify(cs tls.ConnectionState, role spiffe.Role, at hostport) (proof, error) {
	p, err := e.judge(cs.PeerCertificates, role, cs.ServerName, at)
	if err == nil {
		p.chain = cs.PeerCertificates
		return p, nil
	}
	he := &HandshakeError{Server: role == spiffe.ClientRole, Err: err, refused: true, hint: e.clockHint(err)}
	chain := cs.PeerCertificates
	if role == spiffe.ServerRole && e.config.WebRoots == nil && len(chain) > 0 && len(chain[0].URIs) == 0 {
		he.hint = "a server that proves its host name alone is verified with WebRoots"
	}
	return proof{}, he
}

// judge decides about the chain of a peer. For a server, name is the dialled name, and at the dialled address if it
// is known.
func (e *Endpoint) judge(chain []*x509.Certificate, role spiffe.Role, name string, at hostport) (proof, error) {
	verifier := e.clients
	switch {
	case role == spiffe.ServerRole && e.config.WebRoots != nil:
		return e.judgeByName(chain, name)
	case role == spiffe.ServerRole:
		verifier = e.servers
	case e.config.AllowAnonymousClients && len(chain) == 0:
		return proof{}, nil
	}
	peer, err := verifier.VerifyChain(chain, role)
	if err == nil && role == spiffe.ServerRole && e.hosts != nil {
		err = e.hosts.allow(at, peer.ID())
	}
	if err != nil {
		return proof{}, err
	}
	return proof{peer: peer, notAfter: peer.NotAfter(), addr: at}, nil
}

// errNoWebRoots says that the function of WebRoots failed.
var errNoWebRoots = errors.New("there are no roots to verify a web server with")

// judgeByName verifies the chain of a server by its name. Like crypto/tls, it returns a
// [*tls.CertificateVerificationError].
func (e *Endpoint) judgeByName(chain []*x509.Certificate, name string) (proof, error) {
	refuse := func(err error) (proof, error) {
		return proof{}, &tls.CertificateVerificationError{UnverifiedCertificates: chain, Err: err}
	}
	if name == "" {
		return refuse(errors.New(
			"the server's host name is not known: set ServerName, or use Transport for an IP address"))
	}
	if err := certchain.CheckSize(chain); err != nil {
		return refuse(err)
	}
	pool, err := e.config.WebRoots()
	switch {
	case err != nil:
		return refuse(fmt.Errorf("%w: %w", errNoWebRoots, err))
	case pool == nil: // nil would mean the roots of the host
		return refuse(fmt.Errorf("%w: the function of WebRoots returned none", errNoWebRoots))
	}
	if err := chain[0].VerifyHostname(name); err != nil {
		return refuse(err)
	}
	path, err := certchain.Path(chain, pool, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, e.now(),
		e.config.Algorithms.Check)
	if err != nil {
		return refuse(err)
	}
	return proof{name: name, notAfter: certchain.End(path)}, nil
}
