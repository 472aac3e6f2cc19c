package googlecas_test

import (
	"context"
	"crypto/x509"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var _ caclient.CA = (*googlecas.CA)(nil)

func pem(certs ...*x509.Certificate) string { return string(pki.MarshalCertificatesPEM(certs...)) }

func rootsOf(t testing.TB, c *googlecas.CA) ([]*x509.Certificate, error) {
	t.Helper()
	set, err := c.FetchBundles(t.Context())
	if err != nil {
		return nil, err
	}
	return must.Get(set.Bundle(domain))(t).Contents().X509Authorities, nil
}

func TestSign(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	g := cafake.NewGoogleCAS(t, ca.Intermediate(), "/web")
	file := g.Endpoint()
	token := must.Get(file.Token(t.Context()))(t)
	file.Token, file.TokenFile = nil, filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file.TokenFile, []byte(token), 0o600))
	for _, o := range []googlecas.Options{{Endpoint: g.Endpoint()}, {Endpoint: file}, {Endpoint: g.Endpoint(), ReflectSPIFFE: true}} {
		client := must.Get(caclient.New(newCA(t, o), nil))(t)
		for lifetime, want := range map[time.Duration]time.Duration{0: 24 * time.Hour, 90 * time.Minute: 90 * time.Minute} {
			csr := newCSR(t, webID)
			chain := must.Get(client.Sign(t.Context(), csr, lifetime))(t)
			assert.NoError(t, cafake.Check(chain, csr, pki.ExpectID(webID), ca.Bundle()))
			assert.Len(t, chain, 2, "the intermediate and no root")
			assert.WithinDuration(t, time.Now().Add(want), chain[0].NotAfter, time.Minute)
		}
	}
}

// The identity of the caller is what is certified, whatever the request says.
func TestReflected(t *testing.T) {
	t.Parallel()
	g := cafake.NewGoogleCAS(t, spiffetest.NewCA(t, "example.org"), "/web")
	g.Change(func(r *cafake.GoogleCASRules) { r.SelfOnly = true })
	csr := newCSR(t, spiffe.MustParseID("spiffe://example.org/admin"))
	require.ErrorIs(t, must.Err(newCA(t, googlecas.Options{Endpoint: g.Endpoint()}).Sign(t.Context(), csr, 0)), caclient.ErrDenied)
	chain := must.Get(newCA(t, googlecas.Options{Endpoint: g.Endpoint(), ReflectSPIFFE: true}).Sign(t.Context(), csr, 0))(t)
	assert.Equal(t, webID, must.Get(spiffe.IDFromCertificate(chain[0]))(t))
}

