package peers_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/ca/sqlstore"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

var asReplica = flag.String("replica", "", "be this replica of a CA, in JSON")

// The settings of a CA that rotates fast.
const (
	replicaTTL      = 10 * time.Second
	replicaBackdate = time.Second
)

// propagation is how long a root waits. With -long the database is never away for as long.
func propagation() time.Duration {
	if *long {
		return 5 * time.Second
	}
	return 2 * time.Second
}

// learnTime is how old the reading of a replica may be so that it knows the roots that sign: a write may take up to
// two fifths of Propagation before the root has to wait again.
func learnTime() time.Duration { return propagation() / 5 * 3 }

// pollTime is how often workloads read a bundle.
func pollTime() time.Duration { return propagation() / 8 }

// A replicaSpec is what a process that is a replica is told.
type replicaSpec struct {
	Store  string // as in openStore
	Socket string // where it serves
	Fault  string // what it does wrong; empty for nothing
	Usual  bool   // the default settings
	Quiet  bool   // without Run
	Audit  string // the file of its audit log; empty for none

	Vault *replicaVault // where its private keys are; nil for its store
}

type replicaVault struct{ URL, RootsFile, Token string }

func (s *replicaSpec) config(t *testing.T) ca.Config {
	t.Helper()
	c := ca.Config{TrustDomain: replicaID.TrustDomain(), Create: true}
	if !s.Usual {
		c.DefaultTTL, c.MaxTTL, c.Backdate = replicaTTL, replicaTTL, replicaBackdate
		c.Rotation.Propagation = propagation()
		c.JWT = &ca.JWTConfig{MaxTTL: time.Second}
	}
	if v := s.Vault; v != nil {
		var keys ca.Custodian = must.Get(vault.NewTransit(vault.TransitOptions{Endpoint: caclient.Endpoint{URL: v.URL,
			RootsFile: v.RootsFile, Token: func(context.Context) (string, error) { return v.Token, nil }}}))(t)
		if s.Fault == "two keys" {
			keys = &twoKeys{keys}
		}
		c.Custody = ca.Custody{Keys: keys}
	}
	return c
}

// shown is what a replica shows of its state at one moment.
type shown struct {
	Sequence uint64
	Bundle   []byte
	Roots    []shownRoot
	Synced   time.Time
}

type shownRoot struct {
	ID, Phase string
	Activates time.Time
}

func (s *shown) String() string {
	var text strings.Builder
	text.WriteString(fmt.Sprint("sequence ", s.Sequence))
	for _, r := range s.Roots {
		text.WriteString(fmt.Sprintf(", %s %s from %s", r.ID[:6], r.Phase, r.Activates.Format("05.000")))
	}
	return text.String()
}

func show(a *ca.Authority) (shown, error) {
	for {
		b, s := a.Bundle(), a.Status()
		if n, _ := b.Sequence(); n != s.Sequence {
			continue // it has changed just now
		}
		doc, err := b.Marshal()
		out := shown{Sequence: s.Sequence, Bundle: doc, Synced: s.Synced}
		for _, r := range s.Roots {
			out.Roots = append(out.Roots, shownRoot{r.ID, r.Phase, r.Activates})
		}
		return out, err
	}
}

