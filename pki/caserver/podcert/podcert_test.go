package podcert_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
	"github.com/svidkit/svidkit/spiffe"
)

const name = "example.org/spiffe"

var td = spiffe.MustParseTrustDomain("example.org")

// recorder is a CA, and counts what it signs by the request.
type recorder struct {
	ca.Signer
	mu      sync.Mutex
	signed  map[string]int
	records []ca.Issuance
	refuse  error // what Sign answers while it is set
}

func (r *recorder) set(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = err
}

func (r *recorder) Sign(ctx context.Context, q ca.Request) ([]*x509.Certificate, error) {
	r.mu.Lock()
	refuse := r.refuse
	if refuse == nil {
		r.signed[q.PodRequest]++
	}
	r.mu.Unlock()
	if refuse != nil {
		return nil, refuse
	}
	return r.Signer.Sign(ctx, q)
}

func (r *recorder) Record(_ context.Context, i *ca.Issuance) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, *i)
	return nil
}

func (r *recorder) times(request string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.signed[request]
}

// newCA returns a CA that records what it signs.
func newCA(t testing.TB) *recorder {
	t.Helper()
	r := &recorder{signed: map[string]int{}}
	a := must.Get(ca.New(ca.Config{TrustDomain: td, Auditor: r, Rotation: ca.Rotation{Propagation: time.Hour}}))(t)
	r.Signer = a
	return r
}

// cluster is an API server with the signers of a test.
type cluster struct {
	*kubetest.Server
	t    testing.TB
	logs programtest.Log
	made atomic.Int64
}

func start(t testing.TB) *cluster { return &cluster{Server: kubetest.Start(t), t: t} }

// options returns those of a signer in the cluster.
func (c *cluster) options(signer ca.Signer) podcert.Options {
	return podcert.Options{
		SignerName: name, TrustDomain: td, CA: signer, APIServer: c.URL(), HTTPClient: c.Client(), Logger: slog.New(slog.NewTextHandler(&c.logs, nil)),
	}
}

// run runs a signer until the test ends, or until stop is called.
func (c *cluster) run(o podcert.Options, prepare ...func(*podcert.Signer)) (s *podcert.Signer, stop func()) {
	c.t.Helper()
	s = must.Get(podcert.New(o))(c.t)
	for _, p := range prepare {
		p(s)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); assert.NoError(c.t, <-done) })
	c.t.Cleanup(stop)
	return s, stop
}

type spec struct {
	SignerName                string            `json:"signerName"`
	PodName                   string            `json:"podName"`
	PodUID                    string            `json:"podUID"`
	ServiceAccountName        string            `json:"serviceAccountName"`
	ServiceAccountUID         string            `json:"serviceAccountUID"`
	NodeName                  string            `json:"nodeName"`
	NodeUID                   string            `json:"nodeUID"`
	MaxExpirationSeconds      int               `json:"maxExpirationSeconds"`
	StubPKCS10Request         []byte            `json:"stubPKCS10Request"`
	UnverifiedUserAnnotations map[string]string `json:"unverifiedUserAnnotations,omitempty"`
}

type status struct {
	Conditions []struct{ Type, Status, Reason, Message string }

	CertificateChain                    string
	NotBefore, BeginRefreshAt, NotAfter time.Time
}

var keys = sync.OnceValue(func() (der []byte) {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	return stub(key)
})

// stub returns a request as the kubelet makes it: with a key, and without a name.
func stub(key crypto.Signer) []byte {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		panic(err)
	}
	return der
}

// at returns the path of a request in the namespace shop.
func at(request string) string {
	return "/apis/certificates.k8s.io/v1/namespaces/shop/podcertificaterequests/" + request
}

// ask creates a request of the pod web-0, account web, node n1, after change.
func (c *cluster) ask(change func(*spec)) (request string) {
	request = fmt.Sprint("request-", c.made.Add(1))
	s := spec{
		SignerName: name, PodName: "web-0", PodUID: "uid-of-web-0", ServiceAccountName: "web", ServiceAccountUID: "uid-of-web", NodeName: "n1", NodeUID: "uid-of-n1",
		MaxExpirationSeconds: 86400, StubPKCS10Request: keys(),
	}
	if change != nil {
		change(&s)
	}
	c.Put(at(request), map[string]any{"metadata": map[string]any{}, "spec": s})
	return request
}

