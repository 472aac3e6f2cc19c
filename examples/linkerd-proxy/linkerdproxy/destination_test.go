package linkerdproxy_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
)

var (
	one   = linkerdproxy.Endpoint{Addr: netip.MustParseAddrPort("10.1.2.3:8080"), Identity: web, ServerName: web}
	two   = linkerdproxy.Endpoint{Addr: netip.MustParseAddrPort("[fd00::17]:4143"), Identity: voting}
	plain = linkerdproxy.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.255:80")}
)

// destinations is a client of d.
func destinations(t *testing.T, d *meshtest.Destination, id *linkerdproxy.Identity) *linkerdproxy.Destinations {
	t.Helper()
	out := must.Get(linkerdproxy.NewDestinations(t.Context(), id, d.Service, slog.New(slog.NewTextHandler(t.Output(), nil))))(t)
	return out
}

// has waits until a service has these endpoints.
func has(t *testing.T, d *linkerdproxy.Destinations, authority string, want ...linkerdproxy.Endpoint) {
	t.Helper()
	var all []linkerdproxy.Endpoint
	var err error
	eventually(t, func() bool {
		all, err = d.Endpoints(t.Context(), authority)
		return err == nil && assert.ObjectsAreEqual(want, all)
	}, fmt.Sprint(want, " but ", all, " ", err))
}

// hasNone waits until a service has no endpoints, and returns why.
func hasNone(t *testing.T, d *linkerdproxy.Destinations, authority, why string) error {
	t.Helper()
	var err error
	eventually(t, func() bool {
		_, err = d.Endpoints(t.Context(), authority)
		return err != nil && strings.Contains(err.Error(), why)
	}, why)
	return err
}

// unanswered waits until a service that nothing is known of has failed for a reason, and returns the error.
func unanswered(t *testing.T, d *linkerdproxy.Destinations, authority, why string) error {
	t.Helper()
	var err error
	eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = d.Endpoints(ctx, authority)
		return err != nil && strings.Contains(err.Error(), why)
	}, why)
	return err
}

// The destination service says of each address whether its server has an identity, and which: IPv4 and IPv6, DNS names and URIs,
// and the name to ask for. Addresses are added, replaced and removed. A service without endpoints is not one that is not there.
func TestDestinationUpdates(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-15-1", "LNK-15-3")
	d := meshtest.NewDestination(t, nil)
	client := destinations(t, d, nil)
	const app = "app.emojivoto:80"
	d.Begin(app, meshtest.Added(plain, two, one))
	has(t, client, app, one, plain, two)
	assert.Equal(t, []meshtest.Ask{{Scheme: "k8s", Authority: app}}, d.Asked())

	d.Push(app, meshtest.Removed(plain.Addr, netip.MustParseAddrPort("10.9.9.9:1")))
	has(t, client, app, one, two)
	without := linkerdproxy.Endpoint{Addr: two.Addr}
	d.Push(app, meshtest.Added(without)) // its server has lost its identity
	has(t, client, app, one, without)
	d.Push(app, meshtest.Removed(one.Addr, two.Addr))
	require.NotErrorIs(t, hasNone(t, client, app, "no endpoints"), fs.ErrNotExist)
	d.Push(app, meshtest.Added(one))
	has(t, client, app, one)
	d.Push(app, meshtest.None(true))
	require.NotErrorIs(t, hasNone(t, client, app, "no endpoints"), fs.ErrNotExist)
	d.Push(app, meshtest.Added(two))
	has(t, client, app, two)
	d.Push(app, meshtest.None(false))
	require.ErrorIs(t, hasNone(t, client, app, "knows no such service"), fs.ErrNotExist)
	d.Push(app, meshtest.Added(one))
	has(t, client, app, one)
	d.Push(app, meshtest.Message(func(w *protofield.Writer) {
		w.Message(3, func(w *protofield.Writer) { w.Raw([]byte{0x08, 0}) }) // with the false, which encoders leave out
	}))
	require.ErrorIs(t, hasNone(t, client, app, "knows no such service"), fs.ErrNotExist)
	assert.Len(t, d.Asked(), 1, "all by one stream")

	d.Refuse("example.org:80", grpchttp.Errorf(grpchttp.InvalidArgument, "not a service"))
	require.ErrorIs(t, hasNone(t, client, "example.org:80", "does not resolve it"), fs.ErrNotExist)
	time.Sleep(700 * time.Millisecond)
	assert.Len(t, d.Asked(), 2, "what it does not resolve is not asked for at the pace of a failure")
}

