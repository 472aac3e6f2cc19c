package sdstest_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/unixsocket"
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

// start starts our server on a Unix socket.
func start(t testing.TB, o sdstest.Options) *sdstest.Server {
	src := &source{secrets: make(map[string]*pki.Secret)}
	h, err := sds.NewHandler(src, &sds.Options{Wildcard: o.Wildcard, MaxNames: o.MaxNames})
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "sds") // short enough for a socket
	require.NoError(t, err)
	s := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: h}
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Run(ctx)
	}()
	c := sds.UnixClient(s.Path)
	t.Cleanup(func() {
		_ = h.Close()
		c.CloseIdleConnections()
		cancel()
		<-done
		_ = os.RemoveAll(dir)
	})
	return &sdstest.Server{Client: c, URL: "http://localhost", Set: src.set}
}

// Our server passes its own suite.
func TestRun(t *testing.T) {
	t.Parallel()
	sdstest.Run(t, start)
}
