package cafake

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// ZTSName is the common name by which [ZTS] proves itself to a provider.
const ZTSName = "zts.example.cloud"

// ZTSRules are what an operator of Athenz sets. [NewZTS] says which are set at first.
type ZTSRules struct {
	Services  []string // that are registered in their domains, and have consented to Providers
	Providers []string // that may launch instances
	Suffix    string   // of their DNS names

	// Callback is the provider's endpoint, with https and without /instance or /refresh. Empty means that the tokens
	// of Endpoint are good attestation data, and that every refresh is confirmed.
	Callback string

	TrustDomain string        // of SPIFFE IDs with a namespace
	TTL, MaxTTL time.Duration // of certificates
	ReadOnly    bool

	// Keys are the public keys that services have registered, by the service and the ID of the key, as in
	// "k8s.admin.athenz-callback v1". The owner of one is certified by it, without a provider.
	Keys map[string]crypto.PublicKey

	WithoutRoots bool // answers have no x509CertificateSigner

	// Observe, if set, is called with each registration and refresh that comes, and with the status of its answer: 0
	// before.
	Observe func(r *http.Request, code int)
}

// ZTS is a Fake of Athenz's certificate authority: it registers instances and refreshes their certificates, after the
// provider has confirmed them over mutual TLS, and revokes an instance for good when a certificate is presented that
// is not one of its last two. Certificates have the names of the CSR, but for URIs that begin with athenz://. It was
// built from the public documentation.
type ZTS struct {
	*Fake
	token string            // attestation data
	key   *ecdsa.PrivateKey // signs service tokens
	own   *pki.Credential

	mu      sync.Mutex
	rules   ZTSRules
	records map[string]*ztsRecord // by provider, instance and service
}

type ztsRecord struct {
	current, previous string // serial numbers
	revoked           bool
}

// NewZTS serves ZTS for the instance of [AthenzInstance]. At first its service and its provider are the only ones
// that are known, there is no callback, and certificates last for an hour if nothing is asked and for 30 days at
// most.
func NewZTS(t testing.TB, ca *spiffetest.CA, path string) *ZTS {
	t.Helper()
	z := &ZTS{Fake: New(t, ca, path), token: "attested-" + rand.Text(), records: map[string]*ztsRecord{}}
	instance := AthenzInstance(z.Fake)
	var err error
	if z.want, err = ztsclient.Expectation(instance, ca.TrustDomain()); err != nil {
		t.Fatalf("cafake: the path %q of the workload: %v", path, err)
	}
	if z.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatalf("cafake: %v", err)
	}
	z.own = z.Credential(ZTSName)
	z.rules = ZTSRules{
		Services: []string{instance.Service.String()}, Providers: []string{instance.Provider.String()}, Suffix: instance.Suffix,
		TrustDomain: "athenz.io", TTL: time.Hour, MaxTTL: 30 * 24 * time.Hour,
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /zts/v1/instance", z.register)
	mux.HandleFunc("POST /zts/v1/instance/{provider}/{domain}/{service}/{id}", z.refresh)
	mux.HandleFunc("POST /zts/v1/instance/{domain}/{service}/refresh", z.certifyOwner)
	mux.HandleFunc("DELETE /zts/v1/instance/{provider}/{domain}/{service}/{id}", z.remove)
	z.Serve(API{
		Name: "ZTS", Handler: mux, Refuse: refuseZTS, Token: func() string { return z.token },
		Signs:   func(r *http.Request) bool { return r.Method == http.MethodPost },
		Garbled: garbled(`{"x509Certificate":["x"],"instanceId":7}`),
		TLS: func(c *tls.Config) {
			base := c.Clone()
			c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
				one := base.Clone()
				one.ClientAuth, one.ClientCAs = tls.VerifyClientCertIfGiven, ca.Bundle().CertPool()
				return one, nil
			}
		},
		Endpoint: func(e *caclient.Endpoint) { e.Roots = z.Roots() },
	})
	return z
}

