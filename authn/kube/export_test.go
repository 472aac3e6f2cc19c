package kube

import (
	"encoding/json"
	"strconv"
	"time"

	k8s "github.com/svidkit/svidkit/internal/kube"
)

// Judge reads an answer of a TokenReview and judges it, as Review does.
func Judge(answer []byte, token string, wanted []string) (*Account, error) {
	var r tokenReview
	if err := json.Unmarshal(answer, &r); err != nil {
		return nil, err
	}
	return r.Status.account(token, wanted)
}

func ParseUsername(s string) (namespace, name string, err error) { return k8s.ParseUser(s) }

// Remember puts n answers into the cache of r.
func (r *Reviewer) Remember(n int, a Account) {
	for i := range n {
		r.cache.put(cacheKey(strconv.Itoa(i), nil), a, nil, a.NotAfter)
	}
}

// Cached returns how many answers r remembers.
func (r *Reviewer) Cached() int {
	n := 0
	for range r.cache.entries.All() {
		n++
	}
	return n
}

// See has n look at places in its memory.
func (n *NodeAuthorizer) See(places int) {
	for i := range places {
		n.at(place{"n1", strconv.Itoa(i)})
	}
}

// Remembered returns how many places n remembers.
func (n *NodeAuthorizer) Remembered() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.nodes)
}

const (
	MaxCached = maxCached
	MaxNodes  = maxNodes
)

// RememberRefused puts n refusals into the memory of r.
func (r *Reviewer) RememberRefused(n int) {
	for i := range n {
		r.refused.put(cacheKey(strconv.Itoa(i), nil), Account{}, ErrInvalidToken, time.Now().Add(time.Second))
	}
}

// Refused returns how many refusals r remembers.
func (r *Reviewer) Refused() int {
	n := 0
	for range r.refused.entries.All() {
		n++
	}
	return n
}
