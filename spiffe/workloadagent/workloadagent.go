// Package workloadagent is an agent for the users of a machine: one file says which process may have which SPIFFE IDs, and the
// agent serves them by the SPIFFE Workload API and, for Envoy, by SDS, and writes them to files.
//
//	manager, err := secretcache.New(secretcache.Config{TrustDomain: td, CA: ca}) // any of package caclient
//	if err != nil { … }
//	agent, err := workloadagent.New(workloadagent.Config{File: "/etc/identity/workloads.json", Source: manager, TrustDomain: td})
//	if err != nil { … } // the file is refused: with the line, and what to do
//	group.Go(func() error { return manager.Run(ctx) })
//	group.Go(func() error { return agent.Run(ctx) })
//	server := &unixsocket.Server{Path: "/run/identity/agent.sock", SocketMode: 0o666, Handler: agent}
//	err = server.Run(ctx)
//
// The program examples/workload-agent is made of it; its README has the whole format of the file.
//
// # The file
//
//	{
//	  "workloads": [
//	    {
//	      "match": {"uid": 1000, "executable": "/usr/bin/web"},
//	      "identities": [
//	        {"id": "spiffe://example.org/web", "audiences": ["db"], "files": [{"folder": "/run/web", "gid": 1000}]}
//	      ]
//	    }
//	  ]
//	}
//
// A match can have the user and group of the process, the path of its executable, its unit of systemd and the UID of its
// pod. A process has to meet all of them; see [unixsocket.Process] for what the kernel says. It has the identities of all
// workloads that it meets, in the order of the file, the default one first. A process that meets none has nothing, nor does
// one of which the kernel says nothing for certain.
//
// An identity has a hint, which the Workload API hands on, the audiences for which its workload may have JWT-SVIDs ("*" for
// any, none without), and folders to which it is written, whether a process runs or not.
//
// # By SDS
//
// An Envoy has the secrets default (its first identity), the IDs and the hints of its identities, and the roots: ROOTCA, ALL
// and the IDs of trust domains. A process without an identity has no roots, either.
//
// # In files
//
// The layout "delivery" is that of the draft SPIFFE Filesystem Delivery of 20 April 2026 (spiffe/spiffe#376, commit
// 8ba8a874): credential-bundle.pem with the key, in PKCS#8, and the chain; and TRUST-DOMAIN.spiffe-trust-bundle.pem for each
// trust domain. "split" is that of package filesink. Package filesink says how files are replaced, who must own the folder,
// and which modes there are. Files of an identity that the file no longer has stay, without renewals.
//
// # When the file changes
//
// It is followed. A new version takes effect at once, on open streams too: an identity that is in both versions keeps its
// certificate, one that is gone is forgotten with its key, and a caller that loses its last one is told so (PermissionDenied).
// SDS can take no secret away; see package sds. A version that is not good is refused as a whole, with the line and the
// remedy in the log and in [Agent.Report], and the one before stays in force. The file and the folders above it must belong to
// this user or to root, and not be writable for others.
//
// # What it promises
//
// No failure takes a certificate away: packages secretcache and workloadserver say how. While an identity has not come yet,
// a caller has its others, and waits if there are none: so one that the CA refuses does not keep the others from being
// renewed at the caller.
package workloadagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// Config configures an [Agent]. File and Source are required. [New] copies it.
type Config struct {
	// File is the path of the file that says who gets what.
	File string

	// Source has the identities: a *secretcache.Manager with a TrustDomain, or a *workloadapi.Source, such as that of SPIRE's
	// agent, which has those that its server gives this program. The caller runs and closes it. If it has the methods
	// Add(spiffe.ID) error and Remove(spiffe.ID), as a Manager has, they are called with the identities that come and go.
	Source interface {
		sds.Source
		Bundles() *spiffe.BundleSet
		Changed() <-chan struct{}
	}

	// TrustDomain is the one that all identities of the file must be in. Zero permits any, for a Source that is an agent of
	// several.
	TrustDomain spiffe.TrustDomain

	// IssueJWTSVID and ValidateJWTSVID are as in [workloadserver.Options]. The former is asked only for an identity of the
	// caller and audiences that the file permits for it. Nil means that there are no tokens.
	IssueJWTSVID    func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)
	ValidateJWTSVID func(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)

	// Logger gets each version of the file (Info, and Warn if it is refused), and the logs of the servers and the files. Nil
	// means no logs.
	Logger *slog.Logger
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// Agent serves the identities of a Source by the rules of a file. [New] makes one. Its methods are safe for concurrent use.
type Agent struct {
	redacted
	cfg      Config
	log      *slog.Logger
	unproven *ratelog.Log
	file     *follow.Follower
	workload *workloadserver.Handler
	secrets  *sds.Handler
	mux      *http.ServeMux

	life    lifecycle.Life
	wake    renew.Signal // for work: something has changed
	news    renew.Signal // something was published
	current atomic.Pointer[state]
	bundles atomic.Pointer[spiffe.Snapshot] // of any identity; nil before the first

	mu    sync.Mutex      // guards the rest
	told  map[string]bool // names of the Source that have changed
	sinks map[written]*filesink.Sink
}

