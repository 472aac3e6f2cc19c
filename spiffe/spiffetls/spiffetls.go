// Package spiffetls makes TLS connections in which both sides prove a SPIFFE ID.
//
// An [Endpoint] has the program's own identity, the trust bundles of its peers, and the policy that says which peers
// are allowed:
//
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: source, Peers: source, Allow: spiffe.AllowIDs(web)})
//
// It serves HTTP and sends requests:
//
//	server := &http.Server{Addr: ":8443", Handler: handler}
//	err = endpoint.ConfigureServer(server)
//	…
//	err = server.ListenAndServeTLS("", "") // no files: the identity comes from the source
//
//	transport, err := endpoint.Transport()
//	…
//	client := &http.Client{Transport: transport}
//
// In a handler, [PeerFromContext] returns the proven client; [RequirePeer] protects a handler with a policy of its
// own. A client of several services sets Hosts in its [Config], so that no service can answer for another. For other
// protocols there are [Endpoint.Listener] and [Endpoint.DialContext], and for packages that start TLS themselves,
// such as database drivers, [Endpoint.ServerConfig] and [Endpoint.ClientConfig].
//
// # What it promises
//
// Every handshake reads the identity and the bundles from their sources, so a renewal or a rotation needs neither a
// restart nor a new configuration. An expired SVID is never presented: the handshake fails on this side, with an
// error that says so.
//
// Every connection is verified, resumed ones too, in tls.Config.VerifyConnection (VerifyPeerCertificate does not run
// for resumed sessions). Only the ID decides; host names and the roots of the host do not count, except with
// WebRoots.
//
// Nothing is allowed by default: a policy is required, and one that can allow no peer is an error. A
// [spiffe.LivePolicy] can change while the program runs. The lowest TLS version is 1.3, or on request 1.2 with
// forward-secret AEAD cipher suites; crypto/tls prefers hybrid post-quantum key exchange.
//
// # Refusals
//
// The side that refuses gets a [*HandshakeError], which net/http may wrap. In it is a [*spiffe.VerifyError] with the
// ID and the broken rule. The other side gets a TLS alert and no reason: "remote error: tls: bad certificate", or
// internal_error from a server without an identity to present. In TLS 1.3 a client finishes its handshake before the
// server verifies it, so a refused client sees the alert at its first read, or from [Endpoint.Transport] and
// [Endpoint.DialContext] at the first write that fails.
//
// A server inside another package, such as grpc-go, would refuse clients silently. A Logger in the [Config] gets one
// line for each reason and minute. [Metrics] count the failures, and their Report has the last ones.
//
// # Session tickets
//
// A server lets clients resume sessions, except with WebCertificate. It verifies the certificates of a session again,
// which is cheap, as verified chains are remembered. It declines a ticket whose client certificate no longer
// verifies, and tickets from before a renewal of its own SVID; a full handshake follows.
//
// A client resumes only if the caller sets ClientSessionCache. Each identity needs a cache of its own, because the
// server sees the original session's client in a resumed one. If the server of a session no longer verifies or is no
// longer allowed, that handshake fails, and the next one is a full handshake.
//
// # One-sided proof
//
// Four fields of [Config] let one side prove no ID; the other side is verified as always. OptionalIdentity is for a
// client without an identity, AllowAnonymousClients for its server, WebCertificate for a server that proves its host
// name, and WebRoots for the client of such a server.
//
// A client without a certificate never counts as proven: [PeerFromContext] reports false, and [RequirePeer]
// denies. A certificate that does not verify is refused, and does not make its client anonymous. Combinations in
// which no side proves an ID, or that have no effect, are errors.
//
// # Open connections
//
// The handshake proves a peer. If an authority is removed, the policy changes or a certificate expires later, an
// open connection ends only if the Config names a [Governor] and the Governor runs.
package spiffetls

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
)

