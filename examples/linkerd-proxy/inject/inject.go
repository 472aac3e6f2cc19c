// Package inject adds an identity to the proxy in a pod of a Linkerd mesh: environment variables, a memory volume for
// the key, and a token. It refuses pods that cannot have one. An [Injector] is a function, and the handler of a
// mutating admission webhook.
//
//	injector, err := inject.New(inject.Config{
//		Mesh:         linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"},
//		TrustAnchors: anchorsPEM,
//	})
//	if err != nil { … }
//	mux.Handle("POST /inject", injector) // HTTPS, in a MutatingWebhookConfiguration for pods
//
// [Injector.Inject] does the same for one object, for example in an operator's pipe.
//
// # Which objects
//
// A Pod, or an object with a pod template: Deployment, ReplicaSet, ReplicationController, DaemonSet, StatefulSet, Job
// and CronJob. Among its containers or init containers must be one with the name of the proxy, linkerd-proxy unless
// Config says otherwise. An object without one gets nothing: another step adds the proxy.
//
// The annotation linkerd.io/identity of the pod, or of the pod template, is enabled or disabled; without it,
// [Config.Disabled] decides. The effective value is written back. If it is disabled, nothing else is added. Refused
// are: another value; enabled when [Config.Unsupported] says that the control plane has no identity service; and
// enabled on an object that is not a pod, such as a Service, or on a Deployment outside its template.
//
// # What a pod gets
//
// With [linkerdname.Mesh.FirstDesign] these are the names of the protocol's first design, and otherwise the names
// that Linkerd's proxies read:
//
//	first design                                  Linkerd's proxies
//	LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB    LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS (PEM, not base64)
//	LINKERD2_PROXY_IDENTITY_STORE_DIR             LINKERD2_PROXY_IDENTITY_DIR
//	LINKERD2_PROXY_IDENTITY_TOKEN_FILE            LINKERD2_PROXY_IDENTITY_TOKEN_FILE
//	LINKERD2_PROXY_LOCAL_IDENTITY_NAME            LINKERD2_PROXY_IDENTITY_LOCAL_NAME
//	LINKERD2_PROXY_IDENTITY_ADDR, _IDENTITY       LINKERD2_PROXY_IDENTITY_SVC_ADDR, _NAME
//	LINKERD2_PROXY_DESTINATION_ADDR, _IDENTITY    LINKERD2_PROXY_DESTINATION_SVC_ADDR, _NAME
//	                                              LINKERD2_PROXY_POLICY_SVC_ADDR, _NAME
//	volume linkerd-identity-store                 volume linkerd-identity-end-entity
//
// With [Config.DownwardAPI] the kubelet composes the name from the pod's namespace and account, as with Linkerd's
// injector, so that one template serves several namespaces and accounts.
//
// The volume is in memory, and only the proxy mounts it. The identity service's own pod reaches the service at
// localhost, without a name. LINKERD2_PROXY_POD_NAMESPACE and the variables that begin with LINKERD2_PROXY_TLS_ are
// removed. The annotation linkerd.io/trust-root-sha256 has the digest of the trust anchors, and the label
// linkerd.io/control-plane-ns the namespace of the control plane, by which [Injector.Identity] recognizes its pods.
//
// The token is a projected one for [Config.TokenAudience]. With an empty audience it is the service account's token
// as Kubernetes mounts it. The API server accepts that token too, so an identity service could use it there. A pod
// that turns off automountServiceAccountToken is then refused.
//
// An ephemeral container that mounts a volume of the proxy is refused if the rules of the webhook include
// pods/ephemeralcontainers.
//
// # What it does not do
//
// It adds no proxy container and no iptables rules, and nothing at all to a pod whose identity is disabled: a proxy
// without a name has no identity. So the ports, the user and the probes of the proxy are the existing container's. It
// ignores the annotation linkerd.io/identity-mode of the first releases of Linkerd. Names carry no UID of the service
// account, as no proxy reads such names: an account that is deleted because its token was stolen, and created again,
// has the same identity.
package inject

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// ErrRefused is wrapped by the errors of objects that must not get an identity. Their texts tell the cluster's user
// what to change.
var ErrRefused = errors.New("injection refused")

// Annotations and labels of pods.
const (
	annotation = "linkerd.io/identity"
	rootDigest = "linkerd.io/trust-root-sha256"
	owner      = "linkerd.io/control-plane-ns"
	skipPorts  = "config.linkerd.io/skip-inbound-ports"
)

const (
	enabled  = "enabled"
	disabled = "disabled"

	accountToken = "/var/run/secrets/kubernetes.io/serviceaccount"
	tokenFolder  = "/var/run/secrets/tokens"
	tokenVolume  = "linkerd-identity-token"
	store        = "linkerd-identity-end-entity"
	seedStore    = "linkerd-identity-store"

	// bytes of PEM: Linux starts no process with a variable of 128 KiB, and one form is base64
	maxAnchors = 90 << 10
	// values of an object: one of 3 bytes takes a hundred times that in memory
	maxValues    = 50_000
	minTokenLife = 10 * 60   // seconds, Kubernetes' minimum
	tokenLife    = 24 * 3600 // seconds
)

// Config configures [New]. Mesh and TrustAnchors are required.
type Config struct {
	Mesh linkerdname.Mesh

	// TrustAnchors are the root certificates that the proxies trust, in PEM. See [Injector.SetTrustAnchors].
	TrustAnchors []byte

	// ClusterDomain is the suffix of the DNS names of services. Empty means cluster.local.
	ClusterDomain string

	// Disabled leaves pods without the annotation linkerd.io/identity without an identity.
	Disabled bool

	// Unsupported says that the control plane has no identity service: pods with the annotation enabled are refused,
	// and others get no identity.
	Unsupported bool

	// TokenAudience is the audience of the token that the proxy sends to the identity service, such as
	// identity.l5d.io. Empty means the token of the service account; see the package comment.
	TokenAudience string

	// TokenSeconds is how long such a token is valid, in seconds; the kubelet renews it. 0 means a day; at least 600.
	TokenSeconds int

	// DownwardAPI makes the kubelet compose the workload's name, $(_pod_sa).$(_pod_ns).serviceaccount.identity.…,
	// from the pod's fields, in variables that precede the name's. In the first design they are K8S_SA and K8S_NS.
	DownwardAPI bool

	// Container is the name of the proxy's container. Empty means linkerd-proxy.
	Container string

	// Logger gets the webhook's refusals (Info). Nil discards them.
	Logger *slog.Logger
}

// Injector decides about the identities of pods. [New] makes one. It is safe for concurrent use.
type Injector struct {
	cfg                    Config
	certifier, destination string // names
	anchors                atomic.Pointer[[]byte]
	reviews                *limit.Limiter
	reading                *limit.Shares[string] // bytes, by peer
}

// New returns an Injector. An error names the missing or wrong field.
func New(cfg Config) (*Injector, error) {
	fail := func(err error) (*Injector, error) { return nil, fmt.Errorf("inject: %w", err) }
	in := &Injector{cfg: cfg, reviews: limit.New(limit.Options{Concurrent: maxReviews, Queue: maxWaiting}),
		reading: limit.NewShares[string](maxReading, maxPeer)}
	if in.cfg.ClusterDomain == "" {
		in.cfg.ClusterDomain = "cluster.local"
	}
	if in.cfg.Container == "" {
		in.cfg.Container = "linkerd-proxy"
	}
	if in.cfg.TokenSeconds == 0 {
		in.cfg.TokenSeconds = tokenLife
	}
	in.cfg.Logger = ratelog.Patient(in.cfg.Logger)
	switch {
	case !kube.ValidName(in.cfg.ClusterDomain):
		return fail(fmt.Errorf("the cluster domain %.300q is not an RFC 1123 subdomain", cfg.ClusterDomain))
	case !kube.ValidLabel(in.cfg.Container):
		return fail(fmt.Errorf("the name of a container, %.300q, is not an RFC 1123 label", cfg.Container))
	case in.cfg.TokenSeconds < minTokenLife:
		return fail(fmt.Errorf("a token of %d seconds: Kubernetes grants at least %d", cfg.TokenSeconds, minTokenLife))
	}
	var err error
	if in.certifier, err = cfg.Mesh.Certifier(); err != nil {
		return fail(err)
	}
	if in.destination, err = cfg.Mesh.Destination(); err != nil {
		return fail(err)
	}
	if err := in.SetTrustAnchors(cfg.TrustAnchors); err != nil {
		return nil, err
	}
	return in, nil
}