// state is what the file says, with the identities that it needs. It never changes; what identities have does.
type state struct {
	*rules
	identities map[spiffe.ID]*identity
}

// identity is a source of one identity: the Provider of a server, and the Source of a Sink.
type identity struct {
	held atomic.Pointer[held]
	news renew.Signal
}

// held is an identity as its readers have it.
type held struct {
	secret *pki.Secret // that it was made of
	snap   *spiffe.Snapshot
	err    error // why there is none
}

func (i *identity) Changed() <-chan struct{} { return i.news.Changed() }

func (i *identity) Snapshot() (*spiffe.Snapshot, error) {
	h := i.held.Load()
	return h.snap, h.err
}

// optional is an identity without which its callers can do.
type optional struct{ *identity }

func (o optional) Snapshot() (*spiffe.Snapshot, error) {
	snap, err := o.identity.Snapshot()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", workloadserver.ErrDenied, err)
	}
	return snap, nil
}

// Check returns what is wrong with a file that has data, with the line and the remedy, as [New] with that trust domain, which
// may be zero, refuses it; or nil.
func Check(data []byte, td spiffe.TrustDomain) error {
	_, err := parse(data, td)
	return err
}

// New reads the file and returns an Agent. The error says what is wrong with the file or with cfg. The caller calls [Agent.Run]
// or [Agent.Close].
func New(cfg Config) (*Agent, error) {
	if cfg.File == "" || cfg.Source == nil {
		return nil, errors.New("workloadagent: new: Config needs a File and a Source")
	}
	a := &Agent{
		redacted: redact.New("workloadagent.Agent(" + cfg.File + ")"), cfg: cfg,
		log: ratelog.Patient(cfg.Logger), unproven: ratelog.New(cfg.Logger, 0), mux: http.NewServeMux(), sinks: map[written]*filesink.Sink{},
	}
	a.current.Store(&state{rules: new(rules)})
	a.file = follow.New([]string{cfg.File}, a.take, &follow.Options{Logger: cfg.Logger, Open: func(path string) (*os.File, error) {
		return private.OpenFile(path, os.O_RDONLY, private.Options{})
	}})
	if err := a.file.Read(context.Background()); err != nil {
		return nil, fmt.Errorf("workloadagent: new: %w", err)
	}
	o := &workloadserver.Options{Identities: a.identities, ValidateJWTSVID: cfg.ValidateJWTSVID, Logger: cfg.Logger}
	if cfg.IssueJWTSVID != nil {
		o.IssueJWTSVID = a.issueJWTSVID
	}
	var err error
	if a.workload, err = workloadserver.NewHandler(provider{a}, o); err == nil {
		a.secrets, err = sds.NewHandler(cfg.Source, &sds.Options{Resolve: a.resolve, Logger: cfg.Logger})
	}
	if err != nil {
		return nil, fmt.Errorf("workloadagent: new: %w", err)
	}
	a.mux.Handle("/SpiffeWorkloadAPI/", a.workload)
	a.mux.Handle("/", a.secrets)
	return a, nil
}

// ServeHTTP serves the Workload API and SDS, whose paths differ. The server must know its callers: a [unixsocket.Server], or
// one with [unixsocket.ConnContext].
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.mux.ServeHTTP(w, r) }

