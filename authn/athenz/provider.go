package athenz

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/spiffe"
)

// ProviderConfig configures [NewProvider]. All fields up to Suffix are required.
type ProviderConfig struct {
	// Service is the provider's own name, such as k8s.admin.athenz-callback. The provider refuses confirmations for
	// any other.
	Service athenzname.Service

	// ZTS proves that a caller is ZTS, and must prove no other caller: see [ClientCertificate].
	ZTS authn.Authenticator

	// Verifier verifies the documents.
	Verifier *Verifier

	// Pods looks up the live pod: see [NewAPIServer].
	Pods PodSource

	// Suffix is the suffix of DNS names, such as svc.cluster.local.
	Suffix string

	// Mapping maps namespaces to domains.
	Mapping athenzname.Mapping

	// TrustDomain is the trust domain of SPIFFE IDs of the form spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.NAME,
	// whose namespace must be the pod's. Zero means that only spiffe://DOMAIN/sa/NAME is allowed.
	TrustDomain spiffe.TrustDomain

	// FirstUse reports whether a document, identified by its hash, is used for the first time, and remembers it until
	// it has expired. An error refuses the document this time. Nil means the memory of this process. Replicas of a
	// provider must share one, such as in a ConfigMap, as examples/athenz-provider does; otherwise each accepts a
	// document once.
	FirstUse func(ctx context.Context, document [32]byte, expires time.Time) (bool, error)

	// Logger gets confirmations (Info) and refusals with their reasons (Warn). Nil means no logs.
	Logger *slog.Logger
}

type provider struct{ cfg ProviderConfig }

// maxUsed exceeds the number of documents that a cluster uses in 15 minutes.
const maxUsed = 1 << 16

// NewProvider returns the handler of a provider's callback, which tells ZTS whether an instance is genuine. POST
// /instance (old name: /identity) is for a new instance, which presents a document; POST /refresh is for an instance
// that has a certificate. GET /healthz needs no certificate. Serve the handler with TLS that requests client
// certificates. The error says which field is wrong.
//
// An instance is confirmed if all of this holds:
//
//  1. the caller is ZTS, and asks for this provider;
//  2. the document is valid and was not used before;
//  3. the pod exists, has not ended, and is not being deleted;
//  4. its service account, by the Mapping, is the service of the request and of the document;
//  5. its address is the document's, and the addresses of the request are its own;
//  6. the instance ID is the name or the UID of the pod; only an old ZTS, which sends a document, may send none;
//  7. each DNS name and URI of the request is one of the service or of the instance.
//
// A refresh has no document: the instance ID is the pod's name in the namespace of the domain, and 3 to 7 apply. If a
// refresh does have a document, it must be valid too.
func NewProvider(cfg ProviderConfig) (http.Handler, error) {
	cfg.Logger = ratelog.Patient(cfg.Logger)
	p, mux := &provider{cfg}, http.NewServeMux()
	err := cfg.Service.Check()
	switch {
	case err != nil:
	case cfg.ZTS == nil || cfg.Verifier == nil || cfg.Pods == nil:
		err = errors.New("one of ZTS, Verifier and Pods is missing")
	case cfg.Verifier.keys.dir == "":
		err = errors.New("the Verifier is the zero one; NewVerifier makes one")
	case !kube.ValidName(cfg.Suffix):
		err = fmt.Errorf("the Suffix %.100q is not a DNS name, such as svc.cluster.local", cfg.Suffix)
	default:
		_, err = cfg.Mapping.Domain("default") // the error says what is wrong with the AdminDomain
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: new provider: %w", err)
	}
	if cfg.FirstUse == nil {
		used := limit.NewUses[athenzname.Service](maxUsed, maxUsed)
		p.cfg.FirstUse = func(_ context.Context, document [32]byte, expires time.Time) (bool, error) {
			n, err := used.Count(document, cfg.Service, expires)
			if err != nil {
				err = fmt.Errorf("%d documents were used lately, and no more can be remembered: %w", maxUsed, err)
			}
			return n == 1, err
		}
	}
	mux.HandleFunc("GET /healthz", jsonapi.Healthy)
	refreshes := map[string]bool{"POST /instance": false, "POST /identity": false, "POST /refresh": true}
	for pattern, refresh := range refreshes {
		mux.Handle(pattern, authn.Require(cfg.ZTS, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			p.confirm(w, r, refresh)
		}), cfg.Logger))
	}
	return mux, nil
}

