// Ca is a certificate authority: a program that serves the certificate APIs of Istio and of Linkerd,
// the bundle endpoint of SPIFFE federation, metrics and health, from one CA.
//
//	go run ./examples/ca
//
// Without flags it is in development mode: it keeps a self-signed CA in the user's home, one for each trust
// domain, listens on 127.0.0.1, trusts the name in a caller's token, and says so. An agent whose token file
// has the text demo/web, and that trusts the root-cert.pem in that folder, becomes
// spiffe://cluster.local/ns/demo/sa/web.
//
// In a cluster, -kubernetes keeps the CA in the Secret istio-ca-secret, which all replicas share, and
// has the API server judge the tokens of service accounts; -istio-addr=:15012 and its like open the
// ports to others. A CA that was plugged in is found in -root-ca-dir, as with Istio. With -external-ca the
// signers of the cluster sign instead.
//
// -help lists the flags. Those with a name in brackets can be set in the environment as well, under the
// name that configures Istio's CA; a flag wins over its variable. Other variables are not read.
//
// # For operators
//
//	ca -status                             print the roots and what becomes of them
//	ca -rotate                             prepare a new root; the other three steps follow by time
//	ca -taint SERIAL                       a key may be stolen: replace it, and drop its root early
//	ca -revoke SERIAL                      drop a root or a token key now
//	ca -once csr.pem -id spiffe://…        sign one request
//	ca -jwt AUDIENCE -id spiffe://…        sign one token
//	ca -verify-audit audit.jsonl           see that no line of the audit log was changed or taken out
//
// The commands work on the store: they need its rights, and the flags that say where it is, but no server.
// A server on the same store follows, usually within 30 seconds. Before -revoke of a root that was active,
// wait until -status says that another one is. A backup is a copy of the store: of the folder
// -state-dir/ca, or of the Secret. It holds the private keys. To restore it, stop all replicas, put it
// back, and start them.
//
// Everything that is signed, by the server or by a command, has a line in the audit log before it
// leaves: see package auditlog for the form. A disk that is full or slow holds the CA up.
//
// -demo shows all of it in a few seconds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	switch err := run(ctx, os.Args[1:], os.Getenv, os.Stdin, os.Stdout, os.Stderr); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "ca:", err)
		os.Exit(1)
	}
}

// run is the program. It returns nil when a signal ends it.
func run(ctx context.Context, args []string, getenv func(string) string, in io.Reader, out, errOut io.Writer) error {
	c, err := parse(args, getenv, errOut)
	if err != nil {
		return err
	}
	switch c.command {
	case "":
	case "demo":
		return demo(ctx, c, out)
	default:
		return c.do(ctx, in, out)
	}
	if c.stateDir == "" {
		if c.stateDir, err = os.MkdirTemp("", "svidkit-ca"); err != nil { // it stays, and is announced
			return err
		}
		c.complete()
	}
	level := slog.LevelInfo
	if c.verbose {
		level = slog.LevelDebug
	}
	s, err := newServer(ctx, c, slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level})))
	if err != nil {
		return err
	}
	return s.run(ctx, func() { s.announce(out) })
}
