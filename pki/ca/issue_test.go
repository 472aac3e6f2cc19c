package ca_test

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// auditor keeps records, and does what fail says before.
type auditor struct {
	mu   sync.Mutex
	all  []*ca.Issuance
	fail func(ctx context.Context) error
}

func (a *auditor) Record(ctx context.Context, i *ca.Issuance) error {
	if a.fail != nil {
		if err := a.fail(ctx); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, i)
	return nil
}

func hash(b []byte) string { s := sha256.Sum256(b); return hex.EncodeToString(s[:]) }

func TestAudit(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		records := &auditor{}
		a := newAuthority(t, func(c *ca.Config) { c.Auditor = records })
		csr := newCSR(t)
		ip := net.IPv4(10, 0, 0, 1).To4()
		chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, DNSNames: []string{"web"}, IPs: []net.IP{ip}, Caller: "spiffe://example.org/node", Method: "token"})
		require.NoError(t, err)
		dns, err := a.Sign(t.Context(), ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{"web.shop", "web"}})
		require.NoError(t, err)
		root := a.Roots()[0].ID
		describe := func(kind string, c *x509.Certificate, caller string) *ca.Issuance {
			return &ca.Issuance{
				Time: time.Now().Round(0), Kind: kind, Serial: c.SerialNumber.Text(16), DNSNames: c.DNSNames, IPs: c.IPAddresses,
				NotBefore: c.NotBefore, NotAfter: c.NotAfter, Issuer: root, Fingerprint: hash(c.Raw), PublicKey: hash(c.RawSubjectPublicKeyInfo), Caller: caller,
			}
		}
		want := []*ca.Issuance{describe("x509-svid", chain[0], "spiffe://example.org/node"), describe("dns", dns[0], "web.shop")}
		want[0].ID, want[0].Method = web, "token"
		assert.Equal(t, want, records.all)
		assert.Equal(t, []string{"web"}, records.all[0].DNSNames)

		_, err = a.Sign(t.Context(), ca.Request{CSR: csr})
		require.Error(t, err)
		assert.Len(t, records.all, 2, "what is refused is not recorded")
	})
}

func TestNoCertificateWithoutRecord(t *testing.T) {
	t.Parallel()
	full := errors.New("disk full")
	records := &auditor{fail: func(context.Context) error { return full }}
	a := newAuthority(t, withJWT, func(c *ca.Config) { c.Auditor = records })
	csr := newCSR(t)
	chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
	require.ErrorIs(t, err, ca.ErrAudit)
	require.ErrorIs(t, err, full)
	assert.Nil(t, chain)
	token, err := a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}})
	require.ErrorIs(t, err, ca.ErrAudit)
	assert.Empty(t, token)

	// A caller that stops waiting for a slow auditor gets no certificate, and the cause of its context.
	cause := errors.New("too slow for me")
	records.fail = func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, cause)
	defer cancel()
	chain, err = a.Sign(ctx, ca.Request{CSR: csr, ID: web})
	require.ErrorIs(t, err, cause)
	assert.NotErrorIs(t, err, ca.ErrAudit)
	assert.Nil(t, chain)
	_, isSignError := errors.AsType[*ca.SignError](err)
	assert.False(t, isSignError)
}

func TestLimits(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, withJWT, func(c *ca.Config) { c.Limits = ca.Limits{CallerRate: 1, CallerBurst: 2} })
		csr := newCSR(t)
		ask := func(caller string) error {
			_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, Caller: caller})
			return err
		}
		require.NoError(t, ask("a"))
		require.NoError(t, ask("a"))
		err := ask("a")
		require.ErrorIs(t, err, ca.ErrLimit)
		e, _ := errors.AsType[*ca.SignError](err)
		assert.Equal(t, time.Second, e.RetryAfter)
		require.NoError(t, ask("b"), "another one has its own")
		_, err = a.Sign(t.Context(), ca.Request{CSR: csr})
		require.ErrorIs(t, err, ca.ErrIdentity, "what is wrong costs nothing")
		time.Sleep(time.Second)
		require.NoError(t, ask("a"))

		// All kinds count.
		for range 2 {
			_, err = a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}, Caller: "c"})
			require.NoError(t, err)
		}
		_, err = a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}, Caller: "c"})
		require.ErrorIs(t, err, ca.ErrLimit)
		_, err = a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, Caller: "c"})
		require.ErrorIs(t, err, ca.ErrLimit)
	})
	// Records that are being written hold their places: a slow sink pushes back.
	synctest.Test(t, func(t *testing.T) {
		slow := make(chan struct{})
		records := &auditor{fail: func(context.Context) error { <-slow; return nil }}
		a := newAuthority(t, func(c *ca.Config) { c.Limits = ca.Limits{Concurrent: 2, Queue: 1}; c.Auditor = records })
		csr := newCSR(t)
		errs := make(chan error, 3)
		for range 3 {
			go func() { _, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web}); errs <- err }()
		}
		synctest.Wait()
		_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
		require.ErrorIs(t, err, ca.ErrLimit)
		close(slow)
		for range 3 {
			require.NoError(t, <-errs)
		}
		// A caller in the queue can stop waiting.
		slow2 := make(chan struct{})
		records.fail = func(context.Context) error { <-slow2; return nil }
		for range 2 {
			go func() { _, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web}); errs <- err }()
		}
		synctest.Wait()
		cause := errors.New("bored")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, cause)
		defer cancel()
		_, err = a.Sign(ctx, ca.Request{CSR: csr, ID: web})
		require.ErrorIs(t, err, cause)
		close(slow2)
		require.NoError(t, <-errs)
		require.NoError(t, <-errs)
	})
}

