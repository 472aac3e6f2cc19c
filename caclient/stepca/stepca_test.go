package stepca_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var _ caclient.CA = (*stepca.CA)(nil)

const path = "/web"

func newCSR(t testing.TB, f *cafake.Fake, more ...pki.SAN) (*pki.CSR, func(chain []*x509.Certificate) *tls.Certificate) {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: append(f.Expectation().Names(), more...)}))(t)
	return csr, func(chain []*x509.Certificate) *tls.Certificate {
		return must.Get(pki.NewCredential(chain, key))(t).TLSCertificate()
	}
}

func fingerprint(c *x509.Certificate) string { return fmt.Sprintf("%x", sha256.Sum256(c.Raw)) }

func newClient(t testing.TB, o stepca.Options) *stepca.CA {
	t.Helper()
	return must.Get(stepca.New(o))(t)
}

func requireKind(t testing.TB, err, kind error) *caclient.Error {
	t.Helper()
	e := must.As[*caclient.Error](err)(t)
	require.Equal(t, kind, e.Kind, "%v", err)
	return e
}

// tokens counts how often a token is taken.
type tokens struct {
	mu    sync.Mutex
	given []string
}

func (c *tokens) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.given)
}

func (c *tokens) wrap(e *caclient.Endpoint) {
	inner := e.Token
	e.Token = func(ctx context.Context) (string, error) {
		token, err := inner(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.given = append(c.given, token)
		return token, err
	}
}

// A client that knows nothing but the fingerprint of the root.
func TestFingerprint(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	f := cafake.NewStepCA(t, ca, path)
	e := f.Endpoint()
	e.HTTPClient = nil
	for _, print := range []string{fingerprint(ca.Root()), strings.ToUpper(fingerprint(ca.Root()))} {
		c := newClient(t, stepca.Options{Endpoint: e, Fingerprint: print})
		csr, _ := newCSR(t, f)
		chain := must.Get(c.Sign(t.Context(), csr, time.Hour))(t)
		assert.NoError(t, cafake.Check(chain, csr, f.Expectation(), ca.Bundle()))
	}
	// The CA changes its root, and its own certificate with it: the client heard of the new root before.
	c := newClient(t, stepca.Options{Endpoint: e, Fingerprint: fingerprint(ca.Root())})
	ca.Prepare()
	set := must.Get(c.FetchBundles(t.Context()))(t)
	assert.True(t, slices.EqualFunc(authorities(t, set), slices.Collect(ca.Bundle().X509Authorities()), (*x509.Certificate).Equal))
	ca.Rotate()
	ca.DropOldRoots()
	f.Drop() // so that connections are new
	f.Mend()
	c2 := newClient(t, stepca.Options{Endpoint: e, Fingerprint: fingerprint(ca.Root())})
	for _, c := range []*stepca.CA{c, c2} {
		csr, _ := newCSR(t, f)
		_, err := c.Sign(t.Context(), csr, 0)
		for tries := 0; tries < 5 && errors.Is(err, caclient.ErrUnavailable); tries++ { // its connection was cut
			_, err = c.Sign(t.Context(), csr, 0)
		}
		require.NoError(t, err)
		set = must.Get(c.FetchBundles(t.Context()))(t)
		assert.Equal(t, []*x509.Certificate{ca.Root()}, authorities(t, set))
	}
}

func authorities(t testing.TB, set *spiffe.BundleSet) []*x509.Certificate {
	t.Helper()
	return slices.Collect(must.Get(set.Bundle(spiffe.MustParseTrustDomain("example.org")))(t).X509Authorities())
}

// No token goes to a server that has not proven which CA it is.
func TestServerIsVerified(t *testing.T) {
	t.Parallel()
	right := spiffetest.NewCA(t, "example.org")
	wrong := spiffetest.NewCA(t, "example.org")
	name := filepath.Join(t.TempDir(), "roots.pem")
	require.NoError(t, os.WriteFile(name, pki.MarshalCertificatesPEM(right.Root()), 0o600))
	for label, tt := range map[string]struct {
		edit func(*stepca.Options)
		says string
		kind error
	}{
		"Fingerprint": {func(o *stepca.Options) { o.Fingerprint = fingerprint(right.Root()) }, "(Not Found)", caclient.ErrInvalid},
		"RootsFile":   {func(o *stepca.Options) { o.RootsFile = name }, "unknown authority", caclient.ErrUnavailable},
		"Roots":       {func(o *stepca.Options) { o.Roots = right.Bundle() }, "unknown authority", caclient.ErrUnavailable},
		"the host's":  {func(*stepca.Options) {}, "certificate", caclient.ErrUnavailable},
	} {
		t.Run(label, func(t *testing.T) {
			t.Parallel()
			f := cafake.NewStepCA(t, wrong, path)
			o := stepca.Options{Endpoint: f.Endpoint()}
			o.HTTPClient = nil
			tt.edit(&o)
			var took tokens
			took.wrap(&o.Endpoint)
			csr, _ := newCSR(t, f)
			_, err := newClient(t, o).Sign(t.Context(), csr, 0)
			requireKind(t, err, tt.kind)
			assert.ErrorContains(t, err, tt.says)
			for _, token := range took.given {
				assert.NotContains(t, err.Error(), token)
			}
			set, err := newClient(t, o).FetchBundles(t.Context())
			if o.Roots == nil && o.RootsFile == "" {
				require.Error(t, err, "%v", set)
			}
		})
	}
	// One that has the question for the fingerprint answered with a root of its own.
	var signs int
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			signs++
		}
		_ = json.NewEncoder(w).Encode(map[string]string{"ca": string(pki.MarshalCertificatesPEM(wrong.Root()))})
	}))
	defer srv.Close()
	f := cafake.NewStepCA(t, wrong, path)
	o := stepca.Options{Endpoint: f.Endpoint(), Fingerprint: fingerprint(right.Root())}
	o.URL, o.HTTPClient = srv.URL, nil
	csr, _ := newCSR(t, f)
	_, err := newClient(t, o).Sign(t.Context(), csr, 0)
	requireKind(t, err, caclient.ErrBadAnswer)
	assert.ErrorContains(t, err, fingerprint(wrong.Root())+", and not the one in Options")

	// Each octet of the fingerprint counts.
	for i := range sha256.Size {
		print, err := hex.DecodeString(fingerprint(wrong.Root()))
		require.NoError(t, err)
		print[i] ^= 1
		o.Fingerprint = hex.EncodeToString(print)
		require.ErrorContains(t, must.Err(newClient(t, o).Sign(t.Context(), csr, 0)), "and not the one in Options", "octet %d", i)
	}
	assert.Zero(t, signs)
}

