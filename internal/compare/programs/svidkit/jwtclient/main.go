// Command jwtclient asks a server over HTTP and proves itself with a token, with svidkit:
//
//	jwtclient ADDRESS
package main

import (
	"context"
	"io"
	"log"
	"net/http"
	"os"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	me, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
	if err != nil {
		return err
	}
	defer me.Close()
	server := spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/server"))
	endpoint, err := spiffetls.New(spiffetls.Config{OptionalIdentity: true, Peers: me, Allow: server})
	if err != nil {
		return err
	}
	base, err := endpoint.Transport()
	if err != nil {
		return err
	}
	tokens, err := jwtsvid.NewCache(me, nil)
	if err != nil {
		return err
	}
	transport, err := jwtsvid.NewTransport(tokens, map[string]string{os.Args[1]: "jwtserver"},
		&jwtsvid.TransportOptions{Base: base})
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: transport}).Get("https://" + os.Args[1])
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(os.Stdout, resp.Body)
	return err
}
