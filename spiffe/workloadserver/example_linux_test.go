package workloadserver_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// An agent gives each caller what it may have.
func ExampleNewHandler() {
	ca := spiffetest.NewCA(exampleTB{}, "example.org")
	web, admin := ca.SVID("/web"), ca.SVID("/admin")
	handler, err := workloadserver.NewHandler(workloadserver.Fixed(spiffe.NewSnapshot(ca.SVID("/agent"), ca.Bundles())), &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			caller, ok := unixsocket.PeerFromContext(ctx)
			if !ok || caller.UID != uint32(os.Getuid()) {
				return nil, nil // PermissionDenied
			}
			return []workloadserver.Identity{{SVID: web, Hint: "public"}, {SVID: admin, Hint: "internal"}}, nil
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer handler.Close()
	address, stop := serveForExample(handler)
	defer stop()

	client, err := workloadapi.NewClient(address, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	for update, err := range client.WatchX509SVIDs(context.Background()) {
		if err != nil {
			log.Fatal(err)
		}
		for _, id := range update.Identities {
			fmt.Println(id.SVID.ID(), "is", id.Hint)
		}
		break
	}
	// Output:
	// spiffe://example.org/web is public
	// spiffe://example.org/admin is internal
}
