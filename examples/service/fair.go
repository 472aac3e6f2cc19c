package main

import (
	"net/http"
	"sync"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// How many requests are answered at a time, and how many of one peer: a client may take as long as the server lets it
// to take an answer, so the memory for answers has a bound, of which no client has all.
const maxRequests, maxRequestsEach = 500, 250

// fair serves requests within the bounds, and refuses others with 503.
type fair struct {
	http.Handler

	mu  sync.Mutex
	all int
	of  map[spiffe.ID]int
}

// take counts n requests more of a peer, and reports whether there is room for them.
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
	if r.ProtoMajor == 2 { // until the client has taken the answer
		_ = http.NewResponseController(w).Flush()
	}
}
