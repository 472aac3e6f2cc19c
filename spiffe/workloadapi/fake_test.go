package workloadapi_test

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

const (
	service = "/SpiffeWorkloadAPI/"
	patient = time.Minute // for what takes no time unless something is broken
)

// Codes of gRPC.
const (
	codeOK                = 0
	codeInvalidArgument   = 3
	codeDeadlineExceeded  = 4
	codePermissionDenied  = 7
	codeResourceExhausted = 8
	codeUnimplemented     = 12
	codeInternal          = 13
	codeUnavailable       = 14
)

// call is one request that a fake server has received. The server ends it with code OK when its
// function returns, unless it has ended it otherwise.
type call struct {
	t       testing.TB
	rpc     string
	header  http.Header
	request []byte
	ctx     context.Context
	w       http.ResponseWriter
	ended   bool
}

// send sends a message.
func (c *call) send(m proto.Message) {
	b, err := proto.Marshal(m)
	if err != nil {
		c.t.Error(err)
	}
	c.sendRaw(b)
}

func (c *call) sendRaw(b []byte) {
	c.write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))))
	c.write(b)
	c.flush()
}

// write writes bytes, whatever they are.
func (c *call) write(b []byte) { _, _ = c.w.Write(b) }
func (c *call) flush()         { _ = http.NewResponseController(c.w).Flush() }

// end ends the call with a status.
func (c *call) end(code int, message string) {
	if c.ended {
		return
	}
	c.ended = true
	c.w.Header().Set(http.TrailerPrefix+"Grpc-Status", strconv.Itoa(code))
	if message != "" {
		c.w.Header().Set(http.TrailerPrefix+"Grpc-Message", message)
	}
}

// wait waits until the client is gone.
func (c *call) wait() { <-c.ctx.Done() }

// sleep waits, but not for a client that is gone.
func (c *call) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-c.ctx.Done():
	}
}

// fake is a Workload API written by hand: it does what its function does. It is not made with any
// code of the package.
func fake(t testing.TB, f func(c *call)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &call{t: t, rpc: path.Base(r.URL.Path), header: r.Header, ctx: r.Context(), w: w}
		b, err := io.ReadAll(r.Body)
		if err == nil && (len(b) < 5 || int(binary.BigEndian.Uint32(b[1:5])) != len(b)-5) {
			err = errors.New("not one message")
		}
		if err != nil {
			select {
			case <-c.ctx.Done(): // it was read while the client left
			case <-time.After(patient):
				t.Errorf("%s: %v", c.rpc, err)
			}
			return
		}
		c.request = b[5:]
		w.Header().Set("Content-Type", "application/grpc")
		f(c)
		c.end(codeOK, "")
	})
}

// inMemory serves h in memory, so that in a synctest bubble no time passes while a goroutine runs,
// and returns a client for it.
func inMemory(t testing.TB, h http.Handler) *workloadapi.Client {
	t.Helper()
	l := memconn.Listen()
	stop := serveOn(l, h)
	c, transport := client(t, l.DialContext)
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		stop()
	})
	return c
}

func serveOn(l net.Listener, h http.Handler) (stop func()) {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: h, Protocols: &protocols, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
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

func client(t testing.TB, dial func(context.Context, string, string) (net.Conn, error)) (*workloadapi.Client, *http.Transport) {
	t.Helper()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols, DialContext: dial}
	c, err := workloadapi.NewClient("", &http.Client{Transport: transport})
	require.NoError(t, err)
	return c, transport
}

// run runs a source until the test ends or stop is called, which returns what Run returned.
func run(t testing.TB, s *workloadapi.Source) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = s.Run(ctx)
	}()
	stop = sync.OnceValue(func() error {
		cancel(errStop)
		<-done
		return err
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

var errStop = errors.New("stop")

// domain is a trust domain for tests.
type domain struct{ *spiffetest.CA }

func newDomain(t testing.TB, name string) domain { return domain{spiffetest.NewCA(t, name)} }

// inBubbles returns a trust domain with an identity for /web that are valid when a bubble begins.
func inBubbles(t *testing.T) (d domain, web *spiffe.SVID) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d = newDomain(t, "example.org")
		web = d.SVID("/web")
	})
	return d, web
}

// shift moves the validity of a certificate.
func shift(by time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(by), c.NotAfter.Add(by) }
}

// key is the name of the domain's bundle in a message.
func (d domain) key() string { return d.TrustDomain().ID().String() }

// roots is the domain's bundle in a message.
func (d domain) roots() []byte {
	var der []byte
	for c := range d.Bundle().X509Authorities() {
		der = append(der, c.Raw...)
	}
	return der
}

// sameRoots checks that b has the authorities of d now.
func sameRoots(t testing.TB, d domain, b *spiffe.Bundle) {
	t.Helper()
	var der []byte
	for c := range b.X509Authorities() {
		der = append(der, c.Raw...)
	}
	assert.Equal(t, d.TrustDomain(), b.TrustDomain())
	assert.Equal(t, d.roots(), der)
}

// message is svid in a message.
func (d domain) message(t testing.TB, svid *spiffe.SVID, hint string) *wire.X509SVID {
	t.Helper()
	certs, key, err := svid.MarshalDER()
	require.NoError(t, err)
	return &wire.X509SVID{SpiffeId: svid.ID().String(), X509Svid: certs, X509SvidKey: key, Bundle: d.roots(), Hint: hint}
}

// response is a response with one SVID and the bundles of others.
func (d domain) response(t testing.TB, svid *spiffe.SVID, federated ...domain) *wire.X509SVIDResponse {
	t.Helper()
	m := &wire.X509SVIDResponse{Svids: []*wire.X509SVID{d.message(t, svid, "")}, FederatedBundles: map[string][]byte{}}
	for _, f := range federated {
		m.FederatedBundles[f.key()] = f.roots()
	}
	return m
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	require.NoError(t, err)
	return b
}

// syncBuffer is a buffer for logs.
type syncBuffer = logtest.Buffer

func textLogger(b *syncBuffer) *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// http1Abort makes net/http cut the stream.
var http1Abort = http.ErrAbortHandler
