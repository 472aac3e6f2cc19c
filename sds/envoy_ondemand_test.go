package sds_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// edge is an Envoy with the configuration of examples/ENVOY.md, the server that it asks, and its clients.
type edge struct {
	*envoytest.Envoy
	t      testing.TB
	mint   mint
	src    *fakeSource
	h      *sds.Handler
	addr   string
	client tls.Certificate
	socket string
	stop   func()      // the server
	secret atomic.Bool // the Envoy may have the names of the namespace secret
}

const (
	handshakeTimeout = 3 * time.Second // of the listener
	spare            = 10              // names for which there is room beside those that a test wants
)

// bootstrapOf returns the configuration of the page, by ADS or with a stream for each name.
func bootstrapOf(t testing.TB, ads bool) string {
	page := must.Get(os.ReadFile("../examples/ENVOY.md"))(t)
	blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(string(page), -1)
	require.Len(t, blocks, 2)
	replace := func(s, old, with string) string {
		require.Equal(t, 1, strings.Count(s, old), "%s in the page", old)
		return strings.Replace(s, old, with, 1)
	}
	bootstrap := blocks[0][1]
	if !ads {
		one := regexp.MustCompile(`(?m)^ *config_source: .*\n`).FindString(bootstrap)
		bootstrap = replace(bootstrap, one, blocks[1][1])
		breakers := regexp.MustCompile("`(circuit_breakers: .*?)`").FindStringSubmatch(string(page))
		require.NotNil(t, breakers)
		bootstrap = replace(bootstrap, "  - name: sds\n", "  - name: sds\n    "+breakers[1]+"\n")
		begin, end := strings.Index(bootstrap, "dynamic_resources:"), strings.Index(bootstrap, "static_resources:")
		bootstrap = bootstrap[:begin] + bootstrap[end:]
	}
	bootstrap = replace(bootstrap, "/run/svidkit/sds.sock", "./s.sock")
	bootstrap = replace(bootstrap, "connect_timeout: 5s", "connect_timeout: "+handshakeTimeout.String())
	bootstrap = replace(bootstrap, "port_value: 9901", "port_value: 0")
	return replace(bootstrap, "port_value: 8443", "port_value: 0")
}

