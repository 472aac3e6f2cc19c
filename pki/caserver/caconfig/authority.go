package caconfig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// Authority is the CA that a [Config] describes, and the record of what it signs. [Config.Open] makes
// one, and [Config.Serve] passes one to its caller.
type Authority struct {
	ca.Signer
	Own   *ca.Authority // nil with -external-ca: the keys are those of the cluster
	Where string        // the CA is, for operators

	audit *auditlog.Log // nil for none
	look  *look         // nil if it may write
}

// OpenOptions are the options of [Config.Open]. The zero value is for a program that signs.
type OpenOptions struct {
	// Existing makes no CA and keeps no audit log, for an operator's command that signs nothing. The error is a
	// [ca.ErrNoRecord] if there is no CA. ReadOnly also writes nothing: what the CA in this process would write,
	// such as the next step of a rotation, stays in its memory.
	Existing, ReadOnly bool
	Logger             *slog.Logger // nil means silence
}

// Open opens the CA: as plugged in, if there are files in -root-ca-dir, else the self-signed one in its store,
// which it makes if there is none. It makes the folder of the state and the audit log. A server on the same
// store may run meanwhile. The caller closes the Authority.
func (c *Config) Open(ctx context.Context, o OpenOptions) (*Authority, error) {
	if c.StateDir == "" {
		return nil, errors.New("-state-dir: the flag is empty, or this user has no home folder; name a folder")
	}
	a, cfg := new(Authority), c.CA
	var err error
	o.Existing = o.Existing || o.ReadOnly
	if cfg.Logger = o.Logger; !o.Existing {
		cfg.Create = true
		if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
			return nil, fmt.Errorf("-state-dir: %w", err)
		}
		if c.AuditLog != "none" {
			if a.audit, err = auditlog.Open(c.AuditLog, &auditlog.Options{MaxSize: c.auditSize}); err != nil {
				return nil, err
			}
			cfg.Auditor = a.audit // stays nil without a log: a nil *auditlog.Log in it would not be
		}
	}
	if c.ExternalCA != "" {
		a.Where = "behind the signers of the cluster"
		a.Signer, err = c.newRA(cfg)
	} else {
		a.Own, err = a.open(ctx, c, cfg, o)
		a.Signer = a.Own
	}
	if err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// open opens the CA that was plugged in, if there is one, else the self-signed one in the store.
func (a *Authority) open(ctx context.Context, c *Config, cfg ca.Config, o OpenOptions) (*ca.Authority, error) {
	secret, folder := kubesecret.DefaultName, "ca"
	if c.cacerts {
		secret = kubesecret.CACerts
	}
	_, err := pki.ReadKeyCertBundle(os.DirFS(c.pluggedIn.Dir), nil, time.Now())
	pluggedIn := !errors.Is(err, fs.ErrNotExist)
	if pluggedIn {
		secret, folder = "svidkit-ca-tokens", "tokens"
	}
	store, err := a.store(c, secret, folder)
	if err != nil {
		return nil, err
	}
	if o.ReadOnly {
		a.look = &look{Store: store}
		store = a.look
	}
	if pluggedIn {
		a.Where = "plugged in from " + c.pluggedIn.Dir
		p := c.pluggedIn
		p.Tokens = store
		own, err := ca.Load(ctx, cfg, p)
		if err != nil {
			return nil, fmt.Errorf("-root-ca-dir: %w", err)
		}
		return own, nil
	}
	if o.Existing {
		if _, err := store.Load(ctx); errors.Is(err, ca.ErrNoRecord) {
			return nil, fmt.Errorf("%s: there is no CA yet; a server makes it when it starts, or the first signature: %w", a.Where, err)
		}
	}
	return ca.Open(ctx, cfg, store)
}

