package workloadapi_test

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"path"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

type (
	domain     = workloadtest.Domain
	syncBuffer = workloadtest.Log
)

const (
	service = workloadtest.Service
	patient = workloadtest.Patient
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
		c.end(workloadtest.OK, "")
	})
}

// inMemory serves h in memory, so that in a synctest bubble no time passes while a goroutine runs,
// and returns a client for it.
func inMemory(t testing.TB, h http.Handler) *workloadapi.Client {
	t.Helper()
	l := memconn.Listen()
	stop := workloadtest.ServeOn(l, h, nil)
	c, transport := client(t, l.DialContext)
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		stop()
	})
	return c
}

func client(t testing.TB, dial func(context.Context, string, string) (net.Conn, error)) (*workloadapi.Client, *http.Transport) {
	t.Helper()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols, DialContext: dial}
	return must.Get(workloadapi.NewClient("", &http.Client{Transport: transport}))(t), transport
}

// inBubbles returns a trust domain with an identity for /web that are valid when a bubble begins.
func inBubbles(t *testing.T) (d domain, web *spiffe.SVID) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d = workloadtest.NewDomain(t, "example.org")
		web = d.SVID("/web")
	})
	return d, web
}

// shift moves the validity of a certificate.
func shift(by time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(by), c.NotAfter.Add(by) }
}

// message is svid in a message.
func message(t testing.TB, d domain, svid *spiffe.SVID, hint string) *wire.X509SVID {
	t.Helper()
	certs, key := must.Get2(svid.MarshalDER())(t)
	return &wire.X509SVID{SpiffeId: svid.ID().String(), X509Svid: certs, X509SvidKey: key, Bundle: d.Roots(), Hint: hint}
}

// response is a response with one SVID and the bundles of others.
func response(t testing.TB, d domain, svid *spiffe.SVID, federated ...domain) *wire.X509SVIDResponse {
	t.Helper()
	m := &wire.X509SVIDResponse{Svids: []*wire.X509SVID{message(t, d, svid, "")}, FederatedBundles: map[string][]byte{}}
	for _, f := range federated {
		m.FederatedBundles[f.Key()] = f.Roots()
	}
	return m
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	return must.Get(proto.Marshal(m))(t)
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// http1Abort makes net/http cut the stream.
var http1Abort = http.ErrAbortHandler
