package federation_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestParseIstioString(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.6-2", "IST-1.6-3", "IST-1.6-4", "IST-1.6-5", "IST-1.6-6", "IST-1.7-1")
	for in, want := range map[string][]string{
		"foo|https://url/for/foo||bar|https://url/for/bar": {"foo https://url/for/foo", "bar https://url/for/bar"},
		"foo|url/for/foo":     {"foo https://url/for/foo"},
		"foo|http://x":        {"foo https://http://x"},
		"foo|HTTPS://x":       {"foo https://HTTPS://x"},
		"foo|a||bar|b||foo|c": {"foo https://c", "bar https://b"},
		"example.org|https://h:8443/b?x=1&y=%7C#f": {"example.org https://h:8443/b?x=1&y=%7C#f"},
	} {
		got := must.Get(federation.ParseIstioString(in))(t, in)
		var texts []string
		for _, r := range got {
			texts = append(texts, r.TrustDomain.String()+" "+r.URL)
			assert.Equal(t, federation.Web{}, r.Profile)
		}
		assert.Equal(t, want, texts, in)
	}
	for in, want := range map[string]string{
		"":                   `tuple "": want TRUST-DOMAIN|URL, and || between tuples`,
		"foo":                `tuple "foo": want TRUST-DOMAIN|URL`,
		"foo|a|b":            `tuple "foo|a|b": want`,
		"foo|a||":            `tuple "": want`,
		"||foo|a":            `tuple "": want`,
		"foo|a|||bar|b":      `tuple "|bar|b": want`,
		"foo|a||bar":         `tuple "bar": want`,
		"foo||https://x":     `tuple "foo": want`,
		"|https://x":         "invalid trust domain",
		"Foo|https://x":      "invalid trust domain",
		"foo |https://x":     "invalid trust domain",
		"foo|":               "URL has no host",
		"foo|https://u:p@x/": "has a user name or password",
		"foo|https://a b/":   "URL is not a URL",
	} {
		got, err := federation.ParseIstioString(in)
		require.ErrorContains(t, err, want, in)
		require.ErrorContains(t, err, "federation: Istio's bundle endpoints: ")
		assert.Nil(t, got)
	}
	_, err := federation.ParseIstioString("Foo|https://x")
	_, ok := errors.AsType[*spiffe.ParseError](err)
	assert.True(t, ok)
	for _, in := range []string{
		"foo|https://u:secret@x|y", "https://u:secret@x", "https://u:secret@x|https://y", "foo|https://u:secret%zz@x/",
		"foo|https://u:secr?secret@x|y", "foo|https://x?sig=secret|y", "https://x?sig=secret|y",
	} {
		_, err = federation.ParseIstioString(in)
		require.Error(t, err)
		assert.NotContains(t, err.Error(), "secr", in)
	}
	_, err = federation.ParseIstioString(strings.Repeat("x", 10_000))
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 400)
}

// The hazards of polling as Istio does: an outage removes nothing, a broken document hides no
// other, and an endpoint that refuses is not asked more often.
func TestIstioHazards(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.7-12", "IST-1.8-5")
	synctest.Test(t, func(t *testing.T) {
		world, web := newInternet(), spiffetest.NewCA(t, "web.test")
		foo, bar := spiffetest.NewCA(t, "foo"), spiffetest.NewCA(t, "bar")
		// A key of an unknown kind does not hide the others.
		doc := strings.Replace(string(documentOf(t, foo.Bundle())), `"keys":[`, `"keys":[{"use":"x509-svid","kty":"AKP","x5c":["AAAA"]},`, 1)
		world.host(t, "foo.test", webCert(web, "foo.test"), answer(200, []byte(doc)))
		two := world.host(t, "bar.test", webCert(web, "bar.test"), serving(t, bar.Bundle()))
		m := newManager(t, federation.Config{Relationships: []federation.Relationship{
			{TrustDomain: foo.TrustDomain(), URL: "https://foo.test/", Profile: webRoots(web)},
			{TrustDomain: bar.TrustDomain(), URL: "https://bar.test/", Profile: webRoots(web)},
		}, DialContext: world.dial})
		running(t, m)
		synctest.Wait()
		assert.True(t, trusts(t, m, foo))
		assert.True(t, trusts(t, m, bar))
		two.serve(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.True(t, trusts(t, m, bar))
		assertStale(t, statusOf(t, m, bar.TrustDomain()))
		assert.True(t, statusOf(t, m, foo.TrustDomain()).Fresh)
	})
}

func FuzzParseIstioString(f *testing.F) {
	for _, s := range []string{
		"", "foo", "foo|https://url/for/foo||bar|https://url/for/bar", "foo|http://x", "foo|a|||bar|b", "|", "||", "|||", "foo|a||foo|b",
		"Foo|x", "foo|https://u:p@x/", "foo|https://[::1]:8443/x?y#z", "foo|%", "foo|\x00",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		all, err := federation.ParseIstioString(s)
		if err != nil {
			require.Nil(t, all)
			return
		}
		require.NotEmpty(t, all)
		// They are good for a Manager as they are, and say the same when they are written again.
		must.Get(federation.New(federation.Config{Relationships: all}))(t)
		tuples := make([]string, len(all))
		for i, r := range all {
			require.True(t, strings.HasPrefix(r.URL, "https://"))
			require.Contains(t, s, strings.TrimPrefix(r.URL, "https://"))
			tuples[i] = r.TrustDomain.String() + "|" + r.URL
		}
		again := must.Get(federation.ParseIstioString(strings.Join(tuples, "||")))(t)
		require.Equal(t, all, again)
	})
}
