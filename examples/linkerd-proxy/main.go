// Linkerd-proxy is a proxy beside a workload, with the identity of a member of a Linkerd mesh: it takes its certificate from
// the mesh's identity service, carries the HTTP of its application to other workloads by mutual TLS, and theirs to it.
//
//	go run ./examples/linkerd-proxy -demo
//
// The identity is configured by environment variables, as an injector sets them; -help lists them. Flags say where to listen
// and what to forward:
//
//	linkerd-proxy -app 127.0.0.1:8080 -route voting.emojivoto:80=10.1.2.3:4143=voting.emojivoto.serviceaccount.identity.linkerd.cluster.local
//
// What has no route goes to the address in its Host, without TLS. The admin port answers /ready, /live and /metrics.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/caclient/linkerd/linkerdproxy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr, nil); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "linkerd-proxy:", err)
		os.Exit(1)
	}
}

// options are the flags of the program.
type options struct {
	app, inbound, outbound, admin string
	opaque, clientID, verbose     bool
	routes                        map[string]linkerdproxy.Endpoint // by host:port
}

// addresses are where a proxy listens; inbound and outbound may be nil.
type addresses struct{ inbound, outbound, admin net.Addr }

// run is the program. It returns nil when a signal ends it. started, if it is not nil, is told where the proxy listens.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer, started func(addresses)) error {
	o := options{routes: map[string]linkerdproxy.Endpoint{}}
	fs := flag.NewFlagSet("linkerd-proxy", flag.ContinueOnError)
	fs.SetOutput(errOut)
	fs.StringVar(&o.app, "app", "", "`host:port` of the application, for inbound connections")
	fs.StringVar(&o.inbound, "inbound", "0.0.0.0:4143", "`address` for inbound connections")
	fs.StringVar(&o.outbound, "outbound", "127.0.0.1:4140", "`address` for the requests of the application; empty for none")
	fs.StringVar(&o.admin, "admin", "0.0.0.0:4191", "`address` of /ready, /live and /metrics")
	fs.BoolVar(&o.opaque, "opaque", false, "the application does not speak HTTP: copy bytes")
	fs.BoolVar(&o.clientID, "client-id", false, "tell the application the client's identity, in the header l5d-client-id")
	fs.BoolVar(&o.verbose, "v", false, "log more")
	fs.Func("route", "`HOST:PORT=ADDRESS[=IDENTITY]`: where requests for a host go, and who must be there; may be repeated", o.route)
	show := fs.Bool("demo", false, "show a mesh of two proxies in a few seconds, and end")
	fs.Usage = func() {
		fmt.Fprintln(errOut, "Usage: linkerd-proxy [flags]")
		fs.PrintDefaults()
		fmt.Fprintln(errOut, "\nEnvironment:")
		_ = linkerdproxy.WriteEnviron(errOut)
	}
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if *show {
		_, err := demo(ctx, out)
		return err
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	return o.serve(ctx, environ, slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level})), started)
}

// route reads a value of -route.
func (o *options) route(text string) error {
	parts := strings.SplitN(text, "=", 3)
	if len(parts) < 2 || parts[0] == "" || parts[1] == "" {
		return errors.New("want HOST:PORT=ADDRESS or HOST:PORT=ADDRESS=IDENTITY")
	}
	e := linkerdproxy.Endpoint{Addr: parts[1]}
	if len(parts) == 3 {
		e.Identity = parts[2]
	}
	o.routes[authority(parts[0])] = e
	return nil
}

// authority returns a Host with its port.
func authority(host string) string {
	if _, _, err := net.SplitHostPort(host); err != nil {
		return net.JoinHostPort(strings.Trim(host, "[]"), "80")
	}
	return host
}

// serve runs the proxy until ctx is done or a part of it fails.
func (o *options) serve(ctx context.Context, environ []string, log *slog.Logger, started func(addresses)) (failed error) {
	env, err := linkerdproxy.FromEnviron(environ, log)
	if err != nil {
		return err
	}
	id, err := linkerdproxy.New(env.Config)
	if err != nil {
		return err
	}
	_, portText, _ := net.SplitHostPort(o.app)
	port, _ := strconv.Atoi(portText)
	proxy, err := linkerdproxy.NewProxy(linkerdproxy.ProxyConfig{
		Identity: id, Application: o.app, Opaque: o.opaque, ClientID: o.clientID, Logger: log,
		RequireTLS: slices.Contains(env.RequireTLS, port), RequireIdentity: slices.Contains(env.RequireIdentity, port),
		Route: func(_ context.Context, host string) (linkerdproxy.Endpoint, error) {
			if e, ok := o.routes[authority(host)]; ok {
				return e, nil
			}
			return linkerdproxy.Endpoint{Addr: authority(host)}, nil
		},
	})
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	start := func(f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				cancel(err)
			}
		})
	}
	var at addresses
	listen := func(address string, addr *net.Addr, serve func(context.Context, net.Listener) error) error {
		if address == "" {
			return nil
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		*addr = l.Addr()
		start(func(ctx context.Context) error { return serve(ctx, l) })
		return nil
	}
	admin := &http.Server{Handler: id.Handler(proxy), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	err = listen(o.admin, &at.admin, func(ctx context.Context, l net.Listener) error {
		defer context.AfterFunc(ctx, func() { _ = admin.Close() })()
		if err := admin.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	if err == nil && o.app != "" {
		err = listen(o.inbound, &at.inbound, proxy.ServeInbound)
	}
	if err == nil {
		err = listen(o.outbound, &at.outbound, proxy.ServeOutbound)
	}
	if err != nil {
		return err
	}
	start(id.Run)
	if started != nil {
		started(at)
	}
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
