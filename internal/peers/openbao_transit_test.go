package peers_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest/custodiantest"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// transitPolicy is the policy that the documentation of Transit asks for.
func transitPolicy(t testing.TB) string {
	t.Helper()
	source := must.Get(os.ReadFile("../../caclient/vault/transit.go"))(t)
	lines := regexp.MustCompile(`(?m)^//\t(path .*|  .*)$`).FindAllStringSubmatch(string(source), -1)
	require.NotEmpty(t, lines)
	var policy strings.Builder
	for _, line := range lines {
		policy.WriteString(line[1] + "\n")
	}
	return policy.String()
}

// mountTransit mounts an engine with the key that seals, as the documentation says.
func mountTransit(t testing.TB, b *peers.OpenBao, namespace string) {
	t.Helper()
	b.Do(t, namespace, http.MethodPost, "sys/mounts/transit", doc{"type": "transit"}, nil)
	b.Do(t, namespace, http.MethodPost, "transit/keys/seal", doc{"type": "aes256-gcm96"}, nil)
}

// newTransit returns our client of it.
func newTransit(t testing.TB, b *peers.OpenBao, token string, edit ...func(*vault.TransitOptions)) *vault.Transit {
	t.Helper()
	o := vault.TransitOptions{SealKey: "seal", Endpoint: caclient.Endpoint{URL: b.URL, RootsFile: b.RootsFile}}
	if token != "" {
		o.Token = func(context.Context) (string, error) { return token, nil }
	}
	for _, e := range edit {
		e(&o)
	}
	return must.Get(vault.NewTransit(o))(t)
}

// refuses requires an error that may pass: it is of a kind, unless that is nil, and says nothing about keys.
func refuses(t *testing.T, name string, err, kind error) {
	t.Helper()
	e, ok := errors.AsType[*caclient.Error](err)
	require.True(t, ok, "%s: %v", name, err)
	if kind != nil {
		assert.Equal(t, kind, e.Kind, "%s: %v", name, err)
	}
	for _, certain := range []error{fs.ErrNotExist, fs.ErrExist, fs.ErrInvalid, errors.ErrUnsupported} {
		require.NotErrorIs(t, err, certain, name)
	}
	t.Logf("%s: %v", name, err)
}

// allRefuse requires that of all calls.
func allRefuse(t *testing.T, name string, c *vault.Transit, box []byte, kind error) {
	t.Helper()
	_, err := c.Key(t.Context(), transitKey)
	refuses(t, name+", find", err, kind)
	_, err = c.NewKey(t.Context(), transitKey+"0", "ecdsa-p256")
	refuses(t, name+", make", err, kind)
	refuses(t, name+", destroy", c.Destroy(t.Context(), transitKey+"0"), kind)
	_, err = c.Keys(t.Context(), "")
	refuses(t, name+", list", err, kind)
	_, err = c.Seal(t.Context(), make([]byte, 32), nil)
	refuses(t, name+", seal", err, kind)
	_, err = c.Unseal(t.Context(), box, nil)
	refuses(t, name+", unseal", err, kind)
}

const sealedBefore = "a secret that was sealed before."

const transitKey = "svidkit-00112233445566778899aabbccddeeff-0011223344556677"

// signs has a key sign, and verifies that.
func signs(t *testing.T, key crypto.Signer) error {
	t.Helper()
	now := time.Now()
	_, err := pki.NewRoot(key, pki.CertificateOptions{
		SANs: []pki.SAN{pki.IDSAN(domain.ID())}, NotBefore: now, NotAfter: now.Add(time.Hour),
	})
	return err
}

// TestOpenBaoTransit has a real OpenBao pass the suites, with exactly the documented policy.
func TestOpenBaoTransit(t *testing.T) {
	t.Parallel()
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	token := b.Token(t, transitPolicy(t))
	with := func(key string) func(testing.TB) ca.Sealer {
		return func(t testing.TB) ca.Sealer {
			return newTransit(t, b, token, func(o *vault.TransitOptions) { o.SealKey = key })
		}
	}
	custodiantest.Run(t, func(t testing.TB) ca.Custodian { return newTransit(t, b, token) }, custodiantest.Options{})
	b.Do(t, "", http.MethodPost, "transit/keys/other", doc{"type": "aes256-gcm96"}, nil)
	b.Policy(t, "of-a-token", strings.ReplaceAll(transitPolicy(t), "/seal\"", "/+\""))
	custodiantest.Sealer(t, with("seal"), with("other"), with("missing"))
}