// store returns the store of that name: a Secret, or a folder.
func (a *Authority) store(c *Config, secret, folder string) (ca.Store, error) {
	if c.Kubernetes {
		a.Where = fmt.Sprintf("in the Secret %s/%s", c.namespace, secret)
		return kubesecret.New(kubesecret.Options{Name: secret, Namespace: c.namespace, APIServer: c.cluster.API.APIServer, HTTPClient: c.cluster.API.HTTPClient})
	}
	a.Where = "in " + filepath.Join(c.StateDir, folder)
	return ca.NewDirStore(filepath.Join(c.StateDir, folder))
}

// look is a store that writes nothing. What the authority in this process would write stays here, so that an
// operator who looks needs no right to write, and takes no step for the servers. It is for one goroutine.
type look struct {
	ca.Store
	unwritten *ca.Record // nil for nothing
}

// Load implements [ca.Store].
func (l *look) Load(ctx context.Context) (ca.Record, error) {
	if l.unwritten == nil {
		return l.Store.Load(ctx)
	}
	return ca.NewRecord(l.unwritten.Version, maps.Clone(l.unwritten.Data())), nil
}

// Save implements [ca.Store].
func (l *look) Save(_ context.Context, r ca.Record) (string, error) {
	l.unwritten = new(ca.NewRecord(r.Version+"+", maps.Clone(r.Data())))
	return l.unwritten.Version, nil
}

// newRA returns a registration authority that has the signers of the cluster sign. Their roots are in a
// file, or, unless a request may choose its signer, those of the API server; else they are learned.
func (c *Config) newRA(own ca.Config) (*ra.RA, error) {
	cfg := c.external
	cfg.TrustDomain, cfg.MaxTTL, cfg.Auditor, cfg.Logger = own.TrustDomain, own.MaxTTL, own.Auditor, own.Logger
	cfg.APIServer, cfg.HTTPClient = c.cluster.API.APIServer, c.cluster.API.HTTPClient
	files := []string{c.rootsOfRA}
	if c.external.SignerDomain == "" {
		files = append(files, "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
	}
	for _, name := range files {
		pem, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			cfg.Roots, err = spiffe.ParseBundlePEM(own.TrustDomain, pem)
		}
		if err != nil {
			return nil, fmt.Errorf("-external-roots: %s: %w", name, err)
		}
		return ra.New(cfg)
	}
	cfg.LearnRoots = true
	return ra.New(cfg)
}

// Close closes the audit log. Nothing must be signed afterwards.
func (a *Authority) Close() {
	if a.audit != nil {
		_ = a.audit.Close() // every record was made durable when it was written
	}
}

// WriteStatus writes the state of the CA for operators: its roots and what becomes of them.
func (a *Authority) WriteStatus(out io.Writer) {
	if a.Own == nil {
		fmt.Fprintf(out, "CA %s\n", a.Where)
		for root := range a.Bundle().X509Authorities() {
			fmt.Fprintf(out, "root %x, until %s\n", root.SerialNumber, root.NotAfter.UTC().Format(time.RFC3339))
		}
		return
	}
	s := a.Own.Status()
	fmt.Fprintf(out, "CA of %s, %s, bundle %d\n", s.TrustDomain, a.Where, s.Sequence)
	for _, r := range s.Roots {
		fmt.Fprintf(out, "%s, until %s\n", r, r.Certificate.NotAfter.UTC().Format(time.RFC3339))
	}
	for _, k := range s.JWTKeys {
		fmt.Fprintln(out, k)
	}
	if a.look != nil && a.look.unwritten != nil {
		fmt.Fprintln(out, "(servers that are running may take their next step earlier)")
	}
	if s.SyncError != nil {
		fmt.Fprintf(out, "the store: %v\n", s.SyncError)
	}
}

func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}

