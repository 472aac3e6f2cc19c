// Package podcert is a Kubernetes signer: it gives pods the certificates that their manifests request, and publishes
// the roots for them. The kubelet makes a pod's key, asks for the certificate, renews it, and writes both into a
// volume, so that a pod has a SPIFFE identity without an agent, a sidecar, a driver or an init container.
//
//	signer, err := podcert.New(podcert.Options{SignerName: "example.org/spiffe", TrustDomain: td, CA: authority})
//	…
//	err = signer.Run(ctx)
//
// It needs Kubernetes 1.37, whose API certificates.k8s.io/v1 has PodCertificateRequests and ClusterTrustBundles. The
// program examples/ca runs it with the flag -pod-signer. A pod has these sources in a projected volume, and reads the
// directory with package filesource:
//
//   - podCertificate: {signerName: example.org/spiffe, keyType: ECDSAP256, credentialBundlePath:
//     credential-bundle.private-key.x509.pem}
//   - clusterTrustBundle: {signerName: example.org/spiffe, labelSelector: {matchLabels:
//     {k8s.spiffe.io/peer-trust-domain: example.org}}, path: example.org.spiffe-trust-bundle.x509.pem}
//
// # Who gets which identity
//
// The API server vouches for namespace, service account, pod and node of a request, and lets a node ask only for its
// own pods (admission plugin NodeRestriction, which must be on). The identity is made from these; only the key is
// taken from the signing request. Annotations are the pod author's claims: a request with any is denied, as the API
// demands of signers that do not know them. A user who may create pods with a service account can have its identity.
//
// # Answers
//
// A certificate lasts as long as the request allows (maxExpirationSeconds), at most Options.TTL and at least an hour,
// which is the API's bound. The kubelet renews it when 50 to 70 % of that are left, at a random moment. A request is
// Denied if it has annotations, a key that this library does not certify (UnsupportedKeyType), or a pod without an
// identity; it is Failed if it can never be certified. Other failures may pass: the request waits, and is tried
// again.
//
// Any number of replicas may run. Each signs a request once, and again only if the API server rejects the certificate
// for so long that it has become too old. The pod gets the first accepted answer; other replicas' certificates are
// not used. Requests for other signers are never read.
//
// The requests of each node and of each namespace are served at their own rate, so that a flood from one does not
// delay the others. Waiting requests take at most 64 MiB, and 4 MiB for a node; more are read again every minute.
//
// # Bundles
//
// The ClusterTrustBundle SIGNER:spiffe:TRUST-DOMAIN, such as example.org:spiffe:example.org, has the roots of the CA
// through rotations; each trust domain in Options.Federated has one too. Changes, and repairs after others change or
// delete an object, are written within ten seconds. An object with a higher sequence number comes from a replica that
// knows more, and is left for ten minutes. A bundle without roots cannot be written, so the last one stays: delete it
// by hand. The bundle of a trust domain that is no longer federated stays too.
//
// A kubelet updates volumes with a new root within a minute or two if they select by signer and labels as above. If
// they name the object, it may take five minutes longer.
//
// # Rights
//
// The service account of the program needs these rules in a ClusterRole, with the name of its signer:
//
//	rules:
//	- {apiGroups: [certificates.k8s.io], resources: [podcertificaterequests], verbs: [list, watch]}
//	- {apiGroups: [certificates.k8s.io], resources: [podcertificaterequests/status], verbs: [patch]}
//	- {apiGroups: [certificates.k8s.io], resources: [clustertrustbundles], verbs: [create, patch]}
//	- {apiGroups: [certificates.k8s.io], resources: [signers], resourceNames: [example.org/spiffe],
//	   verbs: [sign, attest]}
//
// All service accounts may list and watch ClusterTrustBundles, by a binding that Kubernetes keeps.
package podcert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Options configure a [Signer]. [New] copies them. A zero field means its default.
type Options struct {
	SignerName  string             // such as example.org/spiffe; required
	TrustDomain spiffe.TrustDomain // of the CA; required
	CA          ca.Signer          // required

	// ID returns the identity of a pod, from the facts that the API server vouches for: all members but Cluster are
	// set. An error denies the request, and its text is readable in the cluster; an error that says that it passes
	// (see [spiffe.ErrNotReady]) makes the request wait. ID is called from many goroutines, and must not block. Nil
	// means spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT.
	ID func(spiffe.Pod) (spiffe.ID, error)

	TTL time.Duration // the longest lifetime of a certificate, an hour at least; 0 means 24 hours

	// NodeRate and NamespaceRate are the requests per second served for each node and each namespace; 0 means 200 and
	// 1,000, and less than 0 no limit.
	NodeRate, NamespaceRate float64

	// Federated returns the bundles of other trust domains that pods may trust, such as the method Bundles of a
	// *federation.Manager. It is called every ten seconds. Nil means none.
	Federated func() *spiffe.BundleSet

	// APIServer is the URL of the API server (https or, on loopback, http), and HTTPClient authenticates this program
	// there. Empty and nil mean this process's cluster and service account.
	APIServer  string
	HTTPClient *http.Client

	// Logger gets answers (Info), and why there are none (Warn). Lines that pods can cause are limited. Nil means
	// silence.
	Logger *slog.Logger
}

