package cafake

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// GoogleCASRules are what an operator of a CA pool sets. [NewGoogleCAS] says which are set at first.
type GoogleCASRules struct {
	Disabled    bool          // the pool has no authority that is enabled
	Quota       int           // how many more certificates may be asked for; negative means any number
	RetryDelay  time.Duration // what a refusal for the quota asks for
	MaxLifetime time.Duration // of the pool's issuance policy
	SelfOnly    bool          // the account may have certificates for its own identity only
	Forbidden   bool          // the account may do nothing
}

// GoogleCAS is a Fake of Google's Certificate Authority Service, with one pool of the enterprise tier,
// [GoogleCASPool]. It was built from the public documentation.
type GoogleCAS struct {
	*Fake
	token string

	mu       sync.Mutex
	rules    GoogleCASRules
	requests map[string]casRequest // by request ID
	names    map[string]bool       // of certificates
}

// GoogleCASPool is the pool of a [GoogleCAS].
const GoogleCASPool = "projects/my-project/locations/europe-west1/caPools/workloads"

// casRequest is a request that was carried out.
type casRequest struct{ body, answer string }

// NewGoogleCAS serves the service for the workload at path: the account of its token may have all certificates, of 30
// days at most, and its identity is that of the workload.
func NewGoogleCAS(t testing.TB, ca *spiffetest.CA, path string) *GoogleCAS {
	t.Helper()
	g := &GoogleCAS{Fake: New(t, ca, path), token: "ya29." + rand.Text(), requests: map[string]casRequest{},
		names: map[string]bool{}}
	g.rules = GoogleCASRules{Quota: -1, MaxLifetime: 30 * 24 * time.Hour}
	g.Serve(API{
		Name:    "Google CAS",
		Handler: http.HandlerFunc(g.answerCall),
		Signs:   func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/certificates") },
		Refuse:  refuseGoogle,
		Garbled: garbled(`{"caCerts":7,"pemCertificate":["y"]}`),
		Token:   func() string { return g.token },
	})
	return g
}

// Change edits the rules.
func (g *GoogleCAS) Change(edit func(*GoogleCASRules)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	edit(&g.rules)
}

// refuseGoogle answers with a google.rpc.Status.
func refuseGoogle(w http.ResponseWriter, _ *http.Request, e *caclient.Error) {
	code, status := http.StatusBadRequest, "INVALID_ARGUMENT"
	details := []any{}
	switch e.Kind {
	case caclient.ErrUnavailable:
		code, status = http.StatusServiceUnavailable, "UNAVAILABLE"
		if e.RetryAfter > 0 {
			code, status = http.StatusTooManyRequests, "RESOURCE_EXHAUSTED"
			details = append(details, map[string]string{
				"@type":      "type.googleapis.com/google.rpc.RetryInfo",
				"retryDelay": fmt.Sprintf("%gs", e.RetryAfter.Seconds()),
			})
		}
	case caclient.ErrUnauthenticated:
		code, status = http.StatusUnauthorized, "UNAUTHENTICATED"
	case caclient.ErrDenied:
		code, status = http.StatusForbidden, "PERMISSION_DENIED"
	}
	googleError(w, code, status, e.Err.Error(), details)
}

func googleError(w http.ResponseWriter, code int, status, message string, details []any) {
	answerJSON(w, code, map[string]any{"error": map[string]any{"code": code, "status": status, "message": message,
		"details": details}})
}

// answerCall is the API.
func (g *GoogleCAS) answerCall(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	rules := g.rules
	g.mu.Unlock()
	call, ok := strings.CutPrefix(r.URL.Path, "/v1/"+GoogleCASPool)
	token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	switch {
	case !bearer || !SameToken(token, g.token):
		googleError(w, http.StatusUnauthorized, "UNAUTHENTICATED",
			"Request had invalid authentication credentials. Expected OAuth 2 access token.", nil)
	case r.Method != http.MethodPost || call != "/certificates" && call != ":fetchCaCerts" && ok:
		googleError(w, http.StatusNotFound, "NOT_FOUND", "Method not found.", nil)
	case !ok:
		googleError(w, http.StatusNotFound, "NOT_FOUND", "Resource was not found", nil)
	case rules.Forbidden:
		googleError(w, http.StatusForbidden, "PERMISSION_DENIED", "Permission denied on resource "+GoogleCASPool, nil)
	case call == ":fetchCaCerts":
		g.fetchCACerts(w)
	default:
		g.create(w, r, rules)
	}
}

func (g *GoogleCAS) fetchCACerts(w http.ResponseWriter) {
	chains := []any{}
	for _, root := range g.roots() {
		chains = append(chains, map[string]any{"certificates": []string{string(pki.MarshalCertificatesPEM(root))}})
	}
	answerJSON(w, http.StatusOK, map[string]any{"caCerts": chains})
}

