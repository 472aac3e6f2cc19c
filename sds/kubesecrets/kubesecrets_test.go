package kubesecrets_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/big"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

type data = map[string][]byte

// path is where the API server has a Secret, by NAMESPACE/NAME.
func path(name string) string {
	namespace, name, _ := strings.Cut(name, "/")
	return "/api/v1/namespaces/" + namespace + "/secrets/" + name
}

// put stores a Secret without a type.
func put(s *kubetest.Server, name string, d data, members ...any) {
	o := map[string]any{"data": d}
	for i := 0; i < len(members); i += 2 {
		o[members[i].(string)] = members[i+1]
	}
	s.Put(path(name), o)
}

// tls is the content of a Secret of the type kubernetes.io/tls.
func tls(t testing.TB, svid *spiffe.SVID) data {
	t.Helper()
	certs, key, err := svid.MarshalPEM()
	require.NoError(t, err)
	return data{"tls.crt": certs, "tls.key": key}
}

// with returns a and b together.
func with(a, b data) data {
	all := data{}
	for _, d := range []data{a, b} {
		maps.Copy(all, d)
	}
	return all
}

func valid(from, to time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(from), time.Now().Add(to) }
}

// diary is a log.
type diary = logtest.Buffer

// world is a Source in a bubble, with its API server, and what it told.
type world struct {
	t    *testing.T
	api  *kubetest.Server
	src  *kubesecrets.Source
	log  *diary
	mu   sync.Mutex
	told []string
}

// inBubble runs f at the same time as other tests, with an API server in memory and a Source that is not started.
func inBubble(t *testing.T, f func(t *testing.T, ca *spiffetest.CA, w *world)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f(t, spiffetest.NewCA(t, "example.org"), &world{t: t, api: kubetest.StartOn(t, 1, memconn.Listen())})
	})
}

func (w *world) start(cfg kubesecrets.Config) *world {
	w.t.Helper()
	w.log = &diary{}
	cfg.APIServer, cfg.HTTPClient, cfg.Logger = w.api.URL(), w.api.Client(), slog.New(slog.NewTextHandler(w.log, nil))
	if cfg.Namespace == "" {
		cfg.Namespace = "gw"
	}
	src := must.Do(kubesecrets.New(cfg))
	go func() { _ = src.Run(context.Background()) }()
	must.Err(src.GenerateSecret(w.t.Context(), "kubernetes://first")) // waits for the first list
	w.t.Cleanup(func() { require.NoError(w.t, src.Close()) })
	w.src = src
	w.t.Cleanup(src.Subscribe(func(name string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.told = append(w.told, name)
	}))
	return w
}

// heard waits until all is quiet, and returns what was told since the last call.
func (w *world) heard() []string {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	told := w.told
	w.told = nil
	return told
}

// get returns the content of a secret, or the error.
func (w *world) get(name string) (string, error) {
	synctest.Wait()
	s, err := w.src.GenerateSecret(w.t.Context(), name)
	if err != nil {
		return "", err
	}
	assert.Equal(w.t, name, s.Name())
	if chain, key, ok := s.KeyPair(); ok {
		return string(chain) + string(key), nil
	}
	roots, ok := s.Roots()
	assert.True(w.t, ok)
	crls, leafOnly := s.CRLs()
	assert.False(w.t, leafOnly)
	return string(roots) + string(crls), nil
}

func (w *world) is(name, want string) {
	w.t.Helper()
	got, err := w.get(name)
	require.NoError(w.t, err, name)
	assert.Equal(w.t, want, got, name)
}

func (w *world) absent(name string) {
	w.t.Helper()
	require.ErrorIs(w.t, must.Err(w.get(name)), fs.ErrNotExist, name)
}

// fails checks that there is no secret, that this may change, and why.
func (w *world) fails(name, text string) {
	w.t.Helper()
	_, err := w.get(name)
	require.ErrorContains(w.t, err, text, name)
	require.NotErrorIs(w.t, err, fs.ErrNotExist, name)
}

func pair(d data) string { return string(d["tls.crt"]) + string(d["tls.key"]) }

// issuer is a root that signs revocation lists.
type issuer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newIssuer(t testing.TB) *issuer {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(100 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: []byte{1, 2, 3},
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	cert := must.Get(x509.ParseCertificate(der))(t)
	return &issuer{cert, key, pki.MarshalCertificatesPEM(cert)}
}

func (i *issuer) crl(t testing.TB, end time.Duration) []byte {
	t.Helper()
	der := must.Get(x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: time.Now().Add(end),
	}, i.cert, i.key))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
}

