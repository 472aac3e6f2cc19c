package unixsocket_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/spiffe"
)

// An agent that knows which user runs which workload.
func ExampleAuthenticator() {
	workloads := map[uint32]spiffe.ID{uint32(os.Getuid()): spiffe.MustParseID("spiffe://example.org/web")}
	who := unixsocket.Authenticator(func(p unixsocket.Peer) (*authn.Caller, error) {
		if id, ok := workloads[p.UID]; ok {
			return &authn.Caller{ID: id}, nil
		}
		return nil, nil // a caller by its number, "uid:1001"
	})
	handler := authn.Require(who, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, _ := authn.CallerFromContext(r.Context())
		fmt.Fprintln(w, "hello", caller)
	}), nil)

	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	server := &unixsocket.Server{Path: filepath.Join(dir, "agent.sock"), Handler: handler}
	if err := server.Listen(); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Run(ctx) })
	defer wg.Wait()
	defer cancel()

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", server.Path)
	}}}
	resp, err := client.Get("http://localhost/")
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	fmt.Print(string(text))
	// Output: hello spiffe://example.org/web
}
