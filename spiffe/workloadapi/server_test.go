package workloadapi_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conformance"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// listen runs a server until the test ends and returns its address.
func listen(t testing.TB, s *workloadapi.Server) (address string) {
	t.Helper()
	start(t, s)
	return s.Address
}

func start(t testing.TB, s *workloadapi.Server) (stop func() error) {
	t.Helper()
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel(errStop)
		select {
		case err := <-done:
			return err
		case <-time.After(patient):
			return errors.New("the server did not stop")
		}
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// listenTCP runs a server on a port of this machine that was free a moment ago, and is taken again at times.
func listenTCP(t testing.TB, host string, s *workloadapi.Server) (address string) {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		require.NoError(t, l.Close())
		s.Address = "tcp://" + net.JoinHostPort(host, port)
		if err = s.Listen(); !errors.Is(err, syscall.EADDRINUSE) {
			require.NoError(t, err)
			break
		}
	}
	return listen(t, s)
}

func TestServer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-2", "WEP-3", "WAPI-6", "WAPI-17")
	home := newDomain(t, "example.org")
	h := handler(t, workloadapi.Fixed(snapshot(t, home.SVID("/web"), home)), nil)
	path := filepath.Join(socketDir(t), "new", "s")
	address := "unix://" + path
	stop := start(t, &workloadapi.Server{Address: address, Handler: h})
	fi, err := os.Lstat(path)
	require.NoError(t, err)
	assert.Equal(t, fs.ModeSocket|0o600, fi.Mode())
	fi, err = os.Lstat(filepath.Dir(path))
	require.NoError(t, err)
	assert.Equal(t, fs.ModeDir|0o700, fi.Mode())
	err = (&workloadapi.Server{Address: address, Handler: h}).Run(t.Context())
	require.ErrorIs(t, err, workloadapi.ErrSocketInUse)
	assert.ErrorContains(t, err, address)

	s, err := workloadapi.New(workloadapi.Config{Address: address})
	require.NoError(t, err)
	run(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	require.NoError(t, s.Ready(ctx))

	// The server goes: the identity stays. It comes back: the stream is there again, soon.
	require.Equal(t, errStop, stop())
	_, err = os.Lstat(path)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.Eventually(t, func() bool { return !s.Status().X509.Open }, patient, time.Millisecond)
	_, err = s.SVID()
	require.NoError(t, err)
	start(t, &workloadapi.Server{Address: address, Handler: h, SocketMode: 0o666})
	require.Eventually(t, func() bool { return s.Status().X509.Updates == 2 }, patient, time.Millisecond)
	fi, err = os.Lstat(path)
	require.NoError(t, err)
	assert.Equal(t, fs.ModeSocket|0o666, fi.Mode())
}

func TestServerRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-4")
	home := newDomain(t, "example.org")
	h := handler(t, workloadapi.Fixed(snapshot(t, home.SVID("/web"), home)), nil)
	for want, s := range map[string]*workloadapi.Server{
		"Handler is nil":              {Address: "unix:///run/s"},
		"it is empty":                 {Handler: h},
		"write unix:///run/s":         {Address: "/run/s", Handler: h},
		"WEP-4":                       {Address: "tcp://0.0.0.0:8081", Handler: h},
		"AnyNetwork":                  {Address: "tcp://[::]:8081", Handler: h},
		"not a loopback":              {Address: "tcp://192.0.2.1:8081", Handler: h},
		"loopback or link-local":      {Address: "tcp://[::ffff:192.0.2.1]:8081", Handler: h},
		"the path has 300 bytes":      {Address: "unix:///" + strings.Repeat("x", 299), Handler: h},
		"permissions only, like 0750": {Address: "unix://" + filepath.Join(socketDir(t), "s"), Handler: h, SocketMode: fs.ModeSetuid},
	} {
		err := s.Listen()
		require.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "workloadapi: listen on ")
		assert.NotErrorIs(t, err, workloadapi.ErrSocketInUse)
	}
	// With the override it is bound, here to an address of this machine.
	listenTCP(t, "0.0.0.0", &workloadapi.Server{AnyNetwork: true, Handler: h})
	listenTCP(t, "127.0.0.1", &workloadapi.Server{Handler: h})
	var log syncBuffer
	dir := socketDir(t)
	require.NoError(t, os.Chmod(dir, 0o777))
	listen(t, &workloadapi.Server{Address: "unix://" + dir + "/s", Handler: h, Logger: textLogger(&log)})
	assert.Contains(t, log.String(), "may replace the socket")
}