// now returns the status of a request.
func (c *cluster) now(request string) (s status) {
	var o struct{ Status status }
	c.Get(at(request), &o)
	return o.Status
}

// answer waits for the answer to a request.
func (c *cluster) answer(request string) (s status) {
	c.t.Helper()
	for wait := time.Millisecond; len(s.Conditions) == 0; wait += wait / 8 {
		require.Less(c.t, wait, 8*time.Second, "%s has no answer after a minute\n%s", request, &c.logs)
		time.Sleep(wait)
		s = c.now(request)
	}
	return s
}

// waiting returns how many requests wait.
func waiting(t testing.TB, s *podcert.Signer) (n int) {
	var text strings.Builder
	require.NoError(t, s.Report().Metrics(&text))
	_, rest, _ := strings.Cut(text.String(), "\nsvidkit_ca_pod_requests_waiting ")
	must.Get(fmt.Sscan(rest, &n))(t)
	return n
}

// issued waits for the certificate of a request, and returns it.
func (c *cluster) issued(request string) (status, *x509.Certificate) {
	c.t.Helper()
	s := c.answer(request)
	require.Equal(c.t, "Issued", s.Conditions[0].Type, "%+v", s.Conditions)
	require.Equal(c.t, "True", s.Conditions[0].Status)
	block, rest := pem.Decode([]byte(s.CertificateChain))
	require.Empty(c.t, rest) // a root of svidkit signs leaves itself
	return s, must.Get(x509.ParseCertificate(block.Bytes))(c.t)
}

// A pod gets the certificate of its service account, for its key, as long as it asks for.
func TestIssued(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	s, _ := c.run(c.options(a))
	request := c.ask(nil)
	got, leaf := c.issued(request)
	require.Equal(t, "spiffe://example.org/ns/shop/sa/web", must.Get(spiffe.IDFromCertificate(leaf))(t).String())
	require.Equal(t, must.Get(pki.ParseCSR(keys()))(t).PublicKey(), leaf.PublicKey)
	require.Equal(t, leaf.NotBefore, got.NotBefore)
	require.Equal(t, leaf.NotAfter, got.NotAfter)
	require.Equal(t, 24*time.Hour, leaf.NotAfter.Sub(leaf.NotBefore))
	refresh := time.Until(got.BeginRefreshAt)
	require.Greater(t, refresh, 7*time.Hour) // 30 to 50 % of a day
	require.Less(t, refresh, 12*time.Hour)

	a.mu.Lock()
	require.Len(t, a.records, 1)
	record := a.records[0]
	a.mu.Unlock()
	require.Equal(t, "system:node:n1", record.Caller)
	require.Equal(t, "pod-certificate-request", record.Method)
	require.Equal(t, spiffe.Pod{
		Namespace: "shop", ServiceAccount: "web", ServiceAccountUID: "uid-of-web", Name: "web-0", UID: "uid-of-web-0", Node: "n1", NodeUID: "uid-of-n1",
	}, record.Pod)
	require.Equal(t, request, record.PodRequest)
	require.Contains(t, string(must.Get(json.Marshal(record))(t)), `"request":"`+request+`"`)

	r := s.Report()
	var text strings.Builder
	require.Eventually(t, func() bool {
		text.Reset()
		return r.Metrics(&text) == nil && strings.Contains(text.String(), `svidkit_ca_pod_requests_total{answer="Issued"} 1`)
	}, time.Minute, 10*time.Millisecond, "%s", &text)
	require.Contains(t, text.String(), "svidkit_ca_pod_requests_waiting 0\n")
	r = s.Report()
	require.True(t, r.Upstreams[0].OK)
	require.False(t, r.Upstreams[0].LastSuccess.IsZero())
}

// The lifetime is what the request allows, and at most what the operator does; renewals are spread.
func TestLifetime(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	o := c.options(a)
	o.TTL = 3 * time.Hour
	c.run(o)
	for seconds, want := range map[int]time.Duration{3600: time.Hour, 7200: 2 * time.Hour, 86400: 3 * time.Hour} {
		got, leaf := c.issued(c.ask(func(s *spec) { s.MaxExpirationSeconds = seconds }))
		require.Equal(t, want, leaf.NotAfter.Sub(leaf.NotBefore), seconds)
		require.LessOrEqual(t, got.BeginRefreshAt.Sub(leaf.NotBefore), want/2+2*time.Minute)
		require.GreaterOrEqual(t, got.BeginRefreshAt.Sub(leaf.NotBefore), 10*time.Minute)
	}
	moments := map[time.Time]bool{}
	for range 20 {
		got, _ := c.issued(c.ask(nil))
		moments[got.BeginRefreshAt] = true
	}
	require.Greater(t, len(moments), 15)
}