// TestNames has each name for each form of a Secret.
func TestNames(t *testing.T) {
	conformance.Covers(t, "IST-7.2-6")
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		other, root := spiffetest.NewCA(t, "other.test"), newIssuer(t)
		a, b := tls(t, ca.SVID("/a")), tls(t, ca.SVID("/b"))
		roots, others := ca.Bundle().MarshalPEM(), other.Bundle().MarshalPEM()
		crl, ended := root.crl(t, time.Hour), root.crl(t, -time.Second)
		put(w.api, "gw/tls", a, "type", "kubernetes.io/tls")
		put(w.api, "gw/generic", data{"cert": b["tls.crt"], "key": b["tls.key"]})
		put(w.api, "gw/both-forms", with(a, data{"cert": b["tls.crt"], "key": b["tls.key"]}))
		put(w.api, "gw/whole-and-half", with(a, data{"cert": b["tls.crt"]}))
		put(w.api, "gw/mutual", with(a, data{"ca.crt": roots}))
		put(w.api, "gw/split", with(a, data{"ca.crt": roots}))
		put(w.api, "gw/split-cacert", data{"cacert": others})
		put(w.api, "gw/alone-cacert", data{"ca.crt": others})
		put(w.api, "gw/empty-cacert", data{"password": []byte("x"), "tls.key": a["tls.key"]})
		put(w.api, "gw/empty", with(a, data{"ca.crt": roots}))
		put(w.api, "gw/misnamed-cacert", data{"ca.pem": others})
		put(w.api, "gw/misnamed", with(a, data{"ca.crt": roots}))
		put(w.api, "gw/damaged-cacert", data{"cacert": others[:100]})
		put(w.api, "gw/damaged", with(a, data{"ca.crt": roots}))
		put(w.api, "gw/crl", data{"cacert": root.pem, "crl": crl})
		put(w.api, "gw/crl-tls", data{"ca.crt": root.pem, "ca.crl": crl})
		put(w.api, "gw/crl-crossed", data{"ca.crt": root.pem, "crl": crl})
		put(w.api, "gw/crl-ended", data{"ca.crt": root.pem, "ca.crl": ended})
		put(w.api, "gw/crl-of-another", data{"ca.crt": roots, "ca.crl": crl})
		put(w.api, "gw/crl-damaged", data{"ca.crt": root.pem, "ca.crl": crl[:200]})
		put(w.api, "gw/password", data{"key": []byte("hunter2"), "password": []byte("hunter2")})
		put(w.api, "gw/helm", a, "type", "helm.sh/release.v1")
		put(w.api, "gw/token", a, "type", "kubernetes.io/service-account-token")
		put(w.api, "gw/a-cacert-b", with(a, data{"ca.crt": roots})) // an ending in the middle of a name is none
		put(w.api, "gw/a-cacert.c", b)
		put(w.api, "gw/d-cacert-cacert", data{"cacert": others})
		put(w.api, "gw/d-cacert", data{"cacert": roots})
		put(w.api, "app/tls", b)
		w.start(kubesecrets.Config{})

		for name, want := range map[string]string{
			"kubernetes://gw/tls":             pair(a),
			"kubernetes://tls":                pair(a),
			"kubernetes://gw/generic":         pair(b),
			"kubernetes://generic":            pair(b),
			"kubernetes://both-forms":         pair(b),
			"kubernetes://whole-and-half":     pair(a),
			"kubernetes://mutual":             pair(a),
			"kubernetes://a-cacert-b":         pair(a),
			"kubernetes://gw/a-cacert-b":      pair(a),
			"kubernetes://a-cacert.c":         pair(b),
			"kubernetes://a-cacert-b-cacert":  string(roots),
			"kubernetes://d-cacert":           string(roots),
			"kubernetes://d-cacert-cacert":    string(others),
			"kubernetes://mutual-cacert":      string(roots),
			"kubernetes://gw/mutual-cacert":   string(roots),
			"kubernetes://split-cacert":       string(others),
			"kubernetes://alone-cacert":       string(others),
			"kubernetes://crl-cacert":         string(root.pem) + string(crl),
			"kubernetes://gw/crl-cacert":      string(root.pem) + string(crl),
			"kubernetes://crl-tls-cacert":     string(root.pem) + string(crl),
			"kubernetes://crl-crossed-cacert": string(root.pem) + string(crl),
		} {
			w.is(name, want)
		}
		for name, text := range map[string]string{
			"kubernetes://crl":                   "the Secret has nothing of this kind",
			"kubernetes://tls-cacert":            "the Secret has nothing of this kind",
			"kubernetes://empty-cacert":          "the Secret has nothing of this kind", // and not those of the Secret "empty"
			"kubernetes://misnamed-cacert":       "the Secret has nothing of this kind",
			"kubernetes://damaged-cacert":        "damaged",
			"kubernetes://crl-ended-cacert":      "a revocation list has ended",
			"kubernetes://crl-of-another-cacert": "every certificate under it would be refused",
			"kubernetes://crl-damaged-cacert":    "ca.crl",
		} {
			w.fails(name, text)
		}
		for _, name := range []string{
			"kubernetes://gw/password", "kubernetes://helm", "kubernetes://token", "kubernetes://missing", "kubernetes://missing-cacert",
			"kubernetes://app/tls", "kubernetes://", "kubernetes:///tls", "kubernetes://gw/", "kubernetes://gw//tls", "kubernetes://gw/tls/x",
			"kubernetes://GW/tls", "kubernetes://gw/TLS", "kubernetes://gw/../app", "kubernetes://-cacert", "kubernetes://gw/-cacert",
			"kubernetes://g.w/tls", "default", "ROOTCA", "", "kubernetes-gateway://gw/tls", "Kubernetes://gw/tls", "kubernetes://gw/tls\n",
			"kubernetes://" + strings.Repeat("a", 64) + "/tls", "kubernetes://" + strings.Repeat("a", 254),
		} {
			w.absent(name)
		}
		assert.NotContains(t, w.log.String(), "hunter2")
	})
}

// TestNothingGoodIsReplaced has Secrets that become bad in each way, and good again.
func TestNothingGoodIsReplaced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		good, other := tls(t, ca.SVID("/a")), tls(t, ca.SVID("/b"))
		expired := tls(t, ca.SVID("/a", valid(-2*time.Hour, -time.Hour)))
		roots := ca.Bundle().MarshalPEM()
		for what, c := range map[string]struct {
			d           data
			pair, roots string // of the error
		}{
			"no key":        {d: data{"tls.crt": other["tls.crt"], "ca.crt": roots}, pair: "tls.crt without tls.key"},
			"no cert":       {d: data{"tls.key": other["tls.key"], "ca.crt": roots}, pair: "tls.key without tls.crt"},
			"half generic":  {d: data{"cert": other["tls.crt"], "tls.key": good["tls.key"], "ca.crt": roots}, pair: "without"},
			"mismatch":      {d: with(good, data{"tls.crt": other["tls.crt"], "ca.crt": roots}), pair: "key"},
			"swapped":       {d: data{"tls.crt": good["tls.key"], "tls.key": good["tls.crt"], "ca.crt": roots}, pair: "tls.crt and tls.key"},
			"expired":       {d: with(expired, data{"ca.crt": roots}), pair: "has expired"},
			"damaged":       {d: data{"tls.crt": good["tls.crt"][:100], "tls.key": good["tls.key"], "ca.crt": roots}, pair: "tls.crt and tls.key"},
			"no roots":      {d: good, roots: "taken out"},
			"empty roots":   {d: with(good, data{"ca.crt": nil}), roots: "taken out"},
			"damaged roots": {d: with(good, data{"ca.crt": roots[:100]}), roots: "damaged"},
			"a leaf":        {d: with(good, data{"ca.crt": good["tls.crt"]}), roots: "not a CA"},
			"nothing":       {d: data{}, pair: "taken out", roots: "taken out"},
			"too large":     {d: with(good, data{"ca.crt": bytes.Repeat(roots, 1001)}), roots: "limit"},
		} {
			func() {
				t.Log(what) // of a failure
				w := (&world{t: t, api: kubetest.StartOn(t, 1, memconn.Listen())}).start(kubesecrets.Config{})
				put(w.api, "gw/s", with(good, data{"ca.crt": roots}))
				w.is("kubernetes://s", pair(good))
				w.is("kubernetes://s-cacert", string(roots))
				assert.Equal(t, []string{"kubernetes://gw/s-cacert", "kubernetes://s-cacert", "kubernetes://gw/s", "kubernetes://s"}, w.heard(), "roots first")
				put(w.api, "gw/s", c.d)
				w.is("kubernetes://s", pair(good))
				w.is("kubernetes://s-cacert", string(roots))
				assert.Empty(t, w.heard())
				st := w.src.SecretStatus("gw", "s")
				assert.True(t, st.Pair && st.Roots)
				for text, err := range map[string]error{c.pair: st.PairErr, c.roots: st.RootsErr} {
					if text == "" {
						assert.NoError(t, err)
					} else if assert.ErrorContains(t, err, text) {
						assert.Contains(t, w.log.String(), "the last good content stays in use")
					}
				}
				r := w.src.Report()
				require.Len(t, r.Identities, 1)
				assert.Equal(t, "kubernetes://gw/s", r.Identities[0].Name)
				assert.Equal(t, st.PairEnd, r.Identities[0].NotAfter, "of what is in use")
				assert.Equal(t, st.PairErr, r.Identities[0].Err)
				if c.roots == "" {
					assert.Empty(t, r.Problems)
				} else if assert.Len(t, r.Problems, 1) {
					assert.ErrorContains(t, r.Problems[0], "roots of kubernetes://gw/s: ")
					assert.ErrorIs(t, r.Problems[0], st.RootsErr)
				}
				assert.True(t, r.Upstreams[0].OK)
				assert.Equal(t, 1.0, must.Get(metricstest.Of(r.Metrics))(t).Samples["svidkit_kubesecrets_secrets_refused"])
				put(w.api, "gw/s", with(other, data{"ca.crt": roots}))
				w.is("kubernetes://s", pair(other))
				assert.Equal(t, []string{"kubernetes://gw/s", "kubernetes://s"}, w.heard(), "the roots are the same")
				st = w.src.SecretStatus("gw", "s")
				assert.NoError(t, st.PairErr)
				assert.NoError(t, st.RootsErr)

				// Without anything good before, there is the reason.
				put(w.api, "gw/new", c.d)
				if c.pair != "" && what != "nothing" {
					w.fails("kubernetes://new", c.pair)
				}
				if c.roots != "" && len(c.d["ca.crt"]) > 0 {
					w.fails("kubernetes://new-cacert", c.roots)
				}
				for _, secret := range []string{string(good["tls.key"]), string(other["tls.key"])} {
					assert.NotContains(t, w.log.String(), strings.Split(secret, "\n")[1])
					assert.NotContains(t, fmt.Sprintf("%v %+v %#v %v", w.src, w.src, w.src, w.src.Status()), strings.Split(secret, "\n")[1])
				}
			}()
		}
	})
}

