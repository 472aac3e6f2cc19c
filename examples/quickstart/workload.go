package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// patience is how long a workload waits for its first identity. A service would wait for as long as it takes.
const patience = 30 * time.Second

var errLate = fmt.Errorf("no identity within %v; is the CA there?", patience)

// group runs services until its context ends. The first that fails ends all.
type group struct {
	ctx  context.Context
	fail context.CancelCauseFunc
	wg   sync.WaitGroup
}

func (g *group) run(name string, f func(context.Context) error) {
	g.wg.Go(func() {
		if err := f(g.ctx); err != nil && g.ctx.Err() == nil {
			g.fail(fmt.Errorf("%s: %w", name, err))
		}
	})
}

func (g *group) wait() { g.wg.Wait() }

// workload is a service with an identity that renews itself.
type workload struct {
	name     string
	id       spiffe.ID
	manager  *secretcache.Manager
	renewals atomic.Int64
}

// startWorkload gives a workload its SecretManager and waits for the first identity.
func startWorkload(g *group, n *narrator, issuer issuer, name string, lifetime time.Duration) (*workload, error) {
	id, err := trustDomain.KubernetesID("demo", name)
	if err != nil {
		return nil, err
	}
	from, err := issuer(id)
	if err != nil {
		return nil, err
	}
	w := &workload{name: name, id: id}
	w.manager, err = secretcache.New(secretcache.Config{ID: id, CA: from, Lifetime: lifetime})
	if err != nil {
		return nil, err
	}
	g.run(name, w.manager.Run)
	ctx, cancel := context.WithTimeoutCause(g.ctx, patience, errLate)
	defer cancel()
	if _, err := w.manager.GenerateSecret(ctx, "default"); err != nil {
		return nil, err
	}
	g.run("narration of "+name, func(ctx context.Context) error {
		w.narrate(ctx, n)
		return nil
	})
	return w, nil
}

// narrate describes each new identity.
func (w *workload) narrate(ctx context.Context, n *narrator) {
	var old *spiffe.SVID
	for snap := range w.manager.Updates(ctx) {
		svid, err := snap.SVID()
		if err != nil || svid == old {
			continue
		}
		e := event{Who: w.name, What: "issued", ID: svid.ID().String(), Serial: short(svid.Leaf()), NotAfter: svid.NotAfter()}
		if old != nil {
			w.renewals.Add(1)
			e.What, e.ID = "renewed", ""
		}
		if bundle, err := snap.Bundle(trustDomain); err == nil {
			for root := range bundle.X509Authorities() {
				if svid.Leaf().CheckSignatureFrom(root) == nil {
					e.Detail = "by root " + short(root)
				}
			}
		}
		n.say(e)
		old = svid
	}
}
