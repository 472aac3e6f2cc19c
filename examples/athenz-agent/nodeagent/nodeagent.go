// Package nodeagent is the agent of a Kubernetes node that gives its pods Athenz identities.
//
// The kubelet is the source of truth: the agent looks up the requesting pod, has the signing service sign an identity
// document for it, and registers it with ZTS, Athenz's certificate authority. ZTS asks the provider, which verifies
// the document and compares it with the live pod at the API server; package authn/athenz implements the provider and
// the signing service.
//
//	agent, err := nodeagent.New(nodeagent.Config{
//		Volumes: "/var/athenz/volumes", Pods: kubelet, Signer: signing,
//		ZTS: athenz.Options{
//			Endpoint: caclient.Endpoint{URL: "https://zts.athenz.svc:4443", TrustDomain: td, RootsFile: roots},
//		},
//		Provider: provider, Suffix: "svc.cluster.local",
//	})
//	…
//	server := &unixsocket.Server{Path: "/var/athenz/agent/agent.sock", SocketMode: 0o666, Handler: agent}
//
// A pod obtains its identity with package sidecar.
//
// # What it promises
//
// Documents and keys stay in memory, and never appear in a log or an error. The agent never shows ZTS a superseded
// certificate again, as ZTS would revoke the instance for good.
//
// # What it does not do
//
// It mounts nothing into pods: [Volumes] keeps the files for a FlexVolume driver, such as examples/athenz-agent.
package nodeagent

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	keyBits        = 2048
	defaultTimeout = 30 * time.Second

	// Each identity costs an RSA key, a handshake and ZTS's work.
	issuesAtOnce   = 8
	issuesWaiting  = 1024
	perHandle      = 0.2 // per second
	perHandleBurst = 10

	perHandleWaiting = 8 // requests, including the one being answered

	maxCommonName = 64 // bytes, by RFC 5280

	kubeletWait = 5 * time.Second // for a refresh, which must work without the kubelet
)

// Config configures [New]. All fields up to Suffix are required.
type Config struct {
	// Volumes maps handles to pods.
	Volumes Volumes

	// Pods describes the pods of this node: see [athenz.NewKubelet].
	Pods athenz.PodSource

	// Signer signs the documents: see [athenz.NewSigningClient].
	Signer athenz.Signer

	// ZTS has the endpoint and the roots of ZTS. The agent sets the Instance, its proof (a document or the
	// Certificate), and WithServiceToken.
	ZTS ztsclient.Options

	// Provider is the name of the provider's service, which ZTS asks about instances.
	Provider athenzname.Service

	// Suffix is the suffix of the provider's DNS names, such as svc.cluster.local.
	Suffix string

	// Mapping maps namespaces to domains, as for the provider.
	Mapping athenzname.Mapping

	// SPIFFE returns the SPIFFE ID in a pod's certificate, such as Service.ID or Service.IDIn of its service; the
	// zero ID means none. A nil func means Service.ID.
	SPIFFE func(s athenzname.Service, pod *athenz.Pod) (spiffe.ID, error)

	// NewKey returns the RSA key of 2048 bits for a certificate, such as one made in advance. Nil means a new key.
	NewKey func() (*rsa.PrivateKey, error)

	// Timeout bounds how long a request waits; 0 means 30 seconds.
	Timeout time.Duration

	// Logger gets each identity (Info) and each failure (Warn). Nil means no logs.
	Logger *slog.Logger
}

type agent struct {
	cfg   Config
	limit *limit.Limiter

	mu   sync.Mutex
	busy map[string]*turn // by handle
}

// turn lets one request for a handle proceed at a time.
type turn struct {
	token chan struct{}
	users int
}