// TestReplicaProcess is not a test: it is the program that is one of the replicas.
func TestReplicaProcess(t *testing.T) {
	if *asReplica == "" {
		t.Skip("other tests start it")
	}
	var spec replicaSpec
	require.NoError(t, json.Unmarshal([]byte(*asReplica), &spec))
	config := spec.config(t)
	if spec.Audit != "" {
		config.Auditor = must.Get(auditlog.Open(spec.Audit, nil))(t)
	}
	a := must.Get(ca.Open(t.Context(), config, wrong(t, spec.Fault, openStore(t, &spec))))(t)
	if !spec.Quiet {
		go func() { _ = a.Run(context.Background()) }()
	}
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, v any, err error) {
		switch {
		case errors.Is(err, ca.ErrRotating):
			http.Error(w, err.Error(), http.StatusConflict)
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			_ = json.NewEncoder(w).Encode(v) // the client has gone
		}
	}
	mux.HandleFunc("GET /state", func(w http.ResponseWriter, _ *http.Request) {
		s, err := show(a)
		answer(w, s, err)
	})
	mux.HandleFunc("POST /rotate", func(w http.ResponseWriter, r *http.Request) {
		if !r.URL.Query().Has("only") && rand.IntN(3) == 0 {
			_, _ = a.RotateJWT(r.Context()) // beside it, if it can be now
		}
		k, err := a.Rotate(r.Context())
		answer(w, k.ID, err)
	})
	mux.HandleFunc("POST /work", func(w http.ResponseWriter, r *http.Request) {
		least, err := strconv.Atoi(r.FormValue("least"))
		long, also := time.ParseDuration(r.FormValue("for"))
		var done worked
		if err = errors.Join(err, also); err == nil {
			done, err = work(r.Context(), a, least, long)
		}
		answer(w, done, err)
	})
	mux.HandleFunc("POST /sign", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var csr *pki.CSR
		var chain []*x509.Certificate
		if err == nil {
			csr, err = pki.ParseCSR(body)
		}
		if err == nil {
			chain, err = a.Sign(r.Context(), ca.Request{CSR: csr, ID: replicaID})
		}
		var der [][]byte
		for _, c := range chain {
			der = append(der, c.Raw)
		}
		answer(w, der, err)
	})
	_ = os.Remove(spec.Socket) // of the one before, which was killed
	l := must.Get(net.Listen("unix", spec.Socket))(t)
	require.NoError(t, http.Serve(l, mux))
}

var replicaID = spiffe.MustParseID("spiffe://example.org/web")

// openStore opens a store that several processes share.
func openStore(t *testing.T, spec *replicaSpec) ca.Store {
	t.Helper()
	kind, name, _ := strings.Cut(spec.Store, " ")
	if kind == "directory" {
		return must.Get(ca.NewDirStore(name))(t)
	}
	o := sqlstore.Options{Dialect: kind}
	if !spec.Usual {
		o.Poll = pollTime()
	}
	var db *sql.DB
	if kind == "postgres" {
		db = must.Get(sql.Open("pgx", name))(t)
		o.Listen = listen(name)
	} else {
		c := must.Get(mysql.ParseDSN(name))(t)
		c.Logger = new(mysql.NopLogger)
		db = sql.OpenDB(must.Get(mysql.NewConnector(c))(t))
	}
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(3)
	return must.Get(sqlstore.New(db, o))(t)
}

// wrong returns a store with a fault, so that the soak can be seen to find it.
func wrong(t *testing.T, fault string, s ca.Store) ca.Store {
	t.Helper()
	switch fault {
	case "", "two keys":
		return s
	case "no compare":
		return &noCompare{s}
	case "lagging reads":
		return &lagging{Store: s}
	case "lost writes":
		return &losing{s}
	}
	t.Fatalf("there is no fault %q", fault)
	return nil
}

// noCompare replaces whatever record there is, once there is one.
type noCompare struct{ ca.Store }

func (s *noCompare) Save(ctx context.Context, r ca.Record) (string, error) {
	if r.Version == "" {
		return s.Store.Save(ctx, r)
	}
	for {
		now, err := s.Store.Load(ctx)
		if err != nil && !errors.Is(err, ca.ErrNoRecord) {
			return "", err
		}
		v, err := s.Store.Save(ctx, ca.NewRecord(now.Version, r.Data()))
		if !errors.Is(err, ca.ErrConflict) {
			return v, err
		}
	}
}

// lagging reads a copy that is behind, as a standby of the database can be.
type lagging struct {
	ca.Store
	mu   sync.Mutex
	read []laggingRead
}

type laggingRead struct {
	at time.Time
	ca.Record
}

