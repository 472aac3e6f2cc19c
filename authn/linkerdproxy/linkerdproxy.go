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
// redirect connections, and does not read the original destination of those that the kernel has redirected. It does not
// follow the trust anchors, which last as long as the process: a new set needs a restart, after which the proxy has a
// new key. It does not limit what an identity may do: see linkerdname.Match for the patterns of policies.
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
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/internal/life"
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

	// TokenFile has the token of the service account.
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

	// MinRefresh and MaxRefresh bound the time until the next request to the certifier. 0 means 10 seconds and 24 hours.
	MinRefresh, MaxRefresh time.Duration

	// AnonymousAfterExpiry has clients connect without a certificate once that of the proxy has expired, as the first design
	// of the protocol has it. Such a connection proves the server alone.
	AnonymousAfterExpiry bool

	// Logger gets each new certificate (Info) and each failure (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Identity is the identity of a proxy. [Start] or [New] makes one. Its methods are safe for concurrent use, and those that
// read do not block.
type Identity struct {
	cfg     Config
	mesh    linkerdname.Mesh
	anchors *spiffe.BundleSet
	ca      caclient.CA
	manager *secretcache.Manager
	life    life.Life

	once  sync.Once // makes or loads the two below
	key   func() crypto.Signer
	csr   *pki.CSR
	fails error

	metrics   metrics.Set
	refreshed atomic.Int64 // when a certificate was last accepted, in nanoseconds since 1970
}

// Start returns an Identity that is certified, and is renewed until [Identity.Close]. It is [New], [Identity.Run] in a
// goroutine, and [Identity.Ready]. The end of ctx ends a start that is not done yet, and nothing after that. If it fails,
// nothing is left running, and the error says what is wrong, or why there is no certificate.
func Start(ctx context.Context, cfg Config) (*Identity, error)

// New checks cfg and returns an Identity. It makes no key, reads no file but AnchorsFile, and connects to nothing.
func New(cfg Config) (*Identity, error)

// Run checks the token file and the store, makes the key and the signing request, obtains a certificate and renews it. It
// blocks until ctx is done or [Identity.Close] is called, and returns nil then. It returns an error if the files are not as
// they must be. It may be called again after it has returned; the key stays.
func (id *Identity) Run(ctx context.Context) error

// Ready waits until there is a certificate that has not expired. The error wraps [ErrNotReady], the cause of ctx, and what
// the last attempt failed with.
func (id *Identity) Ready(ctx context.Context) error

// Close ends [Identity.Run], or what [Start] has started, for good, and waits for it. The error is always nil.
func (id *Identity) Close() error

// Credential returns the certificate with its key, which may have expired. Before the first the error wraps [ErrNotReady].
func (id *Identity) Credential() (*pki.Credential, error)

// Bundle implements [spiffe.BundleSource] with the trust anchors, for the trust domain of the mesh.
func (id *Identity) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error)

// Changed returns a channel that is closed when there is a new certificate.
func (id *Identity) Changed() <-chan struct{}

// Status returns the state of the identity, for health checks and diagnosis.
func (id *Identity) Status() secretcache.Status

// Name returns the identity of the workload.
func (id *Identity) Name() string { return id.cfg.Name }

// WriteMetrics writes metrics in the text format of Prometheus, by the names that Linkerd's proxies have for them.
func (id *Identity) WriteMetrics(w io.Writer) error
