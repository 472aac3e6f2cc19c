// Package caserver serves a certificate authority: the certificate APIs of Istio and of Linkerd, the bundle endpoint
// of SPIFFE federation, metrics and health, all from one CA.
//
//	own, err := local.NewServer(authority, id, pki.DNSSAN("ca.example.org")) // package caclient/local
//	…
//	identity, err := secretcache.Start(ctx, secretcache.Config{ID: id, CA: own})
//	…
//	server, err := caserver.New(caserver.Options{
//		CA:          authority, // of package ca or ra
//		TrustDomain: id.TrustDomain(),
//		Identity:    identity,
//		Istio:       &istioca.Options{Authenticator: tokens},
//	})
//	…
//	err = server.Run(ctx, caserver.Listeners{Istio: public, Admin: local})
//
// The program examples/ca uses it. A program with other APIs uses the handlers of packages istioca, linkerd and
// federation directly, or of jwtsvid for the documents of an OpenID Connect issuer, and serves them with [Serve] or
// another server of package net/http.
package caserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/internal/metrics/metricspage"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Options are the parts of a [Server]. CA, TrustDomain and Identity are required.
type Options struct {
	// CA is a *ca.Authority or a *ra.RA. If it has a method Run(context.Context) error, the Server runs it. If it has
	// a method Changed() <-chan struct{}, whose channel is closed when the bundle changes, the Server waits for
	// changes instead of polling. If it has a method Health() ca.Health, /ready and the metrics use it.
	CA          ca.Signer
	TrustDomain spiffe.TrustDomain

	// Identity is the server's own identity, such as a *secretcache.Manager that gets it from the CA: see
	// local.NewServer in package caclient/local. Clients call the server by its DNS names and IP addresses. If it has
	// a method Ready(context.Context) error, Run waits for that before it serves.
	Identity spiffe.SVIDSource

	// Istio and Linkerd are the certificate APIs; nil means none. The Server sets their Signer and Logger. Istio's
	// Authenticator is asked about callers whom no client certificate proves.
	Istio   *istioca.Options
	Linkerd *linkerd.Options

	// Pods returns a part that answers requests without a listener, such as a *podcert.Signer. It signs with the
	// given CA. Nil means none.
	Pods func(ca.Signer) (Part, error)

	// RenewByCertificate is how long callers of Istio's API may renew by certificate alone, since the Authenticator
	// last proved them: see [istioca.ClientCertificates]. 0 means without end, as Istio's CA does for virtual
	// machines; less than 0 means not at all. A certificate under a tainted root never proves a caller.
	RenewByCertificate time.Duration

	// RootsFile is a file that Run keeps up to date with the roots of the CA in PEM, for clients on the same machine:
	// all users can read it, if its directory lets them. The directory must exist when Run starts. Empty means none.
	RootsFile string

	// GetCertificate returns the certificate that Istio's and Linkerd's API present, as in [tls.Config]. Nil means
	// Identity's. The bundle endpoint always presents Identity.
	GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)

	// Page is the operators' page, served at /. Nil means none.
	Page http.Handler

	// Status writes the operators' text at /status. Nil means none.
	Status func(io.Writer)

	// Ready is called once, when Run has a certificate and serves its listeners. It may be nil.
	Ready func()

	// Logger gets certificates and refusals, failed handshakes (Info), a RootsFile that cannot be written (Warn), and
	// the end of the server (Info). Lines that callers can cause are limited: see the options of the APIs and of
	// [Serve]. Nil means silence.
	Logger *slog.Logger
}

// Part is a part of a [Server] without a listener. The Server runs it and serves its metrics.
type Part interface {
	Run(ctx context.Context) error
	Report() report.Report
}

// Server serves a CA. [New] makes one. It is safe for concurrent use.
type Server struct {
	opts           Options
	signer         *counter // the CA as the APIs use it
	istio, linkerd http.Handler
	bundle, admin  http.Handler
	pods           Part // nil for none
}

