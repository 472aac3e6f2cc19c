package kubesecret_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/big"
	mathrand "math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the tests with replicas; 0 means a new one each time")
	longFlag = flag.Bool("long", false, "run the soaks")
)

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	worker = spiffe.MustParseID("spiffe://example.org/ns/a/sa/b")
)

// settings are those of all replicas. A root is replaced within two hours.
func settings() ca.Config {
	return ca.Config{
		Create:      true,
		TrustDomain: domain, DefaultTTL: time.Hour, MaxTTL: time.Hour, RefreshHint: 2 * time.Minute,
		Rotation: ca.Rotation{Manual: true, Propagation: 10 * time.Minute},
	}
}

// fleet is a number of replicas of one CA on one API server, in a bubble.
type fleet struct {
	t      *testing.T
	server *kubetest.Server
	cfg    ca.Config
	random *mathrand.Rand

	replicas []*replica
}

type replica struct {
	*ca.Authority
	stop func() // ends Run and waits for it
}

func newFleet(t *testing.T, cfg ca.Config) *fleet {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = mathrand.Uint64()
	}
	t.Logf("seed %d", seed)
	f := &fleet{t: t, server: kubetest.StartOn(t, seed, memconn.Listen()), cfg: cfg, random: mathrand.New(mathrand.NewPCG(seed, 1))}
	t.Cleanup(func() {
		f.server.Faults(nil)
		for _, r := range f.replicas {
			r.stop()
		}
	})
	return f
}

// open starts n replicas at the same time.
func (f *fleet) open(n int) {
	f.t.Helper()
	opened := make([]*replica, n)
	var wg sync.WaitGroup
	var looked sync.WaitGroup
	looked.Add(n)
	for i := range n {
		wg.Go(func() {
			g := &gate{next: f.server.Client().Transport, looked: &looked}
			store, err := kubesecret.New(kubesecret.Options{Namespace: "istio-system", APIServer: f.server.URL(), HTTPClient: &http.Client{Transport: g}})
			if !assert.NoError(f.t, err) {
				looked.Done()
				return
			}
			a, err := ca.Open(f.t.Context(), f.cfg, store)
			if !assert.NoError(f.t, err) {
				return
			}
			ctx, cancel := context.WithCancel(f.t.Context())
			var running sync.WaitGroup
			running.Go(func() { _ = a.Run(ctx) })
			opened[i] = &replica{a, func() { cancel(); running.Wait() }}
		})
	}
	wg.Wait()
	for _, r := range opened {
		require.NotNil(f.t, r)
	}
	f.replicas = append(f.replicas, opened...)
}

// gate holds the first answer of each replica back until all have theirs: so all of them see the
// same, before any of them acts.
type gate struct {
	next   http.RoundTripper
	looked *sync.WaitGroup
	once   sync.Once
}

func (g *gate) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := g.next.RoundTrip(r)
	g.once.Do(func() {
		g.looked.Done()
		g.looked.Wait()
	})
	return response, err
}

// state is what matters of a record.
type state struct {
	Authority string `json:"authority"`
	Revision  uint64 `json:"revision"`
	Sequence  uint64 `json:"sequence"`
	roots     []string
	active    string
}

