// Package linkerdproxy is the side of Linkerd's mutual identity that runs beside a workload: the identity of a proxy, its
// TLS with other proxies, and the forwarding of connections.
//
// Most programs read the environment that an injector has set, start the [Identity], and give it to a [Proxy]:
//
//	env, err := linkerdproxy.FromEnviron(os.Environ(), log)
//	…
//	id, err := linkerdproxy.Start(ctx, env.Config)
//	…
//	defer id.Close()
//	proxy, err := linkerdproxy.NewProxy(linkerdproxy.ProxyConfig{Identity: id, Application: "127.0.0.1:8080", Route: route})
//	…
//	go proxy.ServeInbound(ctx, inbound)
//	go proxy.ServeOutbound(ctx, outbound)
//
// A program that forwards nothing and is a member of the mesh itself takes [Identity.ServerConfig] and
// [Identity.ClientConfig]. A proxy that serves before it is certified takes [New], [Identity.Run] and [Identity.Ready] in the
// place of Start.
//
// # What it promises
//
// Bad configuration is refused before there is a key: trust anchors that are not PEM, a name that is not one of the mesh,
// a token file that cannot be read or is empty, a store folder that is missing or cannot be written.
//
// The key is ECDSA P-256, is made once, and stays for the life of the process. It and the one signing request, which names
// the workload and nothing else, are in the store folder with mode 0400; see [Config].Dir.
//
// The token goes to the certifier and nowhere else: to a loopback address, or after the server has proven to be the
// certifier by the trust anchors. It is read again for each request, and is in no error and no log.
//
// A certificate is renewed when 0.7 of its remaining life are over, but not before MinRefresh and not after MaxRefresh. What
// the certifier answers is verified before it replaces anything. A failure changes the time of the next attempt and nothing
// else: a 25th of the remaining life, at least MinRefresh, and MinRefresh while there is no valid certificate. No answer of
// the certifier ends the attempts, as a new token or a new account may succeed.
//
// # TLS
//
// A server terminates TLS 1.3 for its own name, without ALPN, once it has a certificate and until that expires. It asks for a
// client certificate and accepts clients without one; a certificate that does not verify is refused. A client expects the
// identity of the server, which is any one DNS name or URI of its certificate, byte for byte, under the trust anchors. Without
// a certificate of its own a client connects anonymously, as the identity of a proxy does when it asks for its first one. Once
// its certificate has expired it does not connect; see [Config].AnonymousAfterExpiry. New certificates count in new handshakes;
// connections that are open stay.
//
// # What it does not do
//
// It does not call Linkerd's destination and policy services: a route is what [ProxyConfig].Route returns. It does not
// redirect connections, and does not read the original destination of those that the kernel has redirected. It makes no
// tunnels: CONNECT by HTTP/1 is answered with 501. It does not follow the trust anchors, which last as long as the
// process: a new set needs a restart, after which the proxy has a new key. It does not limit what an identity may do: see
// linkerdname.Match for the patterns of policies.
package linkerdproxy

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/files/smallfile"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors to test for with [errors.Is].
var (
	// ErrNotReady says that the proxy has no certificate yet. The error around it has the cause of the last failure.
	ErrNotReady = secretcache.ErrNotReady

	// ErrExpired says that the certificate of the proxy has expired and was not renewed.
	ErrExpired = errors.New("the certificate of the proxy has expired")

	// ErrOtherName says that a client asks for another server name than that of the proxy.
	ErrOtherName = errors.New("the server name is not that of the proxy")
)

// Service is a service of the control plane.
type Service struct {
	// Addr is a host, or host:port. The port of the certifier is 8080 by default.
	Addr string

	// Name is the identity that the service proves in TLS. It must be empty if Addr is "localhost" or a loopback address:
	// then the connection is not encrypted, as the service, or its proxy, is in the same pod. It is required otherwise.
	Name string
}

