// Package workloadagent is an agent for the users of a machine: one file says which process may have which SPIFFE
// IDs, and the agent serves them by the SPIFFE Workload API and, for Envoy, by SDS, and writes them to files.
//
//	manager, err := secretcache.New(secretcache.Config{TrustDomain: td, CA: ca}) // any of package caclient
//	if err != nil { … }
//	agent, err := workloadagent.New(workloadagent.Config{
//		File: "/etc/identity/workloads.json", Source: manager, TrustDomain: td,
//	})
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
//	        {"id": "spiffe://example.org/web", "audiences": ["db"], "files": [{"folder": "/run/web"}]}
//	      ]
//	    }
//	  ]
//	}
//
// A match can have the user and group of the process, the path of its executable, its unit of systemd and the UID of
// its pod, or the pod's namespace, service account and labels. A process has to meet all of them; see
// [unixsocket.Peer] and [unixsocket.Process] for what the kernel vouches for; the API server says the rest of the
// pod that has the UID. An executable needs another selector beside it, as any user can run the program with code of
// his own, and an account and labels need a namespace. The process has the identities of all workloads that it
// meets, in the order of the file, the default one first. A process that meets none has nothing, nor does one of
// which the kernel says nothing for certain.
//
// An identity has a hint, which the Workload API hands on, the audiences for which its workload may have JWT-SVIDs
// ("*" for any, none without), and directories to which it is written, whether a process runs or not.
//
// # By SDS
//
// An Envoy has the secrets default (its first identity), the IDs and the hints of its identities, and the roots:
// ROOTCA, ALL and the IDs of trust domains. A process without an identity has no roots, either.
//
// # In files
//
// The layout "delivery" is that of the draft SPIFFE Filesystem Delivery (spiffe/spiffe#376), which
// filesource.Config.Folder reads: credential-bundle.private-key.x509.pem with the key, in PKCS#8, and the chain; and
// TRUST-DOMAIN.spiffe-trust-bundle.x509.pem for each trust domain. "split" is that of package filesink. Both can
// have JWT-SVIDs as well, each for one audience in a file of its own ("tokens"), for programs that read a token from
// a file. Package filesink says how files are replaced, who must own the directory, and which modes there are. Files
// of an identity that the file no longer has stay, without renewals.
//
// # When the file changes
//
// It is followed. A new version takes effect at once, on open streams too: an identity that is in both versions
// keeps its certificate, one that is gone is forgotten with its key, and a caller that loses its last one is told so
// (PermissionDenied). SDS can take no secret away, except one that Envoy has asked for on demand; see package sds. A
// version that is not good is refused as a whole, with the line and the remedy in the log and in [Agent.Report], and
// the one before stays in force. The file and the directories above it must belong to this user or to root, and not be
// writable for others.
//
// # What it promises
//
// No failure takes a certificate away: packages secretcache and workloadserver say how. While an identity has not
// come yet, a caller has its others, and waits if there are none: so one that the CA refuses does not keep the
// others from being renewed at the caller.
package workloadagent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// Config configures an [Agent]. File and Source are required. [New] copies it.
type Config struct {
	// File is the path of the file that says who gets what.
	File string

	// Source has the identities: a *secretcache.Manager with a TrustDomain, or a *workloadapi.Source with the
	// secrets of its sdssource.FromIdentity, which has the identities that another agent, such as SPIRE's, gives
	// this program. The caller runs and closes it. If it has the methods Add(spiffe.ID) error and Remove(spiffe.ID),
	// as a Manager has, they are called with the identities that come and go. Revocation lists of another agent are
	// not handed on.
	Source interface {
		sds.Source
		Bundles() *spiffe.BundleSet
		Changed() <-chan struct{}
	}

	// TrustDomain is the one that all identities of the file must be in. Zero permits any, for a Source that is an
	// agent of several.
	TrustDomain spiffe.TrustDomain

	// IssueJWTSVID and ValidateJWTSVID are as in [workloadserver.Options]. The former is asked only for an identity
	// of the caller and audiences that the file permits for it. Nil means that there are no tokens.
	IssueJWTSVID    func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)
	ValidateJWTSVID func(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)

	// Node is the name of the Kubernetes node that this program runs on, in a pod. The API server then tells the
	// namespaces, the service accounts and the labels of its pods, for which the account of this program needs the
	// rights to list and watch pods. Empty means that the file can have none of them.
	Node string

	// Logger gets each version of the file (Info, and Warn if it is refused), and the logs of the servers and the
	// files. Nil means no logs.
	Logger *slog.Logger
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// Agent serves the identities of a Source by the rules of a file. [New] makes one. Its methods are safe for
// concurrent use.
type Agent struct {
	redacted
	cfg      Config
	log      *slog.Logger
	unproven *ratelog.Log
	owner    owner // the Source, or nil
	file     *follow.Follower
	workload *workloadserver.Handler
	secrets  *sds.Handler
	mux      *http.ServeMux
	metrics  metrics.Set
	pods     *pods // nil without a node

	life    lifecycle.Life
	wake    renew.Signal // for work: something has changed
	current atomic.Pointer[rules]
	bundles identity // any, which has the bundles for the Workload API
}

