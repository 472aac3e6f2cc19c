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
// With -json each event is a line of JSON. With -serve it does not end, replaces the root again and
// again, and prints a bootstrap for a real Envoy that takes its certificates from the socket.
package main

import (
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

	"github.com/svidkit/svidkit/pki/ca"
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
}

func main() {
	var o options
	flag.DurationVar(&o.duration, "duration", 20*time.Second, "how long to run")
	flag.DurationVar(&o.lifetime, "lifetime", 5*time.Second, "lifetime of a leaf certificate, at least 2s")
	flag.BoolVar(&o.serve, "serve", false, "keep running, and print a bootstrap for Envoy")
	flag.StringVar(&o.socket, "socket", "", "path of the SDS socket (default: in a temporary directory)")
	flag.BoolVar(&o.json, "json", false, "write one JSON object per event")
	flag.Parse()
	if flag.NArg() > 0 || o.lifetime < 2*time.Second {
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

	// The certificate authority: everything is signed for the identity that local.New names, and
	// nothing for what a request asks for.
	authority, err := ca.New(ca.Config{
		TrustDomain: trustDomain,
		DefaultTTL:  o.lifetime,
		MaxTTL:      o.lifetime,
		Backdate:    time.Second,
		RefreshHint: time.Second,
		Propagation: max(o.lifetime*2/5, time.Second), // how long a new root is known before it signs
	})
	if err != nil {
		return err
	}
	root := authority.Roots()[0].Certificate
	n.say(event{Who: "ca", What: "root created", Serial: short(root), NotAfter: root.NotAfter})

	frontend, err := startWorkload(services, n, authority, "frontend")
	if err != nil {
		return err
	}
	backend, err := startWorkload(services, n, authority, "backend")
	if err != nil {
		return err
	}

	rotation := &rotation{n: n, authority: authority, workloads: []*workload{frontend, backend}}
	services.run("certificate authority", authority.Run)
	services.run("rotation", rotation.run)

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
	server := &sds.Server{Path: o.socket, Handler: handler}
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
	if o.serve {
		services.run("root rotations", func(ctx context.Context) error { return rotation.every(ctx, 6*o.lifetime) })
	} else {
		after := time.AfterFunc(o.duration, func() { cancel(errOver) })
		defer after.Stop()
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
