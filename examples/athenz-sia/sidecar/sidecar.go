// Package sidecar is the client in a pod with an Athenz identity: it obtains the identity from the node's agent,
// package nodeagent, and keeps it fresh, in memory and in files.
//
//	s, err := sidecar.Start(ctx, sidecar.Config{
//		Socket: "/identity/connect/agent.sock", HandleFile: "/identity/id",
//		Files: sidecar.Files{
//			KeyFile: "/tls/service.key", CertificateFile: "/tls/service.cert", RootsFile: "/tls/cacert.pem",
//		},
//	})
//	…
//	defer s.Close()
//	identity, err := s.Identity()
//
// # What it promises
//
// A failed refresh never drops a valid identity. An identity that cannot be written to the files is not published,
// and the write is retried soon, because the agent gives the first identity only once. The key and the token never
// appear in a log or an error.
package sidecar

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

const (
	defaultInterval = time.Hour
	defaultTimeout  = 30 * time.Second
)

// patience is short: the agent is on the same machine.
var patience = renew.Patience{Impatient: 30 * time.Second, Longest: 5 * time.Minute}

type redacted = redact.Text // so that the embedded field is not exported

// Identity is the identity that a pod's agent gave it. It does not print its key and its token.
type Identity struct {
	redacted

	// Credential is the certificate with its key. If the certificate has a SPIFFE ID, its PEM is also an X.509-SVID.
	Credential *pki.Credential

	// Roots are the roots of the certificates that ZTS issues.
	Roots []*x509.Certificate

	token func() string // a func, because no printer shows what it holds
}

func newIdentity(c *pki.Credential, roots []*x509.Certificate, serviceToken func() string) *Identity {
	text := "sidecar.Identity(" + c.Leaf().Subject.CommonName + " until " + token.Stamp(c.NotAfter()) + ")"
	return &Identity{redact.New(text), c, roots, serviceToken}
}

// ServiceToken returns the service token that came with the certificate, or "". It is a secret.
func (i *Identity) ServiceToken() string {
	if i.token == nil {
		return ""
	}
	return i.token()
}

// Config configures a [Sidecar]. Socket and HandleFile are required.
type Config struct {
	// Socket is the Unix socket of the agent, such as /identity/connect/agent.sock.
	Socket string

	// HandleFile is the file with the handle of the pod's volume, such as /identity/id.
	HandleFile string

	// Files is where the identity is kept. A Sidecar starts with the identity there, such as an init container's, if
	// it has not expired. The zero value keeps the identity only in memory: a restart then needs another first
	// identity, which the agent refuses until the last one has expired.
	Files Files

	// Interval is how often the identity is refreshed, give or take a tenth; 0 means an hour. It is also refreshed
	// after half of its life.
	Interval time.Duration

	// Timeout bounds each attempt; 0 means 30 seconds.
	Timeout time.Duration

	// Logger gets each new identity (Info), each failure (Warn), and warnings of files that are unreadable or that
	// other users may replace. Nil means no logs.
	Logger *slog.Logger
}

// Sidecar keeps the identity of a pod fresh. [Start] or [New] makes one. Its methods are safe for concurrent use.
type Sidecar struct {
	cfg   Config
	agent agent
	keep  func(ctx context.Context, i *Identity) error // nil: keep it in memory only
	life  lifecycle.Life
	cur   atomic.Pointer[state]
	news  renew.Signal

	unkept *Identity // given but not yet kept; only for Run's goroutine
}

// agent is a client of the node's agent.
type agent interface {
	Init(ctx context.Context) (*agentapi.Answer, error)
	Refresh(ctx context.Context, current *pki.Credential) (*agentapi.Answer, error)
}

// state is published as a whole, and never changes.
type state struct {
	identity  *Identity // nil before the first
	refreshes uint64
	failures  int
	err       error // of the last attempt
}