// confirmation is the request and the answer of ZTS. It does not print: the attestation data is a secret.
type confirmation struct {
	Provider        string            `json:"provider"`
	Domain          string            `json:"domain"`
	Service         string            `json:"service"`
	AttestationData string            `json:"attestationData"`
	Attributes      map[string]string `json:"attributes,omitempty"`
}

func readConfirmation(w http.ResponseWriter, r *http.Request) (*confirmation, error) {
	c := new(confirmation)
	if err := readBody(w, r, c); err != nil {
		return nil, malformed("the body is not the JSON of a confirmation, or has more than 64 KiB: %w", err)
	}
	if c.Provider == "" || c.Domain == "" || c.Service == "" {
		return nil, malformed("one of provider, domain and service is missing or empty")
	}
	return c, nil
}

// refusal is the reason not to confirm an instance. ZTS passes its text on to the instance.
type refusal struct {
	code int
	err  error
}

func (e *refusal) Error() string { return e.err.Error() }

func refused(format string, args ...any) error {
	return &refusal{http.StatusForbidden, fmt.Errorf(format, args...)}
}

func malformed(format string, args ...any) error {
	return &refusal{http.StatusBadRequest, fmt.Errorf(format, args...)}
}

func (p *provider) confirm(w http.ResponseWriter, r *http.Request, refresh bool) {
	c, err := readConfirmation(w, r)
	if err == nil {
		err = p.check(r.Context(), c, refresh)
	}
	log := func(level slog.Level, message string, more ...slog.Attr) {
		attrs := []slog.Attr{slog.Bool("refresh", refresh), slog.String("caller", callerName(r))}
		if c != nil {
			attrs = append(attrs, slog.String("service", kube.OneLine(c.Domain+"."+c.Service, 300)),
				slog.String("instance", kube.OneLine(c.Attributes["instanceId"], 300)))
		}
		p.cfg.Logger.LogAttrs(r.Context(), level, message, append(attrs, more...)...)
	}
	if err != nil {
		log(slog.LevelWarn, "instance refused", slog.Any("err", err))
		if e, ok := errors.AsType[*refusal](err); ok {
			http.Error(w, kube.OneLine(e.Error(), 512), e.code)
			return
		}
		http.Error(w, "the instance could not be verified now; ask again", http.StatusServiceUnavailable)
		return
	}
	log(slog.LevelInfo, "instance confirmed")
	jsonapi.Write(w, c)
}

// check returns nil if the instance is genuine, a refusal if it is not, and another error if check could not find
// out.
func (p *provider) check(ctx context.Context, c *confirmation, refresh bool) error {
	service := athenzname.Service{Domain: strings.ToLower(c.Domain), Name: strings.ToLower(c.Service)}
	if !strings.EqualFold(c.Provider, p.cfg.Service.String()) {
		return refused("the confirmation is for another provider")
	}
	if err := service.Check(); err != nil {
		return malformed("%w", err)
	}
	namespace, err := p.cfg.Mapping.Namespace(service.Domain)
	if err != nil {
		return refused("%w", err)
	}
	id := c.Attributes["instanceId"]
	name := id
	var doc *document
	switch {
	case c.AttestationData != "":
		if doc, err = p.document(c.AttestationData, service, namespace); err != nil {
			return err
		}
		name = doc.subject.Pod
	case !refresh:
		return malformed("the attestation data is missing or empty")
	case name == "":
		return malformed("the attribute instanceId is missing: it is the name of the pod")
	}
	pod, err := p.pod(ctx, namespace, name, service)
	if err != nil {
		return err
	}
	switch {
	case doc != nil && pod.IP != doc.subject.IP:
		return refused("the address of the pod is not that of its document")
	case id != "" && id != pod.Name && id != pod.UID:
		return refused("the instance ID is neither the name nor the UID of the pod")
	}
	if err := p.names(c, service, pod); err != nil || doc == nil {
		return err
	}
	return p.once(ctx, doc)
}