// TestOpenBaoTransitPolicy: each line of the documented policy is needed, and the policy does not give the keys away.
func TestOpenBaoTransitPolicy(t *testing.T) {
	t.Parallel()
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	whole := transitPolicy(t)
	token := b.Token(t, whole)
	c := newTransit(t, b, token)
	key := must.Get(c.NewKey(t.Context(), transitKey, "ecdsa-p256"))(t)
	box := must.Get(c.Seal(t.Context(), make([]byte, 32), nil))(t)
	const at = "transit/keys/" + transitKey
	for _, try := range []struct {
		method, path string
		body         any
	}{
		{"GET", "transit/export/signing-key/" + transitKey, nil}, {"GET", "transit/backup/" + transitKey, nil},
		{"POST", at + "/config", doc{"exportable": true}}, {"POST", at + "/config", doc{"allow_plaintext_backup": true}},
		{"POST", at + "/config", doc{"deletion_allowed": true, "exportable": true}},
		{"POST", at + "/config", doc{"min_encryption_version": 1}},
		{"POST", at + "0", doc{"type": "ecdsa-p256", "exportable": true}},
		{"POST", at + "0", doc{"type": "ecdsa-p256", "allow_plaintext_backup": true}},
		{"POST", at + "0", doc{"type": "ed25519", "derived": true}},
		{"POST", at + "/rotate", doc{}}, {"POST", at + "/trim", doc{"min_available_version": 1}}, {"POST", at + "/import", doc{}},
		{"POST", "transit/keys/seal", doc{"type": "aes256-gcm96"}}, {"DELETE", "transit/keys/seal", nil},
		{"POST", "transit/encrypt/other", doc{"plaintext": "AAAA"}}, {"POST", "transit/restore/other", doc{}},
		{"POST", "sys/mounts/other", doc{"type": "transit"}}, {"DELETE", "sys/mounts/transit", nil},
	} {
		code, answer := b.Try(t, token, try.method, try.path, try.body)
		assert.Equal(t, http.StatusForbidden, code, "%s %s %v: %s", try.method, try.path, try.body, answer)
	}
	// What is left over is the key that seals, whose deletion the policy allows to be allowed, and no more.
	lines := regexp.MustCompile(`(?m)^path "([^"]+)"`).FindAllStringSubmatch(whole, -1)
	require.Len(t, lines, 7)
	for _, line := range lines {
		b.Policy(t, "of-a-token", strings.Replace(whole, line[0], `path "nowhere"`, 1))
		var denied int
		for _, err := range []error{
			must.Err(c.Keys(t.Context(), "")), must.Err(c.Key(t.Context(), transitKey)), c.Destroy(t.Context(), transitKey),
			signs(t, key), must.Err(c.Seal(t.Context(), make([]byte, 32), nil)), must.Err(c.Unseal(t.Context(), box, nil)),
		} {
			if errors.Is(err, caclient.ErrDenied) {
				denied++
			}
		}
		code, _ := b.Try(t, token, "DELETE", "transit/keys/seal", nil)
		if line[1] == "transit/keys/seal" { // then the line of all keys is for this one, too
			assert.NotEqual(t, http.StatusForbidden, code)
		} else {
			assert.NotZero(t, denied, "%s is not needed", line[1])
		}
		b.Policy(t, "of-a-token", whole)
		if _, err := c.Key(t.Context(), transitKey); err != nil {
			key = must.Get(c.NewKey(t.Context(), transitKey, "ecdsa-p256"))(t)
		}
	}
	// Without the key that seals, its maker is said.
	none := newTransit(t, b, token, func(o *vault.TransitOptions) { o.SealKey = "none" })
	_, err := none.Seal(t.Context(), make([]byte, 32), nil)
	require.ErrorContains(t, err, "bao write -f transit/keys/none type=aes256-gcm96")
	b.Policy(t, "of-a-token", `path "transit/encrypt/none" { capabilities = ["create", "update"] }`)
	must.Get(none.Seal(t.Context(), make([]byte, 32), nil))(t)
}