// New returns the handler from which pods obtain their identity, over a Unix socket that is mounted into them. POST
// /v1/init/HANDLE gives the first identity, and POST /v1/refresh/HANDLE each further one. GET /healthz needs no
// handle. An error names the wrong field.
//
// An answer is a JSON object with the members ntoken, which is a service token, and keyPEM, certPEM and caCertPEM,
// which are base64 of PEM: an RSA key of 2048 bits in PKCS#1, the chain, and the roots. The body of a refresh has
// keyPEM and certPEM of the current identity, in base64 or as plain PEM.
//
// A pod proves itself by the handle of its volume; see [Volumes]. The first identity is given once for each volume:
// after it has reached the pod, a second init gets 403 until the last delivered identity has expired. A refresh
// accepts the latest certificate, or the one before in case the latest was lost on the way. It refuses older ones, as
// ZTS would revoke the instance for good. A pod whose address has changed gets a certificate for the new one.
func New(cfg Config) (http.Handler, error) {
	cfg.Logger = ratelog.Patient(cfg.Logger)
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	if cfg.SPIFFE == nil {
		cfg.SPIFFE = func(s athenzname.Service, _ *athenz.Pod) (spiffe.ID, error) { return s.ID() }
	}
	if cfg.NewKey == nil {
		cfg.NewKey = func() (*rsa.PrivateKey, error) { return rsa.GenerateKey(rand.Reader, keyBits) }
	}
	a := &agent{cfg: cfg, busy: map[string]*turn{}, limit: limit.New(limit.Options{
		Concurrent: issuesAtOnce, Queue: issuesWaiting, CallerRate: perHandle, CallerBurst: perHandleBurst,
	})}
	err := cfg.Provider.Check()
	switch {
	case err != nil:
		err = fmt.Errorf("provider: %w", err)
	case cfg.Volumes == "" || cfg.Pods == nil || cfg.Signer == nil:
		err = errors.New("one of Volumes, Pods and Signer is missing")
	case !kube.ValidName(cfg.Suffix):
		err = fmt.Errorf("the Suffix %.100q is not a DNS name, such as svc.cluster.local", cfg.Suffix)
	case cfg.ZTS.Token != nil || cfg.ZTS.TokenFile != "" || cfg.ZTS.Certificate != nil:
		err = errors.New("ZTS has a Token, a TokenFile or a Certificate: the proof is that of each pod")
	case cfg.Timeout < 0:
		err = fmt.Errorf("the Timeout is %v", cfg.Timeout)
	default:
		// An error in the AdminDomain or in ZTS shows with any pod.
		var any athenzname.Service
		if any, err = cfg.Mapping.Service("default", "default"); err == nil {
			_, err = ztsclient.New(a.request(athenzname.Instance{Provider: cfg.Provider, Service: any, ID: "any",
				Suffix: cfg.Suffix}, "", nil))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("nodeagent: new: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", jsonapi.Healthy)
	mux.HandleFunc("POST /v1/init/{handle}", func(w http.ResponseWriter, r *http.Request) { a.serve(w, r, a.first) })
	mux.HandleFunc("POST /v1/refresh/{handle}", func(w http.ResponseWriter, r *http.Request) { a.serve(w, r, a.next) })
	return mux, nil
}

// request returns the ZTS request for an instance: a document registers it, its certificate refreshes it.
func (a *agent) request(i athenzname.Instance, document string, certificate *tls.Certificate) ztsclient.Options {
	o := a.cfg.ZTS
	o.Instance, o.WithServiceToken = i, true
	o.Token = func(context.Context) (string, error) { return document, nil }
	o.Certificate = func() *tls.Certificate { return certificate }
	if o.Logger == nil {
		o.Logger = a.cfg.Logger
	}
	return o
}

// refusal is an error answer of the agent.
type refusal struct {
	code int
	text string // for the pod
	err  error  // for the log
}

func (e *refusal) Error() string {
	if e.err == nil {
		return e.text
	}
	return e.text + ": " + e.err.Error()
}

func (e *refusal) Unwrap() error { return e.err }

func failed(code int, text string, err error) error { return &refusal{code, text, err} }

// serve answers a request. work returns the pod's answer and the record of it.
func (a *agent) serve(w http.ResponseWriter, r *http.Request, work func(http.ResponseWriter, *http.Request,
	string) (*agentapi.Given, *volumeContext, error)) {
	handle := r.PathValue("handle")
	ctx, cancel := context.WithTimeout(r.Context(), a.cfg.Timeout)
	defer cancel()
	given, known, err := a.exclusive(ctx, handle, func() (*agentapi.Given, *volumeContext, error) {
		given, known, err := work(w, r.WithContext(ctx), handle)
		if err != nil {
			return nil, nil, err
		}
		// A pod whose identity was lost on the way may ask again.
		if ctx.Err() != nil {
			return nil, nil, failed(http.StatusInternalServerError, "the identity came too late", context.Cause(ctx))
		}
		jsonapi.Write(w, given)
		if http.NewResponseController(w).Flush() == nil && r.Context().Err() == nil {
			known.Delivered, known.Expires = true, known.ends
			err = a.cfg.Volumes.save(handle, known)
		}
		return given, known, err
	})
	switch {
	case err == nil:
		a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "identity given",
			slog.String("path", r.Pattern), slog.String("service", known.Domain+"."+known.Service), slog.String(
				"instance", known.InstanceID))
	case given != nil:
		a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "identity given, and not written down",
			slog.String("err", bearer.Redact(err.Error(), handle)))
	default:
		// File paths could contain the handle.
		a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "identity not given", slog.String("path", r.Pattern),
			slog.String("err", bearer.Redact(err.Error(), handle)))
		answerError(w, err)
	}
}