// Config configures an [Identity]. Name, TokenFile, Certifier, and one of Anchors and AnchorsFile are required; every other
// zero means what is said here. [New] copies it.
type Config struct {
	// Name is the identity of the workload, a name of package linkerdname in either form. It says which mesh the workload
	// belongs to.
	Name string

	// Anchors are the trust anchors, certificates in PEM. AnchorsFile is a file of them in their place, which is read once.
	Anchors     []byte
	AnchorsFile string

	// TokenFile has the token of the service account. A folder stands for the file "token" in it.
	TokenFile string

	// Certifier is the identity service of the mesh.
	Certifier Service

	// Dir is the store, a folder in memory such as an emptyDir of that medium, which must exist. It gets key.der, which is
	// the key in PKCS#8, csr.p8, which is the signing request, both DER, and trust-anchors.pem. Files of an earlier process
	// are replaced. Empty means that the key stays in the memory of the process.
	Dir string

	// CurrentNames gives the files in Dir the names that Linkerd's proxies look for, key.p8 and csr.der, and writes no
	// trust anchors.
	CurrentNames bool

	// KeyFile and CSRFile are the key and the signing request that another process, with the same formats, has made for this
	// one; see [Identity.Environ]. Both are set, or neither, and Dir is empty then.
	KeyFile, CSRFile string

	// MinRefresh and MaxRefresh bound the time until the next request to the certifier. 0 means 10 seconds and 24 hours. A
	// MinRefresh of less than 100 milliseconds is refused: while a proxy has no valid certificate, it asks that often.
	MinRefresh, MaxRefresh time.Duration

	// AnonymousAfterExpiry has clients connect without a certificate once that of the proxy has expired, as the first design
	// of the protocol has it. Such a connection proves the server alone.
	AnonymousAfterExpiry bool

	// Logger gets each new certificate (Info) and each failure (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Identity is the identity of a proxy. [Start] or [New] makes one. Its methods are safe for concurrent use, and those that
// read do not block. It is a [spiffe.BundleSource] with the trust anchors.
type Identity struct {
	cfg     Config
	td      spiffe.TrustDomain
	anchors *spiffe.Bundle
	bundles *spiffe.BundleSet // the anchors alone
	manager *secretcache.Manager
	conns   io.Closer // of the client of the certifier; nil for none
	life    lifecycle.Life

	mu    sync.Mutex
	store *store // nil before the key is there

	metrics   metrics.Set
	refreshed atomic.Int64 // when a certificate was last accepted, in nanoseconds since 1970
}

// Start returns an Identity that is certified, and is renewed until [Identity.Close]. It is [New], [Identity.Run] in a
// goroutine, and [Identity.Ready]. The end of ctx ends a start that is not done yet, and nothing after that. If it fails,
// nothing is left running, and the error says what is wrong, or why there is no certificate.
func Start(ctx context.Context, cfg Config) (*Identity, error) {
	id, err := New(cfg)
	if err != nil {
		return nil, err
	}
	if err := id.life.Start(ctx, id.run, id.Ready); err != nil {
		_ = id.Close()
		return nil, err
	}
	return id, nil
}

// New checks cfg and returns an Identity. It makes no key, reads no file but AnchorsFile, and connects to nothing.
func New(cfg Config) (*Identity, error) {
	id, err := newIdentity(cfg, nil)
	if err != nil {
		return nil, fmt.Errorf("linkerdproxy: new: %w", err)
	}
	return id, nil
}

// newIdentity returns an Identity that is certified by service, or, if that is nil, by the certifier in cfg.
func newIdentity(cfg Config, service caclient.CA) (*Identity, error) {
	cfg.MinRefresh, cfg.MaxRefresh = cmp.Or(cfg.MinRefresh, 10*time.Second), cmp.Or(cfg.MaxRefresh, 24*time.Hour)
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	mesh, err := meshOf(cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("Config.Name: %w", err)
	}
	switch {
	case cfg.TokenFile == "":
		return nil, errors.New("Config.TokenFile is required; it has the token of the service account")
	case cfg.MinRefresh < leastRefresh || cfg.MaxRefresh < cfg.MinRefresh:
		return nil, fmt.Errorf("Config.MinRefresh is %v and MaxRefresh %v: want %v <= MinRefresh <= MaxRefresh", cfg.MinRefresh, cfg.MaxRefresh, leastRefresh)
	case (cfg.KeyFile == "") != (cfg.CSRFile == ""):
		return nil, errors.New("Config.KeyFile and CSRFile belong together: set both, or neither to make a new key")
	case cfg.KeyFile != "" && cfg.Dir != "":
		return nil, errors.New("Config.KeyFile has the key, and Config.Dir is where a new one would go: set one of them")
	}
	td, err := spiffe.ParseTrustDomain(mesh.TrustDomain)
	if err != nil {
		return nil, fmt.Errorf("Config.Name: %w", err)
	}
	cfg.TokenFile = tokenFile(cfg.TokenFile)
	id := &Identity{cfg: cfg, td: td}
	if err := id.readAnchors(); err != nil {
		return nil, err
	}
	at, err := cfg.Certifier.parse("8080")
	if err != nil {
		return nil, fmt.Errorf("Config.Certifier: %w", err)
	}
	certifier, err := mesh.Certifier()
	if err != nil {
		return nil, fmt.Errorf("Config.Name: %w", err)
	}
	endpoint := caclient.Endpoint{URL: "https://" + at.addr, TrustDomain: td, Roots: id.bundles, TokenFile: cfg.TokenFile, Logger: cfg.Logger}
	switch {
	case at.loopback:
		endpoint.URL, endpoint.AllowPlaintext = "http://"+at.addr, true
	case cfg.Certifier.Name != certifier:
		return nil, fmt.Errorf("Config.Certifier.Name is %.300q, want %q, the certifier of the mesh that %q belongs to", cfg.Certifier.Name, certifier, cfg.Name)
	}
	if service == nil {
		client, err := linkerd.New(linkerd.Options{Endpoint: endpoint, Mesh: mesh})
		if err != nil {
			return nil, err
		}
		service, id.conns = client, client
	}
	want := pki.ExpectDNSName(td, cfg.Name)
	ca, err := caclient.New(service, &caclient.Options{Timeout: callTimeout, Expect: want})
	if err != nil {
		return nil, err
	}
	id.newMetrics()
	refreshes := id.metrics.Counters("control_identity_cert_refreshes_total", "The number of answers of the certifier, by result: ok, or error for a certificate that was not acceptable.", "result", "ok", "error")
	id.manager, err = secretcache.New(secretcache.Config{
		Expect: want, CA: &certifierCA{CA: ca, id: id, rejected: refreshes["error"].Inc}, NewKey: id.signer, RenewIn: id.refreshIn, Timeout: callTimeout, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	id.manager.Subscribe(func(name string) {
		if name == "default" {
			id.refreshed.Store(time.Now().UnixNano())
			refreshes["ok"].Inc()
		}
	})
	return id, nil
}

const (
	callTimeout  = 10 * time.Second       // of a request to the certifier
	leastRefresh = 100 * time.Millisecond // that MinRefresh may be
	noMinRefresh = time.Second            // what a bare 0 in the environment means
)

// readAnchors reads the trust anchors.
func (id *Identity) readAnchors() error {
	field, data := "Anchors", id.cfg.Anchors
	switch {
	case id.cfg.AnchorsFile != "" && data != nil:
		return errors.New("Config.Anchors and AnchorsFile are both set: want one of them")
	case id.cfg.AnchorsFile != "":
		field = "AnchorsFile"
		var err error
		if data, err = smallfile.Read(id.cfg.AnchorsFile, maxFile); err != nil {
			return fmt.Errorf("Config.AnchorsFile: %w", err)
		}
	}
	anchors, err := parseAnchors(data)
	if err != nil {
		return fmt.Errorf("the trust anchors, Config.%s: %w", field, err)
	}
	if id.anchors, err = spiffe.NewBundle(id.td, spiffe.BundleContents{X509Authorities: anchors}); err != nil {
		return fmt.Errorf("the trust anchors, Config.%s: %w", field, err)
	}
	id.cfg.Anchors = data
	id.bundles, err = spiffe.NewBundleSet(id.anchors)
	return err
}

// parseAnchors parses trust anchors in PEM.
func parseAnchors(data []byte) ([]*x509.Certificate, error) {
	all, err := pki.ParseCertificatesPEM(data)
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if !c.IsCA {
			return nil, fmt.Errorf("%.300q is not the certificate of a CA", c.Subject)
		}
	}
	return all, nil
}

// meshOf returns the mesh that a name of a workload belongs to: the five labels on the left are those of the form, and what
// is left is the trust domain.
func meshOf(name string) (linkerdname.Mesh, error) {
	labels := strings.SplitN(name, ".", 6)
	if len(labels) < 6 {
		return linkerdname.Mesh{}, fmt.Errorf("%.300q is not SERVICEACCOUNT.NAMESPACE.serviceaccount.identity.CONTROLNAMESPACE.TRUSTDOMAIN: %w", name, linkerdname.ErrName)
	}
	mesh := linkerdname.Mesh{ControlNamespace: labels[4], TrustDomain: labels[5], Seed: labels[2] == "sa"}
	_, _, err := mesh.Parse(name)
	return mesh, err
}

// place is where a service is.
type place struct {
	addr     string // host:port
	loopback bool
}

// parse checks a service, whose port is by default as given.
func (s Service) parse(port string) (place, error) {
	host := s.Addr
	if h, p, err := net.SplitHostPort(s.Addr); err == nil {
		host, port = h, p
	}
	host = strings.Trim(host, "[]")
	ip, err := netip.ParseAddr(host)
	isName := host != "" && strings.Trim(strings.ToLower(host), "abcdefghijklmnopqrstuvwxyz0123456789-._") == ""
	if n, bad := strconv.ParseUint(port, 10, 16); bad != nil || n == 0 || (err != nil || ip.Zone() != "") && !isName {
		return place{}, fmt.Errorf("the address %.300q is not a host or host:port", s.Addr)
	}
	local := strings.EqualFold(strings.TrimSuffix(host, "."), "localhost")
	if local {
		host = "localhost" // the name server would be asked for "localhost.", and could lead the token elsewhere
	}
	at := place{addr: net.JoinHostPort(host, port), loopback: local || err == nil && ip.Unmap().IsLoopback()}
	switch {
	case at.loopback && s.Name != "":
		return place{}, fmt.Errorf("the name %.300q is set, and the address %q is on this host, where no name is proven: leave the name empty", s.Name, s.Addr)
	case !at.loopback && s.Name == "":
		return place{}, fmt.Errorf("the address %q is not on this host: set the name that the service proves", s.Addr)
	}
	return at, nil
}

// refreshIn says when the certifier is asked again.
func (id *Identity) refreshIn(left time.Duration, failures int) time.Duration {
	wait := left / 10 * 7
	if failures > 0 {
		wait = left / 25
	}
	return min(max(wait, id.cfg.MinRefresh), id.cfg.MaxRefresh)
}

// certifierCA asks the certifier with the one signing request.
type certifierCA struct {
	caclient.CA
	id       *Identity
	rejected func()
}

// Sign implements [secretcache.CA]. The request of the caller has the same key and the same name.
func (c *certifierCA) Sign(ctx context.Context, _ *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	c.id.mu.Lock()
	csr := c.id.store.csr
	c.id.mu.Unlock()
	chain, err := c.CA.Sign(ctx, csr, lifetime)
	if errors.Is(err, caclient.ErrBadAnswer) {
		c.rejected()
	}
	return chain, err
}

// signer returns the one key.
func (id *Identity) signer() (crypto.Signer, error) {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.store.key(), nil
}

// Run checks the token file and the store, makes the key and the signing request, obtains a certificate and renews it. It
// blocks until ctx is done or [Identity.Close] is called, and returns nil then. It returns an error if the files are not as
// they must be. It may be called again after it has returned; the key stays.
func (id *Identity) Run(ctx context.Context) error {
	if err := id.life.Run(ctx, id.run); err != nil {
		return fmt.Errorf("linkerdproxy: run: %w", err)
	}
	return nil
}

func (id *Identity) run(ctx context.Context) error {
	if err := id.prepare(); err != nil {
		return err
	}
	if id.conns != nil {
		defer id.conns.Close()
	}
	return id.manager.Run(ctx)
}

// prepare has the key made or read, once.
func (id *Identity) prepare() error {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.store != nil {
		return nil
	}
	if err := checkToken(id.cfg.TokenFile); err != nil {
		return err
	}
	s, err := openStore(&id.cfg)
	if err != nil {
		return err
	}
	id.store = s
	return nil
}

// Ready waits until there is a certificate that has not expired. The error wraps [ErrNotReady], the cause of ctx, and what
// the last attempt failed with.
func (id *Identity) Ready(ctx context.Context) error {
	err := id.life.Await(ctx, id.manager.Changed, func() bool { return id.state() == nil })
	if err == nil {
		return nil
	}
	if last := id.Status().Err; last != nil {
		err = fmt.Errorf("%w; the last attempt failed: %w", err, last)
	}
	return fmt.Errorf("linkerdproxy: %q: %w: %w", id.cfg.Name, ErrNotReady, err)
}

// Close ends [Identity.Run], or what [Start] has started, for good, and waits for it. The certificate stays readable. The
// error is always nil.
func (id *Identity) Close() error {
	err := id.life.Close()
	_ = id.manager.Close()
	return err
}

// Credential returns the certificate with its key, which may have expired. Before the first the error wraps [ErrNotReady].
func (id *Identity) Credential() (*pki.Credential, error) { return id.manager.Credential() }

// Bundle implements [spiffe.BundleSource] with the trust anchors, for the trust domain of the mesh.
func (id *Identity) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return id.bundles.Bundle(td)
}

// Changed returns a channel that is closed when there is a new certificate.
func (id *Identity) Changed() <-chan struct{} { return id.manager.Changed() }

// Status returns the state of the identity, for health checks and diagnosis.
func (id *Identity) Status() secretcache.Status { return id.manager.Status()[0] }

// Name returns the identity of the workload.
func (id *Identity) Name() string { return id.cfg.Name }

// String names the workload. An Identity does not print its key.
func (id *Identity) String() string { return "linkerdproxy.Identity(" + id.cfg.Name + ")" }

// GoString is String: the verb %#v must not walk to the key.
func (id *Identity) GoString() string { return id.String() }

// LogValue is String as a log value.
func (id *Identity) LogValue() slog.Value { return slog.StringValue(id.String()) }

// valid returns the certificate if it has not expired. The error wraps [ErrNotReady] or [ErrExpired].
func (id *Identity) valid() (*pki.Credential, error) {
	c, err := id.manager.Credential()
	if err != nil {
		return nil, err
	}
	if end := certchain.End(c.Chain()); !time.Now().Before(end) {
		return nil, fmt.Errorf("linkerdproxy: %q: %w at %s", id.cfg.Name, ErrExpired, end.UTC().Format(time.RFC3339))
	}
	return c, nil
}

// state returns why there is no valid certificate.
func (id *Identity) state() error {
	_, err := id.valid()
	return err
}

func (id *Identity) newMetrics() {
	id.metrics.Gauge("control_identity_cert_expiration_timestamp_seconds", "When the certificate of the proxy expires, in seconds since 1970.", func() (float64, bool) {
		end := id.Status().NotAfter
		return metrics.Seconds(end), !end.IsZero()
	})
	id.metrics.Gauge("control_identity_cert_refresh_timestamp_seconds", "When the certificate of the proxy was last renewed, in seconds since 1970.", func() (float64, bool) {
		at := id.refreshed.Load()
		return metrics.Seconds(time.Unix(0, at)), at != 0
	})
}

// WriteMetrics writes metrics in the text format of Prometheus, by the names that Linkerd's proxies have for them:
//
//	control_identity_cert_expiration_timestamp_seconds   when the certificate expires
//	control_identity_cert_refresh_timestamp_seconds      when it was last renewed
//	control_identity_cert_refreshes_total                by result: ok, or error for a certificate that was not acceptable
func (id *Identity) WriteMetrics(w io.Writer) error { return id.metrics.Write(w) }
