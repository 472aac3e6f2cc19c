// Package athenzprog is the programs athenz-agent, athenz-provider and athenz-sia in the folder examples: their environment
// variables, and how they run. What they do is in the packages authn/athenz and caclient/athenz.
package athenzprog

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
)

// Program is one of the three: [Agent], [Provider] or [SIA].
type Program struct {
	Name  string
	Table settings.Table // its environment variables
	run   func(context.Context, *settings.Values, Options) error
}

// Options say how a program runs. Environ is required.
type Options struct {
	Environ []string // as in os.Environ
	Logger  *slog.Logger

	// Kubernetes asks the kubelet or the API server. Nil means a client with the service account of this pod.
	Kubernetes *http.Client

	// Trace, if set, is called when a request has come, with the code 0, and when it was answered. The part is "agent",
	// "signing" or "provider".
	Trace func(part string, r *http.Request, code int)

	// Started, if set, is called when all ports are open: with their addresses, by the names of the variables.
	Started func(map[string]net.Addr)
}

// Run runs the program until ctx is done, and returns nil then. A configuration that is not right is refused before
// anything is made: the error names the variables.
func (p Program) Run(ctx context.Context, o Options) error {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	v, err := p.Table.Read(o.Environ)
	if err != nil {
		return err
	}
	return p.run(ctx, v, o)
}

// Main is the function main of the program.
func (p Program) Main(demo func(context.Context, io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := p.Command(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr, demo); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		os.Exit(1)
	}
}

// Command runs the program with arguments.
func (p Program) Command(ctx context.Context, args, environ []string, out, errOut io.Writer, demo func(context.Context, io.Writer) error) error {
	fs := flag.NewFlagSet(p.Name, flag.ContinueOnError)
	fs.SetOutput(errOut)
	show := fs.Bool("demo", false, "show the agent, the provider and the pod's client at work in a few seconds, and end")
	fs.Usage = func() {
		fmt.Fprintf(errOut, "Usage: %s [flags]\n", p.Name)
		fs.PrintDefaults()
		fmt.Fprintln(errOut, "\nEnvironment:")
		_ = p.Table.WriteHelp(errOut) // there is no better place to say that it failed
	}
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("%q is not understood; flags begin with a hyphen", fs.Arg(0))
	}
	if *show {
		return demo(ctx, out)
	}
	level := new(slog.LevelVar)
	log := slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level}))
	v, err := p.Table.Read(environ)
	if err != nil {
		return err
	}
	_ = level.UnmarshalText([]byte(v.Text("LOG_LEVEL"))) // one of the choices
	return p.Run(ctx, Options{Environ: environ, Logger: log, Started: func(at map[string]net.Addr) {
		for name, addr := range at {
			fmt.Fprintf(out, "%s: %s\n", name, addr)
		}
	}})
}

// Where variables come from.
const (
	athenzs = "Athenz"                // a program of Athenz has it
	cluster = "cluster configuration" // a field of Athenz's configuration of a cluster
	here    = "this program"
)

// Variables of several programs.
var (
	provider   = settings.Variable{Name: "PROVIDER_SERVICE", Check: isService, Doc: "name of the provider's service, such as k8s.admin.athenz-callback; required", Origin: athenzs}
	suffix     = settings.Variable{Name: "DNS_SUFFIX", Default: "svc.cluster.local", Check: isDNSName, Doc: "suffix of the provider's DNS names", Origin: athenzs}
	admin      = settings.Variable{Name: "ADMIN_DOMAIN", Check: isDomain, Doc: "domain of the system namespaces: kube-system is ADMIN_DOMAIN.kube-system", Origin: cluster}
	namespaces = settings.Variable{Name: "SYSTEM_NAMESPACES", Form: settings.List, Check: areLabels, Doc: "system namespaces beside those that begin with kube-", Origin: cluster}
	ztsRoots   = settings.Variable{Name: "SERVER_CA_CERT", Form: settings.Path, Doc: "CA certificates of ZTS itself, in PEM; required", Origin: athenzs}
	roots      = settings.Variable{Name: "SERVICE_CA_CERT", Form: settings.Path, Doc: "CA certificates of what ZTS issues, and of the nodes, in PEM; required", Origin: cluster}
	spiffeTD   = settings.Variable{Name: "SPIFFE_TRUST_DOMAIN", Check: isTrustDomain, Doc: "trust domain of SPIFFE IDs with a namespace, spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.SERVICE; not set: spiffe://DOMAIN/sa/SERVICE", Origin: here}
	healthAddr = settings.Variable{Name: "HEALTH_ADDR", Default: "127.0.0.1:9080", Check: isAddr, Doc: "address of /ready, /live and /metrics, or off", Origin: here}
	logLevel   = settings.Variable{Name: "LOG_LEVEL", Default: "info", Choices: []string{"debug", "info", "warn", "error"}, Doc: "least level of what is logged", Origin: athenzs}
)

