// Command raw greets workloads of its trust domain over TLS, and passes on the greeting of the database, if it has
// one, with svidkit:
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

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var db = spiffe.MustParseID("spiffe://example.org/db")

func main() {
	if err := run(); !errors.Is(err, net.ErrClosed) {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	me, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
	if err != nil {
		return err
	}
	defer me.Close()
	client, err1 := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: spiffe.AllowIDs(db)})
	endpoint, err2 := spiffetls.New(spiffetls.Config{Self: me, Peers: me,
		Allow: spiffe.AllowMembersOf(db.TrustDomain())})
	tcp, err3 := net.Listen("tcp", os.Args[1])
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	l, err := endpoint.Listener(tcp)
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
			if err := serve(ctx, conn, client); err != nil {
				log.Print(err)
			}
		}()
	}
}

func serve(ctx context.Context, conn net.Conn, client *spiffetls.Endpoint) error {
	defer conn.Close()
	peer, err := spiffetls.PeerFromConn(conn)
	if err != nil {
		return err
	}
	fmt.Fprintln(conn, "hello", peer.ID())
	if len(os.Args) < 3 {
		return nil
	}
	below, err := client.DialContext(ctx, "tcp", os.Args[2])
	if err != nil {
		return err
	}
	defer below.Close()
	_, err = io.Copy(conn, below)
	return err
}
