package filesource_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// document is a bundle document of roots with a sequence number, a key for tokens, and entries that no reader understands.
func document(t *testing.T, ca *spiffetest.CA, sequence uint64, key crypto.PublicKey, unknown int) []byte {
	t.Helper()
	c := ca.Bundle().Contents()
	c.Sequence, c.RefreshHint = &sequence, time.Minute
	if key != nil {
		c.JWTAuthorities = map[string]crypto.PublicKey{"key-1": key}
	}
	data := must.Get(must.Get(spiffe.NewBundle(ca.TrustDomain(), c))(t).Marshal())(t)
	if unknown == 0 {
		return data
	}
	var doc map[string]any
	require.NoError(t, json.Unmarshal(data, &doc))
	for n := range unknown {
		doc["keys"] = append(doc["keys"].([]any), map[string]any{"kty": "unknown", "use": "x509-svid", "kid": fmt.Sprint("unknown ", n)})
	}
	data = must.Get(json.Marshal(doc))(t)
	return data
}

// Two files of one trust domain are one bundle without a number, or, as long as they do not go together, are refused each time that
// they are looked at, while what was in force stays.
func TestTwoFilesOfOneDomain(t *testing.T) {
	t.Parallel()
	one, two := newCA(t), newCA(t)
	k1, k2 := one.SVID("/a").Leaf().PublicKey, one.SVID("/b").Leaf().PublicKey
	cfg := filesource.Config{Bundles: []filesource.BundleFile{
		{Path: "one", TrustDomain: td}, {Path: "two", TrustDomain: td},
	}}
	s, take := filesource.Taking(t, cfg)
	files := map[string][]byte{"one": document(t, one, 5, k1, 0), "two": document(t, two, 7, k1, 0)}
	roots := func() (n int) {
		b := must.Get(s.Bundle(td))(t)
		for range b.X509Authorities() {
			n++
		}
		_, numbered := b.Sequence()
		assert.False(t, numbered, "of which file would it be?")
		_, hinted := b.RefreshHint()
		assert.False(t, hinted)
		return n
	}
	require.NoError(t, take(files))
	require.Equal(t, 2, roots())
	for range 2 {
		files["two"] = document(t, two, 8, k2, 0)
		for range 3 {
			must.Fail(t, take(files), "do not go together", `two different keys have the key ID "key-1"`)
			require.Equal(t, 2, roots())
		}
		files["two"] = document(t, two, 8, k1, 0)
		require.NoError(t, take(files))
		require.Equal(t, 2, roots())
	}

	// Each file has an order of its own.
	files["one"] = document(t, one, 6, k1, 0)
	require.NoError(t, take(files))
	for _, older := range []uint64{5, 0} {
		files["one"] = document(t, newCA(t), older, k1, 0)
		require.ErrorContains(t, take(files), "it is an older one")
		require.Equal(t, 2, roots())
	}
	files["one"] = document(t, one, 6, k1, 0)
	require.NoError(t, take(files), "the same number again")
	again := must.Get(s.Bundle(td))(t)
	require.NoError(t, take(files))
	assert.Same(t, again, must.Get(s.Bundle(td))(t), "nothing has changed")
}

// A source is ready when it has all of its files, and stays so when one of them is lost.
func TestReadyWithAllFiles(t *testing.T) {
	t.Parallel()
	ca, other := newCA(t), spiffetest.NewCA(t, "partner.test")
	cfg := layout("/run")
	cfg.Bundles = append(cfg.Bundles, filesource.BundleFile{Path: "partner", TrustDomain: partner})
	s, take := filesource.Taking(t, cfg)
	at, cancel := context.WithCancel(t.Context())
	cancel()
	all := secret(t, ca.SVID("/web"), ca.Bundle())
	files := map[string][]byte{cfg.CertFile: all["tls.crt"], cfg.KeyFile: all["tls.key"], cfg.Bundles[0].Path: all["ca.crt"], "partner": other.Bundle().MarshalPEM()}
	for path := range files {
		s, take := filesource.Taking(t, cfg)
		some := map[string][]byte{}
		for other, data := range files {
			if other != path {
				some[other] = data
			}
		}
		require.Error(t, take(some))
		require.ErrorIs(t, s.Ready(at), spiffe.ErrNotReady, "without %s", path)
		require.NoError(t, take(files))
		require.NoError(t, s.Ready(at))
	}
	require.NoError(t, take(files))
	for path := range files {
		some := map[string][]byte{}
		for other, data := range files {
			if other != path {
				some[other] = data
			}
		}
		require.Error(t, take(some))
		require.NoError(t, s.Ready(at), "what was in %s stays", path)
	}
}

