package athenz_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	namespace = athenztest.Namespace
	account   = athenztest.Account
	secret    = athenztest.Secret
)

type (
	object = athenztest.Object
	array  = athenztest.Array
)

func ecKey(t testing.TB, curve elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(curve, rand.Reader))(t)
	return key
}

// call asks a handler.
func call(t testing.TB, h http.Handler, method, path string, body any) (int, string) {
	t.Helper()
	data, ok := body.(string)
	if !ok && body != nil {
		text := must.Get(json.Marshal(body))(t)
		data = string(text)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(data)))
	return w.Code, w.Body.String()
}

// confirm posts a confirmation to a provider, and returns the status and the body of the answer.
func confirm(t testing.TB, c *athenztest.Cluster, client *http.Client, path string, body any) (int, string) {
	t.Helper()
	data, ok := body.(string)
	if !ok {
		text := must.Get(json.Marshal(body))(t)
		data = string(text)
	}
	answer := must.Get(client.Post(c.Provider+path, "application/json", strings.NewReader(data)))(t)
	defer answer.Body.Close()
	text := must.Get(io.ReadAll(answer.Body))(t)
	return answer.StatusCode, string(text)
}

func confirmation(document string) object {
	return object{
		"provider": "k8s.admin.athenz-callback", "domain": "media.sports", "service": "frontend", "attestationData": document,
		"attributes": object{
			"instanceId": "web-0", "clientIP": "10.0.0.1", "sanIP": "10.1.2.3",
			"sanDNS": "frontend.media-sports.svc.cluster.local,web-0.instanceid.athenz.svc.cluster.local",
			"sanURI": "spiffe://media.sports/sa/frontend",
		},
	}
}