const off = "off" // in the place of an address

func isService(s string) error {
	if _, err := athenzname.ParseService(s); err != nil {
		return errors.New("set it to the name of a service with its domain in lower case, such as k8s.admin.athenz-callback")
	}
	return nil
}

func isDNSName(s string) error {
	if !kube.ValidName(s) {
		return errors.New("set it to a DNS name, such as svc.cluster.local")
	}
	return nil
}

func isDomain(s string) error {
	if _, err := (athenzname.Mapping{AdminDomain: s}).Domain("kube-system"); err != nil {
		return errors.New("set it to a domain in lower case, such as k8s.admin")
	}
	return nil
}

func areLabels(s string) error {
	for name := range strings.SplitSeq(s, ",") {
		if !kube.ValidLabel(strings.TrimSpace(name)) {
			return errors.New("set it to names of namespaces with commas between")
		}
	}
	return nil
}

func isTrustDomain(s string) error {
	if _, err := spiffe.ParseTrustDomain(s); err != nil {
		return errors.New("set it to the name of a trust domain, such as athenz.io")
	}
	return nil
}

func isAddr(s string) error {
	_, port, err := net.SplitHostPort(s)
	if n, bad := strconv.ParseUint(port, 10, 16); s != off && (err != nil || bad != nil || n > 65535) {
		return errors.New("set it to HOST:PORT with a number for the port, such as 127.0.0.1:9080, or to off")
	}
	return nil
}

// isAPI is isHTTPS that lets http through for an address of this machine.
func isAPI(s string) error {
	if u, err := url.Parse(s); err == nil && u.Scheme == "http" {
		if ip, err := netip.ParseAddr(u.Hostname()); err == nil && ip.IsLoopback() {
			return nil
		}
	}
	if err := isHTTPS(s); err != nil {
		return fmt.Errorf("%w; http is for addresses of this machine, such as 127.0.0.1", err)
	}
	return nil
}

func isHTTPS(s string) error {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return errors.New("set it to an https URL without a path, such as https://zts.athenz.svc:4443")
	}
	return nil
}

// need returns an error for each of the variables that is not set.
func need(v *settings.Values, names ...string) error {
	var missing []error
	for _, name := range names {
		if !v.Set(name) {
			missing = append(missing, v.Reject(name, errors.New("it is not set, and the program needs it")))
		}
	}
	return errors.Join(missing...)
}

// readable returns an error for each of the files that is not of its kind: certificates, or those with their key.
func readable(v *settings.Values, certFile, keyFile string, rootsFiles ...string) error {
	var bad []error
	if certFile != "" {
		if _, err := readPair(v.Text(certFile), v.Text(keyFile)); err != nil {
			bad = append(bad, v.Reject(certFile, fmt.Errorf("%w; set it to a file with certificates in PEM, and %s to one with their key", err, keyFile)))
		}
	}
	for _, name := range rootsFiles {
		if _, err := readBundle(namelessDomain, v.Text(name)); err != nil {
			bad = append(bad, v.Reject(name, fmt.Errorf("%w; set it to a file of CA certificates in PEM", err)))
		}
	}
	return errors.Join(bad...)
}

const maxPEM = 256 << 10 // bytes of a file

func readPair(certFile, keyFile string) (*pki.Credential, error) {
	certs, err := files.Read(certFile, maxPEM)
	if err != nil {
		return nil, err
	}
	key, err := files.Read(keyFile, maxPEM)
	if err != nil {
		return nil, err
	}
	c, err := pki.ParseCredentialPEM(certs, key)
	if err == nil && !time.Now().Before(c.NotAfter()) {
		err = fmt.Errorf("the certificate in %s has expired", certFile)
	}
	return c, err
}

// namelessDomain is that of the bundles in SERVER_CA_CERT and SERVICE_CA_CERT where no certificate has a SPIFFE ID of it.
var namelessDomain = spiffe.MustParseTrustDomain("athenz.io")

// trustDomain returns the trust domain of the SPIFFE IDs, and whether they have a namespace.
func trustDomain(v *settings.Values) (td spiffe.TrustDomain, named bool) {
	if text := v.Text(spiffeTD.Name); text != "" {
		return spiffe.MustParseTrustDomain(text), true // it was checked
	}
	return namelessDomain, false
}

// readBundle returns the CA certificates in a file as the bundle of a trust domain.
func readBundle(td spiffe.TrustDomain, file string) (*spiffe.Bundle, error) {
	data, err := files.Read(file, maxPEM)
	if err != nil {
		return nil, err
	}
	b, err := spiffe.ParseBundlePEM(td, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return b, nil
}

func mapping(v *settings.Values) athenzname.Mapping {
	return athenzname.Mapping{AdminDomain: v.Text(admin.Name), SystemNamespaces: v.List(namespaces.Name)}
}

// rootsFile is a file of CA certificates, which is read each time. It is a [spiffe.BundleSource].
type rootsFile struct {
	td   spiffe.TrustDomain
	path string
}

func (r rootsFile) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if td != r.td {
		return nil, spiffe.ErrUnknownTrustDomain
	}
	return readBundle(td, r.path)
}

