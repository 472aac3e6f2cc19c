// Package linkerdproxy implements the identity of a workload in a Linkerd mesh: its key, its certificate and the
// renewal, and the TLS configurations for both directions. It forwards no bytes; the proxy examples/linkerd-proxy
// uses it.
//
// A proxy beside a workload reads the environment set by an injector:
//
//	env, err := linkerdproxy.FromEnviron(os.Environ(), log)
//	…
//	id, err := linkerdproxy.Start(ctx, env.Config)
//	…
//	defer id.Close()
//	server := id.ServerConfig()
//	client, err := id.ClientConfig("voting.emojivoto.serviceaccount.identity.linkerd.cluster.local", "")
//
// A proxy that serves before it is certified uses [New], [Identity.Run] and [Identity.Ready] instead of Start.
//
// # What it promises
//
// It refuses bad configuration before it makes a key: trust anchors that are not PEM, a name outside the mesh, a
// token file that is empty or unreadable, a store directory that is missing or read-only.
//
// The key is ECDSA P-256, is made once, and lives as long as the process. The key and the only signing request, which
// names just the workload, are in the store directory with mode 0400; see [Config].Dir.
//
// The token goes only to the certifier: at a loopback address, or after the server has proven by the trust anchors
// that it is the certifier. It is read again for each request, and never appears in an error or a log.
//
// A certificate is renewed after 0.7 of its remaining life, within MinRefresh and MaxRefresh. The certifier's answer
// is verified before it replaces anything. After a failure the next attempt comes after a 25th of the remaining life,
// or after MinRefresh if that is longer or the certificate has expired. Attempts never stop, as a new token or
// account may succeed.
//
// # TLS
//
// A server speaks TLS 1.3 for its own name, without ALPN, while its certificate is valid. It requests a client
// certificate, accepts clients without one, and refuses a certificate that does not verify. A client expects one
// server identity: any DNS name or URI of the certificate, byte for byte, under the trust anchors. Before it has a
// certificate a client connects anonymously, for example to request the first one; after its certificate has expired
// it does not connect; see [Config].AnonymousAfterExpiry. Each handshake uses the newest certificate; open
// connections keep theirs.
//
// # What it does not do
//
// It does not call Linkerd's policy service, and does not decide what an identity may do: see linkerdname.Match for
// the patterns of policies. From the destination service it takes only addresses and identities ([Destinations]), but
// no profiles, weights and protocol hints. It does not follow changes of the trust anchors: a new set needs a
// restart, and so a new key.
package linkerdproxy

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
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
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Errors to test for with [errors.Is].
var (
	// ErrExpired says that the proxy's certificate has expired and was not renewed.
	ErrExpired = errors.New("the certificate of the proxy has expired")
)

// Service is a service of the control plane.
type Service struct {
	// Addr is a host, or host:port. The port of the certifier is 8080 by default.
	Addr string

	// Name is the identity that the service proves in TLS. It must be empty if Addr is "localhost" or a loopback
	// address: the service, or its proxy, is then in the same pod, and the connection is not encrypted. Otherwise it
	// is required.
	Name string
}

// Config configures an [Identity]. Name, TokenFile, Certifier, and either Anchors or AnchorsFile are required; other
// zero values have the meaning below. [New] copies it.
type Config struct {
	// Name is the identity of the workload, a name of package linkerdname in either form. It determines the mesh.
	Name string

	// Anchors are the trust anchors, certificates in PEM. AnchorsFile names a file of them instead, which is read
	// once.
	Anchors     []byte
	AnchorsFile string

	// TokenFile has the token of the service account. A directory stands for the file "token" in it.
	TokenFile string

	// Certifier is the identity service of the mesh.
	Certifier Service

	// Dir is the store, an existing directory in memory, such as an emptyDir of that medium. It gets key.der, the key
	// in PKCS#8, csr.p8, the signing request, both DER, and trust-anchors.pem. They replace an earlier process's
	// files. On Linux a directory that is not in memory causes a warning. If Dir is empty, the key stays in the
	// process's memory.
	Dir string

	// CurrentNames gives the files in Dir the names that Linkerd's proxies read, key.p8 and csr.der, and writes no
	// trust anchors.
	CurrentNames bool

	// KeyFile and CSRFile are the key and the signing request that another process made for this one, in the same
	// formats; see [Identity.Environ]. Set both and leave Dir empty, or set none.
	KeyFile, CSRFile string

	// MinRefresh and MaxRefresh bound the time until the next request to the certifier. 0 means 10 seconds and 24
	// hours. A MinRefresh below 100 milliseconds is refused: a proxy without a valid certificate asks that often.
	MinRefresh, MaxRefresh time.Duration

	// AnonymousAfterExpiry makes clients connect without a certificate once the proxy's has expired, as in the first
	// design of the protocol. Such a connection proves only the server.
	AnonymousAfterExpiry bool

	// Logger gets each new certificate (Info) and each failure (Warn). Nil means no logs.
	Logger *slog.Logger
}