func TestProvider(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-11.1-1", "ATH-11.1-2", "ATH-11.1-5", "ATH-11.1-6", "ATH-11.1-8", "ATH-11.1-9", "ATH-11.1-10", "ATH-11.2-1", "ATH-11.2-2", "ATH-11.2-3", "ATH-11.2-4",
		"ATH-11.2-5", "ATH-12-1", "ATH-12-2", "ATH-12-3", "ATH-12-4", "ATH-12-5", "ATH-12-6", "ATH-12-8", "ATH-12-9", "ATH-12-10", "ATH-12-12",
		"ATH-18-9")
	c := athenztest.New(t)
	client := c.MutualTLS(cafake.ZTSName)

	for _, path := range []string{"/instance", "/identity"} {
		doc := c.Sign(nil)
		code, text := confirm(t, c, client, path, confirmation(doc))
		require.Equal(t, http.StatusOK, code, text)
		var answer struct {
			Provider, Domain, Service, AttestationData string
			Attributes                                 map[string]string
		}
		require.NoError(t, json.Unmarshal([]byte(text), &answer))
		assert.Equal(t, "frontend", answer.Service)
		assert.Equal(t, doc, answer.AttestationData)
		assert.Equal(t, "web-0", answer.Attributes["instanceId"])
		code, text = confirm(t, c, client, path, confirmation(doc))
		assert.Equal(t, http.StatusForbidden, code)
		assert.Contains(t, text, "used before")
	}

	// Other callers.
	for cn, want := range map[string]int{"": 401, "media.sports.frontend": 401, "sys.auth.zts:role.x": 401, "ZTS.example.cloud": 403} {
		code, text := confirm(t, c, c.MutualTLS(cn), "/instance", confirmation("x.y.z"))
		assert.Equal(t, want, code, "%q: %s", cn, text)
	}
	stranger := spiffetest.NewCA(t, "athenz.example")
	chain, key := stranger.Certificate("/zts", func(x *x509.Certificate) {
		x.URIs = nil
		x.Subject.CommonName = cafake.ZTSName
		x.DNSNames = []string{"zts"}
	})
	forged := must.Get(pki.NewCredential(chain, key))(t)
	tr := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: c.CA.Bundle().CertPool(), Certificates: []tls.Certificate{*forged.TLSCertificate()}}}
	defer tr.CloseIdleConnections()
	code, _ := confirm(t, c, &http.Client{Transport: tr}, "/instance", confirmation("x.y.z"))
	assert.Equal(t, http.StatusUnauthorized, code, "the name of ZTS under other roots")

	attribute := func(name, value string) func(object) {
		return func(o object) { o["attributes"].(object)[name] = value }
	}
	member := func(name string, value any) func(object) { return func(o object) { o[name] = value } }
	good := c.Sign(nil)
	for _, v := range []struct {
		name string
		edit func(object)
		doc  func(*athenz.PodSubject)
		pod  func(object)
		code int
		says string
	}{
		{"another provider", member("provider", "k8s.admin.other"), nil, nil, 403, "another provider"},
		{"no provider", member("provider", ""), nil, nil, 400, "missing or empty"},
		{"no domain", member("domain", ""), nil, nil, 400, "missing or empty"},
		{"no service", member("service", ""), nil, nil, 400, "missing or empty"},
		{"no document", member("attestationData", ""), nil, nil, 400, "attestation data"},
		{"a number", member("service", 7), nil, nil, 400, "JSON"},
		{"attributes are a list", member("attributes", array{}), nil, nil, 400, "JSON"},
		{"a service that is none", member("service", "a/b"), nil, nil, 400, "names consist of"},
		{"a domain that is no namespace", member("domain", "media_sports"), nil, nil, 403, "no namespace"},
		{"another service", member("service", "backend"), nil, nil, 403, "another service"},
		{"another domain", member("domain", "media.news"), nil, nil, 403, "another service"},
		{"a document that is none", member("attestationData", "abc"), nil, nil, 403, "invalid identity document"},
		{"a document of another namespace", nil, func(s *athenz.PodSubject) { s.Namespace = "media-news" }, nil, 403, "namespace"},
		{"a document of another pod", nil, func(s *athenz.PodSubject) { s.Pod = "web-1" }, nil, 403, "no such pod"},
		{"a document of another address", nil, func(s *athenz.PodSubject) { s.IP = netip.MustParseAddr("10.1.2.4") }, nil, 403, "address"},
		{"a document of the second address", nil, func(s *athenz.PodSubject) { s.IP = netip.MustParseAddr("fd00::3") }, nil, 403, "address"},
		{"a pod of another account", nil, nil, func(o object) { o["spec"].(object)["serviceAccountName"] = "backend" }, 403, "service account"},
		{"a pod that has failed", nil, nil, func(o object) { o["status"].(object)["phase"] = "Failed" }, 403, "Failed"},
		{"a pod that has succeeded", nil, nil, func(o object) { o["status"].(object)["phase"] = "Succeeded" }, 403, "Succeeded"},
		{"a pod that is being deleted", nil, nil, func(o object) { o["metadata"].(object)["deletionTimestamp"] = "2026-01-01T00:00:00Z" }, 403, "deleted"},
		{"a pod without an address", nil, nil, func(o object) { o["status"] = object{"phase": "Pending"} }, 403, "no address"},
		{"another instance", attribute("instanceId", "web-1"), nil, nil, 403, "instance ID"},
		{"another's address", attribute("sanIP", "10.1.2.3,10.1.2.9"), nil, nil, 403, "10.1.2.9"},
		{"an address that is none", attribute("sanIP", "x"), nil, nil, 403, "address"},
		{"another's DNS name", attribute("sanDNS", "backend.media-sports.svc.cluster.local"), nil, nil, 403, "backend"},
		{"another instance's DNS name", attribute("sanDNS", "web-1.instanceid.athenz.svc.cluster.local"), nil, nil, 403, "web-1"},
		{"a DNS name below", attribute("sanDNS", "a.frontend.media-sports.svc.cluster.local"), nil, nil, 403, "DNS name"},
		{"a wildcard above", attribute("sanDNS", "*.media-sports.svc.cluster.local"), nil, nil, 403, "DNS name"},
		{"an empty DNS name", attribute("sanDNS", "frontend.media-sports.svc.cluster.local,"), nil, nil, 403, "DNS name"},
		{"doubled hyphens", attribute("sanDNS", "frontend.media--sports.svc.cluster.local"), nil, nil, 403, "DNS name"},
		{"another's SPIFFE ID", attribute("sanURI", "spiffe://media.sports/sa/backend"), nil, nil, 403, "URI"},
		{"a SPIFFE ID of another domain", attribute("sanURI", "spiffe://media.news/sa/frontend"), nil, nil, 403, "URI"},
		{"a SPIFFE ID of another namespace", attribute("sanURI", "spiffe://athenz.example/ns/other/sa/media.sports.frontend"), nil, nil, 403, "URI"},
		{"a SPIFFE ID of another trust domain", attribute("sanURI", "spiffe://other.example/ns/media-sports/sa/media.sports.frontend"), nil, nil, 403, "URI"},
		{"the SPIFFE ID of the seed's era", attribute("sanURI", "spiffe://cluster.local/ns/media-sports/sa/frontend"), nil, nil, 403, "URI"},
		{"a URI that is none", attribute("sanURI", "https://example.org/"), nil, nil, 403, "URI"},
		{"another instance's URI", attribute("sanURI", "athenz://instanceid/k8s.admin.athenz-callback/web-1"), nil, nil, 403, "URI"},
		{"another provider's URI", attribute("sanURI", "athenz://instanceid/k8s.admin.other/web-0"), nil, nil, 403, "URI"},
	} {
		t.Run(v.name, func(t *testing.T) {
			c.Put("web-0", v.pod)
			doc := good
			if v.doc != nil {
				doc = c.Sign(v.doc)
			}
			body := confirmation(doc)
			if v.edit != nil {
				v.edit(body)
			}
			code, text := confirm(t, c, client, "/instance", body)
			assert.Equal(t, v.code, code, text)
			assert.Contains(t, text, v.says)
		})
	}
	c.Put("web-0", nil)
	for _, body := range []string{"", "{", "[]", "null", `"x"`, `{"provider":"a","provider":"b"}`, strings.Repeat("[", 1<<16), strings.Repeat(" ", 1<<17)} {
		code, _ := confirm(t, c, client, "/instance", body)
		assert.Equal(t, http.StatusBadRequest, code, "%.20q", body)
	}

	// What was refused is not used up, and all other forms of the names are good.
	body := confirmation(good)
	attributes := body["attributes"].(object)
	attributes["instanceId"] = "8c5b0a3e-web-0"
	attributes["sanIP"] = "10.1.2.3,fd00:0::3"
	attributes["sanDNS"] = "*.frontend.media-sports.svc.cluster.local,8c5b0a3e-web-0.instanceid.athenz.svc.cluster.local"
	attributes["sanURI"] = "spiffe://athenz.example/ns/media-sports/sa/media.sports.frontend,athenz://instanceid/k8s.admin.athenz-callback/8c5b0a3e-web-0"
	body["domain"] = "Media.Sports"
	code, text := confirm(t, c, client, "/instance", body)
	assert.Equal(t, http.StatusOK, code, text)

	// A refresh has no document.
	body = confirmation("")
	code, text = confirm(t, c, client, "/refresh", body)
	assert.Equal(t, http.StatusOK, code, text)
	body["attributes"].(object)["instanceId"] = ""
	code, _ = confirm(t, c, client, "/refresh", body)
	assert.Equal(t, http.StatusBadRequest, code)
	body = confirmation(good) // if there is one, it has to be new
	code, _ = confirm(t, c, client, "/refresh", body)
	assert.Equal(t, http.StatusForbidden, code)
	c.API.Remove("/api/v1/namespaces/" + namespace + "/pods/web-0")
	code, text = confirm(t, c, client, "/refresh", confirmation(""))
	assert.Equal(t, http.StatusForbidden, code, text)

	c.API.FailNext(1, kubetest.Fault{Code: 503}, nil)
	code, text = confirm(t, c, client, "/refresh", confirmation(""))
	assert.Equal(t, http.StatusServiceUnavailable, code, text)

	answer := must.Get(c.MutualTLS("").Get(c.Provider + "/healthz"))(t)
	defer answer.Body.Close()
	assert.Equal(t, http.StatusOK, answer.StatusCode)
}