// A workload with a certificate needs no token.
func TestRenewal(t *testing.T) {
	t.Parallel()
	for label, own := range map[string]bool{"with an HTTPClient": false, "with a transport of its own": true} {
		t.Run(label, func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			f := cafake.NewStepCA(t, ca, path)
			var took tokens
			var current *tls.Certificate
			o := stepca.Options{Endpoint: f.Endpoint(), Certificate: func() *tls.Certificate { return current }}
			took.wrap(&o.Endpoint)
			if own {
				o.HTTPClient, o.Fingerprint = nil, fingerprint(ca.Root())
			} else {
				o.HTTPClient.Transport.(*http.Transport).TLSClientConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					if current == nil || time.Until(current.Leaf.NotAfter) < 0 || time.Since(current.Leaf.NotBefore) < 0 {
						return new(tls.Certificate), nil
					}
					return current, nil
				}
			}
			c := newClient(t, o)
			sign := func(more ...pki.SAN) ([]*x509.Certificate, error) {
				csr, with := newCSR(t, f, more...)
				chain, err := c.Sign(t.Context(), csr, time.Hour)
				if err == nil {
					require.NoError(t, cafake.Check(chain, csr, f.Expectation(), ca.Bundle()))
					current = with(chain)
				}
				return chain, err
			}
			for i := range 4 {
				require.NoError(t, must.Err(sign()), "%d", i)
				assert.Equal(t, 1, took.count(), "the first takes a token, and no other")
			}
			if own { // crypto/tls does without the Leaf
				current = &tls.Certificate{Certificate: current.Certificate, PrivateKey: current.PrivateKey}
			}
			_, err := sign()
			require.NoError(t, err)
			assert.Equal(t, 1, took.count())

			// Where the certificate proves something else, or nothing, a token is taken.
			_, err = sign(pki.DNSSAN("more.example.org"))
			requireKind(t, err, caclient.ErrDenied)
			assert.Equal(t, 2, took.count(), "other names")
			for name, edit := range map[string]func(*x509.Certificate){
				"expired": func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = c.NotBefore.Add(-2*time.Hour), c.NotBefore.Add(-time.Hour)
				},
				"of tomorrow": func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = c.NotBefore.Add(24*time.Hour), c.NotAfter.Add(24*time.Hour)
				},
			} {
				before := took.count()
				current = ca.SVID(path, edit).TLSCertificate()
				require.NoError(t, must.Err(sign()), name)
				assert.Equal(t, before+1, took.count(), name)
			}
			if own {
				before := took.count()
				current = spiffetest.NewCA(t, "example.org").SVID(path).TLSCertificate()
				must.Get(sign())(t)
				assert.Equal(t, before+1, took.count(), "the CA knows the root of the certificate no more")
			}
			before := took.count()
			ca.FailNext(1, &caclient.Error{Op: "sign", Kind: caclient.ErrUnauthenticated, Err: errors.New("renewal is disabled")})
			must.Get(sign())(t)
			assert.Equal(t, before+1, took.count(), "the renewal is refused, and a token helps")
			ca.FailNext(1, errors.New("down"))
			_, err = sign()
			requireKind(t, err, caclient.ErrUnavailable)
			assert.Equal(t, before+1, took.count(), "a CA that is down gets no token")

			// Without a token, the refusal is the error.
			o.Token = cafake.Give("")
			c = newClient(t, o)
			ca.FailNext(1, &caclient.Error{Op: "sign", Kind: caclient.ErrUnauthenticated, Err: errors.New("renewal is disabled")})
			_, err = sign()
			requireKind(t, err, caclient.ErrUnauthenticated)
			assert.ErrorContains(t, err, "renewal is disabled")
			must.Get(sign())(t)
		})
	}
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	f := cafake.NewStepCA(t, ca, path)
	csr, _ := newCSR(t, f)
	chain := must.Get(ca.Intermediate().Sign(t.Context(), csr, 0))(t)
	leaf, issuer := string(pki.MarshalCertificatesPEM(chain[0])), string(pki.MarshalCertificatesPEM(chain[1]))
	root := string(pki.MarshalCertificatesPEM(ca.Root()))
	answer := func(v any) []byte { return must.Get(json.Marshal(v))(t) }
	for name, body := range map[string][]byte{
		"an early version":  answer(map[string]any{"crt": leaf, "ca": issuer}),
		"a chain":           answer(map[string]any{"crt": "x", "ca": "y", "certChain": []string{leaf, issuer}}),
		"a chain, and root": answer(map[string]any{"certChain": []string{leaf, issuer, root}, "tlsOptions": map[string]any{"minVersion": 1.2}}),
		"a text of two":     answer(map[string]any{"certChain": []string{leaf + issuer}}),
	} {
		got := must.Get(sign(t, ca, csr, body))(t, name)
		assert.Equal(t, chain, got, name)
	}
	for name, body := range map[string][]byte{
		"no JSON":            []byte("<html>"),
		"null":               []byte("null"),
		"no fields":          []byte("{}"),
		"a number":           answer(map[string]any{"crt": 1}),
		"a text as chain":    answer(map[string]any{"certChain": leaf}),
		"no leaf":            answer(map[string]any{"ca": issuer}),
		"the issuer first":   answer(map[string]any{"certChain": []string{issuer, leaf}}),
		"an empty chain":     answer(map[string]any{"certChain": []string{""}}),
		"damaged":            answer(map[string]any{"certChain": []string{strings.Replace(leaf, "MII", "AII", 1)}}),
		"17":                 answer(map[string]any{"certChain": slices.Repeat([]string{leaf}, 17)}),
		"a request":          answer(map[string]any{"crt": string(csr.PEM())}),
		"JSON and something": append(answer(map[string]any{"crt": leaf}), '!'),
	} {
		got, err := sign(t, ca, csr, body)
		assert.Error(t, err, name)
		assert.Nil(t, got, name)
	}
}

