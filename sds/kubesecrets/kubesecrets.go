// Package kubesecrets serves the Secrets of a Kubernetes API server to Envoy gateways: a source for package sds, by
// the names that Istio's gateways have for them.
//
//	kubernetes://NAMESPACE/NAME           the key pair in a Secret
//	kubernetes://NAMESPACE/NAME-cacert    the roots in a Secret, with its revocation lists
//	kubernetes://NAME, NAME-cacert        the same, of the gateway's own namespace
//
// The agent of one gateway serves the Secrets of its own namespace; the permissions of its socket decide who gets
// them:
//
//	src, err := kubesecrets.New(kubesecrets.Config{})
//	if err != nil { … }
//	group.Go(func() error { return src.Run(ctx) })
//	handler, err := sds.NewHandler(src, nil)
//
// A server of many gateways authenticates its callers, and asks the API server what each of them may read:
//
//	src, err := kubesecrets.New(kubesecrets.Config{AllNamespaces: true, TrustDomain: td})
//	…
//	handler, err := sds.NewHandler(src, &sds.Options{Resolve: src.Resolve})
//	…
//	defer src.OnAccess(handler.Refresh)()
//	server.Handler = authn.Require(authn.ClientCertificate(verifier), handler, logger)
//
// To serve other names beside these, put the source into a sdssource.Mux with the key "kubernetes://*".
//
// # What is in a Secret
//
// A key pair is in cert and key, or in tls.crt and tls.key, as in Secrets of the type kubernetes.io/tls. The roots
// are in cacert or ca.crt, and their revocation lists in crl or ca.crl. If a Secret has both forms, the first counts.
// If there are revocation lists, each root needs one, as Envoy otherwise refuses every certificate. OCSP responses
// are not served: they must be renewed more often than a Secret is, and Envoy does without them.
//
// The roots come from the Secret NAME-cacert, or, if there is no Secret with that name, from the Secret NAME. An
// existing NAME-cacert counts alone, whatever it contains: the roots of NAME cannot replace it, as they may trust a
// CA that NAME-cacert deliberately leaves out.
//
// # What it promises
//
// A certificate and its key travel together. The last good content of a Secret stays in use while the new content is
// half of a pair, has a key of another certificate, an expired certificate or PEM that cannot be parsed, or lacks the
// roots; the reason is in the log and in [Source.Report]. A certificate that is not valid yet is served within some
// minutes after it has become valid. Roots are pushed before certificates.
//
// A new Secret NAME-cacert with bad content has no last good content: streams that have the roots of NAME keep them,
// and new streams get an error until NAME-cacert is good or deleted.
//
// While the API server does not answer, or refuses, all secrets stay in use, and the source recovers by itself.
//
// A Secret that is deleted, or no longer selected, is withdrawn, and its key is not kept. New streams do not get it,
// and delta streams are told; an Envoy that has it keeps it until it restarts.
//
// # Limits
//
// The PEM of all Secrets may take 64 MiB, with 1 KiB more for each Secret; content beyond that is refused. Of a
// Secret without certificates the source keeps nothing, except that a NAME-cacert exists.
//
// # Authorization
//
// [Source.Resolve] lets a caller have the Secrets of its own namespace, if a SubjectAccessReview says that its service
// account may list or get the Secrets there.
//
// Istio turns this check off with PILOT_ENABLE_XDS_IDENTITY_CHECK=false; here it is always on. Istio also refuses
// proxies whose node ID does not begin with "router". A proxy writes that ID itself, so it proves nothing: here only
// the right to read the Secrets decides, and a sidecar whose service account has that right could also read them from
// the API server.
//
// Names of the Gateway API (kubernetes-gateway://, configmap://) do not exist here. They may point to other
// namespaces, as ReferenceGrants permit, and only Istio's control plane knows which grants it checked.
//
// # One cluster
//
// A Source follows one API server. Istio's control plane also reads the Secrets of other clusters, whose kubeconfigs
// are in Secrets with the label istio/multiCluster. Here each gateway's agent reads its own cluster with the
// gateway's rights, so that no program holds credentials for the Secrets of all clusters. A server for gateways of
// several clusters has a Source for each, with APIServer and HTTPClient.
//
// # Rights
//
// The service account of this program needs the first of these rules, in a ClusterRole with AllNamespaces and
// otherwise in a Role, and with [Source.Resolve] the second, in a ClusterRole:
//
//	rules:
//	- {apiGroups: [""], resources: [secrets], verbs: [list, watch]}
//	- {apiGroups: [authorization.k8s.io], resources: [subjectaccessreviews], verbs: [create]}
package kubesecrets

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

