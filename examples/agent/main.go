// Agent is Istio's agent for the identity of a workload: it has the same environment variables, finds the identity in
// the same places, serves it to an Envoy by SDS, forwards the Envoy's configuration, and writes certificates to files.
// It does not start Envoy: that runs beside it, with the configuration that -bootstrap writes.
//
//	go run ./examples/agent -demo
//
// shows it at work, with a CA and two workloads, and prints the address of a page on which the certificates rotate.
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
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/sds/istioagent"
	"github.com/svidkit/svidkit/sds/statuspage"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

// options are the flags: what is not in the environment of Istio's agent.
type options struct {
	admin, logFormat, root string
	allowFiles             []string
	bootstrap, demo        bool
	duration               time.Duration
}

// run is the program. It returns nil when a signal ends it, or the time of -for.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) error {
	var o options
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	flags.SetOutput(errOut)
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
	flags.DurationVar(&o.duration, "for", 0, "end after this `time`; 0: when a signal comes")
	flags.Usage = func() {
		fmt.Fprint(errOut, "Usage of agent:\n\n")
		flags.PrintDefaults()
		fmt.Fprint(errOut, "\nEnvironment variables:\n\n")
		_ = istioagent.WriteHelp(errOut, false) // there is no better place to say that it failed
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q is not understood; flags begin with a hyphen", flags.Arg(0))
	}
	handler := slog.Handler(slog.NewTextHandler(errOut, nil))
	switch o.logFormat {
	case "text":
	case "json":
		handler = slog.NewJSONHandler(errOut, nil)
	default:
		return fmt.Errorf("-log-format is %q, and has to be text or json", o.logFormat)
	}
	if o.duration < 0 {
		return fmt.Errorf("-for is %v, and may not be negative", o.duration)
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
		return err
	}
	cfg.Root, cfg.Logger = o.root, slog.New(handler)
	cfg.AllowFiles = append(cfg.AllowFiles, o.allowFiles...)
	return serve(ctx, cfg, o, out)
}

// serve runs an agent, and the port for operators.
func serve(ctx context.Context, cfg istioagent.Config, o options, out io.Writer) error {
	choice, err := istioagent.Choose(ctx, cfg)
	if err != nil {
		return err
	}
	agent, err := istioagent.New(cfg, choice)
	if err != nil {
		return err
	}
	if o.bootstrap {
		defer agent.Close()
		return agent.Bootstrap(out)
	}
	stop, err := admin(agent, o.admin, out)
	if err != nil {
		return errors.Join(err, agent.Close())
	}
	defer stop() // after the agent, so that it says that the agent drains
	return agent.Run(ctx)
}

// admin serves the port for operators until stop is called. It prints its address.
func admin(agent *istioagent.Agent, address string, out io.Writer) (stop func(), err error) {
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
	for _, path := range []string{"/healthz/ready", "/healthz/live", "/metrics", "/stats/prometheus"} {
		mux.Handle("GET "+path, agent)
	}
	mux.Handle("/drain", agent)
	mux.Handle("/quitquitquit", agent)
	server := &http.Server{Handler: local(mux), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	fmt.Fprintf(out, "status page: http://%s/ (also /healthz/ready, /healthz/live and /metrics)\n", l.Addr())
	return func() {
		_ = page.Close()
		_ = server.Close()
		wg.Wait()
	}, nil
}

// local serves h, and refuses requests over loopback for another host: a page in a browser on this machine could make
// them.
func local(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if loopback.Reached(r) && !loopback.Host(r.Host) {
			http.Error(w, "this server is localhost; it has no other name over loopback", http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}