// TestRootsOfTheirOwn has a Secret NAME-cacert that is not good from the beginning: it counts alone, as it may be
// there to trust less than NAME does.
func TestRootsOfTheirOwn(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		other := spiffetest.NewCA(t, "other.test")
		roots, others := ca.Bundle().MarshalPEM(), other.Bundle().MarshalPEM()
		d := with(tls(t, ca.SVID("/a")), data{"ca.crt": roots})
		w.start(kubesecrets.Config{})
		for text, bad := range map[string]data{
			"damaged":                             {"cacert": others[:100]},
			"the Secret has nothing of this kind": {"ca.pem": others},
		} {
			put(w.api, "gw/s", d)
			w.is("kubernetes://s-cacert", string(roots))
			w.heard()
			put(w.api, "gw/s-cacert", bad)
			w.fails("kubernetes://s-cacert", text)
			assert.Empty(t, w.heard(), "streams that have roots keep them")
			assert.ErrorContains(t, w.src.SecretStatus("gw", "s-cacert").RootsErr, text)
			assert.Contains(t, w.log.String(), text)
			w.is("kubernetes://s", pair(d))
			put(w.api, "gw/s-cacert", data{"cacert": others})
			w.is("kubernetes://s-cacert", string(others))
			assert.Equal(t, []string{"kubernetes://gw/s-cacert-cacert", "kubernetes://s-cacert-cacert", "kubernetes://gw/s-cacert", "kubernetes://s-cacert"}, w.heard())
			put(w.api, "gw/s-cacert", bad)
			w.is("kubernetes://s-cacert", string(others))
			w.api.Remove(path("gw/s-cacert"))
			w.is("kubernetes://s-cacert", string(roots))
			w.heard()
			put(w.api, "gw/s-cacert", bad)
			w.fails("kubernetes://s-cacert", text)
			w.api.Remove(path("gw/s-cacert"))
			w.is("kubernetes://s-cacert", string(roots))
			assert.Contains(t, w.heard(), "kubernetes://s-cacert", "also if it never was good")
		}
	})
}

// TestSomeRoots leaves out what is no root.
func TestSomeRoots(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		w.start(kubesecrets.Config{})
		leaf := tls(t, ca.SVID("/a"))["tls.crt"]
		put(w.api, "gw/s-cacert", data{"cacert": slices.Concat(leaf, ca.Bundle().MarshalPEM())})
		w.is("kubernetes://s-cacert", string(ca.Bundle().MarshalPEM()))
		assert.ErrorContains(t, w.src.SecretStatus("gw", "s-cacert").Note, "1 of 2 certificates are left out")
		assert.Contains(t, w.log.String(), "needs attention")
	})
}

// TestTimes has certificates that begin and end.
func TestTimes(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		w.start(kubesecrets.Config{})
		now, later := tls(t, ca.SVID("/a", valid(-time.Hour, 2*time.Hour))), tls(t, ca.SVID("/a", valid(time.Hour, 4*time.Hour)))
		put(w.api, "gw/s", now)
		put(w.api, "gw/late", later)
		w.is("kubernetes://s", pair(now))
		w.fails("kubernetes://late", "is valid from")
		w.heard()
		put(w.api, "gw/s", later)
		w.is("kubernetes://s", pair(now))
		time.Sleep(59 * time.Minute)
		w.is("kubernetes://s", pair(now))
		assert.Empty(t, w.heard())
		time.Sleep(15 * time.Minute)
		assert.ElementsMatch(t, []string{"kubernetes://gw/s", "kubernetes://s", "kubernetes://gw/late", "kubernetes://late"}, w.heard())
		w.is("kubernetes://s", pair(later))
		w.is("kubernetes://late", pair(later))
		assert.NoError(t, w.src.SecretStatus("gw", "s").PairErr)
		time.Sleep(3 * time.Hour)
		w.fails("kubernetes://s", "has expired at")

		// One that was replaced before it began never comes.
		put(w.api, "gw/s", tls(t, ca.SVID("/b", valid(time.Hour, 2*time.Hour))))
		synctest.Wait()
		fresh := tls(t, ca.SVID("/c", valid(0, 9*time.Hour)))
		put(w.api, "gw/s", fresh)
		w.is("kubernetes://s", pair(fresh))
		time.Sleep(90 * time.Minute)
		w.is("kubernetes://s", pair(fresh))
	})
}

