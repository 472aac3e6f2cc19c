package athenz

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

const defaultInterval = time.Hour

// patience is for an agent that does not answer: it is on the same machine.
var patience = renew.Patience{Impatient: 30 * time.Second, Longest: 5 * time.Minute}

// SidecarConfig configures a [Sidecar]. Agent is required.
type SidecarConfig struct {
	// Agent gives the identities: an [AgentClient]. If that says that the agent cannot refresh the present one, the Sidecar asks
	// for a first one.
	Agent interface {
		Init(ctx context.Context) (*Identity, error)
		Refresh(ctx context.Context, current *pki.Credential) (*Identity, error)
	}

	// Identity is the one to begin with, such as what an init container has written to files. Nil, or one whose certificate
	// has expired, means that the Sidecar asks for the first one.
	Identity *Identity

	// Keep is called with each new identity before it is published, such as to write it to files. If it fails, the identity
	// before stays the present one, and Keep is called again soon with the same new one, as the agent gives the first but
	// once. Nil keeps it in memory alone: then a restart takes another init, which the agent refuses.
	Keep func(ctx context.Context, i *Identity) error

	// Interval is how often the identity is refreshed, give or take a tenth; 0 means an hour. It is refreshed when half of
	// its life is over, too.
	Interval time.Duration

	// Timeout bounds each attempt; 0 means 30 seconds.
	Timeout time.Duration

	// Logger gets each new identity (Info) and each failure (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Sidecar keeps the identity of a pod fresh. [StartSidecar] or [NewSidecar] makes one. Its methods are safe for concurrent
// use. An identity that is still valid is never dropped because a refresh failed.
type Sidecar struct {
	cfg  SidecarConfig
	life lifecycle.Life
	cur  atomic.Pointer[sidecarState]
	news renew.Signal

	unkept *Identity // was given, and could not be kept so far; only for what runs
}

// sidecarState was published together. It never changes.
type sidecarState struct {
	identity  *Identity // nil before the first
	refreshes uint64
	failures  int
	err       error // of the last attempt
}

// NewSidecar checks cfg and returns a Sidecar. It does nothing else.
func NewSidecar(cfg SidecarConfig) (*Sidecar, error) {
	cfg.Interval, cfg.Timeout = cmp.Or(cfg.Interval, defaultInterval), cmp.Or(cfg.Timeout, defaultTimeout)
	cfg.Logger = discard(cfg.Logger)
	switch {
	case cfg.Agent == nil:
		return nil, errors.New("athenz: new sidecar: the Agent is missing")
	case cfg.Interval < time.Minute || cfg.Timeout < 0:
		return nil, fmt.Errorf("athenz: new sidecar: the Interval is %v and the Timeout %v; an Interval is at least a minute", cfg.Interval, cfg.Timeout)
	case cfg.Identity != nil && cfg.Identity.Credential == nil:
		return nil, errors.New("athenz: new sidecar: the Identity has no Credential")
	}
	s := &Sidecar{cfg: cfg}
	first := new(sidecarState)
	if i := cfg.Identity; i != nil && time.Now().Before(i.Credential.NotAfter()) {
		first.identity = i
	}
	s.cur.Store(first)
	return s, nil
}

// StartSidecar returns a Sidecar that has an identity, and runs until [Sidecar.Close]. The end of ctx ends a start that is not
// done yet, and nothing after that. If it fails, nothing is left running, and the error is that of NewSidecar or of Ready.
func StartSidecar(ctx context.Context, cfg SidecarConfig) (*Sidecar, error) {
	s, err := NewSidecar(cfg)
	if err != nil {
		return nil, err
	}
	if err := s.life.Start(ctx, s.work, s.Ready); err != nil {
		return nil, err
	}
	return s, nil
}

// Run keeps the identity fresh. It blocks until ctx is done or Close is called, and returns nil then. It returns an error at
// once if it is running already or closed.
func (s *Sidecar) Run(ctx context.Context) error {
	if err := s.life.Run(ctx, s.work); err != nil {
		return fmt.Errorf("athenz: run sidecar: %w", err)
	}
	return nil
}

// Close ends Run, or what StartSidecar has started, for good, and waits for it. What was obtained stays readable. The error
// is always nil.
func (s *Sidecar) Close() error { return s.life.Close() }

// Ready waits until there is an identity that has not expired. The error wraps [spiffe.ErrNotReady], the cause of ctx, and what the
// last attempt failed with.
func (s *Sidecar) Ready(ctx context.Context) error {
	err := s.life.Await(ctx, s.Changed, func() bool { _, err := s.Identity(); return err == nil })
	if err == nil {
		return nil
	}
	why := spiffe.ErrNotReady
	if last := s.cur.Load().err; last != nil {
		why = fmt.Errorf("%[2]w: %[1]w", last, spiffe.ErrNotReady) // last may know when to come back, and is asked first
	}
	if idle := s.life.Idle(); idle != nil && !errors.Is(err, idle) {
		why = fmt.Errorf("%w: %w", why, idle)
	}
	return fmt.Errorf("athenz: sidecar: %w; waited for it: %w", why, err)
}

// Identity returns the present identity. It does not block. Before the first, and after the end of the certificate, the error
// wraps [spiffe.ErrNotReady] and says what the last attempt failed with.
func (s *Sidecar) Identity() (*Identity, error) {
	st := s.cur.Load()
	switch {
	case st.identity == nil && st.err != nil:
		return nil, fmt.Errorf("athenz: sidecar: %[2]w: %[1]w", st.err, spiffe.ErrNotReady)
	case st.identity == nil:
		return nil, fmt.Errorf("athenz: sidecar: %w: there is no identity yet", spiffe.ErrNotReady)
	case !time.Now().Before(st.identity.Credential.NotAfter()):
		return nil, fmt.Errorf("athenz: sidecar: %[2]w: the certificate has expired: %[1]w", cmp.Or(st.err, errors.New("there was no attempt to refresh it")), spiffe.ErrNotReady)
	}
	return st.identity, nil
}

// Changed returns a channel that is closed when the identity changes, or an attempt to get one has failed. Take it before
// reading.
func (s *Sidecar) Changed() <-chan struct{} { return s.news.Changed() }

// Report implements [report.Reporter] with the identity, and the agent as the upstream. The metrics are:
//
//	svidkit_athenz_sidecar_ready                               1 while there is an identity that has not expired
//	svidkit_athenz_sidecar_refreshes_total                     identities that the agent has given
//	svidkit_athenz_sidecar_failures                            failed attempts in a row
//	svidkit_athenz_sidecar_identity_end_timestamp_seconds      when the certificate expires
func (s *Sidecar) Report() report.Report {
	st := s.cur.Load()
	_, err := s.Identity()
	i := report.Identity{Name: "default", Failures: st.failures, Err: st.err} // not its Own: a restart asks for another init, which the agent refuses
	r := report.Report{
		NotReady: err, Upstreams: []report.Upstream{{Name: "agent", OK: st.refreshes > 0, Failures: st.failures, Err: st.err}},
		Metrics: s.writeMetrics,
	}
	if st.identity != nil {
		chain := st.identity.Credential.Chain()
		i.Name = cmp.Or(chain[0].Subject.CommonName, i.Name)
		i.NotBefore, i.NotAfter, i.ChainEnd = chain[0].NotBefore, chain[0].NotAfter, certchain.End(chain)
	}
	r.Identities = []report.Identity{i}
	return r
}

func (s *Sidecar) writeMetrics(w io.Writer) error {
	st := s.cur.Load()
	_, err := s.Identity()
	var m metrics.Set
	gauge := func(name, help string, value float64, ok bool) {
		m.Gauge("svidkit_athenz_sidecar_"+name, help, func() (float64, bool) { return value, ok })
	}
	gauge("ready", "Whether there is an identity that has not expired.", metrics.Bool(err == nil), true)
	m.Totals("svidkit_athenz_sidecar_refreshes_total", "How many identities the agent has given.", func(add metrics.Add) { add(float64(st.refreshes)) })
	gauge("failures", "Failed attempts in a row.", float64(st.failures), true)
	if st.identity != nil {
		gauge("identity_end_timestamp_seconds", "When the certificate expires, in seconds since 1970.", metrics.Seconds(st.identity.Credential.NotAfter()), true)
	}
	return m.Write(w)
}

// work refreshes until ctx is done. What it begins with is refreshed at once: how old it is, is not known.
func (s *Sidecar) work(ctx context.Context) error {
	for ctx.Err() == nil {
		_ = renew.Sleep(ctx, s.attempt(ctx))
	}
	return nil
}

// attempt gets one identity, and returns when to get the next.
func (s *Sidecar) attempt(ctx context.Context) time.Duration {
	st := *s.cur.Load()
	i, err := s.get(ctx, st.identity)
	if err != nil && ctx.Err() != nil { // what was kept is published even then
		return 0
	}
	now := time.Now()
	if err == nil {
		leaf := i.Credential.Leaf()
		half := renew.RenewAt(now, leaf.NotBefore, i.Credential.NotAfter(), 0.5, 0.2, rand.Float64()).Sub(now)
		wait := min(half, renew.Poll(s.cfg.Interval, time.Second, renew.Longest, rand.Float64()))
		st.identity, st.refreshes, st.failures, st.err = i, st.refreshes+1, 0, nil
		s.cur.Store(&st)
		s.news.Notify()
		s.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "athenz: new identity", slog.Any("identity", i), slog.Duration("refresh_in", wait))
		return wait
	}
	st.failures, st.err = st.failures+1, err
	s.cur.Store(&st)
	s.news.Notify()
	var life, left time.Duration
	if st.identity != nil {
		life, left = st.identity.Credential.NotAfter().Sub(st.identity.Credential.Leaf().NotBefore), st.identity.Credential.NotAfter().Sub(now)
	}
	wait := patience.Wait(renew.NewFailure(st.failures, err), life, left, rand.Float64())
	s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "athenz: no new identity", slog.Any("err", err), slog.Int("attempt", st.failures), slog.Duration("retry_in", wait))
	return wait
}

