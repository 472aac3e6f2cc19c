package workloadapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures a [Source]. Address or Client is required. [New] copies it.
type Config struct {
	// Address is where the Workload API is served:
	//
	//	unix:///run/spire/agent/public/api.sock    an absolute path; no host, no query, no fragment
	//	tcp://127.0.0.1:8081                       an IP address and a port; nothing after it
	//
	// It is usually the value of the environment variable [SocketEnv]. For any other form, the error suggests the
	// corrected address where it is clear. Windows' named pipes are not in the standard: for those, pass an HTTP
	// client to [NewClient].
	Address string

	// Client, if set, is used instead of a new one for Address. Several Sources may share it, and the program may make
	// its own calls with it.
	Client *Client

	// Hint selects the identity with that label among several. Empty means the default identity, the first one. While
	// the server has no identity with the hint, the source has bundles but no identity. A program that needs several
	// identities makes a Source for each hint, all with one Client.
	Hint string

	// JWTBundles makes the source watch the bundles for JWT-SVIDs too. Without it the bundles have no JWT authorities.
	JWTBundles bool

	// BundlesOnly is for programs that verify peers and present no identity: the source watches only the bundles, and
	// SVID and Snapshot return errors that wrap [spiffe.ErrNotReady].
	BundlesOnly bool

	// Logger gets each change (Info), and failures, skipped parts and withdrawals (Warn), with the attributes rpc,
	// server, id, not_after, err and retry_in. The first discarded response is logged at once, later ones as a count
	// each minute. Nil means no logs.
	Logger *slog.Logger
}

// Source holds the current identity and trust bundles of this workload. [Start] or [New] makes one. It is a
// [spiffe.SVIDSource], a [spiffe.BundleSource] and a jwtsvid.Source; sdssource.FromIdentity adapts it for package sds.
// Its methods are safe for concurrent use. Those that read work before, during and after [Source.Run].
type Source struct {
	redacted
	cfg    Config
	client *Client
	log    *slog.Logger
	bad    *ratelog.Log // of responses
	news   renew.Signal
	life   lifecycle.Life
	cur    atomic.Pointer[state] // what readers read; writers hold mu

	mu       sync.Mutex
	x509     track
	jwt      track
	unmerged []error     // why some bundles lack their JWT authorities
	early    *time.Timer // adopts identities that arrived before their validity began; nil before the first
}

type redacted = redact.Text

// state holds values that were published together. It never changes.
type state struct {
	snap    *spiffe.Snapshot  // nil if there is no identity
	bundles *spiffe.BundleSet // nil if there are none
	update  *Update           // of the X.509 stream, empty if there is none
	ready   bool              // everything that Ready waits for is there
}

// svid returns the identity of the source, or nil.
func (st *state) svid() *spiffe.SVID {
	if st.snap == nil {
		return nil
	}
	svid, _ := st.snap.SVID() // of a snapshot: never an error
	return svid
}

// Start returns a ready Source, and runs it until [Source.Close]. ctx bounds only the start: its end has no effect
// later. If Start fails, it leaves nothing running and returns the error of [New] or [Source.Ready], which says why
// there is no identity.
func Start(ctx context.Context, cfg Config) (*Source, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, s, &s.life, s.run)
}

// New checks cfg and returns a Source. It starts no goroutine and opens no connection: the caller must call
// [Source.Run].
func New(cfg Config) (*Source, error) {
	s := &Source{cfg: cfg, client: cfg.Client, log: ratelog.Patient(cfg.Logger)}
	switch {
	case cfg.Client != nil && cfg.Client.http == nil:
		return nil, errors.New("workloadapi: new source: Config.Client is the zero one; NewClient makes one")
	case cfg.Client != nil && cfg.Address != "":
		return nil, errors.New("workloadapi: new source: Config has an Address, and a Client, which has an " +
			"address of its own")
	case cfg.BundlesOnly && cfg.Hint != "":
		return nil, errors.New("workloadapi: new source: Config has BundlesOnly, and a Hint that selects an identity")
	}
	if s.client == nil {
		var err error
		if s.client, err = NewClient(cfg.Address, nil); err != nil {
			return nil, err
		}
	}
	s.redacted = redact.New("workloadapi.Source(" + s.client.server + ")")
	s.bad = ratelog.New(s.log, 0)
	s.cur.Store(&state{update: new(Update)})
	return s, nil
}

