package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// workload is a service whose identity renews itself.
type workload struct {
	name     string
	id       spiffe.ID
	manager  *secretcache.Manager
	renewals atomic.Int64
}

// startWorkload starts a workload's SecretManager and waits for the first identity.
func startWorkload(g *group, n *narrator, issuer issuer, name string, lifetime time.Duration) (*workload, error) {
	id, err := trustDomain.WorkloadID("ns", "demo", "sa", name)
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
	// A real service would wait without a limit.
	ctx, cancel := context.WithTimeoutCause(g.ctx, 30*time.Second,
		errors.New("no identity within 30s; is the CA there?"))
	defer cancel()
	if err := w.manager.Ready(ctx); err != nil {
		return nil, err
	}
	g.run("narration of "+name, func(ctx context.Context) error { return w.narrate(ctx, n) })
	return w, nil
}

// narrate describes each new identity.
func (w *workload) narrate(ctx context.Context, n *narrator) error {
	var old *spiffe.SVID
	for {
		changed := w.manager.Changed() // before reading, so that no change is missed
		if snap, err := w.manager.Snapshot(); err == nil {
			old = w.describe(n, snap, old)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// describe describes the identity of snap unless it equals old, and returns it.
func (w *workload) describe(n *narrator, snap *spiffe.Snapshot, old *spiffe.SVID) *spiffe.SVID {
	svid, err := snap.SVID()
	if err != nil || svid == old {
		return old
	}
	e := event{Who: w.name, What: "issued", ID: svid.ID().String(), Serial: short(svid.Leaf()),
		NotAfter: svid.NotAfter()}
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
	return svid
}

// traffic counts the requests from frontend to backend.
type traffic struct {
	done, failed atomic.Int64
	first        atomic.Pointer[string] // the first failure
}

// verdict returns an error if a handshake failed.
func (t *traffic) verdict() error {
	if first := t.first.Load(); first != nil {
		return fmt.Errorf("%d of %d handshakes failed, the first %s", t.failed.Load(), t.failed.Load()+t.done.Load(),
			*first)
	}
	return nil
}

// startTraffic serves the backend and sends it requests from the frontend, each with a new handshake.
func startTraffic(g *group, n *narrator, frontend, backend *workload) (*traffic, error) {
	// The server admits only the frontend.
	server := &http.Server{Handler: http.HandlerFunc(hello), ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout: time.Minute}
	serving, err := spiffetls.New(spiffetls.Config{Self: backend.manager, Peers: backend.manager,
		Allow: spiffe.AllowIDs(frontend.id)})
	if err != nil {
		return nil, err
	}
	if err := serving.ConfigureServer(server); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	g.run("backend", func(context.Context) error {
		if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})

	// The client accepts only the backend.
	asking, err := spiffetls.New(spiffetls.Config{Self: frontend.manager, Peers: frontend.manager,
		Allow: spiffe.AllowIDs(backend.id)})
	if err != nil {
		return nil, err
	}
	config, err := asking.ClientConfig()
	if err != nil {
		return nil, err
	}
	client := &http.Client{
		Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true},
		Timeout:   5 * time.Second,
	}
	t := new(traffic)
	g.run("traffic", func(ctx context.Context) error {
		defer server.Close()
		report := time.Tick(2 * time.Second)
		for tick := time.Tick(20 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				return nil
			case <-report:
				n.status(progress{t.done.Load(), t.failed.Load()})
				continue
			case <-tick:
			}
			// Requests ignore ctx, so that the end of the run is no failure.
			err := get(client, "https://"+listener.Addr().String(), "hello "+frontend.id.String())
			if err == nil {
				t.done.Add(1)
				continue
			}
			t.failed.Add(1)
			text := fmt.Sprintf("at %.1fs: %v", time.Since(n.start).Seconds(), err)
			t.first.CompareAndSwap(nil, &text)
			n.say(event{Who: "traffic", What: "failed", Detail: err.Error()})
		}
	})
	return t, nil
}

// hello answers with the name of the client.
func hello(w http.ResponseWriter, r *http.Request) {
	peer, ok := spiffetls.PeerFromContext(r.Context())
	if !ok {
		http.Error(w, "the client is not authenticated", http.StatusForbidden) // the handshake prevents it
		return
	}
	fmt.Fprintf(w, "hello %s", peer.ID())
}

func get(client *http.Client, url, want string) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err != nil {
		return err
	}
	if string(body) != want {
		return fmt.Errorf("status %d, body %q", resp.StatusCode, body)
	}
	return nil
}
