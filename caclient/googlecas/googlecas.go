// Package googlecas is a client of Google Cloud's Certificate Authority Service, over its REST API.
//
//	ca, err := googlecas.New(googlecas.Options{
//		Endpoint: caclient.Endpoint{
//			TrustDomain: spiffe.MustParseTrustDomain("example.org"),
//			Token:       access.Token, // an OAuth access token, such as that of the metadata server
//		},
//		Pool: "projects/my-project/locations/europe-west1/caPools/workloads",
//	})
//	…
//	m, err := secretcache.New(secretcache.Config{ID: web, CA: ca})
//
// A program that calls the [CA] without package secretcache wraps it with [caclient.New], for deadlines and the check
// of every answer.
//
// # What the service needs
//
// The token is an OAuth 2.0 access token with the scope https://www.googleapis.com/auth/cloud-platform: from the
// metadata server, or from Google's token service in exchange for a Kubernetes token. An identity token does not
// work. Its account needs privateca.certificates.create on the pool (roles/privateca.certificateRequester), or
// privateca.certificates.createForSelf with ReflectSPIFFE (roles/privateca.workloadCertificateRequester). To read the
// roots it needs privateca.caPools.get (roles/privateca.poolReader), unless Endpoint.Roots or Endpoint.RootsFile is
// set.
//
// # Trust bundles
//
// Without Endpoint.Roots and Endpoint.RootsFile the bundle has the last certificate of each chain of the pool's
// authorities, if it is self-signed. Authorities that are enabled, disabled or staged count, so a new root is known
// before it signs, and an old one until it is deleted. A chain that does not end in a self-signed certificate adds
// nothing: mount its root as a file.
//
// # What it promises
//
// The token goes to the host of Options.URL and nowhere else: redirects are not followed, and a connection without TLS
// is refused unless Options.AllowPlaintext allows it. No error and no log record contains the token.
//
// # What it does not do
//
// It revokes nothing and gets no tokens. Its tests run against a fake of the service, written from the public
// documentation.
package googlecas

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices of [New]. TrustDomain and a source of tokens of the Endpoint, and Pool, are required.
type Options struct {
	// URL of the Endpoint may be empty: that means https://privateca.googleapis.com.
	caclient.Endpoint

	// Pool is the CA pool, such as projects/my-project/locations/europe-west1/caPools/workloads.
	Pool string

	// Template is a certificate template for the request, such as
	// projects/my-project/locations/europe-west1/certificateTemplates/spiffe. Empty means none.
	Template string

	// Authority is the ID of the one authority of the pool that signs. Empty lets the service choose.
	Authority string

	// ReflectSPIFFE lets the service set the certificate's only name, the caller's SPIFFE ID, from the token. It
	// ignores the names in the request.
	ReflectSPIFFE bool
}

// CA is a [caclient.CA] and a [caclient.BundleWatcher]; [New] makes one. It is safe for concurrent use, and never
// prints a token or a key.
type CA struct {
	redacted
	opts Options
	conn *caconn.Conn
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// New returns a CA. It does not connect and reads no file. The error says which option is wrong.
func New(o Options) (*CA, error) {
	o.URL = cmp.Or(o.URL, "https://privateca.googleapis.com")
	c := &CA{opts: o}
	conn, err := caconn.New(caconn.Config{Name: "googlecas", Endpoint: o.Endpoint, Roots: c.roots})
	switch {
	case err != nil:
	case o.Token == nil && o.TokenFile == "":
		err = errors.New("one of Token and TokenFile is needed, for the access token")
	case !isResource(o.Pool, "projects", "locations", "caPools"):
		err = errors.New("the Pool has to be like projects/my-project/locations/europe-west1/caPools/workloads")
	case o.Template != "" && !isResource(o.Template, "projects", "locations", "certificateTemplates"):
		err = errors.New("the Template has to be like " +
			"projects/my-project/locations/europe-west1/certificateTemplates/spiffe")
	case o.Authority != "" && !isID(o.Authority):
		err = errors.New("the Authority has to be the ID of an authority of the pool, without a path")
	}
	if err != nil {
		return nil, fmt.Errorf("googlecas: invalid Options: %w", err)
	}
	c.conn, c.redacted = conn, conn.Text()
	return c, nil
}

// isResource reports whether name consists of collections and IDs in turn. The first ID names a project, which
// may belong to a domain, as in example.com:my-project.
func isResource(name string, collections ...string) bool {
	parts := strings.Split(name, "/")
	if len(parts) != 2*len(collections) {
		return false
	}
	for i, collection := range collections {
		id := parts[2*i+1]
		if i == 0 {
			domain, project, scoped := strings.Cut(id, ":")
			if id = domain; scoped {
				if id = project; !isID(strings.ReplaceAll(domain, ".", "-")) || domain[0] == '.' {
					return false
				}
			}
		}
		if parts[2*i] != collection || !isID(id) {
			return false
		}
	}
	return true
}

// isID reports whether s is the ID of a resource.
func isID(s string) bool {
	return s != "" && len(s) <= 63 && !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
	})
}

// newUUID returns a random UUID, of version 4.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

const (
	defaultLifetime = 24 * time.Hour
	maxAuthorities  = 100 // of a pool; each costs a signature to check
)

