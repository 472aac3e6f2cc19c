//go:build go1.27

package caprogram

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
)

// all are the kinds of keys while a trust domain moves.
const all = "ecdsa,rsa,ed25519,ml-dsa-44,ml-dsa-65"

// TestRootKeys does what an operator does with -root-keys from P-256 by way of both to ML-DSA, and back: the server starts
// again with another value, and commands, which do not name the flag, work on the roots of both kinds meanwhile.
func TestRootKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		serve := func(keys string, d time.Duration) {
			c := newConfig(t, dir, "-root-keys", keys)
			a := must.Get(c.Open(t.Context(), caconfig.OpenOptions{}))(t)
			defer a.Close()
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			require.NoError(t, a.Own.Run(ctx))
		}
		command := func(args ...string) string {
			return must.Get(shell(t, "", arguments(dir, args...)...))(t, args)
		}
		root := regexp.MustCompile(`(?m)^((?:ML-DSA )?root) ([0-9a-f]+): (\w+)`)
		roots := func() (all []string, ids []string) {
			status := command("-status")
			assert.NotContains(t, status, "missing", "in the store")
			for _, m := range root.FindAllStringSubmatch(status, -1) {
				all, ids = append(all, m[1]+" "+m[3]), append(ids, m[2])
			}
			return all, ids
		}
		const classical, quantum = "root active", "ML-DSA root active"
		for i, step := range []struct {
			keys string
			want []string
		}{
			{"ecdsa-p256", []string{classical}},
			{"ecdsa-p256,ml-dsa-65", []string{classical, quantum}},
			{"ml-dsa-65", []string{quantum}},
			{"ml-dsa-65,ecdsa-p256", []string{classical, quantum}},
			{"ecdsa-p256", []string{classical}},
		} {
			serve(step.keys, time.Minute)
			if before, _ := roots(); i > 0 {
				assert.Len(t, before, 2, "the one joins or retires: %s", step.keys)
			}
			serve(step.keys, 5*time.Hour)
			now, ids := roots()
			require.Equal(t, step.want, now, step.keys)

			command("-rotate")
			serve(step.keys, 5*time.Hour)
			now, rotated := roots()
			require.Equal(t, step.want, now, "rotated: %s", step.keys)
			for i, id := range rotated {
				assert.NotContains(t, ids, id)
				command("-taint", id)
				said := command("-revoke", id, "-now")
				assert.Contains(t, said, strings.Fields(step.want[i])[0]) // root or ML-DSA
				assert.Contains(t, said, " "+id+" is revoked")
			}
			serve(step.keys, time.Minute)
			now, replaced := roots()
			require.Equal(t, step.want, now, "replaced: %s", step.keys)
			for _, id := range replaced {
				assert.NotContains(t, rotated, id)
			}
		}
		assert.Contains(t, command("-verify-audit", filepath.Join(dir, "audit.jsonl")), "begins with the first line of all")
	})
}

// TestAlgorithms asks a server of both roots by Istio's API, and then one of ML-DSA alone, whose own certificate is of
// ML-DSA, too.
func TestAlgorithms(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, step := range []struct{ roots, algorithms, server, leaf, issuer string }{
		{"ecdsa-p256,ml-dsa-65", all, "ECDSA-SHA256", "ecdsa-p256", "ECDSA-SHA256"},
		{"ecdsa-p256,ml-dsa-65", all, "ECDSA-SHA256", "ml-dsa-44", "ML-DSA-65"},
		{"ecdsa-p256,ml-dsa-65", "ecdsa", "ECDSA-SHA256", "ml-dsa-44", ""},
		{"ecdsa-p256,ml-dsa-65", "ml-dsa-65", "ML-DSA-65", "ml-dsa-65", "ML-DSA-65"},
		{"ecdsa-p256,ml-dsa-65", "ml-dsa-44,ml-dsa-65", "ML-DSA-65", "ecdsa-p256", ""},
	} {
		s, stop := start(t, newConfig(t, dir, "-root-keys", step.roots, "-algorithms", step.algorithms))
		client := newClient(s.ca.Bundle(), nil)
		url := "https://" + s.at.Istio.Addr().String()
		resp := must.Get(client.Get(url))(t)
		assert.NoError(t, resp.Body.Close())
		assert.Equal(t, step.server, resp.TLS.PeerCertificates[0].SignatureAlgorithm.String(), step)
		key := must.Get(pki.NewKey(step.leaf))(t)
		chain, roots, err := istioRequest(t.Context(), client, url, s.c.CA.TrustDomain, token(t, s, "demo/web"), key)
		client.CloseIdleConnections()
		stop()
		if step.issuer == "" {
			require.ErrorIs(t, err, caclient.ErrInvalid, step)
			require.ErrorContains(t, err, "the key of the request must not be certified")
			continue
		}
		require.NoError(t, err, step)
		assert.Len(t, roots, 2)
		assert.Equal(t, step.issuer, chain[0].SignatureAlgorithm.String(), step)
	}
	// So does the command.
	csr := string(must.Get(pki.NewCSR(must.Get(pki.NewKey("ml-dsa-44"))(t), pki.CSROptions{}))(t).PEM())
	once := arguments(dir, "-once", "-", "-id", "spiffe://cluster.local/ns/demo/sa/web")
	require.ErrorContains(t, must.Err(shell(t, csr, once...)), "the kind of key is not allowed: ml-dsa-44 is none of ecdsa,rsa,ed25519")
	signed := must.Get(shell(t, csr, append(once, "-algorithms", all)...))(t)
	certs := must.Get(pki.ParseCertificatesPEM([]byte(signed)))(t)
	require.Len(t, certs, 3)
	assert.Equal(t, "ML-DSA-65", certs[0].SignatureAlgorithm.String())
}

// TestOtherCAOfMLDSA: a caller's certificate of the CA in -client-roots is taken if its kind of key is in -algorithms.
func TestOtherCAOfMLDSA(t *testing.T) {
	t.Parallel()
	other := t.TempDir()
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	csr := string(must.Get(pki.NewCSR(key, pki.CSROptions{}))(t).PEM())
	signed := must.Get(shell(t, csr, arguments(other, "-root-keys", "ml-dsa-65", "-algorithms", all, "-once", "-",
		"-id", "spiffe://cluster.local/ns/demo/sa/web")...))(t)
	certs := must.Get(pki.ParseCertificatesPEM([]byte(signed)))(t)
	roots := filepath.Join(other, "roots.pem")
	require.NoError(t, os.WriteFile(roots, pki.MarshalCertificatesPEM(certs[1:]...), 0o600))
	svid := mustSVID(t, certs[:1], key)
	for algorithms, taken := range map[string]bool{all: true, "ecdsa,ml-dsa-44": false, "ecdsa": false} {
		s, _ := start(t, newConfig(t, t.TempDir(), "-client-roots", roots, "-algorithms", algorithms))
		client := newClient(s.ca.Bundle(), svid)
		defer client.CloseIdleConnections()
		_, _, err := istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, "",
			must.Get(pki.NewKey("ecdsa-p256"))(t))
		if assert.Equal(t, taken, err == nil, "%s: %v", algorithms, err); !taken {
			assert.ErrorIs(t, err, caclient.ErrUnauthenticated)
		}
	}
}