// What this proxy cannot use is left out, and is no endpoint without TLS: an identity of a kind that is not known, an empty one,
// another authority, and what is no address.
func TestDestinationLeavesOut(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-15-1", "LNK-15-3")
	d := meshtest.NewDestination(t, nil)
	client := destinations(t, d, nil)
	uri := linkerdproxy.Endpoint{Addr: one.Addr, Identity: "spiffe://root.linkerd.cluster.local/external-workload", ServerName: "external.cluster.local"}
	field := func(n protofield.Number, write func(*protofield.Writer)) func(*protofield.Writer) {
		return func(w *protofield.Writer) { w.Message(n, write) }
	}
	name := func(text string) func(*protofield.Writer) {
		return func(w *protofield.Writer) { w.Text(1, text) }
	}
	secure := func(all ...func(*protofield.Writer)) func(*protofield.Writer) {
		return field(5, func(w *protofield.Writer) {
			for _, f := range all {
				f(w)
			}
		})
	}
	addr := func(a netip.AddrPort) func(*protofield.Writer) {
		return func(w *protofield.Writer) { meshtest.Addr(w, 1, a) }
	}
	for name, c := range map[string]struct {
		parts []func(*protofield.Writer)
		want  []linkerdproxy.Endpoint // beside plain
	}{
		"URI":               {[]func(*protofield.Writer){addr(one.Addr), secure(field(3, name(uri.Identity)), field(4, name(uri.ServerName)))}, []linkerdproxy.Endpoint{uri}},
		"unknown strategy":  {[]func(*protofield.Writer){addr(one.Addr), secure(field(9, name("x")))}, nil},
		"reserved strategy": {[]func(*protofield.Writer){addr(one.Addr), secure(field(2, name("x")), field(4, name(web)))}, nil},
		"empty identity":    {[]func(*protofield.Writer){addr(one.Addr), secure(field(1, name("")))}, nil},
		"empty TLS":         {[]func(*protofield.Writer){addr(one.Addr), secure()}, nil},
		"another authority": {[]func(*protofield.Writer){addr(one.Addr), field(7, name("app.east:80"))}, nil},
		"no address":        {[]func(*protofield.Writer){secure(field(1, name(web)))}, nil},
		"no port":           {[]func(*protofield.Writer){addr(netip.AddrPortFrom(one.Addr.Addr(), 0))}, nil},
		"unspecified":       {[]func(*protofield.Writer){addr(netip.MustParseAddrPort("0.0.0.0:80"))}, nil},
		"large port":        {[]func(*protofield.Writer){field(1, func(w *protofield.Writer) { w.Raw([]byte{0x0a, 5, 0x0d, 1, 2, 3, 10}); w.Varint(2, 65536+80) })}, nil},
		"mapped": {
			[]func(*protofield.Writer){addr(netip.MustParseAddrPort("[::ffff:10.1.2.3]:8080"))},
			[]linkerdproxy.Endpoint{{Addr: one.Addr}},
		},
	} {
		authority := name + ":80"
		d.Begin(authority, meshtest.Added(plain), meshtest.Message(field(1, field(1, func(w *protofield.Writer) {
			for _, p := range c.parts {
				p(w)
			}
		}))), meshtest.Message(field(4, func(*protofield.Writer) {})), meshtest.Added(two))
		has(t, client, authority, append(append([]linkerdproxy.Endpoint(nil), c.want...), plain, two)...)
	}
	// An endpoint that has become one of these is one no more.
	d.Begin("changed:80", meshtest.Added(one, plain), meshtest.Message(field(1, field(1, func(w *protofield.Writer) {
		addr(one.Addr)(w)
		secure()(w)
	}))))
	has(t, client, "changed:80", plain)
	d.Begin("limit:80", func() []byte {
		all := make([]linkerdproxy.Endpoint, 10_001)
		for i := range all {
			all[i].Addr = netip.AddrPortFrom(one.Addr.Addr(), uint16(i+1))
		}
		return meshtest.Added(all...)
	}())
	assert.Len(t, must.Get(client.Endpoints(t.Context(), "limit:80"))(t), 10_000)
}

// While the destination service is away, its last answer counts; the first of the next stream takes its place. A service that
// was never answered for is an error, and never one that is not there.
func TestDestinationOutage(t *testing.T) {
	t.Parallel()
	d := meshtest.NewDestination(t, nil)
	var log lockedBuffer
	client, err := linkerdproxy.NewDestinations(t.Context(), nil, d.Service, slog.New(slog.NewTextHandler(&log, nil)))
	require.NoError(t, err)
	const app = "app.emojivoto:80"
	d.Begin(app, meshtest.Added(one, two))
	has(t, client, app, one, two)
	down := grpchttp.Errorf(grpchttp.Unavailable, "it is down")
	d.Refuse(app, down)
	d.Cut()
	eventually(t, func() bool { return len(d.Asked()) >= 4 }, "it is asked again")
	has(t, client, app, one, two)
	assert.Contains(t, log.String(), "the destination service does not answer")
	d.Begin(app, meshtest.Added(plain))
	d.Refuse(app, nil)
	has(t, client, app, plain)

	d.Refuse("other:80", down)
	err = unanswered(t, client, "other:80", "it is down")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, fs.ErrNotExist)
}