// take takes a version of the file.
func (a *Agent) take(_ context.Context, files follow.Files) error {
	file, there := files[a.cfg.File]
	if !there {
		return fmt.Errorf("%s: %w", a.cfg.File, fs.ErrNotExist)
	}
	r, err := parse(file.Data, a.cfg.TrustDomain)
	if err != nil {
		return fmt.Errorf("%s: %w", a.cfg.File, err)
	}
	old := a.current.Load()
	next := &state{r, make(map[spiffe.ID]*identity, len(r.ids))}
	owner, _ := a.cfg.Source.(interface {
		Add(id spiffe.ID) error
		Remove(id spiffe.ID)
	})
	for id := range r.ids {
		if next.identities[id] = old.identities[id]; next.identities[id] != nil {
			continue
		}
		one := new(identity)
		one.held.Store(&held{err: fmt.Errorf("%s has not come yet: %w", id, spiffe.ErrNotReady)})
		next.identities[id] = one
		if owner == nil {
			continue
		}
		if err := owner.Add(id); err != nil {
			for id := range next.identities {
				if old.identities[id] == nil {
					owner.Remove(id)
				}
			}
			return fmt.Errorf("%s: %w", a.cfg.File, err)
		}
	}
	a.current.Store(next)
	if a.secrets != nil { // else it is the first
		a.workload.Refresh()
		a.secrets.Refresh()
	}
	for id := range old.identities {
		if owner != nil && !r.ids[id] {
			owner.Remove(id)
		}
	}
	a.log.Info("workloadagent: the file is in force", slog.String("file", a.cfg.File), slog.Int("workloads", len(r.workloads)), slog.Int("identities", len(r.ids)))
	a.wake.Notify()
	return nil
}

// Run keeps the files and what is served current. It blocks until ctx is done or [Agent.Close] is called, and returns nil. It is
// an error to call it while it runs, or after Close.
func (a *Agent) Run(ctx context.Context) error {
	if err := a.life.Run(ctx, a.work); err != nil {
		return fmt.Errorf("workloadagent: run: %w", err)
	}
	return nil
}

func (a *Agent) work(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = a.file.Run(ctx) })
	defer a.cfg.Source.Subscribe(func(string) { a.wake.Notify() })()
	defer a.write(ctx, &wg, &state{rules: new(rules)})
	var bundles *spiffe.BundleSet
	for ctx.Err() == nil {
		woken, changed := a.wake.Changed(), a.cfg.Source.Changed() // before looking, so that no change is missed
		s, had := a.current.Load(), bundles
		bundles = a.cfg.Source.Bundles()
		for id, one := range s.identities {
			a.look(id, one)
		}
		if a.carry(s) || bundles != had {
			a.news.Notify()
		}
		a.write(ctx, &wg, s)
		select {
		case <-woken:
		case <-changed:
		case <-time.After(time.Minute): // for folders that could not be made
		case <-ctx.Done():
		}
	}
	return nil
}

// look publishes what the Source has of an identity.
func (a *Agent) look(id spiffe.ID, one *identity) {
	at, cancel := context.WithCancel(context.Background())
	cancel() // what is not there is not waited for
	secret, err := a.cfg.Source.GenerateSecret(at, id.String())
	bundles := a.cfg.Source.Bundles() // after the certificate, which may need newer ones
	had := one.held.Load()
	next := &held{secret: secret}
	switch {
	case errors.Is(err, fs.ErrNotExist): // withdrawn, or not for this agent
		next.err = fmt.Errorf("%w: %w", workloadserver.ErrDenied, err)
	case err != nil || bundles == nil: // what there was stays
		return
	default:
		var svid *spiffe.SVID
		if had.secret == secret {
			svid, err = had.snap.SVID()
		} else {
			certs, key, _ := secret.KeyPair()
			svid, err = spiffe.ParseSVIDPEM(certs, key)
		}
		if err != nil || had.secret == secret && had.snap.Bundles() == bundles {
			return
		}
		next.snap = spiffe.NewSnapshot(svid, bundles)
	}
	one.held.Store(next)
	one.news.Notify()
}

// carry publishes the trust bundles, and reports whether they are others. A snapshot of any identity carries them.
func (a *Agent) carry(s *state) bool {
	var next *spiffe.Snapshot
	old := a.bundles.Load()
	for id, one := range s.identities {
		snap := one.held.Load().snap
		if snap == nil {
			continue
		}
		if next = snap; old != nil && old.Bundles() == snap.Bundles() {
			if svid, _ := old.SVID(); svid.ID() == id {
				return false
			}
		}
	}
	a.bundles.Store(next)
	return next != old
}

