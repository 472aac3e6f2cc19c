package prometheus_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

var (
	domain  = spiffe.MustParseTrustDomain("example.org")
	web     = spiffe.MustParseID("spiffe://example.org/web")
	errAway = errors.New("away")
)

// away fails while it is set.
type away struct{ atomic.Bool }

func (f *away) err() error {
	if f.Load() {
		return errAway
	}
	return nil
}

// store is a [ca.Store] in memory.
type store struct {
	away
	mu      sync.Mutex
	version int
	data    map[string][]byte
}

func (s *store) Load(context.Context) (ca.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.err(); err != nil {
		return ca.Record{}, err
	}
	if s.data == nil {
		return ca.Record{}, ca.ErrNoRecord
	}
	return ca.NewRecord(strconv.Itoa(s.version), copied(s.data)), nil
}

func (s *store) Save(_ context.Context, r ca.Record) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.err(); err != nil {
		return "", err
	}
	if r.Version != strconv.Itoa(s.version) && !(r.Version == "" && s.data == nil) {
		return "", ca.ErrConflict
	}
	s.version++
	s.data = copied(r.Data())
	return strconv.Itoa(s.version), nil
}

func copied(data map[string][]byte) map[string][]byte {
	all := map[string][]byte{}
	for name, b := range data {
		all[name] = bytes.Clone(b)
	}
	return all
}

// disk is a [ca.Auditor].
type disk struct{ away }

func (d *disk) Record(context.Context, *ca.Issuance) error { return d.err() }
func (d *disk) Err() error                                 { return d.err() }

// issuer is the way from the agent to the CA.
type issuer struct {
	*local.CA
	away
}

func (i *issuer) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := i.err(); err != nil {
		return nil, err
	}
	return i.CA.Sign(ctx, csr, lifetime)
}

// world is a CA, an agent that has identities of it, and a service that has one of the agent, put together as the programs
// are, with what makes them fail.
type world struct {
	*testing.T
	*recording
	store   store
	audit   disk
	ca      *ca.Authority
	issuer  *issuer
	manager *secretcache.Manager
	socket  *faulty.Dial // of the agent, for the Workload API
	secrets *sds.Handler
	port    *port                                                                // of the CA, for operators
	dial    func(ctx context.Context, network, address string) (net.Conn, error) // socket
	targets []target
}

// port is an address at which there may be a server.
type port struct {
	at atomic.Pointer[memconn.Listener]
}

func (p *port) client(t testing.TB) *http.Client {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return p.at.Load().Dial(ctx) }}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// run runs a part until stop is called, or the test ends.
func run(t *testing.T, part func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- part(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	t.Cleanup(stop)
	return stop
}

// within begins a world in a bubble, and records it. Certificates live for 20 minutes.
func within(t *testing.T, edit func(*ca.Config), f func(w *world)) {
	rounds.NotShort(t)
	t.Parallel()
	tool(t, "promtool") // or there is no use
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, port: new(port)}
		cfg := ca.Config{
			TrustDomain: domain, DefaultTTL: 20 * time.Minute, MaxTTL: 20 * time.Minute, Backdate: time.Minute, RefreshHint: time.Minute,
			Rotation: ca.Rotation{RootTTL: 4 * time.Hour, Propagation: 5 * time.Minute}, Create: true, Auditor: &w.audit,
		}
		if edit != nil {
			edit(&cfg)
		}
		var err error
		w.ca, err = ca.Open(t.Context(), cfg, &w.store)
		require.NoError(w, err)
		w.serveCA(w.ca)
		w.startAgent()
		w.startService()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		w.recording = record(t)
		f(w)
	})
}

// serveCA serves a CA as examples/ca does, and returns what ends it.
func (w *world) serveCA(signer ca.Signer) (stop func()) {
	server, err := caserver.New(caserver.Options{CA: signer, ID: spiffe.MustParseID("spiffe://example.org/ca")})
	require.NoError(w, err)
	w.port.at.Store(memconn.Listen())
	if w.targets == nil {
		w.targets = []target{fetched("svidkit-ca", w.port.client(w), "http://localhost/metrics")}
	}
	return run(w.T, func(ctx context.Context) error { return server.Run(ctx, caserver.Listeners{Admin: w.port.at.Load()}) })
}