func TestDNSOnly(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		for _, constrain := range []bool{false, true} {
			a, csr := newAuthority(t, func(c *ca.Config) { c.Rotation.Constrain = constrain }), newCSR(t)
			ip := net.ParseIP("2001:db8::1")
			name := "web.shop.serviceaccount.identity.linkerd.cluster.local"
			chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{name, "web"}, IPs: []net.IP{ip}, CommonName: "web", Backdate: time.Minute, TTL: time.Hour})
			require.NoError(t, err)
			require.Len(t, chain, 1)
			c := chain[0]
			assert.Equal(t, []string{name, "web"}, c.DNSNames)
			assert.Equal(t, "2001:db8::1", c.IPAddresses[0].String())
			assert.Empty(t, c.URIs)
			assert.Equal(t, "CN=web", c.Subject.String())
			assert.Equal(t, time.Now().Add(-time.Minute).UTC(), c.NotBefore)
			assert.Equal(t, time.Now().Add(time.Hour).UTC(), c.NotAfter)
			assert.False(t, c.IsCA)
			assert.Equal(t, x509.KeyUsageDigitalSignature, c.KeyUsage)
			assert.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, c.ExtKeyUsage)
			assert.True(t, pki.PublicKeysEqual(csr.PublicKey(), c.PublicKey))
			_, err = c.Verify(x509.VerifyOptions{Roots: a.Bundle().CertPool(), DNSName: name, CurrentTime: time.Now()})
			assert.NoError(t, err)
		}
	})
}

func TestProfilesRefuse(t *testing.T) {
	t.Parallel()
	a, csr := newAuthority(t), newCSR(t)
	one := []string{"a.example"}
	for _, tt := range []struct {
		name string
		r    ca.Request
		kind error
		says string
	}{
		{"DNS with an ID", ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: one, ID: web}, ca.ErrIdentity, "there is an ID"},
		{"DNS without a name", ca.Request{CSR: csr, Profile: ca.DNSOnly}, ca.ErrIdentity, "no DNS name"},
		{"DNS with an address only", ca.Request{CSR: csr, Profile: ca.DNSOnly, IPs: []net.IP{{10, 0, 0, 1}}}, ca.ErrIdentity, "no DNS name"},
		{"DNS with a name that is none", ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{"a b"}}, ca.ErrIdentity, "DNS"},
		{"DNS with an empty name", ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{"a", ""}}, ca.ErrIdentity, "DNS"},
		{"DNS with an address that is none", ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: one, IPs: []net.IP{{1}}}, ca.ErrIdentity, "IP"},
		{"DNS with a long common name", ca.Request{CSR: csr, Profile: ca.DNSOnly, DNSNames: one, CommonName: strings.Repeat("x", 65)}, ca.ErrIdentity, "common name"},
		{"DNS without a request", ca.Request{Profile: ca.DNSOnly, DNSNames: one}, ca.ErrCSR, "there is none"},
		{"a profile that is none", ca.Request{CSR: csr, Profile: 7, ID: web}, ca.ErrIdentity, "no profile 7"},
		{"a negative profile", ca.Request{CSR: csr, Profile: -1, ID: web}, ca.ErrIdentity, "no profile -1"},
		{"a negative Backdate", ca.Request{CSR: csr, ID: web, Backdate: -1}, ca.ErrTTL, "backdated"},
		{"a Backdate over MaxTTL", ca.Request{CSR: csr, ID: web, Backdate: 91 * 24 * time.Hour}, ca.ErrTTL, "backdated"},
		{"a Backdate beyond reason", ca.Request{CSR: csr, ID: web, Backdate: 1<<63 - 1}, ca.ErrTTL, "backdated"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			chain, err := a.Sign(t.Context(), tt.r)
			require.ErrorIs(t, err, tt.kind)
			assert.ErrorContains(t, err, tt.says)
			assert.Nil(t, chain)
		})
	}
}
