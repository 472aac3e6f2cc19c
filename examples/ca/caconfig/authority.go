package caconfig

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/examples/internal/devtoken"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// Authority is the CA that a [Config] describes, with its audit log. [Config.Open] makes one, and [Config.Serve]
// passes one to its caller.
type Authority struct {
	ca.Signer
	Own   *ca.Authority // nil with -external-ca: the cluster holds the keys
	Where string        // describes the CA's place to operators

	OIDC net.Listener // of the documents of -oidc-issuer, with Serve; nil for none

	audit  *auditlog.Log // nil for none
	closes []func()      // the store and the custodians
	failed error         // why the documents are not served any more
}

// OpenOptions are the options of [Config.Open]. The zero value is for a program that signs.
type OpenOptions struct {
	// Existing fails with [ca.ErrNoRecord] instead of making a CA, for operator's commands that sign nothing.
	// ReadOnly also writes nothing, keeps no audit log, and takes no step of a rotation.
	Existing, ReadOnly bool
	Logger             *slog.Logger // nil means silence
}

// Open opens the CA: from the files in -root-ca-dir if there are any, and otherwise the self-signed one in its store.
// If the store is empty, Open makes a CA with -create, or without the flag if the store is the default directory:
// another empty store may be a volume that is not mounted. It creates the state directory and the audit log, and
// refuses directories and files that other users of this machine can change. If it fails, it leaves nothing behind.
// The audit log records changes of keys with the user, host and command line of this process. A server may run on the
// same store meanwhile. The caller closes the Authority.
func (c *Config) Open(ctx context.Context, o OpenOptions) (*Authority, error) {
	if c.StateDir == "" {
		return nil, misused("-state-dir: the flag is empty, or this user has no home directory; name a directory")
	}
	o.Existing, o.Logger = o.Existing || o.ReadOnly, ratelog.Patient(o.Logger)
	a, cfg := new(Authority), c.CA
	cfg.Logger, cfg.Actor, cfg.Create = o.Logger, currentActor(), !o.Existing && c.mayCreate()
	undo := c.missing()
	err := a.open(ctx, c, cfg, o)
	if err != nil {
		a.Close()
		undo()
		if text := err.Error(); errors.Is(err, ca.ErrUnfit) && (strings.Contains(text, "custodian") ||
			strings.Contains(text, "seal")) {
			return nil, fmt.Errorf("%w; -custodian, -former-custodian, -seal and -unseal name custodians", err)
		}
		if uid := os.Getuid(); errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
			err = fmt.Errorf("%w; run this as the user that the directory belongs to (it is user %d now), or name a "+
				"directory in -state-dir that this one may write to", err, uid)
		}
		return nil, err
	}
	return a, nil
}

// open opens the CA. The state directory and the audit log are open already.
func (a *Authority) open(ctx context.Context, c *Config, cfg ca.Config, o OpenOptions) error {
	if !o.Existing || c.Custody.store != nil && !o.ReadOnly {
		if err := c.makeStateDir(o.Logger); err != nil {
			return err
		}
	}
	open, err := a.find(ctx, c, o)
	if err != nil {
		return err
	}
	if !o.ReadOnly {
		if c.AuditLog != "none" {
			if a.audit, err = c.openAudit(o.Logger); err != nil {
				return err
			}
			cfg.Auditor = a.audit // a nil *auditlog.Log in the interface would not be nil
		}
	}
	if cfg.Custody, err = a.openCustody(ctx, &c.Custody, o.Logger); err != nil {
		return err
	}
	return open(cfg)
}