// Config has the parts and options of an [Endpoint]. Self, Peers and Allow are required unless one of the other
// fields says otherwise. Every handshake calls the sources, which must not block.
type Config struct {
	// Self is the identity to present.
	Self spiffe.SVIDSource

	// Peers has the trust bundles that peers are verified with. It is often the same source as Self.
	Peers spiffe.BundleSource

	// Allow decides which proven peers are allowed.
	Allow spiffe.PolicySource

	// Hosts says for a client which servers may answer at which address, in place of Allow. With one policy for all
	// addresses, every server that it allows could answer for every other:
	//
	//	Hosts: map[string]spiffe.PolicySource{
	//		"billing.example:8443": spiffe.AllowIDs(billing),
	//		"db.example":           spiffe.AllowIDs(db), // any port
	//	}
	//
	// A key is a dialled host and port, such as "[::1]:8443", or a host alone, for the ports without a key of their
	// own. Names are in lower case and in ASCII; a dialled name in upper case is the same name, and one with a dot
	// at the end is another. There are no wildcards. An address without a policy is refused before it is dialled,
	// with an error that wraps [spiffe.ErrDenied].
	//
	// A connection is used only for the host and port for which it was made. The map is copied; the policies in it
	// may be live.
	Hosts map[string]spiffe.PolicySource

	// OptionalIdentity lets a client connect without a certificate while Self has none or it has expired, or if Self
	// is nil. It is for a client that can also prove itself by other means, such as a token with which it gets or
	// renews its identity. The server needs AllowAnonymousClients. A client with a Self then resumes no sessions,
	// because the server sees the original session's client in a resumed one. An open connection stays as it was
	// made, too: close idle connections once there is an identity.
	OptionalIdentity bool

	// AllowAnonymousClients makes a server ask for a client certificate without requiring one. For a client without
	// one [PeerFromContext] reports false and [RequirePeer] denies; every other handler must check itself. A
	// certificate that is presented must verify and be allowed, or the handshake fails.
	AllowAnonymousClients bool

	// WebCertificate makes a server present a certificate for its host name, such as one of a web PKI, in place of
	// Self, which must be nil. It proves no ID: clients must verify it by its name. The function is called for every
	// handshake, like GetCertificate of a tls.Config, and must not block; the functions of ACME clients and
	// certificate watchers fit. The certificate is shared and not changed. If the function fails or its certificate
	// has expired, the handshake fails on this side.
	WebCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)

	// WebRoots makes a client that presents Self verify servers by the dialled host name, with roots for host names,
	// in place of Peers, Allow and Hosts, which must be nil. The function is called at every handshake, resumed ones
	// too, and must not block; [x509.SystemCertPool] returns the roots of the host. The certificate must be for
	// server authentication. A refusal is a [*tls.CertificateVerificationError]. A ServerName in a configuration
	// replaces the dialled name. crypto/tls does not pass on a dialled IP address, so with [Endpoint.ClientConfig] a
	// server that is dialled by its IP address is refused.
	WebRoots func() (*x509.CertPool, error)

	// Algorithms are the kinds of keys that the other side's certificates may have, up to the authority. The zero value
	// is the default, without ML-DSA. If Self has an alternative with a key of ML-DSA ([spiffe.SVID.WithAlternative]), it
	// is presented if Algorithms has that kind and the other side offers to verify it in TLS 1.3. crypto/tls offers that
	// in every program built with Go 1.27 or later, so the other side must allow it: see examples/QUANTUM.md.
	Algorithms spiffe.Algorithms

	// RequireMLKEM refuses key exchanges other than X25519MLKEM768, so that a recorded connection stays secret when
	// quantum computers can break the others. It needs TLS 1.3.
	RequireMLKEM bool

	// MinVersion is the lowest TLS version: tls.VersionTLS13 or tls.VersionTLS12. 0 means TLS 1.3.
	MinVersion uint16

	// NextProtos are the protocols to negotiate by ALPN, best first. Nil means net/http's in ConfigureServer and
	// Transport, and none elsewhere.
	NextProtos []string

	// HandshakeTimeout is how long a handshake may take in Listener, DialContext and Client, and in Transport unless
	// the caller changes its TLSHandshakeTimeout. 0 means 10 seconds.
	HandshakeTimeout time.Duration

	// MaxHandshakes is how many connections of a Listener may be unfinished, or finished and not yet accepted. 0 means
	// 1,024.
	MaxHandshakes int

	// Now gives the time to verify at. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time

	// Logger gets a line (Warn) for failed handshakes, requests that [RequirePeer] denies, and clients that withhold
	// an OptionalIdentity. The first for each of a few reasons, and for each ID that the policy denies, is logged at
	// once; then at most one a minute with the number of the others. Beyond 12 IDs a reason has one line for all.
	// The attributes are reason, remote, err, count and interval, and id if the peer has proved it or unverified_id
	// if it has only claimed it. It also gets the connections that the Governor drains (Info), with the attributes
	// peer and side, or cannot judge. Nil means no logs.
	Logger *slog.Logger

	// Metrics counts handshakes and denied requests; nil counts none. Several endpoints may share it.
	Metrics *Metrics

	// Governor ends connections whose proof no longer holds; nil leaves them open. Several endpoints may share it.
	// ServerConfig and ClientConfig refuse it, as it could not end their connections.
	Governor *Governor
}

