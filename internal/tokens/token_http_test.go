package tokens_test

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

func TestTokenStrayed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		way  []string // from the first request to the last; "" is one that is not known
		want bool
	}{
		"no redirect":            {[]string{"https://a.test/"}, false},
		"the same host":          {[]string{"https://a.test/", "https://a.test/x", "https://a.test/y"}, false},
		"other letters":          {[]string{"https://A.test/", "https://a.TEST/"}, false},
		"another host":           {[]string{"https://a.test/", "https://b.test/"}, true},
		"another port":           {[]string{"https://a.test/", "https://a.test:444/"}, true},
		"another host before":    {[]string{"https://a.test/", "https://b.test/", "https://b.test/x"}, true},
		"there and back":         {[]string{"https://a.test/", "https://b.test/", "https://a.test/"}, true},
		"away from TLS":          {[]string{"https://a.test/", "http://a.test/"}, true},
		"to TLS":                 {[]string{"http://a.test/", "https://a.test/"}, true},
		"from somewhere":         {[]string{"", "https://a.test/"}, true},
		"from somewhere, before": {[]string{"", "https://a.test/", "https://a.test/x"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var r *http.Request
			for i, at := range test.way {
				next := new(http.Request)
				if i > 0 {
					next.Response = &http.Response{Request: r}
				}
				if r = next; at == "" {
					r = nil
					continue
				}
				u := must.Get(url.Parse(at))(t)
				r.URL = u
			}
			assert.Equal(t, test.want, token.Strayed(r))
		})
	}
	u := must.Get(url.Parse("https://a.test/"))(t)
	assert.True(t, token.Strayed(&http.Request{URL: u, Response: &http.Response{Request: new(http.Request)}}), "a request without a URL")
}
