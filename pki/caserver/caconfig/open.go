package caconfig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// Authority is the CA that a [Config] describes, and the record of what it signs. [Config.Open] and
// [Config.OpenExisting] make one, and [Config.Serve] passes one to its caller.
type Authority struct {
	caserver.CA
	Own   *ca.Authority // nil with -external-ca: the keys are those of the cluster
	Where string        // the CA is, for operators

	audit *auditlog.Log // nil for none
	look  *look         // nil if it may write
}

// Open opens the CA to sign: as plugged in, if there are files in -root-ca-dir, else the self-signed one in its
// store, which it makes if there is none. It makes the folder of the state and the audit log. A server on the
// same store may run meanwhile. The caller closes the Authority. A nil log means silence.
func (c *Config) Open(ctx context.Context, log *slog.Logger) (*Authority, error) {
	return c.open(ctx, true, false, log)
}

// OpenExisting is [Config.Open] for an operator's command that signs nothing: it keeps no audit log and makes no
// CA; the error is a [ca.ErrNoRecord] if there is none. With readOnly it writes nothing. What the CA in this
// process would write, such as the next step of a rotation, stays in its memory.
func (c *Config) OpenExisting(ctx context.Context, readOnly bool, log *slog.Logger) (*Authority, error) {
	return c.open(ctx, false, readOnly, log)
}

func (c *Config) open(ctx context.Context, sign, readOnly bool, log *slog.Logger) (*Authority, error) {
	if c.StateDir == "" {
		return nil, errors.New("-state-dir: the flag is empty, or this user has no home folder; name a folder")
	}
	cfg := c.CA
	cfg.Logger = log
	a := new(Authority)
	if sign {
		if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
			return nil, fmt.Errorf("-state-dir: %w", err)
		}
		if c.AuditLog != "none" {
			var err error
			if a.audit, err = auditlog.Open(c.AuditLog, &auditlog.Options{MaxSize: c.auditSize}); err != nil {
				return nil, err
			}
			cfg.Auditor = a.audit // stays nil without a log: a nil *auditlog.Log in it would not be
		}
	}
	var err error
	if c.ExternalCA != "" {
		a.Where = "behind the signers of the cluster"
		a.CA, err = c.newRA(cfg)
	} else {
		a.Own, err = a.open(ctx, c, cfg, sign, readOnly)
		a.CA = a.Own
	}
	if err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// open opens the CA that was plugged in, if there is one, else the self-signed one in the store.
func (a *Authority) open(ctx context.Context, c *Config, cfg ca.Config, sign, readOnly bool) (*ca.Authority, error) {
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
	if readOnly {
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
	if !sign {
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
	unwritten map[string][]byte // nil for nothing
	n         int
}

// Load implements [ca.Store].
func (l *look) Load(ctx context.Context) (ca.Record, error) {
	if l.unwritten == nil {
		return l.Store.Load(ctx)
	}
	return ca.Record{Version: strconv.Itoa(l.n), Data: maps.Clone(l.unwritten)}, nil
}

// Save implements [ca.Store].
func (l *look) Save(_ context.Context, r ca.Record) (string, error) {
	l.unwritten = maps.Clone(r.Data)
	l.n++
	return strconv.Itoa(l.n), nil
}

// newRA returns a registration authority that has the signers of the cluster sign. Their roots are in a
// file, or, unless a request may choose its signer, those of the API server; else they are learned.
func (c *Config) newRA(own ca.Config) (*ra.RA, error) {
	cfg := c.external
	cfg.TrustDomain, cfg.MaxTTL, cfg.Auditor, cfg.Logger, cfg.LearnRoots = own.TrustDomain, own.MaxTTL, own.Auditor, own.Logger, true
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
		if err != nil {
			return nil, fmt.Errorf("-external-roots: %w", err)
		}
		if cfg.Roots, err = spiffe.ParseBundlePEM(c.CA.TrustDomain, pem); err != nil {
			return nil, fmt.Errorf("-external-roots: %s: %w", name, err)
		}
		cfg.LearnRoots = false
		break
	}
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