// history returns what the Secret held after each write, and checks that no write was lost: each
// one builds on the one before.
func (f *fleet) history() (all []state) {
	f.t.Helper()
	for i, raw := range f.server.History(path) {
		var o secret
		require.NoError(f.t, json.Unmarshal(raw, &o))
		require.NotNil(f.t, o.Data, "the Secret is never deleted")
		var s state
		require.NoError(f.t, json.Unmarshal(o.Data["svidkit-state.json"], &s))
		for _, c := range certificates(f.t, o.Data["root-cert.pem"]) {
			s.roots = append(s.roots, c.SerialNumber.Text(16))
		}
		s.active = certificates(f.t, o.Data["ca-cert.pem"])[0].SerialNumber.Text(16)
		require.Contains(f.t, s.roots, s.active)
		if i == 0 {
			require.EqualValues(f.t, 1, s.Revision)
			require.Len(f.t, s.roots, 1)
		} else {
			before := all[i-1]
			require.Equal(f.t, before.Revision+1, s.Revision, "a write is lost that does not build on the last one")
			require.Equal(f.t, before.Authority, s.Authority, "there is one CA")
			require.GreaterOrEqual(f.t, s.Sequence, before.Sequence)
			if !slices.Equal(before.roots, s.roots) {
				require.Greater(f.t, s.Sequence, before.Sequence, "another bundle has another number")
			}
			if s.active != before.active {
				require.Contains(f.t, before.roots, s.active, "a root is in the bundle before it signs")
			}
		}
		all = append(all, s)
	}
	return all
}

// converged waits until all replicas have read the store, and checks that they are one CA.
func (f *fleet) converged() {
	f.t.Helper()
	time.Sleep(time.Minute)
	synctest.Wait()
	first := f.replicas[0]
	for _, r := range f.replicas[1:] {
		require.True(f.t, first.Bundle().Equal(r.Bundle()), "%v\n%v", first.Status().Roots, r.Status().Roots)
		a, _ := first.Bundle().Sequence()
		b, _ := r.Bundle().Sequence()
		require.Equal(f.t, a, b)
		require.Equal(f.t, describe(first.Status().Roots), describe(r.Status().Roots))
	}
}

func describe(roots []ca.KeyStatus) (out []string) {
	for _, r := range roots {
		out = append(out, fmt.Sprint(r.ID, " ", r.Phase))
	}
	return out
}

func certificates(t *testing.T, b []byte) (out []*x509.Certificate) {
	t.Helper()
	for len(b) > 0 {
		var block *pem.Block
		block, b = pem.Decode(b)
		require.NotNil(t, block)
		require.Equal(t, "CERTIFICATE", block.Type)
		c := must.Get(x509.ParseCertificate(block.Bytes))(t)
		out = append(out, c)
	}
	return out
}

func request(t *testing.T) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
}

// troubles are what an API server may do to replicas that race, each for a few requests.
var troubles = map[string][]kubetest.Fault{
	"nothing":                     nil,
	"conflicts":                   {{Code: 409, Reason: "Conflict"}, {Code: 409, Reason: "AlreadyExists"}},
	"dropped connections":         {{}, {}},
	"changes of which none hears": {{Landed: true}, {Landed: true, Code: 500}, {Landed: true, Hang: true}},
	"all of it":                   {{Code: 503}, {Code: 429, RetryAfter: time.Second}, {Landed: true, Code: 504}, {}, {Code: 409, Reason: "Conflict"}, {Hang: true}},
}

func isWrite(r *http.Request) bool { return r.Method != http.MethodGet }

// TestRacingCreate has replicas start at the same time where no CA is. They end with one root.
func TestRacingCreate(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.5-5")
	for name, faults := range troubles {
		for _, n := range []int{2, 5} {
			bubble.Run(t, fmt.Sprintf("%d replicas, %s", n, name), func(t *testing.T) {
				f := newFleet(t, settings())
				f.server.Latency(50 * time.Millisecond)
				for _, fault := range faults {
					f.server.FailNext(1+f.random.IntN(2), fault, isWrite)
				}
				f.open(n)
				f.converged()
				history := f.history()
				require.NotEmpty(t, history)
				for _, s := range history {
					assert.Equal(t, history[0].roots, s.roots)
				}
				for _, r := range f.replicas {
					require.Len(t, r.Status().Roots, 1)
					assert.Equal(t, history[0].active, r.Status().Roots[0].ID)
				}
			})
		}
	}
}

// TestChaos has replicas that rotate, end and start anew all the time, on an API server that fails all the
// time and is away at times. Whatever one of them signs is accepted by verifiers that have the bundle of
// another, for as long as it lives; and no write is lost.
func TestChaos(t *testing.T) {
	t.Parallel()
	for n, span := range map[bool]map[int]int{true: {3: 12}, false: {2: rounds.Of(30), 5: rounds.Of(15)}}[rounds.Of(1) == 1] {
		t.Run(fmt.Sprint(n, " replicas"), func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) { chaos(t, n, time.Duration(span)*time.Minute) })
		})
	}
}

func TestChaosSoak(t *testing.T) {
	if !*longFlag {
		t.Skip("runs with -long")
	}
	for range 5 {
		t.Run("", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { chaos(t, 5, 2*24*time.Hour) })
		})
	}
}

func chaos(t *testing.T, n int, span time.Duration) {
	cfg := settings()
	cfg.JWT = &ca.JWTConfig{}
	cfg.DefaultTTL, cfg.MaxTTL, cfg.RefreshHint, cfg.Rotation.Propagation = 3*time.Minute, 3*time.Minute, 30*time.Second, 5*time.Minute
	f := newFleet(t, cfg)
	f.server.Latency(200 * time.Millisecond)
	fate := mathrand.New(mathrand.NewPCG(f.random.Uint64(), 2)) // of requests, which is asked for elsewhere
	var mu sync.Mutex
	var away time.Time
	f.server.Faults(func(r *http.Request) *kubetest.Fault {
		mu.Lock()
		defer mu.Unlock()
		if time.Now().Before(away) || fate.IntN(100) < 10 {
			return &kubetest.Fault{}
		}
		switch fate.IntN(30) {
		case 0:
			return &kubetest.Fault{Code: 500 + fate.IntN(5)}
		case 1:
			return &kubetest.Fault{Code: 429, RetryAfter: time.Second}
		case 2, 3:
			return &kubetest.Fault{Landed: true, Code: []int{0, 500, 504}[fate.IntN(3)]}
		case 4:
			return &kubetest.Fault{Hang: true, Landed: fate.IntN(2) == 0}
		case 5:
			if isWrite(r) {
				return &kubetest.Fault{Code: 409, Reason: "Conflict"}
			}
		}
		return nil
	})
	f.open(n)
	type issued struct {
		leaf *x509.Certificate
		by   string
	}
	var alive []issued
	accepted := map[string]bool{}
	csr := request(t)
	refused, unsure := 0, 0 // unsure are rotations whose error does not say that there is no new root
	for end := time.Now().Add(span); time.Until(end) > 0 || len(accepted) == 0; time.Sleep(time.Duration(f.random.IntN(60)) * time.Second) {
		i := f.random.IntN(len(f.replicas))
		r := f.replicas[i]
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		switch f.random.IntN(8) {
		case 0, 1, 2:
			var wg sync.WaitGroup
			for _, other := range f.replicas[:1+f.random.IntN(len(f.replicas))] {
				wg.Go(func() {
					root, err := other.Rotate(ctx)
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil:
						assert.False(t, accepted[root.ID], "two rotations with one root")
						accepted[root.ID] = true
					case !errors.Is(err, ca.ErrRotating):
						unsure++
					}
				})
			}
			wg.Wait()
		case 3:
			_, _ = r.RotateJWT(ctx) // it may be too early, or the store away
		case 4:
			r.stop()
			f.replicas = slices.Delete(f.replicas, i, i+1)
			f.open(1)
		case 5:
			mu.Lock()
			if time.Since(away) > 2*time.Minute { // each replica reads the store once in Propagation
				away = time.Now().Add(time.Duration(f.random.IntN(90)) * time.Second)
			}
			mu.Unlock()
		}
		cancel()

		r = f.replicas[f.random.IntN(len(f.replicas))]
		chain, err := r.Sign(t.Context(), ca.Request{CSR: csr, ID: worker})
		if err != nil {
			refused++
			require.ErrorIs(t, err, spiffe.ErrNotReady)
		} else {
			alive = append(alive, issued{chain[0], fmt.Sprint(r.Status().Roots)})
		}
		f.random.Shuffle(max(0, len(alive)-1), func(i, j int) { alive[i], alive[j] = alive[j], alive[i] })
		alive = slices.DeleteFunc(alive, func(l issued) bool { return !time.Now().Before(l.leaf.NotAfter) })
		for _, other := range f.replicas {
			o := x509.VerifyOptions{Roots: other.Bundle().CertPool(), CurrentTime: time.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
			for _, l := range alive[max(0, len(alive)-5):] { // the new one, and some of the others
				_, err := l.leaf.Verify(o)
				require.NoError(t, err, "signed by one with %s, refused by one with %v", l.by, other.Status().Roots)
			}
		}
	}
	f.server.Faults(nil)
	f.converged()
	history := f.history()
	roots := map[string]bool{}
	for _, s := range history {
		for _, root := range s.roots {
			roots[root] = true
		}
	}
	for serial := range accepted {
		require.True(t, roots[serial], "an accepted rotation is in no record")
	}
	assert.LessOrEqual(t, len(roots), 1+len(accepted)+unsure, "a root without a rotation")
	assert.Zero(t, refused, "a replica could not sign")
	t.Logf("%d writes, %d rotations accepted, %d roots, %d requests", len(history), len(accepted), len(roots), len(f.server.Requests()))
}