// Each kind of key that the kubelet makes is certified.
func TestKeys(t *testing.T) {
	t.Parallel()
	c := start(t)
	c.run(c.options(newCA(t)))
	var stubs [][]byte
	for _, file := range []string{"rsa-3072", "rsa-4096"} {
		stubs = append(stubs, must.Get(os.ReadFile("testdata/"+file+".csr"))(t))
	}
	for _, kind := range []string{"ecdsa-p256", "ecdsa-p384", "ed25519"} {
		stubs = append(stubs, stub(must.Get(pki.NewKey(kind))(t)))
	}
	for _, der := range append(stubs, stub(must.Get(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))(t))) {
		_, leaf := c.issued(c.ask(func(s *spec) { s.StubPKCS10Request = der }))
		require.Equal(t, must.Get(x509.ParseCertificateRequest(der))(t).PublicKey, leaf.PublicKey)
	}
}

// What can never be certified is answered, with the reason, and is not signed.
func TestRefused(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	o := c.options(a)
	o.ID = func(p spiffe.Pod) (spiffe.ID, error) {
		switch p.Name {
		case "none":
			return spiffe.ID{}, errors.New("pod none\nis not for the mesh")
		case "foreign":
			return spiffe.ParseID("spiffe://other.test/ns/shop/sa/web")
		case "panics":
			return spiffe.ID{}, nil
		}
		return td.WorkloadID("ns", p.Namespace, "sa", p.ServiceAccount)
	}
	c.run(o)
	for _, v := range []struct {
		name, kind, reason, message string
		change                      func(*spec)
	}{
		{"annotation", "Denied", "InvalidUnverifiedUserAnnotations", "example.org/role", func(s *spec) { s.UnverifiedUserAnnotations = map[string]string{"example.org/role": "admin"} }},
		{"empty annotation", "Denied", "InvalidUnverifiedUserAnnotations", "takes no annotations", func(s *spec) { s.UnverifiedUserAnnotations = map[string]string{"example.org/x": ""} }},
		{"weak key", "Denied", "UnsupportedKeyType", "ECDSAP256, ECDSAP384, ECDSAP521, ED25519, RSA3072 and RSA4096", func(s *spec) { s.StubPKCS10Request = pemOf(t, weak) }},
		{"no CSR", "Failed", "InvalidRequest", "", func(s *spec) { s.StubPKCS10Request = nil }},
		{"CSR cut", "Failed", "InvalidRequest", "", func(s *spec) { s.StubPKCS10Request = keys()[:50] }},
		{"CSR with a tail", "Failed", "InvalidRequest", "not in DER", func(s *spec) { s.StubPKCS10Request = append(bytes.Clone(keys()), 0) }},
		{"wrong signature", "Failed", "InvalidRequest", "not by the key", func(s *spec) {
			s.StubPKCS10Request = bytes.Clone(keys())
			s.StubPKCS10Request[len(s.StubPKCS10Request)-1] ^= 1
		}},
		{"no identity", "Denied", "NoIdentity", "pod none is not for the mesh", func(s *spec) { s.PodName = "none" }},
		{"account that is no part of a path", "Denied", "NoIdentity", "", func(s *spec) { s.ServiceAccountName = ".." }},
		{"no account", "Denied", "NoIdentity", "", func(s *spec) { s.ServiceAccountName = "" }},
		{"another trust domain", "Failed", "NotCertified", "other.test", func(s *spec) { s.PodName = "foreign" }},
		{"zero identity", "Failed", "NotCertified", "", func(s *spec) { s.PodName = "panics" }},
	} {
		got := c.answer(c.ask(v.change))
		require.Equal(t, v.kind, got.Conditions[0].Type, v.name)
		require.Equal(t, v.reason, got.Conditions[0].Reason, v.name)
		require.Contains(t, got.Conditions[0].Message, v.message, v.name)
		require.NotContains(t, got.Conditions[0].Message, "\n", v.name)
		require.Empty(t, got.CertificateChain, v.name)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	require.Empty(t, a.records)
}

// weak is a request with a key of RSA with 1024 bits.
const weak = `-----BEGIN CERTIFICATE REQUEST-----
MIIBPzCBqQIBADAAMIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQCmC0/VHKzz
www6GchXNKLK5NM2fefBlKRTNntCk48POvQrxtMjaJdFJNLIEQ8/T13gbwPJYqpe
hBKqFYnF6FwDtvMNCmHSxmLxijU6nP38Swcu/Ui9rHyx+0hCt1c5XQBT63zY5nWu
pxHAUUi0l7mPQgE2kwJSoJEPpUhuTjIsNwIDAQABoAAwDQYJKoZIhvcNAQELBQAD
gYEASAfoiCRcuDN6wOUaIp5+0upKJMeRxW8Yzr6/yEBfL3fKbUlgh8CgLrBA/KSJ
ANHZIXTVS1sjvl8toRokGqaB+3cA+Vumkmz0K+SROVN6wp9jtbeMWjuxg5HM2hHL
Ql1PXjbwJnWsiI2mIoVXf7xrrP0v5jrV2AV3ciIO9/LxH74=
-----END CERTIFICATE REQUEST-----`

func pemOf(t testing.TB, text string) []byte {
	t.Helper()
	block, _ := pem.Decode([]byte(text))
	require.NotNil(t, block)
	return block.Bytes
}

// Requests for other signers, and those that are answered, are left alone.
func TestOthers(t *testing.T) {
	t.Parallel()
	c := start(t)
	other := c.ask(func(s *spec) { s.SignerName = "example.org/other" })
	c.Put(at("answered"), map[string]any{
		"metadata": map[string]any{}, "spec": spec{SignerName: name, StubPKCS10Request: keys(), NodeName: "n1"},
		"status": map[string]any{"conditions": []any{map[string]any{"type": "Denied", "status": "True", "reason": "Other"}}},
	})
	c.run(c.options(newCA(t)))
	later := c.ask(func(s *spec) { s.SignerName = "example.org/other" })
	c.issued(c.ask(nil))
	for _, request := range []string{other, later} {
		require.Len(t, c.History(at(request)), 1)
	}
	require.Len(t, c.History(at("answered")), 1)
}

// retryable says that it passes.
type retryable struct{ error }

func (retryable) Retryable() (time.Duration, bool) { return 0, true }

// What cannot be signed now waits, and is signed later, once.
func TestWaits(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name string
		err  error
	}{
		{"busy", &ca.SignError{Kind: ca.ErrLimit, Err: errors.New("busy")}},
		{"store away", &ca.SignError{Kind: spiffe.ErrNotReady, Err: errors.New("store away")}},
		{"disk full", &ca.SignError{Kind: ca.ErrAudit, Err: errors.New("disk full")}},
		{"HSM away", &ca.SignError{Kind: ca.ErrGeneration, Err: errors.New("HSM away")}},
		{"root ends", &ca.SignError{Kind: ca.ErrTTL, Err: errors.New("root ends")}},
		{"unknown", errors.New("unknown")},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			c, a := start(t), newCA(t)
			a.set(v.err)
			s, _ := c.run(c.options(a))
			request := c.ask(nil)
			require.Eventually(t, func() bool { return strings.Contains(c.logs.String(), v.name) }, time.Minute, 10*time.Millisecond)
			require.Empty(t, c.now(request).Conditions)
			var text strings.Builder
			require.NoError(t, s.Report().Metrics(&text))
			require.Contains(t, text.String(), "svidkit_ca_pod_requests_waiting 1\n")
			require.Contains(t, text.String(), "svidkit_ca_pod_requests_oldest_timestamp_seconds ")
			a.set(nil)
			c.issued(request)
			require.Equal(t, 1, a.times(request))
		})
	}
	t.Run("identity", func(t *testing.T) {
		t.Parallel()
		c := start(t)
		o := c.options(newCA(t))
		var asked atomic.Int32
		o.ID = func(p spiffe.Pod) (spiffe.ID, error) {
			if p.Name == "slow" && asked.Add(1) < 3 {
				return spiffe.ID{}, retryable{errors.New("not registered yet")}
			}
			return td.WorkloadID("ns", p.Namespace, "sa", p.ServiceAccount)
		}
		c.run(o)
		slow := c.ask(func(s *spec) { s.PodName = "slow" })
		require.Eventually(t, func() bool { return asked.Load() > 0 }, time.Minute, 10*time.Millisecond)
		c.issued(c.ask(nil)) // which does not wait for it
		c.issued(slow)
	})
}

