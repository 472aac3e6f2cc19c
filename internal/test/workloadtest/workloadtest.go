// Package workloadtest has what the tests of the Workload API's client and server share.
package workloadtest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Service is the path of the methods.
const Service = "/SpiffeWorkloadAPI/"

// Patient is how long a test waits for what takes no time unless something is broken.
const Patient = time.Minute

// Codes of gRPC.
const (
	OK                = 0
	InvalidArgument   = 3
	DeadlineExceeded  = 4
	PermissionDenied  = 7
	ResourceExhausted = 8
	Unimplemented     = 12
	Internal          = 13
	Unavailable       = 14
)

// ServeOn serves h on l, by HTTP/2 without TLS, until stop is called.
func ServeOn(l net.Listener, h http.Handler, conn func(context.Context, net.Conn) context.Context) (stop func()) {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	srv := &http.Server{Handler: h, Protocols: &protocols, ConnContext: conn, ErrorLog: quiet}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	return func() {
		_ = srv.Close()
		<-done
	}
}

// Run runs a source until the test ends or stop is called, which returns what Run returned.
func Run(t testing.TB, s interface{ Run(context.Context) error }) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = s.Run(ctx)
	}()
	stop = sync.OnceValue(func() error {
		cancel(ErrStop)
		<-done
		return err
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// ErrStop is the cause of the context of [Run] when it ends.
var ErrStop = errors.New("stop")

// Domain is a trust domain for tests.
type Domain struct{ *spiffetest.CA }

// NewDomain returns the trust domain with a name.
func NewDomain(t testing.TB, name string) Domain { return Domain{spiffetest.NewCA(t, name)} }

// Key is the name of the domain's bundle in a message.
func (d Domain) Key() string { return d.TrustDomain().ID().String() }

// Roots is the domain's bundle in a message.
func (d Domain) Roots() []byte { return concatenated(d.Bundle()) }

// SameRoots checks that b has the authorities of d now.
func SameRoots(t testing.TB, d Domain, b *spiffe.Bundle) {
	t.Helper()
	if b.TrustDomain() != d.TrustDomain() || !bytes.Equal(concatenated(b), d.Roots()) {
		t.Errorf("the bundle of %q is not that of %q now", b.TrustDomain(), d.TrustDomain())
	}
}

func concatenated(b *spiffe.Bundle) (der []byte) {
	for c := range b.X509Authorities() {
		der = append(der, c.Raw...)
	}
	return der
}

// Log is a buffer for logs.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements [io.Writer].
func (b *Log) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String returns what was written.
func (b *Log) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Take returns what was written since the last call.
func (b *Log) Take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	text := b.b.String()
	b.b.Reset()
	return text
}

// Logger returns a logger that writes to b as text.
func Logger(b *Log) *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }
