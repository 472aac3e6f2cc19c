package peers_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// worked is what a replica has done.
type worked struct {
	Signed int64         // certificates
	CPU    time.Duration // of its process
}

// work signs what a mesh of Kubernetes asks for until so many certificates are signed, and as long as that.
func work(ctx context.Context, a *ca.Authority, least int, long time.Duration) (w worked, err error) {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return w, err
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		return w, err
	}
	id := spiffe.MustParseID("spiffe://example.org/ns/payments/sa/checkout")
	r := ca.Request{ID: id, Caller: id.String(), Method: "kubernetes", Pod: spiffe.Pod{
		Cluster: "eu-west-1", Namespace: "payments", ServiceAccount: "checkout", Name: "checkout-7d9f8c6b54-x2x9q",
		UID: "6f1d2c3b-9a40-4c6e-8f55-0b1a2c3d4e5f", Node: "ip-10-0-12-34.eu-west-1.compute.internal",
	}}
	cpu := func() time.Duration {
		var u syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // never fails
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	w.CPU = -cpu()
	var count atomic.Int64
	var failed atomic.Pointer[error]
	var signers sync.WaitGroup
	for begin, left := time.Now(), 16; left > 0; left-- { // so that they share writes of the audit log
		signers.Go(func() {
			for failed.Load() == nil && (count.Load() < int64(least) || time.Since(begin) < long) {
				parsed, err := pki.ParseCSR(csr.DER())
				if err == nil {
					own := r
					own.CSR = parsed
					_, err = a.Sign(ctx, own)
				}
				if err != nil {
					failed.Store(&err)
					return
				}
				count.Add(1)
			}
		})
	}
	signers.Wait()
	w.Signed, w.CPU = count.Load(), w.CPU+cpu()
	if err := failed.Load(); err != nil {
		return w, *err
	}
	return w, nil
}

// A workingFleet is replicas that only sign, each with an audit log of its own and with one processor.
type workingFleet struct {
	t     *testing.T
	dir   string
	slots []*replicaSlot
}

func newWorkingFleet(t *testing.T, n int, spec replicaSpec) *workingFleet {
	t.Helper()
	f := &workingFleet{t: t, dir: t.TempDir()}
	for i := range n {
		spec.Audit = filepath.Join(f.dir, fmt.Sprint("audit", i))
		r := newReplicaSlot(f.dir, i, spec)
		r.client.Timeout = 10 * time.Minute
		r.start(t, filepath.Join(f.dir, "log"), "GOMAXPROCS=1")
		r.process.Ready(t, func() error {
			var s shown
			return r.do(t.Context(), "GET", "state", nil, &s)
		})
		f.slots = append(f.slots, r)
	}
	return f
}

// work has all of them sign, and returns what they did together.
func (f *workingFleet) work(least int, long time.Duration) (sum worked) {
	f.t.Helper()
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, r := range f.slots {
		all.Go(func() {
			var w worked
			q := url.Values{"least": {strconv.Itoa(least)}, "for": {long.String()}}
			if assert.NoError(f.t, r.do(f.t.Context(), "POST", "work?"+q.Encode(), nil, &w)) {
				mu.Lock()
				defer mu.Unlock()
				sum.Signed, sum.CPU = sum.Signed+w.Signed, sum.CPU+w.CPU
			}
		})
	}
	all.Wait()
	return sum
}

// kill ends them.
func (f *workingFleet) kill() {
	for _, r := range f.slots {
		r.kill()
	}
}

// auditLine returns the mean length of a line of their audit logs.
func (f *workingFleet) auditLine() float64 {
	lines, size := 0, 0
	for i := range f.slots {
		text := must.Get(os.ReadFile(filepath.Join(f.dir, fmt.Sprint("audit", i))))(f.t)
		lines, size = lines+bytes.Count(text, []byte("\n")), size+len(text)
	}
	return float64(size) / float64(lines)
}

// A countingDatabase is a PostgreSQL that counts the statements of the CA.
type countingDatabase struct {
	*peers.Database
	t     *testing.T
	store string // as in openStore
}

func newCountingDatabase(t *testing.T) *countingDatabase {
	t.Helper()
	d := peers.NewPostgreSQL(t, "shared_preload_libraries = 'pg_stat_statements'")
	d.Admin(t, "CREATE EXTENSION pg_stat_statements")
	prepared(t, d)
	return &countingDatabase{d, t, "postgres " + d.DSN("issuer", "svidkit")}
}

// statements returns how many statements of a kind, such as UPDATE, or of all kinds if that is empty, the database has
// executed for the CA.
func (d *countingDatabase) statements(kind string) int {
	d.t.Helper()
	return d.number("SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE userid = 'issuer'::regrole" +
		" AND query LIKE '" + kind + "%'")
}

func (d *countingDatabase) number(query string) int {
	d.t.Helper()
	return must.Get(strconv.Atoi(strings.TrimSpace(d.Admin(d.t, query))))(d.t)
}

// A certificate costs the database nothing: while three replicas sign 12,000, it executes no statement for them. They
// do not call Run, which reads the record now and then, whatever is signed.
func TestStoreCostsNothing(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	d := newCountingDatabase(t)
	f := newWorkingFleet(t, 3, replicaSpec{Store: d.store, Usual: true, Quiet: true})
	before := d.statements("")
	require.GreaterOrEqual(t, before, 3, "each of them has read the record")
	signed := f.work(4000, 0).Signed
	assert.GreaterOrEqual(t, signed, int64(12_000))
	assert.Equal(t, before, d.statements(""), "statements while %d certificates were signed", signed)
}

