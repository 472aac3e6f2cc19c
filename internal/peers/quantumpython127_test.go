//go:build go1.27

package peers_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// pyCrypto is the script quantum.py.
type pyCrypto struct {
	mu  sync.Mutex
	in  io.Writer
	out *bufio.Scanner
	log *programtest.Log
}

// pyAnswer has the members of all answers.
type pyAnswer struct {
	Error, OpenSSL, Algorithm, Subject, CSR, Chain, Root, Token, Bundle string
	URIs, Mine, Keys                                                    []string
	Valid                                                               bool
	Path                                                                int
}

func newPyCrypto(t *testing.T) *pyCrypto {
	cmd := peers.Python(t, "cryptography", "testdata/quantum.py")
	p := &pyCrypto{log: new(programtest.Log)}
	cmd.Stderr = p.log
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close() // which ends it
		_ = cmd.Wait()
	})
	p.in, p.out = in, bufio.NewScanner(out)
	p.out.Buffer(nil, 1<<20)
	return p
}

// do calls a function of the script.
func (p *pyCrypto) do(t *testing.T, name string, args map[string]any) (a pyAnswer, err error) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	request := map[string]any{"do": name}
	maps.Copy(request, args)
	must.Get(p.in.Write(append(must.Get(json.Marshal(request))(t), '\n')))(t)
	require.True(t, p.out.Scan(), "%v: %s", p.out.Err(), p.log)
	require.NoError(t, json.Unmarshal(p.out.Bytes(), &a), "%s", p.out.Bytes())
	if a.Error != "" {
		err = errors.New(a.Error)
	}
	return a, err
}

