package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A request counts until it is answered, one with a body twice, and an address has two thirds of what there is.
func TestUnderWay(t *testing.T) {
	t.Parallel()
	u := new(underWay)
	serve := func(from, body string, during func()) int {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		r.RemoteAddr = from + ":1"
		w := httptest.NewRecorder()
		u.within(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { during() })).ServeHTTP(w, r)
		return w.Code
	}
	nothing := func() {}
	serve("192.0.2.1", "", func() {
		assert.Equal(t, 1, u.all)
		serve("192.0.2.1", "x", func() { assert.Equal(t, 3, u.all) })
		assert.Equal(t, 1, u.all)
	})
	assert.Zero(t, u.all)

	most := maxRequests * 2 / 3
	assert.True(t, u.take("192.0.2.1", most-1))
	assert.Equal(t, http.StatusServiceUnavailable, serve("192.0.2.1", "x", nothing))
	assert.Equal(t, http.StatusOK, serve("192.0.2.1", "", nothing))
	assert.Equal(t, http.StatusOK, serve("192.0.2.2", "x", nothing))
	assert.True(t, u.take("192.0.2.2", maxRequests-most))
	assert.Equal(t, http.StatusOK, serve("192.0.2.2", "", nothing))
	assert.Equal(t, http.StatusServiceUnavailable, serve("192.0.2.2", "x", nothing), "in total")
	u.take("192.0.2.1", 1-most)
	u.take("192.0.2.2", most-maxRequests)
	assert.Zero(t, u.all)
	assert.Empty(t, u.of)
}
