// Command watcher prints each identity and each bundle for tokens that the Workload API sends, with svidkit.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	client, err := workloadapi.NewClient(os.Getenv(workloadapi.SocketEnv), nil)
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		for update, err := range client.WatchJWTBundles(ctx) {
			if err != nil {
				log.Println("bundles:", err)
				continue
			}
			for bundle := range update.Bundles.All() {
				log.Println("bundle", bundle.TrustDomain())
			}
		}
	}()
	for update, err := range client.WatchX509SVIDs(ctx) {
		if err != nil {
			log.Println("identities:", err)
			continue
		}
		for _, identity := range update.Identities {
			log.Println("identity", identity.SVID.ID())
		}
	}
}