// TestOthersTouchTheSecret has an operator label the Secret, and delete it in the middle of a rotation.
// The replicas put it back, once, with what all of them know, and the rotation goes on.
func TestOthersTouchTheSecret(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		f := newFleet(t, settings())
		f.server.Latency(50 * time.Millisecond)
		f.open(5)
		var o map[string]any
		require.True(t, f.server.Get(path, &o))
		o["metadata"].(map[string]any)["labels"] = map[string]any{"backup": "nightly"}
		o["data"].(map[string]any)["note"] = "AAAA"
		f.server.Put(path, o)
		root := must.Get(f.replicas[3].Rotate(t.Context()))(t)
		f.converged()
		touched := stored(t, f.server, path)
		assert.Equal(t, map[string]any{"backup": "nightly"}, touched.Metadata["labels"])
		assert.Equal(t, []byte{0, 0, 0}, touched.Data["note"])

		before := f.replicas[0].Bundle()
		require.True(t, f.server.Remove(path))
		f.converged()
		again := stored(t, f.server, path)
		assert.NotEqual(t, touched.Metadata["uid"], again.Metadata["uid"])
		assert.Equal(t, touched.Data["root-cert.pem"], again.Data["root-cert.pem"])
		assert.True(t, before.Equal(f.replicas[0].Bundle()))
		created := 0
		for _, q := range f.server.Requests() {
			if q.Method == http.MethodPost && q.Code == http.StatusCreated {
				created++
			}
		}
		assert.Equal(t, 2, created, "at the start, and now")
		time.Sleep(f.cfg.Rotation.Propagation)
		f.converged()
		for _, r := range f.replicas {
			i := slices.IndexFunc(r.Status().Roots, func(s ca.KeyStatus) bool { return s.ID == root.ID })
			require.GreaterOrEqual(t, i, 0)
			assert.Equal(t, "active", r.Status().Roots[i].Phase)
		}
	})
}

