package federation_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// What is missing or wrong in the parameters shows before anything is sent, in every entry point.
func TestParameters(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-20", "FED-21", "FED-30", "FED-31", "FED-32", "FED-44", "FED-50", "FED-60", "FED-61", "FED-62", "FED-63")
	ca, other := spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "other.test")
	id := spiffe.MustParseID("spiffe://partner.test/endpoint")
	foreign := spiffe.MustParseID("spiffe://other.test/endpoint")
	empty := must.Get(spiffe.NewBundle(partner, spiffe.BundleContents{}))(t)
	// The initial bundle in the format of bundle documents.
	initial := must.Get(spiffe.ParseBundle(partner, documentOf(t, ca.Bundle())))(t)
	const url = "https://partner.test/bundle"

	for _, c := range []struct {
		rule, why string // no rule: it is fine
		r         federation.Relationship
	}{
		{"FED-20", "TrustDomain is required", federation.Relationship{URL: url, Profile: federation.Web{}}},
		{"FED-20", "URL is required", federation.Relationship{TrustDomain: partner, Profile: federation.Web{}}},
		{"FED-20", "Profile is required", federation.Relationship{TrustDomain: partner, URL: url}},
		{"FED-30", "does not begin with https://", federation.Relationship{TrustDomain: partner, URL: "http://partner.test/bundle", Profile: federation.Web{}}},
		{"FED-30", "does not begin with https://", federation.Relationship{TrustDomain: partner, URL: "partner.test/bundle", Profile: federation.Web{}}},
		{"FED-30", "does not begin with https://", federation.Relationship{TrustDomain: partner, URL: "//partner.test/bundle", Profile: federation.Web{}}},
		{"FED-30", "not a URL", federation.Relationship{TrustDomain: partner, URL: "https://partner.test:port/", Profile: federation.Web{}}},
		{"FED-30", "not a URL", federation.Relationship{TrustDomain: partner, URL: url + strings.Repeat("x", 9000), Profile: federation.Web{}}},
		{"FED-30", "has no host", federation.Relationship{TrustDomain: partner, URL: "https:///bundle", Profile: federation.Web{}}},
		{"FED-30", "has no host", federation.Relationship{TrustDomain: partner, URL: "https://:443/bundle", Profile: federation.Web{}}},
		{"FED-30", "has no host", federation.Relationship{TrustDomain: partner, URL: "https:partner.test", Profile: federation.Web{}}},
		{"FED-31", "has a user name or password", federation.Relationship{TrustDomain: partner, URL: "https://u:secret@partner.test/x", Profile: federation.Web{}}},
		{"FED-31", "has a user name or password", federation.Relationship{TrustDomain: partner, URL: "https://@partner.test/x", Profile: federation.Web{}}},
		{"FED-30", "not a URL", federation.Relationship{TrustDomain: partner, URL: "https://u:secret@partner.test:x/", Profile: federation.Web{}}},
		{"FED-52", "Web.Roots is empty", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.Web{Roots: x509.NewCertPool()}}},
		{"FED-60", "EndpointID is required", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{Initial: initial}}},
		{"FED-60", "not a workload", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: partner.ID(), Initial: initial}}},
		{"FED-61", "SPIFFE.Initial is required", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: id}}},
		{"FED-61", "use SPIFFE.Initial", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: id, Initial: initial, Bundles: initial}}},
		{"FED-61", `a bundle of "other.test"`, federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: id, Initial: other.Bundle()}}},
		{"FED-62", "no X.509 authority", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: id, Initial: empty}}},
		{"FED-63", "use SPIFFE.Bundles", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: foreign, Initial: initial}}},
		{"FED-63", "set SPIFFE.Bundles", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: foreign}}},

		{"", "FED-50", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.Web{}}},
		{"", "FED-32", federation.Relationship{TrustDomain: partner, URL: "https://h:8443/a/b.json?x=1#f", Profile: federation.Web{}}},
		{"", "a name that the URL does not have", federation.Relationship{TrustDomain: home, URL: "HTTPS://[::1]/", Profile: federation.Web{}}},
		{"", "FED-62", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: id, Initial: initial}}},
		{"", "FED-63", federation.Relationship{TrustDomain: partner, URL: url, Profile: federation.SPIFFE{EndpointID: foreign, Bundles: other.Bundle()}}},
	} {
		t.Run(c.rule+" "+c.why, func(t *testing.T) {
			t.Parallel()
			dialled := false
			opts := federation.Config{Timeout: time.Second, DialContext: func(context.Context, string, string) (net.Conn, error) {
				dialled = true
				return nil, errors.New("dialled")
			}}
			_, fromNew := federation.New(federation.Config{Relationships: []federation.Relationship{c.r}, DialContext: opts.DialContext})
			fromAdd := newManager(t, opts).Add(c.r)
			if c.rule == "" {
				require.NoError(t, fromNew)
				require.NoError(t, fromAdd)
				return
			}
			b, fromFetch := federation.Fetch(t.Context(), c.r, &opts)
			assert.Nil(t, b)
			for _, err := range []error{fromNew, fromAdd, fromFetch} {
				require.ErrorContains(t, err, fmt.Sprintf("relationship with %q: ", c.r.TrustDomain))
				require.ErrorContains(t, err, c.why)
				assert.NotContains(t, err.Error(), "secret")
			}
			assert.False(t, dialled)
		})
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	r := federation.Relationship{TrustDomain: partner, URL: "https://partner.test/", Profile: federation.Web{}}
	for want, cfg := range map[string]federation.Config{
		"two relationships with one trust domain": {Relationships: []federation.Relationship{r, r}},
		"MinInterval is -1ns":                     {MinInterval: -1},
		"MaxInterval -1ns":                        {MaxInterval: -1},
		"MaxInterval 1s":                          {MaxInterval: time.Second},
	} {
		_, err := federation.New(cfg)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "federation: new: ")
	}
	_, err := federation.New(federation.Config{Relationships: []federation.Relationship{r, r}})
	require.EqualError(t, err, `federation: new: relationship with "partner.test": two relationships with one trust domain`)

	// An interval that is longer than the usual ceiling moves it.
	newManager(t, federation.Config{MinInterval: 48 * time.Hour})

	// An endpoint in another relationship's trust domain, in whatever order.
	borrowing := federation.Relationship{TrustDomain: home, URL: "https://x.test/", Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/e")}}
	m := newManager(t, federation.Config{Relationships: []federation.Relationship{borrowing, r}})
	require.NoError(t, m.Add(borrowing))
}
