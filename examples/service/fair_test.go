package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A peer has no more than its share of the requests, and gets back what has ended.
func TestFair(t *testing.T) {
	t.Parallel()
	inside, release := make(chan struct{}), make(chan struct{})
	f := &fair{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		inside <- struct{}{}
		<-release
		_, _ = io.WriteString(w, "hello")
	})}
	ask := func() int {
		w := httptest.NewRecorder()
		f.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		return w.Code
	}
	codes := make(chan int)
	for range maxRequestsEach {
		go func() { codes <- ask() }()
		<-inside
	}
	assert.Equal(t, http.StatusServiceUnavailable, ask())
	close(release)
	for range maxRequestsEach {
		assert.Equal(t, http.StatusOK, <-codes)
	}
	go func() { <-inside }()
	assert.Equal(t, http.StatusOK, ask())
	assert.Empty(t, f.of)
}
