// Package istioagent is the identity part of Istio's agent as a library: it obtains the identity of a workload, keeps it
// fresh, serves it to an Envoy by SDS, writes it to files, and forwards the Envoy's other configuration from the control
// plane. The environment variables of Istio's agent configure it.
//
//	cfg, err := istioagent.FromEnvironment(os.Environ())
//	if err != nil { … } // a line for each variable, with the remedy
//	agent, err := istioagent.Start(ctx, cfg)
//	if err != nil { … }
//	defer agent.Close()
//
// The program examples/agent is made of it; its README has the variables.
//
// # Where the identity comes from
//
// [Choose] looks once, at the start, and takes the first of these that exists:
//
//  1. A socket at var/run/secrets/workload-spiffe-uds/socket on which a server answers: Envoy uses that, and this agent
//     serves no secrets. A socket on which no server answers is replaced.
//  2. Files, which are followed and served: those of FILE_MOUNTED_CERTS, those in var/run/secrets/workload-spiffe-credentials,
//     or those in etc/certs.
//  3. The CA, with a token or with the certificate in PROV_CERT. The identity is served.
//
// The choice stays until the program ends. If files are removed later, the agent does not ask the CA: the last good ones
// stay in use. A certificate without its key, or the reverse, counts as files, which the agent waits for. The folders of
// OUTPUT_CERTS and PROV_CERT never count, as they are not what a workload is given.
//
// # What it serves
//
// The workload socket has the Secret Discovery Service with the names default, ROOTCA, ALL, the SPIFFE IDs of the workload
// and of the trust domain, and those of files (file-cert:, file-root:). In a pod it also has the Secrets of the pod's
// namespace, for gateways (kubernetes://NAME, as in package kubesecrets). They are read with the pod's service account, which
// needs the right to list and watch them, once the first of these names is asked for.
//
// The socket XDS in the folder of the proxy's configuration has ADS, which is forwarded to the control plane, and the same
// secrets. If another program serves the workload socket, the control plane answers for secrets on the socket XDS.
// [Agent.Bootstrap] writes a configuration with which an Envoy uses both sockets.
//
// # What it does not do
//
// It does not start Envoy and does not probe the application; examples/agent does, with [Config.Envoy]. It has no DNS proxy,
// which is no part of identity, and no configuration of its own for Envoy but the bootstrap: what it forwards is unchanged, so that one
// control plane speaks. Variables of Istio's agent and fields of PROXY_CONFIG for such things are accepted, and named once
// at the start.
package istioagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// part is the source of the identity: a *secretcache.Manager or a *filesource.Source.
type part interface {
	source.Source
	report.Reporter
	Run(ctx context.Context) error
}

// Agent is Istio's agent for identity. [New] and [Start] make one. It runs once. Its methods are safe for concurrent use.
type Agent struct {
	redacted
	cfg Config

	identity part               // nil with the origin Socket
	files    *sdssource.Files   // nil with the origin Socket
	roots    *filesource.Source // of ROOTCA, if they are not those of the identity; or nil
	rooted   source.Source      // the identity with these, or nil
	secrets  *sds.Handler       // nil with the origin Socket
	xds      *xdsproxy.Handler  // nil without Config.XDS
	gateway  *gateway           // nil outside of pods, and with the origin Socket
	sink     *filesink.Sink     // nil without Config.OutputCerts
	servers  map[string]*unixsocket.Server
	health   *health.Handler

	life lifecycle.Life
	news renew.Signal
	made time.Time

	mu      sync.Mutex // guards the rest
	ran     bool
	ready   time.Time // when it became ready; zero before
	drained time.Time // when draining is over; zero before it begins
	drains  chan struct{}
	refused error // why it is not ready and will not be soon
}

// Start chooses where the identity comes from, makes an Agent, runs it in the background and waits until it is ready. ctx
// bounds the waiting only: the Agent runs until [Agent.Close]. If Start fails, nothing is left running, and the error is that
// of [Choose], [New] or [Agent.Ready].
func Start(ctx context.Context, cfg Config) (*Agent, error) {
	cfg, err := Choose(ctx, cfg)
	if err != nil {
		return nil, err
	}
	a, err := New(cfg)
	if err != nil {
		return nil, err
	}
	a.ran = true
	return lifecycle.Started(ctx, a, &a.life, a.work)
}