// startEdge starts the Envoy at the path bin, in front of an application that says "ok" to each connection, and then
// what it is told.
func startEdge(t testing.TB, bin, bootstrap string, names int) *edge {
	e := &edge{t: t, mint: newMint(t), src: newFakeSource()}
	e.src.put("ROOTCA", e.mint.roots("ROOTCA"))
	e.client = *e.mint.ca.SVID("/client").TLSCertificate()
	dir := socketDir(t)
	e.socket = filepath.Join(dir, "s.sock")
	e.serve(names)
	app := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var conns sync.WaitGroup
	t.Cleanup(func() { _ = app.Close(); conns.Wait() }) // when Envoy has gone
	conns.Go(func() {
		for c, err := app.Accept(); err == nil; c, err = app.Accept() {
			conns.Go(func() {
				_, _ = io.WriteString(c, "ok")
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	_, port, _ := net.SplitHostPort(app.Addr().String())
	e.Envoy = envoytest.StartConfig(t, bin, dir, "edge", strings.Replace(bootstrap, "port_value: 8080", "port_value: "+port, 1))
	e.WaitLive(patient)
	e.addr = e.ListenerAddr("edge", patient)
	return e
}

// serve starts the SDS server, with room for so many names on a stream, those that are spare and the roots.
func (e *edge) serve(names int) {
	e.h = handler(e.t, e.src, &sds.Options{Resolve: e.resolve, MaxNames: names + spare + 1})
	_, e.stop = serve(e.t, e.h, func(s *unixsocket.Server) { s.Path = e.socket })
}

// resolve maps the name of a service in Kubernetes to the SPIFFE ID of its workload, if the caller may have that.
func (e *edge) resolve(ctx context.Context, name string) (string, error) {
	if name == "ROOTCA" {
		return name, nil
	}
	peer, ok := unixsocket.PeerFromContext(ctx)
	service, found := strings.CutSuffix(name, ".svc.cluster.local")
	account, namespace, dot := strings.Cut(service, ".")
	switch {
	case ok && int(peer.UID) != os.Getuid():
		return "", errors.New("another user")
	case !found || !dot:
		return "", errors.New("not the name of a service")
	case namespace == "secret" && !e.secret.Load():
		return idOf(namespace, account), errors.New("a namespace of others")
	}
	return idOf(namespace, account), nil
}

func idOf(namespace, account string) string {
	return "spiffe://example.org/ns/" + namespace + "/sa/" + account
}

func serverName(i int) string { return fmt.Sprintf("web-%d.shop.svc.cluster.local", i) }

// pairs returns a new certificate for each of n workloads, under their IDs.
func (e *edge) pairs(n int) []*pki.Secret {
	all := make([]*pki.Secret, n)
	for i := range all {
		all[i] = e.pair("shop", fmt.Sprint("web-", i))
	}
	return all
}

func (e *edge) pair(namespace, account string) *pki.Secret {
	s := must.Do(pki.NewKeyPairSecret(idOf(namespace, account), e.mint.ca.SVID("/ns/"+namespace+"/sa/"+account)))
	return s
}

func (e *edge) put(secrets ...*pki.Secret) {
	for _, s := range secrets {
		e.src.put(s.Name(), s)
	}
}

// dial makes a connection for a server name, and reads what the application says: so Envoy has verified the client.
func (e *edge) dial(name string) (c *tls.Conn, took time.Duration, err error) {
	begin := time.Now()
	c, err = tls.DialWithDialer(&net.Dialer{Timeout: patient}, "tcp", e.addr, &tls.Config{
		InsecureSkipVerify: true, ServerName: name, Certificates: []tls.Certificate{e.client}, // the caller looks
	})
	if took = time.Since(begin); err == nil {
		err = says(c, "ok")
	}
	return c, took, err
}

func says(c *tls.Conn, want string) error {
	said := make([]byte, len(want))
	if _, err := io.ReadFull(c, said); err != nil || string(said) != want {
		_ = c.Close()
		return fmt.Errorf("%q: %w", said, err)
	}
	return nil
}

// connect makes a connection for a server name and ends it. It returns the serial number of the certificate that Envoy has shown,
// its ID, and how long the handshake took.
func (e *edge) connect(name string) (serial, id string, took time.Duration, err error) {
	c, took, err := e.dial(name)
	if err != nil {
		return "", "", took, err
	}
	defer c.Close()
	leaf := c.ConnectionState().PeerCertificates[0]
	return envoytest.Serial(leaf.SerialNumber), leaf.URIs[0].String(), took, nil
}

func (e *edge) shows(name string, s *pki.Secret) {
	e.t.Helper()
	serial, id, _, err := e.connect(name)
	require.NoError(e.t, err, name)
	require.Equal(e.t, leafSerial(e.t, s), serial, name)
	require.Equal(e.t, s.Name(), id)
}

// fails asserts that there is no certificate for a name, and that Envoy says so at once.
func (e *edge) fails(name string) time.Duration {
	e.t.Helper()
	_, _, took, err := e.connect(name)
	require.ErrorContains(e.t, err, "handshake failure", name)
	require.Less(e.t, took, handshakeTimeout-time.Second, name)
	return took
}

// stat returns a figure of the selector.
func (e *edge) stat(name string) int {
	e.t.Helper()
	_, figure, _ := strings.Cut(e.Admin("/stats?filter=on_demand_secret."+name), ": ")
	return must.Do(strconv.Atoi(strings.TrimSpace(figure)))
}

func (e *edge) allocated() int {
	m := regexp.MustCompile(`"allocated": "(\d+)"`).FindStringSubmatch(e.Admin("/memory"))
	require.NotNil(e.t, m)
	return must.Do(strconv.Atoi(m[1]))
}

func ownMemory() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc + m.StackInuse) // it fits
}

// load connects for names of the first n workloads until stop is called, which returns the failures.
func (e *edge) load(n int) (stop func() (done int, failed []string)) {
	ctx, cancel := context.WithCancel(context.Background())
	e.t.Cleanup(cancel)
	var (
		wg     sync.WaitGroup
		done   atomic.Int64
		mu     sync.Mutex
		failed []string
	)
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				name := serverName(rand.IntN(n))
				if _, _, _, err := e.connect(name); err != nil {
					mu.Lock()
					failed = append(failed, name+": "+err.Error())
					mu.Unlock()
				}
				done.Add(1)
				time.Sleep(5 * time.Millisecond) // it is not to measure itself
			}
		})
	}
	return func() (int, []string) {
		cancel()
		wg.Wait()
		return int(done.Load()), failed
	}
}

func share(d []time.Duration, percent int) time.Duration {
	slices.Sort(d)
	return d[(len(d)-1)*percent/100].Round(10 * time.Microsecond)
}

