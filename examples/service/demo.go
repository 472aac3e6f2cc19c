package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// withAgent calls f while an agent serves the Workload API at socket: a certificate authority, a
// SecretManager that renews one identity with it, and a server on a Unix socket.
func withAgent(outer context.Context, f func(ctx context.Context, socket string) error) error {
	ctx, cancel := context.WithCancelCause(outer)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	service := func(name string, run func(context.Context) error) {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				cancel(fmt.Errorf("%s: %w", name, err))
			}
		})
	}

	id := spiffe.MustParseID("spiffe://example.org/ns/demo/sa/service")
	authority, err := ca.New(ca.Config{
		TrustDomain: id.TrustDomain(),
		DefaultTTL:  4 * time.Second,
		MaxTTL:      4 * time.Second,
		Backdate:    time.Second,
	})
	if err != nil {
		return err
	}
	issuer, err := local.New(authority, id)
	if err != nil {
		return err
	}
	manager, err := secretcache.New(secretcache.Config{ID: id, CA: issuer})
	if err != nil {
		return err
	}
	handler, err := workloadserver.NewHandler(manager, nil)
	if err != nil {
		return err
	}
	defer handler.Close()
	dir, err := os.MkdirTemp("", "svidkit")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	server := &unixsocket.Server{Path: filepath.Join(dir, "api.sock"), Handler: handler}
	if err := server.Listen(); err != nil {
		return err
	}
	service("certificate authority", authority.Run)
	service("SecretManager", manager.Run)
	service("Workload API", server.Run)
	if err := manager.Ready(ctx); err != nil { // otherwise an early client would have to retry
		return err
	}
	err = f(ctx, "unix:///"+strings.TrimPrefix(filepath.ToSlash(server.Path), "/")) // on Windows there is no slash
	if ctx.Err() != nil && outer.Err() == nil {
		return context.Cause(ctx) // a service ended too early
	}
	return err
}