// TestReplayedInAnotherForm has a document be replayed in forms that say the same, of which the second signature of ECDSA is a
// good one.
func TestReplayedInAnotherForm(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-12-12")
	c := athenztest.New(t)
	client := c.MutualTLS(cafake.ZTSName)
	key := ecKey(t, elliptic.P256())
	c.Keys.Add(t, "v2", key)
	document := c.Sign(nil)
	code, text := confirm(t, c, client, "/instance", confirmation(document))
	require.Equal(t, http.StatusOK, code, text)

	parts := strings.Split(document, ".")
	signature := must.Get(base64.RawURLEncoding.DecodeString(parts[2]))(t)
	other := new(big.Int).Sub(key.Params().N, new(big.Int).SetBytes(signature[32:]))
	malleated := parts[0] + "." + parts[1] + "." + base64.RawURLEncoding.EncodeToString(append(signature[:32:32], other.FillBytes(make([]byte, 32))...))
	require.NoError(t, must.Err(c.Keys.Verifier(t).Verify(malleated)), "it is a good signature, too")
	code, text = confirm(t, c, client, "/instance", confirmation(malleated))
	assert.Equal(t, http.StatusForbidden, code)
	assert.Contains(t, text, "used before")

	last := strings.IndexByte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", parts[2][len(parts[2])-1])
	trailing := parts[2][:len(parts[2])-1] + string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[last|1])
	for name, form := range map[string]string{
		"as it was": document, "padding": document + "==", "padding of the payload": parts[0] + "." + parts[1] + "=." + parts[2], "bits at the end": parts[0] + "." + parts[1] + "." + trailing,
		"a space": document + " ", "a line break": parts[0] + ".\n" + parts[1] + "." + parts[2], "a fourth part": document + ".", "Bearer": "Bearer " + document,
		"base64 with + and /": strings.NewReplacer("-", "+", "_", "/").Replace(document + "="),
	} {
		code, _ := confirm(t, c, client, "/instance", confirmation(form))
		assert.Equal(t, http.StatusForbidden, code, name)
		code, _ = confirm(t, c, client, "/refresh", confirmation(form))
		assert.Equal(t, http.StatusForbidden, code, name)
	}
}