func (s *lagging) Load(ctx context.Context) (ca.Record, error) {
	r, err := s.Store.Load(ctx)
	if err != nil {
		return r, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.read = append(s.read, laggingRead{now, r})
	for len(s.read) > 1 && now.Sub(s.read[1].at) > 2*propagation() {
		s.read = s.read[1:]
	}
	return s.read[0].Record, nil
}

// losing says of every third write that it is done, and does nothing.
type losing struct{ ca.Store }

func (s *losing) Save(ctx context.Context, r ca.Record) (string, error) {
	if r.Version != "" && rand.IntN(3) == 0 {
		return r.Version, nil
	}
	return s.Store.Save(ctx, r)
}

// twoKeys makes one more key each time.
type twoKeys struct{ ca.Custodian }

func (c *twoKeys) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	if _, err := c.Custodian.NewKey(ctx, name[:len(name)-4]+"0000", algorithm); err != nil {
		return nil, err
	}
	return c.Custodian.NewKey(ctx, name, algorithm)
}

// A replicaSlot is a replica of a soak, in the process that it has at present.
type replicaSlot struct {
	spec   replicaSpec
	client *http.Client

	mu      sync.Mutex
	process *peers.Process // nil for none
	highest uint64         // the sequence number that it has shown
}

func newReplicaSlot(dir string, i int, spec replicaSpec) *replicaSlot {
	spec.Socket = filepath.Join(dir, fmt.Sprint("r", i))
	r := &replicaSlot{spec: spec}
	r.client = &http.Client{Timeout: 15 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", r.spec.Socket)
		},
	}}
	return r
}

func (r *replicaSlot) start(t *testing.T, log string, env ...string) {
	spec := must.Get(json.Marshal(r.spec))(t)
	cmd := exec.Command(must.Get(os.Executable())(t), "-test.run=^TestReplicaProcess$", "-replica="+string(spec),
		fmt.Sprint("-long=", *long))
	cmd.Env = append(os.Environ(), env...)
	p := peers.Start(t, log, cmd)
	r.mu.Lock()
	r.process = p
	r.mu.Unlock()
}

func (r *replicaSlot) kill() {
	r.mu.Lock()
	p := r.process
	r.mu.Unlock()
	p.Kill()
}

// do sends a request, and decodes the answer.
func (r *replicaSlot) do(ctx context.Context, method, path string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://replica/"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // all of it is read
	data, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode == http.StatusConflict:
		return ca.ErrRotating
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%s %s: %s", resp.Status, path, data)
	}
	return json.Unmarshal(data, out)
}

// A replicaSoak has replicas that are killed, and workloads that live on them.
type replicaSoak struct {
	t        *testing.T
	slots    []*replicaSlot
	record   ca.Store // of the judge, who only reads it
	spec     replicaSpec
	log      string
	members  []*soakMember
	rotating atomic.Int64   // the number of rotations that were reported
	checking sync.WaitGroup // whether the record has the root of a leaf

	mu       sync.Mutex
	faults   []string
	count    map[string]int
	states   map[uint64]*shown    // by sequence number
	stored   map[string]bool      // the key IDs of roots that the record has had
	sequence uint64               // of the record
	answered time.Time            // when the record was read last
	away     time.Duration        // the longest time in which it could not be read
	signing  map[string]bool      // the roots that were shown as active
	reported map[string]time.Time // the roots whose rotation was reported as done
}

func (s *replicaSoak) add(what string, n int) {
	s.mu.Lock()
	s.count[what] += n
	s.mu.Unlock()
}

// fault notes what must not be.
func (s *replicaSoak) fault(kind, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faultLocked(kind, format, args...)
}

func (s *replicaSoak) faultLocked(kind, format string, args ...any) {
	if s.count["fault: "+kind]++; s.count["fault: "+kind] <= 3 {
		s.faults = append(s.faults,
			fmt.Sprintf("after %d rotations: %s: ", s.rotating.Load(), kind)+fmt.Sprintf(format, args...))
	}
}