// An answer that the API server may have taken or not is sent again, and the request is signed once.
func TestLostAnswer(t *testing.T) {
	t.Parallel()
	patch := func(r *http.Request) bool {
		return r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/status")
	}
	for name, fault := range map[string]kubetest.Fault{
		"cut":           {},
		"cut, landed":   {Landed: true},
		"500":           {Code: 500},
		"500, landed":   {Code: 500, Landed: true},
		"too many":      {Code: 429, RetryAfter: time.Second},
		"conflict":      {Code: 409, Reason: "Conflict", Message: "modified"},
		"invalid":       {Code: 422, Reason: "Invalid", Message: "no"},
		"no right":      {Code: 403, Reason: "Forbidden", Message: "may not patch"},
		"no signer":     {Code: 422, Reason: "Invalid", Message: `spec.signerName: Forbidden: User "x" is not permitted to "sign" for signer`},
		"hook, no JSON": {Code: 502},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, a := start(t), newCA(t)
			c.FailNext(2, fault, patch)
			c.run(c.options(a))
			request := c.ask(nil)
			c.issued(request)
			require.Equal(t, 1, a.times(request))
			require.Len(t, c.History(at(request)), 2) // the request, and its answer
			if strings.HasPrefix(name, "no ") {
				require.Contains(t, c.logs.String(), "patch podcertificaterequests/status, and sign for the signer "+"example.org/spiffe")
			}
		})
	}
}

