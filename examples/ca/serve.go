package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// server is what runs.
type server struct {
	c        *config
	p        *parts
	identity *secretcache.Manager
	istio    *istioca.Server
	linkerd  *linkerd.Server      // nil: there is no address for it
	nodes    *kube.NodeAuthorizer // nil: nobody may ask for others
	bundle   http.Handler
	log      *slog.Logger

	// The addresses that it listens on; nil if it does not.
	istioAt, linkerdAt, bundleAt, adminAt net.Addr
}

// newServer puts the services around the CA. It opens no port yet.
func newServer(c *config, p *parts, log *slog.Logger) (s *server, err error) {
	s = &server{c: c, p: p, log: log}
	if s.identity, err = newIdentity(c, p, log); err != nil {
		return nil, err
	}
	who, err := c.authenticator(p)
	if err != nil {
		return nil, err
	}
	options := istioca.Options{Signer: p.signer, Authenticator: who, Logger: log}
	if len(c.nodeAccounts) > 0 {
		s.nodes, err = kube.NewNodeAuthorizer(kube.NodeAuthorizerOptions{APIServer: c.kubeAPI, HTTPClient: c.kubeClient(), Accounts: c.nodeAccounts})
		if err != nil {
			return nil, err
		}
		options.NodeAuthorizer = s.nodes
	}
	if c.keepDNSNames {
		options.Policy = istioca.KeepDNSNames
	}
	if s.istio, err = istioca.New(options); err != nil {
		return nil, err
	}
	if c.linkerdAddr != "" {
		if s.linkerd, err = c.newLinkerd(p, log); err != nil {
			return nil, err
		}
	}
	s.bundle, err = federation.NewHandler(bundles{c.trustDomain, p.signer}, c.trustDomain)
	return s, err
}

// newLinkerd returns the service for Linkerd's proxies.
func (c *config) newLinkerd(p *parts, log *slog.Logger) (*linkerd.Server, error) {
	review := believer{c.trustDomain}.review
	if c.kubernetes {
		reviewer, err := c.reviewer(c.anyAudience)
		if err != nil {
			return nil, err
		}
		review = reviewer.Review
	}
	return linkerd.New(linkerd.Options{
		Mesh: c.mesh(), Signer: p.signer, Review: review,
		Lifetime: c.linkerdTTL, ClockSkew: c.linkerdSkew, Logger: log,
	})
}

// authenticator returns what says who a caller of Istio's API is: a client certificate of our own
// trust domain, else a token.
func (c *config) authenticator(p *parts) (authn.Authenticator, error) {
	verifier, err := spiffe.NewVerifier(bundles{c.trustDomain, p.signer}, spiffe.AllowMembersOf(c.trustDomain), nil)
	if err != nil {
		return nil, err
	}
	certificate := authn.ClientCertificate(verifier)
	if !c.kubernetes {
		return authn.FirstOf(certificate, believer{c.trustDomain}), nil
	}
	reviewer, err := c.reviewer(false)
	if err != nil {
		return nil, err
	}
	token, err := kube.TokenReview(kube.TokenReviewOptions{
		Reviewer: reviewer, TrustDomain: c.trustDomain, Audiences: c.audiences, Cluster: c.cluster,
	})
	return authn.FirstOf(certificate, token), err
}

func (c *config) reviewer(anyAudience bool) (*kube.Reviewer, error) {
	return kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.kubeAPI, HTTPClient: c.kubeClient(), AnyAudience: anyAudience})
}

// checkRights asks the API server, before anybody depends on it, whether we may ask what we have to.
func (s *server) checkRights(ctx context.Context) error {
	if !s.c.kubernetes {
		return nil
	}
	reviewer, err := s.c.reviewer(false)
	if err != nil {
		return err
	}
	if err := reviewer.Check(ctx); err != nil || s.nodes == nil {
		return err
	}
	return s.nodes.Check(ctx)
}

