package sdstest_test

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"net/http"
	"sync"
	"testing"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdstest"
)

// source is a source that a suite fills.
type source struct {
	mu      sync.Mutex
	secrets map[string]*pki.Secret
	changed func(string)
}

func (s *source) GenerateSecret(_ context.Context, name string) (*pki.Secret, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if secret := s.secrets[name]; secret != nil {
		return secret, nil
	}
	return nil, fmt.Errorf("%q: %w", name, fs.ErrNotExist)
}

func (s *source) Subscribe(f func(string)) func() {
	s.changed = f
	return func() {}
}

func (s *source) set(name string, secret *pki.Secret) {
	s.mu.Lock()
	s.secrets[name] = secret
	s.mu.Unlock()
	s.changed(name)
}

// start starts our server.
func start(t testing.TB, o sdstest.Options) *sdstest.Server {
	src := &source{secrets: make(map[string]*pki.Secret)}
	h := must.Get(sds.NewHandler(src, &sds.Options{MaxNames: o.MaxNames}))(t)
	l, protocols := memconn.Listen(), new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: h, Protocols: protocols} // a test
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		_ = h.Close()
		_ = srv.Close()
		<-done
	})
	c := &http.Client{Transport: &http.Transport{Protocols: protocols, DialContext: l.DialContext}}
	return &sdstest.Server{Client: c, URL: "http://localhost", Set: src.set}
}

var long = flag.Bool("long", false, "play ten times as many random scripts")

// Our server agrees with the model.
func TestRunModel(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	seeds := rounds.Of(32) * rounds.Of(1)
	if rounds.Race {
		seeds *= 4
	}
	if *long {
		seeds = 5000
	}
	sdstest.RunModel(t, start, seeds)
}

// Our server passes its own suite.
func TestRun(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-8.3-1", "IST-8.3-2", "IST-8.3-4", "IST-8.4-1", "IST-8.4-2", "IST-8.4-3", "IST-8.4-4",
		"IST-8.4-5", "IST-8.5-2", "IST-8.5-3", "IST-8.3-9", "IST-8.4-6", "IST-8.4-7", "IST-8.4-8")
	sdstest.Run(t, start)
}
