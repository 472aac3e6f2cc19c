// Package spiffetls makes TLS configurations in which both sides prove a SPIFFE ID.
//
// A server needs an identity, the trust bundles of its peers, and a policy:
//
//	server := &http.Server{Addr: ":8443", Handler: handler}
//	err := spiffetls.ConfigureServer(server, self, bundles, spiffe.AllowIDs(web), nil)
//	…
//	err = server.ListenAndServeTLS("", "") // no files: the identity comes from self
//
// In the handler, [PeerFromContext] returns the proven client. A client needs the same three:
//
//	transport, err := spiffetls.Transport(self, bundles, spiffe.AllowIDs(db), nil)
//	…
//	client := &http.Client{Transport: transport}
//
// Other programs that speak TLS take a configuration from [ServerConfig] or [ClientConfig]; grpc-go
// takes it by credentials.NewTLS. [RequirePeer] protects a handler with a policy of its own.
//
// # What it promises
//
// The identity and the bundles are read from their sources at every handshake, so that a renewal or a
// rotation needs no restart and no new configuration. An SVID is presented until the second it expires,
// and never after: then the handshake fails on this side, with an error that says so.
//
// Every connection is checked, resumed ones too, because the check is in tls.Config.VerifyConnection
// (VerifyPeerCertificate does not run when a session is resumed). Only the ID decides: host names and
// the roots of the host are not used.
//
// Nothing is allowed by default: the policy is an argument, and one that can allow no peer is an error,
// as are missing sources. A [spiffe.LivePolicy] can change while the program runs. TLS 1.3 is the default
// and TLS 1.2, with forward-secret AEAD cipher suites, the lowest version. The key exchange is left to
// crypto/tls, which prefers hybrid post-quantum groups.
//
// # What a refusal looks like
//
// The side that refuses gets a [*HandshakeError] from its handshake, as it is or wrapped by net/http,
// and in it a [*spiffe.VerifyError], so that
//
//	e, ok := errors.AsType[*spiffe.VerifyError](err)
//
// finds the ID and the broken rule. The HandshakeError adds whether a clock may be wrong. The other side
// gets no reason, only the TLS alert bad_certificate: "remote error: tls: bad certificate". A side that
// has no identity to present fails with the error of its source, wrapped too; if that is the server, the
// client gets the alert internal_error.
//
// In TLS 1.3 the client has finished its handshake before the server checks it. A refused client
// therefore sees the alert as the error of its first read or, if it is still writing, a connection
// that was reset.
//
// A server that is used by another package, such as grpc-go, would refuse clients without a word: a Logger in
// the options gets one line for each reason and minute, with the peer's ID and address. A [FailureLog] keeps
// the last failures and shows them to operators.
//
// # Session tickets
//
// A server lets clients resume, which saves sending certificates and signing. A resumed session carries
// the certificates of the original session, and they are verified again, which costs little as the
// verifier remembers them. A server declines a ticket whose client certificate no longer verifies, and a
// full handshake follows, so that a client that has renewed meanwhile is accepted; a refusal would make
// it return with the same ticket for a week. A server also declines tickets from before a renewal of its
// own SVID, so that clients see the new one. VerifyConnection checks every session that is resumed.
//
// A client resumes only if its ClientSessionCache is set, which these configurations leave to the
// caller. Each identity needs a cache of its own: the server takes the client of a resumed session for
// the client of the original one. If the server's certificate in a session no longer verifies, or is no
// longer allowed, the handshake fails, crypto/tls drops the session, and the next handshake is a full one.
//
// # Open connections
//
// A peer is proven by the handshake. If its authority is removed, the policy changes or its certificate
// expires later, the connection ends only if a [Governor] is in the options and runs.
//
// # What it does not do
//
// It does not authorize requests by their content: [RequirePeer] checks the client alone. It does not
// retry.
package spiffetls

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/summary"
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

	// Remember is how many verified chains are remembered, so that a repeated peer and a resumed session
	// cost no signature check. 0 means 1,024 and less than 0 none; see [spiffe.Verifier].
	Remember int

	// Logger gets a line (Warn) for the first handshake that fails, and the first request that [RequirePeer]
	// denies, for each of a few reasons, and then a line with the number of those that followed, at most
	// once a minute and reason. The attributes are reason, remote, err, count and interval, and id if the
	// peer has proved it or unverified_id if it has only claimed it. Nil means no logs. A handshake that
	// succeeds writes nothing.
	Logger *slog.Logger

	// Failures keeps the last handshakes that failed. Nil keeps none. It may be shared by many
	// configurations.
	Failures *FailureLog

	// Governor ends the connections whose proof no longer holds. It works with ConfigureServer, with
	// Transport, and with ServerConfig for connections that come from [Governor.Listener]; others are
	// refused, as the Governor could not end them. Nil leaves connections open. It may be shared by many
	// configurations.
	Governor *Governor
}