// certificate is the resource Certificate, in requests and answers.
type certificate struct {
	PEMCSR      string `json:"pemCsr,omitempty"`
	Lifetime    string `json:"lifetime,omitempty"` // seconds with the letter s
	Template    string `json:"certificateTemplate,omitempty"`
	SubjectMode string `json:"subjectMode,omitempty"`

	PEMCertificate string   `json:"pemCertificate,omitempty"`
	PEMChain       []string `json:"pemCertificateChain,omitempty"` // from the issuer to the root
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

// Sign implements [caclient.CA]. The lifetime is sent in whole seconds, at least one; 0 means 24 hours, because the
// service has no default. The error is a [*caclient.Error], unless ctx is done.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := c.conn.CheckRequest(csr, lifetime); err != nil {
		return nil, err
	}
	lifetime = max(cmp.Or(lifetime, defaultLifetime), time.Second).Truncate(time.Second)
	request := &certificate{
		PEMCSR:   string(csr.PEM()),
		Lifetime: strconv.FormatInt(int64(lifetime/time.Second), 10) + "s",
		Template: c.opts.Template,
	}
	if c.opts.ReflectSPIFFE {
		request.SubjectMode = "REFLECTED_SPIFFE"
	}
	id := newUUID()
	// Pools of the enterprise tier require a name for the certificate.
	query := url.Values{"requestId": {id}, "certificateId": {"svid-" + id}}
	if c.opts.Authority != "" {
		query.Set("issuingCertificateAuthorityId", c.opts.Authority)
	}
	var answer certificate
	err := c.call(ctx, "sign", "/certificates?"+query.Encode(), request, &answer)
	if err != nil {
		return nil, err
	}
	return c.conn.Chain(csr, append([]string{answer.PEMCertificate}, answer.PEMChain...)...)
}

// call sends a POST to the pool. The error is a [*caclient.Error], unless ctx is done.
func (c *CA) call(ctx context.Context, op, path string, body, answer any) error {
	token, missing, err := c.conn.Token(ctx, op)
	if err != nil {
		return err
	}
	var refusal refusal
	request := caconn.Request{Op: op, Method: http.MethodPost, Path: "/v1/" + c.opts.Pool + path, Body: body,
		Secrets: []string{token}, Message: refusal.read}
	if token != "" {
		request.Header = http.Header{"Authorization": {"Bearer " + token}}
	}
	err = c.conn.Do(ctx, request, answer)
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		refusal.refine(e)
		caconn.ExplainMissing(e, missing)
	}
	return err
}

// refusal is the service's reason for a refusal, a google.rpc.Status.
type refusal struct {
	status     string
	retryAfter time.Duration
}

// read parses the body of a refusal, and returns its message.
func (r *refusal) read(body []byte) string {
	var doc struct {
		Error struct {
			Status  string `json:"status"`
			Message string `json:"message"`
			Details []struct {
				Type       string `json:"@type"`
				RetryDelay string `json:"retryDelay"`
			} `json:"details"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &doc) != nil {
		return ""
	}
	r.status = doc.Error.Status
	for _, d := range doc.Error.Details {
		wait, err := time.ParseDuration(d.RetryDelay)
		if err == nil && strings.HasSuffix(d.RetryDelay, "s") && d.Type == "type.googleapis.com/google.rpc.RetryInfo" {
			r.retryAfter = min(max(wait, 0), time.Hour)
		}
	}
	return strings.TrimSpace(r.status + " " + doc.Error.Message)
}

// refine corrects the kind that e has from the HTTP status alone.
func (r *refusal) refine(e *caclient.Error) {
	switch r.status {
	case "ABORTED", "CANCELLED": // 409 and 499
		e.Kind = caclient.ErrUnavailable
	case "ALREADY_EXISTS": // another certificate has the name of this request; the next request has a new name
		e.MayPass = true
	}
	if _, ok := e.Retryable(); ok {
		e.RetryAfter = max(e.RetryAfter, r.retryAfter)
	}
}

type caCerts struct {
	CACerts []struct {
		Certificates []string `json:"certificates"` // from an authority to its root
	} `json:"caCerts"`
}

func (c *CA) roots(ctx context.Context) ([]*x509.Certificate, error) {
	const op = "fetch bundles"
	var answer caCerts
	if err := c.call(ctx, op, ":fetchCaCerts", struct{}{}, &answer); err != nil {
		return nil, err
	}
	roots, err := answer.roots()
	if err != nil {
		return nil, c.conn.Error(op, caclient.ErrBadAnswer, err)
	}
	return roots, nil
}

// roots returns the last certificate of each chain that is self-signed.
func (a *caCerts) roots() ([]*x509.Certificate, error) {
	if len(a.CACerts) > maxAuthorities {
		return nil, fmt.Errorf("the pool has %d authorities, the limit is %d", len(a.CACerts), maxAuthorities)
	}
	var roots []*x509.Certificate
	for _, chain := range a.CACerts {
		if len(chain.Certificates) == 0 {
			continue
		}
		certs, err := pki.ParseCertificatesPEM([]byte(chain.Certificates[len(chain.Certificates)-1]))
		if err != nil {
			return nil, fmt.Errorf("chain of an authority: %w", err)
		}
		if last := certs[len(certs)-1]; certchain.SelfSigned(last) && !slices.ContainsFunc(roots, last.Equal) {
			roots = append(roots, last)
		}
	}
	if len(roots) == 0 {
		return nil, errors.New("no chain of the pool's authorities ends in a self-signed root; set RootsFile")
	}
	return roots, nil
}