// What the API server refuses of one namespace holds back that alone, once an answer was taken: then the rights are there. Until
// then all wait.
func TestPolicyOfOneNamespace(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]kubetest.Fault{
		"policy":  {Code: 403, Reason: "Forbidden", Message: "ValidatingAdmissionPolicy 'no' denied request"},
		"webhook": {Code: 400, Reason: "BadRequest", Message: "admission webhook denied the request"},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			c := &cluster{Server: kubetest.StartOn(t, 1, memconn.Listen()), t: t}
			defer c.Client().CloseIdleConnections()
			a := newCA(t)
			var tried atomic.Int64
			refuse := func(requests string) {
				c.Faults(func(r *http.Request) *kubetest.Fault {
					if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "podcertificaterequests/"+requests) {
						tried.Add(1)
						return &fault
					}
					return nil
				})
			}
			refuse("request-")
			_, stop := c.run(c.options(a))
			defer stop()
			for range 20 {
				c.ask(nil)
			}
			time.Sleep(10 * time.Second)
			require.NotContains(t, c.logs.String(), "others go on", "without any answer each refusal holds all back")
			refuse("request-1") // and 10 to 19
			c.issued(c.ask(nil))
			var one map[string]any
			c.Get(at("request-1"), &one)
			c.Put(strings.Replace(at("request-100"), "/shop/", "/store/", 1), map[string]any{"metadata": map[string]any{}, "spec": one["spec"]})
			before := tried.Load()
			time.Sleep(20 * time.Second)
			for _, of := range []string{"shop", "store"} { // a second namespace is seen at once
				require.Regexp(t, `reason="others go on" request=`+of+`/\S+ node=\S+ err=.*retry_in=\S+\n`, c.logs.String())
			}
			require.Greater(t, tried.Load(), before, "it is tried again")
			for range 10 {
				began := time.Now()
				c.issued(c.ask(nil))
				require.Less(t, time.Since(began), 500*time.Millisecond)
				time.Sleep(700 * time.Millisecond)
			}
		})
	}
}