// SetTrustAnchors replaces the trust anchors, in PEM of at most 90 KiB, which it copies. Pods that are admitted from
// now on get them. On an error, which wraps [spiffe.ErrTooLarge] for a larger value, the previous ones stay.
func (in *Injector) SetTrustAnchors(anchors []byte) error {
	if _, err := pki.ParseCertificatesPEM(anchors); err != nil {
		return fmt.Errorf("inject: trust anchors: %w", err)
	}
	if len(anchors) > maxAnchors {
		return fmt.Errorf("inject: trust anchors: %d bytes, and the variable of a proxy has room for %d: leave out "+
			"roots that issue for no proxy: %w",
			len(anchors), maxAnchors, spiffe.ErrTooLarge)
	}
	anchors = bytes.Clone(anchors)
	in.anchors.Store(&anchors)
	return nil
}

// Injection is the result for an object.
type Injection struct {
	// Enabled says that the pods have an identity, and Identity which one.
	Enabled  bool
	Identity string

	// Patch is a JSON Patch (RFC 6902) for the object. It is nil if nothing changes.
	Patch []byte
}

// Inject returns the injection for a Kubernetes object in JSON. The namespace is the request's, for an object that
// names none. Errors wrap [ErrRefused], or describe an unreadable part of the object.
func (in *Injector) Inject(object []byte, namespace string) (*Injection, error) {
	o, err := in.read(object, namespace)
	if err != nil {
		return nil, err
	}
	switch {
	case o.pod == nil && o.own[annotation] == enabled:
		return nil, refuse("%s is %s on the %s, which is not a pod: set it on pods or in their template", annotation,
			enabled, o)
	case o.template && o.own[annotation] == enabled:
		return nil, refuse("%s is %s on the %s itself, which is not a pod: set it in the annotations of its pod "+
			"template", annotation, enabled, o)
	case o.pod == nil, o.proxy == nil:
		return &Injection{}, nil
	}
	value := o.annotations[annotation]
	switch value {
	case "":
		if value = enabled; in.cfg.Disabled || in.cfg.Unsupported {
			value = disabled
		}
	case enabled:
		if in.cfg.Unsupported {
			return nil, refuse("%s is %s on the %s, and the control plane has no identity service: set it to %s",
				annotation, enabled, o, disabled)
		}
	case disabled:
	default:
		return nil, refuse("%s is %.100q on the %s: it is %s or %s", annotation, value, o, enabled, disabled)
	}
	out := &Injection{Enabled: value == enabled}
	p := &patch{}
	notes := maps.Clone(o.annotations)
	if notes == nil {
		notes = map[string]string{}
	}
	notes[annotation] = value
	if out.Enabled {
		if out.Identity, err = in.cfg.Mesh.Name(o.namespace, o.account); err != nil {
			return nil, refuse("the service account %.300q of the %s has no identity: %v", o.account, o, err)
		}
		anchors := *in.anchors.Load()
		sum := sha256.Sum256(anchors)
		notes[rootDigest] = hex.EncodeToString(sum[:])
		if err := in.enable(p, o, out.Identity, anchors); err != nil {
			return nil, err
		}
		labels := maps.Clone(o.labels)
		if labels == nil {
			labels = map[string]string{}
		}
		if labels[owner] != in.cfg.Mesh.ControlNamespace {
			labels[owner] = in.cfg.Mesh.ControlNamespace
			p.add(o.path+"/metadata/labels", labels)
		}
	}
	if !maps.Equal(notes, o.annotations) {
		p.add(o.path+"/metadata/annotations", notes)
	}
	if len(p.ops) > 0 {
		if o.noMetadata {
			p.ops = slices.Insert(p.ops, 0, operation{"add", o.path + "/metadata", json.RawMessage("{}")})
		}
		if out.Patch, err = json.Marshal(p.ops); err != nil {
			return nil, fmt.Errorf("inject: %w", err)
		}
	}
	return out, nil
}