// TestOpenBaoTransitOutages: what is wrong for a while does not look like a key that is gone.
func TestOpenBaoTransitOutages(t *testing.T) {
	t.Parallel()
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	c := newTransit(t, b, "root")
	key := must.Get(c.NewKey(t.Context(), transitKey, "ecdsa-p256"))(t)
	box := must.Get(c.Seal(t.Context(), make([]byte, 32), nil))(t)
	works := func(name string) {
		t.Helper()
		require.NoError(t, signs(t, key), name)
		found := must.Get(c.Key(t.Context(), transitKey))(t, name)
		require.True(t, pki.PublicKeysEqual(found.Public(), key.Public()), name)
		must.Get(c.Unseal(t.Context(), box, nil))(t, name)
	}
	works("at first")

	b.Seal(t)
	allRefuse(t, "sealed", c, box, caclient.ErrUnavailable)
	refuses(t, "sealed, sign", must.Err(key.Sign(nil, make([]byte, 32), crypto.SHA256)), caclient.ErrUnavailable)
	b.Unseal(t)
	works("unsealed")

	b.Signal(t, syscall.SIGSTOP)
	began := time.Now()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			_, err := key.Sign(nil, make([]byte, 32), crypto.SHA256)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		})
	}
	wg.Wait()
	assert.Less(t, time.Since(began), 12*time.Second)
	b.Signal(t, syscall.SIGCONT)
	works("after a stop")

	// Mounts and namespaces that are not there, and engines of other types.
	b.Do(t, "", http.MethodPost, "sys/namespaces/team", doc{}, nil)
	for _, kind := range []string{"kv", "pki"} {
		b.Do(t, "", http.MethodPost, "sys/mounts/"+kind, doc{"type": kind}, nil)
	}
	for name, edit := range map[string]func(*vault.TransitOptions){
		"no mount":         func(o *vault.TransitOptions) { o.Mount = "none" },
		"kv":               func(o *vault.TransitOptions) { o.Mount = "kv" },
		"pki":              func(o *vault.TransitOptions) { o.Mount = "pki" },
		"no namespace":     func(o *vault.TransitOptions) { o.Namespace = "none" },
		"empty namespace":  func(o *vault.TransitOptions) { o.Namespace = "team" },
		"below the engine": func(o *vault.TransitOptions) { o.Mount = "transit/keys" },
	} {
		c := newTransit(t, b, "root", edit)
		_, err := c.Key(t.Context(), transitKey)
		refuses(t, name+", find", err, caclient.ErrInvalid)
		_, err = c.NewKey(t.Context(), transitKey, "ecdsa-p256")
		refuses(t, name+", make", err, caclient.ErrInvalid)
		refuses(t, name+", destroy", c.Destroy(t.Context(), transitKey), caclient.ErrInvalid)
		if _, err = c.Keys(t.Context(), ""); name != "pki" { // which has keys of its own
			refuses(t, name+", list", err, caclient.ErrInvalid)
		}
		_, err = c.Unseal(t.Context(), box, nil)
		refuses(t, name+", unseal", err, nil)
		_, err = c.Seal(t.Context(), make([]byte, 32), nil)
		refuses(t, name+", seal", err, nil)
	}
	code, answer := b.Try(t, "root", "LIST", "kv/encrypt", nil)
	assert.Equal(t, http.StatusNotFound, code, "a secret in the engine kv: %s", answer)
	mountTransit(t, b, "team")
	team := newTransit(t, b, "root", func(o *vault.TransitOptions) { o.Namespace = "team" })
	_, err := team.Key(t.Context(), transitKey)
	require.ErrorIs(t, err, fs.ErrNotExist, "that of the other namespace is another one")
	require.NoError(t, signs(t, must.Get(team.NewKey(t.Context(), transitKey, "ecdsa-p256"))(t)))
	_, err = team.Unseal(t.Context(), box, nil)
	require.ErrorIs(t, err, fs.ErrInvalid)

	// Tokens.
	allRefuse(t, "bad token", newTransit(t, b, "s.bad"), box, caclient.ErrUnauthenticated)
	allRefuse(t, "no token", newTransit(t, b, ""), box, caclient.ErrUnauthenticated)
	allRefuse(t, "denied", newTransit(t, b, b.Token(t, `path "other" { capabilities = ["read"] }`)), box, caclient.ErrDenied)
}

