package workloadserver_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// An agent gives each caller what it may have. Managers renew the identities, and the handler pushes each
// new one to the workload that it is for.
func ExampleNewHandler() {
	ca := spiffetest.NewCA(workloadtest.ExampleTB{}, "example.org")
	agent, web, admin := managerForExample(ca, "/agent"), managerForExample(ca, "/web"), managerForExample(ca, "/admin")
	handler, err := workloadserver.NewHandler(agent, &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			caller, ok := unixsocket.PeerFromContext(ctx)
			if !ok || caller.UID != uint32(os.Getuid()) {
				return nil, nil // PermissionDenied
			}
			return []workloadserver.Identity{{Provider: web, Hint: "public"}, {Provider: admin, Hint: "internal"}}, nil
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer handler.Close()
	address, stop := workloadtest.ServeOnSocket(handler, unixsocket.ConnContext)
	defer stop()

	client, err := workloadapi.NewClient(address, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.CloseIdleConnections()
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

// managerForExample runs a manager that has an identity from the CA, and renews it.
func managerForExample(ca *spiffetest.CA, path string) *secretcache.Manager {
	m, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org" + path), CA: ca})
	if err != nil {
		log.Fatal(err)
	}
	go m.Run(context.Background())
	if _, err := m.GenerateSecret(context.Background(), "default"); err != nil { // waits for the first
		log.Fatal(err)
	}
	return m
}
