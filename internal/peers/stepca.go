package peers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// StepCA is a step-ca on loopback with a root, an intermediate, and one provisioner of type JWK. Its certificates live
// for an hour unless less is asked for, down to a second.
type StepCA struct {
	URL         string
	Provisioner string            // its name
	KeyID       string            // of its key
	Key         *ecdsa.PrivateKey // of the provisioner: what signs one-time tokens

	dir, address string
	program      string
	process      *Process
	td           spiffe.TrustDomain
	roots        []*x509.Certificate // the newest is first
	next         *pki.Issuer         // the newest
}

// NewStepCA starts a StepCA that ends with the test. Its roots are for a trust domain.
func NewStepCA(t testing.TB, td spiffe.TrustDomain) *StepCA {
	t.Helper()
	s := &StepCA{Provisioner: "tests", program: Program(t, "step-ca"), dir: t.TempDir(), td: td}
	s.address = loopback(FreePorts(t, 1)[0])
	s.URL = "https://" + s.address
	s.Key, s.KeyID = newKey(t), rand.Text()
	s.addRoot(t)
	s.useRoot(t)
	s.start(t)
	return s
}

// RootsFile returns the path of its roots in PEM, the newest one first.
func (s *StepCA) RootsFile() string { return filepath.Join(s.dir, "roots.crt") }

// Roots returns its roots, the newest one first.
func (s *StepCA) Roots() []*x509.Certificate { return s.roots }

// Prepare adds a root, which signs nothing yet. It starts the program again for that.
func (s *StepCA) Prepare(t testing.TB) {
	t.Helper()
	s.process.Stop()
	s.addRoot(t)
	s.start(t)
}

// Activate replaces the intermediate by one under the newest root. It starts the program again for that.
func (s *StepCA) Activate(t testing.TB) {
	t.Helper()
	s.process.Stop()
	s.useRoot(t)
	s.start(t)
}

func (s *StepCA) path(name string) string { return filepath.Join(s.dir, name) }

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

func (s *StepCA) addRoot(t testing.TB) {
	t.Helper()
	now := time.Now()
	var err error
	s.next, err = pki.NewRoot(newKey(t), pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(s.td.ID())},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(48 * time.Hour)})
	require.NoError(t, err)
	s.roots = append([]*x509.Certificate{s.next.Certificate()}, s.roots...)
	require.NoError(t, os.WriteFile(s.RootsFile(), pki.MarshalCertificatesPEM(s.roots...), 0o600))
}

func (s *StepCA) useRoot(t testing.TB) {
	t.Helper()
	now, key := time.Now(), newKey(t)
	intermediate, err := s.next.Issue(pki.CertificateOptions{PublicKey: key.Public(), CA: true,
		SANs: []pki.SAN{pki.IDSAN(s.td.ID())}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour)})
	require.NoError(t, err)
	keyPEM, err := pki.MarshalPrivateKeyPEM(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.path("intermediate.crt"), pki.MarshalCertificatesPEM(intermediate), 0o600))
	require.NoError(t, os.WriteFile(s.path("intermediate.key"), keyPEM, 0o600))
}

// start starts the program with the present roots and intermediate.
func (s *StepCA) start(t testing.TB) {
	t.Helper()
	var files []string
	for i, r := range s.roots { // one file for each
		name := s.path(fmt.Sprintf("root-%d.crt", len(s.roots)-i))
		require.NoError(t, os.WriteFile(name, pki.MarshalCertificatesPEM(r), 0o600))
		files = append(files, name)
	}
	config, err := json.Marshal(map[string]any{
		"root": files, "crt": s.path("intermediate.crt"), "key": s.path("intermediate.key"),
		"address": s.address, "dnsNames": []string{"127.0.0.1"}, "logger": map[string]any{"format": "text"},
		"authority": map[string]any{"provisioners": []any{map[string]any{
			"type": "JWK", "name": s.Provisioner, "key": jose.JSONWebKey{Key: s.Key.Public(), KeyID: s.KeyID,
				Algorithm: "ES256", Use: "sig"},
			"claims": map[string]any{"minTLSCertDuration": "1s", "maxTLSCertDuration": "24h",
				"defaultTLSCertDuration": "1h"},
		}}},
	})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.path("ca.json"), config, 0o600))
	cmd := exec.Command(s.program, s.path("ca.json"))
	cmd.Env = append(os.Environ(), "STEPPATH="+s.dir)
	s.process = Start(t, s.path("log"), cmd)
	client := s.Client(nil)
	s.process.Ready(t, func() error {
		response, err := client.Get(s.URL + "/health")
		if err != nil {
			return err
		}
		defer response.Body.Close() // only the status counts
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("/health: %s", response.Status)
		}
		return nil
	})
}

// Client returns a client that trusts its roots, and presents a certificate unless that is nil.
func (s *StepCA) Client(own *tls.Certificate) *http.Client {
	pool := x509.NewCertPool()
	for _, r := range s.roots {
		pool.AddCert(r)
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	if own != nil {
		cfg.Certificates = []tls.Certificate{*own}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true},
		Timeout: 10 * time.Second}
}

// Token returns a one-time token for a certificate with a subject and names.
func (s *StepCA) Token(t testing.TB, subject string, names ...string) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: s.Key},
		(&jose.SignerOptions{}).WithType("JWT").WithHeader("kid", s.KeyID))
	require.NoError(t, err)
	now := time.Now()
	token, err := jwt.Signed(signer).Claims(jwt.Claims{
		Issuer: s.Provisioner, Subject: subject, Audience: jwt.Audience{s.URL + "/1.0/sign"}, ID: rand.Text(),
		IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now),
		Expiry: jwt.NewNumericDate(now.Add(5 * time.Minute)),
	}).Claims(map[string]any{"sans": names}).Serialize()
	require.NoError(t, err)
	return token
}