// TestWithdrawn deletes Secrets, and has them leave the selection, while they are watched and while nothing is.
func TestWithdrawn(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		d := with(tls(t, ca.SVID("/a")), data{"ca.crt": ca.Bundle().MarshalPEM()})
		other := spiffetest.NewCA(t, "other.test").Bundle().MarshalPEM()
		labels := func(v string) map[string]any { return map[string]any{"labels": map[string]any{"gateway": v}} }
		put(w.api, "gw/none", d)
		w.start(kubesecrets.Config{LabelSelector: "gateway=yes"})
		all := []string{"kubernetes://gw/s-cacert", "kubernetes://s-cacert", "kubernetes://gw/s", "kubernetes://s"}
		put(w.api, "gw/s", d, "metadata", labels("yes"))
		w.is("kubernetes://s", pair(d))
		w.absent("kubernetes://none")
		assert.Equal(t, all, w.heard())
		for _, away := range []func(){
			func() { w.api.Remove(path("gw/s")) },
			func() { put(w.api, "gw/s", d, "metadata", labels("no")) },
			func() { // in an outage that the watch does not survive
				w.api.Faults(func(*http.Request) *kubetest.Fault { return &kubetest.Fault{Code: 503, Reason: "ServiceUnavailable"} })
				w.api.EndWatches()
				synctest.Wait()
				w.api.Remove(path("gw/s"))
				w.api.Compact()
				time.Sleep(time.Minute)
				got := must.Get(w.get("kubernetes://s"))(t)
				assert.Equal(t, pair(d), got, "nothing is withdrawn because nothing can be read")
				assert.Error(t, w.src.Status().Err)
				assert.Error(t, w.src.Report().Upstreams[0].Err)
				assert.False(t, w.src.Report().Upstreams[0].OK)
				w.api.Faults(nil)
				time.Sleep(time.Minute)
			},
		} {
			away()
			w.absent("kubernetes://s")
			w.absent("kubernetes://s-cacert")
			assert.Equal(t, all, w.heard())
			assert.Zero(t, w.src.Status().Secrets)
			assert.Zero(t, w.src.Status().Bytes)
			put(w.api, "gw/s", d, "metadata", labels("yes"))
			w.is("kubernetes://s", pair(d))
			assert.Equal(t, all, w.heard())
		}
		assert.Contains(t, w.log.String(), "withdrawn")

		// Roots of their own Secret, and without it of the other again.
		put(w.api, "gw/s-cacert", data{"cacert": other}, "metadata", labels("yes"))
		w.is("kubernetes://s-cacert", string(other))
		assert.Contains(t, w.heard(), "kubernetes://s-cacert")
		w.api.Remove(path("gw/s-cacert"))
		w.is("kubernetes://s-cacert", string(d["ca.crt"]))
		assert.Contains(t, w.heard(), "kubernetes://s-cacert")
	})
}

// TestReplaced has a Secret that was deleted and made anew where no watch saw it: what the old one had is not the
// last good content of the new one.
func TestReplaced(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		d := with(tls(t, ca.SVID("/a")), data{"ca.crt": ca.Bundle().MarshalPEM()})
		good := tls(t, ca.SVID("/b"))
		w.start(kubesecrets.Config{}.WithMaxBytes(12 << 10))
		unseen := func(change func()) {
			w.api.Faults(func(*http.Request) *kubetest.Fault { return &kubetest.Fault{Code: 503, Reason: "ServiceUnavailable"} })
			w.api.EndWatches()
			synctest.Wait()
			w.api.Remove(path("gw/s"))
			change()
			w.api.Compact()
			w.api.Faults(nil)
			time.Sleep(time.Minute)
		}
		all := []string{"kubernetes://gw/s-cacert", "kubernetes://s-cacert", "kubernetes://gw/s", "kubernetes://s"}
		for name, test := range map[string]struct {
			next data
			err  string // of the pair; empty: there is no such name
		}{
			"half a pair":     {data{"tls.crt": d["tls.crt"]}, "without tls.key"},
			"another key":     {data{"tls.crt": d["tls.crt"], "tls.key": good["tls.key"]}, "key"},
			"nothing":         {data{"other": []byte("x")}, ""},
			"beyond the room": {with(d, data{"cacert": many(t, 20)}), "room"},
		} {
			put(w.api, "gw/s", d)
			w.is("kubernetes://s", pair(d))
			w.heard()
			unseen(func() { put(w.api, "gw/s", test.next) })
			if test.err == "" {
				w.absent("kubernetes://s")
			} else {
				w.fails("kubernetes://s", test.err)
			}
			require.Error(t, must.Err(w.get("kubernetes://s-cacert")), name)
			assert.Equal(t, all, w.heard(), name)
			w.api.Remove(path("gw/s"))
			synctest.Wait()
			assert.Zero(t, w.src.Status().Bytes, name)
			w.heard()
		}
		put(w.api, "gw/s", d)
		w.heard()
		unseen(func() { put(w.api, "gw/s", good) })
		w.is("kubernetes://s", pair(good))
		w.fails("kubernetes://s-cacert", "nothing of this kind")
		assert.Equal(t, all, w.heard())
		unseen(func() { put(w.api, "gw/s", good) })
		w.is("kubernetes://s", pair(good))
	})
}