// What /roots answers is read with care, and never empties what is known.
func TestRoots(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	root := string(pki.MarshalCertificatesPEM(ca.Root()))
	answer := map[string]any{"crts": []string{root}}
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "GET /1.0/roots", r.Method+" "+r.URL.Path)
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(answer)
	}))
	defer srv.Close()
	c := newClient(t, stepca.Options{Endpoint: caclient.Endpoint{URL: srv.URL, HTTPClient: srv.Client(), TrustDomain: ca.TrustDomain()}})
	fresh := func() *stepca.CA {
		return newClient(t, stepca.Options{Endpoint: caclient.Endpoint{URL: srv.URL, HTTPClient: srv.Client(), TrustDomain: ca.TrustDomain()}})
	}
	set := must.Get(c.FetchBundles(t.Context()))(t)
	leaf, _ := ca.Certificate(path)
	for says, crts := range map[string]any{
		"no certificate found": []string{},
		"roots: ":              []string{"garbage"},
		"is not the JSON":      "a text",
		"257 roots":            slices.Repeat([]string{root}, 257),
		"CA":                   []string{string(pki.MarshalCertificatesPEM(leaf[0]))},
	} {
		answer = map[string]any{"crts": crts}
		_, err := fresh().FetchBundles(t.Context())
		requireKind(t, err, caclient.ErrBadAnswer)
		assert.ErrorContains(t, err, says)
		assert.True(t, must.Get(c.FetchBundles(t.Context()))(t).Equal(set), "%s", says)
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	print := fingerprint(ca.Root())
	for says, edit := range map[string]func(*stepca.Options){
		"URL has to be":             func(o *stepca.Options) { o.URL = "ca.example.org" },
		"without TLS":               func(o *stepca.Options) { o.URL = "http://ca.example.org" },
		"TrustDomain":               func(o *stepca.Options) { o.TrustDomain = spiffe.TrustDomain{} },
		"Fingerprint is not":        func(o *stepca.Options) { o.Fingerprint = print[1:] },
		"in hexadecimal":            func(o *stepca.Options) { o.Fingerprint = strings.Repeat("g", 64) },
		"set together with Roots":   func(o *stepca.Options) { o.Fingerprint, o.Roots = print, ca.Bundle() },
		"RootsFile or HTTPClient":   func(o *stepca.Options) { o.Fingerprint, o.RootsFile = print, "roots.pem" },
		"which have the roots":      func(o *stepca.Options) { o.Fingerprint, o.HTTPClient = print, http.DefaultClient },
		"both Roots and RootsFile":  func(o *stepca.Options) { o.Roots, o.RootsFile = ca.Bundle(), "roots.pem" },
		"both Token and TokenFile":  func(o *stepca.Options) { o.TokenFile = "token" },
		"more than a scheme, a hos": func(o *stepca.Options) { o.URL += "/1.0" },
	} {
		o := stepca.Options{Endpoint: caclient.Endpoint{
			URL: "https://ca.example.org", TrustDomain: ca.TrustDomain(), Token: cafake.Give(""),
		}}
		must.Get(stepca.New(o))(t)
		edit(&o)
		c, err := stepca.New(o)
		assert.ErrorContains(t, err, says)
		assert.ErrorContains(t, err, "stepca: invalid Options: ")
		assert.Nil(t, c)
	}
}

