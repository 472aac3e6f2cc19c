package istioca_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestChain has the forms in which a signer can return a chain, and what becomes of them.
func TestChain(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-6", "IST-4.4-1", "IST-4.4-2", "IST-4.4-3", "IST-4.4-5")
	td := spiffe.MustParseTrustDomain("example.org")
	root, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	upper := root.Intermediate()
	lower := upper.Intermediate()
	chain, chainKey := lower.Certificate("/ns/prod/sa/web") // leaf, lower, upper
	require.Len(t, chain, 3)
	direct, directKey := root.Certificate("/ns/prod/sa/web")
	stranger, _ := root.Certificate("/ns/prod/sa/web")
	caChain, caKey := root.Certificate("/ns/prod/sa/web", func(c *x509.Certificate) { c.BasicConstraintsValid, c.IsCA = true, true })
	keys := map[*x509.Certificate]crypto.Signer{chain[0]: chainKey, direct[0]: directKey, caChain[0]: caKey}
	bundle := func(certs ...*x509.Certificate) *spiffe.Bundle {
		return must.Get(spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certs}))(t)
	}
	r, o := root.Root(), other.Root()
	type certs = []*x509.Certificate
	for name, test := range map[string]struct {
		chain  certs
		bundle *spiffe.Bundle
		want   []certs // nil: no answer
	}{
		"self-signed":                              {direct, bundle(r), []certs{{direct[0]}, {r}}},
		"two roots":                                {direct, bundle(r, o), []certs{{direct[0]}, {r, o}}},
		"intermediates":                            {chain, bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"intermediates, two roots":                 {chain, bundle(o, r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {o, r}}},
		"root at the end":                          {append(chain[:3:3], r), bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"a root in the middle":                     {certs{chain[0], r, chain[1], chain[2]}, bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"another root at the end":                  {append(chain[:3:3], o), bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"an intermediate twice":                    {certs{chain[0], chain[1], chain[1], chain[2], chain[1]}, bundle(r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"the anchor is an intermediate":            {chain, bundle(chain[2]), []certs{{chain[0]}, {chain[1]}, {chain[2]}}},
		"one anchor is an intermediate":            {chain, bundle(chain[1], r), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {chain[1], r}}},
		"no bundle, root at the end":               {append(chain[:3:3], r), nil, []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"no bundle, leaf and root":                 {certs{direct[0], r}, nil, []certs{{direct[0]}, {r}}},
		"no bundle, a CA at the end":               {chain, nil, []certs{{chain[0]}, {chain[1]}, {chain[2]}}},
		"empty bundle, root at the end":            {append(chain[:3:3], r), bundle(), []certs{{chain[0]}, {chain[1]}, {chain[2]}, {r}}},
		"no bundle, a leaf":                        {direct, nil, nil},
		"empty bundle, a leaf":                     {direct, bundle(), nil},
		"no bundle, another leaf at the end":       {certs{direct[0], chain[0]}, nil, nil},
		"no chain":                                 {nil, bundle(r), nil},
		"the certificate of another key":           {stranger, bundle(r), nil},
		"the certificate of a CA":                  {caChain, bundle(r), nil},
		"a nil certificate":                        {certs{direct[0], nil}, bundle(r), nil},
		"more certificates than peers put up with": {append(certs{direct[0]}, bytesOf(chain[1], 16)...), bundle(r), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, istioca.Options{Signer: &signer{
				sign:   func(context.Context, ca.Request) ([]*x509.Certificate, error) { return test.chain, nil },
				bundle: func() *spiffe.Bundle { return test.bundle },
			}})
			request := goodRequest(t)
			if len(test.chain) > 0 && keys[test.chain[0]] != nil {
				request = requestFor(t, keys[test.chain[0]])
			}
			if test.want == nil {
				_, err := s.call(t, "web", request)
				refused(t, err, grpchttp.Internal, "CSR signing error (the answer of the signer cannot be used)")
				assert.Equal(t, "0", s.metric(t, "success_cert_issuance_count"))
				return
			}
			for range 2 { // the second answer has its tail from the first
				got := s.issue(t, "web", request)
				require.Len(t, got, len(test.want))
				for i := range got {
					assert.Equal(t, raw(test.want[i]), raw(got[i]), "text %d", i)
				}
			}
			last := test.want[len(test.want)-1]
			assert.Equal(t, strconv.FormatInt(last[0].NotAfter.Unix(), 10), s.metric(t, "root_cert_expiry_timestamp"))
			signing := ""
			if len(test.want) > 2 {
				signing = strconv.FormatInt(test.want[1][0].NotAfter.Unix(), 10)
			}
			assert.Equal(t, signing, s.metric(t, "cert_chain_expiry_timestamp"))
		})
	}
}

func bytesOf(c *x509.Certificate, n int) []*x509.Certificate {
	var out []*x509.Certificate
	for range n {
		out = append(out, c)
	}
	return out
}

// A new root is in the very next answer, though nothing else has changed.
func TestRotation(t *testing.T) {
	t.Parallel()
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
	s := serve(t, istioca.Options{Signer: a})
	roots := func() [][]byte {
		got := s.issue(t, "web", goodRequest(t))
		require.Len(t, got, 2)
		return raw(got[1])
	}
	require.Len(t, roots(), 1)
	first := roots()[0]
	must.Get(a.Rotate(t.Context()))(t)
	got := roots()
	require.Len(t, got, 2)
	assert.Equal(t, first, got[0])
	assert.Len(t, roots(), 2)
}

// A leaf goes with its own intermediates, also when they change under the same roots.
func TestIntermediatesChange(t *testing.T) {
	t.Parallel()
	root := spiffetest.NewCA(t, "example.org")
	bundle := root.Bundle()
	var chains [][]*x509.Certificate
	var keys []crypto.Signer
	for _, issuer := range []*spiffetest.CA{root.Intermediate(), root.Intermediate(), root} {
		chain, key := issuer.Certificate("/ns/prod/sa/web")
		chains, keys = append(chains, chain), append(keys, key)
	}
	next := make(chan []*x509.Certificate, 1)
	s := serve(t, istioca.Options{Signer: &signer{
		sign:   func(context.Context, ca.Request) ([]*x509.Certificate, error) { return <-next, nil },
		bundle: func() *spiffe.Bundle { return bundle },
	}})
	for _, i := range []int{0, 1, 2, 0, 0, 1} {
		next <- chains[i]
		var got [][]byte
		for _, text := range s.issue(t, "web", requestFor(t, keys[i])) {
			got = append(got, raw(text)...)
		}
		assert.Equal(t, append(raw(chains[i]), root.Root().Raw), got)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.6-1")
	a := authority(t)
	s := serve(t, istioca.Options{Signer: a})
	var b bytes.Buffer
	require.NoError(t, s.Report().Metrics(&b))
	var names []string
	for line := range strings.SplitSeq(b.String(), "\n") {
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			names = append(names, rest)
		}
	}
	assert.Equal(t, []string{
		"citadel_server_csr_count counter",
		"citadel_server_authentication_failure_count counter",
		"citadel_server_csr_parsing_err_count counter",
		"citadel_server_id_extraction_err_count counter",
		"citadel_server_csr_sign_err_count counter",
		"citadel_server_success_cert_issuance_count counter",
		"citadel_server_root_cert_expiry_timestamp gauge",
		"citadel_server_root_cert_expiry_seconds gauge",
	}, names)
	end := a.Status().Roots[0].Certificate.NotAfter
	assert.Equal(t, strconv.FormatInt(end.Unix(), 10), s.metric(t, "root_cert_expiry_timestamp"))
	left := must.Get(strconv.ParseFloat(s.metric(t, "root_cert_expiry_seconds"), 64))(t)
	assert.InDelta(t, time.Until(end).Seconds(), left, 60)
}