type redacted = redact.Text // so that the embedded field is not exported

// Identity is the identity of a workload. [Start] or [New] makes one. Its methods are safe for concurrent use, and
// those that read do not block. It does not print its key.
type Identity struct {
	redacted
	cfg     Config
	td      spiffe.TrustDomain
	bundles *spiffe.BundleSet // the trust anchors
	manager *secretcache.Manager
	life    lifecycle.Life

	mu    sync.Mutex
	store *store // nil before the key exists

	metrics   metrics.Set
	refreshed atomic.Int64 // time of the last certificate, in nanoseconds since 1970
}

// Start returns an Identity that is certified, and is renewed until [Identity.Close]. It is [New], [Identity.Run] in
// a goroutine, and [Identity.Ready]. Once Start has returned, ctx has no effect. If Start fails, nothing is left
// running, and the error says what is wrong, or why there is no certificate.
func Start(ctx context.Context, cfg Config) (*Identity, error) {
	id, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, id, &id.life, id.run)
}

// New checks cfg and returns an Identity. It makes no key, reads only AnchorsFile, and connects to nothing.
func New(cfg Config) (*Identity, error) {
	id, err := newIdentity(cfg, nil)
	if err != nil {
		return nil, fmt.Errorf("linkerdproxy: new: %w", err)
	}
	return id, nil
}

