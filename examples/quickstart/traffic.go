package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// startTraffic serves the backend and lets the frontend ask it, with a new handshake each time.
func startTraffic(g *group, n *narrator, frontend, backend *workload) (*traffic, error) {
	t := &traffic{over: make(chan struct{})}

	// The server: whoever is not the frontend does not get past the handshake.
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			peer, ok := spiffetls.PeerFromRequest(r)
			if !ok {
				http.Error(w, "who are you?", http.StatusForbidden)
				return
			}
			fmt.Fprintf(w, "hello %s", peer.ID())
		}),
		ReadHeaderTimeout: 5 * time.Second,
	}
	if err := spiffetls.ConfigureServer(server, backend.manager, backend.manager, spiffe.AllowIDs(frontend.id), nil); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	g.run("backend server", func(ctx context.Context) error {
		stop := context.AfterFunc(ctx, func() {
			<-t.over // the last request is answered first
			_ = server.Close()
		})
		defer stop()
		if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})

	// The client: it takes no other server than the backend.
	config, err := spiffetls.ClientConfig(frontend.manager, frontend.manager, spiffe.AllowIDs(backend.id), nil)
	if err != nil {
		return nil, err
	}
	client := &http.Client{
		Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true},
		Timeout:   5 * time.Second,
	}
	url := "https://" + listener.Addr().String()
	want := "hello " + frontend.id.String()
	g.run("traffic", func(ctx context.Context) error {
		defer close(t.over)
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return nil
			case <-tick.C:
			}
			// A request that was begun may end, so that the end of the show is no failure.
			if err := get(context.WithoutCancel(ctx), client, url, want); err != nil {
				t.fail(n, err)
				continue
			}
			t.done.Add(1)
		}
	})
	g.run("live line", func(ctx context.Context) error {
		every := 2 * time.Second
		if n.live {
			every = 200 * time.Millisecond
		}
		for tick := time.NewTicker(every); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return nil
			case <-tick.C:
				n.status(progress{t.done.Load(), t.failed.Load()})
			}
		}
	})
	return t, nil
}

func get(ctx context.Context, client *http.Client, url, want string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
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