// enable adds the identity to a pod.
func (in *Injector) enable(p *patch, o *object, identity string, anchors []byte) error {
	mesh, seed := in.cfg.Mesh, in.cfg.Mesh.FirstDesign
	volume, dir := store, "/var/run/linkerd/identity/end-entity"
	name, sa, ns := "LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "_pod_sa", "_pod_ns"
	if seed {
		volume, dir = seedStore, "/var/run/linkerd/identity"
		name, sa, ns = "LINKERD2_PROXY_LOCAL_IDENTITY_NAME", "K8S_SA", "K8S_NS"
	}
	if in.cfg.DownwardAPI {
		identity = "$(" + sa + ").$(" + ns + ")" + strings.TrimPrefix(identity, o.account+"."+o.namespace)
	}
	env := o.proxy.env()
	env.remove(func(name string) bool {
		return name == "LINKERD2_PROXY_POD_NAMESPACE" || strings.HasPrefix(name, "LINKERD2_PROXY_TLS_")
	})
	token := accountToken + "/token"
	if in.cfg.TokenAudience != "" {
		token = tokenFolder + "/" + tokenVolume
	} else if o.noToken {
		return refuse("the %s turns off automountServiceAccountToken, so that the proxy has no token: turn it on, "+
			"or configure the injector with an audience for a token of its own", o)
	}
	certifier := o.namespace == mesh.ControlNamespace && o.account == "linkerd-identity"
	host := func(service string) string {
		return service + "." + mesh.ControlNamespace + ".svc." + in.cfg.ClusterDomain
	}
	if seed {
		env.set("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB", base64.StdEncoding.EncodeToString(anchors))
		env.set("LINKERD2_PROXY_IDENTITY_STORE_DIR", dir)
		env.set("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", token)
		env.set(name, identity)
		env.service("LINKERD2_PROXY_DESTINATION_ADDR", host("linkerd-destination")+":8086",
			"LINKERD2_PROXY_DESTINATION_IDENTITY", in.destination)
		if certifier {
			env.service("LINKERD2_PROXY_IDENTITY_ADDR", "localhost:8080", "LINKERD2_PROXY_IDENTITY_IDENTITY", "")
		} else {
			env.service("LINKERD2_PROXY_IDENTITY_ADDR", host("linkerd-identity")+":8080",
				"LINKERD2_PROXY_IDENTITY_IDENTITY", in.certifier)
		}
	} else {
		env.set("LINKERD2_PROXY_IDENTITY_DIR", dir)
		env.set("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS", string(anchors))
		env.set("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", token)
		env.set(name, identity)
		env.service("LINKERD2_PROXY_DESTINATION_SVC_ADDR", host("linkerd-dst-headless")+".:8086",
			"LINKERD2_PROXY_DESTINATION_SVC_NAME", in.destination)
		env.service("LINKERD2_PROXY_POLICY_SVC_ADDR", host("linkerd-policy")+".:8090",
			"LINKERD2_PROXY_POLICY_SVC_NAME", in.destination)
		if certifier {
			env.service("LINKERD2_PROXY_IDENTITY_SVC_ADDR", "localhost.:8080", "LINKERD2_PROXY_IDENTITY_SVC_NAME", "")
			env.set("LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS", "8080") // its clients have no identity yet
		} else {
			env.service("LINKERD2_PROXY_IDENTITY_SVC_ADDR", host("linkerd-identity-headless")+".:8080",
				"LINKERD2_PROXY_IDENTITY_SVC_NAME", in.certifier)
		}
	}
	if in.cfg.DownwardAPI {
		env.before(name, ns, "metadata.namespace")
		env.before(name, sa, "spec.serviceAccountName")
	}
	if env.changed {
		p.add(o.proxy.path+"/env", env.list)
	}

	mounts, volumes := o.proxy.mounts(), o.volumes()
	if err := in.guard(o); err != nil {
		return err
	}
	mounts.set(volume, map[string]any{"name": volume, "mountPath": dir})
	volumes.set(volume, map[string]any{"name": volume, "emptyDir": map[string]string{"medium": "Memory"}})
	switch {
	case in.cfg.TokenAudience != "":
		mounts.set(tokenVolume, map[string]any{"name": tokenVolume, "mountPath": tokenFolder, "readOnly": true})
		volumes.set(tokenVolume, map[string]any{"name": tokenVolume, "projected": map[string]any{"sources": []any{
			map[string]any{"serviceAccountToken": map[string]any{"audience": in.cfg.TokenAudience,
				"expirationSeconds": in.cfg.TokenSeconds, "path": tokenVolume}},
		}}})
	case !o.template && mounts.at(accountToken) == nil:
		// Kubernetes has mounted it into the containers that existed before the proxy.
		for _, c := range o.containers {
			if m := c.mounts().at(accountToken); m != nil {
				mounts.list, mounts.changed = append(mounts.list, *m), true
				break
			}
		}
	}
	if mounts.changed {
		p.add(o.proxy.path+"/volumeMounts", mounts.list)
	}
	if volumes.changed {
		p.add(o.path+"/spec/volumes", volumes.list)
	}
	return nil
}