func answerError(w http.ResponseWriter, err error) {
	if over, ok := errors.AsType[*limit.Error](err); ok {
		w.Header().Set("Retry-After", strconv.Itoa(int(over.RetryAfter/time.Second)+1))
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	}
	if e, ok := errors.AsType[*refusal](err); ok {
		http.Error(w, e.text, e.code)
		return
	}
	http.Error(w, "the identity could not be obtained", http.StatusInternalServerError)
}

// exclusive calls f. Calls for the same handle wait for each other.
func (a *agent) exclusive(ctx context.Context, handle string, f func() (*agentapi.Given, *volumeContext, error)) (
	*agentapi.Given, *volumeContext, error) {
	if !agentapi.IsHandle(handle) || !a.cfg.Volumes.there(handle) {
		return nil, nil, failed(http.StatusBadRequest, "there is no volume with this handle", nil)
	}
	a.mu.Lock()
	t := a.busy[handle]
	if t == nil {
		t = &turn{token: make(chan struct{}, 1)}
		a.busy[handle] = t
	}
	crowd := t.users >= perHandleWaiting
	if !crowd {
		t.users++
	}
	a.mu.Unlock()
	if crowd {
		return nil, nil, &limit.Error{Reason: limit.QueueFull, RetryAfter: time.Second}
	}
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(a.busy, handle)
		}
	}()
	select {
	case t.token <- struct{}{}:
		defer func() { <-t.token }()
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	return f()
}

// first gives the first identity.
func (a *agent) first(_ http.ResponseWriter, r *http.Request, handle string) (*agentapi.Given, *volumeContext, error) {
	ctx := r.Context()
	data, err := a.cfg.Volumes.data(handle)
	if err != nil {
		return nil, nil, failed(http.StatusBadRequest, "the data of the volume cannot be read", err)
	}
	switch old, err := a.cfg.Volumes.context(handle); {
	case err == nil && old.Delivered && time.Now().Before(old.Expires):
		return nil, nil, failed(http.StatusForbidden,
			"the identity of this volume was given already; it is refreshed with itself", nil)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, nil, failed(http.StatusInternalServerError, "what is known of the volume cannot be read", err)
	}
	given, known, signed, err := a.register(ctx, handle, data)
	if err != nil && signed {
		// The pod's next document must differ from this one, so it must not be signed in the same second. Only this
		// pod's requests wait for that.
		_ = renew.Sleep(context.WithoutCancel(ctx), time.Second)
	}
	return given, known, err
}