// Endpoint makes the TLS connections of a program, as a server and as a client. [New] makes one. It never changes and
// is safe for concurrent use.
type Endpoint struct {
	config  Config
	clients *spiffe.Verifier // nil without an Allow
	servers *spiffe.Verifier // before their policy in hosts, if there are hosts
	anyone  *spiffe.Verifier // without a policy; nil without Peers
	hosts   hosts            // nil without
	log     *ratelog.Log
	quantum bool  // Algorithms has one of ML-DSA
	sources []any // of bundles and policies; some announce changes

	// Listener and Server use server, which is nil if e cannot be a server. It is a function, as a configuration may
	// hold a key and fmt prints fields.
	server func() *tls.Config

	noServer, noClient error // why e cannot be one
}

// New returns an Endpoint that can be a server, a client, or both. It copies the Config. If the Config lacks
// something that a server or a client needs, the methods for that side return an error, or New if neither side can
// work.
func New(c Config) (*Endpoint, error) {
	e := &Endpoint{config: c, log: ratelog.New(c.Logger, 0)}
	e.config.NextProtos = slices.Clone(c.NextProtos)
	e.config.HandshakeTimeout = cmp.Or(c.HandshakeTimeout, handshakeTime)
	e.config.MinVersion = cmp.Or(c.MinVersion, tls.VersionTLS13)
	e.noServer, e.noClient = c.noServer(), c.noClient()
	err := c.check()
	switch {
	case err != nil:
	case e.noServer == nil || e.noClient == nil:
		err = e.prepare()
	case c.AllowAnonymousClients || c.WebCertificate != nil:
		err = e.noServer
	default:
		err = e.noClient
	}
	if err != nil {
		return nil, fmt.Errorf("spiffetls: %w", err)
	}
	return e, nil
}

// check returns an error for a fault that matters to both sides.
func (c *Config) check() error {
	svid, is := c.Self.(*spiffe.SVID)
	switch {
	case is && (svid == nil || svid.ID().IsZero()): // it would panic when a peer comes
		return errors.New("the identity is a nil *spiffe.SVID or a zero SVID: NewSVID and ParseSVID make one")
	case c.WebCertificate != nil && c.Self != nil:
		return errors.New("a server presents WebCertificate or Self, and not both")
	case c.WebRoots != nil && (c.Peers != nil || c.Allow != nil || c.Hosts != nil):
		return errors.New("with WebRoots the host name decides about the server: Peers, Allow and Hosts must be nil")
	case c.HandshakeTimeout < 0 || c.MaxHandshakes < 0:
		return errors.New("HandshakeTimeout or MaxHandshakes is negative; 0 means the default")
	case c.RequireMLKEM && c.MinVersion == tls.VersionTLS12:
		return errors.New("RequireMLKEM needs TLS 1.3: MinVersion must be 0 or tls.VersionTLS13")
	case c.MinVersion != 0 && c.MinVersion != tls.VersionTLS12 && c.MinVersion != tls.VersionTLS13:
		return fmt.Errorf("MinVersion is %s; want TLS 1.3 or TLS 1.2", tls.VersionName(c.MinVersion))
	}
	return nil
}

