package peers_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	authnathenz "github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestZTSSvcCert has Athenz's own client judge our ZTS: it registers an instance by attestation data, and is refused.
func TestZTSSvcCert(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "zts-svccert")
	ca := spiffetest.NewCA(t, "athenz.io")
	z := cafake.NewZTS(t, ca, "/ns/media-sports/sa/frontend")
	instance := cafake.AthenzInstance(z.Fake)
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		return path
	}
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	der := must.Get(x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey)))(t)
	token := must.Get(z.Endpoint().Token(t.Context()))(t)
	roots := put("roots.pem", ca.Bundle().MarshalPEM())
	keyFile := put("key.pem", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	register := func(attestation, id string, more ...string) (leaf *x509.Certificate, says string) {
		t.Helper()
		cert, signer := filepath.Join(dir, id+".cert"), filepath.Join(dir, id+".ca")
		out, err := exec.Command(program, append([]string{
			"-zts", z.Endpoint().URL + "/zts/v1", "-cacert", roots, "-private-key", keyFile, "-attestation-data", put(id+".data", []byte(attestation)),
			"-provider", instance.Provider.String(), "-domain", instance.Service.Domain, "-service", instance.Service.Name, "-instance", id,
			"-dns-domain", instance.Suffix, "-cert-file", cert, "-signer-cert-file", signer,
		}, more...)...).CombinedOutput()
		if err != nil {
			return nil, string(out)
		}
		text := must.Get(os.ReadFile(cert))(t)
		chain := must.Get(pki.ParseCertificatesPEM(text))(t)
		text = must.Get(os.ReadFile(signer))(t)
		signers := must.Get(pki.ParseCertificatesPEM(text))(t)
		pool := x509.NewCertPool()
		for _, c := range signers {
			pool.AddCert(c)
		}
		_, err = chain[0].Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		require.NoError(t, err)
		return chain[0], string(out)
	}
	leaf, says := register(token, "frontend-0")
	require.NotNil(t, leaf, says)
	assert.Equal(t, instance.Service.String(), leaf.Subject.CommonName)
	assert.Equal(t, key.Public(), leaf.PublicKey)
	assert.True(t, time.Now().Before(leaf.NotAfter))
	t.Log(leaf.DNSNames, leaf.URIs)

	for name, c := range map[string]struct {
		attestation string
		more        []string
		says        string
	}{
		"attestation":  {"another", nil, "401 the attestation data is not good"},
		"provider":     {token, []string{"-provider", "k8s.admin.other"}, "403 the provider"},
		"service":      {token, []string{"-service", "backend"}, "400 the service"},
		"trust domain": {token, []string{"-spiffe-trust-domain", "evil.example"}, "400 the SPIFFE URI"},
	} {
		leaf, says := register(c.attestation, "frontend-1", c.more...)
		t.Logf("%s: %s", name, says)
		assert.Nil(t, leaf, name)
		assert.Contains(t, says, c.says, name)
	}
}

// TestZTSServiceKey has Athenz's own client judge how the owner of a registered key is certified: it asks our ZTS as our client
// does, by the same path and header, with a service token and a body of the same form, for the same names.
func TestZTSServiceKey(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "zts-svccert")
	ca := spiffetest.NewCA(t, "athenz.io")
	z := cafake.NewZTS(t, ca, "/ns/media-sports/sa/frontend")
	service := athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}
	key := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	type request struct {
		path, form string
		body       map[string]any
	}
	var mu sync.Mutex
	var requests []request
	z.Change(func(r *cafake.ZTSRules) {
		r.Keys = map[string]crypto.PublicKey{service.String() + " v1": key.Public()}
		r.Observe = func(q *http.Request, code int) {
			if code != 0 {
				return
			}
			data, err := io.ReadAll(q.Body)
			assert.NoError(t, err)
			q.Body = io.NopCloser(bytes.NewReader(data))
			var form []string // of the token: its tags
			for tag := range strings.SplitSeq(q.Header.Get("Athenz-Principal-Auth"), ";") {
				name, value, _ := strings.Cut(tag, "=")
				if name == "v" || name == "d" || name == "n" || name == "k" {
					name += "=" + value
				}
				form = append(form, name)
			}
			form = slices.DeleteFunc(form, func(tag string) bool { return tag == "h" || tag == "i" }) // which are optional
			got := request{path: q.Method + " " + q.URL.Path, form: strings.Join(form, ";")}
			assert.NoError(t, json.Unmarshal(data, &got.body))
			mu.Lock()
			defer mu.Unlock()
			requests = append(requests, got)
		}
	})
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		return path
	}
	roots := put("roots.pem", ca.Bundle().MarshalPEM())
	keyFile := put("key.pem", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	theirs := func(version string) (string, error) {
		cert := filepath.Join(dir, "cert")
		out, err := exec.Command(program, "-zts", z.Endpoint().URL+"/zts/v1", "-cacert", roots, "-private-key", keyFile, "-key-version", version,
			"-domain", service.Domain, "-service", service.Name, "-dns-domain", "svc.cluster.local", "-expiry-time", "60", "-subj-ou", "", "-subj-o", "", "-subj-c", "",
			"-cert-file", cert, "-signer-cert-file", filepath.Join(dir, "signers")).CombinedOutput()
		if err != nil {
			return "", errors.New(string(out))
		}
		text, err := os.ReadFile(cert)
		return string(text), err
	}
	text := must.Get(theirs("v1"))(t)
	chain := must.Get(pki.ParseCertificatesPEM([]byte(text)))(t)
	_, err := theirs("v2")
	require.ErrorContains(t, err, "401")

	id := must.Get(service.ID())(t)
	instance := athenzname.Instance{Service: service, Suffix: "svc.cluster.local", SPIFFE: id}
	want := must.Get(athenz.Expectation(instance, ca.TrustDomain()))(t)
	e := z.Endpoint()
	e.Token = func(context.Context) (string, error) {
		return authnathenz.SignServiceToken(authnathenz.ServiceToken{Service: service, KeyID: "v1"}, key)
	}
	c := must.Get(athenz.New(athenz.Options{Endpoint: e, Instance: instance, KeyID: "v1"}))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: service.String(), SANs: want.Names()}))(t)
	ours := must.Get(c.Sign(t.Context(), csr, time.Hour))(t)

	require.Len(t, requests, 3)
	their, our := requests[0], requests[2]
	assert.Equal(t, their.path, our.path)
	assert.Equal(t, their.form, our.form)
	for _, name := range []string{"keyId", "expiryTime"} {
		assert.Equal(t, their.body[name], our.body[name])
	}
	assert.Equal(t, slices.Sorted(maps.Keys(their.body)), slices.Sorted(maps.Keys(our.body)))
	asked := must.Get(pki.ParseCSRPEM([]byte(their.body["csr"].(string))))(t)
	assert.Equal(t, asked.CommonName(), csr.CommonName())
	assert.ElementsMatch(t, asked.SANs(), csr.SANs())
	assert.Equal(t, chain[0].PublicKey, ours[0].PublicKey)
}