// missing lists the audit log and state directories that do not exist yet. The returned function removes them if they
// are empty, so that a failed start leaves nothing behind.
func (c *Config) missing() (remove func()) {
	var paths []string
	if _, err := os.Lstat(c.AuditLog); errors.Is(err, fs.ErrNotExist) && c.AuditLog != "none" {
		paths = append(paths, c.AuditLog)
	}
	for dir := c.StateDir; ; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			break
		}
		paths = append(paths, dir)
	}
	return func() {
		for _, path := range paths {
			if info, err := os.Lstat(path); err == nil && (info.IsDir() || info.Size() == 0) {
				_ = os.Remove(path) // fails if the directory is not empty
			}
		}
	}
}

// mayCreate reports whether Open may make a CA.
func (c *Config) mayCreate() bool {
	if c.given["create"] || c.temporary {
		return c.create || c.temporary
	}
	if c.Kubernetes || c.given["state-dir"] || c.Custody.store != nil {
		return false
	}
	entries, err := os.ReadDir(c.StateDir)
	for _, e := range entries {
		info, err := e.Info()
		switch {
		case err != nil:
			return false
		// left by a start that failed
		case e.Name() == filepath.Base(c.SecretFile), e.Name() == filepath.Base(c.AuditLog) && info.Size() == 0:
		case e.IsDir() && e.Name() == "ca":
			if inside, err := os.ReadDir(filepath.Join(c.StateDir, e.Name())); err != nil || len(inside) > 0 {
				return false
			}
		default:
			return false
		}
	}
	return err == nil || errors.Is(err, fs.ErrNotExist)
}

// makeStateDir creates the state directory, and refuses one that other users can change. In a cluster it only warns:
// the directory holds no key there, an emptyDir is open to all, and a pod's users are its own.
func (c *Config) makeStateDir(log *slog.Logger) error {
	var o private.Options
	if c.Kubernetes {
		o.Warn = func(err error) { log.Warn("caconfig: -state-dir", "err", err) }
	}
	dir, err := private.MakeDir(c.StateDir, o)
	if err != nil {
		return fmt.Errorf("-state-dir: %w", err)
	}
	return dir.Close()
}

// openAudit opens the audit log. It warns if other users can read or change it.
func (c *Config) openAudit(log *slog.Logger) (*auditlog.Log, error) {
	audit, err := auditlog.Open(c.AuditLog, log)
	if err != nil {
		return nil, fmt.Errorf("-audit-log: %w", err)
	}
	return audit, nil
}

// pluggedInFiles reports whether -root-ca-dir has files. It fails if other users can change the files, or could add
// some to an empty directory.
func (c *Config) pluggedInFiles() (bool, error) {
	if c.pluggedIn.Dir == "" {
		return false, nil
	}
	dir, err := private.OpenDir(c.pluggedIn.Dir, private.Options{})
	if err == nil {
		defer dir.Close()
		if _, err = pki.ReadKeyCertBundle(os.DirFS(c.pluggedIn.Dir), nil, time.Now()); err != nil {
			err = fmt.Errorf("in %s: %w", c.pluggedIn.Dir, err)
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) && c.given["root-ca-dir"]:
		return false, fmt.Errorf("-root-ca-dir: there is no CA in %s; put its files there, or leave this flag away "+
			"for a self-signed CA: %w", c.pluggedIn.Dir, err)
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case errors.Is(err, private.ErrUnsafe), dir == nil:
		return false, fmt.Errorf("-root-ca-dir: %w", err)
	}
	return true, nil // ca.Load judges the contents
}