// What is sent, field for field.
func TestWire(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := &cafake.Script{Answer: func(c cafake.Call) (int, any) {
		if strings.HasSuffix(c.URL.Path, ":fetchCaCerts") {
			return 200, caCerts(ca)
		}
		return signed(ca, c)
	}}
	const template = "projects/other/locations/europe-west1/certificateTemplates/spiffe"
	csr := newCSR(t, webID)
	for _, o := range []googlecas.Options{{}, {Template: template, Authority: "root-1", ReflectSPIFFE: true, Pool: "projects/example.com:my-project/locations/l/caPools/p_1"}} {
		o.Endpoint = endpoint(s)
		c := newCA(t, o)
		for _, lifetime := range []time.Duration{0, time.Millisecond, 90*time.Second + 999*time.Millisecond} {
			must.Get(c.Sign(t.Context(), csr, lifetime))(t)
		}
		must.Get(rootsOf(t, c))(t)
	}
	ids := map[string]bool{}
	for i, r := range s.Calls() {
		assert.Equal(t, http.MethodPost, r.Method)
		assert.Equal(t, "privateca.googleapis.com", r.URL.Host)
		assert.Equal(t, "Bearer "+secret, r.Header.Get("Authorization"))
		assert.Equal(t, "application/json", r.Header.Get("Content-Type"))
		p, second := pool, i >= 4
		if second {
			p = "projects/example.com:my-project/locations/l/caPools/p_1"
		}
		if i%4 == 3 {
			assert.Equal(t, "/v1/"+p+":fetchCaCerts", r.URL.Path)
			assert.Empty(t, r.URL.RawQuery)
			assert.Equal(t, doc{}, r.Body)
			continue
		}
		assert.Equal(t, "/v1/"+p+"/certificates", r.URL.Path)
		want := doc{"pemCsr": string(csr.PEM()), "lifetime": []string{"86400s", "1s", "90s"}[i%4]}
		query := r.URL.Query()
		id := query.Get("requestId")
		assert.Regexp(t, `^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, id)
		assert.Equal(t, "svid-"+id, query.Get("certificateId"))
		assert.Regexp(t, `^[a-zA-Z0-9_-]{1,63}$`, query.Get("certificateId"))
		if second {
			want["certificateTemplate"], want["subjectMode"] = template, "REFLECTED_SPIFFE"
			assert.Equal(t, "root-1", query.Get("issuingCertificateAuthorityId"))
		}
		assert.Len(t, query, map[bool]int{false: 2, true: 3}[second])
		assert.Equal(t, want, r.Body)
		ids[id] = true
	}
	assert.Len(t, ids, 6, "a new one for each call")
}

// What the service answers when it refuses, and what the caller learns.
func TestErrors(t *testing.T) {
	t.Parallel()
	retry := doc{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}
	for _, c := range []struct {
		name  string
		code  int
		body  any
		kind  error
		again bool
		after time.Duration
		says  string
	}{
		{"no credentials", 401, refusal(401, "UNAUTHENTICATED", "Request had invalid authentication credentials."), caclient.ErrUnauthenticated, false, 0, "UNAUTHENTICATED Request had"},
		{"denied", 403, refusal(403, "PERMISSION_DENIED", "Permission 'privateca.certificates.create' denied"), caclient.ErrDenied, false, 0, "privateca.certificates.create"},
		{"API not enabled", 403, refusal(403, "PERMISSION_DENIED", "Certificate Authority API has not been used in project 1 before or it is disabled."),
			caclient.ErrDenied, false, 0, "disabled"},
		{"bad request", 400, refusal(400, "INVALID_ARGUMENT", "Malformed CSR"), caclient.ErrInvalid, false, 0, "Malformed CSR"},
		{"pool disabled", 400, refusal(400, "FAILED_PRECONDITION", "There are no enabled CAs"), caclient.ErrInvalid, false, 0, "no enabled CAs"},
		{"no pool", 404, refusal(404, "NOT_FOUND", "Resource was not found"), caclient.ErrInvalid, false, 0, "not found"},
		{"name taken", 409, refusal(409, "ALREADY_EXISTS", "exists"), caclient.ErrInvalid, true, 0, "exists"},
		{"aborted", 409, refusal(409, "ABORTED", "concurrent"), caclient.ErrUnavailable, true, 0, "concurrent"},
		{"quota", 429, refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded",
			doc{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RATE_LIMIT_EXCEEDED"}, retry), caclient.ErrUnavailable, true, 3500 * time.Millisecond, "Quota"},
		{"quota without a wait", 429, refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded"), caclient.ErrUnavailable, true, 0, "Quota"},
		{"absurd wait", 429, refusal(429, "RESOURCE_EXHAUSTED", "x", doc{"@type": retry["@type"], "retryDelay": "99999999s"}), caclient.ErrUnavailable, true, time.Hour, ""},
		{"negative wait", 429, refusal(429, "RESOURCE_EXHAUSTED", "x", doc{"@type": retry["@type"], "retryDelay": "-3s"}), caclient.ErrUnavailable, true, 0, ""},
		{"no wait", 429, refusal(429, "RESOURCE_EXHAUSTED", "x", doc{"@type": retry["@type"], "retryDelay": "soon"}), caclient.ErrUnavailable, true, 0, ""},
		{"a wait that is not asked for", 403, refusal(403, "PERMISSION_DENIED", "x", retry), caclient.ErrDenied, false, 0, ""},
		{"cancelled", 499, refusal(499, "CANCELLED", "x"), caclient.ErrUnavailable, true, 0, ""},
		{"internal", 500, refusal(500, "INTERNAL", "x"), caclient.ErrUnavailable, true, 0, ""},
		{"unimplemented", 501, refusal(501, "UNIMPLEMENTED", "x"), caclient.ErrInvalid, false, 0, ""},
		{"away", 503, refusal(503, "UNAVAILABLE", "x", retry), caclient.ErrUnavailable, true, 3500 * time.Millisecond, ""},
		{"late", 504, refusal(504, "DEADLINE_EXCEEDED", "x"), caclient.ErrUnavailable, true, 0, ""},
		{"front end", 502, "<html>", caclient.ErrUnavailable, true, 0, "502"},
		{"redirect", 302, "", caclient.ErrInvalid, false, 0, "302"},
		{"other types", 400, doc{"error": doc{"status": 7, "message": []int{1}}}, caclient.ErrInvalid, false, 0, "400"},
		{"error as text", 400, doc{"error": "invalid_grant"}, caclient.ErrInvalid, false, 0, "400"},
		{"details of another type", 429, doc{"error": doc{"status": "RESOURCE_EXHAUSTED", "details": "x"}}, caclient.ErrUnavailable, true, 0, "429"},
		{"nothing", 204, "", caclient.ErrBadAnswer, false, 0, "JSON"},
		{"no JSON", 200, "<html>", caclient.ErrBadAnswer, false, 0, "JSON"},
		{"other type", 200, doc{"pemCertificate": 7}, caclient.ErrBadAnswer, false, 0, "JSON"},
		{"too much", 200, strings.Repeat(" ", 3<<20), caclient.ErrBadAnswer, false, 0, "bytes"},
		{"repeats the token", 400, refusal(400, "INVALID_ARGUMENT", "bad: "+secret), caclient.ErrInvalid, false, 0, "bad: [redacted]"},
		{"long", 400, refusal(400, "INVALID_ARGUMENT", strings.Repeat("x", 1<<20)), caclient.ErrInvalid, false, 0, "xxx"},
	} {
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return c.code, c.body }}
		var log logtest.Buffer
		e := endpoint(s)
		e.Logger = log.Logger()
		ca := newCA(t, googlecas.Options{Endpoint: e})
		for op, call := range map[string]func() error{
			"sign":          func() error { _, err := ca.Sign(t.Context(), newCSR(t, webID), 0); return err },
			"fetch bundles": func() error { _, err := ca.FetchBundles(t.Context()); return err },
		} {
			if op != "sign" && c.name == "other type" {
				continue // it is another answer
			}
			err := call()
			told := must.As[*caclient.Error](err)(t, c.name)
			assert.Equal(t, c.kind, told.Kind, c.name)
			assert.Equal(t, op, told.Op, c.name)
			after, again := told.Retryable()
			assert.Equal(t, c.again, again, c.name)
			assert.Equal(t, c.after, after, c.name)
			assert.ErrorContains(t, err, c.says, c.name)
			assert.NotContains(t, err.Error()+log.String(), secret, c.name)
			assert.Less(t, len(err.Error()), 700, c.name)
		}
	}
}

// Answers with success that are no chain for the request.
func TestBadAnswers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	leaf := pem(ca.SVID("/web").Leaf())
	for name, answer := range map[string]doc{
		"nothing":     {},
		"empty":       {"pemCertificate": ""},
		"chain alone": {"pemCertificateChain": []string{pem(ca.Root())}},
		"junk":        {"pemCertificate": "MII"},
		"junk above":  {"pemCertificate": leaf, "pemCertificateChain": []string{"x"}},
		"another key": {"pemCertificate": leaf, "pemCertificateChain": []string{pem(ca.Root())}},
		"root first":  {"pemCertificate": pem(ca.Root()), "pemCertificateChain": []string{leaf}},
	} {
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 200, answer }}
		_, err := newCA(t, googlecas.Options{Endpoint: endpoint(s)}).Sign(t.Context(), newCSR(t, webID), 0)
		require.ErrorIs(t, err, caclient.ErrBadAnswer, name)
	}
}

func TestRoots(t *testing.T) {
	t.Parallel()
	a, b := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	middle := a.Intermediate().SVID("/web").Chain()[1]
	chain := func(texts ...string) doc { return doc{"certificates": texts} }
	for name, c := range map[string]struct {
		chains []doc
		want   []*x509.Certificate // nil for a bad answer
	}{
		"one":                       {[]doc{chain(pem(a.Root()))}, []*x509.Certificate{a.Root()}},
		"two":                       {[]doc{chain(pem(a.Root())), chain(pem(b.Root()))}, []*x509.Certificate{a.Root(), b.Root()}},
		"twice":                     {[]doc{chain(pem(a.Root())), chain(pem(middle), pem(a.Root()))}, []*x509.Certificate{a.Root()}},
		"in one text":               {[]doc{chain(pem(middle, a.Root()))}, []*x509.Certificate{a.Root()}},
		"root elsewhere":            {[]doc{chain(pem(middle)), chain(pem(b.Root()))}, []*x509.Certificate{b.Root()}},
		"empty chain":               {[]doc{chain(), chain(pem(b.Root()))}, []*x509.Certificate{b.Root()}},
		"root in the wrong place":   {[]doc{chain(pem(a.Root()), pem(middle))}, nil},
		"none":                      {[]doc{}, nil},
		"all elsewhere":             {[]doc{chain(pem(middle))}, nil},
		"workload":                  {[]doc{chain(pem(a.SVID("/web").Leaf()))}, nil},
		"junk":                      {[]doc{chain(pem(a.Root())), chain("MII")}, nil},
		"too many":                  {make([]doc, 101), nil},
		"certificates of one chain": {[]doc{{"certificates": pem(a.Root())}}, nil},
	} {
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 200, doc{"caCerts": c.chains} }}
		got, err := rootsOf(t, newCA(t, googlecas.Options{Endpoint: endpoint(s)}))
		if c.want == nil {
			require.ErrorIs(t, err, caclient.ErrBadAnswer, name)
			continue
		}
		require.NoError(t, err, name)
		assert.Equal(t, c.want, got, name)
	}
}

// With a source of their own, roots are not asked of the service.
func TestOwnRoots(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 500, "" }}
	e := endpoint(s)
	e.Roots = ca.Bundle()
	got := must.Get(rootsOf(t, newCA(t, googlecas.Options{Endpoint: e})))(t)
	assert.Equal(t, []*x509.Certificate{ca.Root()}, got)
	assert.Empty(t, s.Calls())
}

func TestBadOptions(t *testing.T) {
	t.Parallel()
	good := func() googlecas.Options {
		return googlecas.Options{Endpoint: caclient.Endpoint{TrustDomain: domain, Token: cafake.Give(secret)}, Pool: pool}
	}
	must.Get(googlecas.New(good()))(t)
	for name, c := range map[string]struct {
		edit func(*googlecas.Options)
		want string
	}{
		"no TLS":             {func(o *googlecas.Options) { o.URL = "http://cas.test" }, "AllowPlaintext"},
		"path":               {func(o *googlecas.Options) { o.URL = "https://cas.test/v1" }, "URL"},
		"no trust domain":    {func(o *googlecas.Options) { o.TrustDomain = spiffe.TrustDomain{} }, "TrustDomain"},
		"no token":           {func(o *googlecas.Options) { o.Token = nil }, "access token"},
		"two tokens":         {func(o *googlecas.Options) { o.TokenFile = "x" }, "TokenFile"},
		"no pool":            {func(o *googlecas.Options) { o.Pool = "" }, "Pool"},
		"pool alone":         {func(o *googlecas.Options) { o.Pool = "workloads" }, "Pool"},
		"short pool":         {func(o *googlecas.Options) { o.Pool = "projects/p/locations/l/caPools" }, "Pool"},
		"empty pool":         {func(o *googlecas.Options) { o.Pool = "projects/p/locations/l/caPools/" }, "Pool"},
		"pool in a path":     {func(o *googlecas.Options) { o.Pool = "/" + pool }, "Pool"},
		"more":               {func(o *googlecas.Options) { o.Pool = pool + "/certificates" }, "Pool"},
		"upwards":            {func(o *googlecas.Options) { o.Pool = "projects/p/locations/../caPools/x" }, "Pool"},
		"query":              {func(o *googlecas.Options) { o.Pool = pool + "?x" }, "Pool"},
		"method":             {func(o *googlecas.Options) { o.Pool = pool + ":x" }, "Pool"},
		"escaped":            {func(o *googlecas.Options) { o.Pool = pool + "%2f" }, "Pool"},
		"other collection":   {func(o *googlecas.Options) { o.Pool = "projects/p/locations/l/keyRings/x" }, "Pool"},
		"empty project":      {func(o *googlecas.Options) { o.Pool = "projects//locations/l/caPools/x" }, "Pool"},
		"empty domain":       {func(o *googlecas.Options) { o.Pool = "projects/:p/locations/l/caPools/x" }, "Pool"},
		"project upwards":    {func(o *googlecas.Options) { o.Pool = "projects/../locations/l/caPools/x" }, "Pool"},
		"domain upwards":     {func(o *googlecas.Options) { o.Pool = "projects/..:p/locations/l/caPools/x" }, "Pool"},
		"domain in location": {func(o *googlecas.Options) { o.Pool = "projects/p/locations/a.b:l/caPools/x" }, "Pool"},
		"long":               {func(o *googlecas.Options) { o.Pool = "projects/p/locations/l/caPools/" + strings.Repeat("x", 64) }, "Pool"},
		"template":           {func(o *googlecas.Options) { o.Template = pool }, "Template"},
		"short template":     {func(o *googlecas.Options) { o.Template = "spiffe" }, "Template"},
		"authority":          {func(o *googlecas.Options) { o.Authority = pool + "/certificateAuthorities/a" }, "Authority"},
	} {
		o := good()
		c.edit(&o)
		_, err := googlecas.New(o)
		require.Error(t, err, name)
		assert.ErrorContains(t, err, "googlecas: invalid Options: ", name)
		assert.ErrorContains(t, err, c.want, name)
	}
}

// Requests that cannot be sent.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 500, "" }}
	c := newCA(t, googlecas.Options{Endpoint: endpoint(s)})
	require.ErrorIs(t, must.Err(c.Sign(t.Context(), nil, 0)), caclient.ErrInvalid)
	require.ErrorIs(t, must.Err(c.Sign(t.Context(), newCSR(t, webID), -1)), caclient.ErrInvalid)
	assert.Empty(t, s.Calls())
}

func TestConformance(t *testing.T) {
	cafake.Fewer(t) // package local takes all
	t.Parallel()
	cafake.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake {
		return cafake.NewGoogleCAS(t, ca, path).Fake
	}, func(f *cafake.Fake) (caclient.CA, error) {
		return googlecas.New(googlecas.Options{Endpoint: f.Endpoint(), Pool: pool})
	})
}

// FuzzAnswers gives one status and one body to both requests, in the place of the service.
func FuzzAnswers(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	csr := newCSR(f, webID)
	chain := must.Get(ca.Intermediate().Sign(f.Context(), csr, 0))(f)
	leaf, middle, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	retry := doc{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}
	for _, body := range []any{
		"", "{", doc{}, doc{"pemCertificate": leaf, "pemCertificateChain": []string{middle, root}}, doc{"pemCertificate": leaf + leaf},
		doc{"pemCertificate": middle, "pemCertificateChain": []string{leaf}}, doc{"pemCertificate": []int{1}}, doc{"pemCertificate": "x"},
		caCerts(ca), doc{"caCerts": []doc{{"certificates": []string{middle}}}}, doc{"caCerts": []doc{{"certificates": []string{middle, root}}, {}}},
		doc{"caCerts": []doc{{"certificates": []string{middle + root}}}, "pemCertificate": leaf}, doc{"caCerts": 7},
		refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded", retry), refusal(409, "ALREADY_EXISTS", "x"), refusal(409, "ABORTED", secret, retry),
		doc{"error": "x"}, `{"pemCertificate":"x","pemCertificate":"y"}`,
	} {
		text := must.Get(cafake.Text(body))(f)
		for _, code := range []int{200, 400, 409, 429} {
			f.Add(code, text)
		}
	}
	f.Fuzz(func(t *testing.T, code int, body string) {
		if code < 200 || code > 999 {
			code = 200
		}
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return code, body }}
		c := newCA(t, googlecas.Options{Endpoint: endpoint(s)})
		judge := func(err error) {
			told := must.As[*caclient.Error](err)(t)
			require.NotNil(t, told.Kind)
			require.LessOrEqual(t, told.RetryAfter, time.Hour)
			require.GreaterOrEqual(t, told.RetryAfter, time.Duration(0))
			require.NotContains(t, err.Error(), secret)
			require.Less(t, len(err.Error()), 2000)
		}
		got, err := c.Sign(t.Context(), csr, 0)
		if err != nil {
			require.Empty(t, got)
			judge(err)
		} else {
			require.True(t, pki.PublicKeysEqual(got[0].PublicKey, csr.PublicKey()))
		}
		roots, err := rootsOf(t, c)
		if err != nil {
			judge(err)
			return
		}
		require.NotEmpty(t, roots)
		for _, root := range roots {
			require.True(t, root.IsCA)
			require.NoError(t, root.CheckSignatureFrom(root))
		}
	})
}

const (
	secret = "ya29.token.c2VjcmV0" // what must not be seen
	pool   = cafake.GoogleCASPool
)

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/web")
)

func newCSR(t testing.TB, id spiffe.ID) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}})
}

func newCA(t testing.TB, o googlecas.Options) *googlecas.CA {
	t.Helper()
	if o.Pool == "" {
		o.Pool = pool
	}
	return must.Get(googlecas.New(o))(t)
}

func endpoint(s *cafake.Script) caclient.Endpoint { return s.Endpoint("", domain, secret) }

// doc is a JSON object.
type doc = map[string]any

func refusal(code int, status, message string, details ...any) doc {
	return doc{"error": doc{"code": code, "status": status, "message": message, "details": details}}
}

// signed returns the answer for the CSR in a call.
func signed(ca *spiffetest.CA, c cafake.Call) (int, any) {
	csr, err := pki.ParseCSRPEM([]byte(c.Body["pemCsr"].(string)))
	if err != nil {
		return 400, refusal(400, "INVALID_ARGUMENT", err.Error())
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		return 400, refusal(400, "INVALID_ARGUMENT", err.Error())
	}
	return 200, doc{"pemCertificate": pem(chain[0]), "pemCertificateChain": []string{pem(ca.Root())}}
}

// caCerts returns the answer of fetchCaCerts with the roots of ca.
func caCerts(ca *spiffetest.CA) doc {
	chains := []doc{}
	for root := range ca.Bundle().X509Authorities() {
		chains = append(chains, doc{"certificates": []string{pem(root)}})
	}
	return doc{"caCerts": chains}
}