// guard refuses an object in which another container mounts a volume of the proxy.
func (in *Injector) guard(o *object) error {
	own := func(m entry) bool {
		return m.name == store || m.name == seedStore || m.name == tokenVolume && in.cfg.TokenAudience != ""
	}
	for _, c := range o.containers {
		if c != o.proxy && slices.ContainsFunc(c.mounts().list, own) {
			return refuse("the container %.300q of the %s mounts the proxy's volume, which has its key or its "+
				"token: remove the mount", c.name, o)
		}
	}
	return nil
}

// Identity returns the name that a client must expect of a pod at a port, which is also the SNI name, as the
// destination service sends it to clients' proxies. It is empty for a pod without one: a pod of another control
// plane, with a disabled identity, or whose proxy is skipped at the port (config.linkerd.io/skip-inbound-ports). The
// pod is the API server's JSON. An error describes the unreadable part.
func (in *Injector) Identity(pod []byte, port uint16) (string, error) {
	o, err := in.read(pod, "")
	if err != nil {
		return "", err
	}
	if o.pod == nil || o.template {
		return "", fmt.Errorf("inject: the %s is not a pod", o)
	}
	if o.proxy == nil || o.labels[owner] != in.cfg.Mesh.ControlNamespace || o.annotations[annotation] == disabled {
		return "", nil
	}
	for s := range strings.SplitSeq(o.annotations[skipPorts], ",") {
		s = strings.TrimSpace(s)
		if s == "" {
			continue
		}
		low, high, isRange := strings.Cut(s, "-")
		if !isRange {
			high = low
		}
		a, err1 := strconv.ParseUint(low, 10, 16)
		b, err2 := strconv.ParseUint(high, 10, 16)
		if err1 != nil || err2 != nil || a > b {
			return "", fmt.Errorf("inject: %.100q in %s of the %s is not a port or a range of ports", s, skipPorts, o)
		}
		if uint64(port) >= a && uint64(port) <= b {
			return "", nil
		}
	}
	name, err := in.cfg.Mesh.Name(o.namespace, o.account)
	if err != nil {
		return "", fmt.Errorf("inject: the %s: %w", o, err)
	}
	return name, nil
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("inject: %w: %s", ErrRefused, fmt.Sprintf(format, args...))
}

// tree is a JSON object whose members keep their text.
type tree map[string]json.RawMessage

// object is the relevant part of a Kubernetes object.
type object struct {
	kind, name, namespace, account string
	own                            map[string]string // annotations of the object
	path                           string            // to the pod template; empty for a pod
	template                       bool
	pod                            tree // the spec; nil if there are no pods
	labels, annotations            map[string]string
	noMetadata, noToken            bool
	containers                     []*container
	proxy                          *container
}

func (o *object) String() string {
	if o.name == "" {
		return fmt.Sprintf("%.100s in the namespace %.100q", o.kind, o.namespace)
	}
	return fmt.Sprintf("%.100s %.300q in the namespace %.100q", o.kind, o.name, o.namespace)
}