// serverTLS asks for client certificates, which the handler judges, and reads its own from the files for each handshake. While
// they cannot be used, as when they are being replaced, the last pair stays until it expires.
func serverTLS(v *settings.Values) *tls.Config {
	certFile, keyFile := v.Text("CERT_FILE"), v.Text("KEY_FILE")
	var mu sync.Mutex
	last, _ := readPair(certFile, keyFile) // an error comes again below
	return &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		c, err := readPair(certFile, keyFile)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			last = c
		} else if last == nil || !time.Now().Before(last.NotAfter()) {
			return nil, err
		}
		return last.TLSCertificate(), nil
	}}
}

// group runs the parts of a program until one fails.
type group struct {
	Options
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	at     map[string]net.Addr
	failed error
	serves []func() // to be called when all ports are open
}

func newGroup(ctx context.Context, v *settings.Values, o Options) *group {
	g := &group{Options: o, at: map[string]net.Addr{}}
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	for _, name := range v.Unknown() {
		o.Logger.Warn("this variable is not one of the program", slog.String("name", name))
	}
	return g
}

// part runs f, which returns nil when its context is done.
func (g *group) part(f func(context.Context) error) {
	g.serves = append(g.serves, func() {
		g.wg.Go(func() {
			if err := f(g.ctx); err != nil {
				g.cancel(failure{err})
			}
		})
	})
}

// listen opens the port of a variable, unless that is off, and serves h on it; without TLS if cfg is nil.
func (g *group) listen(v *settings.Values, name string, h http.Handler, cfg *tls.Config) {
	address := v.Text(name)
	if address == off || g.failed != nil {
		return
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		g.failed = v.Reject(name, err)
		return
	}
	g.at[name] = l.Addr()
	context.AfterFunc(g.ctx, func() { _ = l.Close() }) // if it is never served
	g.part(func(ctx context.Context) error {
		return caserver.Serve(ctx, l, caserver.ServeOptions{Handler: h, TLS: cfg, Plaintext: cfg == nil, Logger: g.Logger})
	})
}

// health serves the port for operators.
func (g *group) health(v *settings.Values, parts ...health.Part) {
	h, err := health.New(parts...)
	if err != nil {
		g.failed = errors.Join(g.failed, err)
		return
	}
	g.listen(v, healthAddr.Name, h, nil)
}

// wait runs the parts until ctx is done, or one of them fails, which is its error.
func (g *group) wait() error {
	defer g.wg.Wait()
	defer g.cancel(nil)
	if g.failed != nil {
		return g.failed
	}
	for _, start := range g.serves {
		start()
	}
	if g.Started != nil {
		g.Started(g.at)
	}
	<-g.ctx.Done()
	if f, ok := context.Cause(g.ctx).(failure); ok {
		return f.error
	}
	return nil // it was told to stop
}

// failure is that of a part, which ends the others.
type failure struct{ error }

// requests counts the answers of a handler.
type requests struct {
	http.Handler
	metric string
	trace  func(r *http.Request, code int)

	mu      sync.Mutex
	answers map[int]float64 // by status
}

func (o Options) count(part string, h http.Handler) *requests {
	trace := func(*http.Request, int) {}
	if o.Trace != nil {
		trace = func(r *http.Request, code int) { o.Trace(part, r, code) }
	}
	return &requests{Handler: h, metric: "svidkit_athenz_" + part + "_requests_total", trace: trace, answers: map[int]float64{}}
}

// answer notes the status.
type answer struct {
	http.ResponseWriter
	code  int
	trace func(code int) // nil when it was called
}

// begin notes the status of the answer, once.
func (a *answer) begin(code int) {
	if a.trace != nil {
		a.code = code
		a.trace(code)
		a.trace = nil
	}
}

func (a *answer) WriteHeader(code int) {
	a.begin(code)
	a.ResponseWriter.WriteHeader(code)
}

func (a *answer) Write(data []byte) (int, error) {
	a.begin(http.StatusOK)
	return a.ResponseWriter.Write(data)
}

// Unwrap is for [http.ResponseController].
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (c *requests) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.trace(r, 0)
	a := &answer{w, http.StatusOK, func(code int) { c.trace(r, code) }}
	defer func() {
		a.begin(http.StatusOK)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.answers[a.code]++
	}()
	c.Handler.ServeHTTP(a, r)
}

// WriteMetrics writes the answers by their status.
func (c *requests) WriteMetrics(w io.Writer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var m metrics.Set
	m.Totals(c.metric, "Answers by their status.", func(add metrics.Add) {
		for code, n := range c.answers {
			add(n, "code", strconv.Itoa(code))
		}
	})
	return m.Write(w)
}