// many are roots that need much room.
func many(t testing.TB, n int) (roots []byte) {
	for range n {
		roots = append(roots, spiffetest.NewCA(t, "example.org").Bundle().MarshalPEM()...)
	}
	return roots
}

// TestFollow loses no change over all that happens to watches, and asks no more often than it should.
func TestFollow(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		w.start(kubesecrets.Config{AllNamespaces: true})
		n := 0
		renew := func() {
			t.Helper()
			n++
			d := tls(t, ca.SVID(fmt.Sprint("/", n), valid(-time.Minute, 24*time.Hour)))
			put(w.api, "app/s", d)
			time.Sleep(time.Minute)
			w.is("kubernetes://app/s", pair(d))
		}
		lists := func() int {
			all := 0
			for _, r := range w.api.Requests() {
				if r.Query.Get("watch") == "" {
					all++
				}
			}
			return all
		}
		renew()
		time.Sleep(time.Hour)
		assert.Less(t, w.api.Count("GET", "/api/v1/secrets"), 20, "a watch lasts five minutes")
		assert.Equal(t, 1, lists(), "and the next goes on")
		renew()
		w.api.Compact()
		w.api.EndWatches()
		renew()
		assert.Equal(t, 1, lists(), "from the version of the last event")
		for range 8 { // as an event, and as a status
			w.api.ExpireWatches()
			renew()
			w.api.EndWatches()
			w.api.Compact()
			renew()
		}
		assert.Greater(t, lists(), 8)
		assert.Less(t, lists(), 40)

		// A server that ends each watch at once, and one that cannot be watched.
		for _, fault := range []kubetest.Fault{{Code: 500, Reason: "InternalError"}, {}, {Code: 410, Reason: "Expired"}, {Code: 429, RetryAfter: 20 * time.Second}} {
			w.api.Faults(func(r *http.Request) *kubetest.Fault {
				if r.URL.Query().Get("watch") == "" {
					return nil
				}
				return &fault
			})
			w.api.EndWatches()
			before := w.api.Count("GET", "/api/v1/secrets")
			put(w.api, "app/s", tls(t, ca.SVID("/x", valid(-time.Minute, 24*time.Hour))))
			n++
			d := tls(t, ca.SVID(fmt.Sprint("/", n), valid(-time.Minute, 24*time.Hour)))
			put(w.api, "app/s", d)
			time.Sleep(3 * time.Minute)
			w.is("kubernetes://app/s", pair(d))
			assert.Less(t, w.api.Count("GET", "/api/v1/secrets")-before, 100, "%+v", fault) // by the jitter, seldom more than 60
			require.Error(t, w.src.Status().Err)
			w.api.Faults(nil)
			time.Sleep(2 * time.Minute)
			renew()
			require.NoError(t, w.src.Status().Err)
		}
		w.api.Faults(func(*http.Request) *kubetest.Fault { return &kubetest.Fault{Code: 403, Reason: "Forbidden"} })
		w.api.EndWatches()
		time.Sleep(time.Hour)
		assert.ErrorContains(t, w.src.Status().Err, "ClusterRole")
		assert.Zero(t, must.Get(metricstest.Of(w.src.Report().Metrics))(t).Samples["svidkit_kubesecrets_up"])
		w.api.Faults(nil)
		time.Sleep(time.Minute)
		renew()
	})
}

