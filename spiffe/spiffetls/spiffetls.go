// Package spiffetls makes TLS configurations in which both sides prove a SPIFFE ID.
//
// A server needs an identity, the trust bundles of its peers, and a policy:
//
//	server := &http.Server{Addr: ":8443", Handler: handler}
//	err := spiffetls.ConfigureServer(server, self, bundles, spiffe.AllowIDs(web), nil)
//	…
//	err = server.ListenAndServeTLS("", "") // no files: the identity comes from self
//
// In the handler, [PeerFromRequest] gives the proof of who is calling. A client needs the same three:
//
//	transport, err := spiffetls.Transport(self, bundles, spiffe.AllowIDs(db), nil)
//	…
//	client := &http.Client{Transport: transport}
//
// Whatever speaks TLS by other means takes a configuration from [ServerConfig] or [ClientConfig];
// grpc-go takes it by credentials.NewTLS. A handler that wants more than a connection that was let in
// goes into [RequirePeer], with a policy of its own.
//
// # What it promises
//
// The identity and the bundles are read from their sources at every handshake, so a renewal or a
// rotation needs no restart and no new configuration: a [spiffe.Snapshot] serves a test, and a
// source that renews itself serves a program. An SVID is presented until the second it expires, and
// never after: then the handshake fails on this side, with an error that says so.
//
// Every connection is checked, resumed ones too, because the check is in tls.Config.VerifyConnection
// (VerifyPeerCertificate, the better-known hook, does not run when a session is resumed). The ID
// decides and nothing else: host names, and the roots of the host, play no part.
//
// Nothing is allowed by default: the policy is an argument, and one that can allow nobody is an
// error. So are missing sources. A policy that changes while the program runs is a
// [spiffe.LivePolicy]. TLS 1.3 is the default and TLS 1.2, with forward-secret AEAD cipher
// suites, the lowest that can be asked for. The key exchange is left to crypto/tls, which prefers
// hybrid post-quantum groups.
//
// # What a refusal looks like
//
// The side that refuses gets a [*HandshakeError] from its handshake, as it is or wrapped by net/http,
// and in it a [*spiffe.VerifyError], so that
//
//	e, ok := errors.AsType[*spiffe.VerifyError](err)
//
// finds who it was and which rule they broke. The HandshakeError adds whether a clock may be wrong. The
// other side learns no reason: it sees the TLS alert bad_certificate, "remote error: tls: bad
// certificate". A side that has no identity to present fails with the error of its source, wrapped too;
// if that is the server, the client sees the alert internal_error.
//
// In TLS 1.3 the client has finished its handshake before the server checks it. A refused client
// therefore sees the alert as the error of its first read or, if it is still writing, a connection
// that was reset.
//
// A [FailureLog] in the options keeps the last failures, with their addresses, and shows them to
// operators.
//
// # Session tickets
//
// A server lets clients resume, which saves sending certificates and signing. A resumed session
// carries the certificates of the session that it continues, and they are verified again, the
// client's even twice, which costs little as the verifier remembers them. When the server opens a ticket whose client certificate no longer verifies, it
// declines the ticket and a full handshake follows: a client that has renewed meanwhile, under a new
// root say, gets in, where a refusal would have it come back with the same ticket for a week. Tickets
// from before a renewal of the server's own SVID are declined too, so that clients see the new one.
// And VerifyConnection has the last word.
//
// A client resumes only if its ClientSessionCache is set, which these configurations leave to the
// caller. Each identity needs a cache of its own: whoever resumes a session is to the server whom the
// session was made with. If the certificate that the server had shown no longer verifies, or is no longer allowed, the
// handshake fails, crypto/tls drops the session, and the next handshake is a full one.
//
// # Open connections
//
// A peer is proven when the handshake is made. What happens later, to its authority, the policy or the
// life of its certificate, ends a connection only if a [Governor] is in the options and runs.
//
// # What it does not do
//
// It does not judge requests by what they ask for: [RequirePeer] knows who asks. It does not resume for
// clients unless they are given a cache, and it does not retry.
package spiffetls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices that have a default. They are copied.
type Options struct {
	// MinVersion is the lowest TLS version: tls.VersionTLS13 or tls.VersionTLS12. 0 means TLS 1.3.
	MinVersion uint16

	// NextProtos are the protocols to negotiate by ALPN, best first. Nil means none in ServerConfig and
	// ClientConfig, and those that net/http serves in ConfigureServer and Transport.
	NextProtos []string

	// Now gives the time to verify at. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time

	// Remember is how many verified chains are remembered, so that who comes again, or resumes, costs
	// no signature. 0 means 1,024 and less than 0 none; see [spiffe.Verifier].
	Remember int

	// Failures keeps the last handshakes that failed, for a page that shows them. Nil keeps none. It may
	// be shared by many configurations.
	Failures *FailureLog

	// Governor ends the connections whose proof no longer holds. It works with ConfigureServer, with
	// Transport, and with ServerConfig for connections that come from [Governor.Listener]; others are
	// refused, as nobody would end them. Nil leaves connections alone until they are closed. It may be
	// shared by many configurations.
	Governor *Governor
}

