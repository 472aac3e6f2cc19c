package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/programtest"
)

var update = flag.Bool("update", false, "write the table in README.md")

// environ returns a good environment with changes: names with their values, of which "" takes one away.
func environ(p *athenztest.Place, changes ...string) []string {
	return athenztest.Environ(map[string]string{
		"HEALTH_ADDR": "127.0.0.1:0", "MODE": "refresh", "ENDPOINT": "unix://" + p.Path("made/agent.sock"), "ID_FILE": p.Path("id"), "KEY_FILE": p.Path("made/service.key"),
		"CERT_FILE": p.Path("made/service.cert"), "CA_CERT_FILE": p.Path("made/cacert.pem"), "TOKEN_FILE": p.Path("made/ntoken"),
	}, changes...)
}

func TestCommand(t *testing.T) {
	t.Parallel()
	programtest.Command(t, daemon.Run, "athenz-sia", variables, *update)
}

// Each bad value is told by its variable, before anything is made.
func TestRefuses(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	for _, c := range []struct{ changes, want []string }{
		{[]string{"MODE=loop"}, []string{"MODE", "init, refresh"}},
		{[]string{"ENDPOINT=/agent.sock"}, []string{"ENDPOINT", "unix:///"}},
		{[]string{"ENDPOINT=tcp://127.0.0.1:1"}, []string{"ENDPOINT"}},
		{[]string{"KEY_FILE=/elsewhere/service.key"}, []string{"KEY_FILE", "one directory"}},
		{[]string{"REFRESH_INTERVAL=59s"}, []string{"REFRESH_INTERVAL", "a minute"}},
		{[]string{"REFRESH_INTERVAL=hourly"}, []string{"REFRESH_INTERVAL"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a program that does not refuse it
		err := daemon.Run(ctx, nil, environ(p, c.changes...), io.Discard, io.Discard)
		cancel()
		require.ErrorAs(t, err, new(program.UsageError), c.changes)
		for _, want := range c.want {
			require.ErrorContains(t, err, want, c.changes)
		}
		assert.NotContains(t, err.Error(), "TOP-SECRET", c.changes)
		assert.NoDirExists(t, p.Path("made"), c.changes)
	}
}

// A sidecar without an agent is alive, and not ready.
func TestSidecar(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	at := programtest.Serve(t, daemon.Run, environ(p), io.Discard, 1)
	code, text := programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "identity")
	code, _ = programtest.Get(t, at, "/live")
	assert.Equal(t, http.StatusOK, code)
	_, text = programtest.Get(t, at, "/metrics")
	metricstest.Require(t, text)
	assert.Contains(t, text, `svidkit_athenz_sidecar_ready{part="identity"} 0`)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := daemon.Run(ctx, nil, environ(p, "MODE=init"), io.Discard, io.Discard)
	require.Error(t, err, "an init container that has no identity does not say that all is well")
}

// Whatever the reason is: a program that is told to stop and does has not failed.
func TestStop(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	require.NoError(t, daemon.Run(ctx, nil, environ(p), programtest.Writer(func(string) { cancel(errors.New("enough")) }), io.Discard))
	require.Error(t, ctx.Err())
}

// A directory that this user may not write to can never have an identity: the start ends, and says what helps.
func TestClosedFolder(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"init", "refresh"} {
		err := daemon.Run(t.Context(), nil, []string{"MODE=" + mode, "KEY_FILE=/sys/k.pem", "CERT_FILE=/sys/c.pem", "CA_CERT_FILE=/sys/ca.pem", "HEALTH_ADDR=off"}, io.Discard, io.Discard)
		require.ErrorContains(t, err, fmt.Sprintf("let user %d write to it", os.Getuid()))
		assert.NotErrorAs(t, err, new(program.UsageError))
	}
}