// New returns an Agent for a configuration of [Choose]. It checks that the files with the roots of the CA and the control plane
// exist, and does nothing else. The caller calls [Agent.Run] or [Agent.Close].
func New(cfg Config) (_ *Agent, err error) {
	a := &Agent{
		redacted: redact.New("istioagent.Agent(" + cfg.Origin + ": " + cfg.why + ")"),
		cfg:      cfg, servers: make(map[string]*unixsocket.Server), made: time.Now(),
		drains: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			a.closeHandlers()
			err = fmt.Errorf("istioagent: new: %w", err)
		}
	}()
	a.cfg.notes, a.cfg.requests, a.cfg.Logger = slices.Clone(cfg.notes), new(requests), ratelog.Patient(cfg.Logger)
	parts := []health.Part{{Name: "agent", Check: a.check, Source: (*own)(a)}}
	switch cfg.Origin {
	case fromSocket:
		if a.cfg.outputCerts != "" {
			a.cfg.notes = append(a.cfg.notes, "OUTPUT_CERTS has no effect: the identity is served by another program, at "+cfg.Socket)
		}
	case fromFiles, fromCA:
		if err := a.newIdentity(&parts); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("the configuration has the origin %q; it has to be from Choose", cfg.Origin)
	}
	if a.cfg.isFile(meshFile) {
		a.cfg.notes = append(a.cfg.notes, "the file "+a.cfg.path(meshFile)+" is not read: what it says about the proxy belongs into PROXY_CONFIG")
	}
	if a.cfg.isFile(crlFile) {
		a.cfg.notes = append(a.cfg.notes, "the file "+a.cfg.path(crlFile)+" is not used: Envoy goes on accepting the certificates that it revokes, until they expire")
	}
	if a.cfg.Envoy.XDS {
		var secrets http.Handler
		if a.secrets != nil {
			secrets = a.secrets
		}
		if a.xds, err = a.cfg.newXDS(secrets); err != nil {
			return nil, fmt.Errorf("control plane: %w", err)
		}
		a.servers[a.cfg.xdsSocket()] = a.server(a.cfg.xdsSocket(), a.xds)
		parts = append(parts, health.Part{Name: "xds", Source: a.xds})
	}
	a.health, err = health.New(parts...)
	return a, err
}

// newIdentity makes the source of the identity, and the parts that serve and write it.
func (a *Agent) newIdentity(parts *[]health.Part) (err error) {
	var src sds.Source
	var followed *filesource.Source
	if a.cfg.Origin == fromFiles || a.cfg.roots != "" {
		roots := filesource.BundleFile{Path: a.cfg.roots}
		if a.cfg.Origin == fromCA { // and there is no certificate that has it
			roots.TrustDomain = a.cfg.trustDomain
		}
		followed, err = filesource.New(filesource.Config{
			CertFile: a.cfg.cert, KeyFile: a.cfg.key, Bundles: []filesource.BundleFile{roots}, Refuse: a.cfg.own(), Logger: a.cfg.Logger,
		})
		if err != nil {
			return err
		}
	}
	if a.cfg.Origin == fromCA {
		m, err := a.cfg.newManager()
		if err != nil {
			return err
		}
		a.identity, src, a.roots = m, m, followed
		if !a.cfg.pkcs8Key {
			src = traditional{m}
		}
	} else {
		a.identity, src = followed, sdssource.FromIdentity(followed)
	}
	output, roots := source.Source(a.identity), src
	if a.roots != nil {
		*parts = append(*parts, health.Part{Name: "roots", Source: a.roots})
		roots = sdssource.FromBundles(a.roots, a.cfg.trustDomain)
		if output, err = source.NewUnion(a.cfg.trustDomain, rootless{a.identity}, a.roots); err != nil {
			return err
		}
		a.rooted = output
	}
	allow := make([]string, 0, len(a.cfg.AllowFiles)+3)
	for _, name := range slices.Concat(a.cfg.AllowFiles, []string{a.cfg.cert, a.cfg.key, a.cfg.roots}) {
		if name != "" {
			allow = append(allow, a.cfg.path(name))
		}
	}
	a.files, err = sdssource.NewFiles(sdssource.FilesConfig{
		Allow: allow, Refuse: a.cfg.own(), SystemRoots: sdssource.FindSystemRoots(), Logger: a.cfg.Logger,
	})
	if err != nil {
		return err
	}
	routes := map[string]sds.Source{
		"default": src, "ROOTCA": roots, "ALL": src, "spiffe://*": src, "file-cert:*": a.files, "file-root:*": a.files,
	}
	if a.gateway = a.cfg.newGateway(); a.gateway != nil {
		routes["kubernetes://*"] = a.gateway
		*parts = append(*parts, health.Part{Name: "kubernetes", Source: a.gateway})
	}
	mux, err := sdssource.Mux(routes)
	if err != nil {
		return err
	}
	if a.secrets, err = sds.NewHandler(mux, &sds.Options{Logger: a.cfg.Logger}); err != nil {
		return err
	}
	a.servers[a.cfg.Socket] = a.server(a.cfg.Socket, a.secrets)
	*parts = append(*parts,
		health.Part{Name: "identity", Source: a.identity}, health.Part{Name: "files", Source: a.files}, health.Part{Name: "sds", Source: a.secrets})
	if a.cfg.outputCerts == "" {
		return nil
	}
	mode := fs.FileMode(0o600)
	if a.cfg.inPod { // whose containers have users of their own
		mode = 0o644
	}
	a.sink, err = filesink.New(filesink.Config{
		Source: output, Dir: a.cfg.path(a.cfg.outputCerts), Plain: true,
		CertName: certName, KeyName: keyName, RootsName: rootsName, Mode: mode, KeyMode: mode,
		TraditionalKey: a.cfg.Origin == fromCA && !a.cfg.pkcs8Key, AllowWritable: a.cfg.inPod, Logger: a.cfg.Logger,
	})
	*parts = append(*parts, health.Part{Name: "outputs", Source: a.sink})
	return err
}