// TestOpenBaoTransitOperator: what an operator does to a key.
func TestOpenBaoTransitOperator(t *testing.T) {
	t.Parallel()
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	c := newTransit(t, b, "root")
	operate := func(name, what string, body any) {
		t.Helper()
		b.Do(t, "", http.MethodPost, "transit/keys/"+name+"/"+what, body, nil)
	}
	for _, algorithm := range []string{"ecdsa-p384", "rsa-2048", "ed25519"} {
		name := transitKey + algorithm
		made := must.Get(c.NewKey(t.Context(), name, algorithm))(t)
		operate(name, "rotate", nil)
		for _, key := range []crypto.Signer{made, must.Get(c.Key(t.Context(), name))(t)} {
			require.True(t, pki.PublicKeysEqual(made.Public(), key.Public()), "version 1")
			require.NoError(t, signs(t, key), "version 1")
		}
		_, err := c.NewKey(t.Context(), name, algorithm)
		require.ErrorIs(t, err, fs.ErrExist)

		b.Do(t, "", http.MethodDelete, "transit/keys/"+name+"/soft-delete", nil, nil) // which keeps it
		_, err = c.NewKey(t.Context(), name, algorithm)
		require.ErrorIs(t, err, fs.ErrExist)
		err = signs(t, made)
		require.ErrorContains(t, err, "soft", "a key that is deleted softly")
		require.NotErrorIs(t, err, fs.ErrNotExist)
		operate(name, "soft-delete-restore", nil)
		require.NoError(t, signs(t, must.Get(c.Key(t.Context(), name))(t)))

		operate(name, "config", doc{"min_decryption_version": 2, "min_encryption_version": 2})
		_, err = c.Key(t.Context(), name)
		refuses(t, "find a version that is archived", err, caclient.ErrBadAnswer)
		require.ErrorContains(t, err, "min_decryption_version")
		operate(name, "config", doc{"min_decryption_version": 1, "min_encryption_version": 1})
		require.NoError(t, signs(t, must.Get(c.Key(t.Context(), name))(t)))

		operate(name, "config", doc{"min_decryption_version": 2, "min_encryption_version": 2})
		operate(name, "trim", doc{"min_available_version": 2})
		_, err = c.Key(t.Context(), name)
		refuses(t, "find a version that was trimmed", err, caclient.ErrBadAnswer)
		require.NoError(t, c.Destroy(t.Context(), name))
	}
	b.Do(t, "", http.MethodPost, "transit/keys/derived", doc{"type": "ed25519", "derived": true}, nil)
	_, err := c.Key(t.Context(), "derived")
	refuses(t, "a derived key", err, caclient.ErrBadAnswer)
	_, err = c.Key(t.Context(), "seal")
	refuses(t, "a key that does not sign", err, caclient.ErrBadAnswer)

	// The key that seals is rotated, and its old version is taken away.
	box := must.Get(c.Seal(t.Context(), []byte(sealedBefore), []byte("a")))(t)
	operate("seal", "rotate", nil)
	require.Equal(t, sealedBefore, string(must.Get(c.Unseal(t.Context(), box, []byte("a")))(t)))
	require.Contains(t, string(must.Get(c.Seal(t.Context(), make([]byte, 32), nil))(t)), "vault:v2:")
	newer := strings.Replace(string(box), "vault:v1:", "vault:v3:", 1)
	refuses(t, "a version from the future", must.Err(c.Unseal(t.Context(), []byte(newer), nil)), caclient.ErrInvalid)
	operate("seal", "config", doc{"min_decryption_version": 2})
	refuses(t, "a version that is disallowed", must.Err(c.Unseal(t.Context(), box, []byte("a"))), caclient.ErrInvalid)
}