// TestOneEvent has a server that ends each watch after one event. It is not asked in a loop without a wait.
func TestOneEvent(t *testing.T) {
	t.Parallel()
	for name, crowded := range map[string]bool{"gone": false, "ended": false, "crowded": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
				d := tls(t, ca.SVID("/a"))
				var cfg kubesecrets.Config
				put(w.api, "gw/s", d)
				if crowded {
					put(w.api, "gw/t", d)
					cfg = cfg.WithMaxBytes(4 << 10)
				}
				w.start(cfg)
				synctest.Wait() // so that there is a watch to end
				end := w.api.EndWatches
				if name == "gone" {
					end = w.api.ExpireWatches
				}
				var events atomic.Int32
				w.api.Faults(func(r *http.Request) *kubetest.Fault {
					if r.URL.Query().Get("watch") != "" {
						go func() {
							time.Sleep(10 * time.Millisecond)
							put(w.api, "gw/other", data{"n": fmt.Append(nil, events.Add(1))})
							end()
						}()
					}
					return nil
				})
				w.api.EndWatches()
				before := w.api.Count("GET", "/api/v1")
				time.Sleep(3 * time.Minute)
				assert.Greater(t, events.Load(), int32(3))
				assert.Less(t, w.api.Count("GET", "/api/v1")-before, 60)
				assert.Contains(t, w.log.String(), "the API server cannot be followed")
				fresh := tls(t, ca.SVID("/b"))
				put(w.api, "gw/s", fresh)
				time.Sleep(time.Minute)
				w.is("kubernetes://s", pair(fresh))
				w.api.Faults(nil)
				time.Sleep(time.Minute)
				assert.NoError(t, w.src.Status().Err)
			})
		})
	}
}

// TestRoom bounds what is kept.
func TestRoom(t *testing.T) {
	inBubble(t, func(t *testing.T, ca *spiffetest.CA, w *world) {
		d := tls(t, ca.SVID("/a", valid(-time.Hour, 100*time.Hour)))
		large := with(d, data{"ca.crt": bytes.Repeat(ca.Bundle().MarshalPEM(), 20)})
		for i := range 10 {
			put(w.api, fmt.Sprint("gw/s", i), d)
			put(w.api, fmt.Sprint("gw/password", i), data{"x": make([]byte, 1<<10)})
		}
		w.start(kubesecrets.Config{}.WithMaxBytes(10 << 10))
		st := w.src.Status()
		have := st.Secrets
		assert.Greater(t, have, 2)
		assert.Equal(t, 10, have+st.Refused)
		assert.LessOrEqual(t, st.Bytes, 10<<10)
		w.is("kubernetes://s0", pair(d))
		w.fails("kubernetes://s9", "Config.LabelSelector")
		w.fails("kubernetes://s9-cacert", "Config.LabelSelector")
		w.absent("kubernetes://other")
		assert.Contains(t, w.log.String(), "no room")

		put(w.api, "gw/s0", large) // one that is kept does not become larger than there is room
		w.is("kubernetes://s0", pair(d))
		assert.ErrorContains(t, w.src.SecretStatus("gw", "s0").PairErr, "no room")
		assert.Equal(t, 10-have+1, w.src.Status().Refused)
		assert.ErrorContains(t, w.src.Report().Problems[0], fmt.Sprintf("no room for %d Secrets", 10-have+1))
		for i := range 7 {
			w.api.Remove(path(fmt.Sprint("gw/s", i+1)))
		}
		synctest.Wait()
		w.fails("kubernetes://s9", "Config.LabelSelector")
		time.Sleep(11 * time.Minute) // with the next list
		w.is("kubernetes://s9", pair(d))
		assert.NoError(t, w.src.SecretStatus("gw", "s9").PairErr)
		put(w.api, "gw/s0", d)
		w.is("kubernetes://s0", pair(d))
		assert.NoError(t, w.src.SecretStatus("gw", "s0").PairErr)
		assert.Zero(t, w.src.Status().Refused)
		for i := range 10 {
			w.api.Remove(path(fmt.Sprint("gw/s", i)))
		}
		synctest.Wait()
		assert.Zero(t, w.src.Status().Bytes)
	})
}

