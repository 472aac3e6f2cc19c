// Package vault is a client of the PKI secrets engine of HashiCorp Vault (1.11 or newer) and of OpenBao, whose API is
// the same, including the names of the headers.
//
//	ca, err := vault.New(vault.Options{
//		Endpoint: caclient.Endpoint{
//			URL:         "https://vault.vault.svc:8200",
//			TrustDomain: spiffe.MustParseTrustDomain("example.org"),
//			TokenFile:   "/var/run/secrets/tokens/vault", // a token of the pod's service account
//		},
//		Role:      "web",
//		LoginRole: "web",
//	})
//	…
//	m, err := secretcache.New(secretcache.Config{ID: web, CA: ca})
//
// [Transit] is a client of their transit engine, which keeps the keys of a CA of package ca.
//
// A program that calls the [CA] without package secretcache wraps it with [caclient.New], for deadlines and the check
// of every answer.
//
// # What Vault needs
//
// The client calls POST sign/ROLE, never sign-verbatim, which would certify any request. So the role decides which
// names a workload may have, and the token's policy decides which roles it may use. A policy and a role for one
// workload:
//
//	path "pki/sign/web" { capabilities = ["update"] }
//
//	vault write pki/roles/web require_cn=false key_type=any max_ttl=24h no_store=true \
//	    allowed_uri_sans=spiffe://example.org/web
//
// Without no_store each renewal leaves a certificate in Vault's storage. The names of the request are also sent as
// parameters, for roles with use_csr_sans=false. A common name is sent only if the request has one, and does not
// become an alternative name.
//
// # Trust bundles
//
// Without Endpoint.Roots and Endpoint.RootsFile the bundle has the self-signed certificates among the mount's issuers
// and in their chains, without revoked ones. Vault shows them without a token. Intermediate certificates are never
// roots, and a root that came only with a certificate does not count. If the root is elsewhere, import its
// certificate into the mount, which needs no key, or mount it as a file.
//
// To change a root, add the new one as an issuer of the mount, wait until all workloads have it (the list is read
// every five minutes), make it the default issuer, and delete the old one when the last certificate under it has
// ended.
//
// # What it promises
//
// Tokens go only to the host of Options.URL: redirects are not followed, and a connection without TLS is refused
// unless Options.AllowPlaintext allows it. No error and no log record contains the login token or Vault's token.
//
// # What it does not do
//
// It repeats a call only if its login's token had ended. It revokes no certificates, and not its own token, which
// ends with its lease. Its tests run against a fake of Vault that answers like a real OpenBao 2.7.2.
package vault

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	maxIssuers = 64  // of a mount; each costs a call
	maxCAs     = 100 // certificates of issuers and above them; each costs a signature to check
)

const fetchBundles = "fetch bundles" // the operation that needs no token

// Options are the choices of [New]. URL and TrustDomain of the Endpoint, and Role, are required.
type Options struct {
	caclient.Endpoint

	// Mount is the path of the PKI engine; empty means "pki".
	Mount string

	// Role is the name of the engine's role that signs.
	Role string

	// Namespace is the namespace of Vault Enterprise or OpenBao for the engine and the login, such as team-a/prod.
	Namespace string

	// LoginRole is a role of the auth method kubernetes, or jwt, which takes the token of the Endpoint, a Kubernetes
	// service account's, for a Vault token. The client uses it until a third of its lease is left, then logs in again;
	// if that fails, the token stays in use until its end. If Vault refuses it earlier, the client logs in again at
	// once and repeats the call; if its policies forbid the call, at most once a minute. If the Endpoint has an
	// HTTPClient and no token, LoginRole is a role of the auth method cert, which takes the client certificate of the
	// connection. Empty means no login: the token of the Endpoint is a Vault token, or there is none and the URL is the
	// URL of a Vault Proxy, which adds its own.
	LoginRole string

	// LoginMount is the path of the auth method; empty means "kubernetes", or "cert" for a certificate.
	LoginMount string
}

// CA is a [caclient.CA] and a [caclient.BundleWatcher]; [New] makes one. It is safe for concurrent use, and never
// prints a token or a key.
type CA struct {
	client
	role string
}

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	c := &CA{role: o.Role}
	err := c.connect(caconn.Config{Endpoint: o.Endpoint, Roots: c.roots}, cmp.Or(strings.Trim(o.Mount, "/"), "pki"),
		o.Namespace, o.LoginRole, o.LoginMount)
	if err == nil && !isName(c.role) {
		err = errors.New("the Role has to be the name of a role of the engine")
	}
	if err != nil {
		return nil, fmt.Errorf("vault: invalid Options: %w", err)
	}
	c.redacted = c.conn.Text()
	return c, nil
}

