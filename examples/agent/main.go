// Agent is Istio's agent for the identity of a workload: it has the same environment variables, finds the identity in
// the same places, serves it to an Envoy by SDS, forwards the Envoy's configuration, and writes certificates to files.
// An Envoy runs beside it, with the configuration that -bootstrap writes. With the commands of Istio's agent (proxy, wait,
// request) it runs the Envoy, too, in the pods of Istio's injector as they are.
//
//	go run ./examples/agent -demo
//
// shows it at work, with a CA and two workloads, and prints the address of a page on which the certificates rotate. Without
// variables, it takes the identity demo/web from the CA in development mode of examples/ca on the same machine.
//
// The package sds/istioagent is all of it but the flags, the logs and the port for operators; README.md has the
// variables, and what differs from Istio's agent.
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
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/examples/program"
	"github.com/svidkit/svidkit/sds/istioagent"
	"github.com/svidkit/svidkit/sds/statuspage"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return
	}
	fmt.Fprintln(os.Stderr, "agent:", err)
	if _, ok := errors.AsType[program.UsageError](err); ok {
		os.Exit(2)
	}
	os.Exit(1)
}

// version is that of the module, with the revision of its source and the version of Go.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	var revision, modified string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = ", revision " + s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = " (modified)"
		}
	}
	return info.Main.Version + revision + modified + ", " + info.GoVersion
}

// options are the flags: what is not in the environment of Istio's agent.
type options struct {
	admin, logFormat, root string
	allowFiles             []string
	bootstrap, demo        bool
	version                bool
	duration               time.Duration
}

// run is the program. It returns nil when a signal ends it, or the time of -for.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	var o options
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // or it prints all flags and variables for each error
	flags.StringVar(&o.admin, "admin", "127.0.0.1:15020", "`address` of the status page, health and metrics; empty: none")
	flags.StringVar(&o.logFormat, "log-format", "text", "`text` or json")
	flags.StringVar(&o.root, "root", "", "`folder` to which relative paths are relative, those of the variables too (default: the working folder)")
	flags.Func("allow-files", "`file or folder` that Envoy may name as file-cert: and file-root:, beside those that it may anyway; may be repeated", func(name string) error {
		if name == "" {
			return errors.New("a file or a folder is needed")
		}
		o.allowFiles = append(o.allowFiles, name)
		return nil
	})
	flags.BoolVar(&o.bootstrap, "bootstrap", false, "write a configuration for an Envoy to standard output, and end")
	flags.BoolVar(&o.demo, "demo", false, "run a CA, two agents and two workloads in a temporary folder, without the environment")
	flags.Func("for", "end after this `time`, such as 1m (default: when a signal comes)", func(text string) (err error) {
		o.duration, err = time.ParseDuration(text)
		return err
	})
	flags.BoolVar(&o.version, "version", false, "print the version, and end")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(errOut, "Usage of agent:\n\n")
		flags.SetOutput(errOut)
		flags.PrintDefaults()
		fmt.Fprint(errOut, "\nEnvironment variables:\n\n")
		return errors.Join(err, istioagent.WriteHelp(errOut, false))
	case err != nil:
		return program.Misused("%w; -h lists the flags", err)
	case o.version:
		fmt.Fprintln(out, "agent", version())
		return nil
	case flags.NArg() > 0 && flags.Arg(0) != "proxy":
		return command(ctx, flags.Args(), out, errOut)
	}
	p := new(proxy)
	if flags.NArg() > 0 {
		var err error
		if p, err = newProxy(flags.Args()[1:], &o, out, errOut); err != nil {
			return err
		}
	}
	if _, _, err := net.SplitHostPort(o.admin); o.admin != "" && err != nil {
		return program.Misused("-admin: %w", err)
	}
	handler := slog.Handler(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: p.level}))
	switch o.logFormat {
	case "text":
	case "json":
		handler = slog.NewJSONHandler(errOut, &slog.HandlerOptions{Level: p.level})
	default:
		return program.Misused("-log-format is %q, and has to be text or json", o.logFormat)
	}
	if o.duration < 0 {
		return program.Misused("-for is %v, and may not be negative", o.duration)
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx) // and no deadline, which a dial may see before ctx.Err has it
		defer cancel()
		defer time.AfterFunc(o.duration, cancel).Stop()
	}
	if o.demo {
		return demo(ctx, o, 20*time.Second, out)
	}
	cfg, err := istioagent.FromEnvironment(environ)
	if err != nil {
		return program.UsageError{Err: err}
	}
	cfg.Root, cfg.Logger = o.root, slog.New(handler)
	cfg.AllowFiles = append(cfg.AllowFiles, o.allowFiles...)
	choice, err := istioagent.Choose(ctx, cfg)
	if err == nil && choice.Origin == istioagent.CA {
		if cfg, err = development(cfg, environ); err == nil {
			choice, err = istioagent.Choose(ctx, cfg)
		}
	}
	if err != nil {
		return err
	}
	if p.role != "" {
		status, err := p.configure(&cfg, environ)
		if err != nil {
			return err
		}
		given := false
		flags.Visit(func(f *flag.Flag) { given = given || f.Name == "admin" })
		if !given {
			o.admin = status
		}
	}
	return serve(ctx, cfg, choice, o, p, out, errOut)
}

// serve runs an agent, and the port for operators.
func serve(ctx context.Context, cfg istioagent.Config, choice istioagent.Choice, o options, p *proxy, out, errOut io.Writer) error {
	agent, err := istioagent.New(cfg, choice)
	if err != nil {
		return err
	}
	if o.bootstrap {
		defer agent.Close()
		return agent.Bootstrap(out)
	}
	stop, err := admin(agent, p, o.admin, out)
	if err != nil {
		return errors.Join(err, agent.Close())
	}
	defer stop() // after the agent, so that it says that the agent drains
	fmt.Fprintf(out, "secrets for Envoy: unix:%s\n", choice.Socket)
	return p.run(ctx, agent, errOut)
}

// admin serves the port for operators until stop is called. It prints its address.
func admin(agent *istioagent.Agent, p *proxy, address string, out io.Writer) (stop func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	parts := []statuspage.Part{{Name: "origin", Source: agent}}
	for name, source := range agent.Parts() {
		parts = append(parts, statuspage.Part{Name: name, Source: source})
	}
	page, err := statuspage.New("agent", parts...)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("-admin: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", page)
	mux.Handle("/app-health/", &p.app)
	mux.Handle("/app-lifecycle/", &p.app)
	mux.Handle("GET /healthz/ready", p.serveReady(agent))
	mux.Handle("GET /healthz/live", agent)
	mux.Handle("GET /metrics", p.serveMetrics(agent))
	mux.Handle("GET /stats/prometheus", p.serveMetrics(agent))
	mux.Handle("/drain", agent)
	mux.Handle("/quitquitquit", agent)
	// Its connections count in the budget of the process, so that they leave descriptors for the sockets and the renewal.
	server := &unixsocket.Server{Listener: l, Handler: program.Local(mux)}
	ctx, end := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Run(ctx) })
	fmt.Fprintf(out, "status page: http://%s/ (also /healthz/ready, /healthz/live and /metrics)\n", l.Addr())
	return func() {
		_ = page.Close()
		end()
		wg.Wait()
	}, nil
}