// New returns a Server. It opens no port and does not call the CA. The error says which option is wrong.
func New(o Options) (*Server, error) {
	if o.CA == nil || o.Identity == nil {
		return nil, errors.New("caserver: invalid Options: CA or Identity is nil; " +
			"a *ca.Authority is a CA, and a *secretcache.Manager an identity")
	}
	o.Logger = ratelog.Patient(o.Logger)
	s := &Server{opts: o, istio: http.NotFoundHandler(), linkerd: http.NotFoundHandler()}
	s.signer = &counter{Signer: o.CA}
	if o.GetCertificate == nil {
		s.opts.GetCertificate = s.own
	}
	var err error
	if s.bundle, err = federation.NewHandler(caservice.Bundles(o.CA.Bundle), o.TrustDomain); err != nil {
		return nil, err
	}
	metrics, err := s.addAPIs()
	if err != nil {
		return nil, err
	}
	s.admin = s.newAdmin(append(metrics, s.newMetrics().Write))
	return s, nil
}

// addAPIs adds the certificate APIs, and returns their metrics.
func (s *Server) addAPIs() (metrics []func(io.Writer) error, err error) {
	if s.opts.Istio != nil {
		h, err := s.newIstio(*s.opts.Istio)
		if err != nil {
			return nil, err
		}
		s.istio, metrics = only(istioca.CreateCertificate, h), append(metrics, h.Report().Metrics)
	}
	if s.opts.Linkerd != nil {
		o := *s.opts.Linkerd
		o.Signer, o.Logger = s.signer, s.opts.Logger
		h, err := linkerd.New(o)
		if err != nil {
			return nil, err
		}
		s.linkerd, metrics = only(linkerd.Certify, h), append(metrics, h.Report().Metrics)
	}
	if s.opts.Pods != nil {
		if s.pods, err = s.opts.Pods(s.signer); err != nil {
			return nil, err
		}
		metrics = append(metrics, s.pods.Report().Metrics)
	}
	return metrics, nil
}

// newIstio returns the handler of Istio's API. Callers may present their certificates to it.
func (s *Server) newIstio(o istioca.Options) (*istioca.Server, error) {
	o.Signer, o.Logger = s.signer, s.opts.Logger
	if tokens := o.Authenticator; tokens != nil && s.opts.RenewByCertificate >= 0 {
		certificates, err := istioca.ClientCertificates(s.opts.CA, s.opts.TrustDomain, s.opts.RenewByCertificate)
		if err != nil {
			return nil, err
		}
		o.Authenticator = authn.FirstOf(certificates, tokens)
	}
	return istioca.New(o)
}

// only serves h at path, and answers 404 elsewhere.
func only(path string, h http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle(path, h)
	return mux
}

// Listeners are where a [Server] listens; nil means not at all. [Server.Run] closes them.
type Listeners struct {
	Istio   net.Listener // Istio's API, by TLS 1.3, or 1.2 for agents that obey FIPS 140-2
	Linkerd net.Listener // Linkerd's API, by TLS 1.3 with or without ALPN
	Bundle  net.Listener // the bundle of the CA, by TLS, in the profile https_spiffe
	// Admin serves metrics, health, status and roots without TLS; over loopback only for localhost, addresses and the
	// server's own names.
	Admin net.Listener

	// LinkerdPlaintext serves Linkerd's API without TLS, for a proxy in the same pod that terminates it. The options
	// of that API must allow it too.
	LinkerdPlaintext bool
}

