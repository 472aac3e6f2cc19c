//go:build go1.27

package peers_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// TestQuantumWorkloadAPI serves bundles with roots and keys for tokens of both kinds to the agent's commands of SPIRE, which
// Go 1.26 has built, to py-spiffe and to go-spiffe. Each has the classical SVID, all roots and the classical keys for tokens.
func TestQuantumWorkloadAPI(t *testing.T) {
	t.Parallel()
	agent := peers.Program(t, "spire-agent")
	other := must.Get(spiffe.ParseBundle(quantumPartner, quantumDocument(t)))(t)
	d := newQuantumDomain(t, "ecdsa-p256", "ml-dsa-65")
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	own := must.Get(spiffe.NewBundle(webID.TrustDomain(), spiffe.BundleContents{X509Authorities: d.roots("ml-dsa-65", "ecdsa-p256"),
		JWTAuthorities: map[string]crypto.PublicKey{"classical": key.Public(), "quantum": must.Get(pki.NewKey("ml-dsa-44"))(t).Public()}}))(t)
	svid := d.svid(t, "ecdsa-p256", "ecdsa-p256", webID)
	var src settable
	src.set(must.Get(svid.WithAlternative(d.svid(t, "ml-dsa-65", "ml-dsa-65", webID)))(t), must.Get(spiffe.NewBundleSet(own, other))(t))
	issuer := must.Get(jwtsvid.NewIssuer(webID.TrustDomain(), "classical", key, nil))(t)
	h := must.Get(workloadserver.NewHandler(&src, &workloadserver.Options{IssueJWTSVID: issuer.IssueJWTSVID}))(t)
	socket := filepath.Join(shortDir(t), "api.sock")
	serveAPI(t, socket, h)

	t.Run("SPIRE", func(t *testing.T) {
		var got struct {
			SVIDs []struct {
				Chain  []byte `json:"x509_svid"`
				Bundle []byte
			}
			Federated map[string][]byte `json:"federated_bundles"`
		}
		run := func(args ...string) []byte {
			out, err := exec.CommandContext(t.Context(), agent, append(append([]string{"api"}, args...), "-socketPath", socket)...).CombinedOutput()
			require.NoError(t, err, "%s", out)
			return out
		}
		require.NoError(t, json.Unmarshal(run("fetch", "x509", "-output", "json"), &got))
		require.Len(t, got.SVIDs, 1, "not the alternative")
		assert.Equal(t, svid.Chain(), must.Get(x509.ParseCertificates(got.SVIDs[0].Chain))(t))
		assert.Equal(t, bundleCerts(own), must.Get(x509.ParseCertificates(got.SVIDs[0].Bundle))(t))
		assert.Equal(t, bundleCerts(other), must.Get(x509.ParseCertificates(got.Federated["spiffe://other.test"]))(t))
		text := string(run("fetch", "x509")) // parses them
		assert.Contains(t, text, "CA #2 Valid Until:")
		assert.Contains(t, text, "[spiffe://other.test] CA #2 Valid Until:")
		assert.Contains(t, string(run("fetch", "jwt", "-audience", "db")), "token("+webID.String()+"):\n")
	})
	t.Run("py-spiffe", func(t *testing.T) {
		cmd := peers.Python(t, "py-spiffe", "testdata/quantumworkload.py", socket)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out := must.Get(cmd.Output())(t, "%s", &stderr)
		kinds := []any{"ECPublicKey", "MLDSA65PublicKey"}
		roots := map[string]any{"example.org": kinds, "other.test": kinds}
		keys := map[string]any{"example.org": []any{"classical"}, "other.test": []any{"ecdsa-p256"}}
		want := map[string]any{"x509 context": roots, "x509 bundles": roots, "X509Source": roots, "jwt bundles": keys, "JwtSource": keys,
			"jwt svid": webID.String()}
		got := map[string]any{}
		for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
			var l struct {
				Call, Error string
				Got         any
			}
			require.NoError(t, json.Unmarshal(lines.Bytes(), &l))
			assert.Empty(t, l.Error, l.Call)
			got[l.Call] = l.Got
		}
		assert.Equal(t, want, got)
	})
	t.Run("go-spiffe", func(t *testing.T) {
		at := peerapi.WithClientOptions(peerapi.WithAddr("unix://" + socket))
		ctx, cancel := context.WithTimeout(t.Context(), passing) // it repeats what it cannot read
		defer cancel()
		x := must.Get(peerapi.NewX509Source(ctx, at))(t)
		defer x.Close()
		j := must.Get(peerapi.NewJWTSource(ctx, at))(t)
		defer j.Close()
		assert.Equal(t, svid.Chain(), must.Get(x.GetX509SVID())(t).Certificates)
		for _, b := range []*spiffe.Bundle{own, other} {
			td := spiffeid.RequireTrustDomainFromString(b.TrustDomain().String())
			assert.Equal(t, bundleCerts(b), must.Get(x.GetX509BundleForTrustDomain(td))(t).X509Authorities())
			assert.Len(t, must.Get(j.GetJWTBundleForTrustDomain(td))(t).JWTAuthorities(), 1, "it does not say that it reads more")
		}
	})
}

