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
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
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

// options are the flags.
type options struct {
	file, socket, admin, logFormat string
	demo, version                  bool
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
	flags.StringVar(&o.admin, "admin", "127.0.0.1:15024", "`address` of /ready, /live and /metrics; empty: none")
	flags.StringVar(&o.logFormat, "log-format", "text", "`text` or json")
	flags.BoolVar(&o.demo, "demo", false, "run with a CA and a file of its own in a temporary folder")
	flags.DurationVar(&o.duration, "for", 0, "end after this `time`, such as 1m (default: when a signal comes)")
	flags.BoolVar(&o.version, "version", false, "print the version, and end")
	flags.TextVar(&o.td, "trust-domain", spiffe.TrustDomain{}, "`name` of the trust domain; needed but with spire:")
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
		info, _ := debug.ReadBuildInfo()
		fmt.Fprintln(out, "workload-agent", info.Main.Version, info.GoVersion)
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
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if o.duration > 0 {
		defer time.AfterFunc(o.duration, cancel).Stop() // and no deadline, which a dial may see before ctx.Err has it
	}
	if o.demo {
		return demo(ctx, o)
	}
	from, err := o.origin(ctx)
	if err != nil {
		return usageError{fmt.Errorf("-ca: %w", err)}
	}
	return serve(ctx, o, from)
}

// demoFile is for the user of this process.
const demoFile = `{
  "workloads": [
    {"match": {"uid": %d}, "identities": [{"id": "spiffe://demo.test/web", "audiences": ["*"]}]}
  ]
}
`

// demo runs the agent with a CA and a file in a temporary folder.
func demo(ctx context.Context, o options) error {
	dir, err := os.MkdirTemp("", "workload-agent")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	o.td, o.file, o.socket = spiffe.MustParseTrustDomain("demo.test"), filepath.Join(dir, "workloads.json"), filepath.Join(dir, "agent.sock")
	o.ca.from, o.ca.more["create"] = "dir:"+filepath.Join(dir, "ca"), "true"
	if err := os.WriteFile(o.file, fmt.Appendf(nil, demoFile, os.Getuid()), 0o600); err != nil {
		return err
	}
	from, err := o.origin(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.out, "edit: %s\ntry: SPIFFE_ENDPOINT_SOCKET=unix://%s go run ./examples/svid fetch -dir /tmp/web\n", o.file, o.socket)
	return serve(ctx, o, from)
}

// serve runs the agent until ctx is done or a part of it fails.
func serve(ctx context.Context, o options, from *origin) error {
	from.File, from.TrustDomain, from.Logger = o.file, o.td, o.log
	agent, err := workloadagent.New(from.Config)
	if err != nil {
		return err
	}
	defer agent.Close()
	socket := &unixsocket.Server{Path: o.socket, DirMode: 0o755, SocketMode: 0o666, Handler: agent, Logger: o.log}
	if err := socket.Listen(); err != nil {
		return err
	}
	parts := append(from.run, agent.Run, socket.Run)
	if o.admin != "" {
		l, err := net.Listen("tcp", o.admin)
		if err != nil {
			return fmt.Errorf("-admin: %w", err)
		}
		probes, err := health.New(health.Part{Name: "agent", Source: agent}, health.Part{Name: "identities", Source: from.Source.(report.Reporter)})
		if err != nil {
			return err
		}
		fmt.Fprintf(o.out, "health: http://%s/ready (also /live and /metrics)\n", l.Addr())
		// Its connections count in the budget of the process, so that they leave descriptors for the socket and the renewal.
		parts = append(parts, (&unixsocket.Server{Listener: l, Handler: probes, Logger: o.log}).Run)
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var wg sync.WaitGroup
	for _, part := range parts {
		wg.Go(func() {
			if err := part(ctx); err != nil {
				fail(err)
			}
		})
	}
	if agent.Ready(ctx) == nil {
		fmt.Fprintf(o.out, "ready: SPIFFE_ENDPOINT_SOCKET=unix://%s\n", o.socket)
	}
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
