package jsonapi_test

import (
	"bytes"
	"compress/gzip"
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

// A document is asked for as it is, and a coding that comes unasked is named.
func TestRead(t *testing.T) {
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