// written is what a Sink writes.
type written struct {
	output
	from *identity
}

// write starts the Sinks of s, and ends the others.
func (a *Agent) write(ctx context.Context, wg *sync.WaitGroup, s *state) {
	a.mu.Lock()
	old := a.sinks
	a.mu.Unlock()
	next := map[written]*filesink.Sink{}
	var begun []written
	for _, o := range s.outputs {
		w := written{o, s.identities[o.id]}
		if old[w] == nil {
			begun = append(begun, w)
		} else {
			next[w] = old[w]
		}
	}
	for w, sink := range old {
		if next[w] == nil {
			_ = sink.Close() // before another one begins in its folder
		}
	}
	for _, w := range begun {
		sink, err := filesink.New(w.config(a.cfg.Logger))
		if err == nil {
			err = w.makeFolder()
		}
		if err != nil {
			a.log.Warn("workloadagent: no files are written yet", slog.String("folder", w.folder), slog.Any("err", err))
			continue
		}
		next[w] = sink
		wg.Go(func() { _ = sink.Run(ctx) })
	}
	a.mu.Lock()
	a.sinks = next
	a.mu.Unlock()
}

// config returns the configuration of the Sink.
func (o written) config(logger *slog.Logger) filesink.Config {
	c := filesink.Config{Source: o.from, Dir: o.folder, Mode: o.mode, KeyMode: o.keyMode, Logger: logger}
	if !o.split {
		name := func(td spiffe.TrustDomain) string { return td.String() + ".spiffe-trust-bundle.pem" }
		c.CertName, c.KeyName = "credential-bundle.pem", "credential-bundle.pem"
		c.RootsName, c.FederatedName = name(o.id.TrustDomain()), name
	}
	return c
}

// makeFolder makes a folder that is not there, for the group if one was given, which its files then have.
func (o output) makeFolder() error {
	if _, err := os.Lstat(o.folder); o.gid == 0 || !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	root, err := private.MakeDir(o.folder, private.Options{Mode: 0o750})
	if err != nil {
		return err
	}
	defer root.Close()
	return errors.Join(root.Chown(".", -1, int(o.gid)), root.Chmod(".", fs.ModeSetgid|0o750))
}

// granted returns the identities of the caller of a request.
func (a *Agent) granted(ctx context.Context) (*state, []grant) {
	s := a.current.Load()
	peer, ok := unixsocket.PeerFromContext(ctx)
	if !ok {
		return s, nil
	}
	return s, s.granted(peer, sync.OnceValues(func() (unixsocket.Process, bool) {
		p, err := unixsocket.ProcessFromContext(ctx)
		if err != nil {
			a.unproven.Warn("workloadagent: a process gets nothing by its executable, unit or pod", "it cannot be told for certain",
				slog.Uint64("uid", uint64(peer.UID)), slog.Any("err", err))
		}
		return p, err == nil
	}))
}

// identities is the hook of the Workload API.
func (a *Agent) identities(ctx context.Context) (all []workloadserver.Identity, err error) {
	s, grants := a.granted(ctx)
	ready := slices.ContainsFunc(grants, func(g grant) bool { return s.identities[g.id].held.Load().snap != nil })
	for _, g := range grants {
		one := workloadserver.Identity{Provider: s.identities[g.id], Hint: g.hint}
		if ready {
			one.Provider = optional{s.identities[g.id]}
		}
		all = append(all, one)
	}
	return all, nil
}

func (a *Agent) issueJWTSVID(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
	_, grants := a.granted(ctx)
	if at := slices.IndexFunc(grants, func(g grant) bool { return g.id == id }); at < 0 || !grants[at].permits(audience) {
		return "", fmt.Errorf("%w: the file permits %s no token for %q", workloadserver.ErrDenied, id, audience)
	}
	return a.cfg.IssueJWTSVID(ctx, id, audience)
}

// resolve is the hook of SDS.
func (a *Agent) resolve(ctx context.Context, name string) (string, error) {
	_, grants := a.granted(ctx)
	if len(grants) == 0 {
		return "", errors.New("the file has no identity for this process")
	}
	if name == "default" {
		return grants[0].id.String(), nil
	}
	for _, g := range grants {
		if name == g.id.String() || name == g.hint {
			return g.id.String(), nil
		}
	}
	if id, err := spiffe.ParseID(name); name == "ROOTCA" || name == "ALL" || err == nil && id.Path() == "" {
		return name, nil
	}
	return "", errors.New("it is no identity of this process")
}

