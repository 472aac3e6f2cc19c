package cafake

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// VaultRules are what an operator of Vault sets. [NewVault] says which are set at first.
type VaultRules struct {
	Namespace      string        // in which the engine and the logins are
	AllowedURISANs []string      // of the role, with * for any text
	AllowedDomains []string      // of the role: the common names and DNS names, whole
	IgnoreCSRSANs  bool          // use_csr_sans=false: the names are those beside the CSR
	RequireCN      bool          // of the role
	TTL, MaxTTL    time.Duration // of the role; a longer wish is shortened
	Sealed         bool
	NoIssuer       bool // the mount has no root yet
	Forbidden      bool // the policy of all tokens lacks the path of the role
	// the tokens of Endpoint are good for a Kubernetes login, and for nothing else
	Kubernetes bool
	Review     func(jwt string) bool // of tokens of service accounts; nil knows those of Endpoint
	Lease      time.Duration         // of the tokens that logins give, in whole seconds; 0 means without end
}

// Vault is a Fake of HashiCorp Vault and OpenBao: a PKI engine at pki with the role workload, and the auth method
// kubernetes with a role workload. It was built from the public documentation, and held against a real OpenBao 2.7.2.
type Vault struct {
	*Fake
	token, jwt string

	mu     sync.Mutex
	rules  VaultRules
	leases map[string]time.Time // by token of a login; the zero time for one without end
	logins int
}

// NewVault serves Vault for the workload at path. Its role grants the ID of the workload, for one hour if nothing is
// asked and for 24 at most, and takes the names from the CSR; logins give tokens for one hour, and the token of
// Endpoint is one of Vault.
func NewVault(t testing.TB, ca *spiffetest.CA, path string) *Vault {
	t.Helper()
	v := &Vault{
		Fake: New(t, ca, path), token: "hvs." + rand.Text(), jwt: "eyJ" + rand.Text(), leases: map[string]time.Time{},
	}
	v.rules = VaultRules{AllowedURISANs: []string{v.id.String()}, TTL: time.Hour, MaxTTL: 24 * time.Hour,
		Lease: time.Hour}
	v.Serve(API{
		Name:    "Vault",
		Handler: http.HandlerFunc(v.answerCall),
		Signs:   func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/v1/pki/sign/") },
		Refuse:  refuseVault,
		Garbled: garbled(`{"data":{"keys":"x","certificate":["y"]},"auth":7}`),
		Token: func() string {
			if v.now().Kubernetes {
				return v.jwt
			}
			return v.token
		},
	})
	return v
}

// Change edits the rules.
func (v *Vault) Change(edit func(*VaultRules)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	edit(&v.rules)
}

// RevokeLogins ends the leases of all tokens that logins gave.
func (v *Vault) RevokeLogins() {
	v.mu.Lock()
	defer v.mu.Unlock()
	clear(v.leases)
}

// Logins returns how many logins succeeded so far.
func (v *Vault) Logins() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.logins
}

func (v *Vault) now() VaultRules {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.rules
}

// refuseVault says a failure as Vault does.
func refuseVault(w http.ResponseWriter, _ *http.Request, e *caclient.Error) {
	code, text := http.StatusBadRequest, e.Err.Error()
	switch e.Kind {
	case caclient.ErrUnavailable:
		if code = http.StatusServiceUnavailable; e.RetryAfter > 0 {
			code = http.StatusTooManyRequests // a quota of the rate
			w.Header().Set("Retry-After", fmt.Sprint(int64(e.RetryAfter/time.Second)))
		}
	case caclient.ErrUnauthenticated:
		if code = http.StatusForbidden; text == "" { // as OpenBao
			text = "permission denied"
		} else { // as Vault
			text = "2 errors occurred:\n\t* permission denied\n\t* invalid token\n\n" + text
		}
	case caclient.ErrDenied:
		code, text = http.StatusForbidden, "1 error occurred:\n\t* permission denied\n\n"+text
	}
	vaultError(w, code, text)
}

func vaultError(w http.ResponseWriter, code int, text string) {
	answerJSON(w, code, map[string][]string{"errors": {text}})
}

// answerCall is the API.
func (v *Vault) answerCall(w http.ResponseWriter, r *http.Request) {
	rules := v.now()
	route, ok := strings.CutPrefix(r.URL.Path, "/v1/")
	list := r.Method == "LIST" || r.Method == http.MethodGet && r.URL.Query().Get("list") == "true"
	issuer, isIssuer := strings.CutPrefix(route, "pki/issuer/")
	issuer, isJSON := strings.CutSuffix(issuer, "/json")
	switch {
	case rules.Sealed:
		vaultError(w, http.StatusServiceUnavailable, "Vault is sealed")
	case !ok || strings.Trim(r.Header.Get("X-Vault-Namespace"), "/") != rules.Namespace:
		noRoute(w, route)
	case route == "pki/issuers" && list && rules.NoIssuer: // as for each list that is empty
		answerJSON(w, http.StatusNotFound, map[string][]string{"errors": {}})
	case route == "pki/issuers" && list:
		v.listIssuers(w)
	case isIssuer && isJSON && r.Method == http.MethodGet:
		v.showIssuer(w, issuer)
	case r.Method != http.MethodPost && r.Method != http.MethodPut:
		vaultError(w, http.StatusMethodNotAllowed, "unsupported operation")
	case route == "auth/kubernetes/login":
		v.logInKubernetes(w, r, rules)
	case strings.HasPrefix(route, "pki/"):
		v.signRoute(w, r, rules, route)
	default:
		noRoute(w, route)
	}
}