// TestQuantumPython has Python's cryptography, of OpenSSL 4, read what this library made with ML-DSA, and make what this
// library reads: requests, chains, tokens and bundle documents.
func TestQuantumPython(t *testing.T) {
	t.Parallel()
	p := newPyCrypto(t)
	t.Log(must.Get(p.do(t, "version", nil))(t).OpenSSL)
	for _, alg := range []string{"ML-DSA-44", "ML-DSA-65"} {
		kind := strings.ToLower(alg)
		a := must.Get(ca.New(ca.Config{TrustDomain: webID.TrustDomain(), Algorithms: spiffe.AnyAlgorithm(),
			Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256," + kind}, JWT: &ca.JWTConfig{Algorithm: alg}}))(t)
		verifier := func(b *spiffe.Bundle) *spiffe.Verifier {
			return must.Get(spiffe.NewVerifier(b, spiffe.AllowIDs(webID), nil))(t).WithAlgorithms(spiffe.AnyAlgorithm())
		}
		validator := func(b *spiffe.Bundle) *jwtsvid.Validator {
			return must.Get(jwtsvid.NewValidator(b, []string{"db"}, &jwtsvid.ValidatorOptions{Algorithms: spiffe.AnyAlgorithm()}))(t)
		}
		bundle := string(must.Get(a.Bundle().Marshal())(t))
		sign := func(t *testing.T, csr *pki.CSR) string {
			return string(pki.MarshalCertificatesPEM(must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: webID}))(t)...))
		}
		t.Run(alg+"/our request", func(t *testing.T) {
			t.Parallel()
			key := must.Get(pki.NewKey(kind))(t)
			csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t).DER()
			got := must.Get(p.do(t, "read_csr", map[string]any{"csr": inPEM("CERTIFICATE REQUEST", csr)}))(t)
			assert.Equal(t, pyAnswer{Algorithm: alg, Valid: true, URIs: []string{webID.String()}}, got)
			csr[len(csr)-100] ^= 1
			_, err := p.do(t, "read_csr", map[string]any{"csr": inPEM("CERTIFICATE REQUEST", csr)})
			assert.ErrorContains(t, err, "InvalidSignature")
		})
		t.Run(alg+"/their request", func(t *testing.T) {
			t.Parallel()
			theirs := must.Get(p.do(t, "make_csr", map[string]any{"alg": alg, "uri": webID.String()}))(t)
			csr := must.Get(pki.ParseCSRPEM([]byte(theirs.CSR)))(t)
			chain := sign(t, csr)
			var root string
			for c := range a.Bundle().X509Authorities() {
				if c.SignatureAlgorithm.String() == alg {
					root = string(pki.MarshalCertificatesPEM(c))
				}
			}
			ask := map[string]any{"chain": chain, "root": root, "now": time.Now().Unix()}
			got := must.Get(p.do(t, "read_chain", ask))(t, "%s", p.log)
			assert.Equal(t, pyAnswer{Algorithm: alg, URIs: []string{webID.String()}, Mine: []string{alg}, Path: 2}, got)
			bad := must.Get(pki.ParseCertificatesPEM([]byte(chain)))(t)[0].Raw
			bad[len(bad)-100] ^= 1
			ask["chain"] = inPEM("CERTIFICATE", bad)
			assert.ErrorContains(t, must.Err(p.do(t, "read_chain", ask)), "InvalidSignature")

			der := bytes.Clone(csr.DER())
			der[len(der)-100] ^= 1
			assert.ErrorContains(t, must.Err(pki.ParseCSR(der)), "signature")
		})
		t.Run(alg+"/their chain", func(t *testing.T) {
			t.Parallel()
			made := must.Get(p.do(t, "make_chain", map[string]any{"alg": alg, "domain": webID.TrustDomain().ID().String(),
				"uri": webID.String()}))(t, "%s", p.log)
			b := must.Get(spiffe.ParseBundlePEM(webID.TrustDomain(), []byte(made.Root)))(t)
			chain := must.Get(pki.ParseCertificatesPEM([]byte(made.Chain)))(t)
			assert.Equal(t, webID, must.Get(verifier(b).VerifyChain(chain, spiffe.AnyRole))(t).ID())
			bad := bytes.Clone(chain[0].Raw)
			bad[len(bad)-100] ^= 1
			_, err := verifier(b).VerifyChain(must.Get(pki.ParseCertificatesPEM([]byte(inPEM("CERTIFICATE", bad))))(t), spiffe.AnyRole)
			assert.ErrorContains(t, err, "ML-DSA verification failure")
		})
		t.Run(alg+"/our token", func(t *testing.T) {
			t.Parallel()
			token := must.Get(a.IssueJWTSVID(t.Context(), webID, []string{"db"}))(t)
			got := must.Get(p.do(t, "read_token", map[string]any{"token": token, "bundle": bundle}))(t, "%s", p.log)
			assert.Equal(t, pyAnswer{Algorithm: alg, Subject: webID.String()}, got)
			_, err := p.do(t, "read_token", map[string]any{"token": changed(token), "bundle": bundle})
			assert.ErrorContains(t, err, "InvalidSignature")
		})
		t.Run(alg+"/their token", func(t *testing.T) {
			t.Parallel()
			got := must.Get(p.do(t, "make_token", map[string]any{"alg": alg, "claims": map[string]any{
				"sub": webID.String(), "aud": []string{"db"}, "exp": time.Now().Add(time.Minute).Unix()}}))(t, "%s", p.log)
			v := validator(must.Get(spiffe.ParseBundle(webID.TrustDomain(), []byte(got.Bundle)))(t))
			assert.Equal(t, webID, must.Get(v.Validate(got.Token))(t).ID())
			assert.ErrorContains(t, must.Err(v.Validate(changed(got.Token))), "signature")
		})
		t.Run(alg+"/our bundle", func(t *testing.T) {
			t.Parallel()
			got := must.Get(p.do(t, "read_bundle", map[string]any{"bundle": bundle}))(t, "%s", p.log)
			assert.ElementsMatch(t, []string{"x509-svid EC", "x509-svid " + alg, "jwt-svid " + alg}, got.Keys)
		})
	}
}

func inPEM(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// changed returns a token with another signature of the same length.
func changed(token string) string {
	i := strings.LastIndexByte(token, '.') + 1
	signature, err := base64.RawURLEncoding.DecodeString(token[i:])
	if err != nil {
		panic(err)
	}
	signature[0] ^= 1
	return token[:i] + base64.RawURLEncoding.EncodeToString(signature)
}