// ServerConfig returns a new configuration for a TLS server that presents the identity of self,
// asks every client for a certificate, verifies it against peers as that of a client, and accepts
// those that allow allows.
//
// The sources are asked at every handshake and must not block. The options may be nil. The
// configuration is the caller's, to change before it is used. What must stay for the promises of
// this package to hold: GetCertificate with empty Certificates, ClientAuth, VerifyConnection, and
// both WrapSession and UnwrapSession or neither. Clones use the ticket keys of the original: call
// SetSessionTicketKeys on that.
//
// To know the peer of a connection that is not served by net/http, take the ID from the leaf in its
// ConnectionState, with [spiffe.IDFromCertificate], once the handshake has succeeded.
func ServerConfig(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*tls.Config, error) {
	e, err := newEndpoint(self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: server: %w", err)
	}
	c := e.serverConfig()
	if e.opts.Failures == nil && e.opts.Governor == nil {
		return c, nil
	}
	c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		conn, _ := hello.Conn.(*rawConn)
		if e.opts.Governor != nil && (conn == nil || conn.governor != e.opts.Governor) {
			return nil, e.failed(true, remote(hello.Conn), errUngoverned)
		}
		return e.configFor(c, hello, nil, func(peer *spiffe.Peer, cs tls.ConnectionState) {
			if e.opts.Governor != nil {
				conn.governedBy(e.govern(conn, spiffe.ClientRole, peer, cs))
			}
		}), nil
	}
	return c, nil
}

// ClientConfig returns a new configuration for a TLS client that presents the identity of self if
// the server asks for one, verifies the server against peers as a server, and accepts those that
// allow allows. The name that was dialled is sent to the server and otherwise has no meaning.
//
// The sources are asked at every handshake and must not block. The options may be nil. The
// configuration is the caller's, to change before it is used. What must stay for the promises of
// this package to hold: GetClientCertificate with empty Certificates, and VerifyConnection.
func ClientConfig(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*tls.Config, error) {
	e, err := newEndpoint(self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: client: %w", err)
	}
	if e.opts.Governor != nil {
		return nil, errors.New("spiffetls: client: a configuration does not know the connections that it is used for, so a Governor cannot end them; use Transport")
	}
	c := e.clientConfig()
	certificate, verify := c.GetClientCertificate, c.VerifyConnection
	c.GetClientCertificate = func(cri *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		cert, err := certificate(cri)
		return cert, e.failed(false, "", err)
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error { return e.failed(false, cs.ServerName, verify(cs)) }
	return c, nil
}

// endpoint is one side of a connection. It never changes.
type endpoint struct {
	self     spiffe.SVIDSource
	verifier *spiffe.Verifier
	opts     Options
	changers []changer // those of the sources that say when they change
}

// changer is what a source has that says when it changes.
type changer interface{ Changed() <-chan struct{} }

func newEndpoint(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*endpoint, error) {
	e := &endpoint{self: self}
	if opts != nil {
		e.opts = *opts
		e.opts.NextProtos = slices.Clone(opts.NextProtos)
	}
	if self == nil {
		return nil, errors.New("no source of the identity to present")
	}
	switch e.opts.MinVersion {
	case 0:
		e.opts.MinVersion = tls.VersionTLS13
	case tls.VersionTLS12, tls.VersionTLS13:
	default:
		return nil, fmt.Errorf("MinVersion is %s; want TLS 1.3 or TLS 1.2", tls.VersionName(e.opts.MinVersion))
	}
	for _, source := range []any{peers, allow} {
		if c, ok := source.(changer); ok {
			e.changers = append(e.changers, c)
		}
	}
	var err error
	e.verifier, err = spiffe.NewVerifier(peers, allow, &spiffe.VerifierOptions{Now: e.opts.Now, Remember: e.opts.Remember})
	return e, err
}

func (e *endpoint) serverConfig() *tls.Config {
	c := e.config()
	c.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := e.certificate(true)
		if err != nil && hello != nil {
			_ = e.failed(true, remote(hello.Conn), err)
		}
		return cert, err
	}
	// Any certificate will do for crypto/tls, whose own check knows one pool of roots for everybody.
	// VerifyConnection does the checking.
	c.ClientAuth = tls.RequireAnyClientCert
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ClientRole)
		return err
	}
	e.checkTickets(c)
	return c
}