// Run runs the CA, serves the listeners without TLS, waits for the server's identity, and serves the others until ctx is
// done or a part fails. Then it closes the listeners, gives active requests 5 seconds to finish, and returns when all
// its goroutines have ended: nil if ctx was done, and otherwise the failure. Call it once.
func (s *Server) Run(ctx context.Context, at Listeners) error {
	if s.opts.Identity == nil {
		return errors.New("caserver: run: it is the zero Server; New makes one")
	}
	endpoints, err := s.endpoints(at)
	if err != nil {
		return err
	}
	for _, e := range endpoints {
		defer e.l.Close()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	p := &parts{ctx: ctx, cancel: cancel}
	defer p.Wait()
	defer cancel(nil)
	if err := s.start(p, endpoints); err != nil && ctx.Err() == nil {
		return err
	}
	<-ctx.Done()
	s.opts.Logger.Info("caserver: the server ends", "reason", context.Cause(ctx), "grace", drainTime)
	p.Wait()
	return p.failed
}

// start starts the parts of the server, and returns when all listeners are served.
func (s *Server) start(p *parts, endpoints []endpoint) error {
	if r, ok := s.opts.CA.(interface{ Run(context.Context) error }); ok {
		p.start("certificate authority", r.Run)
	}
	serve := func(plaintext bool) {
		for _, e := range endpoints {
			if e.o.Logger = s.opts.Logger; e.o.Plaintext == plaintext {
				p.start(e.name, func(ctx context.Context) error { return Serve(ctx, e.l, e.o) })
			}
		}
	}
	serve(true)
	if r, ok := s.opts.Identity.(interface{ Ready(context.Context) error }); ok {
		if err := r.Ready(p.ctx); err != nil {
			return fmt.Errorf("identity of the server: %w", err)
		}
	}
	if s.pods != nil {
		p.start("requests of pods", s.pods.Run)
	}
	if s.opts.RootsFile != "" {
		if err := replaceFile(s.opts.RootsFile, s.roots()); err != nil {
			return err
		}
		p.start("file of the roots", s.writeRoots)
	}
	serve(false)
	if s.opts.Ready != nil {
		s.opts.Ready()
	}
	return nil
}

// parts run until one of them fails, or ctx is done.
type parts struct {
	sync.WaitGroup
	ctx    context.Context
	cancel context.CancelCauseFunc
	first  sync.Once
	failed error // of the first failed part; valid after Wait
}

func (p *parts) start(name string, run func(context.Context) error) {
	p.Go(func() {
		err := run(p.ctx)
		if p.ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it has ended by itself")
		}
		p.first.Do(func() {
			p.failed = fmt.Errorf("%s: %w", name, err)
			p.cancel(p.failed)
		})
	})
}

// endpoint is a listener, and how to serve it.
type endpoint struct {
	name string
	l    net.Listener
	o    ServeOptions
}

// endpoints returns the endpoints that have a listener.
func (s *Server) endpoints(at Listeners) ([]endpoint, error) {
	bundleTLS, err := federation.ServerConfig(s.opts.Identity)
	if err != nil {
		return nil, err
	}
	linkerdOptions := ServeOptions{Handler: s.linkerd, TLS: s.tlsConfig(tls.VersionTLS13, tls.NoClientCert)}
	if at.LinkerdPlaintext {
		if s.opts.Linkerd != nil && !s.opts.Linkerd.AllowPlaintext {
			return nil, errors.New("caserver: Listeners.LinkerdPlaintext is set, and " +
				"linkerd.Options.AllowPlaintext is not: every request would be refused")
		}
		linkerdOptions.TLS, linkerdOptions.Plaintext = nil, true
	}
	istioTLS := s.tlsConfig(tls.VersionTLS12, tls.RequestClientCert)
	return slices.DeleteFunc([]endpoint{
		{"Istio's API", at.Istio, ServeOptions{Handler: s.istio, TLS: istioTLS}},
		{"Linkerd's API", at.Linkerd, linkerdOptions},
		{"bundle endpoint", at.Bundle, ServeOptions{Handler: s.bundle, TLS: bundleTLS}},
		{"metrics and health", at.Admin, ServeOptions{Handler: s.admin, Plaintext: true}},
	}, func(e endpoint) bool { return e.l == nil }), nil
}

