package cafake

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// NewStepCA serves the API of step-ca, with a JWK provisioner that makes tokens for the workload at path: each is
// good for one request, for five minutes, for this CA, and for exactly the names of the workload. Certificates last
// from five minutes to a day. The method Endpoint gives a client new tokens; one with a certificate renews it with
// TLS.
func NewStepCA(t testing.TB, ca *spiffetest.CA, path string) *Fake {
	t.Helper()
	f, _ := NewStepProvisioner(t, ca, path)
	return f
}

// NewStepProvisioner returns what [NewStepCA] does, and a function that signs claims as the provisioner does and returns
// the token.
func NewStepProvisioner(t testing.TB, ca *spiffetest.CA, path string) (f *Fake, sign func(claims any) string) {
	t.Helper()
	f = New(t, ca, path)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatalf("cafake: %v", err)
	}
	s := &stepCA{f: f, key: jose.JSONWebKey{Key: key, KeyID: rand.Text(), Algorithm: string(jose.ES256)},
		used: map[string]bool{}}
	mux := http.NewServeMux()
	for _, prefix := range []string{"", "/1.0"} {
		mux.HandleFunc("POST "+prefix+"/sign", s.sign)
		mux.HandleFunc("POST "+prefix+"/rekey", s.rekey)
		mux.HandleFunc("GET "+prefix+"/roots", s.roots)
		mux.HandleFunc("GET "+prefix+"/root/{sha}", s.root)
	}
	f.Serve(API{
		Name: "step-ca", Handler: mux, Refuse: refuseStep, Token: s.token,
		Signs: func(r *http.Request) bool { return r.Method == http.MethodPost },
		Garbled: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "<html>this is no JSON</html>")
		}),
		TLS: func(c *tls.Config) {
			base := c.Clone()
			c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
				one := base.Clone()
				one.ClientAuth, one.ClientCAs = tls.VerifyClientCertIfGiven, ca.Bundle().CertPool()
				return one, nil
			}
		},
	})
	return f, s.signed
}

// stepCA is the rules of step-ca.
type stepCA struct {
	f   *Fake
	key jose.JSONWebKey // of the provisioner

	mu   sync.Mutex
	used map[string]bool // the IDs of tokens
}

const (
	provisioner = "cafake"
	minStepLife = 5 * time.Minute
	maxStepLife = 24 * time.Hour
	tokenLeeway = time.Minute
)

type stepClaims struct {
	Issuer    string   `json:"iss"`
	Audience  string   `json:"aud"`
	Subject   string   `json:"sub"`
	SANs      []string `json:"sans"`
	ID        string   `json:"jti"`
	NotBefore int64    `json:"nbf"`
	Expiry    int64    `json:"exp"`
}

// token makes a one-time token.
func (s *stepCA) token() string {
	now := time.Now()
	return s.signed(stepClaims{
		Issuer: provisioner, Audience: s.f.url + "/1.0/sign", Subject: s.f.id.String(), SANs: []string{s.f.id.String()},
		ID: rand.Text(), NotBefore: now.Unix(), Expiry: now.Add(5 * time.Minute).Unix(),
	})
}

func (s *stepCA) signed(claims any) string {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: s.key}, nil)
	payload, err2 := json.Marshal(claims)
	if err := errors.Join(err, err2); err != nil {
		panic(err)
	}
	jws, err := signer.Sign(payload)
	if err != nil {
		panic(err)
	}
	token, err := jws.CompactSerialize()
	if err != nil {
		panic(err)
	}
	return token
}

// authorize returns the names that a token is good for.
func (s *stepCA) authorize(token string) ([]string, error) {
	jws, err := jose.ParseSignedCompact(token, []jose.SignatureAlgorithm{jose.ES256})
	if err != nil {
		return nil, errors.New("the token cannot be parsed")
	}
	payload, err := jws.Verify(s.key.Public())
	if err != nil {
		return nil, errors.New("the token has a bad signature")
	}
	var c stepClaims
	if err := json.Unmarshal(payload, &c); err != nil {
		return nil, errors.New("the token has no claims")
	}
	now := time.Now()
	switch {
	case c.Issuer != provisioner:
		return nil, errors.New("the token is of another provisioner")
	case c.Audience != s.f.url+"/1.0/sign" && c.Audience != s.f.url+"/sign":
		return nil, errors.New("the token is for another audience")
	case now.Before(time.Unix(c.NotBefore, 0).Add(-tokenLeeway)) || now.After(time.Unix(c.Expiry, 0).Add(tokenLeeway)):
		return nil, errors.New("the token is not valid now")
	case c.Subject == "":
		return nil, errors.New("the token has no subject")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[c.ID] {
		return nil, errors.New("the token was used before")
	}
	s.used[c.ID] = true
	if len(c.SANs) == 0 {
		return []string{c.Subject}, nil
	}
	return c.SANs, nil
}

func (s *stepCA) sign(w http.ResponseWriter, r *http.Request) {
	var request struct {
		CSR      string `json:"csr"`
		Token    string `json:"ott"`
		NotAfter string `json:"notAfter"`
	}
	csr, ok := s.read(w, r, &request, &request.CSR)
	if !ok {
		return
	}
	if request.Token == "" {
		refuseStep(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: errors.New("missing ott")})
		return
	}
	names, err := s.authorize(request.Token)
	if err != nil {
		refuseStep(w, r, &caclient.Error{Kind: caclient.ErrUnauthenticated, Err: err})
		return
	}
	lifetime := maxStepLife
	if request.NotAfter != "" {
		if lifetime, err = stepLifetime(request.NotAfter); err != nil {
			refuseStep(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: err})
			return
		}
	}
	wants := make([]string, 0, len(csr.SANs()))
	for _, san := range csr.SANs() {
		wants = append(wants, san.Value)
	}
	slices.Sort(wants)
	slices.Sort(names)
	switch {
	case !slices.Equal(names, wants):
		err = fmt.Errorf("the request is for %q, and the token for %q", wants, names)
	case lifetime < minStepLife || lifetime > maxStepLife:
		err = fmt.Errorf("the lifetime %v is not from %v to %v", lifetime, minStepLife, maxStepLife)
	}
	if err != nil {
		refuseStep(w, r, &caclient.Error{Kind: caclient.ErrDenied, Err: err})
		return
	}
	s.issue(r.Context(), w, r, csr, csr.SANs(), lifetime)
}

// stepLifetime reads a time or a duration from now.
func stepLifetime(text string) (time.Duration, error) {
	if d, err := time.ParseDuration(text); err == nil {
		return d, nil
	}
	end, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return 0, fmt.Errorf("notAfter %q is neither a time nor a duration", text)
	}
	return time.Until(end), nil
}

func (s *stepCA) rekey(w http.ResponseWriter, r *http.Request) {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		refuseStep(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: errors.New("missing client certificate")})
		return
	}
	var request struct {
		CSR string `json:"csr"`
	}
	csr, ok := s.read(w, r, &request, &request.CSR)
	if !ok {
		return
	}
	leaf := r.TLS.PeerCertificates[0]
	names, err := pki.ParseSANs(leaf.Extensions)
	if err != nil {
		refuseStep(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: err})
		return
	}
	s.issue(r.Context(), w, r, csr, names, leaf.NotAfter.Sub(leaf.NotBefore))
}

// read reads a request with a signing request in PEM, and answers one that has none.
func (s *stepCA) read(w http.ResponseWriter, r *http.Request, request any, text *string) (*pki.CSR, bool) {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(request)
	if err == nil {
		var csr *pki.CSR
		if csr, err = pki.ParseCSRPEM([]byte(*text)); err == nil {
			return csr, true
		}
	}
	refuseStep(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: err})
	return nil, false
}

func (s *stepCA) issue(ctx context.Context, w http.ResponseWriter, r *http.Request, csr *pki.CSR, names []pki.SAN,
	lifetime time.Duration) {
	chain, e := s.f.sign(ctx, csr, names, lifetime)
	if e != nil {
		refuseStep(w, r, e)
		return
	}
	answer := map[string]any{"crt": "", "ca": "", "certChain": pems(chain)}
	for i, name := range []string{"crt", "ca"} {
		if i < len(chain) {
			answer[name] = string(pki.MarshalCertificatesPEM(chain[i]))
		}
	}
	answerJSON(w, http.StatusCreated, answer)
}

func (s *stepCA) roots(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, http.StatusCreated, map[string]any{"crts": pems(s.f.roots())})
}

func (s *stepCA) root(w http.ResponseWriter, r *http.Request) {
	for _, c := range s.f.roots() {
		if sum := sha256.Sum256(c.Raw); hex.EncodeToString(sum[:]) == r.PathValue("sha") {
			answerJSON(w, http.StatusOK, map[string]string{"ca": string(pki.MarshalCertificatesPEM(c))})
			return
		}
	}
	answerJSON(w, http.StatusNotFound, map[string]any{"status": http.StatusNotFound,
		"message": "the root is not there"})
}

// refuseStep says a failure as step-ca does.
func refuseStep(w http.ResponseWriter, _ *http.Request, e *caclient.Error) {
	code := statusOf(w, e)
	answerJSON(w, code, map[string]any{"status": code, "message": e.Err.Error()})
}
