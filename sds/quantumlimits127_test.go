//go:build go1.27

package sds_test

import (
	"crypto/x509"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

// TestQuantumSecrets: a response has room for a key pair of three certificates of ML-DSA-65, for the roots of both kinds
// with their successors, and for a hundred roots. A hundred pairs come in several responses.
func TestQuantumSecrets(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	svid, _ := quantum.Chain(t, 3)
	root := quantum.Root(t, "ml-dsa-65")
	trust := quantum.Bundle(t, root.Certificate(), quantum.Root(t, "ml-dsa-65").Certificate(),
		quantum.Root(t, "ecdsa-p256").Certificate(), quantum.Root(t, "ecdsa-p256").Certificate())
	var many []*x509.Certificate
	for i := range 100 {
		next := must.Get(root.Renew(time.Now(), time.Now().Add(time.Duration(i+1)*time.Hour)))(t)
		many = append(many, next.Certificate())
	}
	src := newFakeSource()
	secrets := []*pki.Secret{
		must.Get(pki.NewKeyPairSecret("default", svid))(t),
		must.Get(pki.NewTrustSecret("ROOTCA", trust))(t),
		must.Get(pki.NewTrustSecret("many", quantum.Bundle(t, many...)))(t),
	}
	for _, s := range secrets {
		src.put(s.Name(), s)
	}
	_, c := serving(t, src, nil)
	for _, s := range secrets {
		stream := openSotW(t, c)
		stream.ask(s.Name())
		r := stream.recv()
		want(t, r, s)
		t.Log(s.Name(), proto.Size(r), "bytes")
		stream.ack(r, s.Name())
		require.NoError(t, stream.in.Close())
	}

	names := make([]string, 100)
	for i := range names {
		names[i] = fmt.Sprint("pair-", i)
		src.put(names[i], must.Get(pki.NewKeyPairSecret(names[i], svid))(t))
	}
	got := make(map[string]bool)
	for s, err := range sds.NewClient(c, "http://localhost").Watch(t.Context(), names...) {
		require.NoError(t, err)
		chain, _, ok := s.KeyPair()
		require.True(t, ok)
		assert.Len(t, must.Get(pki.ParseCertificatesPEM(chain))(t), 3)
		if got[s.Name()] = true; len(got) == len(names) {
			break
		}
	}
	stream := openDelta(t, c)
	stream.subscribe(names...)
	responses := 0
	for n := 0; n < len(names); responses++ {
		r := stream.recv()
		n += len(r.GetResources())
		assert.Less(t, proto.Size(r), 1<<20+32<<10)
		stream.ack(r)
	}
	assert.Equal(t, 3, responses)
}
