// Package istioagent is the identity part of Istio's agent as a library: it obtains the identity of a workload, keeps
// it fresh, serves it to an Envoy by SDS, writes it to files, and forwards the Envoy's other configuration from the
// control plane. The environment variables of Istio's agent configure it.
//
//	cfg, err := istioagent.FromEnvironment(os.Environ())
//	if err != nil { … } // a line for each variable, with the remedy
//	cfg, err = istioagent.Choose(ctx, cfg)
//	if err != nil { … }
//	agent, err := istioagent.New(cfg)
//	if err != nil { … }
//	err = agent.Run(ctx)
//
// examples/agent is a program built on it; its README lists the variables.
//
// # Where the identity comes from
//
// [Choose] looks once, at the start, and takes the first of these that exists:
//
//  1. A socket at var/run/secrets/workload-spiffe-uds/socket on which a server answers: Envoy uses that server, and
//     this agent serves no secrets. A socket on which no server answers is replaced.
//  2. Files, which the agent follows and serves: the files of FILE_MOUNTED_CERTS, the files in
//     var/run/secrets/workload-spiffe-credentials, or the files in etc/certs.
//  3. The CA, with a token or with the certificate in PROV_CERT. The agent serves the identity.
//
// The choice stays until the program ends. If files are removed later, the agent does not ask the CA: the last good
// files stay in use. A certificate without its key, or the reverse, counts as files, and the agent waits for the
// rest. The directories of OUTPUT_CERTS and PROV_CERT never count, as they are not a workload's input.
//
// # What it serves
//
// The workload socket has the Secret Discovery Service with the names default, ROOTCA, ALL, the SPIFFE IDs of the
// workload and of the trust domain, and the names of files (file-cert:, file-root:). In a pod it also has the Secrets
// of the pod's namespace, for gateways (kubernetes://NAME, as in package kubesecrets). The agent reads them with the
// pod's service account, which needs the right to list and watch them, once a client asks for one.
//
// The socket XDS in the directory of the proxy's configuration has ADS, which is forwarded to the control plane, and
// the same secrets. If another program serves the workload socket, the control plane answers for secrets on the
// socket XDS. [Agent.Bootstrap] writes a configuration with which an Envoy uses both sockets.
//
// # What it does not do
//
// It does not start Envoy and does not probe the application; examples/agent does, with [Config.Envoy]. It has no DNS
// proxy, which is not part of identity. It configures Envoy only by the bootstrap and forwards the control plane's
// configuration unchanged. Variables of Istio's agent and fields of PROXY_CONFIG for such features are accepted, and
// named once at the start.
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
	"sync"
	"sync/atomic"
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

// runner is a part that an Agent runs.
type runner struct {
	name string
	run  func(context.Context) error
}

// Agent is Istio's agent for identity. [New] creates one. It runs once. It is safe for concurrent use.
type Agent struct {
	redacted
	cfg      Config
	runners  []runner
	parts    []health.Part     // the first is the agent itself
	identity part              // nil if another program serves the secrets
	secrets  *sds.Handler      // nil if another program serves the secrets
	xds      *xdsproxy.Handler // nil without Envoy.XDS
	sink     *filesink.Sink    // nil without OUTPUT_CERTS
	servers  map[string]*unixsocket.Server
	health   *health.Handler
	metrics  metrics.Set // of the agent itself

	life lifecycle.Life
	news renew.Signal
	made time.Time
	ran  atomic.Bool

	mu      sync.Mutex // guards the rest
	ready   time.Time  // when it became ready; zero before
	drained time.Time  // when draining ends; zero before it begins
	drains  chan struct{}
	refused error // why there is no identity, until its source changes
}

// New returns an Agent for a configuration from [Choose]. It only checks that the files with the roots for the CA and
// the control plane exist. The caller must call [Agent.Run] or [Agent.Close].
func New(cfg Config) (_ *Agent, err error) {
	a := &Agent{
		redacted: redact.New("istioagent.Agent(" + cfg.Origin + ": " + cfg.why + ")"),
		cfg:      cfg, servers: make(map[string]*unixsocket.Server), made: time.Now(), drains: make(chan struct{}),
	}
	c := &a.cfg
	c.notes, c.requests, c.Logger = slices.Clone(cfg.notes), new(requests), ratelog.Patient(cfg.Logger)
	a.initMetrics()
	a.parts = []health.Part{{Name: "agent", Check: a.check, Source: (*own)(a)}}
	defer func() {
		if err != nil {
			a.closeHandlers()
			err = fmt.Errorf("istioagent: new: %w", err)
		}
	}()
	switch c.Origin {
	case fromSocket:
		if c.outputCerts != "" {
			c.note("OUTPUT_CERTS has no effect: the identity is served by another program, at " + c.Socket)
		}
	case fromFiles, fromCA:
		if err := a.newIdentity(); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("the configuration has the origin %q; it has to be from Choose", c.Origin)
	}
	if c.isFile(meshFile) {
		c.note("the file " + c.path(meshFile) + " is not read: what it says about the proxy belongs into PROXY_CONFIG")
	}
	if c.isFile(crlFile) {
		c.note("the file " + c.path(crlFile) + " is not used: Envoy goes on accepting the certificates that it " +
			"revokes, until they expire")
	}
	if err := a.newXDS(); err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	a.health, err = health.New(a.parts...)
	return a, err
}

