// Package spiffetls makes TLS configurations in which both sides prove a SPIFFE ID.
//
// A server needs its own identity, the trust bundles of its clients, and a policy:
//
//	server := &http.Server{Addr: ":8443", Handler: handler}
//	err := spiffetls.ConfigureServer(server, self, bundles, spiffe.AllowIDs(web), nil)
//	…
//	err = server.ListenAndServeTLS("", "") // no files: the identity comes from self
//
// A client needs the same three:
//
//	transport, err := spiffetls.Transport(self, bundles, spiffe.AllowIDs(db), nil)
//	…
//	client := &http.Client{Transport: transport}
//
// In a handler, [PeerFromContext] returns the proven client; [RequirePeer] protects a handler with a policy of its own.
// A client of several services takes [Hosts] as its policy, so that no service can answer for another. For protocols other
// than HTTP there are [NewListener] and [NewDialer], and [ServerConfig] and [ClientConfig] for packages that start TLS
// themselves, such as database drivers.
//
// # What it promises
//
// Every handshake reads the identity and the bundles from their sources, so a renewal or a rotation needs neither a restart
// nor a new configuration. An expired SVID is never presented: the handshake fails on this side, with an error that says so.
//
// Every connection is verified, resumed ones too, in tls.Config.VerifyConnection (VerifyPeerCertificate does not run for
// resumed sessions). Only the ID decides; host names and the roots of the host do not count, except with [WebRoots].
//
// Nothing is allowed by default: the policy is an argument, and a policy that can allow no peer is an error. A
// [spiffe.LivePolicy] can change while the program runs. The lowest TLS version is 1.3, or on request 1.2 with
// forward-secret AEAD cipher suites; crypto/tls prefers hybrid post-quantum key exchange.
//
// # Refusals
//
// The side that refuses gets a [*HandshakeError], which net/http may wrap. In it is a [*spiffe.VerifyError] with the ID and
// the broken rule. The other side gets a TLS alert and no reason: "remote error: tls: bad certificate", or internal_error
// from a server without an identity to present. In TLS 1.3 a client finishes its handshake before the server verifies it, so a
// refused client sees the alert at its first read, or from a [Transport] or a [Dialer] at the first write that fails.
//
// A server inside another package, such as grpc-go, would refuse clients silently. A Logger in the [Options] gets one line
// for each reason and minute, a [FailureLog] shows the last failures to operators, and [Metrics] count them.
//
// # Session tickets
//
// A server lets clients resume sessions. It verifies the certificates of a session again, which is cheap, as verified
// chains are remembered. It declines a ticket whose client certificate no longer verifies, and tickets from before a
// renewal of its own SVID; a full handshake follows.
//
// A client resumes only if the caller sets ClientSessionCache. Each identity needs a cache of its own, because a resumed
// session has the client of the original one. If the server of a session no longer verifies or is no longer allowed, that
// handshake fails, and the next one is a full handshake.
//
// # One-sided proof
//
// Each of these says what is given up; the other side is verified as ever:
//
//	NoIdentity()                    the self of a client without an identity, which has a token perhaps, to get its first one
//	OptionalIdentity(self)          the self of a client that connects without its identity if that is missing or has expired
//	Options.AllowAnonymousClients   a server that also serves clients without a certificate
//	WebCertificate(get)             the self of a server with a certificate for its host name, which proves no ID
//	WebRoots(roots)                 the bundles of a client that takes the server's host name as proof
//
// A client without a certificate is never taken for a proven one: [PeerFromContext] reports false, and [RequirePeer]
// denies. A certificate that does not verify is refused, and does not make its client anonymous. Combinations in which no
// side proves an ID, or that have no effect, are errors.
//
// # Open connections
//
// The handshake proves a peer. If an authority is removed, the policy changes or a certificate expires later, an open
// connection ends only if the options have a [Governor], and it runs.
package spiffetls

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/ratelog"
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

	// Remember is how many verified chains are kept, so that repeated peers and resumed sessions cost no signature
	// check. 0 means 1,024 and less than 0 none; see [spiffe.Verifier].
	Remember int

	// Logger gets a line (Warn) for failed handshakes, requests that [RequirePeer] denies, and clients that withhold an
	// [OptionalIdentity]: for the first of each of a few reasons and, of peers that the policy denies, of each ID, and then at most once a minute with the number
	// of those that followed. Beyond 12 IDs a reason has one line for all. The attributes are reason, remote, err, count and interval, and id if the peer has proved it
	// or unverified_id if it has only claimed it. Nil means no logs.
	Logger *slog.Logger

	// Failures keeps the last failed handshakes; nil keeps none. Many configurations may share it.
	Failures *FailureLog

	// Metrics counts handshakes and denied requests; nil counts none. Many configurations may share it.
	Metrics *Metrics

	// Governor ends connections whose proof no longer holds; nil leaves them open. It works with ConfigureServer,
	// NewListener, Transport and NewDialer, and with ServerConfig for connections from [Governor.Listener]; a server
	// refuses other connections, as the Governor could not end them. Many configurations may share it.
	Governor *Governor

	// HandshakeTimeout is how long a handshake may take in [NewListener], in a [Dialer], and in [Transport] unless the
	// caller changes its TLSHandshakeTimeout. 0 means 10 seconds.
	HandshakeTimeout time.Duration

	// MaxHandshakes is how many connections of a [NewListener] may be unfinished, or finished and not yet accepted. 0
	// means 1,024.
	MaxHandshakes int

	// AllowAnonymousClients makes a server ask for a client certificate without requiring one. For a client without one
	// [PeerFromContext] reports false and [RequirePeer] denies; every other handler must check itself. A certificate
	// that is presented must verify and be allowed, or the handshake fails. Clients refuse this option.
	AllowAnonymousClients bool
}

