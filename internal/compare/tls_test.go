package compare

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// end is one side of a connection: who it is and whom it allows.
type end struct {
	self  *spiffe.SVID
	peers *spiffe.BundleSet
	allow spiffe.ID
}

func (e end) ours(t *testing.T, server bool) *tls.Config {
	t.Helper()
	endpoint, err := spiffetls.New(spiffetls.Config{Self: e.self, Peers: e.peers, Allow: spiffe.AllowIDs(e.allow)})
	require.NoError(t, err)
	config, err := endpoint.ClientConfig()
	if server {
		config, err = endpoint.ServerConfig()
	}
	require.NoError(t, err)
	return config
}

func (e end) peer(t *testing.T, server bool) *tls.Config {
	t.Helper()
	var self x509svid.Source = peerSVID(t, e.self)
	authorize := tlsconfig.AuthorizeID(peerID(e.allow))
	config := tlsconfig.MTLSClientConfig(self, peerBundles(t, e.peers), authorize)
	if server {
		config = tlsconfig.MTLSServerConfig(self, peerBundles(t, e.peers), authorize)
	}
	config.MinVersion = tls.VersionTLS13
	return config
}

// handshake connects both over TCP, sends a byte each way, and returns what each side saw.
func handshake(t *testing.T, server, client *tls.Config) (serverSaw, clientSaw *tls.ConnectionState, err error) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	echo := func(c *tls.Conn) (*tls.ConnectionState, error) {
		defer c.Close()
		if err := c.Handshake(); err != nil {
			return nil, err
		}
		_, err := c.Write([]byte{7})
		if err == nil {
			_, err = io.ReadFull(c, make([]byte, 1))
		}
		state := c.ConnectionState()
		return &state, err
	}
	type result struct {
		state *tls.ConnectionState
		err   error
	}
	done := make(chan result, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			done <- result{nil, err}
			return
		}
		state, err := echo(tls.Server(c, server))
		done <- result{state, err}
	}()
	raw := must.Get(net.Dial("tcp", l.Addr().String()))(t)
	clientSaw, err = echo(tls.Client(raw, client))
	r := <-done
	return r.state, clientSaw, errors.Join(err, r.err)
}

func TestMutualTLS(t *testing.T) {
	t.Parallel()
	here, there := newAuthority(t, "example.org"), newAuthority(t, "other.test")
	web := end{here.ca.SVID("/web"), here.snapshot(t, "/x", there).Bundles(), spiffe.MustParseID("spiffe://other.test/db")}
	db := end{there.ca.Intermediate().SVID("/db"), there.snapshot(t, "/x", here).Bundles(), web.self.ID()}
	stranger := end{there.ca.SVID("/stranger"), db.peers, web.self.ID()}
	forged := end{newAuthority(t, "other.test").ca.SVID("/db"), db.peers, web.self.ID()}

	for name, c := range map[string]struct{ server, client func(end) *tls.Config }{
		"svidkit serves": {
			func(e end) *tls.Config { return e.ours(t, true) }, func(e end) *tls.Config { return e.peer(t, false) },
		},
		"peer serves": {
			func(e end) *tls.Config { return e.peer(t, true) }, func(e end) *tls.Config { return e.ours(t, false) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			serverSaw, clientSaw, err := handshake(t, c.server(web), c.client(db))
			require.NoError(t, err)
			assert.Equal(t, uint16(tls.VersionTLS13), serverSaw.Version)
			assert.Equal(t, db.self.Leaf().Raw, serverSaw.PeerCertificates[0].Raw)
			assert.Equal(t, web.self.Leaf().Raw, clientSaw.PeerCertificates[0].Raw)

			for _, bad := range []end{stranger, forged} { // as client, and as server
				_, _, err = handshake(t, c.server(web), c.client(bad))
				assert.Error(t, err, "%v", bad.self)
				_, _, err = handshake(t, c.server(bad), c.client(web))
				assert.Error(t, err, "%v", bad.self)
			}
		})
	}
}
