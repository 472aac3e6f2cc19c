package stepca_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// exampleT is what a test function is given; an example has none, and this one does not fail.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (*exampleT) Helper() {}

func (t *exampleT) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *exampleT) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

// The first certificate takes a one-time token. Each one proves the caller of the next request.
func Example() {
	t := new(exampleT)
	defer t.end()
	root := spiffetest.NewCA(t, "example.org")
	step := cafake.NewStepCA(t, root, "/web")

	endpoint := step.Endpoint() // its URL, and where tokens come from
	endpoint.HTTPClient = nil
	var m *secretcache.Manager
	ca, err := stepca.New(stepca.Options{
		Endpoint:    endpoint,
		Fingerprint: fingerprint(root.Root()),
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
	m, err = secretcache.New(secretcache.Config{ID: step.Expectation().ID(), CA: ca, Lifetime: time.Hour})
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