// TestNotReady has what keeps a Source from being ready, and what it then says.
func TestNotReady(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := kubetest.StartOn(t, 1, memconn.Listen())
		cfg := kubesecrets.Config{Namespace: "gw", APIServer: api.URL(), HTTPClient: api.Client()}
		api.Faults(func(*http.Request) *kubetest.Fault {
			return &kubetest.Fault{Code: 403, Reason: "Forbidden", Message: "no"}
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		src := must.Get(kubesecrets.New(cfg))(t)
		go func() { _ = src.Run(ctx) }()
		_, err := src.GenerateSecret(ctx, "kubernetes://s")
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, `Role in namespace "gw"`)

		src = must.Get(kubesecrets.New(cfg))(t)
		require.NoError(t, src.Run(canceled(t)))
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		require.ErrorIs(t, must.Err(src.GenerateSecret(short, "kubernetes://s")), spiffe.ErrNotReady)
		api.Faults(nil)
		require.NoError(t, src.Close())
		require.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), "kubernetes://s")), spiffe.ErrNotReady)
		require.Error(t, src.Run(t.Context()))
	})
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := kubesecrets.New(kubesecrets.Config{APIServer: "https://127.0.0.1"})
	if _, inPod := os.LookupEnv("KUBERNETES_SERVICE_HOST"); !inPod {
		require.ErrorContains(t, err, "not in a pod")
	}
	good := kubesecrets.Config{Namespace: "gw", APIServer: "https://127.0.0.1"}
	for text, edit := range map[string]func(*kubesecrets.Config){
		"Namespace":                func(c *kubesecrets.Config) { c.Namespace = "a/b" },
		"ReviewInterval":           func(c *kubesecrets.Config) { c.ReviewInterval = time.Millisecond },
		"ReviewInterval is 2h0m0s": func(c *kubesecrets.Config) { c.ReviewInterval = 2 * time.Hour }, // an answer counts for one
		"one type":                 func(c *kubesecrets.Config) { c.Type = "a,b" },
		"https":                    func(c *kubesecrets.Config) { c.APIServer = "http://example.org" },
	} {
		cfg := good
		edit(&cfg)
		_, err := kubesecrets.New(cfg)
		require.ErrorContains(t, err, text)
		require.ErrorContains(t, err, "kubesecrets: invalid Config")
	}
	good.Namespace, good.AllNamespaces = "", true
	src := must.Get(kubesecrets.New(good))(t)
	require.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), "kubernetes://s")), fs.ErrNotExist)
	assert.Equal(t, "kubesecrets.Source(all namespaces)", fmt.Sprintf("%v", src))
}

// TestSelection has the server select by type.
func TestSelection(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *spiffetest.CA, w *world) {
		d := tls(t, spiffetest.NewCA(t, "example.org").SVID("/a"))
		put(w.api, "gw/opaque", d)
		put(w.api, "gw/tls", d, "type", "kubernetes.io/tls")
		w.start(kubesecrets.Config{Type: "kubernetes.io/tls"})
		w.is("kubernetes://tls", pair(d))
		w.absent("kubernetes://opaque")
		for _, r := range w.api.Requests() {
			assert.Equal(t, "/api/v1/namespaces/gw/secrets", r.Path)
			assert.Equal(t, "type=kubernetes.io/tls", r.Query.Get("fieldSelector"))
		}
	})
}

// FuzzSecret has Secrets with hostile content: what is served is what Envoy takes.
func FuzzSecret(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	d := tls(f, ca.SVID("/a"))
	roots := ca.Bundle().MarshalPEM()
	f.Add(d["tls.crt"], d["tls.key"], roots, []byte(nil), false)
	f.Add(d["tls.crt"], d["tls.key"], roots, newIssuer(f).crl(f, time.Hour), true)
	f.Add(d["tls.crt"], roots, d["tls.key"], []byte("x"), false)
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n"), d["tls.key"][:50], roots[:90], []byte{}, true)
	f.Fuzz(func(t *testing.T, certs, key, roots, crls []byte, generic bool) {
		d := data{"tls.crt": certs, "tls.key": key, "ca.crt": roots, "ca.crl": crls}
		if generic {
			d = data{"cert": certs, "key": key, "cacert": roots, "crl": crls}
		}
		object, err := json.Marshal(map[string]any{"metadata": map[string]any{"namespace": "gw", "name": "s", "resourceVersion": "1"}, "data": d})
		if err != nil {
			t.Fatal(err)
		}
		src := kubesecrets.Taken(object)
		if s, err := src.Lookup("kubernetes://gw/s"); err == nil {
			chain, key, _ := s.KeyPair()
			if _, err := pki.NewSecretPEM("s", chain, key, nil, time.Time{}); err != nil {
				t.Errorf("a bad pair: %v", err)
			}
		}
		if s, err := src.Lookup("kubernetes://gw/s-cacert"); err == nil {
			pem, _ := s.Roots()
			if _, err := pki.NewSecretPEM("s", nil, nil, pem, time.Time{}); err != nil {
				t.Errorf("bad roots: %v", err)
			}
			if lists, _ := s.CRLs(); len(lists) == 0 && len(crls) > 0 {
				t.Error("the revocation lists are passed over")
			}
		}
	})
}

// FuzzName has hostile names: one that is parsed is the name of a Secret, and means nothing else.
func FuzzName(f *testing.F) {
	for _, name := range []string{"kubernetes://gw/s", "kubernetes://s-cacert", "kubernetes://gw/-cacert", "kubernetes://a/b/c", "kubernetes://../s", "s"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		namespace, secret, roots, err := kubesecrets.Parse(name)
		if err != nil {
			return
		}
		again := "kubernetes://" + secret
		if namespace != "" {
			again = "kubernetes://" + namespace + "/" + secret
		}
		if again != name || strings.ContainsAny(namespace+secret, "/%? \n") || roots != strings.HasSuffix(secret, "-cacert") {
			t.Errorf("%q is %q %q %v", name, namespace, secret, roots)
		}
	})
}