// New checks cfg, reads the Files, and returns a Sidecar. It does not contact the agent.
func New(cfg Config) (*Sidecar, error) {
	client, err := agentapi.NewClient(cfg.Socket, cfg.HandleFile)
	if err != nil {
		return nil, fmt.Errorf("sidecar: new: %w", err)
	}
	cfg.Logger = ratelog.Patient(cfg.Logger)
	if cfg.Files == (Files{}) {
		return newSidecar(cfg, client, nil, nil)
	}
	if err := cfg.Files.check(); err != nil {
		return nil, fmt.Errorf("sidecar: new: %w", err)
	}
	kept := store{cfg.Files, cfg.Logger}
	first, err := kept.read()
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return nil, fmt.Errorf("sidecar: new: directory of %s: %w; let user %d write to it", cfg.Files.KeyFile, err,
			os.Getuid())
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // without one, ask the agent
		cfg.Logger.LogAttrs(context.Background(), slog.LevelWarn,
			"sidecar: the files have no identity that can be used", slog.Any("err", err))
	}
	return newSidecar(cfg, client, kept.write, first)
}

// newSidecar returns a Sidecar that starts with the identity first, if that is not nil.
func newSidecar(cfg Config, from agent, keep func(context.Context, *Identity) error, first *Identity) (*Sidecar,
	error) {
	cfg.Interval, cfg.Timeout = cmp.Or(cfg.Interval, defaultInterval), cmp.Or(cfg.Timeout, defaultTimeout)
	cfg.Logger = ratelog.Patient(cfg.Logger)
	if cfg.Interval < time.Minute || cfg.Timeout < 0 {
		return nil, fmt.Errorf("sidecar: new: the Interval is %v and the Timeout %v; an Interval is at least a minute",
			cfg.Interval, cfg.Timeout)
	}
	s := &Sidecar{cfg: cfg, agent: from, keep: keep}
	begin := new(state)
	if first != nil && time.Now().Before(first.Credential.NotAfter()) {
		begin.identity = first
	}
	s.cur.Store(begin)
	return s, nil
}

// Start returns a Sidecar that has an identity, and runs until [Sidecar.Close]. Once Start has returned, ctx has no
// effect. If Start fails, nothing is left running, and the error is from New or Ready.
func Start(ctx context.Context, cfg Config) (*Sidecar, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return start(ctx, s)
}

func start(ctx context.Context, s *Sidecar) (*Sidecar, error) {
	return lifecycle.Started(ctx, s, &s.life, s.work)
}

// Run keeps the identity fresh. It blocks until ctx is done or Close is called, and returns nil then. It returns an
// error at once if it is running already or closed.
func (s *Sidecar) Run(ctx context.Context) error {
	return s.life.RunAs(ctx, "sidecar", s.work)
}

// Close ends Run, or the work of Start, for good, and waits for it. The last identity stays readable. The error is
// always nil.
func (s *Sidecar) Close() error { return s.life.Close() }

// Ready waits until there is an identity that has not expired. The error wraps [spiffe.ErrNotReady], the cause of
// ctx, and the last attempt's error.
func (s *Sidecar) Ready(ctx context.Context) error {
	err := s.life.Await(ctx, s.Changed, func() bool { _, err := s.Identity(); return err == nil })
	if err == nil {
		return nil
	}
	why := spiffe.ErrNotReady
	if last := s.cur.Load().err; last != nil {
		why = fmt.Errorf("%w: %w", why, last)
	}
	if idle := s.life.Idle(); idle != nil && !errors.Is(err, idle) {
		why = fmt.Errorf("%w: %w", why, idle)
	}
	return fmt.Errorf("sidecar: %w; waited for it: %w", why, err)
}