// TestProviderSharesUses has two replicas of a provider with one memory.
func TestProviderSharesUses(t *testing.T) {
	t.Parallel()
	c := athenztest.New(t)
	var mu sync.Mutex
	used := map[[32]byte]bool{}
	var failure error
	cfg := c.ProviderConfig()
	cfg.FirstUse = func(_ context.Context, document [32]byte, expires time.Time) (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		first := !used[document]
		used[document] = true
		assert.WithinDuration(t, time.Now().Add(5*time.Minute), expires, time.Minute)
		return first, failure
	}
	doc := c.Sign(nil)
	var codes []int
	for range 2 {
		c.Provider = c.ServeProvider(cfg)
		code, _ := confirm(t, c, c.MutualTLS(cafake.ZTSName), "/instance", confirmation(doc))
		codes = append(codes, code)
	}
	assert.Equal(t, []int{200, 403}, codes)
	failure = errors.New("the database is away")
	code, text := confirm(t, c, c.MutualTLS(cafake.ZTSName), "/instance", confirmation(c.Sign(nil)))
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.NotContains(t, text, "database")
}

// A document that was used is remembered for as long as it is good, to the end of the leeway, whatever else is used meanwhile; and
// no longer, or else the memory would fill.
func TestUsedAsLongAsGood(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-12-12")
	const life, leeway = 5 * time.Minute, 5 * time.Second
	keys := athenztest.NewKeys(t)
	subject := athenztest.Subject()
	synctest.Test(t, func(t *testing.T) {
		signer := must.Get(athenz.NewSigner(keys.Private, "", life))(t)
		verifier := must.Get(athenz.NewVerifier(keys.Public, ""))(t)
		h, err := athenz.NewProvider(athenz.ProviderConfig{
			Service: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"},
			ZTS: authn.Func(func(*http.Request) (*authn.Caller, error) {
				return &authn.Caller{Method: "test", Name: cafake.ZTSName}, nil
			}),
			Verifier: verifier, Suffix: athenztest.Suffix,
			Pods: func(context.Context, string, string) (*athenz.Pod, error) {
				return &athenz.Pod{
					Namespace: namespace, Name: "web-0", UID: "u", ServiceAccount: account, IP: subject.IP,
					IPs: []netip.Addr{subject.IP, netip.MustParseAddr("fd00::3")}, Phase: "Running",
				}, nil
			},
		})
		require.NoError(t, err)
		use := func(document string) (int, string) {
			return call(t, h, http.MethodPost, "/instance", confirmation(document))
		}
		sign := func() string {
			document := must.Get(signer(t.Context(), subject))(t)
			return document
		}
		first, begin := sign(), time.Now()
		code, text := use(first)
		require.Equal(t, http.StatusOK, code, text)
		for time.Since(begin) < life+leeway-time.Second {
			time.Sleep(time.Second)
			code, text := use(first)
			require.Equal(t, http.StatusForbidden, code, "after %v", time.Since(begin))
			require.Contains(t, text, "used before", "after %v", time.Since(begin))
			if time.Since(begin)%(7*time.Second) == 0 {
				code, text := use(sign()) // which has what is old be forgotten
				require.Equal(t, http.StatusOK, code, text)
			}
		}
		require.NoError(t, must.Err(verifier.Verify(first)), "it is good all the time")
		time.Sleep(time.Second)
		code, text = use(first)
		require.Equal(t, http.StatusForbidden, code)
		require.Contains(t, text, "invalid identity document", "and now it is not")
	})
}

func TestNewProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-2-12", "ATH-18-7")
	c := athenztest.New(t)
	good := c.ProviderConfig()
	for name, edit := range map[string]func(*athenz.ProviderConfig){
		"service":           func(cfg *athenz.ProviderConfig) { cfg.Service.Name = "" },
		"ZTS":               func(cfg *athenz.ProviderConfig) { cfg.ZTS = nil },
		"verifier":          func(cfg *athenz.ProviderConfig) { cfg.Verifier = nil },
		"pods":              func(cfg *athenz.ProviderConfig) { cfg.Pods = nil },
		"athenztest.Suffix": func(cfg *athenz.ProviderConfig) { cfg.Suffix = "" },
		"mapping":           func(cfg *athenz.ProviderConfig) { cfg.Mapping.AdminDomain = "A" },
	} {
		cfg := good
		edit(&cfg)
		require.ErrorContains(t, must.Err(athenz.NewProvider(cfg)), "athenz: new provider: ", name)
	}
	// A domain with a hyphen: a doubled one in a DNS name would be that of another domain.
	c.Provider = c.ServeProvider(good)
	c.API.Put("/api/v1/namespaces/foo-bar--baz/pods/web-0", object{
		"metadata": object{"uid": "u"}, "spec": object{"serviceAccountName": account}, "status": object{"phase": "Running", "podIP": "10.1.2.3"},
	})
	for name, want := range map[string]int{
		"frontend.foo-bar-baz.svc.cluster.local": 200, "*.frontend.foo-bar-baz.svc.cluster.local": 200, "frontend.foo-bar--baz.svc.cluster.local": 403,
	} {
		body := confirmation("")
		body["domain"] = "foo.bar-baz"
		body["attributes"] = object{"instanceId": "web-0", "sanDNS": name}
		code, text := confirm(t, c, c.MutualTLS(cafake.ZTSName), "/refresh", body)
		assert.Equal(t, want, code, "%s: %s", name, text)
	}
}

func FuzzConfirmation(f *testing.F) {
	c := athenztest.New(f)
	client := c.MutualTLS(cafake.ZTSName)
	good, err := json.Marshal(confirmation(""))
	require.NoError(f, err)
	f.Add(string(good))
	f.Add(`{"provider":"a.b","domain":"a","service":"b","attestationData":"x.y.z","attributes":{"sanIP":",,"}}`)
	f.Fuzz(func(t *testing.T, body string) {
		code, text := confirm(t, c, client, "/instance", body)
		if code != http.StatusBadRequest && code != http.StatusForbidden {
			t.Fatalf("%d %s", code, text)
		}
	})
}