// serve opens the ports, calls ready, and serves until ctx is done. What it started is over when it
// returns: requests that are under way get some seconds to end.
func (s *server) serve(outer context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(outer)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	run := func(name string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	if err := s.checkRights(ctx); err != nil {
		return verdict(outer, ctx, err)
	}
	if s.p.authority != nil {
		run("certificate authority", s.p.authority.Run)
	}
	run("our own identity", s.identity.Run)
	if _, err := s.identity.GenerateSecret(ctx, "default"); err != nil {
		return verdict(outer, ctx, err)
	}
	if err := replace(s.c.rootsFile(), s.p.roots()); err != nil {
		return err
	}
	run("roots", s.writeRoots)

	tls := serverTLS(s.identity)
	bundleTLS, err := federation.ServerConfig(s.identity)
	if err != nil {
		return err
	}
	istio := http.NewServeMux()
	istio.Handle(istioca.CreateCertificate, s.istio)
	certify := http.NewServeMux()
	if s.linkerd != nil {
		certify.Handle(linkerd.Certify, s.linkerd)
	}
	for _, l := range []struct {
		name, flag, addr string
		at               *net.Addr
		o                caserver.ServeOptions
	}{
		{"Istio's API", "istio-addr", s.c.istioAddr, &s.istioAt, caserver.ServeOptions{Handler: istio, TLS: tls}},
		{"Linkerd's API", "linkerd-addr", s.c.linkerdAddr, &s.linkerdAt, caserver.ServeOptions{Handler: certify, TLS: tls, Plaintext: s.c.linkerdPlaintext}},
		{"bundle endpoint", "bundle-addr", s.c.bundleAddr, &s.bundleAt, caserver.ServeOptions{Handler: s.bundle, TLS: bundleTLS}},
		{"metrics and health", "admin-addr", s.c.adminAddr, &s.adminAt, caserver.ServeOptions{Handler: s.admin(), Plaintext: true}},
	} {
		if l.addr == "" {
			continue
		}
		if l.o.Plaintext {
			l.o.TLS = nil
		}
		l.o.Logger = s.log
		listener, err := net.Listen("tcp", l.addr)
		if err != nil {
			return fmt.Errorf("%s: %w; -%s names another address, or none", l.name, err, l.flag)
		}
		if *l.at = listener.Addr(); !s.c.kubernetes && !isLoopback(listener.Addr().String()) {
			listener.Close()
			return fmt.Errorf("%s: %s leads to %s, which is not on loopback: without -kubernetes, callers are believed whatever they say", l.name, l.addr, listener.Addr())
		}
		run(l.name, func(ctx context.Context) error { return caserver.Serve(ctx, listener, l.o) })
	}
	if err := ready(ctx); err != nil {
		return verdict(outer, ctx, err)
	}
	return verdict(outer, ctx, nil)
}

// verdict returns what went wrong: err, or why ctx ended. That outer ended is nothing wrong.
func verdict(outer, ctx context.Context, err error) error {
	switch {
	case outer.Err() != nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return err
}

// admin answers who looks after us.
func (s *server) admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_ = s.istio.WriteMetrics(w) // the reader has gone
		if s.linkerd != nil {
			_ = s.linkerd.WriteMetrics(w)
		}
	})
	for _, path := range []string{"GET /live", "GET /ping", "GET /healthz/live"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	}
	for _, path := range []string{"GET /ready", "GET /healthz/ready"} {
		mux.HandleFunc(path, s.ready)
	}
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { s.p.describe(w) })
	mux.HandleFunc("GET /root-cert.pem", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(s.p.roots()) })
	return mux
}

// ready says whether we can sign. A store that does not answer is no reason to take traffic away:
// the CA goes on with what it knows.
func (s *server) ready(w http.ResponseWriter, _ *http.Request) {
	svid, err := s.identity.SVID()
	if err != nil || time.Now().After(svid.NotAfter()) {
		http.Error(w, "our own certificate has ended, and nobody signs a new one", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// roots returns the roots of the moment in PEM.
func (p *parts) roots() []byte {
	b := p.signer.Bundle()
	if b == nil {
		return nil
	}
	return b.MarshalPEM()
}

// rootsRetry is when a file that could not be written is tried again.
const rootsRetry = 5 * time.Second

// writeRoots keeps root-cert.pem beside the state up to date, for clients that are on this machine. A
// folder that cannot be written to is no reason to stop signing.
func (s *server) writeRoots(ctx context.Context) error {
	var written []byte
	for ctx.Err() == nil {
		changed := s.identity.Changed()
		var again <-chan time.Time
		if pem := s.p.roots(); !bytes.Equal(pem, written) {
			if err := replace(s.c.rootsFile(), pem); err != nil {
				s.log.WarnContext(ctx, "the file of the roots cannot be written, and is tried again", "err", err)
				again = time.After(rootsRetry)
			} else {
				written = pem
			}
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again:
		}
	}
	return context.Cause(ctx)
}

func (c *config) rootsFile() string { return filepath.Join(c.stateDir, "root-cert.pem") }

// replace writes a file that readers see whole, or not at all.
func replace(name string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the rename there is nothing left
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

// announce says where everything is.
func (s *server) announce(out io.Writer) {
	if !s.c.kubernetes {
		fmt.Fprintln(out, warning)
	}
	fmt.Fprintf(out, "trust domain:       %s\n", s.c.trustDomain)
	fmt.Fprintf(out, "CA:                 %s\n", s.p.where)
	fmt.Fprintf(out, "roots in PEM:       %s\n", s.c.rootsFile())
	fmt.Fprintf(out, "audit log:          %s\n", s.c.auditLog)
	for _, l := range []struct {
		what, scheme, path string
		at                 net.Addr
	}{
		{"Istio's API:", "https", istioca.CreateCertificate, s.istioAt},
		{"Linkerd's API:", "https", linkerd.Certify, s.linkerdAt},
		{"bundle endpoint:", "https", "/", s.bundleAt},
		{"metrics, health:", "http", "/metrics /ready /status", s.adminAt},
	} {
		if l.at == nil {
			continue
		}
		if l.at == s.linkerdAt && s.c.linkerdPlaintext {
			l.scheme = "http"
		}
		fmt.Fprintf(out, "%-19s %s://%s%s\n", l.what, l.scheme, l.at, l.path)
	}
}