// register registers the pod of a volume, in one of the slots. It also reports whether there was a document, which
// may now be used up.
func (a *agent) register(ctx context.Context, handle string, data volumeData) (given *agentapi.Given,
	known *volumeContext, signed bool, err error) {
	if err := a.limit.Acquire(ctx, handle); err != nil {
		return nil, nil, false, err
	}
	defer a.limit.Release()
	pod, err := a.cfg.Pods(ctx, data.Namespace, data.Name)
	switch {
	case errors.Is(err, athenz.ErrNoPod):
		return nil, nil, false, failed(http.StatusBadRequest, "the kubelet does not know the pod of the volume", err)
	case err != nil:
		return nil, nil, false, failed(http.StatusInternalServerError, "the kubelet cannot be asked", err)
	case kube.PodEnded(pod.Phase, pod.Deleting) != "":
		return nil, nil, false, failed(http.StatusForbidden, "the pod is to have no identity: "+kube.PodEnded(
			pod.Phase, pod.Deleting), nil)
	case data.UID != "" && pod.UID != data.UID:
		return nil, nil, false, failed(http.StatusForbidden,
			"the volume is that of a pod that was deleted, and not of the present one of the same name", nil)
	}
	instance, err := a.instance(pod)
	if err != nil {
		return nil, nil, false, failed(http.StatusInternalServerError, "the pod cannot have an identity, or not yet",
			err)
	}
	document, err := a.cfg.Signer(ctx, athenz.PodSubject{Namespace: pod.Namespace, Pod: pod.Name,
		Service: instance.Service, IP: pod.IP})
	if err != nil {
		return nil, nil, false, failed(http.StatusInternalServerError, "the identity document could not be signed",
			err)
	}
	known, err = newContext(instance)
	if err == nil {
		given, err = a.issue(ctx, a.request(instance, document, nil), known)
	}
	if err == nil {
		err = a.cfg.Volumes.save(handle, known)
	}
	if err != nil {
		return nil, nil, true, failed(http.StatusInternalServerError, "the identity could not be obtained", err)
	}
	return given, known, true, nil
}

// instance returns a pod's instance in Athenz.
func (a *agent) instance(pod *athenz.Pod) (athenzname.Instance, error) {
	service, err := a.cfg.Mapping.Service(pod.Namespace, pod.ServiceAccount)
	if err != nil {
		return athenzname.Instance{}, err
	}
	if !pod.IP.IsValid() {
		return athenzname.Instance{}, errors.New("the pod has no address yet")
	}
	if n := len(service.String()); n > maxCommonName { // ZTS identifies a refreshing service by it
		return athenzname.Instance{}, fmt.Errorf(
			"the service %q has %d bytes, and a common name %d at most: shorten the name of the namespace or of "+
				"the service account",
			service, n, maxCommonName)
	}
	id, err := a.cfg.SPIFFE(service, pod)
	if err != nil {
		return athenzname.Instance{}, err
	}
	i := athenzname.Instance{Provider: a.cfg.Provider, Service: service, ID: pod.Name, Suffix: a.cfg.Suffix,
		IPs: []netip.Addr{pod.IP}, SPIFFE: id}
	return i, i.Check()
}