// newIdentity creates the source of the identity, and the parts that serve and write it.
func (a *Agent) newIdentity() error {
	src, roots, output, err := a.newSources()
	if err != nil {
		return err
	}
	a.add("identity", a.identity, a.identity.Run)
	if err := a.newSecrets(src, roots); err != nil || a.cfg.outputCerts == "" {
		return err
	}
	mode := fs.FileMode(0o600)
	if a.cfg.inPod { // a pod's containers run as different users
		mode = 0o644
	}
	a.sink, err = filesink.New(filesink.Config{
		Source: output, Dir: a.cfg.path(a.cfg.outputCerts), Plain: true,
		CertName: certName, KeyName: keyName, RootsName: rootsName, Mode: mode, KeyMode: mode,
		TraditionalKey: a.cfg.Origin == fromCA && !a.cfg.v.Bool("PKCS8_KEY"), AllowWritable: a.cfg.inPod,
		Logger: a.cfg.Logger,
	})
	if err == nil {
		a.add("outputs", a.sink, a.sink.Run)
	}
	return err
}

// newSources creates the source of the identity. It returns the source of its secrets, the source of ROOTCA, and the
// identities to write to files.
func (a *Agent) newSources() (src, roots sds.Source, output sdssource.Identity, err error) {
	c := &a.cfg
	if c.Origin == fromFiles {
		followed, err := c.newFiles(filesource.BundleFile{Path: c.roots})
		if err != nil {
			return nil, nil, nil, err
		}
		a.identity, src = followed, sdssource.FromIdentity(followed)
		return src, src, followed, nil
	}
	m, err := c.newManager()
	if err != nil {
		return nil, nil, nil, err
	}
	if a.identity, src = m, m; !c.v.Bool("PKCS8_KEY") {
		src = traditional{m}
	}
	if c.roots == "" {
		return src, src, m, nil
	}
	followed, err := c.newFiles(filesource.BundleFile{Path: c.roots, TrustDomain: c.trustDomain})
	if err != nil {
		return nil, nil, nil, err
	}
	r := &rooted{identity: m, roots: followed}
	a.add("roots", followed, followed.Run)
	a.add("changes of roots", nil, r.run)
	return src, sdssource.FromBundles(followed, c.trustDomain), r, nil
}

// newFiles returns the source for the files of the identity, or for roots alone.
func (c *Config) newFiles(roots filesource.BundleFile) (*filesource.Source, error) {
	return filesource.New(filesource.Config{
		CertFile: c.cert, KeyFile: c.key, Bundles: []filesource.BundleFile{roots}, Refuse: c.own(), Logger: c.Logger,
	})
}

// newSecrets creates the handler of the workload socket.
func (a *Agent) newSecrets(src, roots sds.Source) error {
	c := &a.cfg
	var allow []string
	for _, name := range slices.Concat(c.AllowFiles, []string{c.cert, c.key, c.roots}) {
		if name != "" {
			allow = append(allow, c.path(name))
		}
	}
	files, err := sdssource.NewFiles(sdssource.FilesConfig{Allow: allow, Refuse: c.own(), Logger: c.Logger})
	if err != nil {
		return err
	}
	a.add("files", files, files.Run)
	routes := map[string]sds.Source{
		"default": src, "ROOTCA": roots, "ALL": src, "spiffe://*": src, "file-cert:*": files, "file-root:*": files,
	}
	if gateway := c.newGateway(); gateway != nil {
		routes["kubernetes://*"] = gateway
		a.add("kubernetes", gateway, gateway.Run)
	}
	mux, err := sdssource.Mux(routes)
	if err != nil {
		return err
	}
	if a.secrets, err = sds.NewHandler(mux, &sds.Options{Logger: c.Logger}); err != nil {
		return err
	}
	a.add("sds", a.secrets, nil)
	a.serve(c.Socket, a.secrets)
	return nil
}

// add adds a part to run, to report on, or both; the other one is nil.
func (a *Agent) add(name string, source report.Reporter, run func(context.Context) error) {
	if source != nil {
		a.parts = append(a.parts, health.Part{Name: name, Source: source})
	}
	if run != nil {
		a.runners = append(a.runners, runner{name, run})
	}
}

