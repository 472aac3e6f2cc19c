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
// The program examples/workload-agent uses this package; its README describes the whole file format.
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
// its pod, or the pod's namespace, service account and labels. A process must meet all of them. The kernel vouches for
// the facts in [unixsocket.Peer] and [unixsocket.Process]; the API server adds the rest for the pod with that UID. An
// executable needs another selector beside it, because any user can load other code into the program; an account and
// labels need a namespace. A process has the identities of all workloads that it meets, in the order of the file, the
// default one first. It has none if it meets no workload, or if the kernel does not know it for certain.
//
// An identity has a hint, which the Workload API passes on; the audiences for which its workload may have JWT-SVIDs
// ("*" means any; the default is none); and directories to which the agent writes it, even if no process runs.
//
// # By SDS
//
// An Envoy gets the secret default (its first identity), secrets by the IDs and hints of its identities, and the
// roots: ROOTCA, ALL and the IDs of trust domains. A process without an identity gets no roots.
//
// # In files
//
// The layout "delivery" follows the draft SPIFFE Filesystem Delivery (spiffe/spiffe#376), which
// filesource.Config.Folder reads: credential-bundle.private-key.x509.pem with the key, in PKCS#8, and the chain; and
// TRUST-DOMAIN.spiffe-trust-bundle.x509.pem for each trust domain. "split" has the default names of package filesink.
// Both can also have JWT-SVIDs, each for one audience in its own file ("tokens"). Package filesink says how files are
// replaced, who must own the directory, and which modes are possible. When an identity is removed from the
// configuration, its files stay but are not renewed.
//
// # When the file changes
//
// The agent watches the file. A new version takes effect at once, on open streams too. An identity in both versions
// keeps its certificate, a removed identity is dropped with its key, and a caller that loses its last identity gets
// PermissionDenied. SDS cannot withdraw a secret, except one that Envoy requested on demand; see package sds. If any
// part of a version is bad, the agent refuses the version and the previous one stays in force; the log and
// [Agent.Report] have the line and the remedy. The file and the directories above it must belong to this user or to
// root, and other users must not be able to write to them.
//
// # What it promises
//
// No failure takes a certificate away: packages secretcache and workloadserver say how. While one identity is missing,
// a caller gets its others, and waits if there are none. So an identity that the CA refuses does not delay the renewal
// of the others.
package workloadagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
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
	// File is the path of the file that maps processes to identities.
	File string

	// Source supplies the identities: a *secretcache.Manager with a TrustDomain, or a *workloadapi.Source with the
	// secrets of its sdssource.FromIdentity, which has the identities that another agent, such as SPIRE's, gives this
	// program. The caller runs and closes it. If it has the methods Add(spiffe.ID) error and Remove(spiffe.ID), as a
	// Manager does, the Agent calls them when identities are added to or removed from the file. It does not pass on
	// revocation lists of another agent.
	Source interface {
		sds.Source
		Bundles() *spiffe.BundleSet
		Changed() <-chan struct{}
	}

	// TrustDomain is the trust domain of all identities in the file. Zero permits any, for a Source with several.
	TrustDomain spiffe.TrustDomain

	// IssueJWTSVID and ValidateJWTSVID are as in [workloadserver.Options]. IssueJWTSVID is called only for an identity
	// of the caller, with audiences that the file permits for it. Nil means that there are no tokens.
	IssueJWTSVID    func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)
	ValidateJWTSVID func(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)

	// Broker is the agent's own ID, if it serves the SPIFFE Broker API: see [Agent.Broker]. The Source must have its
	// identity. The API is Incubating: if it changes, so will this field and the members of the file for brokers.
	Broker spiffe.ID

	// Node is the name of the Kubernetes node that this program runs on, in a pod. The agent then gets the namespaces,
	// service accounts and labels of its pods from the API server; its service account needs the rights to list and
	// watch pods, and also service accounts with Broker. If Node is empty, the file cannot use these selectors.
	Node string

	// Logger gets each version of the file (Info, and Warn if it is refused), and the logs of the servers and the
	// files. Nil means no logs.
	Logger *slog.Logger

	apiServer kube.Options // for tests; the zero value is the pod's
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
	objects  map[string]*kubefollow.Objects[pod] // by kind of reference; empty without a node
	keeper   kubefollow.Keeper                   // of all of them

	life    lifecycle.Life
	wake    renew.Signal // for work: something changed
	current atomic.Pointer[rules]
	bundles identity // any identity; supplies the bundles for the Workload API
}