// AthenzInstance returns the instance that [NewZTS] knows for the path of a workload,
// /ns/NAMESPACE/sa/SERVICEACCOUNT: the pod SERVICEACCOUNT-0 with the address 10.1.2.3, below the provider
// k8s.admin.athenz-callback.
func AthenzInstance(f *Fake) athenzname.Instance {
	f.t.Helper()
	namespace, account, _ := f.id.Kubernetes()
	service, err := athenzname.Mapping{}.Service(namespace, account)
	if err != nil {
		f.t.Fatalf("cafake: the path %q of the workload: %v", f.id.Path(), err)
	}
	id, err := service.ID()
	if err != nil {
		f.t.Fatalf("cafake: the path %q of the workload: %v", f.id.Path(), err)
	}
	return athenzname.Instance{
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, Service: service, ID: account +
			"-0", Suffix: "svc.cluster.local", SPIFFE: id,
	}
}

// Credential returns a certificate of the CA with a common name, for the other parties: the provider's server, whose
// common name is that of its service, the signing service and the agents. It is for the host localhost, too.
func (z *ZTS) Credential(cn string) *pki.Credential {
	z.t.Helper()
	chain, key := z.ca.Certificate("/"+strings.ReplaceAll(cn, ":", "-"), func(c *x509.Certificate) {
		c.URIs, c.DNSNames, c.IPAddresses = nil, []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
		c.Subject = pkix.Name{CommonName: cn}
	})
	credential, err := pki.NewCredential(chain, key)
	if err != nil {
		z.t.Fatalf("cafake: %v", err)
	}
	return credential
}

// PublicKey returns the key that verifies the service tokens, with the ID 0 of sys.auth.zts.
func (z *ZTS) PublicKey() crypto.PublicKey { return z.key.Public() }

// Change edits the rules.
func (z *ZTS) Change(edit func(*ZTSRules)) {
	z.mu.Lock()
	defer z.mu.Unlock()
	edit(&z.rules)
}

// Revoked reports whether an instance was revoked, because a certificate was presented that had been superseded.
func (z *ZTS) Revoked(i athenzname.Instance) bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	r := z.records[recordOf(i)]
	return r != nil && r.revoked
}

func recordOf(i athenzname.Instance) string {
	return i.Provider.String() + " " + i.ID + " " + i.Service.String()
}

func (z *ZTS) now() ZTSRules {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.rules
}

// refuseZTS says a failure as ZTS does.
func refuseZTS(w http.ResponseWriter, _ *http.Request, e *caclient.Error) {
	ztsError(w, statusOf(w, e), e.Err.Error())
}

func ztsError(w http.ResponseWriter, code int, text string) {
	answerJSON(w, code, map[string]any{"code": code, "message": text})
}

// ztsRefusal is a status with its text.
type ztsRefusal struct {
	code int
	text string
}

func (e *ztsRefusal) Error() string { return e.text }

func refuseWith(code int, format string, args ...any) error {
	return &ztsRefusal{code, fmt.Sprintf(format, args...)}
}

// ztsRequest is the body of a registration and of a refresh.
type ztsRequest struct {
	Provider        string `json:"provider"`
	Domain          string `json:"domain"`
	Service         string `json:"service"`
	AttestationData string `json:"attestationData"`
	CSR             string `json:"csr"`
	Token           bool   `json:"token"`
	Minutes         int    `json:"expiryTime"`
	Namespace       string `json:"namespace"`
}

func (z *ZTS) register(w http.ResponseWriter, r *http.Request) {
	var in ztsRequest
	if !readJSON(r, &in) {
		ztsError(w, http.StatusBadRequest, "the body is not the JSON of a registration")
		return
	}
	z.issue(w, r, &in, "", nil)
}

func (z *ZTS) refresh(w http.ResponseWriter, r *http.Request) {
	var in ztsRequest
	if !readJSON(r, &in) {
		ztsError(w, http.StatusBadRequest, "the body is not the JSON of a refresh")
		return
	}
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		ztsError(w, http.StatusUnauthorized, "a refresh needs a client certificate")
		return
	}
	in.Provider, in.Domain, in.Service = r.PathValue("provider"), r.PathValue("domain"), r.PathValue("service")
	z.issue(w, r, &in, r.PathValue("id"), r.TLS.PeerCertificates[0])
}