// ServerConfig returns a new configuration for a TLS server that presents the identity of self, requires a certificate
// of every client, verifies it against peers in the client role, and accepts the clients that allow allows. See
// [WebCertificate] and [Options].AllowAnonymousClients for exceptions.
//
// The sources are asked at every handshake and must not block. The options may be nil. Use the configuration for
// servers only: as a client crypto/tls would look for a host name in the certificate of an SVID ("doesn't contain any
// IP SANs"). The caller may change it before it is used, except GetCertificate (with empty Certificates), ClientAuth,
// VerifyConnection, and GetConfigForClient if there is one; WrapSession and UnwrapSession must both stay or both go.
// Clones use the ticket keys of the original: call SetSessionTicketKeys on that.
//
// [PeerFromState] returns the client of a connection, and [PeerFromRequest] that of a request. [ConfigureServer] does
// more for net/http, and [NewListener] for servers with their own connections.
func ServerConfig(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*tls.Config, error) {
	e, err := newEndpoint(true, self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: server: %w", err)
	}
	c := e.serverConfig()
	e.followHello(c)
	return c, nil
}

// followHello makes c, with the VerifyConnection of serverConfig, store the proven client in each connection of this
// package.
func (e *endpoint) followHello(c *tls.Config) {
	c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		conn, _ := hello.Conn.(*rawConn)
		if e.opts.Governor != nil && (conn == nil || conn.governor != e.opts.Governor) {
			return nil, e.failed(true, remote(hello.Conn), errUngoverned)
		}
		if conn == nil && !e.notes() && e.web == nil {
			return nil, nil
		}
		var finished func() bool
		if conn != nil && conn.tls != nil { // of a listener of this package
			conn.heard = true
			finished = func() bool { return conn.tls.ConnectionState().HandshakeComplete }
		}
		mine := e.configFor(c, hello, finished, func(p proof, cs tls.ConnectionState) {
			if conn == nil {
				return
			}
			conn.peer.Store(p.peer)
			if e.opts.Governor != nil {
				conn.governedBy(e.govern(conn, spiffe.ClientRole, p, cs))
			}
		})
		// net/http adds its protocols to its own copy of the configuration, which c does not see.
		if s, ok := hello.Context().Value(http.ServerContextKey).(*http.Server); ok && s.TLSConfig != nil && e.opts.NextProtos == nil {
			for _, p := range protocols(s) {
				if !slices.Contains(mine.NextProtos, p) {
					mine.NextProtos = append(slices.Clip(mine.NextProtos), p)
				}
			}
		}
		return mine, nil
	}
}