// A certificate that waited for the API server too long to be taken is replaced: the server refuses one that began five minutes ago.
func TestLateAnswer(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		c := &cluster{Server: kubetest.StartOn(t, 1, memconn.Listen()), t: t}
		defer c.Client().CloseIdleConnections()
		a := newCA(t)
		c.Faults(func(r *http.Request) *kubetest.Fault {
			if r.Method == http.MethodPatch {
				return &kubetest.Fault{Code: 503}
			}
			return nil
		})
		_, stop := c.run(c.options(a))
		defer stop()
		request, kinds := c.ask(nil), c.ask(func(s *spec) { s.UnverifiedUserAnnotations = map[string]string{"example.org/x": "y"} })
		time.Sleep(90 * time.Second)
		require.Equal(t, 1, a.times(request), "it is not signed again before that")
		time.Sleep(10 * time.Minute)
		c.Faults(nil)
		time.Sleep(time.Minute)
		_, leaf := c.issued(request)
		require.Less(t, time.Since(leaf.NotBefore), 5*time.Minute)
		require.Equal(t, "Denied", c.answer(kinds).Conditions[0].Type)
	})
}

// Three replicas answer each request once, whatever they see first.
func TestReplicas(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	c.Latency(2 * time.Millisecond)
	var cas []*recorder
	for range 3 {
		r := &recorder{Signer: a, signed: map[string]int{}}
		cas = append(cas, r)
		c.run(c.options(r))
	}
	var requests []string
	for range rounds.Of(15) {
		requests = append(requests, c.ask(nil))
	}
	for _, request := range requests {
		c.issued(request)
		require.Len(t, c.History(at(request)), 2)
		for _, r := range cas {
			require.LessOrEqual(t, r.times(request), 1)
		}
	}
	require.NotContains(t, c.logs.String(), "level=WARN")
}

// Requests are found after the end of a watch, a version that is lost, a restart of the API server, and a start of ours.
func TestFollows(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	before := c.ask(nil)
	s, stop := c.run(c.options(a))
	c.issued(before)
	c.EndWatches()
	c.issued(c.ask(nil))
	c.Compact()
	c.ExpireWatches()
	c.issued(c.ask(nil))
	c.Faults(func(*http.Request) *kubetest.Fault { return &kubetest.Fault{} })
	c.EndWatches()
	away := c.ask(nil)
	require.Eventually(t, func() bool { return !s.Report().Upstreams[0].OK }, time.Minute, 10*time.Millisecond)
	require.Error(t, s.Report().Upstreams[0].Err)
	c.Faults(nil)
	c.issued(away)
	require.Eventually(t, func() bool { return s.Report().Upstreams[0].OK }, time.Minute, 10*time.Millisecond)
	stop()
	stopped := c.ask(nil)
	time.Sleep(50 * time.Millisecond)
	require.Empty(t, c.now(stopped).Conditions)
	c.run(c.options(a))
	c.issued(stopped)
	require.Equal(t, 1, a.times(before)) // a relist is no reason to sign again
}

// A request that goes away while it waits is forgotten.
func TestGone(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	a.set(&ca.SignError{Kind: ca.ErrLimit, Err: errors.New("busy")})
	s, _ := c.run(c.options(a))
	waiting := func(n int) func() bool { return func() bool { return waiting(t, s) == n } }
	first, second := c.ask(nil), c.ask(nil)
	require.Eventually(t, waiting(2), time.Minute, 10*time.Millisecond)
	c.Remove(at(first))
	require.Eventually(t, waiting(1), time.Minute, 10*time.Millisecond)
	c.Faults(func(r *http.Request) *kubetest.Fault { return &kubetest.Fault{} }) // the deletion is not seen
	c.EndWatches()
	require.Eventually(t, func() bool { return !s.Report().Upstreams[0].OK }, time.Minute, 10*time.Millisecond)
	c.Remove(at(second))
	c.Compact()
	c.Faults(nil)
	require.Eventually(t, waiting(0), time.Minute, 10*time.Millisecond)
	a.set(nil)
	c.issued(c.ask(nil))
	require.Zero(t, a.times(first)+a.times(second))
}