// certifyOwner answers the owner of a registered key, which is proven by a service token.
func (z *ZTS) certifyOwner(w http.ResponseWriter, r *http.Request) {
	rules := z.now()
	if rules.Observe != nil {
		rules.Observe(r, 0)
		observed := &statusWriter{ResponseWriter: w}
		defer func() { rules.Observe(r, observed.code) }()
		w = observed
	}
	body, err := z.owner(r, &rules)
	if e, ok := errors.AsType[*ztsRefusal](err); ok {
		ztsError(w, e.code, e.text)
		return
	}
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		refuseZTS(w, r, e)
		return
	}
	if err != nil {
		ztsError(w, http.StatusInternalServerError, err.Error())
		return
	}
	answerJSON(w, http.StatusOK, body)
}

func (z *ZTS) owner(r *http.Request, rules *ZTSRules) (map[string]any, error) {
	var in struct {
		CSR       string `json:"csr"`
		Minutes   int    `json:"expiryTime"`
		KeyID     string `json:"keyId"`
		Namespace string `json:"namespace"`
	}
	service := athenzname.Service{Domain: strings.ToLower(r.PathValue("domain")),
		Name: strings.ToLower(r.PathValue("service"))}
	switch {
	case rules.ReadOnly:
		return nil, refuseWith(http.StatusBadRequest, "the server is in read-only mode")
	case !readJSON(r, &in):
		return nil, refuseWith(http.StatusBadRequest, "the body is not the JSON of a refresh by the owner of a key")
	case r.TLS == nil:
		return nil, refuseWith(http.StatusUnauthorized, "the connection is not TLS")
	}
	token, err := athenz.VerifyServiceToken(r.Context(), r.Header.Get("Athenz-Principal-Auth"),
		func(_ context.Context, s athenzname.Service, id string) (crypto.PublicKey, error) {
			if key := rules.Keys[s.String()+" "+id]; key != nil {
				return key, nil
			}
			return nil, errors.New("there is no such key")
		})
	switch {
	case err != nil:
		return nil, refuseWith(http.StatusUnauthorized, "%v", err)
	case token.Service != service:
		return nil, refuseWith(http.StatusBadRequest, "the principal %q is not the service %q", token.Service, service)
	}
	csr, err := pki.ParseCSRPEM([]byte(in.CSR))
	if err != nil {
		return nil, refuseWith(http.StatusBadRequest, "the CSR cannot be parsed: %v", err)
	}
	key := rules.Keys[service.String()+" "+in.KeyID]
	if key == nil || !pki.PublicKeysEqual(key, csr.PublicKey()) {
		return nil, refuseWith(http.StatusBadRequest, "the CSR is not by the key %q of the service", in.KeyID)
	}
	i := athenzname.Instance{Service: service, ID: "owner", Suffix: rules.Suffix} // which need not be in the CSR
	if err := z.checkCSR(csr, &i, &ztsRequest{Namespace: in.Namespace}, rules); err != nil {
		return nil, err
	}
	for _, san := range csr.SANs() {
		if san.Type == pki.DNS && san.Value != service.DNSName(rules.Suffix) && !strings.Contains(san.Value,
			".instanceid.athenz.") {
			return nil, refuseWith(http.StatusBadRequest, "the DNS name %q is not that of the service", san.Value)
		}
	}
	if csr.CommonName() == "" {
		return nil, refuseWith(http.StatusBadRequest, "the CSR has no common name")
	}
	lifetime := rules.TTL
	if in.Minutes > 0 {
		lifetime = time.Duration(in.Minutes) * time.Minute
	}
	chain, failure := z.sign(r.Context(), csr, csr.SANs(), min(lifetime, rules.MaxTTL))
	if failure != nil {
		return nil, failure
	}
	body := map[string]any{"name": service.String(), "certificate": string(pki.MarshalCertificatesPEM(chain...))}
	if !rules.WithoutRoots {
		body["caCertBundle"] = string(pki.MarshalCertificatesPEM(z.roots()...))
	}
	return body, nil
}

