//go:build go1.27

package readme_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
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

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

var quantumTable = flag.Bool("table", false, "measure, and print the table of QUANTUM.md")

// TestQuantumFigures holds the sizes in examples/QUANTUM.md against what is measured; the times and the memory need -table,
// which prints all rows for the page:
//
//	GOTOOLCHAIN=go1.27.4 go -C internal/checks test -v ./readme -run TestQuantumFigures -table
func TestQuantumFigures(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	var domains []*figures
	for _, alg := range []string{"ecdsa-p256", "ml-dsa-44", "ml-dsa-65"} {
		domains = append(domains, newFigures(t, alg))
	}
	var rows []string
	sizes := map[string][]int{}
	size := func(name string, of func(*figures) int) {
		row := "| " + name + " |"
		for _, d := range domains {
			n := of(d)
			sizes[name] = append(sizes[name], n)
			row += " " + thousands(n) + " |"
		}
		rows = append(rows, row)
	}
	timed := func(name string, prepare func(*figures) func()) {
		if !*quantumTable {
			return
		}
		row := "| " + name + " |"
		for _, d := range inTurns(domains, prepare) {
			row += " " + short(d) + " |"
		}
		rows = append(rows, row)
	}
	timed("sign", func(d *figures) func() { return func() { d.sign() } })
	timed("verify a signature", func(d *figures) func() {
		signature := d.sign()
		return func() { d.check(signature) }
	})
	timed("verify an X.509-SVID, the first time", func(d *figures) func() {
		return func() { must.Do(d.verifier().VerifyChain(d.svid.Chain(), spiffe.ServerRole)) }
	})
	timed("mTLS, full handshake, both sides", func(d *figures) func() { return func() { d.handshake(nil) } })
	timed("mTLS, resumed handshake, both sides", func(d *figures) func() {
		sessions := tls.NewLRUClientSessionCache(1)
		d.handshake(sessions)
		return func() { d.handshake(sessions) }
	})
	timed("CA: from a request's bytes to a certificate", func(d *figures) func() {
		csr := must.Get(pki.NewCSR(d.key, pki.CSROptions{}))(t).DER()
		return func() {
			must.Do(d.ca.Sign(context.Background(), ca.Request{CSR: must.Do(pki.ParseCSR(csr)), ID: d.svid.ID()}))
		}
	})
	timed("SDS: a new secret at one client", func(d *figures) func() { return d.pushes(t).one })
	size("CSR, bytes", func(d *figures) int { return len(must.Get(pki.NewCSR(d.key, pki.CSROptions{}))(t).DER()) })
	size("leaf, bytes", func(d *figures) int { return len(d.svid.Leaf().Raw) })
	size("mTLS, full handshake, bytes from the client", func(d *figures) int { return d.handshake(nil)[0] })
	size("mTLS, full handshake, bytes from the server", func(d *figures) int { return d.handshake(nil)[1] })
	resumed := func(side int) func(d *figures) int {
		return func(d *figures) int {
			sessions := tls.NewLRUClientSessionCache(1)
			d.handshake(sessions)
			return d.handshake(sessions)[side]
		}
	}
	size("mTLS, resumed handshake, bytes from the client", resumed(0))
	size("mTLS, resumed handshake, bytes from the server", resumed(1))
	size("SDS: a push of one secret, bytes", func(d *figures) int { return d.pushes(t).bytes() })
	size("bundle of two roots, DER, bytes", func(d *figures) int { return len(d.roots(t, d.alg, d.alg).ders) })
	size("bundle of two roots, document, bytes", func(d *figures) int { return len(d.roots(t, d.alg, d.alg).document) })
	size("bundle of a P-256 root and this one, document, bytes", func(d *figures) int { return len(d.roots(t, "ecdsa-p256", d.alg).document) })
	if *quantumTable {
		for _, alternative := range []string{"", "ml-dsa-44"} {
			name := "10,000 identities in memory, MB"
			if alternative != "" {
				name = "10,000 identities with an ML-DSA-44 alternative each, MB"
			}
			row := "| " + name + " |"
			for _, d := range domains {
				if alternative != "" && d.alg != "ecdsa-p256" {
					row += " – |"
					continue
				}
				row += fmt.Sprintf(" %.0f |", d.memory(t, 10_000, alternative)/1e6)
			}
			rows = append(rows, row)
		}
		t.Logf("%s, %d processors\n| | P-256 | ML-DSA-44 | ML-DSA-65 |\n|---|--:|--:|--:|\n%s", runtime.Version(), runtime.NumCPU(), strings.Join(rows, "\n"))
	}
	page := string(must.Get(os.ReadFile("../../../examples/QUANTUM.md"))(t))
	for name, want := range sizes {
		row := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(name) + ` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$`).FindStringSubmatch(page)
		if !assert.NotNil(t, row, "QUANTUM.md has no row %q", name) {
			continue
		}
		for i, n := range want {
			stated := must.Get(strconv.Atoi(strings.ReplaceAll(row[i+1], ",", "")))(t)
			assert.InEpsilon(t, stated, n, 0.02, "%s, of %s", name, domains[i].alg) // ECDSA's signatures differ in length
		}
	}
}