// meets returns an error if e can have no peers in a role. A server has clients, and a client has servers.
func (e *Endpoint) meets(peers spiffe.Role) error {
	switch {
	case e.log == nil:
		return errors.New("the Endpoint is a zero value: New makes one")
	case peers == spiffe.ClientRole:
		return e.noServer
	case peers == spiffe.ServerRole:
		return e.noClient
	}
	return errors.New("the role is neither that of a client nor that of a server")
}

// noServer returns an error if there can be no server.
func (c *Config) noServer() error {
	if c.WebRoots != nil {
		return errors.New("clients have no host name to verify: WebRoots is for clients")
	}
	return c.lacks(c.Self != nil || c.WebCertificate != nil, c.Allow != nil)
}

// noClient returns an error if there can be no client.
func (c *Config) noClient() error {
	switch {
	case c.WebCertificate != nil && !c.OptionalIdentity:
		return errors.New("a client has no host name to present: WebCertificate is for servers")
	case c.WebRoots != nil && c.Self == nil:
		return errors.New("with WebRoots and no Self neither side proves a SPIFFE ID: use crypto/tls")
	case c.WebRoots != nil:
		return nil
	}
	return c.lacks(c.Self != nil || c.OptionalIdentity, c.Allow != nil || c.Hosts != nil)
}

// lacks returns an error for a part that is missing. The caller says whether there is an identity and a policy.
func (c *Config) lacks(identity, policy bool) error {
	switch {
	case !identity:
		return errors.New("no Self to present; a client without an identity has OptionalIdentity, " +
			"and a server that proves its host name has WebCertificate")
	case c.Peers == nil:
		return errors.New("no Peers to verify the other side with, such as a Workload API source or " +
			"a *spiffe.Bundle; a client that verifies servers by their host name has WebRoots; " +
			"AllowAnonymousClients does not replace them")
	case !policy:
		return errors.New("no Allow that says which peers are allowed, such as spiffe.AllowIDs; " +
			"Hosts is about servers, and a client may have it instead; AllowAnonymousClients does not replace it")
	}
	return nil
}

// prepare sets the fields of e that derive from the config.
func (e *Endpoint) prepare() (err error) {
	c := &e.config
	if e.hosts, err = newHosts(c.Hosts); err != nil {
		return err
	}
	if c.Allow != nil {
		if e.clients, err = spiffe.NewVerifier(c.Peers, c.Allow, c.Now); err != nil {
			return err
		}
		e.clients = e.clients.WithAlgorithms(c.Algorithms)
	}
	if c.Peers != nil {
		if e.anyone, err = spiffe.NewVerifier(c.Peers, spiffe.AllowAnyPeer(), c.Now); err != nil {
			return err
		}
		e.anyone = e.anyone.WithAlgorithms(c.Algorithms)
	}
	e.servers = e.clients
	if e.hosts != nil {
		e.servers = e.anyone
	}
	e.quantum = strings.Contains(c.Algorithms.String(), "ml-dsa")
	e.sources = []any{c.Peers, c.Allow}
	for _, policy := range e.hosts {
		e.sources = append(e.sources, policy)
	}
	if e.noServer == nil {
		server := e.serverConfig()
		server.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			raw := hello.Conn.(*rawConn)
			return e.configFor(server, hello, raw.tls, raw.verified)
		}
		e.server = func() *tls.Config { return server }
	}
	return nil
}

