package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// signer is what all the services need: an authority, or a registration authority that has the
// cluster sign.
type signer interface {
	Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error)
	Bundle() *spiffe.Bundle
}

// parts are what was made of the configuration.
type parts struct {
	signer    signer
	authority *ca.Authority // nil with -external-ca
	audit     *auditlog.Log // nil for none
	where     string        // the CA is
	store     ca.Store      // nil if it has none
}

// build makes the CA that c describes, and the record of what it signs.
func build(ctx context.Context, c *config, log *slog.Logger) (_ *parts, err error) {
	p := new(parts)
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if err := os.MkdirAll(c.stateDir, 0o700); err != nil {
		return nil, fmt.Errorf("-state-dir: %w", err)
	}
	var auditor ca.Auditor // stays nil without a log: a nil *auditlog.Log in it would not be
	if c.auditLog != "none" {
		if p.audit, err = auditlog.Open(c.auditLog, &auditlog.Options{MaxSize: c.auditSize}); err != nil {
			return nil, err
		}
		auditor = p.audit
	}
	if c.externalCA != "" {
		return p, p.buildRA(c, auditor, log)
	}
	cfg := c.authority()
	cfg.Auditor, cfg.Logger = auditor, log
	return p, p.buildAuthority(ctx, c, cfg)
}

// authority returns the configuration of our own CA.
func (c *config) authority() ca.Config {
	rotation := ca.Rotation{
		KeyAlgorithm: c.algorithm(),
		RootTTL:      c.rootTTL,
		GraceRatio:   float64(c.grace) / 100,
		Propagation:  c.propagation,
		Constrain:    c.constrain,
		Manual:       c.checkInterval <= 0,
	}
	if c.keepKey {
		rotation.Istio = &ca.IstioRotation{CheckInterval: max(c.checkInterval, 0), NoJitter: !c.jitter}
	}
	return ca.Config{
		TrustDomain: c.trustDomain,
		DefaultTTL:  c.defaultTTL,
		MaxTTL:      c.maxTTL,
		Backdate:    c.backdate,
		RefreshHint: c.refreshHint,
		Rotation:    rotation,
		JWT:         &ca.JWTConfig{},
		Limits: ca.Limits{
			Concurrent: c.concurrent, Queue: c.queue,
			Rate: c.rate, CallerRate: c.callerRate, CallerBurst: int(10 * c.callerRate),
		},
	}
}

// buildAuthority takes the CA that was plugged in, if there is one, else the one in the store.
func (p *parts) buildAuthority(ctx context.Context, c *config, cfg ca.Config) (err error) {
	if p.store, p.where, err = c.openStore(c.secretName(), "ca"); err != nil {
		return err
	}
	if _, err := os.Stat(c.rootDir); err == nil {
		tokens, _, err := c.openStore("svidkit-ca-tokens", "tokens") // what is in p.store is another CA
		if err != nil {
			return err
		}
		p.authority, err = ca.Load(ctx, cfg, ca.PluggedIn{Dir: c.rootDir, MultiRoot: c.multiRoot, Tokens: tokens})
		if err == nil {
			p.signer, p.store, p.where = p.authority, tokens, "plugged in from "+c.rootDir
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("-root-ca-dir: %w", err)
		}
	}
	p.authority, err = ca.Open(ctx, cfg, p.store)
	p.signer = p.authority
	return err
}

func (c *config) secretName() string {
	if c.cacerts {
		return kubesecret.CACerts
	}
	return kubesecret.DefaultName
}

// openStore returns the store of that name: a Secret of the cluster, or a folder.
func (c *config) openStore(secret, folder string) (store ca.Store, where string, err error) {
	if c.kubernetes {
		where = fmt.Sprintf("in the Secret %s/%s", c.namespace, secret)
		store, err = kubesecret.New(kubesecret.Options{Name: secret, Namespace: c.namespace, APIServer: c.kubeAPI, HTTPClient: c.kubeClient()})
	} else {
		dir := filepath.Join(c.stateDir, folder)
		where = "in " + dir
		store, err = ca.NewDirStore(dir)
	}
	if err != nil {
		return nil, where, err
	}
	if c.status {
		store = &glance{Store: store}
	}
	return store, where, nil
}

// kubeClient returns the client for an API server that is not that of our pod: one on loopback, such
// as kubectl proxy, which authenticates us.
func (c *config) kubeClient() *http.Client {
	if u, err := url.Parse(c.kubeAPI); err == nil && u.Scheme == "http" {
		return &http.Client{}
	}
	return nil
}

// buildRA lets the cluster sign.
func (p *parts) buildRA(c *config, auditor ca.Auditor, log *slog.Logger) error {
	roots, err := c.signerRoots()
	if err != nil {
		return fmt.Errorf("-external-roots: %w", err)
	}
	p.where = "behind the signers of the cluster"
	cfg := ra.Config{
		TrustDomain: c.trustDomain, Signer: c.signer, SignerDomain: c.signerDomain, MaxTTL: c.maxTTL,
		APIServer: c.kubeAPI, HTTPClient: c.kubeClient(), Auditor: auditor, Logger: log,
	}
	if roots != nil {
		cfg.Roots = roots
	} else {
		cfg.LearnRoots = true
	}
	authority, err := ra.New(cfg)
	p.signer = authority
	return err
}

// clusterRoots vouch for the API server, and often for what its signers sign.
const clusterRoots = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"

// signerRoots reads the roots of the signers from where Istio looks for them; nil if there are none.
func (c *config) signerRoots() (spiffe.BundleSource, error) {
	files := []string{c.externalRoots}
	if c.signerDomain == "" {
		files = append(files, clusterRoots)
	}
	for _, name := range files {
		pem, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return spiffe.ParseBundlePEM(c.trustDomain, pem)
	}
	return nil, nil
}

// close closes the audit log, when nobody signs any more.
func (p *parts) close() {
	if p.audit != nil {
		_ = p.audit.Close() // every record was made durable on its own
	}
}

// bundles is the bundle of the signer as a source.
type bundles struct {
	trustDomain spiffe.TrustDomain
	signer      signer
}

// Bundle implements [spiffe.BundleSource].
func (b bundles) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if bundle := b.signer.Bundle(); td == b.trustDomain && bundle != nil {
		return bundle, nil
	}
	return nil, fmt.Errorf("no bundle of %s: %w", td, spiffe.ErrUnknownTrustDomain)
}

// How long a command waits: for the store, or for a signer of the cluster, which has a minute.
const (
	storeTimeout  = 30 * time.Second
	signerTimeout = 75 * time.Second
)