// newIdentity returns an Identity that service certifies, or, if that is nil, the certifier in cfg.
func newIdentity(cfg Config, service caclient.CA) (*Identity, error) {
	cfg.MinRefresh, cfg.MaxRefresh = cmp.Or(cfg.MinRefresh, 10*time.Second), cmp.Or(cfg.MaxRefresh, 24*time.Hour)
	cfg.Logger = ratelog.Patient(cfg.Logger)
	mesh, err := meshOf(cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("Config.Name: %w", err)
	}
	switch {
	case cfg.TokenFile == "":
		return nil, errors.New("Config.TokenFile is required; it has the token of the service account")
	case cfg.MinRefresh < leastRefresh || cfg.MaxRefresh < cfg.MinRefresh:
		return nil, fmt.Errorf("Config.MinRefresh is %v and MaxRefresh %v: want %v <= MinRefresh <= MaxRefresh",
			cfg.MinRefresh, cfg.MaxRefresh, leastRefresh)
	case (cfg.KeyFile == "") != (cfg.CSRFile == ""):
		return nil, errors.New("Config.KeyFile and CSRFile belong together: set both, or neither to make a new key")
	case cfg.KeyFile != "" && cfg.Dir != "":
		return nil, errors.New("Config.KeyFile has the key, and Config.Dir is where a new one would go: set one of " +
			"them")
	}
	td, err := spiffe.ParseTrustDomain(mesh.TrustDomain)
	if err != nil {
		return nil, fmt.Errorf("Config.Name: %w", err)
	}
	cfg.TokenFile = tokenFile(cfg.TokenFile)
	id := &Identity{redacted: redact.New("linkerdproxy.Identity(" + cfg.Name + ")"), cfg: cfg, td: td}
	if err := id.readAnchors(); err != nil {
		return nil, err
	}
	at, err := cfg.Certifier.parse("8080", true)
	if err != nil {
		return nil, fmt.Errorf("Config.Certifier: %w", err)
	}
	certifier, err := mesh.Certifier()
	if err != nil {
		return nil, fmt.Errorf("Config.Name: %w", err)
	}
	endpoint := caclient.Endpoint{URL: "https://" + at.addr, TrustDomain: td, Roots: id.bundles,
		TokenFile: cfg.TokenFile, Logger: cfg.Logger}
	switch {
	case at.loopback:
		endpoint.URL, endpoint.AllowPlaintext = "http://"+at.addr, true
	case cfg.Certifier.Name != certifier:
		return nil, fmt.Errorf("Config.Certifier.Name is %.300q, want %q, the certifier of the mesh that %q "+
			"belongs to", cfg.Certifier.Name, certifier, cfg.Name)
	}
	if service == nil {
		client, err := linkerd.New(linkerd.Options{Endpoint: endpoint, Mesh: mesh})
		if err != nil {
			return nil, err
		}
		service = client
	}
	want := pki.ExpectDNSName(td, cfg.Name)
	ca, err := caclient.New(service, &caclient.Options{Timeout: callTimeout, Expect: want})
	if err != nil {
		return nil, err
	}
	id.newMetrics()
	refreshes := id.metrics.Counters("control_identity_cert_refreshes_total",
		"The number of answers of the certifier, by result: ok, or error for a certificate that was not acceptable.",
		"result", "ok", "error")
	id.manager, err = secretcache.New(secretcache.Config{
		Expect: want, CA: &certifierCA{CA: ca, id: id,
			rejected: refreshes["error"].Inc}, NewKey: id.signer, RenewIn: id.refreshIn, Timeout: callTimeout,
		Logger: cfg.Logger,
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
	if cfg.Dir != "" && !inMemory(cfg.Dir) {
		cfg.Logger.Warn("linkerdproxy: the store is not in memory, so that the key of the workload reaches a disk; "+
			"mount an emptyDir of the medium Memory there", "dir", cfg.Dir)
	}
	return id, nil
}

const (
	callTimeout  = 10 * time.Second       // of a request to the certifier
	leastRefresh = 100 * time.Millisecond // the smallest MinRefresh
	noMinRefresh = time.Second            // meaning of a bare 0 in the environment
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
		if data, err = files.Read(id.cfg.AnchorsFile, maxFile); err != nil {
			return fmt.Errorf("Config.AnchorsFile: %w", err)
		}
	}
	anchors, err := parseAnchors(data)
	if err != nil {
		return fmt.Errorf("the trust anchors, Config.%s: %w", field, err)
	}
	bundle, err := spiffe.NewBundle(id.td, spiffe.BundleContents{X509Authorities: anchors})
	if err != nil {
		return fmt.Errorf("the trust anchors, Config.%s: %w", field, err)
	}
	id.cfg.Anchors = data
	id.bundles, err = spiffe.NewBundleSet(bundle)
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

// meshOf returns the mesh of a workload's name: the five labels on the left are fixed by the form, and the rest is
// the trust domain.
func meshOf(name string) (linkerdname.Mesh, error) {
	labels := strings.SplitN(name, ".", 6)
	if len(labels) < 6 {
		return linkerdname.Mesh{}, fmt.Errorf(
			"%.300q is not SERVICEACCOUNT.NAMESPACE.serviceaccount.identity.CONTROLNAMESPACE.TRUSTDOMAIN", name)
	}
	mesh := linkerdname.Mesh{ControlNamespace: labels[4], TrustDomain: labels[5], FirstDesign: labels[2] == "sa"}
	_, _, err := mesh.Parse(name)
	return mesh, err
}

// place is the address of a service.
type place struct {
	addr     string // host:port
	loopback bool
}

// parse checks a service with the default port. A client without an identity cannot verify a name.
func (s Service) parse(port string, identity bool) (place, error) {
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
		host = "localhost" // a name server asked for "localhost." could lead the token elsewhere
	}
	at := place{addr: net.JoinHostPort(host, port), loopback: local || err == nil && ip.Unmap().IsLoopback()}
	switch {
	case !identity && s.Name != "":
		return place{}, errors.New("its name is set, which a proxy without an identity cannot verify")
	case !identity:
	case at.loopback && s.Name != "":
		return place{}, fmt.Errorf("the name %.300q is set, and the address %q is on this host, where no name is "+
			"proven: leave the name empty", s.Name, s.Addr)
	case !at.loopback && s.Name == "":
		return place{}, fmt.Errorf("the address %q is not on this host: set the name that the service proves", s.Addr)
	}
	return at, nil
}

// refreshIn returns the time until the next request to the certifier.
func (id *Identity) refreshIn(left time.Duration, failures int) time.Duration {
	wait := left / 10 * 7
	if failures > 0 {
		wait = left / 25
	}
	return min(max(wait, id.cfg.MinRefresh), id.cfg.MaxRefresh)
}

// certifierCA sends the certifier the only signing request.
type certifierCA struct {
	caclient.CA
	id       *Identity
	rejected func()
}

// Sign implements [caclient.CA]. The caller's request has the same key and the same name.
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

// signer returns the only key.
func (id *Identity) signer() (crypto.Signer, error) {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.store.key(), nil
}

// Run checks the token file and the store, makes the key and the signing request, obtains a certificate and renews
// it. It blocks until ctx is done or [Identity.Close] is called, and then returns nil. It returns an error if a file
// is unsuitable. It may be called again after it has returned; the key stays.
func (id *Identity) Run(ctx context.Context) error {
	return id.life.RunAs(ctx, "linkerdproxy", id.run)
}

func (id *Identity) run(ctx context.Context) error {
	if err := id.prepare(); err != nil {
		return err
	}
	return id.manager.Run(ctx)
}

// prepare makes or reads the key, once.
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

// Ready waits until there is a certificate that has not expired. The error wraps [spiffe.ErrNotReady], the cause of
// ctx, and the last attempt's error.
func (id *Identity) Ready(ctx context.Context) error {
	err := id.life.Await(ctx, id.manager.Changed, func() bool { _, err := id.Credential(); return err == nil })
	if err == nil {
		return nil
	}
	if last := id.Report().Identities[0].Err; last != nil {
		err = fmt.Errorf("%w; the last attempt failed: %w", err, last)
	}
	return fmt.Errorf("linkerdproxy: %q: %w: %w", id.cfg.Name, spiffe.ErrNotReady, err)
}

// Close ends [Identity.Run], or the work of [Start], for good, and waits for it. The certificate stays readable. The
// error is always nil.
func (id *Identity) Close() error {
	err := id.life.Close()
	_ = id.manager.Close()
	return err
}

// Credential returns the certificate with its key. Before the first one, the error wraps [spiffe.ErrNotReady]; after
// the certificate has expired, it wraps [ErrExpired].
func (id *Identity) Credential() (*pki.Credential, error) {
	c, err := id.manager.Credential()
	if err != nil {
		return nil, err
	}
	if end := certchain.End(c.Chain()); !time.Now().Before(end) {
		return nil, fmt.Errorf("linkerdproxy: %q: %w at %s", id.cfg.Name, ErrExpired, end.UTC().Format(time.RFC3339))
	}
	return c, nil
}

// Changed returns a channel that is closed when there is a new certificate.
func (id *Identity) Changed() <-chan struct{} { return id.manager.Changed() }

func (id *Identity) newMetrics() {
	id.metrics.Gauge("control_identity_cert_expiration_timestamp_seconds",
		"When the certificate of the proxy expires, in seconds since 1970.", func() (float64, bool) {
			end := id.Report().Identities[0].NotAfter
			return metrics.Seconds(end), !end.IsZero()
		})
	id.metrics.Gauge("control_identity_cert_refresh_timestamp_seconds",
		"When the certificate of the proxy was last renewed, in seconds since 1970.", func() (float64, bool) {
			at := id.refreshed.Load()
			return metrics.Seconds(time.Unix(0, at)), at != 0
		})
}

// Report implements [report.Reporter] with the identity of the workload, the trust anchors, and the certifier as the
// upstream. The metrics have the names of Linkerd's proxies:
//
//	control_identity_cert_expiration_timestamp_seconds   when the certificate expires
//	control_identity_cert_refresh_timestamp_seconds      when it was last renewed
//	control_identity_cert_refreshes_total                by result: ok, or error for a bad certificate
func (id *Identity) Report() report.Report {
	r := id.manager.Report()
	r.Identities[0].Name = id.cfg.Name
	r.Metrics = id.metrics.Write
	return r
}
