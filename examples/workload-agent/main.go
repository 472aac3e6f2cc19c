// Workload-agent is an agent for the users of a machine: one file says which process may have which SPIFFE IDs, and the agent
// obtains them from a CA or from SPIRE's agent, and serves them by the SPIFFE Workload API, by SDS and as files.
//
//	go run ./examples/workload-agent -demo
//
// shows it at work, with a CA of its own. README.md has the whole format of the file, and a table of the selectors.
//
// The package spiffe/workloadagent is all of it but the choice of the CA, the flags, the logs and the port for operators.
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
	"github.com/svidkit/svidkit/sds/statuspage"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/workloadagent"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return
	}
	fmt.Fprintln(os.Stderr, "workload-agent:", err)
	if _, ok := errors.AsType[usageError](err); ok {
		os.Exit(2)
	}
	os.Exit(1)
}

// usageError says what is wrong with the flags.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func misused(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// version is that of the module, with the revision of its source and the version of Go.
func version() string {
	info, _ := debug.ReadBuildInfo()
	var revision string
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			revision = ", revision " + s.Value
		}
	}
	return info.Main.Version + revision + ", " + info.GoVersion
}

// options are the flags.
type options struct {
	file, socket, admin, logFormat string
	check, demo, version           bool
	duration                       time.Duration
	td                             spiffe.TrustDomain
	ca                             caOptions
	log                            *slog.Logger
	out                            io.Writer
}

// run is the program. It returns nil when a signal ends it, or the time of -for.
func run(ctx context.Context, args []string, out, errOut io.Writer) error {
	o := options{out: out}
	flags := flag.NewFlagSet("workload-agent", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // or it prints all flags for each error
	flags.StringVar(&o.file, "file", "/etc/svidkit/workloads.json", "`path` of the file that says who gets what")
	flags.StringVar(&o.socket, "socket", "/run/svidkit/agent.sock", "`path` of the socket of the Workload API and SDS, to which every user may connect")
	flags.StringVar(&o.admin, "admin", "127.0.0.1:15024", "`address` of the status page, health and metrics; empty: none")
	flags.StringVar(&o.logFormat, "log-format", "text", "`text` or json")
	flags.BoolVar(&o.check, "check", false, "say whether the file is good, and end")
	flags.BoolVar(&o.demo, "demo", false, "run with a CA and a file of its own in a temporary folder")
	flags.DurationVar(&o.duration, "for", 0, "end after this `time`, such as 1m (default: when a signal comes)")
	flags.BoolVar(&o.version, "version", false, "print the version, and end")
	flags.Func("trust-domain", "`name` of the trust domain; needed but with spire:", func(name string) (err error) {
		o.td, err = spiffe.ParseTrustDomain(name)
		return err
	})
	o.ca.register(flags)
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(errOut, "Usage of workload-agent:\n\n")
		flags.SetOutput(errOut)
		flags.PrintDefaults()
		return err
	case err != nil:
		return misused("%w; -h lists the flags", err)
	case o.version:
		fmt.Fprintln(out, "workload-agent", version())
		return nil
	case flags.NArg() > 0:
		return misused("%q is not understood; flags begin with a hyphen", flags.Arg(0))
	case o.duration < 0:
		return misused("-for is %v, and may not be negative", o.duration)
	}
	switch o.logFormat {
	case "text":
		o.log = slog.New(slog.NewTextHandler(errOut, nil))
	case "json":
		o.log = slog.New(slog.NewJSONHandler(errOut, nil))
	default:
		return misused("-log-format is %q, and has to be text or json", o.logFormat)
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx) // and no deadline, which a dial may see before ctx.Err has it
		defer cancel()
		defer time.AfterFunc(o.duration, cancel).Stop()
	}
	switch {
	case o.check:
		data, err := os.ReadFile(o.file)
		if err == nil {
			err = workloadagent.Check(data, o.td)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", o.file, err)
		}
		fmt.Fprintln(out, o.file, "is good")
		return nil
	case o.demo:
		return demo(ctx, o)
	}
	from, err := o.ca.source(ctx, &o)
	if err != nil {
		return err
	}
	return serve(ctx, o, from)
}

// serve runs the agent until ctx is done or a part of it fails.
func serve(ctx context.Context, o options, from *origin) (err error) {
	agent, err := workloadagent.New(workloadagent.Config{
		File: o.file, Source: from.source, TrustDomain: o.td, IssueJWTSVID: from.issue, ValidateJWTSVID: from.validate, Logger: o.log,
	})
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer agent.Close()
	defer fail(nil)
	start := func(name string, part func(context.Context) error) {
		wg.Go(func() {
			if err := part(ctx); err != nil {
				fail(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	server := &unixsocket.Server{Path: o.socket, DirMode: 0o755, SocketMode: 0o666, Handler: agent, Logger: o.log}
	if err := server.Listen(); err != nil {
		return err
	}
	start("socket", server.Run)
	if o.admin != "" {
		l, err := net.Listen("tcp", o.admin)
		if err != nil {
			return fmt.Errorf("-admin: %w", err)
		}
		handler, err := operators(agent, from)
		if err != nil {
			return err
		}
		fmt.Fprintf(o.out, "status page: http://%s/ (also /healthz/ready, /healthz/live and /metrics)\n", l.Addr())
		// Its connections count in the budget of the process, so that they leave descriptors for the socket and the renewal.
		start("status page", (&unixsocket.Server{Listener: l, Handler: handler, Logger: o.log}).Run)
	}
	for name, part := range from.parts {
		start(name, part)
	}
	start("agent", agent.Run)
	wg.Go(func() {
		if agent.Ready(ctx) == nil {
			fmt.Fprintf(o.out, "ready: SPIFFE_ENDPOINT_SOCKET=unix://%s\n", o.socket)
		}
	})
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// operators returns the handler of the port for operators.
func operators(agent *workloadagent.Agent, from *origin) (http.Handler, error) {
	parts := []statuspage.Part{{Name: "agent", Source: agent}, {Name: "identities", Source: from.source}}
	for name, source := range agent.Parts() {
		parts = append(parts, statuspage.Part{Name: name, Source: source})
	}
	var probed []health.Part
	for _, p := range parts {
		probed = append(probed, health.Part{Name: p.Name, Source: p.Source})
	}
	page, err := statuspage.New("workload-agent", parts...)
	if err != nil {
		return nil, err
	}
	probes, err := health.New(probed...)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/", page)
	for _, path := range []string{"/healthz/ready", "/healthz/live", "/metrics"} {
		mux.Handle("GET "+path, probes)
	}
	return mux, nil
}