// TestReplicaFigures prints what examples/SCALE.md computes with: certificates in a second of one, three and five
// processes with one processor each, which take turns; what they ask of the database while they sign and while they do
// not; the length of a line of the audit log; and what a bundle is on the wire.
func TestReplicaFigures(t *testing.T) {
	if !*long {
		t.Skip("it measures: run it with -long")
	}
	d := newCountingDatabase(t)
	dir := "directory " + filepath.Join(t.TempDir(), "ca")
	const turns, turn = 5, 3 * time.Second
	type setting struct {
		store string
		n     int
	}
	rates, costs := map[setting][]float64{}, map[setting][]float64{}
	var line float64
	for range turns {
		for _, n := range []int{1, 3, 5} {
			for _, store := range []string{dir, d.store} {
				f := newWorkingFleet(t, n, replicaSpec{Store: store, Usual: true})
				begin := time.Now()
				w := f.work(0, turn)
				k := setting{store, n}
				rates[k] = append(rates[k], float64(w.Signed)/time.Since(begin).Seconds())
				costs[k] = append(costs[k], float64(w.CPU.Microseconds())/float64(w.Signed))
				line = f.auditLine()
				f.kill()
			}
		}
	}
	one := median(rates[setting{dir, 1}])
	for _, n := range []int{1, 3, 5} {
		for _, store := range []string{dir, d.store} {
			k := setting{store, n}
			t.Logf("%d replicas with %s: %.0f certificates/s, %.2f times one with a directory; "+
				"%.0f µs of a processor for each", n, strings.Fields(store)[0], median(rates[k]), median(rates[k])/one,
				median(costs[k]))
		}
	}
	f := newWorkingFleet(t, 5, replicaSpec{Store: d.store, Usual: true})
	for _, busy := range []bool{false, true, false, true} {
		before, begin, signed := d.statements(""), time.Now(), int64(0)
		if busy {
			signed = f.work(0, time.Minute).Signed
		} else {
			time.Sleep(time.Minute)
		}
		t.Logf("5 replicas with the usual settings, %d certificates: %.2f statements a second and replica", signed,
			float64(d.statements("")-before)/time.Since(begin).Seconds()/5)
	}
	f.kill()
	d.Admin(t, "DELETE FROM svidkit_ca")
	f = newWorkingFleet(t, 5, replicaSpec{Store: d.store})
	time.Sleep(2 * propagation()) // the first key for tokens
	before := d.statements("UPDATE")
	const rotations = 5
	for range rotations {
		var id string
		require.EventuallyWithT(t, func(t *assert.CollectT) {
			require.NoError(t, f.slots[0].do(context.Background(), "POST", "rotate?only", nil, &id))
		}, time.Minute, 50*time.Millisecond)
	}
	size := d.number("SELECT max(length(data)) FROM svidkit_ca")
	time.Sleep(2 * replicaTTL)
	t.Logf("%.1f writes for a rotation, with those of replicas that come second; a record of %d bytes with %d roots, "+
		"and %d with one",
		float64(d.statements("UPDATE")-before)/rotations, size, rotations+1,
		d.number("SELECT max(length(data)) FROM svidkit_ca"))
	f.kill()
	t.Logf("a line of the audit log: %.0f bytes", line)
	bundleFigures(t)
}

func median(of []float64) float64 { return slices.Sorted(slices.Values(of))[len(of)/2] }

// countedConn counts the bytes of connections.
type countedConn struct {
	net.Conn
	n *atomic.Int64
}

func (w countedConn) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	w.n.Add(int64(n))
	return n, err
}

func (w countedConn) Write(b []byte) (int, error) {
	n, err := w.Conn.Write(b)
	w.n.Add(int64(n))
	return n, err
}

// present is the bundle of a CA as it is now.
type present struct{ *ca.Authority }

func (p present) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return p.Authority.Bundle().Bundle(td)
}

// bundleFigures prints what a client of a bundle endpoint and its server send each other: all bytes of a connection of
// TLS for one request, for the bundle of a CA with one root and one key for tokens, and of a CA that rotates.
func bundleFigures(t *testing.T) {
	config := (&replicaSpec{Usual: true}).config(t)
	config.JWT = new(ca.JWTConfig)
	a := must.Get(ca.New(config))(t)
	server := httptest.NewUnstartedServer(must.Get(federation.NewHandler(present{a}, replicaID.TrustDomain()))(t))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	transport := server.Client().Transport.(*http.Transport)
	var n atomic.Int64
	transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		return countedConn{c, &n}, err
	}
	get := func(tag string) (int, int64, string) {
		transport.CloseIdleConnections()
		n.Store(0)
		r := must.Get(http.NewRequestWithContext(t.Context(), "GET", server.URL, nil))(t)
		if tag != "" {
			r.Header.Set("If-None-Match", tag)
		}
		resp := must.Get(server.Client().Do(r))(t)
		defer resp.Body.Close()
		body := must.Get(io.ReadAll(resp.Body))(t)
		return len(body), n.Load(), resp.Header.Get("ETag")
	}
	for _, state := range []string{"at rest", "in a rotation of both"} {
		if state != "at rest" {
			must.Get(a.Rotate(t.Context()))(t)
			must.Get(a.RotateJWT(t.Context()))(t)
		}
		size, whole, tag := get("")
		_, same, _ := get(tag)
		t.Logf("a bundle %s: %d bytes; on a new connection %d, and %d if it has not changed", state, size, whole, same)
	}
}