// A certificate of another trust domain is refused, and with it what is beside it without a name; what has a name of its own is
// taken all the same.
func TestStrangerBesideNamedBundles(t *testing.T) {
	t.Parallel()
	ca, stranger, other := newCA(t), spiffetest.NewCA(t, "stranger.test"), spiffetest.NewCA(t, "partner.test")
	cfg := layout("/run")
	cfg.Bundles = append(cfg.Bundles, filesource.BundleFile{Path: "partner", TrustDomain: partner})
	s, take := filesource.Taking(t, cfg)
	put := func(svid *spiffe.SVID, own, partner *spiffe.Bundle) error {
		all := secret(t, svid, own)
		return take(map[string][]byte{cfg.CertFile: all["tls.crt"], cfg.KeyFile: all["tls.key"], cfg.Bundles[0].Path: all["ca.crt"], "partner": partner.MarshalPEM()})
	}
	svid := ca.SVID("/web")
	require.NoError(t, put(svid, ca.Bundle(), other.Bundle()))
	other.Rotate()
	require.ErrorContains(t, put(stranger.SVID("/web"), stranger.Bundle(), other.Bundle()), "stranger.test")
	require.Equal(t, number(svid), serial(t, s))
	got := must.Get(s.Bundle(partner))(t)
	assert.Equal(t, string(other.Bundle().MarshalPEM()), string(got.MarshalPEM()), "its roots are new")
	got = must.Get(s.Bundle(td))(t)
	assert.Equal(t, string(ca.Bundle().MarshalPEM()), string(got.MarshalPEM()), "and these are not")
	assert.ErrorIs(t, must.Err(s.Bundle(stranger.TrustDomain())), spiffe.ErrUnknownTrustDomain)
}

// What needs attention is told once each, also when there is something else already, and again when it comes again; of many entries
// of one file twenty are told.
func TestNotes(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	var d diary
	cfg := layout("/run")
	cfg.Logger = d.logger()
	cfg.Bundles = []filesource.BundleFile{{Path: "bundle"}}
	_, take := filesource.Taking(t, cfg)
	put := func(svid *spiffe.SVID, sequence uint64, unknown int) {
		t.Helper()
		all := secret(t, svid, ca.Bundle())
		require.NoError(t, take(map[string][]byte{cfg.CertFile: all["tls.crt"], cfg.KeyFile: all["tls.key"], "bundle": document(t, ca, sequence, nil, unknown)}))
	}
	told := func(text string) (n int) {
		for _, line := range d.lines(t, "filesource: needs attention") {
			if bytes.Contains(fmt.Append(nil, line["err"]), []byte(text)) {
				n++
			}
		}
		return n
	}
	client := ca.SVID("/web", func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })
	put(client, 1, 0)
	require.Equal(t, 1, told("permit a client only"))
	put(client, 2, 1)
	require.Equal(t, 1, told("permit a client only"))
	require.Equal(t, 1, told("skipped"))
	put(client, 3, 1)
	require.Equal(t, 1, told("skipped"))
	put(ca.SVID("/web"), 4, 0)
	put(ca.SVID("/web"), 5, 1)
	require.Equal(t, 2, told("skipped"), "it has come again")
	put(ca.SVID("/web"), 6, 100)
	require.LessOrEqual(t, told("skipped"), 2+20)
	require.Greater(t, told("skipped"), 2+15)
}