// TestOpenBaoTransitLogins: tokens that are renewed, JWT-SVIDs, and X.509-SVIDs as client certificates.
func TestOpenBaoTransitLogins(t *testing.T) {
	t.Parallel()
	b := peers.NewOpenBao(t)
	mountTransit(t, b, "")
	b.Policy(t, "custody", transitPolicy(t))
	authority := must.Get(ca.New(ca.Config{TrustDomain: domain, JWT: &ca.JWTConfig{}}))(t)
	caID := spiffe.MustParseID("spiffe://" + domain.String() + "/ca")

	t.Run("jwt", func(t *testing.T) {
		var keys []string
		for _, key := range authority.Bundle().JWTAuthorities() {
			der := must.Get(x509.MarshalPKIXPublicKey(key))(t)
			keys = append(keys, string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})))
		}
		b.Do(t, "", http.MethodPost, "sys/auth/jwt", doc{"type": "jwt"}, nil)
		b.Do(t, "", http.MethodPost, "auth/jwt/config", doc{"jwt_validation_pubkeys": keys}, nil)
		b.Do(t, "", http.MethodPost, "auth/jwt/role/ca", doc{
			"role_type": "jwt", "bound_audiences": "openbao", "user_claim": "sub", "bound_subject": caID.String(),
			"token_policies": "custody", "token_ttl": "6s",
		}, nil)
		c := newTransit(t, b, "", func(o *vault.TransitOptions) {
			o.LoginRole, o.LoginMount = "ca", "jwt"
			o.Token = func(ctx context.Context) (string, error) {
				return authority.SignJWT(ctx, ca.JWTRequest{ID: caID, Audience: []string{"openbao"}, TTL: time.Minute})
			}
		})
		lasts(t, c, 8*time.Second)
	})
	t.Run("certificate", func(t *testing.T) {
		var roots strings.Builder
		for root := range authority.Bundle().X509Authorities() {
			roots.Write(pki.MarshalCertificatesPEM(root))
		}
		b.Do(t, "", http.MethodPost, "sys/auth/cert", doc{"type": "cert"}, nil)
		b.Do(t, "", http.MethodPost, "auth/cert/certs/ca", doc{
			"certificate": roots.String(), "allowed_uri_sans": caID.String(), "token_policies": "custody", "token_ttl": "6s",
		}, nil)
		login := func(a *ca.Authority, id spiffe.ID, name string) *vault.Transit {
			dir := t.TempDir()
			key := must.Get(pki.NewKey("ecdsa-p256"))(t)
			csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}}))(t)
			signed := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: id, CommonName: name}))(t)
			o := caclient.TLSOptions{RootsFile: b.RootsFile, CertificateFile: filepath.Join(dir, "cert.pem"),
				KeyFile: filepath.Join(dir, "key.pem")}
			require.NoError(t, os.WriteFile(o.CertificateFile, pki.MarshalCertificatesPEM(signed...), 0o600))
			require.NoError(t, os.WriteFile(o.KeyFile, must.Get(pki.MarshalPrivateKeyPEM(key))(t), 0o600))
			return newTransit(t, b, "", func(t *vault.TransitOptions) {
				t.LoginRole, t.HTTPClient = "ca", must.Do(caclient.NewHTTPClient(o))
			})
		}
		lasts(t, login(authority, caID, "ca"), 8*time.Second)
		_, err := login(authority, caID, "").Key(t.Context(), transitKey)
		refuses(t, "a certificate without a common name", err, caclient.ErrUnavailable)
		require.ErrorContains(t, err, "missing name in alias")
		_, err = login(authority, webID, "ca").Key(t.Context(), transitKey)
		refuses(t, "a certificate of another workload", err, caclient.ErrUnauthenticated)
		_, err = login(must.Get(ca.New(ca.Config{TrustDomain: domain}))(t), caID, "ca").Key(t.Context(), transitKey)
		refuses(t, "a certificate of another CA", err, caclient.ErrUnauthenticated)
	})
	t.Run("token", func(t *testing.T) {
		var made struct {
			Auth struct {
				Token string `json:"client_token"`
			}
		}
		b.Do(t, "", http.MethodPost, "auth/token/create-orphan", doc{"policies": []string{"custody"}, "period": "6s"}, &made)
		kept := newTransit(t, b, made.Auth.Token)
		b.Do(t, "", http.MethodPost, "auth/token/create-orphan",
			doc{"policies": []string{"custody"}, "period": "6s", "no_default_policy": true}, &made)
		ends := newTransit(t, b, made.Auth.Token)
		must.Get(ends.Keys(t.Context(), ""))(t)
		lasts(t, kept, 14*time.Second)
		_, err := ends.Keys(t.Context(), "")
		refuses(t, "a token that may not be renewed", err, caclient.ErrUnauthenticated)
	})
}