func noRoute(w http.ResponseWriter, route string) {
	vaultError(w, http.StatusNotFound, fmt.Sprintf("no handler for route %q. route entry not found.", route))
}

// issuers returns the roots by the IDs that they have as issuers.
func (v *Vault) issuers() map[string]*x509.Certificate {
	out := map[string]*x509.Certificate{}
	for _, root := range v.roots() {
		h := sha256.Sum256(root.Raw)
		out[fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])] = root
	}
	return out
}

func (v *Vault) listIssuers(w http.ResponseWriter) {
	keys, info := []string{}, map[string]any{}
	for id := range v.issuers() {
		keys = append(keys, id)
		info[id] = map[string]any{"issuer_name": "", "is_default": false}
	}
	slices.Sort(keys)
	answerJSON(w, http.StatusOK, map[string]any{"data": map[string]any{"keys": keys, "key_info": info}})
}

func (v *Vault) showIssuer(w http.ResponseWriter, id string) {
	root, ok := v.issuers()[id]
	if !ok {
		vaultError(w, http.StatusInternalServerError, "unable to find PKI issuer for reference: "+id)
		return
	}
	text := string(pki.MarshalCertificatesPEM(root))
	answerJSON(w, http.StatusOK, map[string]any{"data": map[string]any{
		"certificate": text, "ca_chain": []string{text}, "issuer_id": id, "issuer_name": "", "revocation_time": 0,
	}})
}

const vaultRole = "workload"

func (v *Vault) logInKubernetes(w http.ResponseWriter, r *http.Request, rules VaultRules) {
	var body struct{ Role, JWT string }
	switch {
	case !readJSON(r, &body):
		vaultError(w, http.StatusBadRequest, "failed to parse JSON input")
	case body.JWT == "":
		vaultError(w, http.StatusBadRequest, "missing jwt")
	case body.Role != vaultRole:
		vaultError(w, http.StatusBadRequest, fmt.Sprintf("invalid role name %q", body.Role))
	case rules.Review == nil && !SameToken(body.JWT, v.jwt), rules.Review != nil && !rules.Review(body.JWT):
		vaultError(w, http.StatusForbidden, "permission denied")
	default:
		v.loggedIn(w)
	}
}

func (v *Vault) loggedIn(w http.ResponseWriter) {
	token := "hvs." + rand.Text()
	v.mu.Lock()
	lease := v.rules.Lease
	v.leases[token] = time.Time{}
	if lease > 0 {
		v.leases[token] = time.Now().Add(lease)
	}
	v.logins++
	v.mu.Unlock()
	answerJSON(w, http.StatusOK, map[string]any{"auth": map[string]any{
		"client_token": token, "accessor": rand.Text(), "policies": []string{"default", vaultRole},
		"lease_duration": int64(lease / time.Second), "renewable": true, "token_type": "service",
	}})
}

// knows reports whether token is one of Vault that has not ended.
func (v *Vault) knows(token string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	end, ok := v.leases[token]
	return ok && (end.IsZero() || time.Now().Before(end)) || !v.rules.Kubernetes && SameToken(token, v.token)
}

// signRoute answers a request to the engine that needs a token.
func (v *Vault) signRoute(w http.ResponseWriter, r *http.Request, rules VaultRules, route string) {
	token := r.Header.Get("X-Vault-Token")
	switch {
	case token == "":
		vaultError(w, http.StatusForbidden, "permission denied") // as OpenBao
	case !v.knows(token):
		refuseVault(w, r, &caclient.Error{Kind: caclient.ErrUnauthenticated, Err: errors.New("")})
	case rules.Forbidden || route != "pki/sign/"+vaultRole: // sign-verbatim is not among the paths of the policy
		refuseVault(w, r, &caclient.Error{Kind: caclient.ErrDenied, Err: errors.New("")})
	case rules.NoIssuer:
		vaultError(w, http.StatusInternalServerError,
			"1 error occurred:\n\t* could not fetch the CA certificate (was one set?): no default issuer currently "+
				"configured\n\n")
	default:
		if e := v.signRequest(w, r, rules); e != nil {
			refuseVault(w, r, e)
		}
	}
}

