package workloadapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"

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
	// It is usually the value of the environment variable [SocketEnv]. If it has another form, the error has the
	// corrected address where that is clear. For Windows' named pipes, which are not in the standard, pass
	// [NewClient] an HTTP client.
	Address string

	// Client, if set, is used instead of a new one for Address. The program may share it with other Sources and make
	// calls of its own with it.
	Client *Client

	// Hint selects the identity with that label among several. Empty means the default identity, the first one. While
	// the server has no identity with the hint, the source has bundles and no identity. A program that needs several
	// identities makes a Source for each hint, with one Client.
	Hint string

	// JWTBundles makes the source watch the bundles for JWT-SVIDs too. Without it the bundles have no JWT authorities.
	JWTBundles bool

	// BundlesOnly is for programs that verify peers and present no identity: the source watches the bundles alone, and
	// SVID and Snapshot return errors that wrap [spiffe.ErrNotReady].
	BundlesOnly bool

	// Logger gets each change (Info), and failures and what was skipped or withdrawn (Warn), with the attributes rpc,
	// server, id, not_after, err and retry_in. The first discarded response is logged at once, and then their number
	// each minute. Nil means no logs.
	Logger *slog.Logger
}

// Source has the current identity and trust bundles of this workload. [Start] or [New] makes one. It is a
// [spiffe.SVIDSource], a [spiffe.BundleSource] and a jwtsvid.Source; sdssource.FromIdentity makes it one of package
// sds. Its methods are safe for concurrent use, and those that read work before, during and after [Source.Run].
type Source struct {
	redacted
	cfg    Config
	client *Client
	log    *slog.Logger
	bad    *ratelog.Log // of responses
	news   renew.Signal
	early  renew.Signal // of a response that is not in force yet
	life   lifecycle.Life
	cur    atomic.Pointer[state] // what readers read; writers hold mu

	mu       sync.Mutex
	isReady  bool // when it was published last
	x509     track
	jwt      track
	unmerged []error // why some bundles have authorities of one kind only
}

type redacted = redact.Text

// state is what was published together. It never changes.
type state struct {
	snap    *spiffe.Snapshot  // nil if there is no identity to hand out
	bundles *spiffe.BundleSet // nil if there are none
	update  *Update           // of the X.509 stream, nil if there is none
}

// Start returns a Source that is ready, and runs it until [Source.Close]. The end of ctx ends a start that is not done
// yet, and nothing after that. If Start fails, nothing is left running, and the error is that of [New] or
// [Source.Ready]: it says why there is no identity.
func Start(ctx context.Context, cfg Config) (*Source, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, s, &s.life, s.run)
}

// New checks cfg and returns a Source. It does nothing else: no goroutine, no connection. The caller calls
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
	s.cur.Store(&state{})
	return s, nil
}