const (
	scheme   = "kubernetes://"
	caSuffix = "-cacert"

	maxBytes = 64 << 20
	overhead = 1 << 10 // bytes that a Secret counts in addition to its content
)

// Config configures a [Source]. The zero Config is for a gateway in a pod. [New] copies it.
type Config struct {
	// Namespace is the namespace of names without one and, without AllNamespaces, the only one that is served. Empty
	// means this pod's namespace.
	Namespace string

	// AllNamespaces serves the Secrets of all namespaces. Set it together with a TrustDomain and [Source.Resolve],
	// unless every client of the handler may read all of them.
	AllNamespaces bool

	// LabelSelector selects Secrets by their labels, in the syntax of Kubernetes; empty means all. Type selects
	// Secrets by their type, such as "kubernetes.io/tls"; empty means all but service account tokens and releases of
	// Helm. The API server does not send other Secrets.
	LabelSelector, Type string

	// TrustDomain is the trust domain of the callers that [Source.Resolve] accepts; if it is zero, all are refused.
	TrustDomain spiffe.TrustDomain

	// ReviewInterval is how often the Source asks the API server what a caller may read, from a second to half an
	// hour; 0 means 30 seconds.
	ReviewInterval time.Duration

	// APIServer is the URL of the API server, and HTTPClient must authenticate itself to it. Empty and nil mean the
	// cluster of this pod, and its service account, whose token is reloaded for each request. Unencrypted http is
	// allowed for loopback addresses only, and needs a client.
	APIServer  string
	HTTPClient *http.Client

	// PostQuantum restricts connections as the pod's service account to X25519MLKEM768 with TLS 1.3.
	PostQuantum bool

	// Logger gets the Secrets taken into use or withdrawn (Info), and refused ones (Warn). Nil means no logs.
	Logger *slog.Logger

	maxBytes int // for tests; 0 means the constant
}

type redacted = redact.Text

// Source is an [sds.Source] of the Secrets of an API server, which it watches. [New] makes one. Its
// methods are safe for concurrent use, and it never prints a key.
//
// [sds.Source]: https://pkg.go.dev/github.com/svidkit/svidkit/sds#Source
type Source struct {
	redacted
	cfg   Config
	log   *slog.Logger
	api   *kube.Client
	path  string     // of the collection of Secrets
	query url.Values // selects the Secrets
	life  lifecycle.Life
	news  renew.Signal
	subs  secretset.Subscribers

	access access

	mu      sync.Mutex
	objects map[key]*object
	crowded map[key]int // Secrets whose content exceeds the limit, with the last list that had them
	used    int         // bytes
	listed  bool        // all Secrets have been read at least once
	err     error       // why the Source does not follow the API server now
	round   int         // of lists
}

// key is the name of a Secret.
type key struct{ namespace, name string }

func (k key) String() string { return scheme + k.namespace + "/" + k.name }

// New checks cfg and returns a Source. It starts no goroutine and sends no request.
func New(cfg Config) (*Source, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("kubesecrets: invalid Config: %w", err)
	}
	api, err := kube.New(kube.Options{URL: cfg.APIServer, Client: cfg.HTTPClient, PostQuantum: cfg.PostQuantum})
	if err != nil {
		return nil, fmt.Errorf("kubesecrets: invalid Config: %w", err)
	}
	s := &Source{
		redacted: redact.New("kubesecrets.Source(" + cfg.Namespace + ")"),
		cfg:      cfg, log: ratelog.Patient(cfg.Logger), api: api,
		objects: map[key]*object{}, crowded: map[key]int{},
		path:  kube.Path("api", "v1", "namespaces", cfg.Namespace, "secrets"),
		query: url.Values{"fieldSelector": {"type!=kubernetes.io/service-account-token,type!=helm.sh/release.v1"}},
	}
	if cfg.AllNamespaces {
		s.redacted = redact.New("kubesecrets.Source(all namespaces)")
		s.path = kube.Path("api", "v1", "secrets")
	}
	if cfg.Type != "" {
		s.query.Set("fieldSelector", "type="+cfg.Type)
	}
	if cfg.LabelSelector != "" {
		s.query.Set("labelSelector", cfg.LabelSelector)
	}
	s.access.init(api, cfg.ReviewInterval, s.log)
	return s, nil
}