// ClientConfig returns a new configuration for a TLS client that presents the identity of self if the server asks for
// one, verifies the server against peers in the server role, and accepts the servers that allow allows. The dialled
// name is sent to the server and means nothing else, except to [WebRoots]. See [NoIdentity] and [OptionalIdentity] for
// clients without an identity.
//
// The sources are asked at every handshake and must not block. The options may be nil. Use the configuration for
// clients only: it has no certificate for a server to present ("neither Certificates, GetCertificate, nor
// GetConfigForClient set in Config"). The caller may change it before it is used, except GetClientCertificate (with
// empty Certificates), InsecureSkipVerify and VerifyConnection.
//
// It is meant for protocols that start TLS themselves, such as PostgreSQL, MySQL, SMTP and LDAP with STARTTLS: give it
// to the driver or to [tls.Client], and call [PeerFromState] for the server. It does not know the dialled address, so
// it refuses [Hosts]: pass the policy of that one address, or use [Dialer.Handshake].
func ClientConfig(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*tls.Config, error) {
	e, err := newEndpoint(false, self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: client: %w", err)
	}
	if e.opts.Governor != nil {
		return nil, errors.New("spiffetls: client: a Governor cannot end the connections of a configuration; use Transport or NewDialer")
	}
	if e.hosts != nil {
		return nil, errors.New("spiffetls: client: a configuration does not know the address that is dialled; pass the policy of one host, or use Transport or NewDialer")
	}
	c := e.clientConfig()
	certificate, verify := c.GetClientCertificate, c.VerifyConnection
	c.GetClientCertificate = func(cri *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		cert, err := certificate(cri)
		return cert, e.failed(false, "", err)
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		err := verify(cs)
		if questionIn(cs) != nil { // not a handshake
			return err
		}
		if err == nil {
			e.opts.Metrics.good(false, cs.DidResume)
		}
		return e.failed(false, cs.ServerName, err)
	}
	return c, nil
}

// endpoint is one side of a connection. It never changes.
type endpoint struct {
	self       spiffe.SVIDSource
	peers      spiffe.BundleSource // those that the endpoint was given
	optional   bool                // without an identity a client presents no certificate
	web        *webCertificate     // what a server presents in place of self; nil for self
	verifier   *spiffe.Verifier    // nil if roots is not
	roots      *webRoots           // what a client verifies servers with in place of verifier
	hosts      hostsFunc           // the policy of a client if it depends on the address; else nil, and verifier has it
	fixedHosts bool                // hosts is from a Hosts
	opts       Options
	log        *ratelog.Log // nil for none
	changers   []changer    // those of the sources that say when they change
}

// changer is a source that says when it changes.
type changer interface{ Changed() <-chan struct{} }

func newEndpoint(server bool, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*endpoint, error) {
	e := &endpoint{self: self, peers: peers, opts: *cmp.Or(opts, &Options{})}
	e.opts.NextProtos = slices.Clone(e.opts.NextProtos)
	if e.opts.Logger != nil {
		e.log = ratelog.New(e.opts.Logger, 0)
	}
	if err := e.oneSided(server, peers, allow); err != nil {
		return nil, err
	}
	if e.opts.Governor != nil {
		if err := e.opts.Governor.check(); err != nil {
			return nil, err
		}
	}
	if e.opts.HandshakeTimeout < 0 || e.opts.MaxHandshakes < 0 {
		return nil, errors.New("HandshakeTimeout or MaxHandshakes is negative; 0 means the default")
	}
	e.opts.HandshakeTimeout = cmp.Or(e.opts.HandshakeTimeout, handshakeTime)
	switch e.opts.MinVersion {
	case 0:
		e.opts.MinVersion = tls.VersionTLS13
	case tls.VersionTLS12, tls.VersionTLS13:
	default:
		return nil, fmt.Errorf("MinVersion is %s; want TLS 1.3 or TLS 1.2", tls.VersionName(e.opts.MinVersion))
	}
	sources := []any{peers, allow}
	if hosts, ok := allow.(Hosts); ok {
		for _, policy := range hosts {
			sources = append(sources, policy)
		}
	}
	for _, source := range sources {
		if c, ok := source.(changer); ok {
			e.changers = append(e.changers, c)
		}
	}
	if e.roots != nil {
		return e, nil
	}
	var err error
	if e.hosts, err = hostsOf(allow); err != nil {
		return nil, err
	}
	_, e.fixedHosts = allow.(Hosts)
	if e.hosts != nil {
		if server {
			return nil, errors.New("Hosts and HostsFunc are for clients: a server's policy is about its clients, who have no address of their own")
		}
		allow = spiffe.AllowAnyPeer() // in the Verifier, as judge asks the policy of the address next
	}
	e.verifier, err = spiffe.NewVerifier(peers, allow, &spiffe.VerifierOptions{Now: e.opts.Now, Remember: e.opts.Remember})
	return e, err
}

func (e *endpoint) serverConfig() *tls.Config {
	c := e.config()
	c.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := e.certificate(true, hello)
		if err != nil && hello != nil {
			_ = e.failed(true, remote(hello.Conn), err)
		}
		return cert, err
	}
	// crypto/tls accepts any certificate, as its own check has one pool of roots for all peers.
	// VerifyConnection checks it.
	c.ClientAuth = tls.RequireAnyClientCert
	if e.opts.AllowAnonymousClients {
		c.ClientAuth = tls.RequestClientCert
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ClientRole)
		if questionIn(cs) != nil { // not a handshake
			return err
		}
		return e.failed(true, "", err) // configFor knows the address
	}
	e.checkTickets(c, c, func() (*tls.Certificate, error) { return e.certificate(true, nil) })
	return c
}