// find decides which CA to use, and returns a function that opens it. It writes nothing.
func (a *Authority) find(ctx context.Context, c *Config, o OpenOptions) (open func(ca.Config) error, err error) {
	if c.ExternalCA != "" {
		a.Where = "behind the signers of the cluster"
		return func(cfg ca.Config) (err error) {
			a.Signer, err = c.newRA(cfg)
			return err
		}, nil
	}
	pluggedIn, err := c.pluggedInFiles()
	if err != nil {
		return nil, err
	}
	secret, folder := c.ownStore()
	if pluggedIn {
		if err := c.replacesOwn(ctx, o.Logger); err != nil {
			return nil, err
		}
		secret, folder = "svidkit-ca-tokens", "tokens"
	}
	store, err := a.store(ctx, c, secret, folder, o.Logger)
	if err != nil {
		return nil, err
	}
	if o.ReadOnly {
		store = look{store}
	}
	if pluggedIn {
		a.Where = "plugged in from " + c.pluggedIn.Dir
		return func(cfg ca.Config) (err error) {
			p := c.pluggedIn
			p.Tokens, cfg.Create = store, true // the first key for tokens
			if a.Own, err = ca.Load(ctx, cfg, p); err != nil {
				return fmt.Errorf("-root-ca-dir: in %s: %w", c.pluggedIn.Dir, err)
			}
			a.Signer = a.Own
			return nil
		}, nil
	}
	if o.Existing {
		if _, err := store.Load(ctx); errors.Is(err, ca.ErrNoRecord) {
			return nil, a.missing(c, err)
		}
	}
	return func(cfg ca.Config) (err error) {
		if a.Own, err = ca.Open(ctx, cfg, store); errors.Is(err, ca.ErrNoRecord) {
			return a.missing(c, err)
		}
		a.Signer = a.Own
		return err
	}, nil
}

// missing returns the error for a store without a CA.
func (a *Authority) missing(c *Config, err error) error {
	find := "name its directory in -state-dir, mount its volume"
	switch {
	case c.Custody.store != nil:
		find = "name its database in -store"
	case c.Kubernetes:
		find = "name its namespace in -namespace"
	}
	return &missingError{"there is no CA " + a.Where + "; if there was one, " + find +
		" or restore it from a backup; to make a new one, start the server once with -create", err}
}

type missingError struct {
	text string
	err  error
}

func (e *missingError) Error() string { return e.text }
func (e *missingError) Unwrap() error { return e.err }

// ownStore returns the Secret's and the directory's name for the self-signed CA.
func (c *Config) ownStore() (secret, folder string) {
	if c.cacerts {
		return "cacerts", "ca"
	}
	return "istio-ca-secret", "ca"
}

// replacesOwn refuses a plugged-in CA beside a self-signed one whose root clients trust, unless the operator
// confirmed the replacement. In a cluster, where mounting the Secret is the confirmation, as with Istio, it only
// warns.
func (c *Config) replacesOwn(ctx context.Context, log *slog.Logger) error {
	if c.replaceOwn {
		return nil
	}
	own := new(Authority)
	secret, folder := c.ownStore()
	defer own.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	store, err := own.store(ctx, c, secret, folder, log)
	if err != nil {
		return err
	}
	switch _, err := store.Load(ctx); {
	case errors.Is(err, ca.ErrNoRecord), (c.Kubernetes || c.Custody.store != nil) && err != nil:
		return nil
	case c.Kubernetes:
		log.Warn("caconfig: the own CA signs nothing any more, as one is plugged in; -replace-own-ca says that "+
			"this is meant", "own", own.Where, "plugged_in", c.pluggedIn.Dir)
		return nil
	}
	return fmt.Errorf("-root-ca-dir: there is a CA in %s, and another one %s, whose root clients trust; "+
		"set -replace-own-ca to sign with the one that is plugged in, or empty -root-ca-dir to go on with the own one",
		c.pluggedIn.Dir, own.Where)
}