func (s *Sidecar) get(ctx context.Context, current *Identity) (*Identity, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	i, err := s.unkept, error(nil)
	switch {
	case i != nil && time.Now().Before(i.Credential.NotAfter()):
	case current != nil && time.Now().Before(current.Credential.NotAfter()):
		i, err = s.cfg.Agent.Refresh(ctx, current.Credential)
		// An agent that cannot refresh it says so by 400, as after a reboot of the node, which mounts the volumes anew. It gives a
		// first one if no other was given, and there is none to wait for.
		if e, ok := errors.AsType[*statusError](err); ok && e.code == http.StatusBadRequest {
			if first, failed := s.cfg.Agent.Init(ctx); failed == nil {
				i, err = first, nil
			}
		}
	default:
		i, err = s.cfg.Agent.Init(ctx)
	}
	s.unkept = nil
	switch {
	case err != nil:
		return nil, err
	case i == nil || i.Credential == nil || !time.Now().Before(i.Credential.NotAfter()):
		return nil, errors.New("the agent gave an identity without a certificate that is valid")
	case current != nil && i.Roots == nil: // ZTS need not send them
		i = &Identity{Credential: i.Credential, Roots: current.Roots, token: i.token}
	}
	if s.cfg.Keep != nil {
		if err := s.cfg.Keep(ctx, i); err != nil {
			s.unkept = i
			return nil, fmt.Errorf("keep the identity: %w", err)
		}
	}
	return i, nil
}

// Retryable reports whether the agent or the signing service may answer otherwise later. The kubelet may not know a pod yet,
// which is 400.
func (e *statusError) Retryable() (after time.Duration, ok bool) {
	return 0, e.code != http.StatusForbidden && e.code != http.StatusUnauthorized
}