// look reads the state of a replica, and judges it.
func (s *replicaSoak) look(ctx context.Context, r *replicaSlot) (*shown, error) {
	r.mu.Lock()
	least := r.highest
	r.mu.Unlock()
	begin := time.Now()
	now := new(shown)
	if err := r.do(ctx, "GET", "state", nil, now); err != nil {
		return nil, err
	}
	end := time.Now()
	r.mu.Lock()
	r.highest = max(r.highest, now.Sequence)
	r.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count["states read"]++
	if now.Sequence < least {
		s.faultLocked("back", "%s went from sequence %d to %v", filepath.Base(r.spec.Socket), least, now)
	}
	const slack = 100 * time.Millisecond
	active := 0
	for _, root := range now.Roots {
		switch root.Phase {
		case "active":
			active++
			s.signing[root.ID] = true
			if root.Activates.After(end) {
				s.faultLocked("phase", "root %s signs, and should from %v", root.ID, root.Activates)
			}
		case "distributing":
			if root.Activates.Before(begin.Add(-slack)) {
				s.faultLocked("phase", "root %s does not sign, and should since %v", root.ID, root.Activates)
			}
		}
	}
	if active != 1 {
		s.faultLocked("active", "%d roots are active: %v", active, now)
	}
	was := s.states[now.Sequence]
	if was == nil {
		s.states[now.Sequence] = now
		return now, nil
	}
	if !bytes.Equal(was.Bundle, now.Bundle) {
		s.faultLocked("bundles", "two have one number: %v; %v", was, now)
	}
	schedule := func(a, b shownRoot) bool { return a.ID == b.ID && a.Activates.Equal(b.Activates) }
	if !slices.EqualFunc(was.Roots, now.Roots, schedule) {
		s.faultLocked("times", "%v; %v", was, now)
	}
	return now, nil
}

// viewed is a store for an authority that only looks.
type viewed struct{ ca.Store }

// View implements what package ca looks for.
func (viewed) View() {}

// read reads the record, as the judge.
func (s *replicaSoak) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	config := s.spec.config(s.t)
	config.Create = false
	s.mu.Lock()
	least := s.sequence
	s.mu.Unlock()
	a, err := ca.Open(ctx, config, viewed{s.record})
	if err != nil {
		return err
	}
	st := a.Status()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count["records read"]++
	if now := time.Now(); now.After(s.answered) {
		s.away, s.answered = max(s.away, now.Sub(s.answered)), now
	}
	if st.Sequence < least {
		s.faultLocked("back", "the record went from sequence %d to %d", least, st.Sequence)
	}
	s.sequence = max(s.sequence, st.Sequence)
	for _, r := range st.Roots {
		s.stored[hex.EncodeToString(r.Certificate.SubjectKeyId)] = true
	}
	return nil
}

// knows reports whether the record has the root of a leaf, now or since before.
func (s *replicaSoak) knows(key string) bool {
	for end := time.Now().Add(time.Minute); ; time.Sleep(pollTime()) {
		err := s.read(s.t.Context()) // anew, so that this is of now
		s.mu.Lock()
		found := s.stored[key]
		s.mu.Unlock()
		if found || err == nil || time.Now().After(end) {
			return found
		}
	}
}

func (s *replicaSoak) any() *replicaSlot { return s.slots[rand.IntN(len(s.slots))] }

// A soakMember is a workload that renews with any replica, and that trusts the bundle of any replica.
type soakMember struct {
	s       *replicaSoak
	csr     []byte
	sign    func(chain []*x509.Certificate) (*spiffe.SVID, error)
	addr    string
	client  *tls.Config
	svid    atomic.Pointer[spiffe.SVID]
	trusts  atomic.Pointer[soakBundle]
	due     time.Time // to renew
	polling time.Time // when to read a bundle
}

// A soakBundle is a bundle as it was in the store at a time.
type soakBundle struct {
	*spiffe.Bundle
	known time.Time
}

func (m *soakMember) SVID() (*spiffe.SVID, error) { return m.svid.Load(), nil }
func (m *soakMember) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return m.trusts.Load().Bundle.Bundle(td)
}

func (s *replicaSoak) newMember(ctx context.Context) *soakMember {
	t := s.t
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	m := &soakMember{s: s, csr: must.Get(pki.NewCSR(key, pki.CSROptions{}))(t).DER()}
	m.sign = func(chain []*x509.Certificate) (*spiffe.SVID, error) { return spiffe.NewSVID(chain, key) }
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: m, Peers: m, Allow: spiffe.AllowIDs(replicaID)}))(t)
	m.client = must.Get(endpoint.ClientConfig())(t)
	config := must.Get(endpoint.ServerConfig())(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	m.addr = l.Addr().String()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				if tc := tls.Server(c, config); tc.HandshakeContext(ctx) == nil {
					_, _ = tc.Write([]byte{1}) // the client says what fails
				}
			}()
		}
	}()
	return m
}