// forHello returns a copy of base for one connection, and a func that returns the certificate to present. For a web
// server both the certificate and the tickets depend on hello.
func (e *endpoint) forHello(base *tls.Config, hello *tls.ClientHelloInfo) (c *tls.Config, own func() (*tls.Certificate, error)) {
	c = base.Clone()
	c.GetConfigForClient = nil
	own = func() (*tls.Certificate, error) { return e.certificate(true, hello) }
	if e.web == nil {
		return c, own
	}
	once := sync.OnceValues(own)
	e.checkTickets(c, base, once)
	return c, once
}

// configFor returns base for one connection, and passes its proof to verified. If finished is not nil, it reports
// whether the ended handshake has succeeded.
func (e *endpoint) configFor(base *tls.Config, hello *tls.ClientHelloInfo, finished func() bool, verified func(proof, tls.ConnectionState)) *tls.Config {
	from := remote(hello.Conn)
	var end struct {
		known   atomic.Bool // the failure was recorded
		judged  atomic.Bool
		resumed atomic.Bool
		peer    atomic.Pointer[spiffe.Peer]
	}
	c, own := e.forHello(base, hello)
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := own()
		end.known.Store(err != nil)
		return cert, e.failed(true, from, err)
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		var q question
		err := base.VerifyConnection(q.in(cs)) // which the caller may have wrapped
		if err == nil && q.e != e {
			err = errForeignConfig
		}
		p := q.proof
		if err != nil {
			end.known.Store(true)
			return e.failed(true, from, err)
		}
		if e.web != nil {
			if cert, err := own(); err == nil {
				p.own = cert.Leaf.NotAfter
			}
		}
		end.peer.Store(p.peer)
		end.resumed.Store(cs.DidResume)
		end.judged.Store(true)
		verified(p, cs)
		return nil
	}
	if !e.notes() {
		return c
	}
	context.AfterFunc(hello.Context(), func() { // when the handshake has ended
		peer := end.peer.Load()
		switch {
		case end.known.Load():
		case !end.judged.Load() && overdue(hello.Context()):
			_ = e.failed(true, from, errSlow)
		case !end.judged.Load():
			_ = e.failed(true, from, errNotJudged)
		case finished == nil || finished():
			e.opts.Metrics.good(true, end.resumed.Load())
		case peer == nil:
			_ = e.failed(true, from, errAnonymous)
		default:
			id := peer.ID()
			e.opts.Metrics.failed(true, causeUnproven)
			e.note(Failure{
				Side: "server", Remote: from, Stage: "tls", ID: id, TrustDomain: id.TrustDomain(), Reason: errUnproven.Error(),
			}, errUnproven)
		}
	})
	return c
}

// overdue reports whether ctx has a deadline that has passed. ctx.Err does not say so reliably: crypto/tls closes the
// connection at the deadline, and then cancels the context of the hello because the handshake has failed.
func overdue(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ok && !time.Now().Before(end)
}

var (
	errUngoverned = errors.New("the connection was not accepted by the Governor's Listener, so the Governor cannot end it")
	errSlow       = errors.New("the handshake was cut at HandshakeTimeout, before the client was verified")
	errNotJudged  = errors.New("the handshake ended before the client was verified: no common TLS version, or the client refused this server, " +
		"presented no certificate, or closed the connection")
	errUnproven  = errors.New("the handshake failed although the client's certificate was good: the client does not hold its key, or closed the connection")
	errAnonymous = errors.New("the handshake failed although the client needs no certificate and presented none: the client closed the connection")
)

// failed notes err, if it is not nil, and returns it.
func (e *endpoint) failed(server bool, remote string, err error) error {
	if err != nil && e.notes() {
		f := failureOf(server, remote, err)
		e.opts.Metrics.failed(server, causeOf(f.Stage, err))
		e.note(f, err)
	}
	return err
}

// notes reports whether there is a FailureLog, a Logger or Metrics.
func (e *endpoint) notes() bool {
	return e.opts.Failures != nil || e.log != nil || e.opts.Metrics != nil
}

