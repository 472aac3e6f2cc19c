package unixsocket_test

import (
	"errors"
	"io"
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
	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/spiffe"
)

// A real peer, by the operator's rule or by its number.
func TestAuthenticator(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("peers are known on Linux")
	}
	web := spiffe.MustParseID("spiffe://example.org/web")
	denied := errors.New("not registered")
	uid := "uid:" + strconv.Itoa(os.Getuid())
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
		"another name":    {func(unixsocket.Peer) (*authn.Caller, error) { return &authn.Caller{Name: "envoy"}, nil }, &authn.Caller{Name: "envoy", Method: "unix-peer"}},
		"not known":       {func(unixsocket.Peer) (*authn.Caller, error) { return nil, nil }, &authn.Caller{Name: uid, Method: "unix-peer"}},
		"without a name":  {func(unixsocket.Peer) (*authn.Caller, error) { return &authn.Caller{Method: "x"}, nil }, &authn.Caller{Name: uid, Method: "unix-peer"}},
		"refused":         {func(unixsocket.Peer) (*authn.Caller, error) { return nil, denied }, nil},
		"refused, caller": {func(unixsocket.Peer) (*authn.Caller, error) { return &authn.Caller{ID: web}, denied }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := unixsocket.Authenticator(c.identity)
			var refused error
			judge := authn.Func(func(r *http.Request) (*authn.Caller, error) {
				got, err := a.Authenticate(r)
				refused = err
				return got, err
			})
			path := filepath.Join(socketDir(t), "s.sock")
			serve(t, &unixsocket.Server{Path: path, Handler: authn.Require(judge, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				got, _ := authn.CallerFromContext(r.Context())
				assert.Equal(t, c.want, got)
				_, _ = io.WriteString(w, "hello")
			}), nil)})
			if c.want != nil {
				assert.Equal(t, "hello", hears(t, path, true))
				return
			}
			assert.Equal(t, "Unauthorized\n", hears(t, path, true))
			require.ErrorIs(t, refused, authn.ErrRefused)
			require.ErrorIs(t, refused, denied)
		})
	}
	_, err := unixsocket.Authenticator(func(unixsocket.Peer) (*authn.Caller, error) {
		t.Error("asked about no peer")
		return &authn.Caller{ID: web}, nil
	}).Authenticate(httptest.NewRequest(http.MethodGet, "/", nil))
	require.ErrorIs(t, err, authn.ErrNoCredential)
	require.NotErrorIs(t, err, authn.ErrRefused)
}

func BenchmarkAuthenticator(b *testing.B) {
	l, err := net.Listen("unix", filepath.Join(socketDir(b), "s.sock"))
	require.NoError(b, err)
	defer l.Close()
	client, err := net.Dial("unix", l.Addr().String())
	require.NoError(b, err)
	defer client.Close()
	server, err := l.Accept()
	require.NoError(b, err)
	defer server.Close()
	r := httptest.NewRequestWithContext(unixsocket.ConnContext(b.Context(), server), http.MethodGet, "/", nil)
	a := unixsocket.Authenticator(nil)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := a.Authenticate(r); err != nil {
			b.Skip(err)
		}
	}
}