const (
	group       = "certificates.k8s.io"
	backdate    = 2 * time.Minute // of certificates, for peers whose clocks are slow; the API allows five
	maxHeld     = 64 << 20        // bytes of waiting requests
	maxHeldEach = 4 << 20         // of a node
	concurrent  = 32              // attempts
	attemptTime = 30 * time.Second
	freshFor    = 4 * time.Minute // after its begin, while the API takes a certificate: it allows five
)

// Signer answers the requests of pods and keeps the bundles. [New] makes one.
type Signer struct {
	opts   Options
	api    *kube.Client
	log    *ratelog.Log
	roots  bundles
	totals map[string]*metrics.Counter
	set    metrics.Set

	mu       sync.Mutex
	loop     renew.Loop[*entry]
	requests map[string]*entry // by UID; answered ones stay until the API server shows the answer
	round    int               // of the list
	room     *limit.Shares[string]
	missed   bool // there was no room for all requests
	granted  bool // the API server has accepted an answer
	nodes    turns
	spaces   turns
	state    report.Upstream // of the requests
}

// New checks the options. It starts nothing, and does not contact the API server.
func New(o Options) (*Signer, error) {
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("podcert: invalid Options: %w", err)
	}
	api, err := kube.New(kube.Options{URL: o.APIServer, Client: o.HTTPClient})
	if err != nil {
		return nil, fmt.Errorf("podcert: %w", err)
	}
	o.TTL = cmp.Or(o.TTL, 24*time.Hour)
	if o.ID == nil {
		o.ID = func(p spiffe.Pod) (spiffe.ID, error) {
			return o.TrustDomain.WorkloadID("ns", p.Namespace, "sa", p.ServiceAccount)
		}
	}
	s := &Signer{
		opts: o, api: api, log: ratelog.New(o.Logger, 0),
		requests: make(map[string]*entry), room: limit.NewShares[string](maxHeld, maxHeldEach),
		state: report.Upstream{Name: "requests of pods to " + o.SignerName},
		nodes: newTurns(cmp.Or(o.NodeRate, 200)), spaces: newTurns(cmp.Or(o.NamespaceRate, 1000)),
	}
	s.loop = renew.Loop[*entry]{Mu: &s.mu, Attempt: s.attempt, Slots: concurrent, FailingLast: true}
	s.roots.init(s)
	s.totals = s.set.Counters("svidkit_ca_pod_requests_total", "The number of requests of pods that were "+
		"answered, by the answer; lost are those that another replica has answered, or that have gone.",
		"answer", "Issued", "Denied", "Failed", "lost")
	s.set.Gauge("svidkit_ca_pod_requests_waiting", "The number of requests of pods that wait for an answer.",
		func() (float64, bool) {
			n, _ := s.waiting()
			return float64(n), true
		})
	s.set.Gauge("svidkit_ca_pod_requests_oldest_timestamp_seconds", "When the oldest request of a pod that waits "+
		"was made, in seconds since 1970.", func() (float64, bool) {
		_, oldest := s.waiting()
		return metrics.Seconds(oldest), !oldest.IsZero()
	})
	return s, nil
}