// note records a failure with the cause err.
func (e *endpoint) note(f Failure, err error) {
	f.clip()
	e.opts.Failures.add(e.now(), f)
	if e.log != nil {
		var name string
		if f.Stage == "policy" || f.Stage == "request" { // before that any peer could make up names
			name = f.ID.String()
		}
		e.log.LogOf(slog.LevelWarn, name, f.message(), causes[causeOf(f.Stage, err)].text, f.attrs()...)
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
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return e.certificate(false, nil) }
	// A session may be resumed after this client has obtained, or lost, its identity.
	c.SessionTicketsDisabled = e.optional
	// This turns off the check of the host name and of the host's roots, which does not fit SVIDs: they carry an ID,
	// and their trust domain has roots of its own. VerifyConnection runs in every handshake and does the right check.
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

// certificate returns the certificate to present in this handshake. Only an expired one is withheld; the rest is for
// the peer to decide. Only a web server needs the hello.
func (e *endpoint) certificate(server bool, hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	if e.web != nil {
		if hello == nil {
			return nil, &HandshakeError{Server: server, Err: errors.New("the configuration was changed: GetConfigForClient must stay")}
		}
		cert, err := e.web.certificate(hello, e.now())
		if err != nil {
			return nil, &HandshakeError{Server: server, Err: err}
		}
		return cert, nil
	}
	if e.self == (noIdentity{}) {
		return new(tls.Certificate), nil // crypto/tls sends none
	}
	svid, err := e.self.SVID()
	switch {
	case err != nil:
	case svid == nil:
		err = errors.New("the source returned none")
	case e.now().After(svid.NotAfter()):
		err = fmt.Errorf("the SVID of %q expired at %s and was not renewed", svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
	default:
		if err = e.chainEnded(svid); err == nil {
			return svid.TLSCertificate(), nil
		}
	}
	if e.optional {
		if e.log != nil {
			e.log.Warn("spiffetls: no identity presented", "no identity", slog.Any("err", err))
		}
		return new(tls.Certificate), nil
	}
	return nil, &HandshakeError{Server: server, Err: err}
}

// chainEnded returns why no peer with the own bundle accepts the SVID, if a certificate of its chain has expired. One that no
// path needs may.
func (e *endpoint) chainEnded(svid *spiffe.SVID) error {
	if e.peers == nil || len(svid.TLSCertificate().Certificate) == 1 {
		return nil
	}
	chain, now := svid.Chain(), e.now()
	if !slices.ContainsFunc(chain, func(c *x509.Certificate) bool { return now.After(c.NotAfter) }) {
		return nil
	}
	b, err := e.peers.Bundle(svid.ID().TrustDomain())
	if err != nil || b == nil {
		return nil
	}
	if _, err = certchain.Path(chain, b.CertPool(), certchain.Usages(int(spiffe.AnyRole)), now); err != nil {
		return fmt.Errorf("a certificate in the chain of the SVID of %q has expired and was not renewed: %w", svid.ID(), err)
	}
	return nil
}

// verify runs before crypto/tls has checked that the peer holds its key, so the proof that it returns is valid only
// once the handshake has succeeded.
func (e *endpoint) verify(cs tls.ConnectionState, role spiffe.Role) (proof, error) {
	var at hostport
	q := questionIn(cs)
	if q != nil {
		at, q.e = q.addr, e
	}
	p, err := e.judge(cs.PeerCertificates, role, cs.ServerName, at)
	if err != nil {
		he := e.refused(role, err)
		if role == spiffe.ServerRole && e.roots == nil && len(cs.PeerCertificates) > 0 && len(cs.PeerCertificates[0].URIs) == 0 {
			he.hint = "; a server that proves its host name alone is verified with WebRoots"
		}
		return proof{}, he
	}
	if q != nil {
		q.proof = p
	}
	return p, nil
}

// judge decides about the chain of a peer. For a server, name is the dialled name, and at the dialled address if that
// is known.
func (e *endpoint) judge(chain []*x509.Certificate, role spiffe.Role, name string, at hostport) (proof, error) {
	switch {
	case e.roots != nil:
		return e.roots.verify(chain, name, e.now())
	case e.opts.AllowAnonymousClients && len(chain) == 0: // servers only
		return proof{}, nil
	}
	peer, err := e.verifier.VerifyChain(chain, role)
	if err == nil && e.hosts != nil {
		err = e.allowAt(at, peer.ID())
	}
	if err != nil {
		return proof{}, err
	}
	return proof{peer: peer, notAfter: peer.NotAfter(), addr: at}, nil
}

// now returns the time. The endpoint is nil in a test without a connection.
func (e *endpoint) now() time.Time {
	if e != nil && e.opts.Now != nil {
		return e.opts.Now()
	}
	return time.Now()
}