// store returns the store with that name: a record in a database, a Secret, or a directory.
func (a *Authority) store(ctx context.Context, c *Config, secret, folder string, log *slog.Logger) (ca.Store, error) {
	if at := c.Custody.store; at != nil {
		record := c.CA.TrustDomain.String()
		if folder != "ca" {
			record += ".TOKENS" // no trust domain has upper-case letters
		}
		a.Where = "in " + at.Redacted() + ", as " + record
		store, closes, err := c.Custody.kinds.Stores[at.Scheme].Open(ctx, at, record, log)
		if err != nil {
			return nil, fmt.Errorf("-store: %w", err)
		}
		a.closes = append(a.closes, closes)
		return store, nil
	}
	if c.Kubernetes {
		a.Where = fmt.Sprintf("in the Secret %s/%s", c.namespace, secret)
		store, err := kubesecret.New(kubesecret.Options{Name: secret, Namespace: c.namespace,
			APIServer: c.cluster.API.APIServer, HTTPClient: c.cluster.API.HTTPClient})
		if err != nil {
			return nil, fmt.Errorf("-kubernetes: %w; -kubernetes-api names one", err)
		}
		return store, nil
	}
	a.Where = "in " + filepath.Join(c.StateDir, folder)
	return ca.NewDirStore(filepath.Join(c.StateDir, folder))
}

// look wraps a store for operator's commands that only read. Package ca recognizes its method View: it then needs no
// right to write, and takes no step of a rotation.
type look struct{ ca.Store }

// View marks the store.
func (look) View() {}

// newRA returns a registration authority in front of the cluster's signers. It reads their roots from a file; without
// one it takes the API server's, unless a request may choose its signer; otherwise it learns them.
func (c *Config) newRA(own ca.Config) (*ra.RA, error) {
	cfg := c.external
	cfg.TrustDomain, cfg.MaxTTL, cfg.Auditor, cfg.Logger = own.TrustDomain, own.MaxTTL, own.Auditor, own.Logger
	cfg.APIServer, cfg.HTTPClient = c.cluster.API.APIServer, c.cluster.API.HTTPClient
	files := []string{c.rootsOfRA}
	if c.external.SignerDomain == "" {
		files = append(files, "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
	}
	for _, name := range files {
		pem, err := readSafe(name)
		if name == "" || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			cfg.Roots, err = spiffe.ParseBundlePEM(own.TrustDomain, pem)
		}
		if err != nil {
			return nil, fmt.Errorf("-external-roots: %s: %w", name, err)
		}
		return newRA(cfg)
	}
	cfg.LearnRoots = true
	return newRA(cfg)
}

func newRA(cfg ra.Config) (*ra.RA, error) {
	a, err := ra.New(cfg)
	if err != nil {
		return nil, misused("-external-ca: %w", err)
	}
	return a, nil
}

// readSafe reads a file, which other users must not be able to change.
func readSafe(name string) ([]byte, error) {
	f, err := private.OpenFile(name, os.O_RDONLY, private.Options{})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return files.ReadAll(f, name, 1<<20)
}

// Close closes the audit log, the store and the custodians. Nothing may be signed afterwards.
func (a *Authority) Close() {
	for _, closes := range a.closes {
		closes()
	}
	if a.audit != nil {
		_ = a.audit.Close() // each record was made durable when it was written
	}
}

// ReopenAudit reopens the audit log, if there is one: see [auditlog.Log.Reopen].
func (a *Authority) ReopenAudit() error {
	if a.audit == nil {
		return nil
	}
	return a.audit.Reopen()
}

// AuditEnd returns the hash of the audit log's last line, or "" without a log: see [auditlog.Log.End].
func (a *Authority) AuditEnd() string {
	if a.audit == nil {
		return ""
	}
	return a.audit.End()
}

// WriteStatus writes the CA's state for operators: its roots and their next steps.
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
	for _, name := range s.Loose {
		fmt.Fprintf(out, "private key %s: to be destroyed, or for a next key\n", name)
	}
	if s.SyncError != nil {
		fmt.Fprintf(out, "the store: %v\n", s.SyncError)
	}
	if err := a.Own.Health().Keys; err != nil {
		fmt.Fprintf(out, "the custodian: %s\n", strings.TrimPrefix(err.Error(), "ca: "))
	}
}

func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}