// templates maps API groups and kinds with pods to the path of their template.
var templates = map[[2]string][]string{
	{"", "Pod"}:                   nil,
	{"", "ReplicationController"}: {"spec", "template"},
	{"apps", "Deployment"}:        {"spec", "template"},
	{"apps", "ReplicaSet"}:        {"spec", "template"},
	{"apps", "DaemonSet"}:         {"spec", "template"},
	{"apps", "StatefulSet"}:       {"spec", "template"},
	{"batch", "Job"}:              {"spec", "template"},
	{"batch", "CronJob"}:          {"spec", "jobTemplate", "spec", "template"},
}

// read parses an object. Names of members are case-sensitive, and duplicates are refused: another reader could pick
// the other one.
func (in *Injector) read(data []byte, namespace string) (*object, error) {
	r := strictjson.NewReader(data)
	r.Skip()
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("inject: the object: %w", err)
	}
	o, d := &object{namespace: namespace}, &decoder{}
	top := d.tree("", data)
	o.kind = d.text(top, "kind")
	meta := d.member(top, "metadata")
	o.name = d.text(meta, "name")
	if o.name == "" {
		o.name = d.text(meta, "generateName")
	}
	if ns := d.text(meta, "namespace"); ns != "" {
		o.namespace = ns
	}
	o.own = d.texts(meta, "annotations")
	group, _, ok := strings.Cut(d.text(top, "apiVersion"), "/")
	if !ok {
		group = "" // as in v1
	}
	way, pods := templates[[2]string{group, o.kind}]
	if pods {
		at := top
		for _, step := range way {
			at = d.member(at, step)
			o.path += "/" + step
		}
		o.template = len(way) > 0
		if o.template {
			meta = d.member(at, "metadata")
		}
		o.noMetadata = meta == nil
		o.labels, o.annotations = d.texts(meta, "labels"), d.texts(meta, "annotations")
		if o.pod = d.member(at, "spec"); o.pod == nil && d.err == nil {
			d.err = errors.New("it has no spec for pods")
		}
		if o.account = d.text(o.pod, "serviceAccountName"); o.account == "" {
			o.account = "default"
		}
		o.noToken = string(bytes.TrimSpace(o.pod["automountServiceAccountToken"])) == "false"
		for _, member := range []string{"containers", "initContainers", "ephemeralContainers"} {
			for i, raw := range d.list(o.pod, member) {
				c := &container{path: fmt.Sprintf("%s/spec/%s/%d", o.path, member, i), tree: d.tree(member, raw)}
				c.name = d.text(c.tree, "name")
				for _, list := range []string{"env", "volumeMounts"} {
					d.entries(c.tree, list)
				}
				o.containers = append(o.containers, c)
				if c.name == in.cfg.Container && o.proxy == nil && member != "ephemeralContainers" {
					o.proxy = c
				}
			}
		}
		d.entries(o.pod, "volumes")
	}
	if o.kind == "" && d.err == nil {
		d.err = errors.New("it has no kind")
	}
	if d.err != nil {
		return nil, fmt.Errorf("inject: the %s: %w", o, d.err)
	}
	return o, nil
}

type container struct {
	name, path string
	tree       tree
}

func (c *container) env() *entries    { return new(decoder).entries(c.tree, "env") }
func (c *container) mounts() *entries { return new(decoder).entries(c.tree, "volumeMounts") }
func (o *object) volumes() *entries   { return new(decoder).entries(o.pod, "volumes") }

// decoder parses members and keeps the first error.
type decoder struct {
	err    error
	values int // read so far
}

func (d *decoder) decode(name string, raw json.RawMessage, into any) {
	if len(raw) == 0 || d.err != nil {
		return
	}
	if d.values += values(raw); d.values > maxValues {
		d.err = fmt.Errorf("its %q has too many values: there are more than %d", name, maxValues)
		return
	}
	if err := json.Unmarshal(raw, into); err != nil {
		d.err = fmt.Errorf("its %q is not what Kubernetes has there", name)
	}
}