// complete sets the defaults and checks the configuration.
func (c *Config) complete() error {
	if c.Namespace == "" {
		ns, err := kube.Namespace()
		switch {
		case errors.Is(err, fs.ErrNotExist) && !c.AllNamespaces:
			return errors.New("this process is not in a pod, so set Namespace, or AllNamespaces")
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return err
		}
		c.Namespace = ns // if empty, names without a namespace do not exist
	}
	c.maxBytes, c.ReviewInterval = cmp.Or(c.maxBytes, maxBytes), cmp.Or(c.ReviewInterval, reviewInterval)
	switch {
	case c.Namespace != "" && !kube.ValidLabel(c.Namespace):
		return fmt.Errorf("Config.Namespace %.300q cannot be that of a Secret", c.Namespace)
	case c.ReviewInterval < time.Second || c.ReviewInterval > reviewGood/2:
		return fmt.Errorf("ReviewInterval is %v, want a second at least, and %v at most",
			c.ReviewInterval, reviewGood/2)
	case strings.ContainsAny(c.Type, ",=!"):
		return fmt.Errorf("Config.Type %.300q is not one type of Secrets", c.Type)
	}
	return nil
}

// Run follows the Secrets. It blocks until ctx is done or [Source.Close] is called, and then returns nil. It is an
// error to call it while it runs, or after Close.
func (s *Source) Run(ctx context.Context) error {
	if s.api == nil {
		return errors.New("kubesecrets: run: it is the zero Source; New makes one")
	}
	return s.life.RunAs(ctx, "kubesecrets", s.work)
}

// Close stops the Source for good, waits for its goroutines, and returns nil. The last secrets stay readable.
func (s *Source) Close() error { return s.life.Close() }

// await waits until the Secrets have been read.
func (s *Source) await(ctx context.Context) error {
	return s.life.Ready(ctx, s.news.Changed, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.listed
	}, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.life.NotReady("kubesecrets", s.err, "the API server has not answered yet")
	})
}

// GenerateSecret returns the key pair or the roots of a Secret; see the package comment. The error wraps
// [fs.ErrNotExist] for a name of another form, of a namespace that is not served, or of a Secret that does not exist.
// If the content is not good, or the certificate has expired, another error gives the reason. GenerateSecret blocks
// until the Secrets have been read for the first time, or ctx is done; then the error wraps [spiffe.ErrNotReady], the
// cause of ctx and the API server's error.
func (s *Source) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	k, roots, err := parse(resourceName)
	if err == nil && k.namespace == "" {
		if k.namespace = s.cfg.Namespace; k.namespace == "" {
			err = errors.New("it has no namespace, and there is no Config.Namespace")
		}
	}
	if err == nil && k.namespace != s.cfg.Namespace && !s.cfg.AllNamespaces {
		err = fmt.Errorf("only Secrets of the namespace %q are served; see Config.AllNamespaces", s.cfg.Namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("kubesecrets: no secret %.256q: %w: %w", resourceName, err, fs.ErrNotExist)
	}
	if err := s.await(ctx); err != nil {
		return nil, err
	}
	found, err := s.lookup(k, roots)
	if err != nil {
		return nil, fmt.Errorf("kubesecrets: %.256q: %w", resourceName, err)
	}
	return renamed(resourceName, found)
}

// parse returns the Secret for a name, which may have no namespace, and whether the name asks for its roots.
func parse(resourceName string) (k key, roots bool, err error) {
	rest, ok := strings.CutPrefix(resourceName, scheme)
	if !ok {
		return k, false, errors.New(`the names are "kubernetes://NAMESPACE/NAME" and "kubernetes://NAME", ` +
			`with "-cacert" behind them for roots`)
	}
	namespace, name, ok := strings.Cut(rest, "/")
	if !ok {
		namespace, name = "", rest
	} else if !kube.ValidLabel(namespace) {
		return k, false, errors.New("it has no valid namespace")
	}
	// The name of a Secret has at most 253 bytes, and so has NAME without the suffix.
	roots = strings.HasSuffix(name, caSuffix)
	if !kube.ValidName(strings.TrimSuffix(name, caSuffix)) {
		return k, false, errors.New("it has no valid name of a Secret")
	}
	return key{namespace, name}, roots, nil
}