// configFor returns base for one connection, whose proof it gives to verified. If finished is not nil,
// it tells whether a handshake that is over has succeeded.
func (e *endpoint) configFor(base *tls.Config, hello *tls.ClientHelloInfo, finished func() bool, verified func(*spiffe.Peer, tls.ConnectionState)) *tls.Config {
	from := remote(hello.Conn)
	var known atomic.Bool // why it failed, if it did
	var proven atomic.Pointer[spiffe.Peer]
	c := base.Clone()
	c.GetConfigForClient = nil
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := e.certificate(true)
		known.Store(err != nil)
		return cert, e.failed(true, from, err)
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		peer, err := e.verify(cs, spiffe.ClientRole)
		if err != nil {
			known.Store(true)
			return e.failed(true, from, err)
		}
		proven.Store(peer)
		verified(peer, cs)
		return nil
	}
	if e.opts.Failures == nil {
		return c
	}
	context.AfterFunc(hello.Context(), func() { // when the handshake is over
		peer := proven.Load()
		switch {
		case known.Load():
		case peer == nil:
			_ = e.failed(true, from, errNotJudged)
		case finished != nil && !finished():
			e.opts.Failures.add(e.now(), Failure{
				Side: "server", Remote: from, Stage: "tls", ID: peer.ID(), TrustDomain: peer.ID().TrustDomain(), Reason: errUnproven.Error(),
			})
		}
	})
	return c
}

var (
	errUngoverned = errors.New("the connection was not accepted by the Governor's Listener, so nobody would end it")
	errNotJudged  = errors.New("the handshake ended before the client was verified: the two have no TLS in common, or the client refused this server, presented nothing, or went away")
	errUnproven   = errors.New("the handshake failed although the client's certificate was good: the client does not hold its key, or went away")
)

// failed records err, if there is one and somebody wants to know, and returns it.
func (e *endpoint) failed(server bool, remote string, err error) error {
	if err != nil {
		e.opts.Failures.addError(e.now(), server, remote, err)
	}
	return err
}

func remote(c net.Conn) string {
	if c == nil || c.RemoteAddr() == nil {
		return ""
	}
	return c.RemoteAddr().String()
}

func (e *endpoint) clientConfig() *tls.Config {
	c := e.config()
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return e.certificate(false) }
	// This turns off the check of the host name and of the host's roots, which would be the wrong check:
	// an SVID carries an ID, and its trust domain has roots of its own. VerifyConnection, which runs in
	// every handshake all the same, does the right one.
	c.InsecureSkipVerify = true
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ServerRole)
		return err
	}
	return c
}

// config returns what both sides have in common.
func (e *endpoint) config() *tls.Config {
	c := &tls.Config{
		MinVersion: e.opts.MinVersion,
		NextProtos: e.opts.NextProtos,
		Time:       e.opts.Now,
	}
	if c.MinVersion < tls.VersionTLS13 {
		// TLS 1.3 has no others; of TLS 1.2 the forward-secret AEAD suites only (FED-25).
		c.CipherSuites = []uint16{
			tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
			tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
		}
	}
	return c
}

// certificate returns what to present in this handshake. Only expiry withholds it: whatever else a
// peer may dislike is the peer's decision.
func (e *endpoint) certificate(server bool) (*tls.Certificate, error) {
	svid, err := e.self.SVID()
	switch {
	case err != nil:
	case svid == nil:
		err = errors.New("the source gave none")
	case e.now().After(svid.NotAfter()):
		err = fmt.Errorf("the SVID of %q expired at %s; see why it was not renewed", svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	default:
		return svid.TLSCertificate(), nil
	}
	return nil, &HandshakeError{Server: server, Err: err}
}

// verify runs before crypto/tls has seen the peer use its key. The proof that it returns is good once
// the handshake has succeeded.
func (e *endpoint) verify(cs tls.ConnectionState, role spiffe.Role) (*spiffe.Peer, error) {
	peer, err := e.verifier.VerifyChain(cs.PeerCertificates, role)
	if err != nil {
		return nil, e.refused(role, err)
	}
	return peer, nil
}

func (e *endpoint) now() time.Time {
	if e.opts.Now != nil {
		return e.opts.Now()
	}
	return time.Now()
}