// rootless is an identity without its roots.
type rootless struct{ source.Source }

// Snapshot implements [source.Source].
func (r rootless) Snapshot() (*spiffe.Snapshot, error) {
	svid, err := r.SVID()
	if err != nil {
		return nil, err
	}
	none, err := spiffe.NewBundleSet()
	return spiffe.NewSnapshot(svid, none), err
}

// server returns a server for a socket.
func (a *Agent) server(path string, h http.Handler) *unixsocket.Server {
	return &unixsocket.Server{Path: path, DirMode: 0o750, SocketMode: 0o600, Handler: h, Logger: a.cfg.Logger}
}

// Run runs the Agent, for programs that do not use [Start]. It blocks until ctx is done, [Agent.Close] is called, or a part
// fails, such as a socket that another program has, or one of another program that nobody has answered at for a minute. When ctx is done or Close is called, the Agent is no longer ready, but
// goes on serving for Config.Drain; then it ends all streams, removes its sockets, and Run returns nil. It is an error to
// call it a second time.
func (a *Agent) Run(ctx context.Context) error {
	a.mu.Lock()
	ran := a.ran
	a.ran = true
	a.mu.Unlock()
	if ran {
		return errors.New("istioagent: run: an Agent runs once; make another one")
	}
	if err := a.life.Run(ctx, a.work); err != nil {
		return fmt.Errorf("istioagent: run: %w", err)
	}
	return a.life.Close() // as it runs once, Ready does not wait for another time
}

// work runs the parts until ctx is done or one of them fails, and drains.
func (a *Agent) work(ctx context.Context) error {
	defer a.closeClients()
	defer a.closeHandlers()
	log := a.cfg.Logger
	log.Info("istioagent: the identity has an origin", slog.String("origin", a.cfg.Origin), slog.String("why", a.cfg.why))
	for _, note := range a.cfg.notes {
		log.Warn("istioagent: " + note)
	}
	for _, note := range a.cfg.unused {
		log.Info("istioagent: " + note)
	}
	if idle := a.cfg.Envoy.idle; !a.cfg.Envoy.Started && len(idle) > 0 {
		log.Info("istioagent: not used, as this program starts no Envoy: " + strings.Join(idle, ", "))
	}
	parts, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	start := func(name string, run func(context.Context) error) {
		wg.Go(func() {
			if err := run(parts); parts.Err() == nil {
				cancel(fmt.Errorf("%s: %w", name, cmp.Or(err, errEnded)))
			}
		})
	}
	if a.cfg.Origin == fromSocket {
		start("socket "+a.cfg.Socket+" of another program", a.watchOther)
	}
	if a.identity != nil {
		start("identity", a.identity.Run)
		start("files", a.files.Run)
	}
	if a.roots != nil {
		start("roots", a.roots.Run)
	}
	if a.gateway != nil {
		start("Secrets of Kubernetes", a.gateway.Run)
	}
	if a.xds != nil && a.cfg.grpcBootstrap != "" {
		if err := a.cfg.writeGRPC(); err != nil {
			return fmt.Errorf("bootstrap for gRPC (GRPC_XDS_BOOTSTRAP): %w", err)
		}
	}
	for path, s := range a.servers {
		if err := s.Listen(); err != nil {
			return fmt.Errorf("socket %s: %w", path, err)
		}
		start("socket "+path, s.Run)
	}
	if a.xds != nil && a.cfg.debugAddress != "" {
		l, err := net.Listen("tcp", a.cfg.debugAddress)
		if err != nil {
			return fmt.Errorf("debug requests (PROXY_XDS_DEBUG_VIA_AGENT_PORT is for another port): %w", err)
		}
		start("debug requests", (&unixsocket.Server{Listener: l, Handler: http.HandlerFunc(a.xds.ServeDebug), Logger: log}).Run)
	}
	if a.sink != nil {
		start("output", a.sink.Run)
	}
	wg.Go(func() { a.await(parts) })

	select {
	case <-parts.Done():
		return context.Cause(parts)
	case <-ctx.Done():
	}
	left := time.Until(a.drain())
	log.Info("istioagent: the agent ends", slog.Duration("drain", max(left, 0)))
	select {
	case <-parts.Done():
	case <-time.After(left):
	}
	a.closeHandlers() // ends the streams, before their sockets go
	return nil
}