// issue answers a registration, or a refresh with a certificate.
func (z *ZTS) issue(w http.ResponseWriter, r *http.Request, in *ztsRequest, id string, presented *x509.Certificate) {
	rules := z.now()
	if rules.Observe != nil {
		rules.Observe(r, 0)
		observed := &statusWriter{ResponseWriter: w}
		defer func() { rules.Observe(r, observed.code) }()
		w = observed
	}
	body, code, err := z.identity(r, in, id, presented, &rules)
	if e, ok := errors.AsType[*ztsRefusal](err); ok {
		ztsError(w, e.code, e.text)
		return
	}
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		refuseZTS(w, r, e)
		return
	}
	if err != nil {
		ztsError(w, http.StatusInternalServerError, err.Error())
		return
	}
	if code == http.StatusCreated {
		w.Header().Set("Location", fmt.Sprintf("/zts/v1/instance/%s/%s/%s/%s", in.Provider, in.Domain, in.Service,
			body["instanceId"]))
	}
	answerJSON(w, code, body)
}

// statusWriter keeps the status of an answer.
type statusWriter struct {
	http.ResponseWriter
	code int
}

func (w *statusWriter) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

func (z *ZTS) identity(r *http.Request, in *ztsRequest, id string, presented *x509.Certificate,
	rules *ZTSRules) (map[string]any, int, error) {
	in.Provider, in.Domain, in.Service = strings.ToLower(in.Provider), strings.ToLower(in.Domain), strings.ToLower(
		in.Service)
	i, csr, err := z.instance(in, rules)
	if err != nil {
		return nil, 0, err
	}
	if presented != nil {
		if err := z.presents(presented, i, id); err != nil {
			return nil, 0, err
		}
	} else if in.AttestationData == "" {
		return nil, 0, refuseWith(http.StatusBadRequest, "there is no attestation data")
	}
	attributes, err := z.confirm(r, in, i, csr, presented != nil, rules)
	if err != nil {
		return nil, 0, err
	}
	if presented != nil && attributes["certRefresh"] != "false" {
		if err := z.turn(i, presented.SerialNumber.Text(16)); err != nil {
			return nil, 0, err
		}
	}
	lifetime := rules.TTL
	for _, minutes := range []int{in.Minutes, atoi(attributes["certExpiryTime"])} {
		if d := time.Duration(minutes) * time.Minute; d > 0 && (lifetime == rules.TTL || d < lifetime) {
			lifetime = d
		}
	}
	names := slices.DeleteFunc(csr.SANs(), func(n pki.SAN) bool {
		return n.Type == pki.URI && strings.HasPrefix(n.Value, "athenz://")
	})
	chain, failure := z.sign(r.Context(), csr, names, min(lifetime, rules.MaxTTL))
	if failure != nil {
		return nil, 0, failure
	}
	if len(chain) > 0 && chain[0] != nil && attributes["certRefresh"] != "false" {
		z.record(i, chain[0].SerialNumber.Text(16), presented == nil)
	}
	code := http.StatusOK
	if presented == nil {
		code = http.StatusCreated
	}
	answer := map[string]any{"provider": in.Provider, "name": i.Service.String(), "instanceId": i.ID,
		"x509Certificate": string(pki.MarshalCertificatesPEM(chain...))}
	if !rules.WithoutRoots {
		answer["x509CertificateSigner"] = string(pki.MarshalCertificatesPEM(z.roots()...))
	}
	if in.Token {
		token, err := athenz.SignServiceToken(athenz.ServiceToken{Service: i.Service, KeyID: "0", KeyService: "zts",
			Expires: time.Now().Add(24 * time.Hour)}, z.key)
		if err != nil {
			return nil, 0, err
		}
		answer["serviceToken"] = token
	}
	for _, control := range []string{"certUsage", "certExpiryTime", "certRefresh", "certSubjectOU", "certSSH"} {
		delete(attributes, control)
	}
	answer["attributes"] = attributes
	return answer, code, nil
}

func atoi(text string) int {
	n, _ := strconv.Atoi(text) // what is no number is no wish
	return n
}