// provider has the bundles for the Workload API; the identities are those of the hook.
type provider struct{ *Agent }

func (p provider) Changed() <-chan struct{} { return p.news.Changed() }

func (p provider) Snapshot() (*spiffe.Snapshot, error) {
	if snap := p.Agent.bundles.Load(); snap != nil {
		return snap, nil
	}
	return nil, spiffe.ErrNotReady
}

// CRLs hands on those of a Source that is an agent.
func (p provider) CRLs() [][]byte {
	if src, ok := p.cfg.Source.(interface{ CRLs() [][]byte }); ok {
		return src.CRLs()
	}
	return nil
}

// Ready waits until the Agent has trust bundles and one of the identities of the file, if there are any. The error wraps
// [spiffe.ErrNotReady] and the cause of ctx.
func (a *Agent) Ready(ctx context.Context) error {
	err := a.life.Await(ctx, a.news.Changed, func() bool { return a.notReady() == nil })
	if err != nil {
		return fmt.Errorf("workloadagent: %w", errors.Join(spiffe.ErrNotReady, err, a.notReady()))
	}
	return nil
}

func (a *Agent) notReady() error {
	switch {
	case len(a.current.Load().ids) > 0 && a.bundles.Load() == nil:
		return fmt.Errorf("none of the identities of %s has come yet: %w", a.cfg.File, spiffe.ErrNotReady)
	case a.cfg.Source.Bundles() == nil:
		return fmt.Errorf("the trust bundles have not come yet: %w", spiffe.ErrNotReady)
	}
	return nil
}

// Report implements [report.Reporter] with the file as an upstream, and the files that are written. It is not ready as long as
// [Agent.Ready] would wait. The identities are in the report of the Source. The metrics are:
//
//	svidkit_workloadagent_workloads      in the file that is in force
//	svidkit_workloadagent_identities     in that file, by state: served, or missing
//	svidkit_workloadagent_file_refused   1 while the newest version of the file is refused, else 0
func (a *Agent) Report() report.Report {
	s := a.current.Load()
	var missing []string
	for id, one := range s.identities {
		if one.held.Load().snap == nil {
			missing = append(missing, id.String())
		}
	}
	slices.Sort(missing)
	checked, refused := a.file.Status()
	r := report.Report{NotReady: a.notReady(), Upstreams: []report.Upstream{{Name: a.cfg.File, OK: refused == nil, LastSuccess: checked, Err: refused}}}
	if len(missing) > 0 {
		r.Problems = append(r.Problems, fmt.Errorf("%d identities have not come yet: %s", len(missing), strings.Join(missing[:min(len(missing), 10)], ", ")))
	}
	a.mu.Lock()
	sinks := maps.Clone(a.sinks)
	a.mu.Unlock()
	for _, sink := range sinks {
		r.Upstreams = append(r.Upstreams, sink.Report().Upstreams...)
	}
	slices.SortFunc(r.Upstreams[1:], func(a, b report.Upstream) int { return strings.Compare(a.Name, b.Name) })
	r.Metrics = func(w io.Writer) error {
		set := new(metrics.Set)
		set.Gauges("svidkit_workloadagent_workloads", "The number of workloads in the file.", func(add metrics.Add) { add(float64(len(s.workloads))) })
		set.Gauges("svidkit_workloadagent_identities", "The number of identities in the file, by whether there is something to serve.", func(add metrics.Add) {
			add(float64(len(s.ids)-len(missing)), "state", "served")
			add(float64(len(missing)), "state", "missing")
		})
		set.Gauges("svidkit_workloadagent_file_refused", "Whether the newest version of the file is refused: 1, or 0.", func(add metrics.Add) {
			add(metrics.Bool(refused != nil))
		})
		return set.Write(w)
	}
	return r
}

// Parts returns the servers by their names, for packages health and statuspage.
func (a *Agent) Parts() map[string]report.Reporter {
	return map[string]report.Reporter{"workload-api": a.workload, "sds": a.secrets}
}

// Close ends [Agent.Run] and all streams for good, and waits for what Run has started. Files stay. The error is always nil.
func (a *Agent) Close() error {
	err := a.life.Close()
	return errors.Join(err, a.workload.Close(), a.secrets.Close())
}