// TestEnvoyOnDemand has one listener that shows a certificate of another workload for each server name, by the
// configuration of examples/ENVOY.md, with each Envoy that has it.
func TestEnvoyOnDemand(t *testing.T) {
	t.Parallel()
	for _, bin := range append([]string{envoytest.Binary(t)}, envoytest.Old(t)...) {
		version := envoytest.Version(t, bin)
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			var major, minor int
			must.Get(fmt.Sscanf(version, "%d.%d", &major, &minor))(t)
			if major == 1 && minor < 38 {
				t.Skipf("Envoy %s has no certificates on demand, or (1.37.0) resumes sessions that it must not: this is for 1.38 and later", version)
			}
			t.Run("one stream", func(t *testing.T) {
				t.Parallel()
				testOnDemand(t, startEdge(t, bin, bootstrapOf(t, true), scaled(5000, 1000)), scaled(5000, 1000), true)
			})
			t.Run("a stream for each name", func(t *testing.T) {
				t.Parallel()
				testOnDemand(t, startEdge(t, bin, bootstrapOf(t, false), 1), scaled(1000, 200), false)
			})
			for name, ads := range map[string]bool{"SotW": true, "SotW, a stream for each name": false} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					testOnDemandSotW(t, startEdge(t, bin, strings.Replace(bootstrapOf(t, ads), "DELTA_GRPC", "GRPC", 1), 10), ads)
				})
			}
		})
	}
}

