// Package workloadtest has what the tests of the Workload API's client and server share.
package workloadtest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
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

// SocketDir returns a directory with a path that is short enough for sockets.
func SocketDir(t testing.TB) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "wl"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// NewKey returns a new key.
func NewKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	return must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
}

// ExampleTB is what a test function is given; an example has none, and these do not fail.
type ExampleTB struct{ testing.TB }

// Helper does nothing.
func (ExampleTB) Helper() {}

// ServeOnSocket serves h for an example. It does not wait for its clients when it stops, as a unixsocket.Server does.
func ServeOnSocket(h http.Handler, conn func(context.Context, net.Conn) context.Context) (
	address string, stop func()) {
	dir, err := os.MkdirTemp("", "wl")
	if err != nil {
		log.Fatal(err)
	}
	path := filepath.Join(dir, "api.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	end := ServeOn(l, h, conn)
	return "unix://" + path, func() {
		end()
		_ = os.RemoveAll(dir)
	}
}

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
	logtest.Buffer
	taken int
}

// Take returns what was written since the last call, which is not at the same time.
func (b *Log) Take() string {
	text := b.String()[b.taken:]
	b.taken += len(text)
	return text
}

// Logger returns a logger that writes to b as text.
func Logger(b *Log) *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }
