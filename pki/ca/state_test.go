package ca_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"net/url"
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
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

const stateName = "svidkit-state.json"

// put makes a store with this record.
func put(t testing.TB, data map[string][]byte) *ca.MemoryStore {
	t.Helper()
	m := ca.NewMemoryStore()
	must.Get(m.Save(t.Context(), ca.NewRecord("", data)))(t)
	return m
}

// A document that is not quite right is an error, and stays as it is.
func TestUnfitDocuments(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BND-2", "IST-2.12-1")
	store := ca.NewMemoryStore()
	a := open(t, store, withJWT)
	must.Get(a.Rotate(t.Context()))(t)
	other := load(t, func() ca.Store { s := ca.NewMemoryStore(); open(t, s, withJWT); return s }())
	good := load(t, store)
	root := func(d map[string]any, i int) map[string]any { return d["roots"].([]any)[i].(map[string]any) }
	jwt := func(d map[string]any) map[string]any { return d["jwt_keys"].([]any)[0].(map[string]any) }
	var others map[string]any
	require.NoError(t, json.Unmarshal(other.Data()[stateName], &others))
	for name, break_ := range map[string]func(d map[string]any){
		"version 0":                    func(d map[string]any) { d["version"] = 0 },
		"version 2":                    func(d map[string]any) { d["version"] = 2 },
		"another trust domain":         func(d map[string]any) { d["trust_domain"] = "example.com" },
		"a trust domain in capitals":   func(d map[string]any) { d["trust_domain"] = "Example.org" },
		"no trust domain":              func(d map[string]any) { delete(d, "trust_domain") },
		"no authority":                 func(d map[string]any) { delete(d, "authority") },
		"no revision":                  func(d map[string]any) { delete(d, "revision") },
		"a negative revision":          func(d map[string]any) { d["revision"] = -1 },
		"no sequence":                  func(d map[string]any) { delete(d, "sequence") },
		"sequence 0":                   func(d map[string]any) { d["sequence"] = 0 },
		"an unknown field":             func(d map[string]any) { d["colour"] = "red" },
		"an unknown field of a root":   func(d map[string]any) { root(d, 0)["colour"] = "red" },
		"no roots":                     func(d map[string]any) { delete(d, "roots") },
		"65 roots":                     func(d map[string]any) { d["roots"] = slices.Repeat([]any{root(d, 0)}, 65) },
		"the same root twice":          func(d map[string]any) { d["roots"] = []any{root(d, 0), root(d, 1), root(d, 1)} },
		"no active root":               func(d map[string]any) { d["roots"] = []any{root(d, 1)} },
		"two active roots":             func(d map[string]any) { root(d, 1)["phase"] = "active" },
		"two distributing roots":       func(d map[string]any) { root(d, 0)["phase"] = "distributing" },
		"a phase that is none":         func(d map[string]any) { root(d, 0)["phase"] = "Active" },
		"a phase that is a number":     func(d map[string]any) { root(d, 0)["phase"] = 2 },
		"no phase":                     func(d map[string]any) { delete(root(d, 0), "phase") },
		"active without a key":         func(d map[string]any) { delete(root(d, 0), "private_key") },
		"distributing without a key":   func(d map[string]any) { delete(root(d, 1), "private_key") },
		"active with a time to retire": func(d map[string]any) { root(d, 0)["retires"] = root(d, 0)["prepared"] },
		"retiring with a key": func(d map[string]any) {
			root(d, 1)["phase"], root(d, 1)["retires"] = "retiring", root(d, 1)["prepared"]
		},
		"retiring without a time": func(d map[string]any) { root(d, 1)["phase"] = "retiring"; delete(root(d, 1), "private_key") },
		"the other root's key":    func(d map[string]any) { root(d, 0)["private_key"] = root(d, 1)["private_key"] },
		"a key that is none":      func(d map[string]any) { root(d, 0)["private_key"] = "none" },
		"no certificate":          func(d map[string]any) { delete(root(d, 0), "certificate") },
		"two certificates": func(d map[string]any) {
			root(d, 0)["certificate"] = root(d, 0)["certificate"].(string) + root(d, 1)["certificate"].(string)
		},
		"no time of preparation":  func(d map[string]any) { delete(root(d, 0), "prepared") },
		"no time of activation":   func(d map[string]any) { delete(root(d, 1), "activates") },
		"a time that is none":     func(d map[string]any) { root(d, 1)["activates"] = "tomorrow" },
		"a negative longest":      func(d map[string]any) { root(d, 0)["longest"] = "-1h" },
		"a longest that is none":  func(d map[string]any) { root(d, 0)["longest"] = "long" },
		"a number for a duration": func(d map[string]any) { root(d, 0)["longest"] = 5 },
		"the root of another trust domain": func(d map[string]any) {
			s := ca.NewMemoryStore()
			open(t, s, func(c *ca.Config) { c.TrustDomain = spiffe.MustParseTrustDomain("example.com") })
			var od map[string]any
			require.NoError(t, json.Unmarshal(load(t, s).Data()[stateName], &od))
			d["roots"] = od["roots"]
		},
		"a JWT key without an ID":           func(d map[string]any) { delete(jwt(d), "key_id") },
		"a JWT key without its public":      func(d map[string]any) { delete(jwt(d), "public_key") },
		"a JWT key with another public":     func(d map[string]any) { jwt(d)["public_key"] = jwt(others)["public_key"] },
		"a JWT key of no algorithm of ours": func(d map[string]any) { jwt(d)["algorithm"] = "HS256" },
		"a JWT key for another algorithm":   func(d map[string]any) { jwt(d)["algorithm"] = "RS256" },
		"a JWT key that is trusted":         func(d map[string]any) { jwt(d)["phase"] = "trusted"; delete(jwt(d), "private_key") },
		"two active JWT keys":               func(d map[string]any) { d["jwt_keys"] = []any{jwt(d), jwt(others)} },
		"a torn block behind the key":       func(d map[string]any) { jwt(d)["public_key"] = jwt(d)["public_key"].(string) + "-----BEGIN" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var d map[string]any
			require.NoError(t, json.Unmarshal(good.Data()[stateName], &d))
			break_(d)
			b := must.Get(json.Marshal(d))(t)
			data := map[string][]byte{stateName: b}
			refused(t, data)
		})
	}
	for name, b := range map[string]string{
		"empty": "", "not JSON": "hello", "null": "null", "a list": "[]", "cut": string(good.Data()[stateName][:len(good.Data()[stateName])-2]),
		"something behind it": string(good.Data()[stateName]) + "{}",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			refused(t, map[string][]byte{stateName: []byte(b)})
		})
	}
	t.Run("ca-cert.pem is damaged", func(t *testing.T) {
		t.Parallel()
		data := good.Data()
		refused(t, map[string][]byte{stateName: data[stateName], "ca-cert.pem": []byte("x"), "ca-key.pem": data["ca-key.pem"]})
	})
}

// refused shows that no authority works with a record or overwrites it.
func refused(t *testing.T, data map[string][]byte) {
	t.Helper()
	s := put(t, data)
	a, err := tryOpen(t.Context(), s, withJWT)
	require.ErrorIs(t, err, ca.ErrRecord)
	assert.Regexp(t, `^ca: the record in the store is unfit: `, err.Error())
	assert.NotContains(t, err.Error(), "PRIVATE KEY")
	assert.Nil(t, a)
	r := load(t, s)
	assert.Equal(t, "1", r.Version)
	for name := range data {
		assert.Equal(t, string(data[name]), string(r.Data()[name]))
	}
}

// istioCA is a CA as Istio makes it: RSA, no SPIFFE ID, the trust domain as organization.
func istioCA(t testing.TB, edit ...func(*x509.Certificate)) (*x509.Certificate, *rsa.PrivateKey) {
	t.Helper()
	istioKeys.Lock()
	defer istioKeys.Unlock()
	test, _, _ := strings.Cut(t.Name(), "/") // its subtests, too
	n := istioKeys.taken[test] % 3           // as many as there are files; more are taken with -count
	istioKeys.taken[test]++
	if n == len(istioKeys.all) {
		text := must.Get(os.ReadFile(fmt.Sprintf("testdata/rsa-%d.pem", n)))(t)
		key := must.Get(pki.ParsePrivateKeyPEM(text))(t)
		istioKeys.all = append(istioKeys.all, key.(*rsa.PrivateKey))
	}
	key := istioKeys.all[n]
	return istioRoot(t, key, edit...), key
}

// istioKeys are files, as RSA keys take long to make. Within a test each CA has one of its own.
var istioKeys = struct {
	sync.Mutex
	all   []*rsa.PrivateKey
	taken map[string]int // by the name of the test
}{taken: make(map[string]int)}

func istioRoot(t testing.TB, key *rsa.PrivateKey, edit ...func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	serial := must.Get(rand.Int(rand.Reader, big.NewInt(1<<62)))(t)
	tmpl := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{Organization: []string{"example.org"}},
		NotBefore: time.Now(), NotAfter: time.Now().Add(87600 * time.Hour),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	for _, e := range edit {
		e(tmpl)
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
	return must.Get(x509.ParseCertificate(der))(t)
}

// pkcs1 is how Istio writes a key.
func pkcs1(key *rsa.PrivateKey) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
}

func istioSecret(t testing.TB, cert *x509.Certificate, key *rsa.PrivateKey, roots ...*x509.Certificate) map[string][]byte {
	t.Helper()
	return map[string][]byte{
		"ca-cert.pem": pki.MarshalCertificatesPEM(cert), "ca-key.pem": pkcs1(key), "cert-chain.pem": {}, "key.pem": {},
		"root-cert.pem": pki.MarshalCertificatesPEM(append([]*x509.Certificate{cert}, roots...)...),
	}
}

// A CA that Istio made is taken over: same key, same root, and it can be rotated.
func TestAdoption(t *testing.T) {
	t.Parallel()
	cert, key := istioCA(t)
	extra, _ := istioCA(t, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(1000 * time.Hour) })
	start := time.Now()
	store := put(t, istioSecret(t, cert, key, extra, cert))
	a := open(t, store)
	roots := a.Roots()
	require.Len(t, roots, 2)
	assert.Equal(t, "trusted", roots[0].Phase)
	assert.True(t, roots[0].Certificate.Equal(extra))
	assert.Equal(t, extra.NotAfter.UTC(), roots[0].Retires.UTC())
	assert.Equal(t, "active", roots[1].Phase)
	assert.True(t, roots[1].Certificate.Equal(cert))
	assert.EqualValues(t, 1, sequence(t, a.Bundle()))
	leaf := sign(t, a, newCSR(t), 0)
	assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
	assert.NoError(t, leaf.CheckSignatureFrom(cert))
	old := istioLeaf(t, cert, key)
	assert.NoError(t, verify(a.Bundle(), old, time.Now()), "what Istio signed goes on")

	r := load(t, store)
	assert.Contains(t, r.Data(), stateName)
	assert.Equal(t, pki.MarshalCertificatesPEM(cert), r.Data()["ca-cert.pem"])
	b := open(t, store)
	assert.True(t, a.Bundle().Equal(b.Bundle()))

	must.Get(a.Rotate(t.Context()))(t)
	assert.Len(t, a.Roots(), 3)
	require.NoError(t, must.Err(a.Revoke(t.Context(), roots[0].ID, false)), "an extra root can be taken out")
	assert.Len(t, a.Roots(), 2)
	assert.Less(t, time.Since(start), time.Hour)
}

func istioLeaf(t testing.TB, cert *x509.Certificate, key *rsa.PrivateKey) *x509.Certificate {
	t.Helper()
	issuer := must.Get(pki.NewIssuer([]*x509.Certificate{cert}, key))(t)
	leaf, err := issuer.Issue(pki.CertificateOptions{PublicKey: newCSR(t).PublicKey(), SANs: []pki.SAN{pki.IDSAN(web)}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(90 * 24 * time.Hour)})
	require.NoError(t, err)
	return leaf
}

// What was adopted retires after the longest leaf that Istio may have signed.
func TestAdoptedRootStaysForIstiosLeaves(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		cert, key := istioCA(t)
		a := open(t, put(t, istioSecret(t, cert, key))) // MaxTTL is an hour
		leaf := istioLeaf(t, cert, key)
		must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(90*24*time.Hour - time.Minute)
		assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
		time.Sleep(time.Hour)
		assert.Len(t, a.Roots(), 1)
	})
}

func TestAdoptionRefuses(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	cert, key := istioCA(t)
	otherCert, otherKey := istioCA(t)
	good := istioSecret(t, cert, key)
	edit := func(name string, b []byte) map[string][]byte {
		d := map[string][]byte{}
		maps.Copy(d, good)
		if d[name] = b; b == nil {
			delete(d, name)
		}
		return d
	}
	expired := istioRoot(t, key, func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	})
	noCA := istioRoot(t, key, func(c *x509.Certificate) { c.IsCA = false })
	below, err := newOffline(t).issuer.Issue(pki.CertificateOptions{PublicKey: key.Public(), CA: true, SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	foreign := istioRoot(t, key, func(c *x509.Certificate) {
		c.PermittedURIDomains, c.PermittedDNSDomainsCritical = []string{"example.com"}, true
	})
	for name, data := range map[string]map[string][]byte{
		"nothing at all":              {},
		"something else":              {"password": []byte("x")},
		"no certificate":              edit("ca-cert.pem", nil),
		"an empty certificate":        edit("ca-cert.pem", []byte{}),
		"no key":                      edit("ca-key.pem", nil),
		"a certificate that is none":  edit("ca-cert.pem", []byte("x")),
		"a key that is none":          edit("ca-key.pem", []byte("x")),
		"another's key":               edit("ca-key.pem", pkcs1(otherKey)),
		"another's certificate":       edit("ca-cert.pem", pki.MarshalCertificatesPEM(otherCert)),
		"no CA":                       edit("ca-cert.pem", pki.MarshalCertificatesPEM(noCA)),
		"expired":                     edit("ca-cert.pem", pki.MarshalCertificatesPEM(expired)),
		"below another CA":            edit("ca-cert.pem", pki.MarshalCertificatesPEM(below)),
		"not for this trust domain":   edit("ca-cert.pem", pki.MarshalCertificatesPEM(foreign)),
		"roots that are none":         edit("root-cert.pem", []byte("x")),
		"a root that is no CA":        edit("root-cert.pem", pki.MarshalCertificatesPEM(cert, noCA)),
		"a root with the same serial": edit("root-cert.pem", pki.MarshalCertificatesPEM(istioRoot(t, otherKey, func(c *x509.Certificate) { c.SerialNumber = cert.SerialNumber }))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			refused(t, data)
		})
	}
}

// Another program replaces the root in the record.
func TestFollow(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-3.6-4", "IST-3.6-5")
	cert, key := istioCA(t)
	for _, sameKey := range []bool{true, false} {
		for _, withState := range []bool{true, false} {
			bubble.Run(t, strings.Join([]string{map[bool]string{true: "same key", false: "other key"}[sameKey], map[bool]string{true: "state kept", false: "state dropped"}[withState]}, ", "), func(t *testing.T) {
				cert := istioRoot(t, key, func(c *x509.Certificate) { c.SerialNumber = cert.SerialNumber }) // of this time
				store := put(t, istioSecret(t, cert, key))
				a, b := open(t, store), open(t, store)
				run(t, a)
				run(t, b)
				time.Sleep(time.Minute)
				leaf := sign(t, a, newCSR(t), 0)
				next, nextKey := istioRoot(t, key), key
				if !sameKey {
					next, nextKey = istioCA(t)
				}
				r := load(t, store)
				state := r.Data()[stateName]
				r = ca.NewRecord(r.Version, istioSecret(t, next, nextKey))
				if withState {
					r.Data()[stateName] = state
				}
				must.Get(store.Save(t.Context(), r))(t)
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				for _, x := range []*ca.Authority{a, b, open(t, store)} {
					roots := x.Roots()
					require.True(t, roots[len(roots)-1].Certificate.Equal(next))
					require.Equal(t, "active", roots[len(roots)-1].Phase)
					assert.Len(t, roots, map[bool]int{true: 1, false: 2}[sameKey])
					if !sameKey { // a replica that has not read the record may sign for as long as Propagation
						stays := 25*time.Minute + 90*24*time.Hour + 2*time.Minute
						assert.WithinDuration(t, roots[1].Activates.Add(stays), roots[0].Retires, time.Second)
					}
					assert.NoError(t, verify(x.Bundle(), leaf, time.Now()), "old leaves go on")
					assert.NoError(t, verify(x.Bundle(), sign(t, x, newCSR(t), 0), time.Now()))
					assert.True(t, a.Bundle().Equal(x.Bundle()))
					assert.EqualValues(t, 2, sequence(t, x.Bundle()))
				}
				d := load(t, store).Data()
				assert.Contains(t, d, stateName)
			})
		}
	}
}

// What was taken over can be opened again.
func TestAdoptionOfARootWithAURL(t *testing.T) {
	t.Parallel()
	cert, key := istioCA(t, func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "https", Host: "example.org"}} })
	store := put(t, istioSecret(t, cert, key))
	a, b := open(t, store), open(t, store)
	assert.Equal(t, a.Roots(), b.Roots())
	assert.NoError(t, verify(b.Bundle(), sign(t, a, newCSR(t), 0), time.Now()))
}

// The one that takes over may have been in the bundle before; another one with its serial number may
// not.
func TestFollowOneThatIsKnown(t *testing.T) {
	t.Parallel()
	cert, key := istioCA(t)
	other, otherKey := istioCA(t)
	twin := istioRoot(t, otherKey, func(c *x509.Certificate) { c.SerialNumber = cert.SerialNumber })
	renewed := istioRoot(t, key)
	again := istioRoot(t, key, func(c *x509.Certificate) {
		c.SerialNumber, c.NotAfter = cert.SerialNumber, time.Now().Add(time.Hour)
	})
	for name, tt := range map[string]struct {
		cert   *x509.Certificate
		key    *rsa.PrivateKey
		phases []string // nil: refused
	}{
		"with the same key":            {renewed, key, []string{"trusted", "active"}},
		"with another key":             {other, otherKey, []string{"trusted", "retiring", "active"}},
		"same key and serial number":   {again, key, []string{"trusted", "trusted", "active"}},
		"another with the same number": {twin, otherKey, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := put(t, istioSecret(t, cert, key, renewed, other))
			a := open(t, store)
			require.Len(t, a.Roots(), 3)
			r := load(t, store)
			r.Data()["ca-cert.pem"], r.Data()["ca-key.pem"] = pki.MarshalCertificatesPEM(tt.cert), pkcs1(tt.key)
			delete(r.Data(), "root-cert.pem")
			must.Get(store.Save(t.Context(), r))(t)
			b, err := tryOpen(t.Context(), store)
			if tt.phases == nil {
				require.ErrorIs(t, err, ca.ErrRecord)
				require.ErrorContains(t, err, "another root has its serial number")
				return
			}
			require.NoError(t, err)
			var phases []string
			for _, r := range b.Roots() {
				phases = append(phases, r.Phase)
			}
			assert.Equal(t, tt.phases, phases)
			assert.True(t, b.Roots()[len(phases)-1].Certificate.Equal(tt.cert))
			assert.Equal(t, b.Roots(), open(t, store).Roots())
			assert.NoError(t, verify(b.Bundle(), istioLeaf(t, cert, key), time.Now()), "what was signed before")
		})
	}
}

// Whatever is in a record: it is an error, or a CA that works, and does so again when it is read
// again.
func FuzzRecord(f *testing.F) {
	store := ca.NewMemoryStore()
	a := open(f, store, withJWT)
	r := must.Get(store.Load(f.Context()))(f)
	add := func(d map[string][]byte) {
		f.Add(d[stateName], d["ca-cert.pem"], d["ca-key.pem"], d["root-cert.pem"])
	}
	add(r.Data())
	must.Get(a.Rotate(f.Context()))(f)
	r = must.Get(store.Load(f.Context()))(f)
	add(r.Data())
	cert, key := istioCA(f)
	add(istioSecret(f, cert, key))
	add(map[string][]byte{stateName: bytes.Replace(r.Data()[stateName], []byte("active"), []byte("trusted"), 1)})
	add(map[string][]byte{stateName: []byte(`{"version":1}`)})
	f.Fuzz(func(t *testing.T, state, cert, key, roots []byte) {
		data := map[string][]byte{"ca-cert.pem": cert, "ca-key.pem": key, "root-cert.pem": roots}
		if len(state) > 0 {
			data[stateName] = state
		}
		s := ca.NewMemoryStore()
		if _, err := s.Save(t.Context(), ca.NewRecord("", data)); err != nil {
			return // too large
		}
		// What is wrong with a record is no reason to try again, without end.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		a, err := tryOpen(ctx, s, withJWT)
		if err != nil {
			require.ErrorIs(t, err, ca.ErrRecord)
			require.Equal(t, "1", load(t, s).Version)
			return
		}
		b := must.Get(tryOpen(t.Context(), s, withJWT))(t)
		require.True(t, a.Bundle().Equal(b.Bundle()))
		require.Equal(t, serials(a), serials(b))
		if chain, err := a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}); err == nil {
			require.NoError(t, verify(b.Bundle(), chain[0], time.Now()))
		}
	})
}