// isPath reports whether s consists of names with slashes between them.
func isPath(s string) bool {
	return len(s) <= 512 && !slices.ContainsFunc(strings.Split(strings.TrimPrefix(s, "/"), "/"),
		func(part string) bool { return !isName(part) })
}

// isName reports whether a text can be a path segment without escaping. Vault's path segments never end with a period.
var isName = regexp.MustCompile(`^[A-Za-z0-9_-]([A-Za-z0-9._-]{0,253}[A-Za-z0-9_-])?$`).MatchString

// signRequest is the body of sign/ROLE.
type signRequest struct {
	CSR         string `json:"csr"`
	CommonName  string `json:"common_name,omitempty"`
	AltNames    string `json:"alt_names,omitempty"` // DNS names and email addresses, with commas
	URISANs     string `json:"uri_sans,omitempty"`
	IPSANs      string `json:"ip_sans,omitempty"`
	TTL         string `json:"ttl,omitempty"`
	Format      string `json:"format"`
	OnlyAltName bool   `json:"exclude_cn_from_sans"` // the common name does not become an alternative name
}

// newSignRequest returns the request for csr. The role decides whether Vault takes the names from csr or from the
// other fields.
func newSignRequest(csr *pki.CSR, lifetime time.Duration) (*signRequest, error) {
	r := &signRequest{CSR: string(csr.PEM()), CommonName: csr.CommonName(), Format: "pem", OnlyAltName: true}
	if lifetime > 0 {
		r.TTL = strconv.FormatInt(int64(max(lifetime, time.Second)/time.Second), 10) + "s"
	}
	var dns, uris, ips []string
	for _, san := range csr.SANs() {
		value := san.Value
		switch san.Type {
		case pki.DNS, pki.Email:
			dns = append(dns, value)
		case pki.URI:
			uris = append(uris, value)
		case pki.IP:
			value = net.IP(value).String()
			ips = append(ips, value)
		default:
			return nil, fmt.Errorf("the request has a name that cannot be asked of Vault: %.100v", san)
		}
		if strings.Contains(value, ",") { // it would be two names
			return nil, fmt.Errorf("the request has a name with a comma: %.100q", value)
		}
	}
	r.AltNames, r.URISANs, r.IPSANs = strings.Join(dns, ","), strings.Join(uris, ","), strings.Join(ips, ",")
	return r, nil
}

// FetchBundles implements [caclient.CA]. It returns one bundle with all known roots of the trust domain, and calls the
// CA only if the Endpoint has no source of roots. If the source fails and earlier roots are known, it logs the failure
// and returns them. The error is a [*caclient.Error], unless ctx is done.
func (c *CA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	return c.conn.FetchBundles(ctx)
}

// WatchBundles implements [caclient.BundleWatcher]. It yields roots that come with a certificate at once, and reads
// the source of roots every five minutes, or at the interval of its bundle's refresh hint.
func (c *CA) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return c.conn.WatchBundles(ctx)
}

// Sign implements [caclient.CA]. The lifetime is sent in whole seconds, at least one; 0 means the role's. The error is
// a [*caclient.Error], unless ctx is done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := c.conn.CheckRequest(csr, lifetime); err != nil {
		return nil, err
	}
	body, err := newSignRequest(csr, lifetime)
	if err != nil {
		return nil, c.conn.Error("sign", caclient.ErrInvalid, err)
	}
	var answer signAnswer
	if err := c.do(ctx, caconn.Request{Op: "sign", Method: http.MethodPost, Path: c.mount + "/sign/" + c.role,
		Body: body}, &answer); err != nil {
		return nil, err
	}
	a := answer.Data // the field ca_chain is missing if the issuer's chain is only itself
	return c.conn.Chain(csr, append([]string{a.Certificate, a.IssuingCA}, a.CAChain...)...)
}

// signAnswer is the answer of sign/ROLE.
type signAnswer struct {
	Data struct {
		Certificate string   `json:"certificate"`
		IssuingCA   string   `json:"issuing_ca"`
		CAChain     []string `json:"ca_chain"`
	} `json:"data"`
}

const nothing = "there is none" // the message of a 404 that knows of no error

// message returns Vault's text in a refusal.
func message(body []byte) string {
	var m struct{ Errors []string }
	if json.Unmarshal(body, &m) != nil {
		return ""
	}
	if m.Errors != nil && len(m.Errors) == 0 {
		return nothing
	}
	return strings.Join(strings.Fields(strings.Join(m.Errors, "; ")), " ") // it may have lists, in lines
}

