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

	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// A server that knows which user runs which workload.
func ExamplePeerFromContext() {
	workloads := map[uint32]string{uint32(os.Getuid()): "spiffe://example.org/web"}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := unixsocket.PeerFromContext(r.Context()); ok {
			fmt.Fprintln(w, "hello", workloads[peer.UID])
		}
	})

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