// lasts makes a key, and has it sign for a while.
func lasts(t *testing.T, c *vault.Transit, d time.Duration) {
	t.Helper()
	key := must.Get(c.NewKey(t.Context(), transitKey, "ecdsa-p256"))(t)
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		require.NoError(t, signs(t, key))
	}
	require.NoError(t, c.Destroy(t.Context(), transitKey))
}

// TestOpenBaoTransitCluster: a cluster of three whose standbys answer, and whose active server is killed.
func TestOpenBaoTransitCluster(t *testing.T) {
	t.Parallel()
	nodes := peers.NewOpenBaoCluster(t, 3)
	mountTransit(t, nodes[0], "")
	token := nodes[0].Token(t, transitPolicy(t))
	clients := make([]*vault.Transit, len(nodes))
	for i, b := range nodes {
		assert.Equal(t, i == 0, must.Get(b.Leads())(t))
		clients[i] = newTransit(t, b, token, func(o *vault.TransitOptions) { o.AllowPlaintext = true })
		b.Ready(t, func() error { return must.Err(clients[i].Seal(t.Context(), make([]byte, 32), nil)) })
	}
	// What the active server has made is there for a standby at once, although that may not have it yet.
	var behind int
	for i := range 40 {
		name := fmt.Sprint(transitKey, i)
		nodes[0].Do(t, "", http.MethodPost, "transit/keys/"+name, doc{"type": "ecdsa-p256"}, nil)
		if code, _ := nodes[2].Try(t, token, "GET", "transit/keys/"+name, nil); code == http.StatusNotFound {
			behind++
		}
		found, err := clients[2].Key(t.Context(), name)
		require.NoError(t, err)
		require.NoError(t, signs(t, found))
		if i%2 == 0 {
			require.NoError(t, clients[1].Destroy(t.Context(), name))
			_, err = clients[0].Key(t.Context(), name)
			require.ErrorIs(t, err, fs.ErrNotExist, "the active server")
			_, err = clients[1].NewKey(t.Context(), name+"again", "ecdsa-p256")
			require.NoError(t, err)
		}
	}
	t.Logf("of 40 keys, a standby did not have %d at once", behind)
	require.Len(t, must.Get(clients[0].Keys(t.Context(), transitKey))(t), 40)

	// The active server is killed. No call says meanwhile that a key is gone, and the others go on.
	kept := fmt.Sprint(transitKey, 1)
	key := must.Get(clients[1].Key(t.Context(), kept))(t)
	nodes[0].Kill()
	began := time.Now()
	var failed, answered int
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := clients[2].NewKey(ctx, transitKey+"x", "ecdsa-p256")
		_, found := clients[1].Key(ctx, kept)
		_, never := clients[1].Key(ctx, transitKey+"never")
		cancel()
		require.NotErrorIs(t, found, fs.ErrNotExist)
		if err == nil || errors.Is(err, fs.ErrExist) {
			break
		}
		require.NotErrorIs(t, err, fs.ErrNotExist)
		if !errors.Is(never, fs.ErrNotExist) {
			failed++
		}
		if found == nil {
			answered++
		}
		require.Less(t, time.Since(began), time.Minute, "%v", err)
		time.Sleep(200 * time.Millisecond)
	}
	t.Logf("another server is active after %v; before, the standby found a key %d times, and could not say %d times "+
		"that one is missing", time.Since(began), answered, failed)
	require.NotZero(t, failed, "a standby alone cannot be certain")
	require.NoError(t, signs(t, key))
	nodes[0].Start(t)
	require.NoError(t, signs(t, must.Get(clients[0].Key(t.Context(), transitKey+"x"))(t)))
	require.NoError(t, clients[0].Destroy(t.Context(), transitKey+"x"), "by a standby")
}