// A flood of one node does not hold up another, and its own requests are all answered in the end.
func TestFlood(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	o := c.options(a)
	o.NodeRate, o.NamespaceRate = 160, -1
	o.Logger = nil
	var flood []string
	n := rounds.Of(60)
	for range n { // of which there is room for a bit more than half
		flood = append(flood, c.ask(func(s *spec) { s.NodeName, s.PodUID = "bad", fmt.Sprint("pod-", len(flood)) }))
	}
	c.run(o, func(s *podcert.Signer) { s.SetRoom(2000*n, 680*n) })
	require.Eventually(t, func() bool { return len(c.now(flood[0]).Conditions) > 0 }, time.Minute, 10*time.Millisecond)
	for i := range 10 {
		c.issued(c.ask(func(s *spec) { s.NodeName = fmt.Sprint("good-", i) }))
	}
	time.Sleep(6 * time.Second) // a watch that ends sooner has failed
	c.EndWatches()
	for _, request := range flood {
		c.issued(request)
	}
	for _, request := range flood {
		require.Equal(t, 1, a.times(request))
	}
}

// What waits is bounded, for a node and in total, and what was left out is read again.
func TestRoom(t *testing.T) {
	t.Parallel()
	c, a := start(t), newCA(t)
	a.set(&ca.SignError{Kind: ca.ErrLimit, Err: errors.New("busy")})
	o := c.options(a)
	o.Logger = nil
	var requests []string
	for i := range 45 {
		requests = append(requests, c.ask(func(s *spec) { s.NodeName = fmt.Sprint("n", i/15) }))
	}
	s, _ := c.run(o, func(s *podcert.Signer) { s.SetRoom(30<<10, 15<<10) })
	require.Eventually(t, func() bool { return waiting(t, s) >= 20 }, time.Minute, 10*time.Millisecond)
	time.Sleep(100 * time.Millisecond)
	require.Less(t, waiting(t, s), 30) // of about 1.2 kB each
	a.set(nil)
	for range 3 {
		time.Sleep(5500 * time.Millisecond) // a watch that ends sooner has failed
		c.EndWatches()
	}
	for _, request := range requests {
		c.issued(request)
		require.Equal(t, 1, a.times(request))
	}
}

// shortly is a CA whose certificates live for half an hour.
type shortly struct {
	ca.Signer
	ended atomic.Bool
}

func (s *shortly) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	if !s.ended.Load() {
		r.TTL = 30 * time.Minute
	}
	return s.Signer.Sign(ctx, r)
}

// A certificate that the API server would not take, as the root ends, is not sent to it: the request waits for another root.
func TestRootEnds(t *testing.T) {
	t.Parallel()
	c := start(t)
	signer := &shortly{Signer: newCA(t)}
	c.run(c.options(signer))
	request := c.ask(nil)
	require.Eventually(t, func() bool { return strings.Contains(c.logs.String(), "replace its root") }, time.Minute, 10*time.Millisecond)
	require.Zero(t, c.Count(http.MethodPatch, at(request)))
	signer.ended.Store(true)
	c.issued(request)
}

// A slow node does not use up the turns of another: the rates count for each.
func TestRates(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name            string
		node, namespace float64
		nodes           int
	}{{"node", 10, -1, 1}, {"namespace", -1, 10, 20}} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			c := start(t)
			o := c.options(newCA(t))
			o.NodeRate, o.NamespaceRate = v.node, v.namespace
			var requests []string
			for i := range 20 {
				requests = append(requests, c.ask(func(s *spec) { s.NodeName = fmt.Sprint("n", i%v.nodes) }))
			}
			began := time.Now()
			c.run(o)
			for _, request := range requests {
				c.issued(request)
			}
			require.Greater(t, time.Since(began), 1500*time.Millisecond) // 20 requests, 10 in a second, a quarter of a second at once
		})
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	a := newCA(t)
	good := podcert.Options{SignerName: name, TrustDomain: td, CA: a, APIServer: "http://127.0.0.1:1", HTTPClient: &http.Client{}}
	must.Get(podcert.New(good))(t)
	for _, v := range []struct {
		want   string
		change func(*podcert.Options)
	}{
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "example.org" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "example.org/" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "/spiffe" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "cluster/spiffe" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "example.org/a/b" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "Example.org/a" }},
		{"not DOMAIN/NAME", func(o *podcert.Options) { o.SignerName = "example.org/a,spec.nodeName=x" }},
		{"one of Kubernetes", func(o *podcert.Options) { o.SignerName = "kubernetes.io/kube-apiserver-client-pod" }},
		{"one of Kubernetes", func(o *podcert.Options) { o.SignerName = "beta.kubernetes.io/x" }},
		{"trust domain", func(o *podcert.Options) { o.TrustDomain = spiffe.TrustDomain{} }},
		{"CA is nil", func(o *podcert.Options) { o.CA = nil }},
		{"less than an hour", func(o *podcert.Options) { o.TTL = 59 * time.Minute }},
		{"less than an hour", func(o *podcert.Options) { o.TTL = -1 }},
		{"API server", func(o *podcert.Options) { o.APIServer = "http://192.0.2.1" }},
	} {
		o := good
		v.change(&o)
		_, err := podcert.New(o)
		require.ErrorContains(t, err, v.want, "%+v", o.SignerName)
		require.ErrorContains(t, err, "podcert: ")
	}
}