// SVID returns the current X.509-SVID with its key: the identity with the wanted hint, or the default one. It does not
// block or check the clock: while the server cannot be reached the identity stays, even after it has expired. Before
// the first identity, and after a withdrawal, the error wraps [spiffe.ErrNotReady].
func (s *Source) SVID() (*spiffe.SVID, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle returns the current trust bundle of td. It does not block. Before the first bundles, and after a withdrawal,
// the error wraps [spiffe.ErrNotReady]; for a trust domain without a bundle it wraps [spiffe.ErrUnknownTrustDomain].
func (s *Source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if set := s.cur.Load().bundles; set != nil {
		return set.Bundle(td)
	}
	return nil, s.notReady()
}

// Bundles returns all trust bundles, as published together. The set is empty before the first bundles and after a
// withdrawal. The same set is returned until something changes.
func (s *Source) Bundles() *spiffe.BundleSet {
	if set := s.cur.Load().bundles; set != nil {
		return set
	}
	return noBundles
}

var noBundles = new(spiffe.BundleSet)

// Snapshot returns the identity and the trust bundles, as published together. It does not block. It fails like
// [Source.SVID].
func (s *Source) Snapshot() (*spiffe.Snapshot, error) {
	if snap := s.cur.Load().snap; snap != nil {
		return snap, nil
	}
	return nil, s.notReady()
}

// SVIDs returns all identities of the workload that are in force, the default one first, for programs that choose
// among them. There are none before the first response, after a withdrawal, and with BundlesOnly. It does not block.
func (s *Source) SVIDs() (all []*spiffe.SVID) {
	for _, id := range s.cur.Load().update.Identities {
		all = append(all, id.SVID)
	}
	return all
}

// CRLs returns the certificate revocation lists that came with the bundles, in DER as received; nil if there are none.
// The caller must not modify them.
func (s *Source) CRLs() [][]byte { return s.cur.Load().update.CRLs }

// Fetch asks the server for a JWT-SVID for one or more audiences. The token is for the identity of the source, or for
// the server's default identity while the source has none. It works without Run. Each call fetches a new token: for
// many requests use a *jwtsvid.Cache with this Source.
//
// The error is an [*Error], or wraps [spiffe.ErrNotReady] if no identity has the wanted hint.
func (s *Source) Fetch(ctx context.Context, audience ...string) (token string, err error) {
	var id spiffe.ID
	st := s.cur.Load()
	if svid := st.svid(); svid != nil {
		id = svid.ID()
	}
	all, err := s.client.FetchJWTSVIDs(ctx, id, audience...)
	if err != nil {
		return "", err
	}
	for _, svid := range all {
		if s.cfg.Hint == "" || svid.Hint == s.cfg.Hint {
			return svid.Token(), nil
		}
	}
	return "", s.missing(st.update)
}

// Changed returns a channel that is closed when the identity or the bundles change, or when Ready might return. Take
// the channel before reading, so that no change is missed:
//
//	for {
//		changed := s.Changed()
//		use(s.Snapshot())
//		<-changed
//	}
func (s *Source) Changed() <-chan struct{} { return s.news.Changed() }

// Ready waits until the source has the identity with the wanted hint and its bundles; with JWTBundles, also the JWT
// bundles; with BundlesOnly, only the bundles. The error wraps [spiffe.ErrNotReady], the cause of ctx and the last
// failure. Ready returns before ctx is done if the server refuses for good, and after [Source.Close]. If Run was never
// called, the error says so.
func (s *Source) Ready(ctx context.Context) error {
	ready := false
	err := s.life.Ready(ctx, s.Changed, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		ready = s.cur.Load().ready
		return ready || s.x509.final || s.jwt.final
	}, s.notReady)
	if err == nil && !ready {
		return s.notReady()
	}
	return err
}

// notReady returns the error that says what is missing.
func (s *Source) notReady() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err, denied := s.x509.err, s.x509.denied
	waiting := s.client.server + " has not answered yet (see the log of that server)"
	switch {
	case s.x509.update == nil:
		err = cmp.Or(err, s.jwt.err)
	case !s.cfg.BundlesOnly && s.cur.Load().snap == nil:
		return s.missing(s.x509.update)
	case s.cfg.JWTBundles && s.jwt.update == nil:
		err, denied = fmt.Errorf("no bundles for JWT-SVIDs: %w", cmp.Or(s.jwt.err, errors.New(waiting))), s.jwt.denied
	case s.cfg.BundlesOnly:
		return fmt.Errorf("workloadapi: source: %w: it is configured for bundles only", spiffe.ErrNotReady)
	}
	if denied != nil && !errors.Is(err, ErrDenied) {
		err = fmt.Errorf("%w; before that: %w", err, denied)
	}
	return s.life.NotReady("workloadapi: source", err, waiting)
}

// mostNamed is how many identities an error names.
const mostNamed = 5

// missing returns the error for an update without an identity that has the wanted hint.
func (s *Source) missing(u *Update) error {
	text := "the server has no identity"
	if s.cfg.Hint != "" {
		text = fmt.Sprintf("%s with the hint %q", text, redact.Clip(s.cfg.Hint, 128))
	}
	for i, id := range u.Identities {
		if i == mostNamed {
			text += fmt.Sprintf(", and %d more", len(u.Identities)-i)
			break
		}
		text += fmt.Sprintf("; it has %q with the hint %q", id.SVID.ID(), redact.Clip(id.Hint, 128))
	}
	if u.withheld != nil {
		return fmt.Errorf("workloadapi: source: %w: %s: %w", spiffe.ErrNotReady, text, u.withheld)
	}
	return fmt.Errorf("workloadapi: source: %w: %s", spiffe.ErrNotReady, text)
}
