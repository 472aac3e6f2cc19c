// Workload-agent is an agent for the users of a machine: one file says which process may have which SPIFFE IDs. The
// agent obtains them from a CA or from SPIRE's agent, and serves them by the SPIFFE Workload API, by SDS and as
// files.
//
//	go run ./examples/workload-agent -demo
//
// runs it with its own CA. README.md documents the file's format and the selectors.
//
// Package sds/workloadagent does the work; this program adds the choice of the CA, flags, logs and the port for
// operators.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

//go:embed install.yaml
var manifest string

func main() {
	program.Main("workload-agent", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	})
}

// options are the flags.
type options struct {
	program.Service
	file, socket, admin, node, broker string
	td                                spiffe.TrustDomain
	brokerID                          spiffe.ID
	ca                                caOptions
	keys                              string // as of program.Keys; empty for the default
	algorithms                        spiffe.Algorithms
	log                               *slog.Logger
}

// groups are the groups of flags in -h.
var groups = []program.FlagGroup{
	{Title: "Where identities come from", Flags: "ca ca-roots ca-option token-file trust-domain keys"},
	{Title: "Who gets what", Flags: "file node socket"},
	{Title: "For brokers, which speak for workloads", Flags: "broker broker-id algorithms"},
	{Title: "For operators", Flags: "admin"},
}

// run is the program. It returns nil after a signal, or after the duration of -for.
func run(ctx context.Context, args []string, out, errOut io.Writer) (err error) {
	var o options
	flags := flag.NewFlagSet("workload-agent", flag.ContinueOnError)
	flags.StringVar(&o.file, "file", "/etc/svidkit/workloads.json", "`path` of the file that says who gets what")
	flags.StringVar(&o.socket, "socket", "/run/svidkit/agent.sock",
		"`path` of the socket of the Workload API and SDS, to which every user may connect")
	flags.StringVar(&o.admin, "admin", "127.0.0.1:15024",
		"`address` of the status page, /ready, /live and /metrics; empty: none")
	flags.TextVar(&o.td, "trust-domain", spiffe.TrustDomain{}, "`name` of the trust domain; needed but with spire:")
	flags.StringVar(&o.node, "node", "", "`name` of the Kubernetes node of this pod, for the selectors namespace, "+
		"account and labels; empty: the file has none of them")
	flags.StringVar(&o.broker, "broker", "", "`address` of the SPIFFE Broker API, for the brokers in the file: "+
		"unix:///PATH or tcp://HOST:PORT; empty: none")
	flags.TextVar(&o.brokerID, "broker-id", spiffe.ID{}, "SPIFFE `ID` of this agent, which brokers expect")
	flags.Func("keys", "`keys` of the identities: ecdsa-p256, ecdsa-p384, rsa-2048, rsa-3072, rsa-4096, ml-dsa-44 or "+
		"ml-dsa-65; or two with a comma, one of ML-DSA: then each has two certificates, and presents the one that the "+
		"peer can verify (default ecdsa-p256)", func(text string) (err error) {
		o.keys, err = program.Keys(text)
		return err
	})
	program.Algorithms(flags, &o.algorithms, "brokers, and the tokens that are validated here, may have")
	demo := flags.Bool("demo", false, "run with a CA and a file of its own in a temporary directory")
	o.Register(flags)
	o.ca.register(flags)
	(&program.Manifest{Text: manifest}).Register(flags)
	err = program.Parse(flags, args, out, program.Help{Groups: groups})
	if err != nil {
		return err
	}
	if err := o.checkBroker(); err != nil {
		return err
	}
	if *demo {
		o.Demo(out, 10*time.Minute)
	}
	ctx, log, end, err := o.Begin(ctx, errOut, slog.LevelInfo)
	if err != nil {
		return err
	}
	defer end()
	defer func() { err = o.Answer(log, err) }()
	o.log = log
	if *demo {
		dir, err := o.prepareDemo(out)
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
	}
	from, err := o.origin(ctx)
	if err != nil {
		return fmt.Errorf("-ca: %w", err)
	}
	return o.serve(ctx, from, out)
}

// demoFile gives identities to the user of this process.
const demoFile = `{
  "workloads": [
    {
      "match": {"uid": %d},
      "identities": [
        {"id": "spiffe://demo.test/web", "hint": "web", "audiences": ["*"], "files": [{"folder": %q}]}
      ]
    }
  ]
}
`

// prepareDemo makes a temporary directory with a CA and a file, and sets the options to them.
func (o *options) prepareDemo(out io.Writer) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "workload-agent"); err != nil {
		return "", err
	}
	o.td, o.file, o.socket = spiffe.MustParseTrustDomain("demo.test"), filepath.Join(dir,
		"workloads.json"), filepath.Join(dir, "agent.sock")
	o.ca.from, o.ca.more["create"] = "dir:"+filepath.Join(dir, "ca"), "true"
	written := filepath.Join(dir, "web")
	fmt.Fprintf(out, "edit: %s\nfiles: %s\n", o.file, written)
	fmt.Fprintf(out, "try: SPIFFE_ENDPOINT_SOCKET=unix://%s go run ./examples/svid fetch -dir %s\n", o.socket,
		filepath.Join(dir, "fetched"))
	return dir, os.WriteFile(o.file, fmt.Appendf(nil, demoFile, os.Getuid(), written), 0o600)
}

// serve runs the agent until ctx is done or a part fails.
func (o *options) serve(ctx context.Context, from *origin, out io.Writer) error {
	from.File, from.TrustDomain, from.Node, from.Broker, from.Logger = o.file, o.td, o.node, o.brokerID, o.log
	agent, err := workloadagent.New(from.Config)
	if err != nil {
		return err
	}
	defer agent.Close()
	parts := program.NewGroup(ctx)
	defer parts.Stop()
	err = statuspage.Serve(parts, "workload-agent", o.admin, o.log, out, statuspage.Part{Name: "agent", Source: agent},
		statuspage.Part{Name: "identities", Source: from.Source.(report.Reporter)})
	if err != nil {
		return err
	}
	socket := &unixsocket.Server{Path: o.socket, DirMode: 0o755, SocketMode: 0o666, Handler: agent, Logger: o.log}
	if err := socket.Listen(); err != nil {
		return fmt.Errorf("-socket: %w", err)
	}
	brokers, err := o.brokers(agent, out)
	if err != nil {
		return err
	}
	for _, part := range append(append(from.run, agent.Run, socket.Run), brokers...) {
		parts.Go("", part)
	}
	if agent.Ready(parts.Context()) == nil {
		fmt.Fprintf(out, "ready: SPIFFE_ENDPOINT_SOCKET=unix://%s\n", o.socket)
	}
	return parts.Wait()
}
