package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"slices"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
)

// server is the CA with its APIs.
type server struct {
	c     *config
	ca    *authority
	srv   *caserver.Server
	at    caserver.Listeners
	check func(context.Context) error // whether the server has its rights in the cluster; nil without one
	ready func()                      // called when everything is served
}

// newServer makes the CA that c describes, with its APIs. It opens no port. run closes the CA.
func newServer(ctx context.Context, c *config, log *slog.Logger) (*server, error) {
	a, err := newAuthority(ctx, c, log)
	if err != nil {
		return nil, err
	}
	s := &server{c: c, ca: a}
	if err := s.compose(log); err != nil {
		a.close()
		return nil, err
	}
	return s, nil
}

func (s *server) compose(log *slog.Logger) (err error) {
	c, tokens := s.c, caserver.InsecureTokens{TrustDomain: s.c.ca.TrustDomain}
	istio, proxies := &istioca.Options{Authenticator: tokens}, &c.linkerd
	proxies.Review = tokens.Review
	if c.kubernetes {
		c.cluster.TrustDomain = c.ca.TrustDomain
		if s.check, err = c.cluster.Set(istio, proxies); err != nil {
			return err
		}
	}
	if c.keepDNSNames {
		istio.Policy = istioca.KeepDNSNames
	}
	if c.linkerdAddr == "" {
		proxies = nil
	}
	s.srv, err = caserver.New(caserver.Options{
		CA: s.ca.Signer, ID: c.self, Names: c.names(), Istio: istio, Linkerd: proxies,
		RootsFile: c.rootsFile(), Status: s.ca.describe, Ready: func() { s.ready() }, Logger: log,
	})
	return err
}

// names returns the names by which clients call the server: those of istiod, that of Linkerd's certifier,
// those of -dns-names, and those of the loopback interface.
func (c *config) names() []pki.SAN {
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

func (c *config) rootsFile() string { return filepath.Join(c.stateDir, "root-cert.pem") }

// port is an address that the server listens on, the flag that names it, and what is there.
type port struct {
	name, flag, addr string
	scheme, path     string
	l                *net.Listener
}

func (s *server) ports() []port {
	c, linkerdScheme := s.c, "https"
	if s.at.LinkerdPlaintext = c.linkerdPlaintext; c.linkerdPlaintext {
		linkerdScheme = "http"
	}
	return []port{
		{"Istio's API", "istio-addr", c.istioAddr, "https", istioca.CreateCertificate, &s.at.Istio},
		{"Linkerd's API", "linkerd-addr", c.linkerdAddr, linkerdScheme, linkerd.Certify, &s.at.Linkerd},
		{"bundle endpoint", "bundle-addr", c.bundleAddr, "https", "/", &s.at.Bundle},
		{"metrics, health", "admin-addr", c.adminAddr, "http", "/metrics /ready /status", &s.at.Admin},
	}
}

// run opens the ports and serves until ctx is done, which is no error. It calls ready when all are served,
// and closes the CA at its end.
func (s *server) run(ctx context.Context, ready func()) error {
	defer s.ca.close()
	if s.check != nil { // before a caller depends on it
		if err := s.check(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	for _, p := range s.ports() {
		if p.addr == "" {
			continue
		}
		l, err := net.Listen("tcp", p.addr)
		if err != nil {
			return fmt.Errorf("%s: %w; -%s names another address, or none", p.name, err, p.flag)
		}
		defer l.Close()
		if !s.c.kubernetes && !isLoopback(l.Addr().String()) {
			return fmt.Errorf("%s: -%s leads to %s, %s", p.name, p.flag, l.Addr(), notLoopback)
		}
		*p.l = l
	}
	s.ready = ready
	if err := s.srv.Run(ctx, s.at); ctx.Err() == nil {
		return err
	}
	return nil
}

// warning is printed at each start in development mode.
const warning = `*** DEVELOPMENT ONLY: any program on this machine gets a certificate for any name that it gives as
*** its token, without proof. Use -kubernetes, or another authn.Authenticator, for everything else.`

// announce says where everything is.
func (s *server) announce(out io.Writer) {
	if !s.c.kubernetes {
		fmt.Fprintln(out, warning)
	}
	const line = "%-19s %s\n"
	fmt.Fprintf(out, line, "trust domain:", s.c.ca.TrustDomain)
	fmt.Fprintf(out, line, "CA:", s.ca.where)
	fmt.Fprintf(out, line, "roots in PEM:", s.c.rootsFile())
	fmt.Fprintf(out, line, "audit log:", s.c.auditLog)
	for _, p := range s.ports() {
		if *p.l != nil {
			fmt.Fprintf(out, line, p.name+":", p.scheme+"://"+(*p.l).Addr().String()+p.path)
		}
	}
}