// Serve opens the CA and the ports, and serves until ctx is done, which is no error. It calls ready when all
// ports are served; a listener is nil if its flag is empty. The Authority is closed when Serve returns. If
// StateDir is empty, Serve makes a temporary folder, sets it in c, and does not remove it. In development mode
// it refuses ports beyond loopback, and to run in a pod. A nil log means silence.
func (c *Config) Serve(ctx context.Context, log *slog.Logger, ready func(*Authority, caserver.Listeners)) error {
	if err := c.check(true); err != nil {
		return err
	}
	if c.StateDir == "" {
		dir, err := os.MkdirTemp("", "svidkit-ca")
		if err != nil {
			return err
		}
		c.setStateDir(dir)
	}
	a, err := c.Open(ctx, OpenOptions{Logger: log})
	if err != nil {
		return err
	}
	defer a.Close()
	at := caserver.Listeners{LinkerdPlaintext: c.linkerdPlaintext}
	o := caserver.Options{
		CA: a.Signer, ID: c.ServerID, Names: c.names(), RootsFile: c.RootsFile,
		Status: a.WriteStatus, Ready: func() { ready(a, at) }, Logger: log,
	}
	if err := c.setAPIs(ctx, &o); err != nil {
		return err
	}
	server, err := caserver.New(o)
	if err != nil {
		return err
	}
	for _, p := range []struct {
		name, flag, addr string
		at               *net.Listener
	}{
		{"Istio's API", "istio-addr", c.istioAddr, &at.Istio},
		{"Linkerd's API", "linkerd-addr", c.linkerdAddr, &at.Linkerd},
		{"bundle endpoint", "bundle-addr", c.bundleAddr, &at.Bundle},
		{"metrics, health", "admin-addr", c.adminAddr, &at.Admin},
	} {
		if p.addr == "" {
			continue
		}
		l, err := c.listen(p.name, p.flag, p.addr)
		if err != nil {
			return err
		}
		defer l.Close()
		*p.at = l
	}
	if err := server.Run(ctx, at); ctx.Err() == nil {
		return err
	}
	return nil
}

// setAPIs sets the certificate APIs in o. In a cluster it asks whether the server has the rights that they need,
// before a caller depends on it.
func (c *Config) setAPIs(ctx context.Context, o *caserver.Options) error {
	o.Istio, o.RenewByCertificate = &istioca.Options{CertificateTTL: c.CA.DefaultTTL}, time.Duration(c.renew)
	proxies := c.linkerd
	proxies.AllowPlaintext = c.linkerdPlaintext
	if !c.Kubernetes {
		tokens, err := caserver.NewInsecureTokens(c.CA.TrustDomain, c.SecretFile)
		if err != nil {
			return fmt.Errorf("-state-dir: %w", err)
		}
		o.Istio.Authenticator, proxies.Review = tokens, tokens.Review
	} else {
		check, err := c.cluster.Set(o.Istio, &proxies)
		if err != nil {
			return err
		}
		if err := check(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	if c.keepDNSNames {
		o.Istio.Policy = istioca.KeepDNSNames
	}
	if c.linkerdAddr != "" {
		o.Linkerd = &proxies
	}
	return nil
}

// listen opens the port that the flag names.
func (c *Config) listen(name, flag, at string) (net.Listener, error) {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; -%s names another address, or none", name, err, flag)
	}
	if addr := l.Addr().String(); !c.Kubernetes && !isLoopback(addr) {
		l.Close()
		return nil, fmt.Errorf("%s: -%s leads to %s, %s", name, flag, addr, notLoopback)
	}
	return l, nil
}

// names returns the names by which clients call the server: those of istiod, that of Linkerd's certifier,
// those of -dns-names, and those of the loopback interface.
func (c *Config) names() []pki.SAN {
	names := append(slices.Clone(c.dnsNames), "localhost")
	for _, name := range []string{"istiod", "istiod-remote", "istio-pilot"} {
		names = append(names, name+"."+c.namespace+".svc")
	}
	if name, err := c.linkerd.Mesh.Certifier(); err == nil {
		names = append(names, name)
	}
	slices.Sort(names)
	sans := []pki.SAN{{Type: pki.IP, Value: string(net.IPv4(127, 0, 0, 1).To4())}, {Type: pki.IP, Value: string(net.IPv6loopback)}}
	for _, name := range slices.Compact(names) {
		sans = append(sans, pki.DNSSAN(name))
	}
	return sans
}