// Identity returns the current identity. It does not block. Before the first one, and after the certificate has
// expired, the error wraps [spiffe.ErrNotReady] and includes the last attempt's error.
func (s *Sidecar) Identity() (*Identity, error) {
	st := s.cur.Load()
	switch {
	case st.identity == nil && st.err != nil:
		return nil, fmt.Errorf("sidecar: %w: %w", spiffe.ErrNotReady, st.err)
	case st.identity == nil:
		return nil, fmt.Errorf("sidecar: %w: there is no identity yet", spiffe.ErrNotReady)
	case !time.Now().Before(st.identity.Credential.NotAfter()):
		why := cmp.Or(st.err, errors.New("there was no attempt to refresh it"))
		return nil, fmt.Errorf("sidecar: %w: the certificate has expired: %w", spiffe.ErrNotReady, why)
	}
	return st.identity, nil
}

// Changed returns a channel that is closed when the identity changes or an attempt fails. Take it before reading.
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
	// It is not its Own: a restart needs another init, which the agent refuses.
	i := report.Identity{Name: "default", Failures: st.failures, Err: st.err}
	r := report.Report{
		NotReady: err, Upstreams: []report.Upstream{{Name: "agent", OK: st.refreshes > 0, Failures: st.failures,
			Err: st.err}},
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
	m.Totals("svidkit_athenz_sidecar_refreshes_total", "How many identities the agent has given.",
		func(add metrics.Add) {
			add(float64(st.refreshes))
		})
	gauge("failures", "Failed attempts in a row.", float64(st.failures), true)
	if st.identity != nil {
		gauge("identity_end_timestamp_seconds", "When the certificate expires, in seconds since 1970.",
			metrics.Seconds(st.identity.Credential.NotAfter()), true)
	}
	return m.Write(w)
}

// work refreshes until ctx is done. It refreshes a stored identity at once, as its age is unknown.
func (s *Sidecar) work(ctx context.Context) error {
	for ctx.Err() == nil {
		_ = renew.Sleep(ctx, s.attempt(ctx))
	}
	return nil
}

// attempt obtains one identity, and returns the time until the next attempt.
func (s *Sidecar) attempt(ctx context.Context) time.Duration {
	st := *s.cur.Load()
	i, err := s.get(ctx, st.identity)
	if err != nil && ctx.Err() != nil { // publish a kept identity even then
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
		s.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "sidecar: new identity", slog.Any("identity", i),
			slog.Duration("refresh_in", wait))
		return wait
	}
	st.failures, st.err = st.failures+1, err
	s.cur.Store(&st)
	s.news.Notify()
	var life, left time.Duration
	if st.identity != nil {
		life, left = st.identity.Credential.NotAfter().Sub(st.identity.Credential.Leaf().NotBefore),
			st.identity.Credential.NotAfter().Sub(now)
	}
	wait := patience.Wait(renew.NewFailure(st.failures, err), life, left, rand.Float64())
	s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "sidecar: no new identity", slog.Any("err", err),
		slog.Int("attempt", st.failures), slog.Duration("retry_in", wait))
	return wait
}

func (s *Sidecar) get(ctx context.Context, current *Identity) (*Identity, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	i, err := s.unkept, error(nil)
	var a *agentapi.Answer
	switch {
	case i != nil && time.Now().Before(i.Credential.NotAfter()):
	case current != nil && time.Now().Before(current.Credential.NotAfter()):
		a, err = s.agent.Refresh(ctx, current.Credential)
		// The agent answers 400 if it cannot refresh, as after a reboot of the node, which mounts the volumes anew.
		// It then gives a first identity if it has given no other, so there is no need to wait.
		if e, ok := errors.AsType[*jsonapi.StatusError](err); ok && e.Code == http.StatusBadRequest {
			if first, failed := s.agent.Init(ctx); failed == nil {
				a, err = first, nil
			}
		}
	default:
		a, err = s.agent.Init(ctx)
	}
	s.unkept = nil
	if err != nil {
		return nil, err
	}
	if a != nil {
		if current != nil && a.Roots == nil { // ZTS may leave them out
			a.Roots = current.Roots
		}
		i = newIdentity(a.Credential, a.Roots, a.Token)
	}
	if s.keep != nil {
		if err := s.keep(ctx, i); err != nil {
			s.unkept = i
			return nil, fmt.Errorf("keep the identity: %w", err)
		}
	}
	return i, nil
}
