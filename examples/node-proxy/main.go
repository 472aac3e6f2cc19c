// Node-proxy is for one Envoy that ends TLS for all workloads of a node: it serves the certificate of each by SDS,
// when a client asks for the workload by the name of its server (SNI). It gets the identities by the SPIFFE Broker
// API, and needs no access to the workloads or to their Workload API.
//
//	node-proxy -server-id spiffe://example.org/agent
//
// README.md documents the names and the flags. examples/NODE.md has the whole: an agent, this program and an Envoy.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func main() {
	program.Main("node-proxy", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	})
}

// options are the flags.
type options struct {
	program.Service
	api, broker, socket, admin string
	server                     spiffe.ID
	uid, most                  uint
	log                        *slog.Logger
}

// groups are the groups of flags in -h.
var groups = []program.FlagGroup{
	{Title: "Where identities come from", Flags: "workload-api broker server-id"},
	{Title: "The Envoy", Flags: "socket envoy-uid max-workloads"},
	{Title: "For operators", Flags: "admin"},
}

// run is the program. It returns nil after a signal, or after the duration of -for.
func run(ctx context.Context, args []string, out, errOut io.Writer) (err error) {
	var o options
	flags := flag.NewFlagSet("node-proxy", flag.ContinueOnError)
	flags.StringVar(&o.api, "workload-api", "", "`address` of the Workload API, for this program's own identity "+
		"(default: that in "+workloadapi.SocketEnv+")")
	flags.StringVar(&o.broker, "broker", "", "`address` of the Broker API (default: that in "+broker.SocketEnv+")")
	flags.TextVar(&o.server, "server-id", spiffe.ID{}, "SPIFFE `ID` of the server of the Broker API; needed")
	flags.StringVar(&o.socket, "socket", "/run/node-proxy/sds.sock", "`path` of the socket of SDS")
	flags.UintVar(&o.uid, "envoy-uid", uint(max(os.Getuid(), 0)), "`number` of the user whose Envoy gets the secrets")
	flags.UintVar(&o.most, "max-workloads", 500, "`number` of workloads that are served at a time")
	flags.StringVar(&o.admin, "admin", "127.0.0.1:15028",
		"`address` of the status page, /ready, /live and /metrics; empty: none")
	o.Register(flags)
	err = program.Parse(flags, args, out, program.Help{Groups: groups})
	if err != nil {
		return err
	}
	ctx, log, end, err := o.Begin(ctx, errOut, slog.LevelInfo)
	if err != nil {
		return err
	}
	defer end()
	defer func() { err = o.Answer(log, err) }()
	o.log = log
	return o.serve(ctx, out)
}

// connect returns the program's own identity, and the client that it calls the Broker API with.
func (o *options) connect() (*workloadapi.Source, *broker.Client, error) {
	if o.server.IsZero() {
		return nil, nil, program.Misused("-server-id: it is needed, as another server could send false identities")
	}
	own, err := workloadapi.New(workloadapi.Config{Logger: o.log,
		Address: cmp.Or(o.api, os.Getenv(workloadapi.SocketEnv))})
	if err != nil {
		return nil, nil, program.Misused("-workload-api: %w", err)
	}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: own, Peers: own, Allow: spiffe.AllowIDs(o.server),
		Logger: o.log})
	if err != nil {
		return nil, nil, err
	}
	client, err := broker.NewClient(cmp.Or(o.broker, os.Getenv(broker.SocketEnv)), endpoint)
	if err != nil {
		return nil, nil, program.Misused("-broker: %w", err)
	}
	return own, client, nil
}

// serve runs the proxy until ctx is done or a part fails.
func (o *options) serve(ctx context.Context, out io.Writer) error {
	own, client, err := o.connect()
	if err != nil {
		return err
	}
	defer client.Close()
	parts := program.NewGroup(ctx)
	defer parts.Stop()
	all := &workloads{ctx: parts.Context(), client: client, most: int(o.most), log: o.log,
		none: ratelog.New(o.log, 0), running: map[string]*workload{}}
	roots := sdssource.FromIdentity(own) // and not its key, with which an Envoy could call the Broker API
	source, err := sdssource.Mux(map[string]sds.Source{"ROOTCA": roots, "ALL": roots, "*": all})
	if err != nil {
		return err
	}
	handler, err := sds.NewHandler(source, &sds.Options{Resolve: o.resolve, MaxNames: 2 * int(o.most), Logger: o.log})
	if err != nil {
		return err
	}
	defer handler.Close()
	err = statuspage.Serve(parts, "node-proxy", o.admin, o.log, out, statuspage.Part{Name: "own", Source: own},
		statuspage.Part{Name: "workloads", Source: all}, statuspage.Part{Name: "sds", Source: handler})
	if err != nil {
		return err
	}
	socket := &unixsocket.Server{Path: o.socket, DirMode: 0o755, SocketMode: 0o666, Handler: handler, Logger: o.log}
	if err := socket.Listen(); err != nil {
		return fmt.Errorf("-socket: %w", err)
	}
	parts.Go("", socket.Run)
	parts.Go("-workload-api", own.Run)
	parts.Go("", func(context.Context) error {
		all.run(func() map[string]string { return handler.Report().Servers[0].Names })
		return nil
	})
	if own.Ready(parts.Context()) == nil {
		fmt.Fprintf(out, "ready: unix://%s\n", o.socket)
	}
	return parts.Wait()
}

// resolve is the hook of SDS: the Envoy's user gets each name.
func (o *options) resolve(ctx context.Context, name string) (string, error) {
	peer, ok := unixsocket.PeerFromContext(ctx)
	if !ok || uint(peer.UID) != o.uid {
		return "", fmt.Errorf("secrets are for user %d alone: see -envoy-uid", o.uid)
	}
	return name, nil
}