// figures is a trust domain with keys of one algorithm.
type figures struct {
	alg    string
	ca     *ca.Authority
	key    crypto.Signer
	svid   *spiffe.SVID
	digest [32]byte

	server, client *spiffetls.Endpoint
	push           *pushes
}

func newFigures(t *testing.T, alg string) *figures {
	td := spiffe.MustParseTrustDomain("example.org")
	d := &figures{alg: alg, key: must.Get(pki.NewKey(alg))(t), digest: sha256.Sum256([]byte("figures"))}
	d.ca = must.Get(ca.New(ca.Config{TrustDomain: td, Algorithms: spiffe.AnyAlgorithm(), Rotation: ca.Rotation{KeyAlgorithm: alg}}))(t)
	csr := must.Get(pki.NewCSR(d.key, pki.CSROptions{}))(t)
	id := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
	d.svid = must.Get(spiffe.NewSVID(must.Get(d.ca.Sign(t.Context(), ca.Request{CSR: csr, ID: id}))(t), d.key))(t)
	for _, e := range []**spiffetls.Endpoint{&d.server, &d.client} {
		*e = must.Get(spiffetls.New(spiffetls.Config{Self: d.svid, Peers: d.ca.Bundle(), Allow: spiffe.AllowIDs(id), Algorithms: spiffe.AnyAlgorithm()}))(t)
	}
	return d
}

func (d *figures) sign() []byte {
	if d.alg == "ecdsa-p256" {
		return must.Do(d.key.Sign(nil, d.digest[:], crypto.SHA256))
	}
	return must.Do(d.key.Sign(nil, d.digest[:], crypto.Hash(0)))
}

func (d *figures) check(signature []byte) {
	good := false
	if key, ok := d.key.Public().(*ecdsa.PublicKey); ok {
		good = ecdsa.VerifyASN1(key, d.digest[:], signature)
	} else {
		good = mldsa.Verify(d.key.Public(), d.digest[:], signature)
	}
	if !good {
		panic("the signature is bad")
	}
}

// verifier returns one that remembers nothing.
func (d *figures) verifier() *spiffe.Verifier {
	return must.Do(spiffe.NewVerifier(d.ca.Bundle(), spiffe.AllowIDs(d.svid.ID()), nil)).WithAlgorithms(spiffe.AnyAlgorithm())
}

// counting counts what is written to a connection.
type counting struct {
	net.Conn
	n int
}

func (c *counting) Write(p []byte) (int, error) {
	c.n += len(p)
	return c.Conn.Write(p)
}

// handshake makes a connection in memory, of endpoints that have verified nothing yet, and sends a byte to the client, which
// thus has the session. It returns the bytes of the client and those of the server, with that byte.
func (d *figures) handshake(sessions tls.ClientSessionCache) (sent [2]int) {
	near, far := memconn.Pipe()
	client, server := &counting{Conn: near}, &counting{Conn: far}
	config := must.Do(d.fresh(sessions != nil, &d.client).ClientConfig())
	config.ClientSessionCache, config.ServerName = sessions, "web"
	var wg sync.WaitGroup
	wg.Go(func() {
		conn := must.Do(d.fresh(sessions != nil, &d.server).Server(context.Background(), server))
		must.Do(conn.Write([]byte("x")))
	})
	conn := tls.Client(client, config)
	must.Do(conn.Read(make([]byte, 1)))
	wg.Wait()
	sent = [2]int{client.n, server.n}
	_, _ = near.Close(), far.Close()
	return sent
}

// fresh returns an endpoint that has verified nothing yet, or the one that has.
func (d *figures) fresh(known bool, e **spiffetls.Endpoint) *spiffetls.Endpoint {
	if known {
		return *e
	}
	return must.Do(spiffetls.New(spiffetls.Config{Self: d.svid, Peers: d.ca.Bundle(), Allow: spiffe.AllowIDs(d.svid.ID()), Algorithms: spiffe.AnyAlgorithm()}))
}

type bundle struct{ ders, document []byte }

// roots returns a bundle with roots of these algorithms, as this CA makes them.
func (d *figures) roots(t *testing.T, algorithms ...string) (b bundle) {
	var roots []*x509.Certificate
	for _, alg := range algorithms {
		root := newFigures(t, alg).ca.Status().Roots[0].Certificate
		roots, b.ders = append(roots, root), append(b.ders, root.Raw...)
	}
	all := must.Get(spiffe.NewBundle(d.ca.Bundle().TrustDomain(), spiffe.BundleContents{X509Authorities: roots, RefreshHint: 5 * time.Minute}))(t)
	b.document = must.Get(all.Marshal())(t)
	return b
}