// ServerConfig returns a new configuration for a TLS server that presents Self, requires a certificate of every
// client, and verifies it in the client role. It is for packages that start TLS themselves and only take a
// [*tls.Config]; [Endpoint.ConfigureServer] does more for net/http, and [Endpoint.Listener] for servers with their
// own connections. [Endpoint.PeerFromState] returns the client of a connection.
//
// Use the configuration for servers only: as a client crypto/tls would look for a host name in the certificate of an
// SVID ("doesn't contain any IP SANs"). The caller may change it before it is used, except GetCertificate (with
// empty Certificates) and ClientAuth, and may wrap VerifyConnection. Keep both WrapSession and
// UnwrapSession, or neither. Clones use the ticket keys of the original: call SetSessionTicketKeys on the original.
func (e *Endpoint) ServerConfig() (*tls.Config, error) {
	if err := e.meets(spiffe.ClientRole); err != nil {
		return nil, fmt.Errorf("spiffetls: server: %w", err)
	}
	if e.config.Governor != nil {
		return nil, errors.New("spiffetls: server: a Governor cannot end the connections of a configuration; " +
			"use ConfigureServer, Listener or Server")
	}
	c := e.serverConfig()
	verify := c.VerifyConnection
	c.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := e.serverCertificate(hello)
		if err != nil {
			return nil, e.failed(true, remote(hello.Conn), err)
		}
		return cert, nil
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error { return e.ended(true, "", cs, verify(cs)) }
	return c, nil
}

// ClientConfig returns a new configuration for a TLS client that presents Self if the server asks for a certificate,
// and verifies the server in the server role. The dialled name is sent to the server and means nothing else, except
// to WebRoots.
//
// It is for packages that start TLS themselves, such as drivers of PostgreSQL and MySQL, or SMTP and LDAP with
// STARTTLS: give it to the driver or to [tls.Client], and call [Endpoint.PeerFromState] for the server. The
// configuration does not know the dialled address, so Hosts is an error: make an Endpoint for that one address, or
// use [Endpoint.Client].
//
// Use the configuration for clients only: it has no certificate for a server to present ("neither Certificates,
// GetCertificate, nor GetConfigForClient set in Config"). The caller may change it before it is used, except
// GetClientCertificate (with empty Certificates) and InsecureSkipVerify, and may wrap VerifyConnection.
func (e *Endpoint) ClientConfig() (*tls.Config, error) {
	err := e.meets(spiffe.ServerRole)
	switch {
	case err != nil:
		return nil, fmt.Errorf("spiffetls: client: %w", err)
	case e.config.Governor != nil:
		return nil, errors.New("spiffetls: client: a Governor cannot end the connections of a configuration; " +
			"use Transport, DialContext or Client")
	case e.hosts != nil:
		return nil, errors.New("spiffetls: client: a configuration does not know the address that is dialled; " +
			"use an Endpoint for one host, or Transport, DialContext or Client")
	}
	c := e.clientConfig()
	c.GetClientCertificate = func(asked *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		cert, err := e.clientCertificate(asked)
		return cert, e.failed(false, "", err)
	}
	// This turns off crypto/tls's check of the host name and roots, which does not fit SVIDs: they carry an ID, and
	// their trust domain has roots of its own. VerifyConnection runs in every handshake and does the right check.
	c.InsecureSkipVerify = true
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := e.verify(cs, spiffe.ServerRole, hostport{})
		return e.ended(false, cs.ServerName, cs, err)
	}
	return c, nil
}

// baseConfig returns the part that both sides share.
func (e *Endpoint) baseConfig() *tls.Config {
	c := &tls.Config{
		MinVersion:   e.config.MinVersion,
		CipherSuites: tlsalert.Suites(),
		NextProtos:   slices.Clone(e.config.NextProtos),
		Time:         e.config.Now,
	}
	if e.config.RequireMLKEM {
		c.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768}
	}
	return c
}

// now returns the time. The endpoint is nil in a test without a connection.
func (e *Endpoint) now() time.Time {
	if e != nil && e.config.Now != nil {
		return e.config.Now()
	}
	return time.Now()
}