// tlsConfig returns a configuration with the server's current certificate. The authenticator verifies clients'
// certificates.
//
// Istio's API also accepts TLS 1.2, the only version of agents with COMPLIANCE_POLICY=fips-140-2. Linkerd's proxies
// speak only TLS 1.3.
func (s *Server) tlsConfig(least uint16, clients tls.ClientAuthType) *tls.Config {
	return &tls.Config{MinVersion: least, ClientAuth: clients, GetCertificate: s.opts.GetCertificate}
}

// own returns Identity's certificate.
func (s *Server) own(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	svid, err := s.opts.Identity.SVID()
	if err != nil {
		return nil, err
	}
	return svid.TLSCertificate(), nil
}

// localHosts serves h, and refuses a request over loopback for a host name that is not this server's: it comes from a
// web page in a browser on this machine whose name was made to lead to loopback (DNS rebinding).
func (s *Server) localHosts(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if loopback.Reached(r) && !s.isHost(r.Host) {
			http.Error(w, "this server is localhost; it has no other name over loopback",
				http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// isHost reports whether a host, with or without a port, is an address, localhost, or one of the server's own names.
func (s *Server) isHost(host string) bool {
	if loopback.Host(host) {
		return true
	}
	svid, err := s.opts.Identity.SVID()
	return err == nil && slices.ContainsFunc(svid.Leaf().DNSNames, func(name string) bool {
		return strings.EqualFold(name, loopback.Name(host))
	})
}

// newAdmin returns the handler for operators: metrics in the text format of Prometheus, liveness, readiness,
// status and the roots in PEM. It serves no secrets.
func (s *Server) newAdmin(parts []func(io.Writer) error) http.Handler {
	mux := http.NewServeMux()
	var page metricspage.Page
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		_ = page.Serve(w, func(w io.Writer) error {
			for _, write := range parts {
				_ = write(w)
			}
			return nil
		})
	})
	for _, path := range []string{"GET /live", "GET /ping", "GET /healthz/live"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	}
	for _, path := range []string{"GET /ready", "GET /healthz/ready"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			if err := s.ready(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
			s.writeHealth(w, false)
		})
	}
	mux.HandleFunc("GET /root-cert.pem", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(s.roots()) })
	if s.opts.Status != nil {
		mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
			s.opts.Status(w)
			s.writeHealth(w, true)
		})
	}
	if s.opts.Page != nil {
		mux.Handle("/", s.opts.Page)
	}
	return s.localHosts(mux)
}

// roots returns the current roots in PEM.
func (s *Server) roots() []byte {
	b := s.opts.CA.Bundle()
	if b == nil {
		return nil
	}
	return b.MarshalPEM()
}

// rootsRetry is the wait after RootsFile could not be written, and the polling interval for a CA that does not
// announce changes.
const rootsRetry = 5 * time.Second

// writeRoots keeps RootsFile up to date. A failure to write it does not stop the CA.
func (s *Server) writeRoots(ctx context.Context) error {
	written := s.roots()
	failures := ratelog.New(s.opts.Logger, 0)
	for ctx.Err() == nil {
		var changed <-chan struct{}
		if w, ok := s.opts.CA.(interface{ Changed() <-chan struct{} }); ok {
			changed = w.Changed() // before reading, so that no change is missed
		}
		if pem := s.roots(); !bytes.Equal(pem, written) {
			if err := replaceFile(s.opts.RootsFile, pem); err != nil {
				failures.Warn("caserver: the roots cannot be written", "RootsFile", slog.Any("err", err),
					slog.Duration("retry_in", rootsRetry))
			} else {
				written = pem
			}
		}
		renew.Wait(ctx, rootsRetry, changed)
	}
	return nil
}

// replaceFile replaces a file, so that readers see either all of the old or all of the new contents.
func replaceFile(name string, data []byte) error {
	root, err := os.OpenRoot(filepath.Dir(name))
	if err != nil {
		return err
	}
	defer root.Close()
	return fileset.Replace(root, filepath.Base(name), fileset.File{Data: data, Mode: 0o644}) // roots are public
}