// next gives the identity that follows the current one.
func (a *agent) next(w http.ResponseWriter, r *http.Request, handle string) (*agentapi.Given, *volumeContext, error) {
	known, err := a.cfg.Volumes.context(handle)
	if err != nil {
		return nil, nil, failed(http.StatusBadRequest, "this volume has no identity yet: begin with init", err)
	}
	instance, err := known.instance(a.cfg.Suffix)
	if err != nil {
		return nil, nil, failed(http.StatusBadRequest, "what is known of the volume is not valid", err)
	}
	var held agentapi.Held
	body, err := conns.ReadBody(w, r, jsonapi.MaxAnswer)
	if err != nil || json.Unmarshal(body, &held) != nil {
		return nil, nil, failed(http.StatusBadRequest, "the body is not the JSON of an identity", nil)
	}
	current, err := pki.ParseCredentialPEM(held.Cert, held.Key)
	if err != nil {
		return nil, nil, failed(http.StatusBadRequest, "the body has no certificate with its key", err)
	}
	leaf := current.Leaf()
	if s, err := athenzname.ParseService(strings.ToLower(leaf.Subject.CommonName)); leaf.Subject.CommonName != "" &&
		(err != nil || s != instance.Service) {
		return nil, nil, failed(http.StatusBadRequest, "the certificate is that of another service", err)
	}
	if !slices.Contains(known.Serials, leaf.SerialNumber.Text(16)) {
		return nil, nil, failed(http.StatusBadRequest,
			"the certificate was superseded by one that this volume was given later; use that", nil)
	}
	if time.Now().After(leaf.NotAfter) {
		return nil, nil, failed(http.StatusBadRequest, "the certificate has expired: begin with init", nil)
	}
	if err := a.limit.Acquire(r.Context(), handle); err != nil {
		return nil, nil, err
	}
	defer a.limit.Release()
	// Whether or not the answer of ZTS arrives, presenting this certificate supersedes the one before.
	known.Serials = []string{leaf.SerialNumber.Text(16)}
	err = a.cfg.Volumes.save(handle, known)
	var given *agentapi.Given
	if err == nil {
		given, err = a.issue(r.Context(), a.request(instance, "", current.TLSCertificate()), known)
	}
	if err != nil && a.moved(r.Context(), handle, &instance) {
		given, err = a.issue(r.Context(), a.request(instance, "", current.TLSCertificate()), known)
	}
	if err == nil {
		err = a.cfg.Volumes.save(handle, known)
	}
	if err != nil {
		return nil, nil, failed(http.StatusInternalServerError, "the identity could not be refreshed", err)
	}
	return given, known, nil
}

// moved reports whether an instance's pod has a new address, as with a new sandbox, and records it. The provider
// refuses the old one.
func (a *agent) moved(ctx context.Context, handle string, i *athenzname.Instance) bool {
	ctx, cancel := context.WithTimeout(ctx, kubeletWait)
	defer cancel()
	data, err := a.cfg.Volumes.data(handle)
	if err != nil {
		return false
	}
	pod, err := a.cfg.Pods(ctx, data.Namespace, data.Name)
	if err != nil || !pod.IP.IsValid() || slices.Contains(i.IPs, pod.IP) {
		return false
	}
	i.IPs = []netip.Addr{pod.IP}
	return true
}

// issue obtains a certificate for a new key, and records it in known.
func (a *agent) issue(ctx context.Context, request ztsclient.Options, known *volumeContext) (*agentapi.Given, error) {
	want, err := ztsclient.Expectation(request.Instance, request.TrustDomain)
	if err != nil {
		return nil, err
	}
	key, err := a.cfg.NewKey()
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{CommonName: request.Instance.Service.String(), SANs: want.Names()})
	if err != nil {
		return nil, err
	}
	ca, err := ztsclient.New(request)
	if err != nil {
		return nil, err
	}
	chain, err := ca.Sign(ctx, csr, 0)
	if err != nil {
		return nil, err
	}
	bundles, err := ca.FetchBundles(ctx)
	if err != nil {
		return nil, fmt.Errorf("roots of the certificate: %w", err)
	}
	if len(chain) > 0 && chain[0] != nil && !pki.PublicKeysEqual(chain[0].PublicKey, key.Public()) {
		return nil, fmt.Errorf("the answer of ZTS: %w", pki.ErrKeyMismatch)
	}
	if _, err := want.Verify(chain, bundles, spiffe.ClientRole, time.Now()); err != nil {
		return nil, fmt.Errorf("the answer of ZTS: %w", err)
	}
	b, err := bundles.Bundle(request.TrustDomain)
	if err != nil {
		return nil, err
	}
	known.Serials, known.ends = []string{chain[0].SerialNumber.Text(16)}, chain[0].NotAfter
	known.setIPs(request.Instance)
	if before := request.Certificate(); before != nil {
		known.Serials = append(known.Serials, before.Leaf.SerialNumber.Text(16))
	}
	return &agentapi.Given{
		Token: ca.ServiceToken(),
		Key:   pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
		Cert:  pki.MarshalCertificatesPEM(chain...),
		CA:    pki.MarshalCertificatesPEM(slices.Collect(b.X509Authorities())...),
	}, nil
}