func testOnDemand(t *testing.T, e *edge, n int, one bool) {
	streams := func() int { return e.h.Status().Streams }
	first := e.pairs(n)
	e.put(first...)
	begin, own := e.allocated(), ownMemory()
	took := make([]time.Duration, n)
	for i := range took {
		serial, id, d, err := e.connect(serverName(i))
		require.NoError(t, err, "name %d", i)
		require.Equal(t, first[i].Name(), id)
		require.Equal(t, leafSerial(t, first[i]), serial)
		took[i] = d
	}
	assert.Equal(t, n, e.stat("cert_active"))
	assert.Len(t, e.h.Status().Names, n+1)
	leaves, _ := e.Serials()
	assert.Empty(t, leaves, "/certs does not have them")
	assert.Positive(t, e.Stat("listener.127.0.0.1_0.on_demand_secret.ssl.certificate."+serverName(0)+".expiration_unix_time_seconds"))
	if one {
		assert.Equal(t, 1, streams(), "one stream has all names")
	} else {
		assert.Equal(t, n+1, streams())
	}
	t.Logf("first handshakes of %d names: p50 %v, p99 %v, longest %v; streams: %d", n, share(took, 50), share(took, 99), share(took, 100), streams())
	t.Logf("memory for a name: %d bytes of Envoy, %d bytes of the server with its end of the connections", (e.allocated()-begin)/n, (ownMemory()-own)/n)
	took = took[:n/5]
	for i := range took {
		_, _, took[i], _ = e.connect(serverName(i))
	}
	t.Logf("further handshakes: p50 %v, p99 %v", share(took, 50), share(took, 99))

	// A resumed session would go on with a certificate that was withdrawn.
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		config := &tls.Config{
			InsecureSkipVerify: true, ServerName: serverName(0), Certificates: []tls.Certificate{e.client}, // as above
			MinVersion: version, MaxVersion: version, ClientSessionCache: tls.NewLRUClientSessionCache(2),
		}
		for range 2 {
			c := must.Get(tls.Dial("tcp", e.addr, config))(t)
			require.NoError(t, says(c, "ok")) // a ticket of TLS 1.3 would be there
			assert.False(t, c.ConnectionState().DidResume, "%x", version)
			require.NoError(t, c.Close())
		}
	}

	// Names that do not exist, or that this Envoy may not have, fail alone, and work once that changes.
	const absent, denied = "absent.shop.svc.cluster.local", "web.secret.svc.cluster.local"
	hidden := e.pair("secret", "web")
	e.put(hidden)
	stop := e.load(n)
	t.Logf("an absent name fails after %v, one that is denied after %v, and one that is no name of a service after %v",
		e.fails(absent), e.fails(denied), e.fails("www.example.com"))
	e.fails(absent)
	_, _, _, err := e.connect("") // which asks for "default"
	require.ErrorContains(t, err, "handshake failure")
	here := e.pair("shop", "absent")
	e.put(here)
	e.shows(absent, here)
	e.fails(denied)
	e.secret.Store(true)
	e.h.Refresh()
	e.shows(denied, hidden)

	// All certificates are renewed.
	second, updated := e.pairs(n), e.stat("cert_updated")
	mark := time.Now()
	e.put(second...)
	require.Eventually(t, func() bool { return e.stat("cert_updated") >= updated+n }, patient, 50*time.Millisecond)
	rotated := time.Since(mark)
	done, failed := stop()
	assert.Empty(t, failed)
	t.Logf("all %d are new after %v; %d handshakes meanwhile, %d failed", n, rotated.Round(time.Millisecond), done, len(failed))
	for i, s := range second {
		e.shows(serverName(i), s)
	}

	// What is withdrawn, or no longer permitted, is no longer shown. Connections stay.
	stop = e.load(n - 1)
	open, _, err := e.dial(serverName(n - 1))
	require.NoError(t, err)
	defer open.Close()
	e.src.put(second[n-1].Name(), nil)
	gone := func(name string) func() bool {
		return func() bool { _, _, _, err := e.connect(name); return err != nil }
	}
	mark = time.Now()
	require.Eventually(t, gone(serverName(n-1)), patient, time.Millisecond)
	t.Logf("a withdrawn certificate is gone after %v", time.Since(mark).Round(time.Millisecond))
	e.fails(serverName(n - 1))
	e.secret.Store(false)
	e.h.Refresh()
	require.Eventually(t, gone(denied), patient, time.Millisecond)
	e.fails(denied)
	must.Get(io.WriteString(open, "still here"))(t)
	require.NoError(t, says(open, "still here"))
	e.put(second[n-1])
	e.shows(serverName(n-1), second[n-1])

	// Names whose look-up takes long, more than there is room for, cost nothing but themselves.
	var wg sync.WaitGroup
	for i := range 3 * spare {
		account := fmt.Sprint("slow-", i)
		e.src.fail(idOf("shop", account), errors.New("the CA is down"))
		wg.Go(func() {
			_, _, _, err := e.connect(account + ".shop.svc.cluster.local")
			assert.Error(t, err)
		})
	}
	wg.Wait()
	if one {
		assert.Equal(t, 1, streams())
		assert.EqualValues(t, 1, e.Stat("cluster.sds.upstream_rq_total"), "the stream has not ended")
	}
	third := e.pair("shop", "web-0")
	e.put(third)
	require.Eventually(t, func() bool { serial, _, _, _ := e.connect(serverName(0)); return serial == leafSerial(t, third) }, patient, time.Millisecond)
	done, failed = stop()
	assert.Empty(t, failed, "of %d", done)
	assert.Zero(t, e.h.Status().NACKs)

	// Without the server Envoy shows what it has.
	e.stop()
	require.NoError(t, e.h.Close())
	stop = e.load(n)
	_, _, waited, err := e.connect("late.shop.svc.cluster.local")
	require.Error(t, err)
	assert.GreaterOrEqual(t, waited, handshakeTimeout-time.Second, "it waits for an answer")
	late, fourth := e.pair("shop", "late"), e.pair("shop", "web-0")
	e.put(late, fourth)
	if one {
		e.serve(n)
	} else {
		e.serve(1)
	}
	mark = time.Now()
	require.Eventually(t, func() bool { serial, _, _, _ := e.connect(serverName(0)); return serial == leafSerial(t, fourth) }, 2*patient, 10*time.Millisecond)
	t.Logf("%v after its return the server has been asked again", time.Since(mark).Round(time.Millisecond))
	require.Eventually(t, func() bool {
		serial, _, _, _ := e.connect("late.shop.svc.cluster.local")
		return serial == leafSerial(t, late)
	}, 2*patient, 10*time.Millisecond) // each stream comes back when it likes
	done, failed = stop()
	assert.Empty(t, failed, "of %d", done)
}

// testOnDemandSotW shows why the page says DELTA_GRPC: SotW has no word for a name that does not exist, or no longer.
func testOnDemandSotW(t *testing.T, e *edge, one bool) {
	first := e.pairs(5)
	e.put(first...)
	for i, s := range first {
		e.shows(serverName(i), s)
	}
	if one {
		assert.Equal(t, 1, e.h.Status().Streams)
	}
	const absent = "absent.shop.svc.cluster.local"
	_, _, took, err := e.connect(absent)
	require.Error(t, err)
	assert.GreaterOrEqual(t, took, handshakeTimeout-time.Second, "the client waits until the listener gives up")
	t.Logf("an absent name fails after %v", took)
	here, second := e.pair("shop", "absent"), e.pairs(5)
	e.put(append(second, here)...)
	e.shows(absent, here)
	for i, s := range second {
		require.Eventually(t, func() bool { serial, _, _, _ := e.connect(serverName(i)); return serial == leafSerial(t, s) }, patient, time.Millisecond)
	}
	e.src.put(second[0].Name(), nil)
	time.Sleep(300 * time.Millisecond)
	e.shows(serverName(0), second[0]) // until Envoy ends
	assert.Zero(t, e.h.Status().NACKs)
}