// instance checks a request by the rules, in the order of ZTS.
func (z *ZTS) instance(in *ztsRequest, rules *ZTSRules) (athenzname.Instance, *pki.CSR, error) {
	i := athenzname.Instance{Service: athenzname.Service{Domain: in.Domain, Name: in.Service}, Suffix: rules.Suffix}
	var err error
	switch i.Provider, err = athenzname.ParseService(in.Provider); {
	case rules.ReadOnly:
		return i, nil, refuseWith(http.StatusBadRequest, "the server is in read-only mode")
	case err != nil, i.Service.Check() != nil:
		return i, nil, refuseWith(http.StatusBadRequest, "the provider, domain or service is not a name")
	case !slices.ContainsFunc(rules.Services,
		func(s string) bool { return strings.HasPrefix(s, i.Service.Domain+".") }):
		return i, nil, refuseWith(http.StatusNotFound, "the domain %q is not known", i.Service.Domain)
	case !slices.Contains(rules.Services, i.Service.String()):
		return i, nil, refuseWith(http.StatusBadRequest, "the service %q is not registered", i.Service)
	case !slices.Contains(rules.Providers, i.Provider.String()):
		return i, nil, refuseWith(http.StatusForbidden, "the provider %q may not launch the service", i.Provider)
	}
	csr, err := pki.ParseCSRPEM([]byte(in.CSR))
	if err != nil {
		return i, nil, refuseWith(http.StatusBadRequest, "the CSR cannot be parsed: %v", err)
	}
	if err := z.checkCSR(csr, &i, in, rules); err != nil {
		return i, nil, err
	}
	return i, csr, nil
}

// checkCSR checks the names of a CSR, and notes the ID of the instance.
func (z *ZTS) checkCSR(csr *pki.CSR, i *athenzname.Instance, in *ztsRequest, rules *ZTSRules) error {
	for _, san := range csr.SANs() {
		switch san.Type {
		case pki.URI:
			if rest, ok := strings.CutPrefix(san.Value, "athenz://instanceid/"+i.Provider.String()+"/"); ok {
				i.ID = rest
				continue
			}
			id, err := spiffe.ParseID(san.Value)
			switch {
			case err != nil:
				return refuseWith(http.StatusBadRequest, "the URI %q is not allowed", san.Value)
			case !i.SPIFFE.IsZero():
				return refuseWith(http.StatusBadRequest, "the CSR has two SPIFFE URIs")
			}
			i.SPIFFE = id
			service, namespace, err := athenzname.ServiceOfID(id)
			asked := in.Namespace
			if asked == "" {
				asked = "default"
			}
			if err != nil || service != i.Service || namespace != "" &&
				(id.TrustDomain().String() != rules.TrustDomain || namespace != asked) {
				return refuseWith(http.StatusBadRequest, "the SPIFFE URI %q is not that of the service", san.Value)
			}
		case pki.DNS:
			name, ok := strings.CutSuffix(san.Value, "."+rules.Suffix)
			if id, is := strings.CutSuffix(name, ".instanceid.athenz"); is && i.ID == "" {
				i.ID = id
			}
			if rest, wild := strings.CutPrefix(san.Value, "*."); !ok || wild &&
				rest != i.Service.DNSName(rules.Suffix) {
				return refuseWith(http.StatusBadRequest, "the DNS name %q is not below a suffix of the provider",
					san.Value)
			}
		}
	}
	switch cn := csr.CommonName(); {
	case i.ID == "":
		return refuseWith(http.StatusBadRequest, "the CSR has no instance ID")
	case cn == "" && i.SPIFFE.IsZero(), cn != "" && !strings.EqualFold(cn, i.Service.String()):
		return refuseWith(http.StatusBadRequest, "the common name %q is not the service", cn)
	}
	return nil
}

// presents checks who refreshes.
func (z *ZTS) presents(leaf *x509.Certificate, i athenzname.Instance, id string) error {
	switch principal, err := athenzname.ParseService(strings.ToLower(leaf.Subject.CommonName)); {
	case err != nil || principal != i.Service:
		return refuseWith(http.StatusBadRequest, "the certificate is that of %q", leaf.Subject.CommonName)
	case i.ID != id || !slices.Contains(leaf.DNSNames, i.InstanceName()):
		return refuseWith(http.StatusBadRequest,
			"the instance ID is not that of the path, or not that of the certificate")
	}
	return nil
}

// turn notes that a certificate was presented.
func (z *ZTS) turn(i athenzname.Instance, serial string) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	switch r := z.records[recordOf(i)]; {
	case r == nil:
		return refuseWith(http.StatusForbidden, "the instance is not known")
	case r.revoked:
		return refuseWith(http.StatusForbidden, "the instance was revoked")
	case serial == r.current:
		r.previous = serial
	case serial != r.previous:
		r.revoked = true
		return refuseWith(http.StatusForbidden, "the certificate was superseded: the instance is revoked")
	}
	return nil
}

