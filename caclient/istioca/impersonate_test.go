package istioca_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
)

// The metadata has the ID of the signing request, and only with the option.
func TestImpersonatedIdentity(t *testing.T) {
	t.Parallel()
	var sent []map[string]any
	url, client := listen(t, fake(func(r call) (*wire.IstioCertificateResponse, error) {
		sent = append(sent, r.msg.GetMetadata().AsMap()) // one call at a time
		return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "no")
	}))
	o := istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client}, CertSigner: "special"}
	_, err := newCA(t, o).Sign(t.Context(), freshCSR(t), 0)
	require.Error(t, err)
	o.Impersonate = true
	c := newCA(t, o)
	require.Error(t, must.Err(c.Sign(t.Context(), freshCSR(t), 0)))
	_, err = c.FetchBundles(t.Context()) // for a key without a name: the agent's own certificate has the roots
	require.Error(t, err)
	require.Equal(t, []map[string]any{
		{"CertSigner": "special"},
		{"CertSigner": "special", "ImpersonatedIdentity": webID.String()},
		{"CertSigner": "special"},
	}, sent)

	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	for name, sans := range map[string][]pki.SAN{
		"no name":  nil,
		"DNS name": {pki.DNSSAN("web.test")},
		"two IDs":  {pki.IDSAN(webID), pki.IDSAN(domain.ID())},
	} {
		csr, err := pki.NewCSR(key, pki.CSROptions{SANs: sans})
		if err != nil {
			continue // package pki refuses it already
		}
		_, err = c.Sign(t.Context(), csr, 0)
		requireKind(t, err, caclient.ErrInvalid)
		require.ErrorContains(t, err, "whom to impersonate", name)
	}
	require.Len(t, sent, 3, "what is refused is not sent")
}
