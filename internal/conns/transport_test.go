package conns_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
)

// What is under way at a Close ends, and a request that follows is served by a new connection. That none finds a connection that is
// being closed, TestCloseAndSign of caclient/linkerd shows.
func TestTransport(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			protocols := new(http.Protocols)
			protocols.SetHTTP1(version == "HTTP/1.1")
			protocols.SetUnencryptedHTTP2(version == "HTTP/2")
			begun := make(chan struct{})
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/hang" {
					close(begun)
					<-r.Context().Done()
				}
			}))
			s.Config.Protocols = protocols
			s.Start()
			t.Cleanup(s.Close)
			transport := conns.NewTransport(new(net.Dialer).DialContext, func(dial conns.Dial) *http.Transport {
				return &http.Transport{DialContext: dial, Protocols: protocols}
			})
			t.Cleanup(transport.Close)
			client := &http.Client{Transport: transport}
			get := func(path string) error {
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+path, nil)
				if err != nil {
					return err
				}
				response, err := client.Do(r)
				if err != nil {
					return err
				}
				return response.Body.Close()
			}
			for range 50 {
				require.NoError(t, get("/"))
				transport.Close()
			}
			failed := make(chan error, 1)
			go func() { failed <- get("/hang") }()
			<-begun
			transport.Close()
			err := <-failed
			require.Error(t, err)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			require.NoError(t, get("/"))
		})
	}
	(*conns.Transport)(nil).Close()
}