// TestQuantumSPIRE federates a SPIRE, which Go 1.26 has built, with a trust domain whose bundle has a root and a key of
// ML-DSA. It refuses the whole document and goes on with the last one; a document without these entries, as our endpoint
// serves it, and roots in PEM it takes, and its agent gives them to workloads.
func TestQuantumSPIRE(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{SVIDTTL: 30 * time.Minute, Interval: 200 * time.Millisecond})
	document := quantumDocument(t)
	classical, whole := withoutKeys(t, document, 1, isAKP), withoutKeys(t, document, 2, func(string, string) bool { return false })
	var served atomic.Pointer[[]byte]
	serve := func(doc []byte) { served.Store(&doc) }
	serve(classical)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(*served.Load()) // SPIRE sees what is missing
	}))
	spiffetest.StartTLS(server, &tls.Config{Certificates: []tls.Certificate{*s.WebCertificate(t)}})
	t.Cleanup(server.Close)
	id := quantumPartner.ID().String()
	s.ServerCLI(t, "federation", "create", "-trustDomain", quantumPartner.String(), "-bundleEndpointProfile", "https_web",
		"-bundleEndpointURL", server.URL)
	roots := func() (n int) {
		text, err := s.TryServerCLI("bundle", "list", "-id", id, "-format", "pem")
		if err != nil {
			return 0 // none yet
		}
		return len(must.Get(pki.ParseCertificatesPEM([]byte(text)))(t))
	}
	eventually(t, "SPIRE takes the document", func() bool { return roots() == 1 })
	bundle := must.Get(spiffe.ParseBundle(quantumPartner, whole))(t)
	ours := httptest.NewRecorder()
	must.Get(federation.NewHandler(bundle, quantumPartner))(t).ServeHTTP(ours, httptest.NewRequest(http.MethodGet, "/", nil))
	serve(ours.Body.Bytes())
	s.ServerCLI(t, "federation", "refresh", "-id", id)
	assert.Equal(t, 1, roots(), "our endpoint leaves the others out for it")
	serve(whole)
	_, err := s.TryServerCLI("federation", "refresh", "-id", id)
	assert.ErrorContains(t, err, "unsupported key type")
	assert.Equal(t, 1, roots(), "the last bundle is in force")

	file := filepath.Join(t.TempDir(), "bundle")
	require.NoError(t, os.WriteFile(file, whole, 0o600))
	_, err = s.TryServerCLI("bundle", "set", "-id", id, "-format", "spiffe", "-path", file)
	assert.ErrorContains(t, err, "unsupported key type")
	require.NoError(t, os.WriteFile(file, bundle.MarshalPEM(), 0o600))
	s.ServerCLI(t, "federation", "delete", "-id", id)
	s.ServerCLI(t, "bundle", "set", "-id", id, "-format", "pem", "-path", file)
	assert.Equal(t, 2, roots(), "roots in PEM")
	_, err = s.TryServerCLI("bundle", "list", "-id", id, "-format", "spiffe")
	assert.ErrorContains(t, err, "unknown key type", "which SPIRE cannot write as a document")

	s.Register(t, "/web", "-federatesWith", id)
	var got struct {
		Federated map[string][]byte `json:"federated_bundles"`
	}
	eventually(t, "the agent has the roots", func() bool {
		text, err := s.AgentCLI("api", "fetch", "x509", "-output", "json")
		return err == nil && json.Unmarshal([]byte(text), &got) == nil && len(got.Federated) == 1
	})
	assert.True(t, slices.EqualFunc(bundleCerts(bundle), must.Get(x509.ParseCertificates(got.Federated[id]))(t), (*x509.Certificate).Equal))
}