// vaultSign is the body of sign/ROLE.
type vaultSign struct {
	CSR        string `json:"csr"`
	CommonName string `json:"common_name"`
	AltNames   string `json:"alt_names"`
	URISANs    string `json:"uri_sans"`
	IPSANs     string `json:"ip_sans"`
	TTL        string `json:"ttl"`
	Format     string `json:"format"`
	ExcludeCN  bool   `json:"exclude_cn_from_sans"`
}

func invalid(format string, args ...any) *caclient.Error {
	return &caclient.Error{Kind: caclient.ErrInvalid, Err: fmt.Errorf(format, args...)}
}

// signRequest answers a request with a good token.
func (v *Vault) signRequest(w http.ResponseWriter, r *http.Request, rules VaultRules) *caclient.Error {
	var body vaultSign
	if !readJSON(r, &body) {
		return invalid("failed to parse JSON input")
	}
	csr, err := pki.ParseCSRPEM([]byte(body.CSR))
	if err != nil {
		return invalid("certificate request could not be parsed: %w", err)
	}
	if body.Format != "pem" && body.Format != "" {
		return invalid("the fake has no format %q", body.Format)
	}
	names, e := body.names(csr, rules)
	if e != nil {
		return e
	}
	lifetime := rules.TTL
	if body.TTL != "" {
		if lifetime, err = time.ParseDuration(body.TTL); err != nil || lifetime <= 0 {
			return invalid("error converting input for field %q", "ttl")
		}
	}
	chain, e := v.sign(r.Context(), csr, names, min(lifetime, rules.MaxTTL))
	if e != nil {
		return e
	}
	answerJSON(w, http.StatusOK, v.signed(chain))
	return nil
}

// names returns the names that the certificate will have.
func (b *vaultSign) names(csr *pki.CSR, rules VaultRules) ([]pki.SAN, *caclient.Error) {
	names := csr.SANs()
	if rules.IgnoreCSRSANs {
		names = nil
		for _, name := range list(b.AltNames) {
			names = append(names, pki.DNSSAN(name))
		}
		for _, uri := range list(b.URISANs) {
			names = append(names, pki.SAN{Type: pki.URI, Value: uri})
		}
		for _, ip := range list(b.IPSANs) {
			names = append(names, pki.IPSAN(net.ParseIP(ip)))
		}
	}
	cn := csr.CommonName()
	if cn == "" {
		cn = b.CommonName
	}
	switch {
	case cn == "" && rules.RequireCN:
		return nil, invalid("the common_name field is required, or must be provided in a CSR with " +
			"\"use_csr_common_name\" set to true, unless \"require_cn\" is set to false")
	case cn != "" && !slices.Contains(rules.AllowedDomains, cn):
		return nil, invalid("common name %s not allowed by this role", cn)
	case cn != "" && !b.ExcludeCN:
		names = append(names, pki.DNSSAN(cn))
	}
	for _, name := range names {
		switch name.Type {
		case pki.DNS:
			if !slices.Contains(rules.AllowedDomains, name.Value) {
				return nil, invalid("subject alternate name %s not allowed by this role", name.Value)
			}
		case pki.URI:
			if !slices.ContainsFunc(rules.AllowedURISANs,
				func(pattern string) bool { return glob(pattern, name.Value) }) {
				return nil, invalid("URI Subject Alternative Names were provided via CSR which are not valid for " +
					"this role")
			}
		}
	}
	return names, nil
}

// glob reports whether s is of the form of a pattern, in which * stands for any text.
func glob(pattern, s string) bool {
	parts := strings.Split(pattern, "*")
	rest, ok := strings.CutPrefix(s, parts[0])
	if len(parts) == 1 {
		return ok && rest == ""
	}
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(rest, part)
		if i < 0 {
			return false
		}
		rest = rest[i+len(part):]
	}
	return ok && strings.HasSuffix(rest, parts[len(parts)-1])
}

// list returns the parts of a text with commas.
func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

// signed returns the answer with a chain, which may be a bad one.
func (v *Vault) signed(chain []*x509.Certificate) any {
	data := map[string]any{"issuing_ca": string(pki.MarshalCertificatesPEM(v.ca.Root()))}
	if len(chain) > 0 {
		data["certificate"] = string(pki.MarshalCertificatesPEM(chain[0]))
		data["serial_number"] = chain[0].SerialNumber.Text(16)
		data["expiration"] = chain[0].NotAfter.Unix()
	}
	if len(chain) > 1 {
		data["issuing_ca"] = string(pki.MarshalCertificatesPEM(chain[1]))
		above := []string{}
		for _, c := range chain[1:] {
			above = append(above, string(pki.MarshalCertificatesPEM(c)))
		}
		if !slices.ContainsFunc(chain[1:], certchain.SelfSigned) {
			above = append(above, string(pki.MarshalCertificatesPEM(v.ca.Root())))
		}
		data["ca_chain"] = above
	}
	return map[string]any{"lease_id": "", "renewable": false, "lease_duration": 0, "data": data, "auth": nil}
}
