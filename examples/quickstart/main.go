// Quickstart shows a workload identity from the certificate authority to the wire, in one process
// and about twenty seconds, with lifetimes of seconds instead of hours:
//
//	go run ./examples/quickstart
//
// A certificate authority makes a root. Two workloads, frontend and backend, get an identity from
// it, each kept fresh by a SecretManager. The frontend's secrets are served to Envoy by SDS on a
// Unix socket, where a small client takes them as Envoy would. The frontend sends requests to the
// backend over mTLS, a new handshake each. Leaves are renewed all the time, and once the root is
// replaced in four steps: prepared, distributed, activated, retired. No handshake may fail: the
// first that does makes the exit code 1, and the summary says which it was.
//
// With -ca and -ca-roots the identities come from a CA outside, over Istio's certificate API, such as
// that of examples/ca, whose operator then rotates the root:
//
//	go run ./examples/ca -trust-domain example.org
//	go run ./examples/quickstart -ca https://localhost:15012 -ca-roots ~/.local/state/svidkit-ca/example.org/root-cert.pem
//
// With -json each event is a line of JSON. With -serve it does not end, replaces the root again and
// again, and prints a bootstrap for a real Envoy that takes its certificates from the socket.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
)

var trustDomain = spiffe.MustParseTrustDomain("example.org")

// options are the flags.
type options struct {
	duration time.Duration // of the whole show; 0 with serve
	lifetime time.Duration // of a leaf
	serve    bool
	socket   string
	json     bool
	live     bool
	every    time.Duration // between two replacements of the root, with serve; 0 means six lifetimes

	ca      string // URL of a CA outside; empty for one of our own
	caRoots string // file
}

func main() {
	var o options
	flag.DurationVar(&o.duration, "duration", 20*time.Second, "how long to run")
	flag.DurationVar(&o.lifetime, "lifetime", 5*time.Second, "lifetime of a leaf certificate, at least 2s")
	flag.BoolVar(&o.serve, "serve", false, "keep running, and print a bootstrap for Envoy")
	flag.StringVar(&o.socket, "socket", "", "path of the SDS socket (default: in a temporary directory)")
	flag.BoolVar(&o.json, "json", false, "write one JSON object per event")
	flag.StringVar(&o.ca, "ca", "", "`URL` of a CA with Istio's certificate API, for the trust domain example.org (default: a CA in this process)")
	flag.StringVar(&o.caRoots, "ca-roots", "", "`file` with the roots of -ca in PEM")
	flag.Parse()
	if flag.NArg() > 0 || o.lifetime < 2*time.Second || (o.ca == "") != (o.caRoots == "") {
		flag.Usage()
		os.Exit(2)
	}
	if s, err := os.Stdout.Stat(); err == nil && s.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb" {
		o.live = true
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := show(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// show runs everything, narrates it to out, and stops all of it before it returns. That a signal
// ends it early is no error.
func show(outer context.Context, o options, out io.Writer) error {
	n := &narrator{start: time.Now(), json: o.json, live: o.live && !o.json, out: out}
	defer n.end()
	ctx, cancel := context.WithCancelCause(outer)
	services := &group{ctx: ctx, fail: cancel}
	defer func() {
		cancel(nil)
		services.wait()
	}()

	issuer, authority, err := newIssuer(n, o)
	if err != nil {
		return err
	}
	frontend, err := startWorkload(services, n, issuer, "frontend", o.lifetime)
	if err != nil {
		return err
	}
	backend, err := startWorkload(services, n, issuer, "backend", o.lifetime)
	if err != nil {
		return err
	}
	rotation := &rotation{n: n, authority: authority, workloads: []*workload{frontend, backend}}
	if authority != nil {
		services.run("certificate authority", authority.Run)
		services.run("rotation", rotation.run)
	}

	// SDS on a Unix socket, as Envoy wants it.
	if o.socket == "" {
		dir, err := os.MkdirTemp("", "svidkit")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		o.socket = filepath.Join(dir, "sds.sock")
	}
	handler, err := sds.NewHandler(frontend.manager, nil)
	if err != nil {
		return err
	}
	server := &unixsocket.Server{Path: o.socket, Handler: handler}
	if err := server.Listen(); err != nil {
		return err
	}
	services.run("SDS server", server.Run)
	n.say(event{Who: "sds", What: "listening", Detail: o.socket})
	proxy := &proxy{n: n, socket: o.socket}
	services.run("SDS client", proxy.run)
	if o.serve {
		n.print(bootstrap(o.socket))
	}

	// Traffic over mTLS, until the time is over.
	traffic, err := startTraffic(services, n, frontend, backend)
	if err != nil {
		return err
	}
	if o.serve && authority != nil {
		every := cmp.Or(o.every, 6*o.lifetime)
		services.run("root rotations", func(ctx context.Context) error { return rotation.every(ctx, every) })
	}
	if !o.serve {
		after := time.AfterFunc(o.duration, func() { cancel(errOver) })
		defer after.Stop()
	}
	if !o.serve && authority != nil {
		rotate := time.AfterFunc(o.duration*3/10, func() { rotation.begin(ctx) })
		defer rotate.Stop()
	}
	<-ctx.Done()

	services.wait()
	n.end()
	n.finish(summary{
		Renewals:         frontend.renewals.Load() + backend.renewals.Load(),
		RootRotations:    rotation.complete.Load(),
		SDSUpdates:       proxy.updates.Load(),
		Requests:         traffic.done.Load(),
		FailedHandshakes: traffic.failed.Load(),
	})
	if err := traffic.verdict(); err != nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(cause, errOver) && ctx.Err() != nil && outer.Err() == nil {
		return cause // a service ended that should not have
	}
	return nil
}
