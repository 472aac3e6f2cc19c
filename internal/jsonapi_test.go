package internal_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

// What Write answers Post reads, and no error has a secret.
func TestJSONAPIPost(t *testing.T) {
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

// A document is asked for as it is, and a coding that comes unasked is named.
func TestJSONAPIRead(t *testing.T) {
	t.Parallel()
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	require.NoError(t, must.Err(z.Write([]byte("{}"))))
	require.NoError(t, z.Close())
	coding, body := "", []byte("{}")
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "identity", r.Header.Get("Accept-Encoding"))
		if coding != "" {
			w.Header().Set("Content-Encoding", coding)
		}
		_, _ = w.Write(body)
	}))
	t.Cleanup(srv.Close)
	get := func(limit int) ([]byte, error) {
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL, nil))(t)
		r.Header["Accept-Encoding"] = jsonapi.Plain
		answer := must.Get(srv.Client().Do(r))(t)
		defer answer.Body.Close()
		return jsonapi.Read(answer, limit)
	}
	for _, coding = range []string{"", "identity", "IDENTITY"} {
		data := must.Get(get(2))(t, coding)
		assert.Equal(t, "{}", string(data))
		require.ErrorIs(t, must.Err(get(1)), spiffe.ErrTooLarge)
	}
	coding, body = "gzip", packed.Bytes()
	_, err := get(1 << 10)
	require.ErrorContains(t, err, `the answer has the content coding "gzip", which was not asked for`)
	coding = strings.Repeat("x", 100)
	_, err = get(1 << 10)
	require.ErrorContains(t, err, "content coding")
	assert.Less(t, len(err.Error()), 200)
}