// lookup returns the last good content of a Secret.
func (s *Source) lookup(k key, roots bool) (*pki.Secret, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.objects[k]
	_, crowded := s.crowded[k]
	if roots && o == nil && !crowded {
		k.name = strings.TrimSuffix(k.name, caSuffix)
		o = s.objects[k]
		_, crowded = s.crowded[k]
	}
	switch {
	case o == nil && crowded:
		return nil, errRoom
	case o == nil:
		return nil, fmt.Errorf("there is no such Secret with a certificate, or it is not selected: %w", fs.ErrNotExist)
	}
	p := &o.pair
	if roots {
		p = &o.roots
	}
	switch {
	case p.secret == nil:
		return nil, cmp.Or(p.err, errNothing)
	case secretset.Expired(p.secret):
		return nil, fmt.Errorf("what the Secret had has expired at %s, and there is nothing newer: %w",
			p.secret.NotAfter().UTC().Format(time.RFC3339), cmp.Or(p.err, errSame))
	}
	return p.secret, nil
}

var (
	errNothing = errors.New("the Secret has nothing of this kind: a key pair is in cert and key, or tls.crt and " +
		"tls.key, and roots are in cacert or ca.crt")
	errSame = errors.New("the Secret is as it was")
)

// Subscribe registers f to be called with each name whose secret has changed, appeared or is gone: roots first. Calls
// come one at a time, after the change; f must return at once. cancel ends this. f may call cancel, and more than
// once.
func (s *Source) Subscribe(f func(resourceName string)) (cancel func()) { return s.subs.Add(f) }

// Report implements [report.Reporter] with each key pair, by its name, revocation lists that expire, and the API
// server as the upstream. The reason why content of a Secret is not in use is with the name, or a problem. The
// metrics have names that begin with svidkit_kubesecrets.
func (s *Source) Report() (r report.Report) {
	idle, callers := s.life.Idle(), s.access.places.Held()
	s.mu.Lock()
	defer s.mu.Unlock()
	up := s.err == nil && idle == nil
	r.Metrics = s.metrics(up, callers).Write
	r.Upstreams = []report.Upstream{{Name: "API server of Kubernetes", OK: up, Err: s.err}}
	if n := len(s.crowded); n > 0 {
		r.Problems = append(r.Problems, fmt.Errorf("there is no room for %d Secrets, or for what they have now", n))
	}
	for _, k := range slices.SortedFunc(maps.Keys(s.objects), func(a, b key) int {
		return cmp.Or(strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
	}) {
		o := s.objects[k]
		if o.pair.secret != nil || o.pair.err != nil {
			r.Identities = append(r.Identities,
				report.Identity{Name: k.String(), NotAfter: o.pair.end(), Err: o.pair.err})
		}
		if !o.roots.end().IsZero() {
			r.Identities = append(r.Identities, report.Identity{Name: k.String() + caSuffix, NotAfter: o.roots.end()})
		}
		for _, err := range []error{o.roots.err, o.roots.note} {
			if err != nil {
				r.Problems = append(r.Problems, fmt.Errorf("roots of %s: %w", k, err))
			}
		}
	}
	return r
}

// metrics returns the metrics of a Report. The lock is held.
func (s *Source) metrics(up bool, callers int) *metrics.Set {
	var refused float64
	var end time.Time // the first end of a certificate
	for _, o := range s.objects {
		if o.pair.err != nil || o.roots.err != nil {
			refused++
		}
		if e := o.pair.end(); !e.IsZero() && (end.IsZero() || e.Before(end)) {
			end = e
		}
	}
	m := new(metrics.Set)
	gauge := func(name, help string, value float64, ok bool) {
		m.Gauge("svidkit_kubesecrets_"+name, help, func() (float64, bool) { return value, ok })
	}
	gauge("up", "Whether the API server is being followed.", metrics.Bool(up), true)
	gauge("secrets", "The number of Secrets with certificates.", float64(len(s.objects)), true)
	gauge("secrets_refused", "The number of Secrets whose content is not in use as it is now.", refused, true)
	gauge("secrets_without_room", "The number of Secrets for which there was no room.", float64(len(s.crowded)), true)
	gauge("bytes", "What is kept of all Secrets, in bytes.", float64(s.used), true)
	gauge("end_timestamp_seconds", "When the first of the certificates expires, in seconds since 1970.",
		float64(end.Unix()), !end.IsZero())
	gauge("callers", "The number of callers whose rights are known.", float64(callers), true)
	return m
}
