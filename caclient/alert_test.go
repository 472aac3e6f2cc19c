package caclient_test

import (
	"crypto/tls"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestHTTPClientAlert: a client that the CA refuses is told so by its alert, however quick it is to write, and whatever it writes.
func TestHTTPClientAlert(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	host := spiffetest.NewCA(t, "server.test")
	dir := folder(t, host)
	chain, key := host.Certificate("/known")
	writePair(t, dir, chain, key)
	anonymous := caclient.TLSOptions{RootsFile: filepath.Join(dir, "root-cert.pem"), ServerName: "ca.test"}
	refuse := func(tls.ConnectionState) error { return errors.New("revoked") }
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, protos := range [][]string{{"h2"}, {"http/1.1"}} {
		for says, o := range map[string]caclient.TLSOptions{"certificate required": anonymous, "bad certificate": in(dir)} {
			s := startTLS(t, host, func(c *tls.Config) {
				c.NextProtos, c.ClientAuth = protos, tls.RequireAnyClientCert
				c.VerifyConnection = refuse
			})
			wg.Go(func() {
				for i := range rounds.Of(10) {
					size := []int{1 << 10, 0}[i%2] // one write
					if protos[0] == "h2" {
						size <<= 10
					}
					c, err := caclient.NewHTTPClient(o)
					if !assert.NoError(t, err) {
						return
					}
					resp, err := c.Post(s.url, "", strings.NewReader(strings.Repeat("x", size)))
					assert.ErrorContains(t, err, "remote error: tls: "+says)
					if err == nil {
						_ = resp.Body.Close()
					}
					c.CloseIdleConnections()
				}
			})
		}
	}
}