// poll takes the bundle of any replica, older or newer than the one before.
func (m *soakMember) poll(ctx context.Context) bool {
	now, err := m.s.look(ctx, m.s.any())
	if err != nil {
		return false
	}
	b, err := spiffe.ParseBundle(replicaID.TrustDomain(), now.Bundle)
	if err != nil {
		m.s.fault("bundle", "%v", err)
		return false
	}
	m.trusts.Store(&soakBundle{b, now.Synced})
	m.polling = time.Now().Add(pollTime()/2 + rand.N(pollTime()/2))
	return true
}

// renew has any replica sign.
func (m *soakMember) renew(ctx context.Context) bool {
	var der [][]byte
	if err := m.s.any().do(ctx, "POST", "sign", m.csr, &der); err != nil {
		m.s.add("renewals tried again", 1)
		return false
	}
	var chain []*x509.Certificate
	for _, c := range der {
		cert, err := x509.ParseCertificate(c)
		if err != nil {
			m.s.fault("leaf", "%v", err)
			return false
		}
		chain = append(chain, cert)
	}
	svid, err := m.sign(chain)
	if err != nil {
		m.s.fault("leaf", "%v", err)
		return false
	}
	m.s.checking.Go(func() {
		if key := hex.EncodeToString(chain[0].AuthorityKeyId); !m.s.knows(key) {
			m.s.fault("unknown", "a leaf was signed by %s, which the store does not know", key)
		}
	})
	m.svid.Store(svid)
	left := time.Until(svid.NotAfter())
	m.due = time.Now().Add(left/5 + rand.N(max(left/2, 1)))
	m.s.add("renewals", 1)
	return true
}

// run lives until ctx is done.
func (m *soakMember) run(ctx context.Context) {
	for ctx.Err() == nil {
		now := time.Now()
		if !now.Before(m.polling) {
			m.poll(ctx)
		}
		if !now.Before(m.due) {
			m.renew(ctx)
		}
		m.shake(ctx, m.s.members[rand.IntN(len(m.s.members))])
		time.Sleep(30*time.Millisecond + rand.N(40*time.Millisecond))
	}
}

// shake connects to another one, and judges it if that failed.
func (m *soakMember) shake(ctx context.Context, other *soakMember) {
	mine, theirs := m.trusts.Load(), other.trusts.Load()
	a, b := m.svid.Load(), other.svid.Load()
	err := m.connect(ctx, other)
	end := time.Now()
	behind := end.Sub(mine.known) > learnTime() || end.Sub(theirs.known) > learnTime()
	switch {
	case ctx.Err() != nil:
	case err == nil:
		m.s.add("handshakes", 1)
		if behind {
			m.s.add("handshakes with a bundle that is behind", 1)
		}
	case end.After(a.NotAfter()) || end.After(b.NotAfter()):
		m.s.add("handshakes with a leaf that has ended", 1)
	case behind:
		// Its replica has not read the store for so long that another root may sign by now, and says so.
		m.s.add("handshakes failed with a bundle that is behind", 1)
		m.s.t.Logf("bundles of %v and %v ago: %v", end.Sub(mine.known), end.Sub(theirs.known), err)
	default:
		m.s.fault("handshake", "bundles of %v and %v ago, leaves that end in %v and %v: %v", end.Sub(mine.known),
			end.Sub(theirs.known), a.NotAfter().Sub(end), b.NotAfter().Sub(end), err)
	}
}

func (m *soakMember) connect(ctx context.Context, other *soakMember) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", other.addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	tc := tls.Client(c, m.client)
	if err := tc.HandshakeContext(ctx); err != nil {
		return err
	}
	_, err = io.ReadFull(tc, make([]byte, 1)) // the server judges the client after that
	return err
}

// A soakBackend is what the replicas share.
type soakBackend struct {
	store    string   // as in openStore
	disturbs []func() // in turn

	vault *replicaVault
	keys  func() []string // the names of the private keys at the custodian; nil for none
}

func directory(t *testing.T) soakBackend {
	return soakBackend{store: "directory " + filepath.Join(t.TempDir(), "ca")}
}

