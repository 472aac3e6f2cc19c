package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// errOver ends the show when its time is over.
var errOver = errors.New("the show is over")

// patience is how long a workload waits for its first identity. A service would wait for as long as it
// takes; here somebody watches.
const patience = 30 * time.Second

var errLate = fmt.Errorf("no identity within %v; is the CA there?", patience)

// group runs services until its context ends; one that ends before ends all.
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
	g.run(name+" narration", func(ctx context.Context) error {
		w.narrate(ctx, n)
		return nil
	})
	return w, nil
}

// narrate tells of each new identity.
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
		if root := signer(snap, svid); root != "" {
			e.Detail = "by root " + root
		}
		n.say(e)
		old = svid
	}
}

// signer returns the serial number of the root that signed svid.
func signer(snap *spiffe.Snapshot, svid *spiffe.SVID) string {
	bundle, err := snap.Bundle(svid.ID().TrustDomain())
	if err != nil {
		return ""
	}
	for root := range bundle.X509Authorities() {
		if svid.Leaf().CheckSignatureFrom(root) == nil {
			return short(root)
		}
	}
	return ""
}

// rotation tells of the four steps in which a root is replaced.
type rotation struct {
	n         *narrator
	authority *ca.Authority
	workloads []*workload
	complete  atomic.Int64 // rotations whose old root is gone
}

func (r *rotation) run(ctx context.Context) error {
	known := map[string]ca.Phase{short(r.authority.Roots()[0].Certificate): ca.Active}
	for {
		changed := r.authority.Changed() // taken before the state is read, so that no change is missed
		now := map[string]ca.Phase{}
		for _, root := range slices.Backward(r.authority.Roots()) { // newest first
			serial := short(root.Certificate)
			now[serial] = root.Phase
			if root.Phase == known[serial] {
				continue
			}
			switch root.Phase {
			case ca.Distributing:
				r.n.say(event{Who: "ca", What: "root prepared", Serial: serial, Detail: "it is in the bundle, and signs nothing yet"})
				r.distributed(ctx, root)
			case ca.Active:
				r.n.say(event{Who: "ca", What: "root activated", Serial: serial, Detail: "it signs every leaf from now on"})
			case ca.Retiring:
				r.n.say(event{Who: "ca", What: "root retiring", Serial: serial, Detail: "it waits for its last leaf to expire"})
			}
		}
		for serial := range known {
			if _, ok := now[serial]; !ok {
				r.complete.Add(1)
				r.n.say(event{Who: "ca", What: "root retired", Serial: serial, Detail: "it is in no bundle any more"})
			}
		}
		known = now
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// every begins a rotation after each interval, until ctx is done.
func (r *rotation) every(ctx context.Context, interval time.Duration) error {
	for tick := time.NewTicker(interval); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return nil
		case <-tick.C:
			r.begin(ctx)
		}
	}
}

// distributed waits until every workload trusts root, or its time to sign has come.
func (r *rotation) distributed(ctx context.Context, root ca.KeyStatus) {
	ctx, cancel := context.WithDeadline(ctx, root.Activates)
	defer cancel()
	for _, w := range r.workloads {
		for !w.trusts(root.Certificate) {
			changed := w.manager.Changed()
			if w.trusts(root.Certificate) {
				break
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
	r.n.say(event{Who: "ca", What: "root distributed", Serial: short(root.Certificate),
		Detail: fmt.Sprintf("every workload trusts it; it signs from %s", root.Activates.Local().Format("15:04:05"))})
}

func (w *workload) trusts(root *x509.Certificate) bool {
	bundle, err := w.manager.Bundle(trustDomain)
	return err == nil && slices.ContainsFunc(slices.Collect(bundle.X509Authorities()), root.Equal)
}

// begin prepares a new root; the other steps follow by time.
func (r *rotation) begin(ctx context.Context) {
	if _, err := r.authority.Rotate(ctx); err != nil {
		r.n.say(event{Who: "ca", What: "root not rotated", Detail: err.Error()})
	}
}

// short is the beginning of a certificate's serial number, enough to tell them apart.
func short(c *x509.Certificate) string { return fmt.Sprintf("%032x", c.SerialNumber)[:8] }

// traffic is the stream of requests from frontend to backend.
type traffic struct {
	done, failed atomic.Int64
	first        atomic.Pointer[string] // the first failure
	over         chan struct{}          // closed after the last request
}

func (t *traffic) fail(n *narrator, err error) {
	t.failed.Add(1)
	text := fmt.Sprintf("at %.1fs: %v", time.Since(n.start).Seconds(), err)
	t.first.CompareAndSwap(nil, &text)
	n.say(event{Who: "traffic", What: "failed", Detail: err.Error()})
}

// verdict is an error if a handshake failed.
func (t *traffic) verdict() error {
	if first := t.first.Load(); first != nil {
		return fmt.Errorf("%s failed, the first %s", plural(t.failed.Load(), "handshake"), *first)
	}
	return nil
}

func plural(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