// Whatever a request is, it is answered or waits, and nothing panics.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"metadata":{"name":"r","namespace":"shop","uid":"1"},"spec":{"signerName":"example.org/spiffe","podName":"p"}}`))
	f.Add([]byte(`{"spec":{"stubPKCS10Request":"AAAA","maxExpirationSeconds":-1,"unverifiedUserAnnotations":{"a/b":"c"}}}`))
	f.Add([]byte(`{"status":{"conditions":[{"type":"Issued"}]}}`))
	f.Add([]byte(`{"spec":{"maxExpirationSeconds":2147483647}}`))
	whole, err := json.Marshal(map[string]any{"metadata": map[string]any{"namespace": "shop"}, "spec": spec{SignerName: name, ServiceAccountName: "web", MaxExpirationSeconds: 3600, StubPKCS10Request: keys()}})
	require.NoError(f, err)
	f.Add(whole)
	a := newCA(f)
	s, err := podcert.New(podcert.Options{SignerName: name, TrustDomain: td, CA: a, APIServer: "http://127.0.0.1:1", HTTPClient: &http.Client{}})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, data []byte) {
		answer, err := podcert.Answer(t.Context(), s, data)
		if err != nil || answer == nil {
			return
		}
		var got status
		require.NoError(t, json.Unmarshal(answer, &got))
		require.Len(t, got.Conditions, 1)
		c := got.Conditions[0]
		require.Contains(t, []string{"Issued", "Denied", "Failed"}, c.Type)
		require.Equal(t, c.Type == "Issued", got.CertificateChain != "")
		require.NotEmpty(t, c.Reason)
		require.LessOrEqual(t, len(c.Message), 1024)
		if c.Type == "Issued" {
			require.GreaterOrEqual(t, got.NotAfter.Sub(got.NotBefore), time.Hour)
			require.False(t, got.BeginRefreshAt.Before(got.NotBefore.Add(10*time.Minute)))
			require.False(t, got.BeginRefreshAt.After(got.NotAfter.Add(-10*time.Minute)))
		}
	})
}

// A signer that cannot log still answers.
func TestStuckLogger(t *testing.T) {
	t.Parallel()
	c := start(t)
	o := c.options(newCA(t))
	r, w := io.Pipe() // that is not read
	defer r.Close()
	o.Logger = slog.New(slog.NewTextHandler(w, nil))
	c.run(o)
	for range 20 {
		c.issued(c.ask(nil))
	}
}

// All requests are read again while some were left out for want of room, and once there was room for all they are followed as before, by watches alone.
func TestRoomAgain(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		c := &cluster{Server: kubetest.StartOn(t, 1, memconn.Listen()), t: t}
		defer c.Client().CloseIdleConnections()
		a := newCA(t)
		a.set(&ca.SignError{Kind: ca.ErrLimit, Err: errors.New("busy")})
		var requests []string
		for range 20 {
			requests = append(requests, c.ask(nil))
		}
		_, stop := c.run(c.options(a), func(s *podcert.Signer) { s.SetRoom(5<<10, 5<<10) })
		defer stop()
		lists := func() (n int) {
			for _, r := range c.Requests() {
				if r.Method == http.MethodGet && strings.HasSuffix(r.Path, "/podcertificaterequests") && r.Query.Get("watch") == "" {
					n++
				}
			}
			return n
		}
		time.Sleep(6 * time.Minute)
		assert.Greater(t, lists(), 5, "each minute")
		a.set(nil)
		time.Sleep(30 * time.Minute)
		for _, request := range requests {
			c.issued(request)
		}
		before := lists()
		time.Sleep(time.Hour)
		require.Equal(t, before, lists())
		c.issued(c.ask(nil)) // and they are followed
	})
}