// prepared makes the table and the user of the CA.
func prepared(t *testing.T, d *peers.Database) {
	t.Helper()
	d.Admin(t, must.Get(sqlstore.Schema(sqlstore.Options{Dialect: d.Dialect}))(t))
	d.NewUser(t, "issuer", "svidkit_ca")
}

// postgres is a primary of PostgreSQL with a synchronous standby, which takes its place now and then.
func postgres(t *testing.T) soakBackend {
	// Reads and writes wait for the standby, which by default connects again after five seconds only.
	primary := peers.NewPostgreSQL(t, "wal_retrieve_retry_interval = '100ms'")
	prepared(t, primary)
	standby := primary.NewStandby(t)
	store := "postgres " + primary.DSN("issuer", "svidkit", primary.Addr, standby.Addr)
	return soakBackend{store: store, disturbs: []func(){
		func() { primary.Restart(t) },
		func() {
			primary.Kill(t)
			standby.Promote(t)
			primary, standby = standby, primary
			standby.Follow(t, primary)
		},
		func() { primary.Kill(t); primary.Start(t) },
		func() { primary.Pause(t); time.Sleep(propagation() / 4); primary.Resume(t) },
	}}
}

// asynchronous is a primary that does not wait for its standby, which takes its place when it is behind.
func asynchronous(t *testing.T) soakBackend {
	primary := peers.NewPostgreSQL(t)
	prepared(t, primary)
	standby := primary.NewStandby(t)
	primary.Admin(t, "ALTER SYSTEM SET synchronous_standby_names = ''")
	primary.Admin(t, "SELECT pg_reload_conf()")
	store := "postgres " + primary.DSN("issuer", "svidkit", primary.Addr, standby.Addr)
	return soakBackend{store: store, disturbs: []func(){func() {
		standby.Stop()
		time.Sleep(3 * propagation())
		primary.Kill(t)
		standby.Start(t)
		standby.Promote(t)
		primary, standby = standby, primary
		standby.Follow(t, primary)
	}}}
}

func mariaDB(t *testing.T) soakBackend {
	d := peers.NewMariaDB(t)
	prepared(t, d)
	return soakBackend{store: "mysql " + d.DSN("issuer", "svidkit"), disturbs: []func(){
		func() { d.Restart(t) },
		func() { d.Kill(t); d.Start(t) },
		func() { d.Pause(t); time.Sleep(propagation() / 4); d.Resume(t) },
	}}
}

// custody is a PostgreSQL with an OpenBao that has the private keys, which is sealed now and then.
func custody(t *testing.T) soakBackend {
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	d := peers.NewPostgreSQL(t)
	prepared(t, d)
	return soakBackend{store: "postgres " + d.DSN("issuer", "svidkit"), disturbs: []func(){
		func() { d.Kill(t); d.Start(t) },
		func() { b.Seal(t); time.Sleep(propagation() / 2); b.Unseal(t) },
	}, vault: &replicaVault{b.URL, b.RootsFile, b.Token(t, transitPolicy(t))}, keys: func() []string {
		var list struct {
			Data struct{ Keys []string }
		}
		b.Do(t, "", "LIST", "transit/keys", nil, &list)
		return slices.DeleteFunc(list.Data.Keys, func(name string) bool { return name == "seal" })
	}}
}

// named returns the names of private keys in the record, which must not have the keys: those of keys that sign or
// will, and those that are to be made, or to be destroyed.
func (s *replicaSoak) named() (needed, loose []string) {
	data := must.Get(s.record.Load(s.t.Context()))(s.t).Data()
	for item, b := range data {
		assert.NotRegexp(s.t, "PRIVATE KEY|MIGHAgEAM", string(b), "the record has a private key in %s", item)
	}
	type key struct {
		Name string `json:"key_name"`
	}
	var state struct {
		Roots  []key `json:"roots"`
		Tokens []key `json:"jwt_keys"`
		Loose  []struct {
			Name string `json:"name"`
		} `json:"loose_keys"`
	}
	require.NoError(s.t, json.Unmarshal(data["svidkit-state.json"], &state))
	for _, k := range slices.Concat(state.Roots, state.Tokens) {
		if k.Name != "" {
			needed = append(needed, k.Name)
		}
	}
	for _, l := range state.Loose {
		loose = append(loose, l.Name)
	}
	return needed, loose
}