// serve adds a server for a socket.
func (a *Agent) serve(path string, h http.Handler) {
	a.servers[path] = &unixsocket.Server{Path: path, DirMode: 0o750, SocketMode: 0o600, Handler: h,
		Logger: a.cfg.Logger}
}

// Run runs the Agent. It blocks until ctx is done, [Agent.Close] is called, or
// a part fails, such as a socket that another program has taken, or another program's server that has not answered
// for a minute. When ctx is done or Close is called, the Agent is no longer ready, but goes on serving while Envoy
// drains (terminationDrainDuration in PROXY_CONFIG, or MINIMUM_DRAIN_DURATION); then it ends all streams, removes its
// sockets, and Run returns nil. Calling it a second time is an error.
func (a *Agent) Run(ctx context.Context) error {
	if a.ran.Swap(true) {
		return errors.New("istioagent: run: an Agent runs once; make another one")
	}
	if err := a.life.Run(ctx, a.work); err != nil {
		return fmt.Errorf("istioagent: run: %w", err)
	}
	return a.life.Close() // the Agent runs once, so Ready must not wait for another run
}

// work runs the parts until ctx is done or a part fails, and drains.
func (a *Agent) work(ctx context.Context) error {
	defer a.closeClients()
	defer a.closeHandlers()
	a.sayOrigin()
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
	if err := a.listen(start); err != nil {
		return err
	}
	if a.cfg.Origin == fromSocket {
		start("socket "+a.cfg.Socket+" of another program", a.watchOther)
	}
	for _, r := range a.runners {
		start(r.name, r.run)
	}
	wg.Go(func() { a.await(parts) })

	select {
	case <-parts.Done():
		return context.Cause(parts)
	case <-ctx.Done():
	}
	left := time.Until(a.drain())
	a.cfg.Logger.Info("istioagent: the agent ends", slog.Duration("drain", max(left, 0)))
	_ = renew.Sleep(parts, left)
	a.closeHandlers() // ends the streams before their sockets are removed
	return nil
}

// sayOrigin logs where the identity comes from, and which settings have no effect.
func (a *Agent) sayOrigin() {
	c := &a.cfg
	c.Logger.Info("istioagent: the identity has an origin", slog.String("origin", c.Origin), slog.String("why", c.why))
	for _, note := range c.notes {
		c.Logger.Warn("istioagent: " + note)
	}
	for _, note := range c.unused {
		c.Logger.Info("istioagent: " + note)
	}
}

// listen opens the sockets and starts their servers.
func (a *Agent) listen(start func(name string, run func(context.Context) error)) error {
	c := &a.cfg
	if a.xds != nil && c.text("GRPC_XDS_BOOTSTRAP") != "" {
		if err := c.writeGRPC(); err != nil {
			return fmt.Errorf("bootstrap for gRPC (GRPC_XDS_BOOTSTRAP): %w", err)
		}
	}
	for path, s := range a.servers {
		if err := s.Listen(); err != nil {
			return fmt.Errorf("socket %s: %w", path, err)
		}
		start("socket "+path, s.Run)
	}
	if a.xds == nil || !c.v.Bool("PROXY_XDS_DEBUG_VIA_AGENT") {
		return nil
	}
	l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", c.v.Int("PROXY_XDS_DEBUG_VIA_AGENT_PORT")))
	if err != nil {
		return fmt.Errorf("debug requests (PROXY_XDS_DEBUG_VIA_AGENT_PORT is for another port): %w", err)
	}
	debug := &unixsocket.Server{Listener: l, Handler: http.HandlerFunc(a.xds.ServeDebug), Logger: c.Logger}
	start("debug requests", debug.Run)
	return nil
}

// drain makes the agent permanently not ready, and returns when Envoy's time for draining ends.
func (a *Agent) drain() (end time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.drained.IsZero() {
		a.drained = time.Now().Add(time.Duration(a.cfg.proxy.TerminationDrainDuration))
		close(a.drains)
		a.news.Notify()
	}
	return a.drained
}

// Draining returns a channel that is closed when the agent begins to drain: by POST /drain or /quitquitquit, by
// [Agent.Close], or at the end of Run's ctx. A program that runs the Envoy must then drain it, too.
func (a *Agent) Draining() <-chan struct{} { return a.drains }

var errDraining = errors.New("the agent is draining or ending")

// errEnded is the error for a part that returned nil before it was stopped.
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
			// A program that waits for the agent must find the files. The sink logs failures and retries.
			_, _ = a.sink.Write()
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

