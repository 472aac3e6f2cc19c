// Linkerd-proxy is a proxy beside a workload of a Linkerd mesh: it obtains the workload's certificate from the mesh's
// identity service, and carries HTTP by mutual TLS between its application and other workloads, both ways.
//
//	linkerd-proxy -app 127.0.0.1:8080 \
//		-route voting.emojivoto:80=10.1.2.3:4143=voting.emojivoto.serviceaccount.identity.linkerd.cluster.local
//
// Environment variables configure the identity, as an injector sets them; -help lists them. Flags set the ports and
// the routes. For a request without a route, the proxy asks the mesh's destination service if the environment names
// one. Other requests go to the address in their Host without TLS if -plaintext is set, and otherwise get 502. If the
// environment names no workload, the proxy has no identity, and forwards without TLS both ways. The admin port
// answers /ready, /live and /metrics; it is on loopback, so for the kubelet set -admin to an address of the pod.
//
// "linkerd-proxy inject" is the webhook that gives the proxies in pods an identity; its -h lists its flags, and
// -install kubernetes prints its objects.
//
// Package linkerdproxy implements the identity. The forwarding is part of this example; README.md has its limits.
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

//go:embed install.yaml
var manifest string

func main() {
	program.Main("linkerd-proxy", func(ctx context.Context) error {
		if args := os.Args[1:]; len(args) > 0 && args[0] == "inject" {
			return runInjector(ctx, args[1:], os.Stdout, os.Stderr)
		}
		return run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	})
}

// options are the flags of the program.
type options struct {
	app, inbound, outbound, admin string
	opaque, clientID, verbose     bool
	plaintext, anonymous          bool
	routes                        map[string]endpoint // by authority
}

// groups are the groups of flags in -h.
var groups = []program.FlagGroup{
	{Title: "Where it listens", Flags: "inbound outbound admin"},
	{Title: "The application", Flags: "app opaque client-id"},
	{Title: "Where requests go", Flags: "route plaintext anonymous-after-expiry"},
}

// run is the program. It returns nil after a signal. It writes the address of each port to out, a line each.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	o := options{routes: map[string]endpoint{}}
	fs := flag.NewFlagSet("linkerd-proxy", flag.ContinueOnError)
	fs.StringVar(&o.app, "app", "", "`host:port` of the application, for inbound connections")
	fs.StringVar(&o.inbound, "inbound", "0.0.0.0:4143", "`address` for inbound connections")
	fs.StringVar(&o.outbound, "outbound", "127.0.0.1:4140",
		"`address` for the requests of the application; empty for none")
	fs.StringVar(&o.admin, "admin", "127.0.0.1:4191", "`address` of /ready, /live and /metrics")
	fs.BoolVar(&o.opaque, "opaque", false, "the application does not speak HTTP: copy bytes")
	fs.BoolVar(&o.clientID, "client-id", false,
		"tell the application the client's identity, in the header l5d-client-id")
	fs.BoolVar(&o.plaintext, "plaintext", false,
		"send requests that neither a route nor the destination service knows to the address in their Host, "+
			"without TLS")
	fs.BoolVar(&o.anonymous, "anonymous-after-expiry", false,
		"go on without a client certificate once that of the workload has expired. "+
			"DANGER: servers then do not know who calls, and one that lets anonymous clients in gives them no less "+
			"than before")
	fs.BoolVar(&o.verbose, "v", false, "log more")
	fs.Func("route", "`HOST:PORT=ADDRESS[=IDENTITY]`: where requests for a host go, and who must be there; may be "+
		"repeated", o.route)
	(&program.Manifest{Text: manifest}).Register(fs)
	if err := program.Parse(fs, args, out, program.Help{Groups: groups,
		More: func(w io.Writer) error { return linkerdproxy.WriteEnviron(w, false) }}); err != nil {
		return err
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	return o.serve(ctx, environ, out, slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level})))
}

// route parses a value of -route.
func (o *options) route(text string) error {
	parts := strings.SplitN(text, "=", 3)
	to := authority(parts[0])
	if len(parts) < 2 || to == "" || slices.Contains(parts, "") { // an empty identity would mean plaintext
		return errors.New("want HOST:PORT=ADDRESS or HOST:PORT=ADDRESS=IDENTITY")
	}
	if _, twice := o.routes[to]; twice {
		return fmt.Errorf("there is another route for %s", to)
	}
	e := endpoint{addr: parts[1]}
	if len(parts) == 3 {
		e.identity = parts[2]
	}
	o.routes[to] = e
	return nil
}

