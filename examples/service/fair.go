package main

import (
	"net/http"
	"sync"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// The numbers of requests answered at a time, in total and for each peer. A client may take long to read an answer,
// so these bound the memory for answers, and no client can use all of it.
const maxRequests, maxRequestsEach = 500, 250

// fair serves requests within the bounds, and answers others with 503.
type fair struct {
	http.Handler

	mu  sync.Mutex
	all int
	of  map[spiffe.ID]int
}

// take adds n to a peer's requests, and reports whether that is within the bounds.
func (f *fair) take(peer spiffe.ID, n int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n > 0 && (f.all+n > maxRequests || f.of[peer]+n > maxRequestsEach) {
		return false
	}
	if f.of == nil {
		f.of = map[spiffe.ID]int{}
	}
	f.all += n
	if f.of[peer] += n; f.of[peer] == 0 {
		delete(f.of, peer)
	}
	return true
}

func (f *fair) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var peer spiffe.ID
	if p, ok := spiffetls.PeerFromContext(r.Context()); ok {
		peer = p.ID()
	}
	if !f.take(peer, 1) {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable) // without a body, which would wait for the client
		return
	}
	defer f.take(peer, -1)
	f.Handler.ServeHTTP(w, r)
	if r.ProtoMajor == 2 { // hold the slot until the client has read the answer
		_ = http.NewResponseController(w).Flush()
	}
}
