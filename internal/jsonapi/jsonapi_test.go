package jsonapi_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/jsonapi"
)

// What Write answers Post reads, and no error has a secret.
func TestPost(t *testing.T) {
	t.Parallel()
	type message struct {
		Text string `json:"text"`
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch r.URL.Path {
		case "/good":
			assert.Equal(t, "application/json", r.Header.Get("Content-Type"))
			jsonapi.Write(w, message{string(body)})
		case "/bad":
			jsonapi.Write(w, func() {})
		case "/ok":
			jsonapi.Healthy(w, r)
		case "/large":
			_, _ = io.WriteString(w, strings.Repeat(" ", jsonapi.MaxAnswer+1))
		default:
			http.Error(w, "no: s3cr3t "+string(body), http.StatusForbidden)
		}
	}))
	t.Cleanup(s.Close)
	var out message
	require.NoError(t, jsonapi.Call(t.Context(), s.Client(), http.MethodPost, s.URL+"/good", message{"x"}, &out))
	assert.Equal(t, message{`{"text":"x"}`}, out)
	require.NoError(t, jsonapi.Call(t.Context(), s.Client(), http.MethodPost, s.URL+"/good", nil, &out))
	assert.Empty(t, out.Text)

	for _, path := range []string{"/bad", "/ok", "/large", "/other"} {
		err := jsonapi.Call(t.Context(), s.Client(), http.MethodPost, s.URL+path, message{"s3cr3t"}, &out, "s3cr3t")
		require.Error(t, err, path)
		assert.NotContains(t, err.Error(), "s3cr3t", path)
	}
	err := jsonapi.Call(t.Context(), s.Client(), http.MethodPost, s.URL+"/other", nil, &out)
	status, ok := errors.AsType[*jsonapi.StatusError](err)
	require.True(t, ok)
	assert.Equal(t, http.StatusForbidden, status.Code)
	_, again := status.Retryable()
	assert.False(t, again)
	_, again = (&jsonapi.StatusError{Code: http.StatusBadRequest}).Retryable()
	assert.True(t, again)
	require.Error(t, jsonapi.Call(t.Context(), s.Client(), http.MethodPost, s.URL, func() {}, nil))
	require.Error(t, jsonapi.Call(t.Context(), s.Client(), http.MethodPost, ":", nil, nil))
	s.Close()
	err = jsonapi.Call(t.Context(), s.Client(), http.MethodPost, s.URL+"/s3cr3t", nil, &out, "s3cr3t")
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "s3cr3t")

	w := httptest.NewRecorder()
	jsonapi.Write(w, message{"x"})
	assert.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	assert.Equal(t, "application/json", w.Header().Get("Content-Type"))
}
