package stepca_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// The first certificate takes a one-time token. Each one proves the caller of the next request.
func Example() {
	endpoint, fingerprint, stop := startCA() // of a step-ca for this example: its URL, and where tokens come from
	defer stop()

	var m *secretcache.Manager
	ca, err := stepca.New(stepca.Options{
		Endpoint:    endpoint,
		Fingerprint: fingerprint,
		Certificate: func() *tls.Certificate {
			svid, err := m.SVID()
			if err != nil {
				return nil
			}
			return svid.TLSCertificate()
		},
	})
	if err != nil {
		panic(err)
	}
	m, err = secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca, Lifetime: time.Hour})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.Run(ctx)
	}()
	secret, err := m.GenerateSecret(ctx, "default")
	if err != nil {
		panic(err)
	}
	svid, err := m.SVID()
	fmt.Println(secret.Name(), svid, err)
	cancel()
	<-done
	// Output: default spiffe://example.org/web <nil>
}