func (o *Options) check() error {
	domain, name, _ := strings.Cut(o.SignerName, "/")
	switch {
	case !kube.ValidName(domain) || !strings.Contains(domain, ".") || !kube.ValidName(name):
		return fmt.Errorf("the signer %.300q is not DOMAIN/NAME, such as example.org/spiffe", o.SignerName)
	case domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io"):
		return fmt.Errorf("the signer %q is one of Kubernetes itself", o.SignerName)
	case o.TrustDomain.IsZero():
		return fmt.Errorf("the trust domain: %w", spiffe.ErrZero)
	case o.CA == nil:
		return errors.New("CA is nil; a *ca.Authority is one")
	case o.TTL != 0 && o.TTL < time.Hour:
		return fmt.Errorf("the longest lifetime is %v, and the API server takes no certificate of less than an hour",
			o.TTL)
	}
	return nil
}

// Run answers requests and keeps the bundles up to date until ctx is done. Then it returns nil. Call it once.
func (s *Signer) Run(ctx context.Context) error {
	if s.api == nil {
		return errors.New("podcert: run: it is the zero Signer; New makes one")
	}
	defer s.api.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.loop.Run(ctx) })
	wg.Go(func() { s.roots.Run(ctx, s.roots.present.Run) })
	f := kubefollow.Follower[request]{
		API: s.api, Path: kube.Path("apis", group, "v1", "podcertificaterequests"), Kind: "PodCertificateRequest",
		Page: s.page, Event: s.event, State: s.follows,
		Query: url.Values{"fieldSelector": {"spec.signerName=" + s.opts.SignerName}, "timeoutSeconds": {"60"}},
	}
	f.Again = func() bool { // there may be room now for skipped requests
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.missed
	}
	f.Run(ctx)
	return nil
}

// follows notes why watching the API server failed; nil if it works.
func (s *Signer) follows(_ context.Context, err error, retryIn time.Duration) {
	s.note(err, retryIn)
	if err != nil {
		s.log.Warn("podcert: requests of pods cannot be followed", "API server", slog.Any("err", s.remedy(err)),
			slog.Duration("retry_in", retryIn))
	}
}

// note keeps the result of the last exchange with the API server or the CA, for the report.
func (s *Signer) note(err error, retryIn time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if err == nil {
		s.state = report.Upstream{Name: s.state.Name, OK: true, LastSuccess: now}
		return
	}
	if s.state.Failures == 0 {
		s.state.Since = now
	}
	s.state.OK, s.state.Err, s.state.NextAttempt = false, s.remedy(err), now.Add(retryIn)
	s.state.Failures++
}

// forbidden reports whether a right is missing. If it is the right to sign, the API server calls the request invalid.
func forbidden(err error) bool {
	status, ok := errors.AsType[*kube.StatusError](err)
	return ok && (kube.Forbidden(err) || status.Reason == "Invalid" &&
		strings.Contains(status.Message, "spec.signerName: Forbidden"))
}

// remedy adds to err how to grant missing rights.
func (s *Signer) remedy(err error) error {
	if forbidden(err) {
		return fmt.Errorf("%w; bind a ClusterRole that may list and watch podcertificaterequests, patch "+
			"podcertificaterequests/status, "+
			"and sign for the signer %s, to the service account of this program", err, s.opts.SignerName)
	}
	return err
}

// Report implements [report.Reporter]. The upstream is the API server and the CA, which answer requests. The log has
// the results for bundles.
func (s *Signer) Report() report.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	return report.Report{Upstreams: []report.Upstream{s.state}, Metrics: s.set.Write}
}