// What the documentation says of the form of IDs. They are never changed.
var (
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	idForm   = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,63}$`)
)

// casCertificate is the resource Certificate.
type casCertificate struct {
	Name           string   `json:"name,omitempty"`
	Lifetime       string   `json:"lifetime"`
	Template       string   `json:"certificateTemplate,omitempty"`
	SubjectMode    string   `json:"subjectMode,omitempty"`
	PEMCertificate string   `json:"pemCertificate,omitempty"`
	PEMChain       []string `json:"pemCertificateChain,omitempty"`
	PEMCSR         string   `json:"pemCsr"`
}

// create answers a request for a certificate.
func (g *GoogleCAS) create(w http.ResponseWriter, r *http.Request, rules GoogleCASRules) {
	query := r.URL.Query()
	requestID, name := query.Get("requestId"), query.Get("certificateId")
	raw, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	var c casCertificate
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	body := name + "\n" + string(raw)
	g.mu.Lock()
	known, repeated := g.requests[requestID]
	taken := g.names[name]
	if !repeated && g.rules.Quota > 0 {
		g.rules.Quota--
	}
	g.mu.Unlock()
	lifetime, lifetimeErr := time.ParseDuration(c.Lifetime)
	reflected := c.SubjectMode == "REFLECTED_SPIFFE"
	refuse := func(code int, status, format string, args ...any) {
		googleError(w, code, status, fmt.Sprintf(format, args...), nil)
	}
	switch {
	case err != nil:
		refuse(400, "INVALID_ARGUMENT", "Invalid JSON payload received.")
	case requestID != "" && !uuidForm.MatchString(requestID):
		refuse(400, "INVALID_ARGUMENT", "Invalid request ID.")
	case repeated && known.body != body:
		refuse(400, "INVALID_ARGUMENT", "The request ID was used with another request.")
	case repeated:
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, known.answer)
	case !idForm.MatchString(name):
		refuse(400, "INVALID_ARGUMENT", "Certificate ID is required in the enterprise tier.")
	case taken:
		refuse(409, "ALREADY_EXISTS", "Resource %q already exists", name)
	case rules.Quota == 0:
		refuseGoogle(w, r, &caclient.Error{
			Kind: caclient.ErrUnavailable, RetryAfter: max(rules.RetryDelay, time.Nanosecond),
			Err: errors.New("quota exceeded for quota metric 'Create certificate requests'"),
		})
	case rules.Disabled:
		refuse(400, "FAILED_PRECONDITION", "There are no enabled CAs in the CaPool.")
	case rules.SelfOnly && !reflected:
		refuse(403, "PERMISSION_DENIED", "Permission 'privateca.certificates.create' denied on '%s'", GoogleCASPool)
	case lifetimeErr != nil || lifetime <= 0:
		refuse(400, "INVALID_ARGUMENT", "Lifetime is required.")
	case lifetime > rules.MaxLifetime:
		refuse(400, "INVALID_ARGUMENT", "The lifetime is longer than the issuance policy allows.")
	default:
		g.issue(w, r, &c, lifetime, requestID, name, body)
	}
}

// issue signs and remembers the answer by the request's ID.
func (g *GoogleCAS) issue(w http.ResponseWriter, r *http.Request, c *casCertificate, lifetime time.Duration,
	requestID, name, body string) {
	csr, err := pki.ParseCSRPEM([]byte(c.PEMCSR))
	if err != nil {
		refuseGoogle(w, r, invalid("Malformed CSR: %w", err))
		return
	}
	names := csr.SANs()
	if c.SubjectMode == "REFLECTED_SPIFFE" {
		names = []pki.SAN{pki.IDSAN(g.id)}
	}
	chain, e := g.sign(r.Context(), csr, names, lifetime)
	if e != nil {
		refuseGoogle(w, r, e)
		return
	}
	answer := casCertificate{
		PEMCSR: c.PEMCSR, Lifetime: c.Lifetime, SubjectMode: c.SubjectMode,
		Name: GoogleCASPool + "/certificates/" + name,
	}
	if len(chain) > 0 {
		answer.PEMCertificate = string(pki.MarshalCertificatesPEM(chain[0]))
		for _, cert := range slices.Concat(chain[1:], []*x509.Certificate{g.ca.Root()}) {
			answer.PEMChain = append(answer.PEMChain, string(pki.MarshalCertificatesPEM(cert)))
		}
	}
	text, err := json.Marshal(answer)
	if err != nil {
		panic(err) // texts
	}
	g.mu.Lock()
	g.names[name] = true
	if requestID != "" {
		g.requests[requestID] = casRequest{body, string(text)}
	}
	g.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text)
}