// Ready waits until the agent serves its sockets, has an identity (unless another program serves it), and has tried
// to write it to Config.OutputCerts. The error wraps [spiffe.ErrNotReady], the cause of ctx, and the reason why there
// is no identity. Ready fails early if the CA refuses permanently, if a part has failed, and once the agent drains or
// ends.
func (a *Agent) Ready(ctx context.Context) error {
	var refused error
	notReady := func() error {
		cause := refused
		if cause == nil && ctx.Err() != nil && a.identity != nil {
			cause = a.identity.Ready(ctx) // the source knows the reason for the wait
		}
		return a.life.NotReady("istioagent", cause, "its parts are starting")
	}
	err := a.life.Ready(ctx, a.news.Changed, func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		if refused = a.refused; !a.drained.IsZero() {
			refused = errDraining
		}
		return !a.ready.IsZero() || refused != nil
	}, notReady)
	if err == nil && refused != nil {
		return notReady()
	}
	return err
}

// Close ends [Agent.Run], drains as Run does, and waits for the end. It returns nil.
func (a *Agent) Close() error {
	err := a.life.Close()
	a.closeHandlers()
	a.closeClients()
	return err
}

// closeClients closes the connections to the CA and the control plane, when no requests are left.
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
}

// Parts returns the parts of the agent by their names, for a status page. The first is the origin of the identity,
// with the metrics of all parts and the metrics of Istio's agent.
func (a *Agent) Parts() iter.Seq2[string, report.Reporter] {
	return func(yield func(string, report.Reporter) bool) {
		if !yield("origin", (*origin)(a)) {
			return
		}
		for _, p := range a.parts[1:] {
			if !yield(p.Name, p.Source) {
				return
			}
		}
	}
}

// check returns nil if the agent itself is ready.
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
	for path := range a.servers { // another program may have removed the socket
		if err := answers(path); err != nil {
			return err
		}
	}
	return nil
}

// answers returns an error if clients cannot connect to a socket.
func answers(socket string) error {
	conn, err := net.DialTimeout("unix", socket, answerTime)
	switch {
	case errors.Is(err, syscall.EAGAIN): // there is a server, busy with many clients
		return nil
	case err != nil:
		return fmt.Errorf("the socket has no server: %w", err)
	}
	return conn.Close()
}

// ServeHTTP serves these requests, as package health does:
//
//	GET /healthz/ready      200, or 503 without an identity that has not expired, or if a socket does not answer
//	GET /healthz/live       200, or 503 once the identity has expired or the agent has ended
//	GET /metrics            the metrics, also at /stats/prometheus
//	POST /drain             makes the agent not ready for good, while it goes on serving
//	POST /quitquitquit      ends the agent as [Agent.Close] does, so that Run returns nil
//
// It is for operators: serve it on loopback, or on a port that only the kubelet and Prometheus reach. The two POST
// requests are for programs on the same host, over loopback: from other hosts, and from other sites in a browser, they
// are refused with 403. They answer 200 at once, and 503 before Run. Draining begins with the first.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/quitquitquit":
		a.order(w, r, func() { go func() { _ = a.Close() }() }) // Close waits for the end
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
	a.cfg.Logger.Info("istioagent: a program on this host has asked for "+r.URL.Path,
		slog.String("remote", r.RemoteAddr))
	const answer = "ok\n"
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
	_, _ = io.WriteString(w, answer)
	_ = http.NewResponseController(w).Flush() // the program's end closes the connection
	do()
}

// origin reports where the identity comes from.
type origin Agent

func (o *origin) Report() report.Report {
	name := "the origin that was chosen, " + o.cfg.Origin + "; because: " + o.cfg.why
	return report.Report{Upstreams: []report.Upstream{{Name: name, OK: true}}, Metrics: o.health.WriteMetrics}
}

// own reports the metrics of the agent itself.
type own Agent

func (o *own) Report() report.Report { return report.Report{Metrics: o.metrics.Write} }

func (a *Agent) initMetrics() {
	a.metrics.Gauge("istio_agent_startup_duration_seconds",
		"The time from when the agent was made until it was ready.", func() (float64, bool) {
			a.mu.Lock()
			defer a.mu.Unlock()
			return a.ready.Sub(a.made).Seconds(), !a.ready.IsZero()
		})
	a.metrics.Gauges("istio_agent_cert_expiry_seconds",
		"The time until the certificate expires, which is negative after that.", func(add metrics.Add) {
			if a.identity == nil {
				return
			}
			if svid, err := a.identity.SVID(); err == nil {
				add(time.Until(svid.NotAfter()).Seconds(), "resource_name", "default")
			}
		})
	if a.cfg.Origin == fromCA {
		a.cfg.requests.init(&a.metrics)
	}
}
