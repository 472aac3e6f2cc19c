package main

import (
	"context"
	"crypto/tls"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/inject"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

//go:embed injector.yaml
var injectorManifest string

// runInjector is "linkerd-proxy inject", the webhook that gives the proxies in pods an identity. It reads its files
// again for each connection and each review, so that new ones need no restart; an unusable file leaves the last good
// one in use.
func runInjector(ctx context.Context, args []string, out, errOut io.Writer) error {
	var addr, cert, key, anchors string
	cfg := inject.Config{Mesh: linkerdname.Mesh{}, Logger: slog.New(slog.NewTextHandler(errOut, nil))}
	fs := flag.NewFlagSet("linkerd-proxy inject", flag.ContinueOnError)
	fs.StringVar(&addr, "addr", ":8443", "`address` of the webhook, with TLS")
	fs.StringVar(&cert, "cert", "/var/run/linkerd/tls/tls.crt",
		"`file` with the certificate of the webhook, in PEM, which the webhook configuration trusts")
	fs.StringVar(&key, "key", "/var/run/linkerd/tls/tls.key", "`file` with its private key")
	fs.StringVar(&anchors, "anchors", "/var/run/linkerd/identity/trust-roots/ca-bundle.crt",
		"`file` with the trust anchors of the mesh, in PEM")
	fs.StringVar(&cfg.Mesh.ControlNamespace, "linkerd-namespace", "linkerd", "`namespace` of the control plane")
	fs.StringVar(&cfg.Mesh.TrustDomain, "trust-domain", "cluster.local", "`name` of the mesh's trust domain")
	fs.StringVar(&cfg.ClusterDomain, "cluster-domain", "cluster.local", "`suffix` of the DNS names of services")
	fs.StringVar(&cfg.TokenAudience, "token-audience", "identity.l5d.io",
		"`audience` of the token for the identity service; empty: the token of the service account")
	fs.StringVar(&cfg.Container, "container", "linkerd-proxy", "`name` of the container of a proxy")
	fs.BoolVar(&cfg.Disabled, "disabled", false, "pods without the annotation linkerd.io/identity get no identity")
	(&program.Manifest{Text: injectorManifest}).Register(fs)
	if err := program.Parse(fs, args, out, program.Help{}); err != nil {
		return err
	}
	var err error
	if cfg.TrustAnchors, err = os.ReadFile(anchors); err != nil {
		return fmt.Errorf("-anchors: %w", err)
	}
	injector, err := inject.New(cfg)
	if err != nil {
		return err
	}
	pair := &ownPair{cert: cert, key: key, log: ratelog.New(cfg.Logger, 0)}
	if err := pair.read(); err != nil {
		return fmt.Errorf("-cert and -key: %w", err)
	}
	webhook := http.NewServeMux()
	webhook.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		pem, err := os.ReadFile(anchors)
		if err == nil {
			err = injector.SetTrustAnchors(pem)
		}
		if err != nil {
			pair.log.Warn("the trust anchors before stay in use", "the file cannot be used",
				slog.String("file", anchors), slog.Any("err", err))
		}
		injector.ServeHTTP(w, r)
	})
	webhook.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("-addr: %w", err)
	}
	fmt.Fprintf(out, "webhook: https://%s/\n", l.Addr())
	return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: webhook, Logger: cfg.Logger, TLS: &tls.Config{
		MinVersion: tls.VersionTLS12, GetCertificate: pair.get,
	}})
}

// ownPair is the webhook's certificate with its key. A new pair of files replaces the last good one if it is usable,
// unless it is invalid while the last one is still valid.
type ownPair struct {
	cert, key string
	log       *ratelog.Log
	last      atomic.Pointer[tls.Certificate]
}

func (p *ownPair) read() error {
	certs, err1 := os.ReadFile(p.cert)
	key, err2 := os.ReadFile(p.key)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if _, err := pki.ParseCertificatesPEM(certs); err != nil { // crypto/tls skips torn blocks
		return fmt.Errorf("%s: %w", p.cert, err)
	}
	if _, err := pki.ParsePrivateKeyPEM(key); err != nil {
		return fmt.Errorf("%s: %w", p.key, err)
	}
	next, err := tls.X509KeyPair(certs, key)
	if err != nil {
		return fmt.Errorf("%s and %s: %w", p.cert, p.key, err)
	}
	now, last := time.Now(), p.last.Load()
	if err := certchain.InTime(next.Leaf, now); err != nil && (!now.Before(next.Leaf.NotAfter) || last != nil &&
		now.Before(last.Leaf.NotAfter)) {
		return fmt.Errorf("%s: %w", p.cert, err)
	}
	p.last.Store(&next)
	return nil
}

func (p *ownPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if err := p.read(); err != nil {
		p.log.Warn("the certificate before stays in use", "the files cannot be used", slog.Any("err", err))
	}
	return p.last.Load(), nil
}