// authority returns a Host with its port in canonical form: lower case, no dots at the end, and IPv4 addresses as
// such. Otherwise another spelling could select another route, or none. It returns "" for a Host that a dialer or
// resolver could read as another spelling: a port that is no number, or numbers that are no address.
func authority(host string) string {
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = strings.Trim(host, "[]"), ""
	}
	n, err := strconv.ParseUint(cmp.Or(port, "80"), 10, 16)
	name = strings.TrimRight(strings.ToLower(name), ".")
	ip, noIP := netip.ParseAddr(name)
	switch {
	case err != nil, ip.Zone() != "", noIP != nil && !slices.ContainsFunc(strings.Split(name, "."), isName):
		return ""
	case noIP == nil:
		name = ip.Unmap().String()
	}
	return net.JoinHostPort(name, strconv.FormatUint(n, 10))
}

// isName reports whether a part of a name is no number; "0x7f" is a number.
func isName(part string) bool {
	_, err := strconv.ParseUint(cmp.Or(part, "0"), 0, 64)
	return err != nil
}

// serve runs the proxy until ctx is done or a part of it fails.
func (o *options) serve(ctx context.Context, environ []string, out io.Writer, log *slog.Logger) (failed error) {
	env, err := linkerdproxy.FromEnviron(environ, log)
	if err != nil {
		return program.UsageError{Err: err}
	}
	env.AnonymousAfterExpiry = o.anonymous
	var id *linkerdproxy.Identity
	if env.Name != "" {
		if id, err = linkerdproxy.New(env.Config); err != nil {
			return err
		}
	} else {
		log.Warn("no variable names the workload: the proxy has no identity, and forwards without TLS both ways")
		for host, e := range o.routes {
			if e.identity != "" {
				return program.Misused("-route %s: a proxy without an identity cannot verify that of %s", host, e.addr)
			}
		}
	}
	parts := program.NewGroup(ctx)
	defer parts.Stop()
	var destinations *linkerdproxy.Destinations
	if env.Destination.Addr != "" {
		if destinations, err = linkerdproxy.NewDestinations(parts.Context(), id, env.Destination, log); err != nil {
			return err
		}
	}
	_, portText, _ := net.SplitHostPort(o.app)
	port, _ := strconv.Atoi(portText)
	p, err := newProxy(config{
		name: env.Name, identity: id, anonymous: o.anonymous, application: o.app, opaque: o.opaque,
		clientID: o.clientID, logger: log,
		requireTLS: slices.Contains(env.RequireTLS, port), requireIdentity: slices.Contains(env.RequireIdentity, port),
		route: func(ctx context.Context, host string) (endpoint, error) { return o.find(ctx, destinations, host) },
	})
	if err != nil {
		return program.UsageError{Err: err}
	}

	listen := func(name, address string, serve func(context.Context, net.Listener) error) error {
		if address == "" {
			return nil
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("-%s: %w", name, err)
		}
		fmt.Fprintf(out, "%s: %s\n", name, l.Addr())
		parts.Go(name, func(ctx context.Context) error { return serve(ctx, l) })
		return nil
	}
	var probes http.Handler
	if id != nil {
		probes = id.Handler(p)
	} else if probes, err = health.New(health.Part{Name: "proxy", Source: p}); err != nil {
		return err
	}
	err = listen("admin", o.admin, func(ctx context.Context, l net.Listener) error {
		p.listens(l)
		return (&unixsocket.Server{Listener: l, Handler: probes, Logger: log}).Run(ctx)
	})
	if err == nil && o.app != "" {
		err = listen("inbound", o.inbound, p.serveInbound)
	}
	if err == nil {
		err = listen("outbound", o.outbound, p.serveOutbound)
	}
	if err != nil {
		return err
	}
	if id != nil {
		parts.Go("identity", id.Run)
	}
	return parts.Wait()
}

// find returns the endpoint for a host: from a route, from the destination service unless that is nil, or the host
// itself.
func (o *options) find(ctx context.Context, destinations *linkerdproxy.Destinations, host string) (endpoint, error) {
	if e, ok := o.routes[host]; ok {
		return e, nil
	}
	why := errors.New("-route names none")
	if destinations != nil {
		ctx, cancel := context.WithTimeout(ctx, dialTime)
		defer cancel()
		all, err := destinations.Endpoints(ctx, host)
		if err == nil {
			e := all[rand.IntN(len(all))] // the choice is no secret
			return endpoint{e.Addr.String(), e.Identity, e.ServerName}, nil
		}
		if why = err; !errors.Is(err, fs.ErrNotExist) {
			return endpoint{}, err // its endpoints may have identities
		}
	}
	if o.plaintext {
		return endpoint{addr: host}, nil
	}
	return endpoint{}, fmt.Errorf("%w, and -plaintext is not set", why)
}