// Serve opens the ports and the CA, and serves until ctx is done, which is no error. It calls ready once it serves
// all ports; the listener of an empty flag is nil. It closes the Authority before it returns. If StateDir is empty,
// Serve creates a temporary directory and sets it in c; it removes the directory at the end only if that is empty. A
// nil log means silence.
//
// In development mode it refuses ports beyond loopback, lifetimes of more than an hour, a plugged-in CA, and running
// in a pod.
func (c *Config) Serve(ctx context.Context, log *slog.Logger, ready func(*Authority, caserver.Listeners)) error {
	if err := c.check(true); err != nil {
		return err
	}
	log = ratelog.Patient(log)
	c.variables(log)
	if !c.caServer {
		log.Info("caconfig: -ca-server: no certificate API is served", "variable", "ENABLE_CA_SERVER")
	}
	if c.StateDir == "" {
		dir, err := os.MkdirTemp("", "svidkit-ca")
		if err != nil {
			return err
		}
		// Remove fails unless the directory is empty: a failed start leaves nothing behind.
		defer func() { _ = os.Remove(dir) }()
		c.temporary = true
		c.setStateDir(dir)
	}
	if pluggedIn, err := c.pluggedInFiles(); err != nil {
		return err
	} else if pluggedIn && c.Development() {
		return fmt.Errorf("-root-ca-dir: there is a CA in %s, and a server without -kubernetes and -jwt-rule is for "+
			"development: it signs any name for all that have its secret; empty this flag to serve a CA of its own",
			c.pluggedIn.Dir)
	}
	at := caserver.Listeners{LinkerdPlaintext: c.linkerdPlaintext}
	var atOIDC net.Listener
	for _, p := range []struct {
		name, flag, addr string
		at               *net.Listener
	}{
		{"Istio's API", "istio-addr", c.istioAddr, &at.Istio},
		{"Linkerd's API", "linkerd-addr", c.linkerdAddr, &at.Linkerd},
		{"bundle endpoint", "bundle-addr", c.bundleAddr, &at.Bundle},
		{"documents of the issuer", "oidc-addr", c.oidc.addr, &atOIDC},
		{"metrics, health", "admin-addr", c.adminAddr, &at.Admin},
	} {
		if p.addr == "" {
			continue
		}
		l, err := c.listen(p.name, p.flag, p.addr) // before a CA exists
		if err != nil {
			return err
		}
		defer l.Close()
		*p.at = l
	}
	a, err := c.await(ctx, log)
	if err != nil {
		return err
	}
	defer a.Close()
	a.OIDC = atOIDC
	cert, key := c.tlsFiles()
	certificate, stop, err := followTLS(ctx, "-tls-cert", cert, key, log)
	if err != nil {
		return err
	}
	defer stop()
	oidc, stop, err := followTLS(ctx, "-oidc-cert", c.oidc.cert, c.oidc.key, log)
	if err != nil {
		return err
	}
	defer stop()
	signer := c.limit(a, log)
	identity, stop, err := c.identity(ctx, signer, log)
	if err != nil {
		return err
	}
	defer stop()
	var documents caserver.ServeOptions
	if a.OIDC != nil {
		if documents, err = c.documents(signer, identity, oidc, log); err != nil {
			return err
		}
	}
	ctx, end := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer end(nil)
	o := caserver.Options{
		CA: signer, TrustDomain: c.CA.TrustDomain, Identity: identity, RootsFile: c.RootsFile,
		Status: a.WriteStatus, Logger: log, GetCertificate: certificate, Pods: c.Pods,
		Ready: func() {
			if a.OIDC != nil {
				running.Go(func() { a.serveDocuments(ctx, documents, end) })
			}
			ready(a, at)
		},
	}
	if c.Page != nil {
		if o.Page, err = c.Page(ctx, a); err != nil {
			return err
		}
	}
	if err := c.setAPIs(ctx, &o, at.Istio); err != nil {
		return err
	}
	if o.Linkerd != nil && c.Kubernetes && c.linkerdEvents {
		stop, err := c.reportEvents(ctx, a, o.Linkerd, log)
		if err != nil {
			return err
		}
		defer stop()
	}
	if c.rootConfigMap != "" {
		stop, err := c.handOutRoots(ctx, a.Signer, kubefollow.Again, log)
		if err != nil {
			return err
		}
		defer stop()
	}
	server, err := caserver.New(o)
	if err != nil {
		return err
	}
	if c.istioAddr != "" {
		log.Info("caconfig: -renew-by-certificate: callers of Istio's API may renew with the certificate that they "+
			"have",
			"since_other_proof", c.renew, "longest_lifetime", c.CA.DefaultTTL)
	}
	err = server.Run(ctx, at)
	end(nil)
	running.Wait()
	return cmp.Or(err, a.failed)
}