// drain makes the agent not ready for good, and returns when an Envoy has had its time for draining.
func (a *Agent) drain() (end time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.drained.IsZero() {
		a.drained = time.Now().Add(a.cfg.drain)
		close(a.drains)
		a.news.Notify()
	}
	return a.drained
}

// Draining returns a channel that is closed when the agent begins to drain: by POST /drain or /quitquitquit, by [Agent.Close], or
// at the end of Run's ctx. A program that runs the Envoy has it drain then, too.
func (a *Agent) Draining() <-chan struct{} { return a.drains }

var errDraining = errors.New("the agent is draining or ending")

// errEnded is the error of a part that has ended without one.
var errEnded = errors.New("it has ended by itself")

// await notes when the agent becomes ready, or that the CA refuses it.
func (a *Agent) await(ctx context.Context) {
	for {
		var err error
		var changed <-chan struct{}
		if a.identity != nil {
			changed = a.identity.Changed()
			err = a.identity.Ready(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil && a.sink != nil {
			_, _ = a.sink.Write() // so that a program that waits for the agent finds the files; it logs, and tries again
		}
		a.mu.Lock()
		if a.refused = err; err == nil {
			a.ready = time.Now()
		}
		a.mu.Unlock()
		a.news.Notify()
		if err == nil {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// Ready waits until the agent serves its sockets, has an identity (unless another program serves that), and has tried to
// write it to Config.OutputCerts. The error wraps [spiffe.ErrNotReady], the cause of ctx, and the reason why there is no identity.
// Ready fails early if the CA refuses for good, if a part has failed, and once the agent drains or ends.
func (a *Agent) Ready(ctx context.Context) error {
	var refused error
	err := a.life.Await(ctx, a.news.Changed, func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		if refused = a.refused; !a.drained.IsZero() {
			refused = errDraining
		}
		return !a.ready.IsZero() || refused != nil
	})
	switch {
	case err == nil && refused == nil:
		return nil
	case err == nil:
		err = refused
	case errors.Is(err, context.Cause(ctx)) && a.identity != nil: // which knows what it waits for
		if why := a.identity.Ready(ctx); why != nil {
			err = why
		}
	}
	if idle := a.life.Idle(); idle != nil && !errors.Is(err, idle) {
		err = fmt.Errorf("%w: %w", idle, err)
	}
	return fmt.Errorf("istioagent: %w: %w", spiffe.ErrNotReady, err)
}

// Close ends [Agent.Run], or what [Start] has started, drains as Run does, and waits for the end. The error is always nil.
func (a *Agent) Close() error {
	err := a.life.Close()
	a.closeHandlers()
	a.closeClients()
	return err
}

// closeClients ends the connections to the CA and the control plane, which have no requests any more.
func (a *Agent) closeClients() {
	for _, client := range a.cfg.clients {
		client.CloseIdleConnections()
	}
}

// closeHandlers ends all streams.
func (a *Agent) closeHandlers() {
	if a.xds != nil {
		_ = a.xds.Close()
	}
	if a.secrets != nil {
		_ = a.secrets.Close()
	}
	if a.rooted != nil {
		_ = a.rooted.Close()
	}
}

// Source returns the source of the identity and the trust bundles, or nil if another program serves them. The Agent runs and
// closes it.
func (a *Agent) Source() source.Source { return a.identity }

// Parts returns the parts of the agent by their names, for a status page: the origin of the identity, with the metrics of all
// parts and those of Istio's agent, then the identity, the files that Envoy asks for by name, the handlers of the sockets, and
// the output.
func (a *Agent) Parts() iter.Seq2[string, report.Reporter] {
	return func(yield func(string, report.Reporter) bool) {
		_ = yield("origin", (*origin)(a)) &&
			(a.identity == nil || yield("identity", a.identity) && yield("files", a.files) && yield("sds", a.secrets)) &&
			(a.xds == nil || yield("xds", a.xds)) &&
			(a.sink == nil || yield("outputs", a.sink))
	}
}

// check is the readiness of the agent itself.
func (a *Agent) check() error {
	a.mu.Lock()
	drains, ready, refused := !a.drained.IsZero(), !a.ready.IsZero(), a.refused
	a.mu.Unlock()
	switch {
	case drains:
		return errDraining
	case !ready:
		return cmp.Or(refused, spiffe.ErrNotReady)
	case a.identity == nil:
		if err := answers(a.cfg.Socket); err != nil {
			return err
		}
	}
	for path := range a.servers { // which another program may have removed
		if err := answers(path); err != nil {
			return err
		}
	}
	return nil
}

// answers returns why clients cannot connect to a socket.
func answers(socket string) error {
	conn, err := net.DialTimeout("unix", socket, answerTime)
	switch {
	case errors.Is(err, syscall.EAGAIN): // there is a server, and many clients
		return nil
	case err != nil:
		return fmt.Errorf("the socket has no server: %w", err)
	}
	return conn.Close()
}

// ServeHTTP answers for the agent, as package health does:
//
//	GET /healthz/ready      200, or 503 without an identity that has not expired, or if a socket does not answer
//	GET /healthz/live       200, or 503 once the identity has expired or the agent has ended
//	GET /metrics            the metrics, also at /stats/prometheus
//	POST /drain             makes the agent not ready for good, while it goes on serving
//	POST /quitquitquit      ends the agent as [Agent.Close] does, so that Run returns nil
//
// It is for operators: serve it on loopback, or on a port that only the kubelet and Prometheus reach. The two POST requests
// are for programs on the same host, over loopback: those of others, and of other sites in a browser, are refused with 403.
// They answer 200 at once, and 503 before Run. The time for draining begins with the first of them.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/quitquitquit":
		a.order(w, r, func() { go func() { _ = a.Close() }() }) // it waits for the end
		return
	case "/drain":
		a.order(w, r, func() { a.drain() })
		return
	case "/healthz/live":
		if err := a.life.Idle(); errors.Is(err, lifecycle.ErrEnded) { // only a restart helps
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
	case "/stats/prometheus":
		r = r.Clone(r.Context())
		r.URL.Path = "/metrics"
	}
	a.health.ServeHTTP(w, r)
}

// order calls do if a program on this host asks for it.
func (a *Agent) order(w http.ResponseWriter, r *http.Request, do func()) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	switch err := loopback.Local(r); {
	case err != nil:
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "the method is not POST", http.StatusMethodNotAllowed)
		return
	case errors.Is(a.life.Idle(), lifecycle.ErrNotStarted):
		http.Error(w, "the agent does not run yet", http.StatusServiceUnavailable)
		return
	}
	a.cfg.Logger.Info("istioagent: a program on this host has asked for "+r.URL.Path, slog.String("remote", r.RemoteAddr))
	const answer = "ok\n"
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
	_, _ = io.WriteString(w, answer)
	_ = http.NewResponseController(w).Flush() // before the end of the program, with which the connection ends
	do()
}

// origin reports where the identity comes from.
type origin Agent

func (o *origin) Report() report.Report {
	name := "the origin that was chosen, " + o.cfg.Origin + "; because: " + o.cfg.why
	return report.Report{Upstreams: []report.Upstream{{Name: name, OK: true}}, Metrics: o.health.WriteMetrics}
}

// own has the metrics of the agent itself.
type own Agent

func (o *own) Report() report.Report { return report.Report{Metrics: (*Agent)(o).writeMetrics} }

func (a *Agent) writeMetrics(w io.Writer) error {
	var set metrics.Set
	set.Gauge("istio_agent_startup_duration_seconds", "The time from when the agent was made until it was ready.", func() (float64, bool) {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.ready.Sub(a.made).Seconds(), !a.ready.IsZero()
	})
	set.Gauges("istio_agent_cert_expiry_seconds", "The time until the certificate expires, which is negative after that.", func(add metrics.Add) {
		if a.identity != nil {
			if svid, err := a.identity.SVID(); err == nil {
				add(time.Until(svid.NotAfter()).Seconds(), "resource_name", "default")
			}
		}
	})
	if a.cfg.Origin == fromCA {
		a.cfg.requests.addTo(&set)
	}
	return set.Write(w)
}