func FuzzAnswer(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	fake := cafake.NewStepCA(f, ca, path)
	csr, _ := newCSR(f, fake)
	chain := must.Get(ca.Intermediate().Sign(f.Context(), csr, 0))(f)
	texts := []string{string(pki.MarshalCertificatesPEM(chain[0])), string(pki.MarshalCertificatesPEM(chain[1]))}
	body := must.Get(json.Marshal(map[string]any{"crt": texts[0], "ca": texts[1], "certChain": texts}))(f)
	f.Add(body)
	f.Add([]byte(`{"certChain":[]}`))
	f.Add([]byte(`{"status":401,"message":"no"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		_ = caconn.Message(body)
		chain, err := sign(t, ca, csr, body)
		if (err == nil) == (len(chain) == 0) {
			t.Fatalf("%d certificates and the error %v", len(chain), err)
		}
		if err == nil && !pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()) {
			t.Fatal("the leaf has another key")
		}
	})
}

func TestConformance(t *testing.T) {
	cafake.Fewer(t) // package local takes all
	t.Parallel()
	cafake.Run(t, cafake.NewStepCA, func(f *cafake.Fake) (caclient.CA, error) {
		return stepca.New(stepca.Options{Endpoint: f.Endpoint()})
	})
}

// recorded is a step-ca in the place of a network: it notes what is asked, and signs everything.
type recorded struct {
	ca    *spiffetest.CA
	paths []string
	body  struct{ CSR, OTT, NotAfter string }

	answer []byte // in place of a signature
}

// sign requests a certificate of a step-ca that gives this answer.
func sign(t testing.TB, ca *spiffetest.CA, csr *pki.CSR, answer []byte) ([]*x509.Certificate, error) {
	t.Helper()
	return newClient(t, stepca.Options{Endpoint: caclient.Endpoint{
		URL: "https://ca.test", TrustDomain: ca.TrustDomain(), Roots: ca.Bundle(), Token: cafake.Give("token"),
		HTTPClient: &http.Client{Transport: &recorded{ca: ca, answer: answer}},
	}}).Sign(t.Context(), csr, 0)
}

func (r *recorded) RoundTrip(q *http.Request) (*http.Response, error) {
	r.paths = append(r.paths, q.URL.Path)
	r.body.CSR, r.body.OTT, r.body.NotAfter = "", "", ""
	if err := json.NewDecoder(q.Body).Decode(&r.body); err != nil {
		return nil, err
	}
	answer := r.answer
	if answer == nil {
		csr, err := pki.ParseCSRPEM([]byte(r.body.CSR))
		if err != nil {
			return nil, err
		}
		chain, err := r.ca.Sign(q.Context(), csr, 0)
		if err != nil {
			return nil, err
		}
		answer = fmt.Appendf(nil, `{"crt":%q,"ca":%q}`, pki.MarshalCertificatesPEM(chain[0]),
			pki.MarshalCertificatesPEM(r.ca.Root()))
	}
	return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(answer)), Request: q}, nil
}

// A certificate is renewed by itself only if it is for exactly what is asked for: the CA would sign its names again, with those that are too many.
func TestRenewableForTheSameNames(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	id := pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))
	const renewed, signed = "/1.0/rekey", "/1.0/sign"
	for name, c := range map[string]struct {
		has  func(*x509.Certificate)
		asks []pki.SAN
		want string
	}{
		"the same":       {func(*x509.Certificate) {}, []pki.SAN{id}, renewed},
		"the same two":   {func(c *x509.Certificate) { c.DNSNames = []string{"web"} }, []pki.SAN{id, pki.DNSSAN("web")}, renewed},
		"in other order": {func(c *x509.Certificate) { c.DNSNames = []string{"a", "b"} }, []pki.SAN{pki.DNSSAN("b"), id, pki.DNSSAN("a")}, renewed},
		"one too many":   {func(c *x509.Certificate) { c.DNSNames = []string{"web"} }, []pki.SAN{id}, signed},
		"one too few":    {func(*x509.Certificate) {}, []pki.SAN{id, pki.DNSSAN("web")}, signed},
		"another":        {func(c *x509.Certificate) { c.DNSNames = []string{"a"} }, []pki.SAN{id, pki.DNSSAN("b")}, signed},
		"ended":          {func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) }, []pki.SAN{id}, signed},
	} {
		chain, key := ca.Certificate("/web", c.has)
		r := &recorded{ca: ca}
		client := newClient(t, stepca.Options{
			Endpoint: caclient.Endpoint{
				URL: "https://ca.test", TrustDomain: ca.TrustDomain(), HTTPClient: &http.Client{Transport: r}, Roots: ca.Bundle(),
				Token: cafake.Give("token"),
			},
			Certificate: func() *tls.Certificate { return &tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key} },
		})
		newKey := must.Get(pki.NewKey("ecdsa-p256"))(t)
		csr := must.Get(pki.NewCSR(newKey, pki.CSROptions{SANs: c.asks}))(t)
		require.NoError(t, must.Err(client.Sign(t.Context(), csr, 0)), name)
		assert.Equal(t, []string{c.want}, r.paths, name)
		assert.Equal(t, c.want == signed, r.body.OTT == "token", name)
	}
}

// A lifetime goes to the CA in whole seconds, and the shortest is one; without a wish there is none.
func TestLifetimeInSeconds(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := &recorded{ca: ca}
	client := newClient(t, stepca.Options{Endpoint: caclient.Endpoint{
		URL: "https://ca.test", TrustDomain: ca.TrustDomain(), HTTPClient: &http.Client{Transport: r}, Roots: ca.Bundle(),
		Token: cafake.Give("token"),
	}})
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))}}))(t)
	for wish, want := range map[time.Duration]string{
		0: "", 1: "1s", 999 * time.Millisecond: "1s", time.Second: "1s", 1999 * time.Millisecond: "1s", time.Hour + time.Millisecond: "1h0m0s",
	} {
		must.Get(client.Sign(t.Context(), csr, wish))(t)
		assert.Equal(t, want, r.body.NotAfter, "%v", wish)
	}
}

// startCA starts a CA for the example, which has no test.
func startCA() (endpoint caclient.Endpoint, rootFingerprint string, stop func()) {
	t := new(exampleT)
	root := spiffetest.NewCA(t, "example.org")
	endpoint = cafake.NewStepCA(t, root, "/web").Endpoint()
	endpoint.HTTPClient = nil
	return endpoint, fingerprint(root.Root()), t.end
}

// exampleT is what a test function is given; an example has none, and this one does not fail.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (*exampleT) Helper() {}

func (t *exampleT) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *exampleT) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}