// accounted waits until the custodian has each private key that a key of the record needs, and none that the record
// does not name: no kill has lost a key, or left one over.
func (s *replicaSoak) accounted(keys func() []string) {
	for end := time.Now().Add(5 * propagation()); ; time.Sleep(propagation() / 2) {
		have := keys()
		needed, loose := s.named()
		lost := slices.DeleteFunc(slices.Clone(needed), func(n string) bool { return slices.Contains(have, n) })
		over := slices.DeleteFunc(have, func(n string) bool { return slices.Contains(append(needed, loose...), n) })
		if len(needed) > 0 && len(lost)+len(over) == 0 {
			s.add("private keys that are needed in the end", len(needed))
			s.add("private keys to be made or destroyed in the end", len(loose))
			return
		}
		if time.Now().After(end) {
			s.fault("keys", "of the %d private keys the custodian lacks %v, and the record does not name %v",
				len(needed), lost, over)
			return
		}
	}
}

// soakReplicas has five replicas live through so many rotations, and returns the faults that it has seen. It ends at
// once when it has seen one of the kinds until.
func soakReplicas(t *testing.T, backend soakBackend, fault string, rotations int, until ...string) []string {
	t.Helper()
	dir := t.TempDir()
	s := &replicaSoak{t: t, log: filepath.Join(dir, "log"),
		spec:  replicaSpec{Store: backend.store, Fault: fault, Vault: backend.vault},
		count: map[string]int{}, states: map[uint64]*shown{}, stored: map[string]bool{}, signing: map[string]bool{},
		reported: map[string]time.Time{}, answered: time.Now()}
	s.record = openStore(t, &s.spec)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	begin := time.Now()
	for i := range 5 {
		s.slots = append(s.slots, newReplicaSlot(dir, i, s.spec))
		s.slots[i].start(t, s.log)
	}
	ready := func(r *replicaSlot) {
		r.process.Ready(t, func() error {
			_, err := s.look(ctx, r)
			return err
		})
	}
	for _, r := range s.slots {
		ready(r)
	}
	for range 20 {
		m := s.newMember(ctx)
		for !m.poll(ctx) || !m.renew(ctx) {
			require.NoError(t, ctx.Err())
		}
		s.members = append(s.members, m)
	}
	var living, killing sync.WaitGroup
	for _, m := range s.members {
		living.Go(func() { m.run(ctx) })
	}
	living.Go(func() {
		for ctx.Err() == nil {
			_ = s.read(ctx) // the database may be down
			_, _ = s.look(ctx, s.any())
			time.Sleep(20 * time.Millisecond)
		}
	})
	end := make(chan struct{})
	killing.Go(func() {
		for {
			select {
			case <-end:
				return
			case <-time.After(300*time.Millisecond + rand.N(time.Second)):
			}
			r := s.any()
			r.kill()
			s.add("kills", 1)
			time.Sleep(rand.N(500 * time.Millisecond))
			r.start(t, s.log)
		}
	})
	rotate := func(r *replicaSlot) {
		var id string
		err := r.do(ctx, "POST", "rotate", nil, &id)
		switch {
		case err == nil:
			s.rotating.Add(1)
			s.mu.Lock()
			s.reported[id] = time.Now()
			s.mu.Unlock()
		case !errors.Is(err, ca.ErrRotating):
			s.add("rotations of unknown outcome, or none", 1)
		}
	}
	killing.Go(func() {
		for int(s.rotating.Load()) < rotations && ctx.Err() == nil {
			var two sync.WaitGroup
			for _, i := range rand.Perm(len(s.slots))[:2] { // at once
				two.Go(func() { rotate(s.slots[i]) })
			}
			two.Wait()
			time.Sleep(rand.N(200 * time.Millisecond))
		}
	})
	seen := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.ContainsFunc(until, func(kind string) bool { return s.count["fault: "+kind] > 0 })
	}
	// The database is disturbed every third rotation or so.
	over := begin.Add(time.Duration(rotations)*20*time.Second + time.Minute)
	for i := 0; int(s.rotating.Load()) < rotations && !t.Failed() && time.Now().Before(over) && !seen(); {
		if at := 2 + 3*i; len(backend.disturbs) > 0 && int(s.rotating.Load()) >= at {
			time.Sleep(rand.N(propagation()))
			backend.disturbs[i%len(backend.disturbs)]()
			i++
			s.add("disturbances of the database", 1)
		}
		time.Sleep(20 * time.Millisecond)
	}
	close(end)
	early := seen()
	if early {
		stop()
	} else {
		assert.GreaterOrEqual(t, int(s.rotating.Load()), rotations, "rotations")
	}
	killing.Wait()
	settled := func() bool {
		var first *shown
		for _, r := range s.slots {
			now, err := s.look(ctx, r)
			waits := func(k shownRoot) bool { return k.Phase == "distributing" }
			if err != nil || slices.ContainsFunc(now.Roots, waits) || first != nil && now.Sequence != first.Sequence {
				return false
			}
			first = now
		}
		return true
	}
	for patience := time.Now().Add(time.Minute); ctx.Err() == nil && !settled(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(patience) {
			s.fault("apart", "the replicas do not agree in the end")
			break
		}
	}
	if !early {
		time.Sleep(propagation()) // for what is wrong to be seen
		if backend.keys != nil {
			s.accounted(backend.keys)
		}
	}
	stop()
	living.Wait()
	s.checking.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, at := range s.reported {
		if !s.signing[id] && !early {
			s.faultLocked("lost", "the rotation to root %s, reported %v ago, has not happened", id, time.Since(at))
		}
	}
	t.Logf("%d rotations in %v, sequence %d; the record could not be read for %v at most", s.rotating.Load(),
		time.Since(begin).Round(time.Second), s.sequence, s.away.Round(time.Millisecond))
	for _, what := range slices.Sorted(maps.Keys(s.count)) {
		t.Logf("%s: %d", what, s.count[what])
	}
	if !early {
		judged := s.count["handshakes"] - s.count["handshakes with a bundle that is behind"]
		assert.Greater(t, judged, 10*rotations)
		assert.Less(t, s.count["handshakes with a leaf that has ended"], max(10, judged/10))
		if s.away < learnTime()/2 {
			assert.Zero(t, s.count["handshakes failed with a bundle that is behind"])
		}
	}
	return s.faults
}

