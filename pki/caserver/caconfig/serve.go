package caconfig

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
)

const (
	trusting    = "the name in any token is trusted"
	notLoopback = "not on loopback (127.0.0.1, ::1 or localhost); without -kubernetes, " + trusting
)

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
	a, err := c.Open(ctx, log)
	if err != nil {
		return err
	}
	defer a.Close()
	at := caserver.Listeners{LinkerdPlaintext: c.linkerdPlaintext}
	o := caserver.Options{
		CA: a.CA, ID: c.ServerID, Names: c.names(), RootsFile: c.RootsFile,
		Status: a.WriteStatus, Ready: func() { ready(a, at) }, Logger: log,
	}
	check, err := c.setAPIs(&o)
	if err != nil {
		return err
	}
	server, err := caserver.New(o)
	if err != nil {
		return err
	}
	if err := check(ctx); err != nil && ctx.Err() == nil { // before a caller depends on it
		return err
	}
	for _, p := range []port{
		{"Istio's API", "istio-addr", c.istioAddr, &at.Istio},
		{"Linkerd's API", "linkerd-addr", c.linkerdAddr, &at.Linkerd},
		{"bundle endpoint", "bundle-addr", c.bundleAddr, &at.Bundle},
		{"metrics, health", "admin-addr", c.adminAddr, &at.Admin},
	} {
		if p.addr == "" {
			continue
		}
		l, err := c.listen(p)
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

// setAPIs sets the certificate APIs in o. It returns a function that asks whether the server has the rights that
// it needs in the cluster.
func (c *Config) setAPIs(o *caserver.Options) (check func(context.Context) error, err error) {
	tokens, proxies := caserver.InsecureTokens{TrustDomain: c.CA.TrustDomain}, c.Linkerd
	proxies.Review = tokens.Review
	o.Istio, check = &istioca.Options{Authenticator: tokens}, func(context.Context) error { return nil }
	if c.Kubernetes {
		if check, err = c.cluster.Set(o.Istio, &proxies); err != nil {
			return nil, err
		}
	}
	if c.keepDNSNames {
		o.Istio.Policy = istioca.KeepDNSNames
	}
	if c.linkerdAddr != "" {
		o.Linkerd = &proxies
	}
	return check, nil
}

// port is an address that the server listens on, and the flag that names it.
type port struct {
	name, flag, addr string
	at               *net.Listener
}

// listen opens a port.
func (c *Config) listen(p port) (net.Listener, error) {
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; -%s names another address, or none", p.name, err, p.flag)
	}
	if addr := l.Addr().String(); !c.Kubernetes && !isLoopback(addr) {
		l.Close()
		return nil, fmt.Errorf("%s: -%s leads to %s, %s", p.name, p.flag, addr, notLoopback)
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
	if name, err := c.Linkerd.Mesh.Certifier(); err == nil {
		names = append(names, name)
	}
	slices.Sort(names)
	sans := []pki.SAN{{Type: pki.IP, Value: string(net.IPv4(127, 0, 0, 1).To4())}, {Type: pki.IP, Value: string(net.IPv6loopback)}}
	for _, name := range slices.Compact(names) {
		sans = append(sans, pki.DNSSAN(name))
	}
	return sans
}