// identity keeps the server's own certificate fresh until stop is called. The served CA signs it.
func (c *Config) identity(ctx context.Context, signer ca.Signer, log *slog.Logger) (m *secretcache.Manager,
	stop func(), err error) {
	own, err := local.NewServer(signer, c.ServerID, c.names()...)
	if err != nil {
		return nil, nil, err
	}
	m, err = secretcache.New(secretcache.Config{ID: c.ServerID, CA: own, Names: c.names(), NewKey: c.newKey,
		Logger: log})
	if err != nil {
		return nil, nil, err
	}
	return m, background(ctx, func(ctx context.Context) { _ = m.Run(ctx) }), nil
}

// reportEvents reports what happens at Linkerd's API as Kubernetes Events until stop is called.
func (c *Config) reportEvents(ctx context.Context, a *Authority, o *linkerd.Options, log *slog.Logger) (stop func(),
	err error) {
	api, err := kube.New(kube.Options{URL: c.cluster.API.APIServer, Client: c.cluster.API.HTTPClient})
	if err != nil {
		return nil, err
	}
	pluggedIn, err := c.pluggedInFiles()
	if err != nil {
		return nil, err
	}
	refused := func() error { return nil }
	if pluggedIn && a.Own != nil {
		refused = func() error { return a.Own.Status().SyncError }
	}
	r := newRecorder(api, o.Mesh.ControlNamespace, log)
	o.Events = r.record
	return background(ctx, func(ctx context.Context) { r.run(ctx, refused); _ = api.Close() }), nil
}

// setAPIs sets the certificate APIs in o. In a cluster it first checks that the server has the rights they need.
func (c *Config) setAPIs(ctx context.Context, o *caserver.Options, istio net.Listener) error {
	o.Istio, o.RenewByCertificate = &istioca.Options{CertificateTTL: c.CA.DefaultTTL}, time.Duration(c.renew)
	proxies := c.linkerd
	proxies.AllowPlaintext = c.linkerdPlaintext
	switch {
	case c.Development():
		tokens, err := devtoken.New(c.CA.TrustDomain, c.SecretFile)
		if err == nil {
			err = c.writeAgentEnv(istio)
		}
		if err != nil {
			return fmt.Errorf("-state-dir: %w", err)
		}
		o.Istio.Authenticator, proxies.Review = tokens, tokens.Review
	case c.Kubernetes:
		check, err := c.cluster.set(o.Istio, &proxies)
		if err != nil {
			return err
		}
		if err := check(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	if err := c.setAuthenticator(ctx, o, o.Logger); err != nil {
		return err
	}
	if c.keepDNSNames {
		o.Istio.Policy = func(_ context.Context, caller *authn.Caller) (istioca.Grant, error) {
			return istioca.Grant{ID: caller.ID, DNSNames: caller.DNSNames}, nil
		}
	}
	if c.linkerdAddr != "" {
		o.Linkerd = &proxies
	}
	return nil
}

// writeAgentEnv writes the variables for an agent on this machine, in a form that a shell also reads.
func (c *Config) writeAgentEnv(istio net.Listener) error {
	if istio == nil {
		return nil
	}
	root, err := os.OpenRoot(c.StateDir)
	if err != nil {
		return err
	}
	defer root.Close()
	roots, err := filepath.Abs(c.RootsFile)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("TRUST_DOMAIN='%s'\nPOD_NAMESPACE='demo'\nSERVICE_ACCOUNT='web'\n"+
		"CA_ADDR='%s'\nCA_ROOT_CA='%[3]s'\nXDS_ROOT_CA='%[3]s'\n",
		c.CA.TrustDomain, istio.Addr(), roots)
	return fileset.Replace(root, "agent.env", fileset.File{Data: []byte(text), Mode: 0o600})
}

// limit wraps the CA of a for a server, so that the flags bound lifetimes.
func (c *Config) limit(a *Authority, log *slog.Logger) ca.Signer {
	l := lifetimes{c.CA.MaxTTL, c.shorten, ratelog.New(log, 0)}
	switch signer := a.Signer.(type) {
	case *ca.Authority:
		return limitedCA{signer, l}
	case *ra.RA:
		return limitedRA{signer, l}
	}
	return a.Signer
}

// limitedCA and limitedRA keep the optional methods that a server looks for.
type (
	limitedCA struct {
		*ca.Authority
		lifetimes
	}
	limitedRA struct {
		*ra.RA
		lifetimes
	}
)

// Sign implements [ca.Signer].
func (l limitedCA) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	return l.grant(ctx, l.Authority, r)
}

// Sign implements [ca.Signer].
func (l limitedRA) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	return l.grant(ctx, l.RA, r)
}