// record notes a certificate that was issued.
func (z *ZTS) record(i athenzname.Instance, serial string, first bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	r := z.records[recordOf(i)]
	if r == nil || first {
		r = &ztsRecord{previous: serial}
		z.records[recordOf(i)] = r
	}
	r.current = serial
}

func (z *ZTS) remove(w http.ResponseWriter, r *http.Request) {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		ztsError(w, http.StatusUnauthorized, "a deletion needs a client certificate")
		return
	}
	if !strings.EqualFold(r.TLS.PeerCertificates[0].Subject.CommonName, r.PathValue("provider")) {
		ztsError(w, http.StatusForbidden, "only the provider may delete an instance")
		return
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	delete(z.records, r.PathValue("provider")+" "+r.PathValue("id")+" "+r.PathValue("domain")+"."+r.PathValue(
		"service"))
	w.WriteHeader(http.StatusNoContent)
}

// confirm asks the provider, and returns the attributes of its answer.
func (z *ZTS) confirm(r *http.Request, in *ztsRequest, i athenzname.Instance, csr *pki.CSR, refresh bool,
	rules *ZTSRules) (map[string]string, error) {
	if rules.Callback == "" {
		if !refresh && !SameToken(in.AttestationData, z.token) {
			return nil, refuseWith(http.StatusUnauthorized, "the attestation data is not good")
		}
		return map[string]string{}, nil
	}
	attributes := map[string]string{"instanceId": i.ID}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		attributes["clientIP"] = host
	}
	for _, san := range csr.SANs() {
		key, value := "", san.Value
		switch san.Type {
		case pki.DNS:
			key = "sanDNS"
		case pki.IP:
			key, value = "sanIP", net.IP(san.Value).String()
		case pki.URI:
			key = "sanURI"
		default:
			continue
		}
		if attributes[key] != "" {
			value = attributes[key] + "," + value
		}
		attributes[key] = value
	}
	body, err := json.Marshal(map[string]any{
		"provider": in.Provider, "domain": in.Domain, "service": in.Service, "attestationData": in.AttestationData, "attributes": attributes,
	})
	if err != nil {
		return nil, err
	}
	path := "/instance"
	if refresh {
		path = "/refresh"
	}
	return z.call(r.Context(), rules.Callback+path, i.Provider, body)
}

// call posts a confirmation over mutual TLS. The provider's certificate has the name of its service in place of that
// of its host.
func (z *ZTS) call(ctx context.Context, url string, provider athenzname.Service, body []byte) (map[string]string,
	error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		MinVersion:         tls.VersionTLS12,
		Certificates:       []tls.Certificate{*z.own.TLSCertificate()},
		InsecureSkipVerify: true, // VerifyConnection does it, by another name
		VerifyConnection: func(state tls.ConnectionState) error {
			leaf, above := state.PeerCertificates[0], x509.NewCertPool()
			for _, c := range state.PeerCertificates[1:] {
				above.AddCert(c)
			}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: z.ca.Bundle().CertPool(),
				Intermediates: above}); err != nil {
				return err
			}
			if leaf.Subject.CommonName != provider.String() {
				return fmt.Errorf("the server is %q and not the provider", leaf.Subject.CommonName)
			}
			return nil
		},
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(request)
	if err != nil {
		return nil, refuseWith(http.StatusGatewayTimeout, "the provider cannot be reached: %v", err)
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err != nil {
		return nil, refuseWith(http.StatusGatewayTimeout, "the provider cannot be read: %v", err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, refuseWith(http.StatusForbidden, "the provider refuses: %s", strings.TrimSpace(string(data)))
	}
	var confirmed struct {
		Attributes map[string]string `json:"attributes"`
	}
	if json.Unmarshal(data, &confirmed) != nil {
		return nil, refuseWith(http.StatusForbidden, "the provider answers with something else")
	}
	if confirmed.Attributes == nil {
		confirmed.Attributes = map[string]string{}
	}
	return confirmed.Attributes, nil
}
