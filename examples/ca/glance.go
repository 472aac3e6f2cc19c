package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/svidkit/svidkit/pki/ca"
)

// glance is a store as -status sees it: what the authority in this process would write down for itself
// and others stays in this process. Who only looks needs no right to write, and changes nothing.
type glance struct {
	ca.Store

	mu   sync.Mutex
	mine *ca.Record // what was not written; nil for none
	n    int
}

// Load implements [ca.Store].
func (g *glance) Load(ctx context.Context) (ca.Record, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mine != nil {
		return copied(*g.mine), nil
	}
	return g.Store.Load(ctx)
}

// Save implements [ca.Store].
func (g *glance) Save(ctx context.Context, r ca.Record) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mine == nil {
		there, err := g.Store.Load(ctx)
		switch {
		case err != nil && !errors.Is(err, ca.ErrNoRecord):
			return "", err
		case there.Version != r.Version:
			return "", fmt.Errorf("glance: %w", ca.ErrConflict)
		}
	} else if g.mine.Version != r.Version {
		return "", fmt.Errorf("glance: %w", ca.ErrConflict)
	}
	g.n++
	r = copied(r)
	r.Version = fmt.Sprintf("not written %d", g.n)
	g.mine = &r
	return r.Version, nil
}

// held reports whether something was not written.
func (g *glance) held() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mine != nil
}

func copied(r ca.Record) ca.Record {
	data := maps.Clone(r.Data)
	for name, b := range data {
		data[name] = bytes.Clone(b)
	}
	return ca.Record{Version: r.Version, Data: data}
}
