// Quickstart shows a workload identity from the certificate authority to the wire, in one process, with lifetimes of
// seconds instead of hours:
//
//	go run ./examples/quickstart
//
// A certificate authority makes a root. Two workloads, frontend and backend, get an identity from it, each kept fresh
// by a SecretManager. SDS serves the frontend's secrets on a Unix socket, and a small client takes them as Envoy
// would. The frontend sends requests to the backend over mTLS, each with a new handshake. Leaves are renewed all the
// time, and once the root is replaced in four steps: prepared, distributed, activated, retired. If a handshake fails,
// the exit code is 1, and the error describes the first failure.
//
// With -ca and -ca-roots the identities come from another process over Istio's certificate API, such as examples/ca,
// whose operator rotates the root:
//
//	go run ./examples/ca -trust-domain example.org
//	go run ./examples/quickstart -ca https://localhost:15012 \
//		-ca-roots ~/.local/state/svidkit-ca/example.org/root-cert.pem
//
// With -json each event is a line of JSON. With -serve the program runs on, replaces the root again and again, and
// prints a bootstrap for a real Envoy that takes its certificates from the socket.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

var trustDomain = spiffe.MustParseTrustDomain("example.org")

// options are the flags.
type options struct {
	duration time.Duration // of the whole run; ignored with serve
	lifetime time.Duration // of a leaf
	serve    bool
	socket   string
	json     bool
	// until the root is replaced, each time with serve; 0 means a share of duration, or six lifetimes
	every time.Duration

	ca      string // URL of the CA; empty for one in this process
	caRoots string // file
}

func main() {
	o := options{}
	flag.DurationVar(&o.duration, "duration", 20*time.Second, "how long to run")
	flag.DurationVar(&o.lifetime, "lifetime", 5*time.Second, "lifetime of a leaf certificate, at least 2s")
	flag.BoolVar(&o.serve, "serve", false, "keep running, and print a bootstrap for Envoy")
	flag.StringVar(&o.socket, "socket", "", "path of the SDS socket (default: in a temporary directory)")
	flag.BoolVar(&o.json, "json", false, "write one JSON object per event")
	flag.StringVar(&o.ca, "ca", "", "`URL` of a CA with Istio's certificate API (default: a CA in this process)")
	flag.StringVar(&o.caRoots, "ca-roots", "",
		"`file` with the roots of -ca in PEM; the secret of examples/ca is beside it")
	flag.Parse()
	if err := o.check(); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := show(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// check validates the command line.
func (o *options) check() error {
	ca, err := url.Parse(o.ca)
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("%q is not understood: there are only flags", flag.Arg(0))
	case o.lifetime < 2*time.Second:
		return fmt.Errorf("-lifetime is %v, and has to be 2s or more", o.lifetime)
	case (o.ca == "") != (o.caRoots == ""):
		return errors.New("-ca and -ca-roots belong together")
	case o.ca != "" && (err != nil || ca.Scheme != "https" || ca.Host == ""):
		return fmt.Errorf("-ca is %q, and has to be a URL such as https://localhost:15012", o.ca)
	}
	return nil
}

// show runs everything, writes events to out, and stops everything before it returns. It returns nil if a signal ends
// it early.
func show(ctx context.Context, o options, out io.Writer) error {
	n := &narrator{start: time.Now(), json: o.json, out: out}
	services := newGroup(ctx)
	defer func() {
		services.end(nil)
		services.wg.Wait()
	}()

	// Two workloads with identities from one CA.
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
		services.run("narration of the rotation", rotation.narrate)
		services.run("rotation", func(ctx context.Context) error { return rotation.begin(ctx, o) })
	}

	// SDS on a Unix socket, for Envoy.
	socket := o.socket
	if socket == "" {
		dir, err := os.MkdirTemp("", "svidkit")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		socket = filepath.Join(dir, "sds.sock")
	}
	updates, err := startSDS(services, n, frontend, socket)
	if err != nil {
		return err
	}
	if o.serve {
		n.print("\nAn Envoy takes the frontend's certificates from here with this bootstrap (envoy -c " +
			"envoy.yaml):\n\n" +
			strings.ReplaceAll(envoyBootstrap, "SOCKET", socket) +
			"\nThen look at http://127.0.0.1:9901/certs: the serial numbers follow the ones above.\n\n")
	}

	// Traffic over mTLS.
	traffic, err := startTraffic(services, n, frontend, backend)
	if err != nil {
		return err
	}
	if !o.serve {
		defer time.AfterFunc(o.duration, func() { services.end(nil) }).Stop()
	}
	failed := services.wait()
	n.finish(summary{
		Renewals:         frontend.renewals.Load() + backend.renewals.Load(),
		RootRotations:    rotation.complete.Load(),
		SDSUpdates:       updates.Load(),
		Requests:         traffic.done.Load(),
		FailedHandshakes: traffic.failed.Load(),
	})
	if err := traffic.verdict(); err != nil {
		return err
	}
	return failed
}