// memory returns the bytes that a secretcache.Manager keeps for n identities.
func (d *figures) memory(t *testing.T, n int, alternative string) float64 {
	td, authority := d.ca.Bundle().TrustDomain(), d.ca
	config := secretcache.Config{TrustDomain: td, NewKey: func() (crypto.Signer, error) { return pki.NewKey(d.alg) }}
	if alternative != "" {
		authority = must.Get(ca.New(ca.Config{TrustDomain: td, Algorithms: spiffe.AnyAlgorithm(), Rotation: ca.Rotation{KeyAlgorithm: d.alg + "," + alternative}}))(t)
		config.NewAlternative = func() (crypto.Signer, error) { return pki.NewKey(alternative) }
	}
	config.CA = must.Get(local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) { return csr.ID() }))(t)
	heap := func() float64 {
		runtime.GC()
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return float64(s.HeapAlloc)
	}
	fill := func(n int) *secretcache.Manager {
		m := must.Get(secretcache.New(config))(t)
		for i := range n {
			id := spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/ns/prod/sa/web-%d", i))
			require.NoError(t, m.Add(id))
			must.Get(m.GenerateSecret(t.Context(), id.String()))(t)
		}
		return m
	}
	fill(10)
	before := heap()
	m := fill(n)
	after := heap()
	runtime.KeepAlive(m)
	return after - before
}

// pushes is an SDS server with one client, which counts the bytes that come.
type pushes struct {
	secrets [2]*pki.Secret
	now     atomic.Int64
	changed func(string)
	came    chan *pki.Secret
	sent    atomic.Int64
}

func (p *pushes) GenerateSecret(context.Context, string) (*pki.Secret, error) {
	return p.secrets[p.now.Load()%2], nil
}

func (p *pushes) Subscribe(f func(string)) func() {
	p.changed = f
	return func() {}
}

// one changes the secret and waits until the client has it.
func (p *pushes) one() {
	p.now.Add(1)
	p.changed("default")
	<-p.came
}

// bytes returns what a push takes on the wire, on average of some.
func (p *pushes) bytes() int {
	const n = 20
	before := p.sent.Load()
	for range n {
		p.one()
	}
	return int(p.sent.Load()-before) / n
}

type countingListener struct {
	net.Listener
	n *atomic.Int64
}

func (l countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return countedWrites{c, l.n}, err
}

type countedWrites struct {
	net.Conn
	n *atomic.Int64
}

func (c countedWrites) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return c.Conn.Write(p)
}

func (d *figures) pushes(t *testing.T) *pushes {
	if d.push != nil {
		return d.push
	}
	p := &pushes{came: make(chan *pki.Secret)}
	for i := range p.secrets {
		p.secrets[i] = must.Get(pki.NewKeyPairSecret("default", newFigures(t, d.alg).svid))(t)
	}
	h := must.Get(sds.NewHandler(p, nil))(t)
	server := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	server.Protocols.SetUnencryptedHTTP2(true)
	path := t.TempDir() + "/" + d.alg
	go func() { _ = server.Serve(countingListener{must.Do(net.Listen("unix", path)), &p.sent}) }()
	ctx, cancel := context.WithCancel(context.Background())
	require.Eventually(t, func() bool { return must.Err(os.Stat(path)) == nil }, 10*time.Second, time.Millisecond)
	var wg sync.WaitGroup
	wg.Go(func() {
		for secret, err := range sds.NewClient(sds.UnixClient(path), "http://localhost").Watch(ctx, "default") {
			if err != nil {
				return
			}
			select {
			case p.came <- secret:
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); _ = server.Close(); h.Close() })
	<-p.came
	d.push = p
	return p
}

// inTurns measures what prepare returns for each, in turns of a few milliseconds, and returns the times that the fastest
// tenth of the turns do not exceed, as other work keeps the machine busy meanwhile.
func inTurns(domains []*figures, prepare func(*figures) func()) []time.Duration {
	const turns, turn = 101, 3 * time.Millisecond
	all := make([][]time.Duration, len(domains))
	var work []func()
	for _, d := range domains {
		work = append(work, prepare(d))
	}
	for range turns {
		for i, f := range work {
			n, began := 0, time.Now()
			for time.Since(began) < turn {
				f()
				n++
			}
			all[i] = append(all[i], time.Since(began)/time.Duration(n))
		}
	}
	fast := make([]time.Duration, len(domains))
	for i, d := range all {
		slices.Sort(d)
		fast[i] = d[turns/10]
	}
	return fast
}

// short returns a time with three digits at most.
func short(d time.Duration) string {
	switch {
	case d >= time.Millisecond:
		return strconv.FormatFloat(float64(d)/1e6, 'g', 3, 64) + " ms"
	case d >= time.Microsecond:
		return strconv.FormatFloat(float64(d)/1e3, 'g', 3, 64) + " µs"
	}
	return fmt.Sprintf("%d ns", d)
}

func thousands(n int) string {
	text := strconv.Itoa(n)
	if n >= 1000 {
		text = text[:len(text)-3] + "," + text[len(text)-3:]
	}
	return text
}