// istiosSecret is a Secret as Istio's CA creates it for itself: a root without SPIFFE ID, whose organization
// is the trust domain, and which may sign certificates and nothing else, with an RSA key.
func istiosSecret(t *testing.T, block string) (map[string]any, *x509.Certificate, *rsa.PrivateKey) {
	t.Helper()
	key := must.Get(pki.ParsePrivateKeyPEM(must.Get(os.ReadFile("../testdata/rsa-0.pem"))(t)))(t).(*rsa.PrivateKey)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(0x7e57), Subject: pkix.Name{Organization: []string{domain.String()}},
		NotBefore: time.Now().Add(-24 * time.Hour), NotAfter: time.Now().Add(3650 * 24 * time.Hour),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true, SignatureAlgorithm: x509.SHA256WithRSA,
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	root := must.Get(x509.ParseCertificate(der))(t)
	private := x509.MarshalPKCS1PrivateKey(key)
	if block == "PRIVATE KEY" {
		private = must.Get(x509.MarshalPKCS8PrivateKey(key))(t)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return map[string]any{
		"type": "istio.io/ca-root", "metadata": map[string]any{"labels": map[string]any{"istio.io/owned-by": "istiod"}},
		"data": map[string][]byte{
			"ca-cert.pem": certPEM, "ca-key.pem": pem.EncodeToMemory(&pem.Block{Type: block, Bytes: private}),
			"cert-chain.pem": {}, "key.pem": {}, "root-cert.pem": certPEM,
		},
	}, root, key
}

// TestAdoption has replicas start where Istio's CA was. They go on with its root; leaves that Istio has
// signed stay good through the first rotation.
func TestAdoption(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.1-5", "IST-3.5-2")
	for name, edit := range map[string]func(data map[string][]byte){
		"as Istio writes it today":        func(map[string][]byte) {},
		"as Istio wrote it years ago":     func(data map[string][]byte) { data["root-cert.pem"] = nil },
		"without the empty ones":          func(data map[string][]byte) { delete(data, "cert-chain.pem"); delete(data, "key.pem") },
		"with an item of another program": func(data map[string][]byte) { data["notes.txt"] = []byte("ours") },
	} {
		bubble.Run(t, name, func(t *testing.T) {
			block := "RSA PRIVATE KEY"
			if strings.Contains(name, "another") {
				block = "PRIVATE KEY"
			}
			f := newFleet(t, settings())
			f.cfg.Rotation.Propagation = 3 * time.Minute
			f.server.Latency(20 * time.Millisecond)
			object, root, key := istiosSecret(t, block)
			edit(object["data"].(map[string][]byte))
			f.server.Put(path, object)
			theirs := leafOf(t, root, key)
			f.open(2)
			f.converged()
			for _, r := range f.replicas {
				require.Len(t, r.Status().Roots, 1)
				assert.True(t, r.Status().Roots[0].Certificate.Equal(root))
				assert.Equal(t, "active", r.Status().Roots[0].Phase)
				chain := must.Get(r.Sign(t.Context(), ca.Request{CSR: request(t), ID: worker}))(t)
				require.NoError(t, chain[0].CheckSignatureFrom(root))
			}
			o := stored(t, f.server, path)
			assert.Equal(t, map[string]any{"istio.io/owned-by": "istiod"}, o.Metadata["labels"])
			if strings.Contains(name, "another") {
				assert.Equal(t, "ours", string(o.Data["notes.txt"]))
			}
			readsAsIstio(t, o)

			must.Get(f.replicas[1].Rotate(t.Context()))(t)
			time.Sleep(f.cfg.Rotation.Propagation)
			f.converged()
			for _, r := range f.replicas {
				require.Len(t, r.Status().Roots, 2)
				assert.Equal(t, "active", r.Status().Roots[1].Phase)
				_, err := theirs.Verify(x509.VerifyOptions{Roots: r.Bundle().CertPool(), CurrentTime: time.Now()})
				assert.NoError(t, err, "a leaf that Istio has signed")
			}
			active := readsAsIstio(t, stored(t, f.server, path))
			assert.False(t, active.Equal(root))
		})
	}
}

// leafOf signs a leaf with nothing but the standard library.
func leafOf(t *testing.T, root *x509.Certificate, key any) *x509.Certificate {
	t.Helper()
	own := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: []string{"b.a.svc"},
	}, root, own.Public(), key)
	require.NoError(t, err)
	return must.Get(x509.ParseCertificate(der))(t)
}