// startAgent runs the parts of an agent that serves the Workload API and SDS.
func (w *world) startAgent() {
	from, err := local.New(w.ca, web)
	require.NoError(w, err)
	w.issuer = &issuer{CA: from}
	w.manager, err = secretcache.New(secretcache.Config{ID: web, CA: w.issuer})
	require.NoError(w, err)
	w.secrets, err = sds.NewHandler(w.manager, nil)
	require.NoError(w, err)
	workloads, err := workloadserver.NewHandler(w.manager, nil)
	require.NoError(w, err)
	run(w.T, w.manager.Run)
	l := memconn.Listen()
	w.socket = faulty.Start(w, faulty.Config{Listener: l, Handler: workloads, Deny: http.NotFoundHandler(), Garble: http.NotFoundHandler()})
	w.Cleanup(func() { _ = workloads.Close() })
	w.Cleanup(func() { _ = w.secrets.Close() })
	h, err := health.New(health.Part{Name: "identity", Source: w.manager}, health.Part{Name: "SDS", Source: w.secrets}, health.Part{Name: "Workload API", Source: workloads})
	require.NoError(w, err)
	w.targets = append(w.targets, handled("svidkit-agent", h))
	w.dial = l.DialContext
}

// startService runs the parts of examples/service.
func (w *world) startService() {
	transport := &http.Transport{Protocols: new(http.Protocols), DialContext: w.dial}
	transport.Protocols.SetUnencryptedHTTP2(true)
	w.Cleanup(transport.CloseIdleConnections)
	client, err := workloadapi.NewClient("", &workloadapi.ClientOptions{HTTPClient: &http.Client{Transport: transport}})
	require.NoError(w, err)
	source, err := workloadapi.New(workloadapi.Config{Client: client})
	require.NoError(w, err)
	run(w.T, source.Run)
	h, err := health.New(health.Part{Name: "identity", Source: source}, health.Part{Name: "tls", Source: new(spiffetls.Metrics)})
	require.NoError(w, err)
	w.targets = append(w.targets, handled("svidkit-service", h))
}

// lasts records the world for so many minutes.
func (w *world) lasts(minutes int) { w.follow(time.Duration(minutes)*time.Minute, w.targets...) }

// expect has promtool judge what was recorded, outside of the bubble's time.
func (w *world) expect(fired map[string]window) { w.require(w.T, fired) }

func minutes(from, to float64) window {
	return window{time.Duration(from * float64(time.Minute)), time.Duration(to * float64(time.Minute))}
}

// TestHealthyHour: no alert fires in an hour in which all certificates are renewed, and the root is replaced.
func TestHealthyHour(t *testing.T) {
	within(t, nil, func(w *world) {
		before, err := w.manager.SVID()
		require.NoError(w, err)
		w.lasts(10)
		_, err = w.ca.Rotate(w.Context())
		require.NoError(w, err)
		w.lasts(50)
		after, err := w.manager.SVID()
		require.NoError(w, err)
		require.NotEqual(w, before.Leaf().SerialNumber, after.Leaf().SerialNumber)
		require.NotEqual(w, before.Leaf().AuthorityKeyId, after.Leaf().AuthorityKeyId, "the root was replaced")
		w.expect(nil)
	})
}

// TestCAOutOfReach: the agent cannot reach the CA for longer than a life, and the service feels it.
func TestCAOutOfReach(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(5)
		w.issuer.away.Store(true)
		w.lasts(25)
		w.issuer.away.Store(false)
		w.lasts(15)
		w.expect(map[string]window{
			"SvidkitRenewalFailing": minutes(13, 18), "SvidkitIdentityExpiring": minutes(16, 19), "SvidkitNotReady": minutes(21, 23),
		})
	})
}