// Five replicas of a CA are processes that share a store. They are killed and started again at random while the root
// rotates, and 20 workloads renew with any of them and trust the bundle of any of them. At each time one root signs,
// which the store has; no sequence number comes again; no rotation that was reported is lost; no handshake fails.
func TestReplicas(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	rotations := 12
	if *long {
		rotations = 200
	}
	backends := map[string]func(*testing.T) soakBackend{"postgres": postgres, "mariadb": mariaDB, "custody": custody}
	if *long {
		backends["directory"] = directory
	}
	for name, start := range backends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Empty(t, soakReplicas(t, start(t), "", rotations))
		})
	}
}

// The judge of TestReplicas sees stores that break their contract, and a database that loses what it has acknowledged.
func TestReplicasFaults(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	for _, c := range []struct {
		name, fault string
		start       func(*testing.T) soakBackend
		rotations   int      // at most
		seen        []string // one of them
	}{
		{"no version is compared", "no compare", directory, 10, []string{"lost", "bundles", "times"}},
		{"reads lag", "lagging reads", directory, 10, []string{"handshake"}},
		{"writes are lost", "lost writes", directory, 10, []string{"unknown", "lost", "bundles", "times"}},
		{"the standby is behind", "", asynchronous, 10, []string{"back", "lost", "bundles", "times"}},
		{"a private key is left over", "two keys", custody, 1, []string{"keys"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			faults := soakReplicas(t, c.start(t), c.fault, c.rotations, c.seen...)
			t.Log(strings.Join(faults, "\n"))
			assert.True(t, slices.ContainsFunc(c.seen, func(kind string) bool {
				return slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(f, ": "+kind+": ") })
			}), "no fault of %v", c.seen)
		})
	}
}
