package authn_test

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// A real peer, by the operator's rule or by its number.
func TestUnixPeer(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("peers are known on Linux")
	}
	l := must.Get(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	defer l.Close()
	client := must.Get(net.Dial("unix", l.Addr().String()))(t)
	defer client.Close()
	server, err := l.Accept()
	require.NoError(t, err)
	defer server.Close()
	r := httptest.NewRequestWithContext(unixsocket.ConnContext(t.Context(), server), http.MethodGet, "/", nil)

	web := spiffe.MustParseID("spiffe://example.org/web")
	denied := errors.New("not registered")
	uid := "uid:" + strconv.Itoa(os.Getuid())
	always := func(c *authn.Caller, err error) func(unixsocket.Peer) (*authn.Caller, error) {
		return func(unixsocket.Peer) (*authn.Caller, error) { return c, err }
	}
	for name, c := range map[string]struct {
		identity func(unixsocket.Peer) (*authn.Caller, error)
		want     *authn.Caller
	}{
		"no rule": {nil, &authn.Caller{Name: uid, Method: "unix-peer"}},
		"by the user": {func(p unixsocket.Peer) (*authn.Caller, error) {
			if int(p.UID) != os.Getuid() || int(p.GID) != os.Getgid() || int(p.PID) != os.Getpid() {
				return nil, denied
			}
			return &authn.Caller{ID: web, Method: "mine"}, nil
		}, &authn.Caller{ID: web, Method: "unix-peer"}},
		"another name":    {always(&authn.Caller{Name: "envoy"}, nil), &authn.Caller{Name: "envoy", Method: "unix-peer"}},
		"not known":       {always(nil, nil), &authn.Caller{Name: uid, Method: "unix-peer"}},
		"without a name":  {always(&authn.Caller{Method: "x"}, nil), &authn.Caller{Name: uid, Method: "unix-peer"}},
		"refused":         {always(nil, denied), nil},
		"refused, caller": {always(&authn.Caller{ID: web}, denied), nil},
	} {
		got, err := authn.UnixPeer(c.identity).Authenticate(r)
		assert.Equal(t, c.want, got, name)
		if c.want == nil {
			require.ErrorIs(t, err, authn.ErrRefused, name)
			require.ErrorIs(t, err, denied, name)
		}
	}
	_, err = authn.UnixPeer(func(unixsocket.Peer) (*authn.Caller, error) {
		t.Error("asked about no peer")
		return &authn.Caller{ID: web}, nil
	}).Authenticate(httptest.NewRequest(http.MethodGet, "/", nil))
	require.ErrorIs(t, err, authn.ErrNoCredential)
	require.NotErrorIs(t, err, authn.ErrRefused)
}
