package main

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
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// authority is the CA that the flags describe, and the record of what it signs.
type authority struct {
	ca.Signer
	own   *ca.Authority // nil with -external-ca
	audit *auditlog.Log // nil for none
	where string        // the CA is
	look  *look         // nil without -status
}

var errNoCA = errors.New("there is no CA yet; the server makes it when it starts, or -once")

// signs reports whether c signs, so that it may make a CA and needs the audit log.
func (c *config) signs() bool { return c.command == "" || c.command == "once" || c.command == "jwt" }

// newAuthority makes the CA that c describes. The caller closes it.
func newAuthority(ctx context.Context, c *config, log *slog.Logger) (_ *authority, err error) {
	a := new(authority)
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	var auditor ca.Auditor // stays nil without a log: a nil *auditlog.Log in it would not be
	if c.signs() {
		if err := os.MkdirAll(c.stateDir, 0o700); err != nil {
			return nil, fmt.Errorf("-state-dir: %w", err)
		}
		if c.auditLog != "none" {
			if a.audit, err = auditlog.Open(c.auditLog, &auditlog.Options{MaxSize: c.auditSize}); err != nil {
				return nil, err
			}
			auditor = a.audit
		}
	}
	if c.externalCA != "" {
		a.where = "behind the signers of the cluster"
		a.Signer, err = c.newRA(auditor, log)
		return a, err
	}
	cfg := c.ca
	cfg.Auditor, cfg.Logger = auditor, log
	a.own, err = a.open(ctx, c, cfg)
	a.Signer = a.own
	return a, err
}

// open takes the CA that was plugged in, if there is one, else the self-signed one in the store.
func (a *authority) open(ctx context.Context, c *config, cfg ca.Config) (*ca.Authority, error) {
	if _, err := pki.ReadKeyCertBundle(os.DirFS(c.pluggedIn.Dir), nil, time.Now()); !errors.Is(err, fs.ErrNotExist) {
		p := c.pluggedIn
		if p.Tokens, err = a.store(c, "svidkit-ca-tokens", "tokens"); err != nil {
			return nil, err
		}
		own, err := ca.Load(ctx, cfg, p)
		if err != nil {
			return nil, fmt.Errorf("-root-ca-dir: %w", err)
		}
		a.where = "plugged in from " + c.pluggedIn.Dir
		return own, nil
	}
	secret := kubesecret.DefaultName
	if c.cacerts {
		secret = kubesecret.CACerts
	}
	store, err := a.store(c, secret, "ca")
	if err != nil {
		return nil, err
	}
	if !c.signs() { // to look at a CA, or to change it, must not make one
		if _, err := store.Load(ctx); errors.Is(err, ca.ErrNoRecord) {
			return nil, fmt.Errorf("%s: %w", a.where, errNoCA)
		}
	}
	return ca.Open(ctx, cfg, store)
}

// store returns the store of that name: a Secret, or a folder. For -status it is one that writes nothing.
func (a *authority) store(c *config, secret, folder string) (store ca.Store, err error) {
	if c.kubernetes {
		a.where = fmt.Sprintf("in the Secret %s/%s", c.namespace, secret)
		store, err = kubesecret.New(kubesecret.Options{Name: secret, Namespace: c.namespace, APIServer: c.cluster.API.APIServer, HTTPClient: c.cluster.API.HTTPClient})
	} else {
		a.where = "in " + filepath.Join(c.stateDir, folder)
		store, err = ca.NewDirStore(filepath.Join(c.stateDir, folder))
	}
	if err == nil && c.command == "status" {
		a.look = &look{Store: store}
		store = a.look
	}
	return store, err
}

// look is a store for -status. What the authority in this process would write stays here, so that the
// command needs no right to write, and takes no step for the servers. It is for one goroutine.
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
func (c *config) newRA(auditor ca.Auditor, log *slog.Logger) (*ra.RA, error) {
	cfg := c.external
	cfg.TrustDomain, cfg.MaxTTL, cfg.Auditor, cfg.Logger, cfg.LearnRoots = c.ca.TrustDomain, c.ca.MaxTTL, auditor, log, true
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
		if cfg.Roots, err = spiffe.ParseBundlePEM(c.ca.TrustDomain, pem); err != nil {
			return nil, fmt.Errorf("-external-roots: %s: %w", name, err)
		}
		cfg.LearnRoots = false
		break
	}
	return ra.New(cfg)
}

// close closes the audit log, after the last signature.
func (a *authority) close() {
	if a.audit != nil {
		_ = a.audit.Close() // every record was made durable when it was written
	}
}

// describe prints the state of the CA.
func (a *authority) describe(out io.Writer) {
	if a.own == nil {
		fmt.Fprintf(out, "CA %s\n", a.where)
		for root := range a.Bundle().X509Authorities() {
			fmt.Fprintf(out, "root %x, until %s\n", root.SerialNumber, root.NotAfter.UTC().Format(time.RFC3339))
		}
		return
	}
	s := a.own.Status()
	fmt.Fprintf(out, "CA of %s, %s, bundle %d\n", s.TrustDomain, a.where, s.Sequence)
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
