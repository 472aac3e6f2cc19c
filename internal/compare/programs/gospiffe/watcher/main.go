// Command watcher prints each identity and each bundle for tokens that the Workload API sends, with go-spiffe.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	client, err := workloadapi.New(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := client.WatchJWTBundles(ctx, watcher{}); ctx.Err() == nil {
			log.Println("bundles:", err)
		}
	})
	wg.Go(func() {
		if err := client.WatchX509Context(ctx, watcher{}); ctx.Err() == nil {
			log.Println("identities:", err)
		}
	})
	wg.Wait()
}

type watcher struct{}

func (watcher) OnX509ContextUpdate(update *workloadapi.X509Context) {
	for _, svid := range update.SVIDs {
		log.Println("identity", svid.ID)
	}
}

func (watcher) OnX509ContextWatchError(err error) {
	log.Println("identities:", err)
}

func (watcher) OnJWTBundlesUpdate(update *jwtbundle.Set) {
	for _, bundle := range update.Bundles() {
		log.Println("bundle", bundle.TrustDomain())
	}
}

func (watcher) OnJWTBundlesWatchError(err error) {
	log.Println("bundles:", err)
}
