// Agent replaces Istio's agent: it reads the same environment variables, obtains the workload's identity from the
// same places, serves it to Envoy over SDS, forwards Envoy's configuration, and writes certificates to files. An
// Envoy beside it uses the configuration that -bootstrap writes. With the commands of Istio's agent (proxy, wait,
// request) it also runs Envoy, in pods of Istio's injector as they are.
//
//	go run ./examples/agent -demo
//
// starts a CA and two workloads, and prints the address of a page on which you can watch the certificates rotate.
// Without variables, the agent takes the identity demo/web from the examples/ca in development mode on the same
// machine.
//
// Package sds/istioagent does the work; this program adds flags, logs and a port for operators. README.md lists the
// variables, and the differences from Istio's agent.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/sds/istioagent"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

//go:embed install.yaml
var manifest string

func main() {
	program.Main("agent", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
	})
}

// options are the flags: settings that Istio's agent has no environment variable for.
type options struct {
	program.Service
	admin, root     string
	allowFiles      []string
	bootstrap, demo bool
}

// run is the program. It returns nil after a signal, or after the duration of -for.
func run(ctx context.Context, args, environ []string, out, errOut io.Writer) (err error) {
	var o options
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	flags.StringVar(&o.admin, "admin", "127.0.0.1:15020",
		"`address` of the status page, health and metrics; empty: none")
	flags.StringVar(&o.root, "root", "", "`directory` to which relative paths are relative, those of the variables "+
		"too (default: the working directory)")
	flags.Func("allow-files", "`file or directory` that Envoy may name as file-cert: and file-root:, beside those "+
		"that it may anyway; may be repeated", func(name string) error {
		if name == "" {
			return errors.New("a file or a directory is needed")
		}
		o.allowFiles = append(o.allowFiles, name)
		return nil
	})
	flags.BoolVar(&o.bootstrap, "bootstrap", false, "write a configuration for an Envoy to standard output, and end")
	flags.BoolVar(&o.demo, "demo", false, "run a CA, two agents and two workloads in a temporary directory, without "+
		"the environment")
	o.Register(flags)
	(&program.Manifest{Text: manifest}).Register(flags)
	err = program.ParseFlags(flags, args, out, program.Help{
		Args: "[proxy sidecar|proxy router|wait|request]",
		Doc: "Without a word it is the agent alone; the words are those of Istio's agent, and each explains " +
			"itself with -h.",
		Groups: []program.FlagGroup{{Title: "The agent", Flags: "admin root allow-files bootstrap"}},
		More:   func(w io.Writer) error { return istioagent.WriteHelp(w, false) },
	})
	if err != nil {
		return err
	}
	if flags.NArg() > 0 && flags.Arg(0) != "proxy" {
		return command(ctx, flags.Args(), out)
	}
	p := new(proxy)
	if flags.NArg() > 0 {
		if p, err = newProxy(flags.Args()[1:], &o, out); err != nil {
			return err
		}
	}
	if _, _, err := net.SplitHostPort(o.admin); o.admin != "" && err != nil {
		return program.Misused("-admin: %w", err)
	}
	if o.demo {
		o.Demo(out, 3*time.Minute)
	}
	ctx, log, end, err := o.Begin(ctx, errOut, p.level)
	if err != nil {
		return err
	}
	defer end()
	defer func() { err = o.Answer(log, err) }()
	if o.demo {
		return demo(ctx, o, 20*time.Second, out)
	}
	cfg, err := istioagent.FromEnvironment(environ)
	if err != nil {
		return program.UsageError{Err: err}
	}
	cfg.Root, cfg.Logger = o.root, log
	cfg.AllowFiles = append(cfg.AllowFiles, o.allowFiles...)
	if cfg, err = istioagent.Choose(ctx, cfg); err == nil && cfg.Origin == "ca" {
		if cfg, err = development(cfg, environ); err == nil {
			cfg, err = istioagent.Choose(ctx, cfg)
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
	return serve(ctx, cfg, o, p, out, errOut)
}

// serve runs an agent and the port for operators.
func serve(ctx context.Context, cfg istioagent.Config, o options, p *proxy, out, errOut io.Writer) error {
	agent, err := istioagent.New(cfg)
	if err != nil {
		return err
	}
	if o.bootstrap {
		defer agent.Close()
		return agent.Bootstrap(out)
	}
	if p.role != "" && o.LogFormat == "json" {
		lines := &program.Lines{Log: cfg.Logger, To: errOut}
		defer lines.Write([]byte{'\n'}) // completes a last line without one
		out, errOut = lines, lines
	}
	stop, err := admin(agent, p, o.admin, out, cfg.Logger)
	if err != nil {
		return errors.Join(err, agent.Close())
	}
	defer stop() // stop the port last, so that it reports that the agent drains
	fmt.Fprintf(out, "secrets for Envoy: unix:%s\n", cfg.Socket)
	return p.run(ctx, agent, errOut)
}

// admin serves the port for operators until stop is called. It prints its address.
func admin(
	agent *istioagent.Agent, p *proxy, address string, out io.Writer, log *slog.Logger,
) (stop func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	var parts []statuspage.Part
	for name, source := range agent.Parts() {
		parts = append(parts, statuspage.Part{Name: name, Source: source})
	}
	parts[0].Links = []string{"metrics", "healthz/ready", "healthz/live"}
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
	// These connections count in the process's budget, which leaves descriptors for the sockets and the renewal.
	server := &unixsocket.Server{Listener: l, Handler: program.Local(mux), Logger: log}
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