// owner is a Source to which identities are added, and from which they are removed.
type owner interface {
	Add(id spiffe.ID) error
	Remove(id spiffe.ID)
}

// identity is a source of one identity: the Provider of a server, and the Source of a Sink.
type identity struct {
	held atomic.Pointer[held]
	news renew.Signal
}

// held is the current state of an identity.
type held struct {
	secret *pki.Secret // the secret it was made from
	snap   *spiffe.Snapshot
	err    error // why there is no identity
}

func (i *identity) Changed() <-chan struct{} { return i.news.Changed() }

func (i *identity) Snapshot() (*spiffe.Snapshot, error) {
	h := i.held.Load()
	return h.snap, h.err
}

// New reads the file and returns an Agent. The error says what is wrong with the file or with cfg. The caller must
// call [Agent.Run] or [Agent.Close].
func New(cfg Config) (*Agent, error) {
	if cfg.File == "" || cfg.Source == nil {
		return nil, errors.New("workloadagent: new: Config needs a File and a Source")
	}
	a := &Agent{
		redacted: redact.New("workloadagent.Agent(" + cfg.File + ")"), cfg: cfg,
		log: ratelog.Patient(cfg.Logger), unproven: ratelog.New(cfg.Logger, 0), mux: http.NewServeMux(),
		objects: map[string]*kubefollow.Objects[pod]{},
		keeper: kubefollow.Keeper{
			Name: "workloadagent", Log: ratelog.New(cfg.Logger, 0), Fails: "new pods get nothing by their namespaces",
			Remedy: "bind a ClusterRole that may list and watch pods (and serviceaccounts, with brokers) to the " +
				"service account of this program",
		},
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
		api, err := kube.New(cfg.apiServer)
		if err != nil {
			return nil, fmt.Errorf("workloadagent: new: node %s: %w", cfg.Node, err)
		}
		a.follow(api, "pods", "Pod", url.Values{"fieldSelector": {"spec.nodeName=" + cfg.Node}})
		if !cfg.Broker.IsZero() {
			a.follow(api, "serviceaccounts", "ServiceAccount", nil)
		}
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

// take adopts a version of the file.
func (a *Agent) take(_ context.Context, files follow.Files) error {
	file, there := files[a.cfg.File]
	if !there {
		return fmt.Errorf("%s: %w", a.cfg.File, fs.ErrNotExist)
	}
	next, err := parse(file.Data, &a.cfg)
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
	for _, o := range next.outputs {
		same := func(had *output) bool { return had.id == o.id && reflect.DeepEqual(had.config, o.config) }
		if at := slices.IndexFunc(old.outputs, same); at >= 0 {
			o.sink = old.outputs[at].sink
		} else {
			err = cmp.Or(err, a.newSink(o, next.identities[o.id]))
		}
	}
	if err != nil {
		a.leave(next, old)
		return fmt.Errorf("%s: %w", a.cfg.File, err)
	}
	a.current.Store(next)
	if a.secrets != nil { // otherwise it is the first version
		a.workload.Refresh()
		a.secrets.Refresh()
	}
	a.leave(old, next)
	a.log.Info("workloadagent: the file is in force", slog.String("file", a.cfg.File),
		slog.Int("workloads", len(next.workloads)), slog.Int("identities", len(next.identities)))
	a.wake.Notify()
	return nil
}

// leave removes from the Source the identities that are in r but not in other.
func (a *Agent) leave(r, other *rules) {
	for id := range r.identities {
		if a.owner != nil && other.identities[id] == nil {
			a.owner.Remove(id)
		}
	}
}

// Run keeps the written files and the served identities current. It blocks until ctx is done or [Agent.Close] is
// called, and returns nil. It is an error to call it while it runs, or after Close.
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
	for _, o := range a.objects {
		wg.Go(func() { o.Run(ctx) })
	}
	news := a.keeper.News.Changed()
	writing := map[*filesink.Sink]bool{}
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
		case <-news: // a pod that is new, or has new labels, may have other identities, or an object has gone
			news = a.keeper.News.Changed()
			a.workload.Refresh()
			a.secrets.Refresh()
		case <-ctx.Done():
		}
	}
	return nil
}