// lifetimes cuts a longer requested lifetime to the longest allowed, or refuses it and names the flag.
type lifetimes struct {
	longest time.Duration
	shorten bool
	log     *ratelog.Log
}

func (l lifetimes) grant(ctx context.Context, signer ca.Signer, r ca.Request) ([]*x509.Certificate, error) {
	if l.shorten && r.TTL > l.longest {
		l.log.LogOf(slog.LevelInfo, r.ID.String(),
			"caconfig: -max-ttl (MAX_WORKLOAD_CERT_TTL) is granted to a request for a longer lifetime", "longest",
			slog.String("id", r.ID.String()), slog.Duration("asked", r.TTL), slog.Duration("granted", l.longest))
		r.TTL = l.longest
	}
	chain, err := signer.Sign(ctx, r)
	if e, ok := errors.AsType[*ca.SignError](err); ok && e.Granted > 0 && e.Asked > e.Granted {
		named := *e
		named.Err = fmt.Errorf("%w (-max-ttl, MAX_WORKLOAD_CERT_TTL)", e.Err)
		err = &named
	}
	return chain, err
}

// listen opens the port of a flag.
func (c *Config) listen(name, flag, at string) (net.Listener, error) {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; -%s names another address, or none", name, err, flag)
	}
	if addr := l.Addr().String(); c.Development() && !isLoopback(addr) {
		l.Close()
		return nil, fmt.Errorf("%s: -%s leads to %s, %s", name, flag, addr, notLoopback)
	}
	return l, nil
}

// names returns the server's DNS names and addresses: istiod's, Linkerd's certifier's, those in -dns-names, and the
// loopback interface's.
func (c *Config) names() []pki.SAN {
	names := append(slices.Clone(c.dnsNames), "localhost")
	for _, name := range []string{"istiod", "istiod-remote", "istio-pilot"} {
		names = append(names, name+"."+c.namespace+".svc")
	}
	if name, err := c.linkerd.Mesh.Certifier(); err == nil {
		names = append(names, name)
	}
	slices.Sort(names)
	sans := []pki.SAN{{Type: pki.IP, Value: string(net.IPv4(127, 0, 0, 1).To4())},
		{Type: pki.IP, Value: string(net.IPv6loopback)}}
	for _, name := range slices.Compact(names) {
		sans = append(sans, pki.DNSSAN(name))
	}
	return sans
}
