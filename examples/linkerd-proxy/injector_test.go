package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestInject: the webhook answers the API server over TLS, and follows its certificate and the trust anchors.
func TestInject(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	anchors, cert, key := filepath.Join(dir, "ca-bundle.crt"), filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	put := func(file string, data []byte) { require.NoError(t, os.WriteFile(file, data, 0o600)) }
	certify := func(ca *spiffetest.CA, edit ...func(*x509.Certificate)) *x509.CertPool {
		chain, signer := ca.Certificate("/injector", append(edit, func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{"linkerd-proxy-injector.linkerd.svc"} })...)
		keyPEM := must.Get(pki.MarshalPrivateKeyPEM(signer))(t)
		put(cert, pki.MarshalCertificatesPEM(chain...))
		put(key, keyPEM)
		pool := x509.NewCertPool()
		pool.AddCert(ca.Root())
		return pool
	}
	first, second := spiffetest.NewCA(t, "cluster.local"), spiffetest.NewCA(t, "cluster.local")
	put(anchors, pki.MarshalCertificatesPEM(first.Root()))
	trusted := certify(first)

	out, in := io.Pipe()
	log := new(quietLog)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		assert.NoError(t, runInjector(ctx, []string{"-addr", "127.0.0.1:0", "-cert", cert, "-key", key, "-anchors", anchors}, in, log))
		_ = in.Close()
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	line := make([]byte, 100)
	n := must.Get(out.Read(line))(t)
	url := strings.TrimSpace(strings.TrimPrefix(string(line[:n]), "webhook: "))

	review := func(roots *x509.CertPool) (patch string) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "linkerd-proxy-injector.linkerd.svc"}}
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport}).Post(url, "application/json", strings.NewReader(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview",
			"request":{"uid":"1","kind":{"kind":"Pod"},"namespace":"emojivoto","operation":"CREATE","object":{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web-1"},
			"spec":{"serviceAccountName":"web","containers":[{"name":"web"},{"name":"linkerd-proxy"}]}}}}`))
		require.NoError(t, err)
		defer resp.Body.Close()
		var answer struct {
			Response struct {
				Allowed bool
				Patch   []byte
			}
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
		assert.True(t, answer.Response.Allowed)
		return string(answer.Response.Patch)
	}
	patched := func(ca *spiffetest.CA, patch string) bool {
		pem := pki.MarshalCertificatesPEM(ca.Root())
		text := must.Get(json.Marshal(string(pem)))(t)
		return strings.Contains(patch, strings.Trim(string(text), `"`)) || strings.Contains(patch, base64.StdEncoding.EncodeToString(pem))
	}
	patch := review(trusted)
	assert.Contains(t, patch, "web.emojivoto.serviceaccount.identity.linkerd.cluster.local")
	assert.True(t, patched(first, patch), patch)

	put(anchors, pki.MarshalCertificatesPEM(second.Root()))
	trusted = certify(second)
	assert.True(t, patched(second, review(trusted)))

	put(anchors, []byte("no PEM"))
	put(cert, []byte("no PEM"))
	put(key, nil)
	assert.True(t, patched(second, review(trusted)), "what was good before stays in use")
	assert.Contains(t, log.String(), "the trust anchors before stay in use")

	// A pair that is torn, not the own, weak, over or not begun leaves the last good one in use, and the log says why.
	third := spiffetest.NewCA(t, "cluster.local")
	for says, spoil := range map[string]func(){
		"damaged PEM block": func() {
			certify(third)
			data := must.Get(os.ReadFile(cert))(t)
			put(cert, append(data, data[:len(data)/2]...)) // torn behind the leaf
		},
		"private key does not match": func() {
			certify(third)
			pem := must.Get(pki.MarshalPrivateKeyPEM(third.SVID("/other").Signer()))(t)
			put(key, pem)
		},
		"weak": func() {
			small := must.Get(rsa.GenerateKey(rand.Reader, 1024))(t)
			self := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
			der := must.Get(x509.CreateCertificate(rand.Reader, self, self, small.Public(), small))(t)
			put(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
			put(key, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(small)}))
		},
		"has expired at": func() {
			certify(third, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
			})
		},
		"is valid from": func() {
			certify(third, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
			})
		},
	} {
		spoil()
		assert.True(t, patched(second, review(trusted)), says)
		pair := &ownPair{cert: cert, key: key}
		if says != "is valid from" { // without another it may be the clock
			assert.ErrorContains(t, pair.read(), says)
			assert.Nil(t, pair.last.Load())
		} else {
			assert.NoError(t, pair.read())
		}
	}
	assert.Equal(t, 1, strings.Count(log.String(), "the certificate before stays in use"), "one line for what each handshake meets: %s", log)
	review(certify(third))
}

// TestInjectFiles: what is missing at the start is named by its flag, and the printed objects are YAML that names what is there.
func TestInjectFiles(t *testing.T) {
	t.Parallel()
	none := filepath.Join(t.TempDir(), "none")
	require.ErrorContains(t, runInjector(t.Context(), []string{"-anchors", none}, io.Discard, io.Discard), "-anchors: ")
	require.ErrorContains(t, runInjector(t.Context(), []string{"-anchors", none, "x"}, io.Discard, io.Discard), `"x" is not understood`)
	anchors := filepath.Join(t.TempDir(), "anchors.pem")
	require.NoError(t, os.WriteFile(anchors, pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root()), 0o600))
	require.ErrorContains(t, runInjector(t.Context(), []string{"-anchors", anchors, "-cert", none}, io.Discard, io.Discard), "-cert and -key: ")

	var out bytes.Buffer
	_ = runInjector(t.Context(), []string{"-install", "kubernetes", "-with", "namespace=mesh"}, &out, io.Discard) // flag.ErrHelp
	kinds := map[string]bool{}
	for d := yaml.NewDecoder(&out); ; {
		var o struct {
			Kind     string
			Metadata struct{ Namespace string }
		}
		if d.Decode(&o) != nil {
			break
		}
		kinds[o.Kind] = true
		assert.Contains(t, []string{"mesh", ""}, o.Metadata.Namespace)
	}
	assert.Equal(t, map[string]bool{"ServiceAccount": true, "Deployment": true, "Service": true, "MutatingWebhookConfiguration": true}, kinds)
}
