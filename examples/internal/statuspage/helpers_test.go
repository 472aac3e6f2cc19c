package statuspage_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/report"
)

// reporter is a part that says what it is told to.
type reporter func() report.Report

func (r reporter) Report() report.Report { return r() }

// fixed says always the same.
func fixed(r report.Report) reporter { return func() report.Report { return r } }

func newPage(t testing.TB, parts ...statuspage.Part) *statuspage.Handler {
	t.Helper()
	h := must.Get(statuspage.New("agent", parts...))(t)
	t.Cleanup(func() { assert.NoError(t, h.Close()) })
	return h
}

// of is a page of one part.
func of(t testing.TB, r report.Report) *statuspage.Handler {
	t.Helper()
	return newPage(t, statuspage.Part{Name: "part", Source: fixed(r)})
}

// ask returns the answer to a request as of a client on the same machine.
func ask(t testing.TB, h http.Handler, method, path string, edit ...func(*http.Request)) *http.Response {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // for events that should not have begun
	defer cancel()
	r := httptest.NewRequestWithContext(ctx, method, "http://localhost"+path, nil)
	for _, e := range edit {
		e(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func body(t testing.TB, r *http.Response) string {
	t.Helper()
	return string(must.Get(io.ReadAll(r.Body))(t))
}

func page(t testing.TB, h http.Handler) string {
	t.Helper()
	r := ask(t, h, http.MethodGet, "/")
	require.Equal(t, http.StatusOK, r.StatusCode)
	return body(t, r)
}

// status is the JSON form, as a client reads it.
type status struct {
	Title      string
	Problems   list[struct{ Part, What, Error string }]
	Identities list[identity]
	Roots      list[struct {
		TrustDomain               string `json:"trust_domain"`
		Kind, Name, SHA256, State string
		From                      []string
	}]
	Upstreams list[struct {
		Part, Name, State, Error string
		LastSuccess              string `json:"last_success"`
		NextAttempt              string `json:"next_attempt"`
		Failures                 int
	}]
	Servers list[struct {
		Part, Protocol           string
		Streams, Served, Waiting int
	}]
	Names  list[struct{ Part, Name, Version string }]
	Events list[struct {
		Part, Kind, Version, Client, Message string
		Names                                []string
		Streams                              int
	}]
}

type identity struct {
	Part, Name, State, Error, Renewal string
	NotBefore                         string `json:"not_before"`
	NotAfter                          string `json:"not_after"`
	Failures                          int
}

type list[T any] struct {
	Rows    []T
	Omitted int
}

func read(t testing.TB, h http.Handler) (s status) {
	t.Helper()
	r := ask(t, h, http.MethodGet, "/status.json")
	require.Equal(t, http.StatusOK, r.StatusCode)
	require.Equal(t, "application/json", r.Header.Get("Content-Type"))
	require.NoError(t, json.Unmarshal([]byte(body(t, r)), &s))
	return s
}

// section returns what is in the element of that ID that is replaced while the page is live.
func section(t testing.TB, html, id string) string {
	t.Helper()
	_, rest, ok := strings.Cut(html, ` id="`+id+`">`)
	require.True(t, ok, id)
	if end := strings.Index(rest, "</div>"); end >= 0 {
		rest = rest[:end]
	}
	return rest
}

var errCA = errors.New("the CA is down")