// owner is a Source whose identities come and go as others say.
type owner interface {
	Add(id spiffe.ID) error
	Remove(id spiffe.ID)
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

// New reads the file and returns an Agent. The error says what is wrong with the file or with cfg. The caller calls
// [Agent.Run] or [Agent.Close].
func New(cfg Config) (*Agent, error) { return newAgent(cfg, kube.Options{}) }

func newAgent(cfg Config, apiServer kube.Options) (*Agent, error) {
	if cfg.File == "" || cfg.Source == nil {
		return nil, errors.New("workloadagent: new: Config needs a File and a Source")
	}
	a := &Agent{
		redacted: redact.New("workloadagent.Agent(" + cfg.File + ")"), cfg: cfg,
		log: ratelog.Patient(cfg.Logger), unproven: ratelog.New(cfg.Logger, 0), mux: http.NewServeMux(),
	}
	a.owner, _ = cfg.Source.(owner)
	a.current.Store(new(rules))
	a.bundles.held.Store(&held{err: spiffe.ErrNotReady})
	a.metrics.Gauges("svidkit_workloadagent_file_refused",
		"Whether the newest version of the file is refused: 1, or 0.", func(add metrics.Add) {
			_, refused := a.file.Status()
			add(metrics.Bool(refused != nil))
		})
	if cfg.Node != "" {
		api, err := kube.New(apiServer)
		if err != nil {
			return nil, fmt.Errorf("workloadagent: new: node %s: %w", cfg.Node, err)
		}
		a.pods = followPods(api, &cfg)
	}
	a.file = follow.New([]string{cfg.File}, a.take,
		&follow.Options{Logger: cfg.Logger, Open: func(path string) (*os.File, error) {
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
	if a.workload, err = workloadserver.NewHandler(&a.bundles, o); err == nil {
		a.secrets, err = sds.NewHandler(cfg.Source, &sds.Options{Resolve: a.resolve, Logger: cfg.Logger})
	}
	if err != nil {
		return nil, fmt.Errorf("workloadagent: new: %w", err)
	}
	a.mux.Handle("/SpiffeWorkloadAPI/", a.workload)
	a.mux.Handle("/", a.secrets)
	return a, nil
}

// ServeHTTP serves the Workload API and SDS, whose paths differ. The server must know its callers: a
// [unixsocket.Server], or one with [unixsocket.ConnContext].
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.mux.ServeHTTP(w, r) }

// take takes a version of the file.
func (a *Agent) take(_ context.Context, files follow.Files) error {
	file, there := files[a.cfg.File]
	if !there {
		return fmt.Errorf("%s: %w", a.cfg.File, fs.ErrNotExist)
	}
	next, err := parse(file.Data, a.cfg.TrustDomain, a.cfg.Node != "")
	if err != nil {
		return fmt.Errorf("%s: %w", a.cfg.File, err)
	}
	old := a.current.Load()
	for id := range next.identities {
		if had := old.identities[id]; had != nil {
			next.identities[id] = had
			continue
		}
		next.identities[id] = new(identity)
		next.identities[id].held.Store(&held{err: fmt.Errorf("%s has not come yet: %w", id, spiffe.ErrNotReady)})
		if a.owner != nil {
			err = cmp.Or(err, a.owner.Add(id))
		}
	}
	for o := range next.outputs {
		var failed error
		if o.tokens != "" && a.cfg.IssueJWTSVID == nil {
			failed = fmt.Errorf("the folder %q is to have tokens, and the CA of this agent issues none: take "+
				"them out", o.folder)
		} else if next.outputs[o] = old.outputs[o]; next.outputs[o] == nil {
			next.outputs[o], failed = filesink.New(o.config(next.identities[o.id], &a.cfg))
		}
		err = cmp.Or(err, failed)
	}
	if err != nil {
		a.leave(next, old)
		return fmt.Errorf("%s: %w", a.cfg.File, err)
	}
	a.current.Store(next)
	if a.secrets != nil { // else it is the first
		a.workload.Refresh()
		a.secrets.Refresh()
	}
	a.leave(old, next)
	a.log.Info("workloadagent: the file is in force", slog.String("file", a.cfg.File),
		slog.Int("workloads", len(next.workloads)), slog.Int("identities", len(next.identities)))
	a.wake.Notify()
	return nil
}

// leave has the Source forget the identities of some rules that other ones do not have.
func (a *Agent) leave(r, other *rules) {
	for id := range r.identities {
		if a.owner != nil && other.identities[id] == nil {
			a.owner.Remove(id)
		}
	}
}

// Run keeps the files and what is served current. It blocks until ctx is done or [Agent.Close] is called, and
// returns nil. It is an error to call it while it runs, or after Close.
func (a *Agent) Run(ctx context.Context) error {
	return a.life.RunAs(ctx, "workloadagent", a.work)
}

func (a *Agent) work(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	// first: a zero Agent panics here, where its caller can recover
	defer a.cfg.Source.Subscribe(func(string) { a.wake.Notify() })()
	wg.Go(func() { _ = a.file.Run(ctx) })
	var news <-chan struct{} // of pods
	if a.pods != nil {
		wg.Go(func() { a.pods.Run(ctx) })
		news = a.pods.Keeper.News.Changed()
	}
	writing := map[output]*filesink.Sink{}
	var bundles *spiffe.BundleSet
	for ctx.Err() == nil {
		woken, changed := a.wake.Changed(), a.cfg.Source.Changed() // before looking, so that no change is missed
		r, had := a.current.Load(), bundles
		bundles = a.cfg.Source.Bundles()
		next := a.lookAll(r)
		if a.bundles.held.Swap(next).snap != next.snap || bundles != had {
			a.bundles.news.Notify()
		}
		change(writing, r.outputs, func(sink *filesink.Sink) {
			wg.Go(func() { _ = sink.Run(ctx) })
		})
		select {
		case <-woken:
		case <-changed:
		case <-news: // a pod that was unknown, or has other labels, may have other identities
			news = a.pods.Keeper.News.Changed()
			a.workload.Refresh()
			a.secrets.Refresh()
		case <-ctx.Done():
		}
	}
	return nil
}

// change makes the outputs that are being written those of next: it closes those that are gone, and starts new ones.
func change(writing, next map[output]*filesink.Sink, start func(*filesink.Sink)) {
	for o, sink := range writing {
		if next[o] != sink {
			_ = sink.Close() // before another one begins in its directory
			delete(writing, o)
		}
	}
	for o, sink := range next {
		if writing[o] == nil {
			writing[o] = sink
			start(sink)
		}
	}
}

// lookAll publishes what the Source has of all identities, and returns what is held of the first by ID: always of the
// same one, as the server shares its answers.
func (a *Agent) lookAll(r *rules) *held {
	first, next := spiffe.ID{}, &held{err: spiffe.ErrNotReady}
	for id, one := range r.identities {
		a.look(id, one)
		if h := one.held.Load(); h.snap != nil && (next.snap == nil || id.String() < first.String()) {
			first, next = id, h
		}
	}
	return next
}

// look publishes what the Source has of an identity.
func (a *Agent) look(id spiffe.ID, one *identity) {
	at, cancel := context.WithCancel(context.Background())
	cancel() // what is not there is not waited for
	secret, err := a.cfg.Source.GenerateSecret(at, id.String())
	bundles := a.cfg.Source.Bundles() // after the certificate, which may need newer ones
	had := one.held.Load()
	next := &held{secret: had.secret}
	switch {
	case errors.Is(err, fs.ErrNotExist): // withdrawn, or not for this agent
		if had.snap == nil && errors.Is(had.err, workloadserver.ErrDenied) {
			return
		}
		next = &held{err: fmt.Errorf("%w: %w", workloadserver.ErrDenied, err)}
	case err == nil && secret != had.secret && bundles != nil:
		certs, key, _ := secret.KeyPair()
		svid, err := spiffe.ParseSVIDPEM(certs, key)
		if err != nil {
			return
		}
		next = &held{secret: secret, snap: spiffe.NewSnapshot(svid, bundles)}
	case had.snap != nil && had.snap.Bundles() != bundles && bundles != nil:
		svid, _ := had.snap.SVID() // which stays, even if it has expired
		next.snap = spiffe.NewSnapshot(svid, bundles)
	default:
		return
	}
	one.held.Store(next)
	one.news.Notify()
	if had.snap == nil || next.snap == nil {
		a.workload.Refresh() // it is among those of its callers now, or no more
	}
}

// config returns the configuration of the Sink.
func (o output) config(from *identity, cfg *Config) filesink.Config {
	c := filesink.Config{Source: from, Dir: o.folder, Delivery: !o.split, Mode: o.mode, KeyMode: o.keyMode,
		Logger: cfg.Logger}
	if o.tokens != "" {
		_ = json.Unmarshal([]byte(o.tokens), &c.Tokens) // made by us
		c.TokenSource = tokenSource{o.id, cfg.IssueJWTSVID}
	}
	return c
}

// tokenSource has the JWT-SVIDs of an identity.
type tokenSource struct {
	id    spiffe.ID
	issue func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)
}

func (s tokenSource) Fetch(ctx context.Context, audience ...string) (string, error) {
	return s.issue(ctx, s.id, audience)
}

// granted returns the identities of the caller of a request.
func (a *Agent) granted(ctx context.Context) (*rules, []grant) {
	r := a.current.Load()
	peer, ok := unixsocket.PeerFromContext(ctx)
	if !ok {
		return r, nil
	}
	certain := func(err error) bool {
		if err != nil {
			a.unproven.LogOf(slog.LevelWarn, peerkey.UserFromContext(ctx),
				"workloadagent: a process gets nothing by its executable, unit, pod or namespace",
				"it cannot be told for certain", slog.Uint64("uid", uint64(peer.UID)), slog.Any("err", err))
		}
		return err == nil
	}
	process := sync.OnceValues(func() (unixsocket.Process, bool) {
		p, err := unixsocket.ProcessFromContext(ctx)
		return p, certain(err)
	})
	return r, r.granted(caller{peer, process, sync.OnceValues(func() (of pod, ok bool) {
		p, ok := process()
		if !ok || p.Pod == "" {
			return of, false
		}
		of, err := a.podOf(ctx, p.Pod)
		return of, certain(err)
	})})
}

// identities is the hook of the Workload API.
func (a *Agent) identities(ctx context.Context) (all []workloadserver.Identity, err error) {
	r, grants := a.granted(ctx)
	missing := func(g grant) bool { return r.identities[g.id].held.Load().snap == nil }
	if have := slices.DeleteFunc(slices.Clone(grants), missing); len(have) > 0 {
		grants = have
	}
	for _, g := range grants {
		all = append(all, workloadserver.Identity{Provider: r.identities[g.id], Hint: g.hint})
	}
	return all, nil
}

func (a *Agent) issueJWTSVID(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
	_, grants := a.granted(ctx)
	if at := slices.IndexFunc(grants, func(g grant) bool { return g.id == id }); at < 0 ||
		!grants[at].permits(audience) {
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
	for _, g := range grants {
		if name == "default" || name == g.id.String() || name == g.hint {
			return g.id.String(), nil
		}
	}
	if id, err := spiffe.ParseID(name); name == "ROOTCA" || name == "ALL" || err == nil && id.Path() == "" {
		return name, nil
	}
	return "", errors.New("it is no identity of this process")
}

// Ready waits until the Agent has trust bundles and one of the identities of the file, if there are any. The error
// wraps [spiffe.ErrNotReady] and the cause of ctx.
func (a *Agent) Ready(ctx context.Context) error {
	err := a.life.Await(ctx, a.bundles.Changed, func() bool { return a.notReady() == nil })
	if err != nil {
		return fmt.Errorf("workloadagent: %w", errors.Join(err, a.notReady()))
	}
	return nil
}

func (a *Agent) notReady() error {
	if len(a.current.Load().identities) > 0 && a.bundles.held.Load().snap == nil || a.cfg.Source.Bundles() == nil {
		return fmt.Errorf("the trust bundles and the first identity of %s have not come yet: %w", a.cfg.File,
			spiffe.ErrNotReady)
	}
	return nil
}

// Report implements [report.Reporter] with the file as an upstream, the files that are written, and the servers. It
// is not ready as long as [Agent.Ready] would wait. The identities are in the report of the Source. The metrics are
// those of packages workloadserver and sds, and:
//
//	svidkit_workloadagent_file_refused   1 while the newest version of the file is refused, else 0
func (a *Agent) Report() report.Report {
	checked, refused := a.file.Status()
	current, workload, secrets := a.current.Load(), a.workload.Report(), a.secrets.Report()
	r := secrets
	r.NotReady, r.Servers = a.notReady(), append(r.Servers, workload.Servers...)
	r.Upstreams = []report.Upstream{{Name: a.cfg.File, OK: refused == nil, LastSuccess: checked, Err: refused}}
	for _, one := range current.identities {
		if _, err := one.Snapshot(); err != nil {
			r.Problems = append(r.Problems, err)
		}
	}
	if a.pods != nil && a.pods.All() == nil {
		r.Problems = append(r.Problems,
			fmt.Errorf("the API server has not told of the pods of node %s yet: no pod gets anything by its "+
				"namespace", a.cfg.Node))
	}
	slices.SortFunc(r.Problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	r.Problems = r.Problems[:min(len(r.Problems), 10)]
	for _, sink := range current.outputs {
		r.Upstreams = append(r.Upstreams, sink.Report().Upstreams...)
	}
	slices.SortFunc(r.Upstreams[1:], func(a, b report.Upstream) int { return strings.Compare(a.Name, b.Name) })
	r.Metrics = func(w io.Writer) error { return cmp.Or(workload.Metrics(w), secrets.Metrics(w), a.metrics.Write(w)) }
	return r
}

// Close ends [Agent.Run] and all streams for good, and waits for what Run has started. Files stay. The error is
// always nil.
func (a *Agent) Close() error {
	return errors.Join(a.life.Close(), a.workload.Close(), a.secrets.Close())
}
