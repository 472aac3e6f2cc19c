package kubesecrets

import (
	"context"
	"encoding/json"
	"time"

	"github.com/svidkit/svidkit/pki"
)

// MaxCallers is how many callers are known at a time, and MaxCallersEach how many of one namespace.
const (
	MaxCallers     = maxCallers
	MaxCallersEach = maxCallersEach
)

// WithMaxBytes returns a Config with another bound of all Secrets.
func (c Config) WithMaxBytes(n int) Config {
	c.maxBytes = n
	return c
}

// Places returns how many of them are taken.
func (s *Source) Places() int { return s.access.places.Held() }

// Parse parses a name.
func Parse(name string) (namespace, secret string, roots bool, err error) {
	k, roots, err := parse(name)
	return k.namespace, k.name, roots, err
}

// Taken returns a Source that was sent a Secret.
func Taken(object []byte) *Source {
	s, err := New(Config{Namespace: "gw", APIServer: "https://127.0.0.1"})
	if err != nil {
		panic(err)
	}
	var d document
	if err := json.Unmarshal(object, &d); err != nil {
		panic(err)
	}
	s.take(context.Background(), &d, &changes{})
	return s
}

// Lookup returns what a name of a Secret has.
func (s *Source) Lookup(name string) (*pki.Secret, error) {
	k, roots, err := parse(name)
	if err != nil {
		return nil, err
	}
	return s.lookup(k, roots)
}

// Status is the state of a Source at one moment.
type Status struct {
	Err                              error
	Secrets, Bytes, Refused, Callers int
}

// Status returns the state of s.
func (s *Source) Status() Status {
	callers := s.access.places.Held()
	s.mu.Lock()
	defer s.mu.Unlock()
	return Status{s.err, len(s.objects), s.used, len(s.crowded), callers}
}

// SecretStatus is the state of one Secret.
type SecretStatus struct {
	Pair, Roots             bool // in use
	PairErr, RootsErr, Note error
	PairEnd, RootsEnd       time.Time
}

// SecretStatus returns the state of one Secret.
func (s *Source) SecretStatus(namespace, name string) (st SecretStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.objects[key{namespace, name}]; o != nil {
		st = SecretStatus{o.pair.secret != nil, o.roots.secret != nil, o.pair.err, o.roots.err, o.roots.note,
			o.pair.end(), o.roots.end()}
	}
	return st
}
