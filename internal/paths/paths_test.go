package paths_test

import (
	"bufio"
	"errors"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/paths"
)

// patterns are those of the tests. The value of each is itself.
var patterns = []string{
	"/", "/admin/", "/admin/{$}", "/admin/keys/", "/public/", "GET /orders/{id}", "POST /orders/", "/orders", "admin.test/", "/billing.Invoices/",
	"/billing.Invoices/Delete",
}

func newTable(t testing.TB, all []string) paths.Table[string] {
	m := map[string]string{}
	for _, p := range all {
		m[p] = p
	}
	table, err := paths.New(m, func(string) error { return nil })
	require.NoError(t, err)
	return table
}

// read returns the request that a server reads, or nil if it is none.
func read(method, target, host string) *http.Request {
	if strings.ContainsAny(method+target+host, " \r\n") {
		return nil
	}
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(method + " " + target + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n")))
	if err != nil {
		return nil
	}
	return r
}

func TestFind(t *testing.T) {
	t.Parallel()
	table := newTable(t, patterns)
	for _, c := range []struct{ method, target, want string }{
		{"GET", "/", "/"},
		{"GET", "/other", "/"},
		{"GET", "/admin", ""}, // a ServeMux redirects it
		{"GET", "/admin/", "/admin/{$}"},
		{"GET", "/admin/x", "/admin/"},
		{"GET", "/admin/x?a=/public/", "/admin/"},
		{"GET", "/ADMIN/x", "/"},
		{"GET", "/admin/keys/1", "/admin/keys/"},
		{"GET", "/admin/%6beys/1", "/admin/keys/"},
		{"GET", "/admi%6e/x", "/admin/"},
		{"GET", "/admin;a/x", "/"},
		{"GET", "/admin%3b/x", "/"},
		{"GET", "//admin/x", ""},
		{"GET", "/admin//x", ""},
		{"GET", "/./admin/x", ""},
		{"GET", "/public/../admin/x", ""},
		{"GET", "/public/..", ""},
		{"GET", "/public/.../x", "/public/"},
		{"GET", "/public/%2e%2e/admin/x", ""},
		{"GET", "/public/%2E%2e/admin/x", ""},
		{"GET", "/public/..%2fadmin/x", ""},
		{"GET", "/public/x%2f..%2f..%2fadmin%2fx", ""},
		{"GET", "/public%2fx", ""}, // a ServeMux runs "/", others "/public/"
		{"GET", "/%2fadmin/x", ""},
		{"GET", "/public/a%2fb", "/public/"},
		{"GET", "/public/a%20b", "/public/"},
		{"GET", "/orders/7", "GET /orders/{id}"},
		{"HEAD", "/orders/7", "GET /orders/{id}"},
		{"POST", "/orders/7", "POST /orders/"},
		{"DELETE", "/orders/7", "/"},
		{"get", "/orders/7", "/"},
		{"GET", "/orders/a%2fb", ""},
		{"GET", "/orders", "/orders"},
		{"OPTIONS", "*", ""},
		{"CONNECT", "db.test:443", ""},
		{"CONNECT", "/admin/x", "/admin/"},
		{"CONNECT", "/public/../admin/x", "/public/"}, // a ServeMux leaves the path of a tunnel as it is
		{"GET", "http://web.test/admin/x", "/admin/"},
		{"GET", "http://admin.test/public/", "admin.test/"},
		{"GET", "http://admin.test:8443/public/", "admin.test/"},
		{"GET", "http://web.test", ""},
		{"POST", "/billing.Invoices/List", "/billing.Invoices/"},
		{"POST", "/billing.Invoices/Delete", "/billing.Invoices/Delete"},
		{"POST", "/billing.Invoices", ""},
	} {
		r := read(c.method, c.target, "web.test")
		require.NotNil(t, r, c.target)
		got, ok := table.Find(r)
		assert.Equal(t, c.want, got, "%s %s", c.method, c.target)
		assert.Equal(t, c.want != "", ok, "%s %s", c.method, c.target)
	}

	few := newTable(t, []string{"GET /a"})
	for _, r := range []*http.Request{read("GET", "/b", "web.test"), read("POST", "/a", "web.test"), {Method: "GET", URL: httptest.NewRequest("GET", "/", nil).URL}} {
		_, ok := few.Find(r)
		assert.False(t, ok, "%s %s", r.Method, r.URL)
	}
}

func TestMistakes(t *testing.T) {
	t.Parallel()
	fine := func(string) error { return nil }
	for _, c := range []struct {
		all   map[string]string
		check func(string) error
		want  string
	}{
		{nil, fine, "there is no path"},
		{map[string]string{"": ""}, fine, `"": http.ServeMux does not take it: `},
		{map[string]string{"admin": ""}, fine, `"admin": http.ServeMux does not take it: parsing`},
		{map[string]string{"GET  admin": ""}, fine, "does not take it"},
		{map[string]string{"/a/../b": ""}, fine, `"/a/../b": its path is not clean`},
		{map[string]string{"GET web.test//b/": ""}, fine, "its path is not clean"},
		{map[string]string{"/{a": ""}, fine, "does not take it"},
		{map[string]string{"/{a}/x": "", "/y/{b}": ""}, fine, "does not take it"}, // neither is more specific
		{map[string]string{"/b": "bad", "/a": ""}, func(v string) error {
			if v == "bad" {
				return errors.New("bad value")
			}
			return nil
		}, `"/b": bad value`},
	} {
		_, err := paths.New(c.all, c.check)
		require.ErrorContains(t, err, c.want, "%q", c.all)
	}
}

// FuzzFind: what is found for a request is the pattern whose handler a ServeMux runs for it, and a handler that decodes and
// cleans the path finds the same one.
func FuzzFind(f *testing.F) {
	for _, target := range []string{"/", "/admin", "/admin/%6beys/1", "/public/%2e%2e/admin/", "/public%2fx", "//admin/", "*", "http://admin.test/x", "/orders/a%2fb", "/admin;x", "db.test:443"} {
		f.Add("GET", target, "web.test")
	}
	f.Add("CONNECT", "/public/../admin/", "web.test")
	f.Add("POST", "/orders/7", "admin.test:80")
	table := newTable(f, patterns)
	var ran string
	mux := http.NewServeMux()
	for _, p := range patterns {
		mux.HandleFunc(p, func(http.ResponseWriter, *http.Request) { ran = p })
	}
	f.Fuzz(func(t *testing.T, method, target, host string) {
		r := read(method, target, host)
		if r == nil {
			return
		}
		found, ok := table.Find(r)
		if !ok {
			return
		}
		ran = ""
		mux.ServeHTTP(httptest.NewRecorder(), r)
		assert.Equal(t, found, ran)
		if r.Method == http.MethodConnect {
			return
		}
		clean := path.Clean("/" + r.URL.Path)
		if strings.HasSuffix(r.URL.Path, "/") && clean != "/" {
			clean += "/"
		}
		r.URL.Path, r.URL.RawPath = clean, ""
		ran = ""
		mux.ServeHTTP(httptest.NewRecorder(), r)
		assert.Equal(t, found, ran, "%q decoded and cleaned", clean)
	})
}