// readsAsIstio checks that a Secret is what Istio's CA expects of its own: a certificate and a key
// that belong together, a CA, self-signed, and among the roots; the chain and the workload key
// empty; and that a leaf of this pair verifies. It returns the certificate.
func readsAsIstio(t *testing.T, o secret) *x509.Certificate {
	t.Helper()
	require.Equal(t, "istio.io/ca-root", o.Type)
	for _, name := range []string{"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "key.pem", "root-cert.pem"} {
		require.Contains(t, o.Data, name)
	}
	assert.Empty(t, o.Data["cert-chain.pem"])
	assert.Empty(t, o.Data["key.pem"])
	pair := must.Get(tls.X509KeyPair(o.Data["ca-cert.pem"], o.Data["ca-key.pem"]))(t)
	require.Len(t, pair.Certificate, 1)
	c := pair.Leaf
	assert.True(t, c.IsCA)
	assert.NotZero(t, c.KeyUsage&x509.KeyUsageCertSign)
	require.NoError(t, c.CheckSignatureFrom(c))
	assert.True(t, slices.ContainsFunc(certificates(t, o.Data["root-cert.pem"]), c.Equal))
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(o.Data["root-cert.pem"]))
	must.Get(leafOf(t, c, pair.PrivateKey).Verify(x509.VerifyOptions{Roots: pool, CurrentTime: time.Now()}))(t)
	return c
}

// TestIstioReads shows that Istio's CA could take over from us, before, during and after a rotation.
func TestIstioReads(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.1-4", "IST-3.1-5", "IST-3.5-4")
	for _, algorithm := range []string{"ecdsa-p256", "rsa-2048"}[:min(rounds.Of(1), 2)] { // TestAdoption has an RSA key, too
		bubble.Run(t, algorithm, func(t *testing.T) {
			cfg := settings()
			cfg.Rotation.KeyAlgorithm, cfg.DefaultTTL, cfg.MaxTTL = algorithm, 10*time.Minute, 10*time.Minute
			f := newFleet(t, cfg)
			f.open(2)
			first := readsAsIstio(t, stored(t, f.server, path))
			assert.Equal(t, []string{"example.org"}, first.Subject.Organization)
			must.Get(f.replicas[0].Rotate(t.Context()))(t)
			during := readsAsIstio(t, stored(t, f.server, path))
			assert.True(t, first.Equal(during), "the new root does not sign yet")
			assert.Len(t, certificates(t, stored(t, f.server, path).Data["root-cert.pem"]), 2)
			time.Sleep(cfg.Rotation.Propagation)
			f.converged()
			assert.False(t, first.Equal(readsAsIstio(t, stored(t, f.server, path))))
			time.Sleep(15 * time.Minute)
			f.converged()
			readsAsIstio(t, stored(t, f.server, path))
			assert.Len(t, certificates(t, stored(t, f.server, path).Data["root-cert.pem"]), 1)
		})
	}
}

// A Secret that cannot keep a CA ends the start at once, and so does one that lost its state, or is missing without
// permission to make one.
func TestOpenEnds(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		f := newFleet(t, settings())
		f.open(1)
		good := stored(t, f.server, path)
		for name, edit := range map[string]func(o *secret){
			"another type": func(o *secret) { o.Type = "Opaque" },
			"lost state":   func(o *secret) { delete(o.Data, "svidkit-state.json") },
		} {
			server := kubetest.StartOn(t, 1, memconn.Listen())
			bad := good
			bad.Data = maps.Clone(good.Data)
			edit(&bad)
			server.Put(path, bad)
			began := time.Now()
			_, err := ca.Open(t.Context(), settings(), storeOf(t, server, ""))
			require.ErrorIs(t, err, ca.ErrUnfit, name)
			require.Equal(t, began, time.Now(), name)
		}
	})
}
