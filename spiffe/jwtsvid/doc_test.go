package jwtsvid_test

import (
	"context"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// A service that is called with tokens, over TLS with a web certificate.
func Example_server() {
	_ = func(ctx context.Context, address string, web spiffe.ID, handler http.Handler) error {
		source, err := workloadapi.Start(ctx, workloadapi.Config{Address: address, JWTBundles: true})
		if err != nil {
			return err
		}
		defer source.Close()
		validator, err := jwtsvid.NewValidator(source, []string{"db"}, nil)
		if err != nil {
			return err
		}
		protect, err := jwtsvid.Middleware(validator, spiffe.AllowIDs(web), nil)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: protect(handler)}
		return server.ListenAndServeTLS("web.pem", "web-key.pem")
	}
}

// A client of a service whose name is "db".
func Example_client() {
	_ = func(source *workloadapi.Source) error {
		cache, err := jwtsvid.NewCache(source, nil)
		if err != nil {
			return err
		}
		transport, err := jwtsvid.NewTransport(cache, map[string]string{"db.example.org": "db"}, nil)
		if err != nil {
			return err
		}
		client := &http.Client{Transport: transport}
		resp, err := client.Get("https://db.example.org/")
		if err != nil {
			return err
		}
		return resp.Body.Close()
	}
}

// TestDocumentationCompiles: each line of code in the package comment is one of the examples in this file.
func TestDocumentationCompiles(t *testing.T) {
	t.Parallel()
	doc := must.Get(os.ReadFile("jwtsvid.go"))(t)
	examples := must.Get(os.ReadFile("doc_test.go"))(t)
	compiled := make(map[string]bool)
	for line := range strings.Lines(string(examples)) {
		compiled[strings.TrimSpace(line)] = true
	}
	n := 0
	for line := range strings.Lines(string(doc)) {
		code, ok := strings.CutPrefix(line, "//\t")
		if code = strings.TrimSpace(code); ok && code != "…" {
			assert.True(t, compiled[code], code)
			n++
		}
	}
	assert.Greater(t, n, 6)
}