// once returns a refusal if a document was used before. It is the last check, so that only a good use counts.
func (p *provider) once(ctx context.Context, doc *document) error {
	first, err := p.cfg.FirstUse(ctx, doc.use, doc.expires.Add(leeway))
	if err == nil && !first {
		err = refused("the document was used before")
	}
	return err
}

func (p *provider) document(text string, service athenzname.Service, namespace string) (*document, error) {
	doc, err := p.cfg.Verifier.verify(text)
	switch {
	case errors.Is(err, ErrDocument):
		return nil, refused("%w", err)
	case err != nil:
		return nil, err
	case doc.subject.Service != service:
		return nil, refused("the document is for another service")
	case doc.subject.Namespace != namespace:
		return nil, refused("the namespace of the document is not that of its domain")
	}
	return doc, nil
}

// pod returns the live pod, if it may have an identity as this service.
func (p *provider) pod(ctx context.Context, namespace, name string, service athenzname.Service) (*Pod, error) {
	pod, err := p.cfg.Pods(ctx, namespace, name)
	if errors.Is(err, ErrNoPod) {
		return nil, refused("%w", err)
	}
	if err != nil {
		return nil, err
	}
	is, err := p.cfg.Mapping.Service(pod.Namespace, pod.ServiceAccount)
	switch {
	case err != nil:
		return nil, refused("%w", err)
	case pod.Namespace != namespace || pod.Name != name:
		return nil, errors.New("the source of pods answered with another pod")
	case is != service:
		return nil, refused("the service account of the pod is not the service")
	case kube.PodEnded(pod.Phase, pod.Deleting) != "":
		return nil, refused("the pod is to have no identity: %s", kube.PodEnded(pod.Phase, pod.Deleting))
	case !pod.IP.IsValid():
		return nil, refused("the pod has no address")
	}
	return pod, nil
}

// names returns a refusal if the signing request asks for a name that is not the pod's.
func (p *provider) names(c *confirmation, service athenzname.Service, pod *Pod) error {
	for _, text := range parts(c.Attributes["sanIP"]) {
		if ip, err := netip.ParseAddr(text); err != nil || !slices.Contains(pod.IPs, ip) {
			return refused("the request has the address %.64q, which is not the pod's", text)
		}
	}
	name := service.DNSName(p.cfg.Suffix)
	own := []string{name, "*." + name}
	ids := []string{pod.Name, cmp.Or(pod.UID, pod.Name)}
	for _, id := range ids {
		own = append(own, athenzname.Instance{ID: id, Suffix: p.cfg.Suffix}.InstanceName())
	}
	for _, name := range parts(c.Attributes["sanDNS"]) {
		if !slices.Contains(own, strings.ToLower(name)) {
			return refused("the request has the DNS name %.253q, which is neither the service's nor the "+
				"instance's", name)
		}
	}
	for _, uri := range parts(c.Attributes["sanURI"]) {
		if rest, ok := strings.CutPrefix(uri, "athenz://instanceid/"+p.cfg.Service.String()+"/"); ok &&
			slices.Contains(ids, rest) {
			continue
		}
		id, err := spiffe.ParseID(uri)
		if err == nil {
			var s athenzname.Service
			var namespace string
			s, namespace, err = athenzname.ServiceOfID(id)
			if err == nil && s == service && (namespace == "" || namespace == pod.Namespace &&
				id.TrustDomain() == p.cfg.TrustDomain) {
				continue
			}
		}
		return refused("the request has the URI %.300q, which is neither the service's nor the instance's", uri)
	}
	return nil
}

func parts(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}