// values returns the number of direct values in a JSON object or array, or 1 for other values. The JSON is valid.
func values(raw []byte) int {
	n, depth := 1, 0
	for i := 0; i < len(raw); i++ {
		switch raw[i] {
		case '"':
			for i++; i < len(raw) && raw[i] != '"'; i++ {
				if raw[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		case ',':
			if depth == 1 {
				n++
			}
		}
	}
	return n
}

func (d *decoder) tree(name string, raw json.RawMessage) (t tree) {
	d.decode(name, raw, &t)
	return t
}

func (d *decoder) member(t tree, name string) tree { return d.tree(name, t[name]) }

func (d *decoder) text(t tree, name string) (s string) {
	d.decode(name, t[name], &s)
	return s
}

func (d *decoder) texts(t tree, name string) (m map[string]string) {
	d.decode(name, t[name], &m)
	return m
}

func (d *decoder) list(t tree, name string) (l []json.RawMessage) {
	d.decode(name, t[name], &l)
	return l
}

func (d *decoder) entries(t tree, name string) *entries {
	out := &entries{list: []entry{}}
	for _, raw := range d.list(t, name) {
		e := entry{raw: raw}
		of := d.tree(name, raw)
		e.name, e.path = d.text(of, "name"), d.text(of, "mountPath")
		out.list = append(out.list, e)
	}
	return out
}

// entries is a list of objects with names, such as variables and volumes.
type entries struct {
	list    []entry
	changed bool
}

type entry struct {
	name, path string
	raw        json.RawMessage
}

// MarshalJSON implements [json.Marshaler].
func (e entry) MarshalJSON() ([]byte, error) { return e.raw, nil }

// at returns the entry mounted at path.
func (l *entries) at(path string) *entry {
	if i := slices.IndexFunc(l.list, func(e entry) bool { return e.path == path }); i >= 0 {
		return &l.list[i]
	}
	return nil
}

func (l *entries) remove(f func(name string) bool) {
	n := len(l.list)
	l.list = slices.DeleteFunc(l.list, func(e entry) bool { return f(e.name) })
	l.changed = l.changed || len(l.list) != n
}

// put replaces the entry with the name, or appends value.
func (l *entries) put(name string, value any) {
	raw, err := json.Marshal(value)
	if err != nil {
		panic(err) // maps and strings
	}
	i := slices.IndexFunc(l.list, func(e entry) bool { return e.name == name })
	if i < 0 {
		l.list, l.changed = append(l.list, entry{name: name, raw: raw}), true
		return
	}
	if !sameJSON(l.list[i].raw, raw) {
		l.list[i], l.changed = entry{name: name, raw: raw}, true
	}
	n := len(l.list) // of two equal names the last would count
	l.list = slices.Concat(l.list[:i+1], slices.DeleteFunc(slices.Clone(l.list[i+1:]), func(e entry) bool {
		return e.name == name
	}))
	l.changed = l.changed || len(l.list) != n
}

// set puts the variable, volume or mount.
func (l *entries) set(name string, value any) {
	if s, ok := value.(string); ok {
		value = map[string]string{"name": name, "value": s}
	}
	l.put(name, value)
}

// before sets a variable to a pod field, and places it before another one: the kubelet expands only earlier variables
// in a value.
func (l *entries) before(name, part, field string) {
	at := func(name string) int { return slices.IndexFunc(l.list, func(e entry) bool { return e.name == name }) }
	if k := at(part); k < 0 || k > at(name) {
		l.remove(func(n string) bool { return n == part })
		l.list = slices.Insert(l.list, 0, entry{name: part})
	}
	from := map[string]any{"fieldRef": map[string]string{"apiVersion": "v1", "fieldPath": field}}
	l.put(part, map[string]any{"name": part, "valueFrom": from})
}

// service sets the variables for a service's address and name; without a name it removes the second.
func (l *entries) service(addrVar, addr, nameVar, name string) {
	l.set(addrVar, addr)
	if name != "" {
		l.set(nameVar, name)
		return
	}
	l.remove(func(n string) bool { return n == nameVar })
}

// sameJSON reports whether two objects are equal, regardless of the order of their members.
func sameJSON(a, b json.RawMessage) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	ax, err1 := json.Marshal(x)
	by, err2 := json.Marshal(y)
	return err1 == nil && err2 == nil && bytes.Equal(ax, by)
}

// patch is a JSON Patch.
type patch struct{ ops []operation }

type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// add sets a value, possibly replacing another one.
func (p *patch) add(path string, value any) { p.ops = append(p.ops, operation{"add", path, value}) }
