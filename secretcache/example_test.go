package secretcache_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// A program has one Manager, and runs it for as long as it lives itself.
func Example() {
	web := spiffe.MustParseID("spiffe://example.org/web")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	m, err := secretcache.Start(ctx, secretcache.Config{ID: web, CA: authorityFor(web)})
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()

	for ctx.Err() == nil { // the present identity, and each one that follows
		changed := m.Changed() // before reading, so that no change is missed
		svid, err := m.SVID()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("I am", svid.ID())
		cancel()
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	// Output:
	// I am spiffe://example.org/web
}

// Secrets have the names that Envoy asks for. No Run is needed to get one.
func ExampleManager_GenerateSecret() {
	web := spiffe.MustParseID("spiffe://example.org/web")
	m, err := secretcache.New(secretcache.Config{ID: web, CA: authorityFor(web)})
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range []string{"default", "ROOTCA", "spiffe://example.org/web", "spiffe://example.org", "anything"} {
		secret, err := m.GenerateSecret(context.Background(), name)
		if errors.Is(err, fs.ErrNotExist) {
			fmt.Println(name, "does not exist")
			continue
		}
		if err != nil {
			log.Fatal(err)
		}
		_, _, pair := secret.KeyPair()
		_, roots := secret.Roots()
		fmt.Printf("%s: key pair %t, roots %t\n", secret.Name(), pair, roots)
	}
	// Output:
	// default: key pair true, roots false
	// ROOTCA: key pair false, roots true
	// spiffe://example.org/web: key pair true, roots false
	// spiffe://example.org: key pair false, roots true
	// anything does not exist
}

// A subscriber is told of each change, the trust bundle before the certificate.
func ExampleManager_Subscribe() {
	web := spiffe.MustParseID("spiffe://example.org/web")
	m, err := secretcache.New(secretcache.Config{ID: web, CA: authorityFor(web)})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	unsubscribe := m.Subscribe(func(name string) {
		fmt.Println("changed:", name)
		if name == web.String() {
			cancel()
		}
	})
	defer unsubscribe()
	if err := m.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// changed: ALL
	// changed: ROOTCA
	// changed: spiffe://example.org
	// changed: default
	// changed: spiffe://example.org/web
}

// authorityFor is a CA in this process, which knows its one caller.
func authorityFor(id spiffe.ID) *local.CA {
	authority, err := ca.New(ca.Config{TrustDomain: id.TrustDomain()})
	if err != nil {
		log.Fatal(err)
	}
	issuer, err := local.New(authority, id)
	if err != nil {
		log.Fatal(err)
	}
	return issuer
}
