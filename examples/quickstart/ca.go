package main

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// issuer returns the CA for one workload.
type issuer func(id spiffe.ID) (caclient.CA, error)

// newIssuer returns the CA at o.ca, or a new one in this process, which it also returns.
func newIssuer(n *narrator, o options) (issuer, *ca.Authority, error) {
	if o.ca != "" {
		from, err := outside(o)
		return from, nil, err
	}
	authority, err := ca.New(ca.Config{
		TrustDomain: trustDomain,
		DefaultTTL:  o.lifetime,
		MaxTTL:      o.lifetime,
		Backdate:    time.Second,
		RefreshHint: time.Second,
		// a new root is published for this long before it signs
		Rotation: ca.Rotation{Propagation: max(o.lifetime*2/5, time.Second)},
	})
	if err != nil {
		return nil, nil, err
	}
	root := authority.Status().Roots[0].Certificate
	n.say(event{Who: "ca", What: "root created", Serial: short(root), NotAfter: root.NotAfter})
	return inside(authority), authority, nil
}

// inside asks the CA in this process, which signs for the ID given to local.New, whatever name a request has.
func inside(authority *ca.Authority) issuer {
	return func(id spiffe.ID) (caclient.CA, error) { return local.New(authority, id) }
}

// outside asks the CA at o.ca. The token is the secret of examples/ca in development mode, kept beside its roots,
// followed by the workload's name; in a cluster it would be a service account token.
func outside(o options) (issuer, error) {
	if _, err := os.Stat(o.caRoots); err != nil { // now, rather than with the first connection
		return nil, err
	}
	return func(id spiffe.ID) (caclient.CA, error) {
		return istioca.New(istioca.Options{Endpoint: caclient.Endpoint{
			URL:         o.ca,
			TrustDomain: trustDomain,
			RootsFile:   o.caRoots, // vouch for workloads, and for the CA itself
			// each time, as a CA that is started again has another secret
			Token: func(context.Context) (string, error) {
				secret, err := os.ReadFile(filepath.Join(filepath.Dir(o.caRoots), "token-secret"))
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return "", err
				}
				return strings.TrimPrefix(string(secret)+":"+id.String(), ":"), nil
			},
		}})
	}, nil
}

// rotation is the replacement of the root.
type rotation struct {
	n         *narrator
	authority *ca.Authority
	workloads []*workload
	complete  atomic.Int64 // rotations whose old root is gone
}

// begin prepares a new root, once or, with -serve, again and again. The other steps follow by time.
func (r *rotation) begin(ctx context.Context, o options) error {
	wait := cmp.Or(o.every, o.duration*3/10)
	if o.serve {
		wait = cmp.Or(o.every, 6*o.lifetime)
	}
	for {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
		if _, err := r.authority.Rotate(ctx); err != nil {
			r.n.say(event{Who: "ca", What: "root not rotated", Detail: err.Error()})
		}
		if !o.serve {
			return nil
		}
	}
}

// narrate describes the four steps.
func (r *rotation) narrate(ctx context.Context) error {
	steps := map[string]event{
		"distributing": {What: "root prepared", Detail: "it is in the bundle, and signs nothing yet"},
		"active":       {What: "root activated", Detail: "it signs every leaf from now on"},
		"retiring":     {What: "root retiring", Detail: "it waits for its last leaf to expire"},
	}
	known := map[string]string{short(r.authority.Status().Roots[0].Certificate): "active"}
	for {
		changed := r.authority.Changed() // before the state is read, so that no change is missed
		now := map[string]string{}
		for _, root := range slices.Backward(r.authority.Status().Roots) { // newest first
			e := steps[root.Phase]
			e.Who, e.Serial = "ca", short(root.Certificate)
			if now[e.Serial] = root.Phase; root.Phase == known[e.Serial] {
				continue
			}
			if r.n.say(e); root.Phase == "distributing" {
				r.distributed(ctx, root)
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

// distributed waits until every workload trusts root, or its time to sign has come.
func (r *rotation) distributed(ctx context.Context, root ca.KeyStatus) {
	ctx, cancel := context.WithDeadline(ctx, root.Activates)
	defer cancel()
	for _, w := range r.workloads {
		for ctx.Err() == nil {
			changed := w.manager.Changed() // before reading, so that no change is missed
			if b, err := w.manager.Bundle(trustDomain); err == nil &&
				slices.ContainsFunc(slices.Collect(b.X509Authorities()), root.Certificate.Equal) {
				break
			}
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}
	if ctx.Err() == nil {
		r.n.say(event{Who: "ca", What: "root distributed", Serial: short(root.Certificate),
			Detail: fmt.Sprintf("every workload trusts it; it signs from %s",
				root.Activates.UTC().Format("15:04:05Z"))})
	}
}

// short is the beginning of a certificate's serial number, enough to tell it from others.
func short(c *x509.Certificate) string { return fmt.Sprintf("%032x", c.SerialNumber)[:8] }
