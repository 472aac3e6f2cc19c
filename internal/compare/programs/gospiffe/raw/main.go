// Command raw greets workloads of its trust domain over TLS, and passes on the greeting of the database, if it has
// one, with go-spiffe:
//
//	raw ADDRESS [DATABASE]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

var db = spiffeid.RequireFromString("spiffe://example.org/db")

func main() {
	if err := run(); !errors.Is(err, net.ErrClosed) {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	source, err := workloadapi.NewX509Source(ctx)
	if err != nil {
		return err
	}
	defer source.Close()
	mode := spiffetls.MTLSServerWithSource(tlsconfig.AuthorizeMemberOf(db.TrustDomain()), source)
	l, err := spiffetls.ListenWithMode(ctx, "tcp", os.Args[1], mode)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = l.Close() })
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			if err := serve(ctx, conn, source); err != nil {
				log.Print(err)
			}
		}()
	}
}

func serve(ctx context.Context, conn net.Conn, source *workloadapi.X509Source) error {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	id, err := spiffetls.PeerIDFromConn(conn) // which does the handshake
	if err != nil {
		return err
	}
	_ = conn.SetDeadline(time.Time{})
	fmt.Fprintln(conn, "hello", id)
	if len(os.Args) < 3 {
		return nil
	}
	mode := spiffetls.MTLSClientWithSource(tlsconfig.AuthorizeID(db), source)
	below, err := spiffetls.DialWithMode(ctx, "tcp", os.Args[2], mode)
	if err != nil {
		return err
	}
	defer below.Close()
	_, err = io.Copy(conn, below)
	return err
}