// change replaces the running outputs by next: it closes outputs that are gone, and starts new ones.
func change(writing map[*filesink.Sink]bool, next []*output, start func(*filesink.Sink)) {
	for sink := range writing {
		if !slices.ContainsFunc(next, func(o *output) bool { return o.sink == sink }) {
			_ = sink.Close() // before another Sink starts in its directory
			delete(writing, sink)
		}
	}
	for _, o := range next {
		if !writing[o.sink] {
			writing[o.sink] = true
			start(o.sink)
		}
	}
}

// lookAll publishes the state of all identities, and returns the first one by ID. It is always the same one, because
// the server shares its responses.
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

// look publishes the Source's state of an identity.
func (a *Agent) look(id spiffe.ID, one *identity) {
	at, cancel := context.WithCancel(context.Background())
	cancel() // do not wait for a missing secret
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
		svid, err := parseSVID(secret)
		if err != nil {
			return
		}
		next = &held{secret: secret, snap: spiffe.NewSnapshot(svid, bundles)}
	case had.snap != nil && had.snap.Bundles() != bundles && bundles != nil:
		svid, _ := had.snap.SVID() // it stays, even if it has expired
		next.snap = spiffe.NewSnapshot(svid, bundles)
	default:
		return
	}
	one.held.Store(next)
	one.news.Notify()
	if had.snap == nil || next.snap == nil {
		a.workload.Refresh() // its callers gain or lose this identity
	}
}

// parseSVID returns the SVID of a secret, with its alternative.
func parseSVID(secret *pki.Secret) (*spiffe.SVID, error) {
	certs, key, _ := secret.KeyPair()
	svid, err := spiffe.ParseSVIDPEM(certs, key)
	if other := secret.Alternative(); err == nil && other != nil {
		var alternative *spiffe.SVID
		if alternative, err = parseSVID(other); err == nil {
			return svid.WithAlternative(alternative)
		}
	}
	return svid, err
}

// newSink makes the Sink of an output.
func (a *Agent) newSink(o *output, from *identity) (err error) {
	c := o.config
	c.Source, c.Logger = from, a.cfg.Logger
	if c.Tokens != nil {
		if a.cfg.IssueJWTSVID == nil {
			return fmt.Errorf("the directory %q is to have tokens, and the CA of this agent issues none: take "+
				"them out", c.Dir)
		}
		c.TokenSource = tokenSource{o.id, a.cfg.IssueJWTSVID}
	}
	o.sink, err = filesink.New(c)
	return err
}

// tokenSource supplies the JWT-SVIDs of an identity.
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
	if c, ok := ctx.Value(objectKey{}).(caller); ok {
		_, _ = c.pod() // notices that the object has gone
		return r, r.granted(c)
	}
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
		of, err := a.await(ctx, "pods", p.Pod, nil)
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

// Report implements [report.Reporter] with the file as an upstream, the files that are written, and the servers. It is
// not ready as long as [Agent.Ready] would wait. The identities are in the report of the Source. The metrics are the
// metrics of packages workloadserver and sds, and:
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
	for plural, o := range a.objects {
		if _, _, known := o.Find("-", nil); !known {
			r.Problems = append(r.Problems, fmt.Errorf("the API server has not told node %s of the %s yet: none gets "+
				"anything by its namespace", a.cfg.Node, plural))
		}
	}
	slices.SortFunc(r.Problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	r.Problems = r.Problems[:min(len(r.Problems), 10)]
	for _, o := range current.outputs {
		r.Upstreams = append(r.Upstreams, o.sink.Report().Upstreams...)
	}
	slices.SortFunc(r.Upstreams[1:], func(a, b report.Upstream) int { return strings.Compare(a.Name, b.Name) })
	r.Metrics = func(w io.Writer) error { return cmp.Or(workload.Metrics(w), secrets.Metrics(w), a.metrics.Write(w)) }
	return r
}

// Close ends [Agent.Run] and all streams for good, and waits for the goroutines of Run. Files stay. The error is
// always nil.
func (a *Agent) Close() error {
	return errors.Join(a.life.Close(), a.workload.Close(), a.secrets.Close())
}