// ServerConfig returns a new configuration for a TLS server that presents the identity of self,
// requires a certificate of every client, verifies it against peers as that of a client, and accepts
// those that allow allows.
//
// The sources are asked at every handshake and must not block. The options may be nil. The caller may
// change the configuration before it is used, except GetCertificate (with empty Certificates), ClientAuth
// and VerifyConnection; WrapSession and UnwrapSession must both stay or both go. Clones use the ticket
// keys of the original: call SetSessionTicketKeys on that.
//
// For the peer of a connection that is not served by net/http, take the ID from the leaf in its
// ConnectionState, with [spiffe.IDFromCertificate], once the handshake has succeeded.
func ServerConfig(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*tls.Config, error) {
	e, err := newEndpoint(self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: server: %w", err)
	}
	c := e.serverConfig()
	if !e.notes() && e.opts.Governor == nil {
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
// The sources are asked at every handshake and must not block. The options may be nil. The caller may
// change the configuration before it is used, except GetClientCertificate (with empty Certificates) and
// VerifyConnection.
func ClientConfig(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*tls.Config, error) {
	e, err := newEndpoint(self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: client: %w", err)
	}
	if e.opts.Governor != nil {
		return nil, errors.New("spiffetls: client: a Governor cannot end the connections of a configuration; use Transport")
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
	log      *summary.Log // nil for none
	changers []changer    // those of the sources that say when they change
}

// changer is a source that says when it changes.
type changer interface{ Changed() <-chan struct{} }

func newEndpoint(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*endpoint, error) {
	e := &endpoint{self: self, opts: *cmp.Or(opts, &Options{})}
	e.opts.NextProtos = slices.Clone(e.opts.NextProtos)
	if e.opts.Logger != nil {
		e.log = summary.New(e.opts.Logger, 0)
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
	// crypto/tls accepts any certificate, as its own check has one pool of roots for all peers.
	// VerifyConnection checks it.
	c.ClientAuth = tls.RequireAnyClientCert
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ClientRole)
		return e.failed(true, "", err) // configFor knows the address
	}
	e.checkTickets(c)
	return c
}

// configFor returns base for one connection, and passes its proof to verified. If finished is not nil, it
// reports whether a handshake that has ended has succeeded.
func (e *endpoint) configFor(base *tls.Config, hello *tls.ClientHelloInfo, finished func() bool, verified func(*spiffe.Peer, tls.ConnectionState)) *tls.Config {
	from := remote(hello.Conn)
	var known atomic.Bool // the failure was recorded
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
	if !e.notes() {
		return c
	}
	context.AfterFunc(hello.Context(), func() { // when the handshake has ended
		peer := proven.Load()
		switch {
		case known.Load():
		case peer == nil:
			_ = e.failed(true, from, errNotJudged)
		case finished != nil && !finished():
			e.note(Failure{
				Side: "server", Remote: from, Stage: "tls", ID: peer.ID(), TrustDomain: peer.ID().TrustDomain(), Reason: errUnproven.Error(),
			}, errUnproven)
		}
	})
	return c
}

var (
	errUngoverned = errors.New("the connection was not accepted by the Governor's Listener, so the Governor cannot end it")
	errNotJudged  = errors.New("the handshake ended before the client was verified: no common TLS version, or the client refused this server, presented no certificate, or closed the connection")
	errUnproven   = errors.New("the handshake failed although the client's certificate was good: the client does not hold its key, or closed the connection")
)

// failed notes err, if it is not nil, and returns it.
func (e *endpoint) failed(server bool, remote string, err error) error {
	if err != nil && e.notes() {
		e.note(failureOf(server, remote, err), err)
	}
	return err
}

// notes reports whether failures are of interest to the FailureLog or the Logger.
func (e *endpoint) notes() bool { return e.opts.Failures != nil || e.log != nil }

// note records a failure of which err is the cause.
func (e *endpoint) note(f Failure, err error) {
	f.clip()
	e.opts.Failures.add(e.now(), f)
	if e.log != nil {
		e.log.Warn(f.message(), reason(f.Stage, err), f.attrs()...)
	}
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
	// This turns off the check of the host name and of the host's roots, which is the wrong one: an SVID
	// carries an ID, and its trust domain has roots of its own. VerifyConnection runs in every handshake
	// and does the right check.
	c.InsecureSkipVerify = true
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ServerRole)
		return err
	}
	return c
}

// config returns the part that both sides share.
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

// certificate returns the certificate to present in this handshake. Only expiry withholds it; the rest is
// the peer's decision.
func (e *endpoint) certificate(server bool) (*tls.Certificate, error) {
	svid, err := e.self.SVID()
	switch {
	case err != nil:
	case svid == nil:
		err = errors.New("the source returned none")
	case e.now().After(svid.NotAfter()):
		err = fmt.Errorf("the SVID of %q expired at %s and was not renewed", svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	default:
		return svid.TLSCertificate(), nil
	}
	return nil, &HandshakeError{Server: server, Err: err}
}

// verify runs before crypto/tls has checked that the peer holds its key. The proof that it returns is
// valid once the handshake has succeeded.
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