// SVID returns the current X.509-SVID with its key: the identity with the wanted hint, or the default one. It
// neither blocks nor checks the clock: while the server cannot be reached the identity stays, even after it has
// expired. Before the first identity, and after the server has withdrawn it, the error wraps [spiffe.ErrNotReady].
func (s *Source) SVID() (*spiffe.SVID, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle returns the current trust bundle of td. It does not block. Before the first bundles, and after the server has
// withdrawn them, the error wraps [spiffe.ErrNotReady]; for a trust domain without a bundle it wraps
// [spiffe.ErrUnknownTrustDomain].
func (s *Source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if set := s.cur.Load().bundles; set != nil {
		return set.Bundle(td)
	}
	return nil, s.notReady()
}

// Bundles returns all trust bundles, as they were published together: none before the first, and after the server has
// withdrawn them. The same set is returned until something changes.
func (s *Source) Bundles() *spiffe.BundleSet {
	if set := s.cur.Load().bundles; set != nil {
		return set
	}
	return noBundles
}

var noBundles = new(spiffe.BundleSet)

// Snapshot returns the identity and the trust bundles as they were published together. It does not block. The error is
// that of [Source.SVID].
func (s *Source) Snapshot() (*spiffe.Snapshot, error) {
	if snap := s.cur.Load().snap; snap != nil {
		return snap, nil
	}
	return nil, s.notReady()
}

// SVIDs returns all identities of the workload that are in force, the default one first; none before the first
// response, after the server has withdrawn them, and with BundlesOnly. It does not block.
func (s *Source) SVIDs() (all []*spiffe.SVID) {
	if u := s.cur.Load().update; u != nil {
		for _, id := range u.Identities {
			all = append(all, id.SVID)
		}
	}
	return all
}

// X509 returns all identities of the workload that are in force, with their bundles, for programs that choose among
// them themselves. It does not block. Before the first response, after the server has withdrawn them, and with
// BundlesOnly the error wraps [spiffe.ErrNotReady].
func (s *Source) X509() (*Update, error) {
	if u := s.cur.Load().update; u != nil && len(u.Identities) > 0 {
		return u, nil
	}
	return nil, s.notReady()
}

// CRLs returns the certificate revocation lists that came with the bundles, in DER as they were received; nil if there
// are none. The caller must not change them.
func (s *Source) CRLs() [][]byte { return s.cur.Load().crls() }

func (st *state) crls() [][]byte {
	if st.update == nil {
		return nil
	}
	return st.update.CRLs
}

// Fetch asks the server for a JWT-SVID of the identity of the source, or of the default identity while there is none,
// for one or more audiences. It works without Run. Each call makes a new token: put a *jwtsvid.Cache, of which this is
// the Source, in front for many requests.
//
// The error is an [*Error], or wraps [spiffe.ErrNotReady] if no identity has the wanted hint.
func (s *Source) Fetch(ctx context.Context, audience ...string) (token string, err error) {
	var id spiffe.ID
	st := s.cur.Load()
	if st.snap != nil {
		svid, _ := st.snap.SVID() // of a snapshot: never an error
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

// Changed returns a channel that is closed when what the source hands out changes, and when something happens that
// [Source.Ready] waits for. Take it before reading, so that no change is missed:
//
//	for {
//		changed := s.Changed()
//		use(s.Snapshot())
//		<-changed
//	}
func (s *Source) Changed() <-chan struct{} { return s.news.Changed() }

// Ready waits until the source has what it is configured for: the identity with the wanted hint and its bundles, the
// JWT bundles with JWTBundles, and the bundles alone with BundlesOnly. The error wraps [spiffe.ErrNotReady], the
// cause of ctx and the last failure. It comes before ctx is done if the server refuses for good, and after
// [Source.Close]. If Run was never called, it says so.
func (s *Source) Ready(ctx context.Context) error {
	var ready bool
	ended := s.life.Await(ctx, s.Changed, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		ready = s.ready()
		return ready || s.x509.final || s.jwt.final
	})
	if ready {
		return nil
	}
	err := s.notReady()
	if ended == nil || errors.Is(err, ended) {
		return err
	}
	return fmt.Errorf("%w; waited for it: %w", err, ended)
}

// ready reports whether the source has what it is configured for. The caller holds mu.
func (s *Source) ready() bool {
	has := s.cur.Load().snap != nil || s.cfg.BundlesOnly && s.x509.update != nil
	return has && (s.jwt.update != nil || !s.cfg.JWTBundles)
}

// notReady is the error while something is missing.
func (s *Source) notReady() error {
	idle := s.life.Idle()
	s.mu.Lock()
	defer s.mu.Unlock()
	t, missing := &s.x509, ""
	switch {
	case s.x509.update == nil:
	case !s.cfg.BundlesOnly && s.cur.Load().snap == nil:
		return s.missing(s.x509.update)
	case s.cfg.JWTBundles && s.jwt.update == nil:
		t, missing = &s.jwt, "no bundles for JWT-SVIDs: "
	case s.cfg.BundlesOnly:
		return fmt.Errorf("workloadapi: source: %w: it is configured for bundles only", spiffe.ErrNotReady)
	}
	cause := t.err
	if cause == nil && t == &s.x509 {
		cause = s.jwt.err
	}
	if cause == nil && (idle == nil || !t.began.IsZero()) {
		cause = t.silence(s.client.server)
	}
	if t.denied != nil && !errors.Is(cause, ErrDenied) {
		cause = fmt.Errorf("%w; before that: %w", cause, t.denied)
	}
	switch {
	case idle == nil:
	case cause == nil || errors.Is(idle, cause):
		cause = idle
	default:
		cause = fmt.Errorf("%w; %w", cause, idle)
	}
	return fmt.Errorf("workloadapi: source: %w: %s%w", spiffe.ErrNotReady, missing, cause)
}

// mostNamed is how many identities an error names.
const mostNamed = 5

// missing is the error while none of the identities of u, which may be nil, has the wanted hint.
func (s *Source) missing(u *Update) error {
	text := "the server has no identity"
	if s.cfg.Hint != "" {
		text = fmt.Sprintf("%s with the hint %q", text, redact.Clip(s.cfg.Hint, 128))
	}
	if u == nil {
		return fmt.Errorf("workloadapi: source: %w: %s", spiffe.ErrNotReady, text)
	}
	var have []string
	for i, id := range u.Identities {
		if i == mostNamed {
			have = append(have, fmt.Sprintf("%d more", len(u.Identities)-i))
			break
		}
		have = append(have, fmt.Sprintf("%q with the hint %q", id.SVID.ID(), redact.Clip(id.Hint, 128)))
	}
	if len(have) > 0 {
		text += "; it has " + strings.Join(have, ", ")
	}
	if u.withheld != nil {
		return fmt.Errorf("workloadapi: source: %w: %s: %w", spiffe.ErrNotReady, text, u.withheld)
	}
	return fmt.Errorf("workloadapi: source: %w: %s", spiffe.ErrNotReady, text)
}