type lockedBuffer = logtest.Buffer

// An application cannot have more than 1,000 services followed, whatever hosts it asks for. The streams end with the context.
func TestDestinationLimits(t *testing.T) {
	t.Parallel()
	d := meshtest.NewDestination(t, nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	client := must.Get(linkerdproxy.NewDestinations(ctx, nil, d.Service, nil))(t)
	over, stop := context.WithCancel(t.Context())
	stop()
	for i := range 1000 {
		require.ErrorIs(t, must.Err(client.Endpoints(over, fmt.Sprintf("app-%d:80", i))), context.Canceled)
		eventually(t, func() bool { return i > 0 || d.Streams() == 1 }, "a stream, whose connection the others use")
	}
	require.ErrorContains(t, must.Err(client.Endpoints(over, "app-1000:80")), "1000 services are followed")
	d.Push("app-7:80", meshtest.Added(one))
	eventually(t, func() bool { return d.Streams() == 1000 }, "streams")
	d.Push("app-8:80", meshtest.Added(one))
	has(t, client, "app-8:80", one)
	gone := errors.New("the proxy ends")
	cancel(gone)
	eventually(t, func() bool { return d.Streams() == 0 }, "the end of the streams")
	require.ErrorIs(t, must.Err(client.Endpoints(t.Context(), "app-9:80")), gone)
}

// Elsewhere than on loopback the destination service proves its name by the trust anchors, and the proxy its own, before anything
// is asked. On loopback there is no name and no TLS.
func TestDestinationIdentity(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-12.1-6", "LNK-12.2-12")
	c := meshtest.New(t, meshtest.Options{Life: time.Hour})
	d := meshtest.NewDestination(t, c)
	id := c.Certified(t, voting)
	const app = "app.emojivoto:80"
	d.Begin(app, meshtest.Added(one))
	client := destinations(t, d, id)
	has(t, client, app, one)
	assert.Equal(t, []meshtest.Ask{{Scheme: "k8s", Authority: app, Client: voting}}, d.Asked())

	own := must.Get(id.Credential())(t)
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*own.TLSCertificate()}}))(t)
	defer l.Close()
	got := make(chan int, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n, _ := c.Read(make([]byte, 1))
			got <- n
			_ = c.Close()
		}
	}()
	rogue := must.Get(linkerdproxy.NewDestinations(t.Context(), id,
		linkerdproxy.Service{Addr: fmt.Sprintf("0.0.0.0:%d", l.Addr().(*net.TCPAddr).Port), Name: meshtest.DestinationName}, nil))(t)
	unanswered(t, rogue, app, "and not for \""+meshtest.DestinationName+`"`)
	assert.Zero(t, <-got, "nothing is asked of another workload")
	other := meshtest.New(t, meshtest.Options{Life: time.Hour})
	unanswered(t, destinations(t, d, other.Certified(t, voting)), app, "certificate")
	assert.Len(t, d.Asked(), 1)

	near := linkerdproxy.Service{Addr: "127.0.0.1:1"}
	for _, bad := range []struct {
		id   *linkerdproxy.Identity
		s    linkerdproxy.Service
		want string
	}{
		{id, linkerdproxy.Service{}, "not a host"},
		{nil, linkerdproxy.Service{}, "not a host"},
		{id, linkerdproxy.Service{Addr: "dst.linkerd"}, "set the name"},
		{id, linkerdproxy.Service{Addr: near.Addr, Name: web}, "leave the name empty"},
		{nil, linkerdproxy.Service{Addr: "dst.linkerd", Name: web}, "without an identity"},
	} {
		require.ErrorContains(t, must.Err(linkerdproxy.NewDestinations(t.Context(), bad.id, bad.s, nil)), bad.want)
	}
	for _, good := range []struct {
		id *linkerdproxy.Identity
		s  linkerdproxy.Service
	}{{id, near}, {nil, near}, {nil, linkerdproxy.Service{Addr: "dst.linkerd"}}} {
		must.Get(linkerdproxy.NewDestinations(t.Context(), good.id, good.s, nil))(t)
	}
}

// Any bytes are read within limits, without a panic.
func FuzzDestination(f *testing.F) {
	f.Add(meshtest.Added(one, two, plain))
	f.Add(meshtest.Removed(one.Addr))
	f.Add(meshtest.None(true))
	f.Add(meshtest.Message(func(w *protofield.Writer) { w.Varint(1, 7) }))
	f.Fuzz(func(t *testing.T, message []byte) {
		all, err := linkerdproxy.ReadUpdate(message)
		if err != nil {
			return
		}
		for _, e := range all {
			assert.True(t, e.Addr.IsValid())
			assert.NotZero(t, e.Addr.Port())
		}
	})
}