// refine corrects the kind of e, which comes from the HTTP status. needsToken says whether the request needs a token.
func refine(e *caclient.Error, s *caconn.Status, needsToken bool) {
	switch s.Code {
	case http.StatusPreconditionFailed, // a standby that does not have the token's data yet
		472, 473, // a standby that answers only health requests
		http.StatusNotImplemented: // not initialised yet
		e.Kind = caclient.ErrUnavailable
	case http.StatusMovedPermanently, http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		e.Kind = caclient.ErrUnavailable // a standby that cannot forward now
		e.Err = fmt.Errorf("%w; redirects are not followed: the URL has to be that of the active server, "+
			"or of a proxy that knows it", e.Err)
	case http.StatusBadRequest, http.StatusForbidden:
		// OpenBao answers only this to an unknown or missing token, and "1 error occurred: * permission denied" to a
		// token whose policies do not allow the request.
		if strings.Contains(s.Message, "invalid token") || strings.Contains(s.Message, "missing client token") ||
			needsToken && s.Message == "permission denied" {
			e.Kind = caclient.ErrUnauthenticated
		}
	}
}

// issuerList is the answer of issuers.
type issuerList struct{ Data struct{ Keys []string } }

// issuer is the answer of issuer/ID/json.
type issuer struct {
	Data struct {
		Certificate string      `json:"certificate"`
		CAChain     []string    `json:"ca_chain"`
		Revoked     json.Number `json:"revocation_time"` // seconds since 1970; 0 for an issuer that is not revoked
	} `json:"data"`
}

func (c *CA) roots(ctx context.Context) ([]*x509.Certificate, error) {
	const op = fetchBundles
	var list issuerList
	request := caconn.Request{Op: op, Method: http.MethodGet, Path: c.mount + "/issuers?list=true"}
	if err := c.call(ctx, request, "", &list); err != nil {
		e, told := errors.AsType[*caclient.Error](err)
		s, ok := errors.AsType[*caconn.Status](err)
		if told && ok && s.Code == http.StatusNotFound { // Sign gets 500 in this case
			e.Kind = caclient.ErrUnavailable
			e.Err = fmt.Errorf("%w; the mount has no issuer yet: make a root in it, or import one", e.Err)
		}
		return nil, err
	}
	if len(list.Data.Keys) > maxIssuers {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer,
			fmt.Errorf("the mount has %d issuers, the limit is %d", len(list.Data.Keys), maxIssuers))
	}
	issuers := make([]issuer, len(list.Data.Keys))
	for i, id := range list.Data.Keys {
		if !isName(id) {
			return nil, c.conn.Error(op, caclient.ErrBadAnswer, errors.New("the ID of an issuer is not a name"))
		}
		request.Path = c.mount + "/issuer/" + id + "/json"
		if err := c.call(ctx, request, "", &issuers[i]); err != nil {
			return nil, err
		}
	}
	roots, err := rootsOf(issuers)
	if err != nil {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer, err)
	}
	return roots, nil
}

// rootsOf returns the self-signed certificates among issuers and in their chains, without revoked ones.
func rootsOf(issuers []issuer) ([]*x509.Certificate, error) {
	var roots, revoked []*x509.Certificate
	seen := map[string]bool{}
	for _, i := range issuers {
		own, err := pki.ParseCertificatesPEM([]byte(i.Data.Certificate))
		if err != nil {
			return nil, fmt.Errorf("certificate of an issuer: %w", err)
		}
		if i.Data.Revoked != "" && i.Data.Revoked != "0" {
			revoked = append(revoked, own...)
			continue
		}
		chain := own
		if len(i.Data.CAChain) > 0 {
			above, err := pki.ParseCertificatesPEM([]byte(strings.Join(i.Data.CAChain, "\n")))
			if err != nil {
				return nil, fmt.Errorf("chain of an issuer: %w", err)
			}
			chain = append(chain, above...)
		}
		for _, cert := range chain {
			if seen[string(cert.Raw)] {
				continue
			}
			if seen[string(cert.Raw)] = true; len(seen) > maxCAs {
				return nil, fmt.Errorf("the mount has more than %d certificates of CAs", maxCAs)
			}
			if certchain.SelfSigned(cert) {
				roots = append(roots, cert)
			}
		}
	}
	roots = slices.DeleteFunc(roots, func(c *x509.Certificate) bool { return slices.ContainsFunc(revoked, c.Equal) })
	if len(roots) == 0 {
		return nil, errors.New("the mount has no self-signed issuer; " +
			"import the root's certificate there, or set RootsFile")
	}
	return roots, nil
}
