package main

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A tunnel ends when nothing has come for an hour in either direction, and not before.
func TestIdleTunnel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, c := net.Pipe()
		app, a := net.Pipe()
		ended := make(chan struct{})
		go func() {
			relay(t.Context(), c, a)
			close(ended)
		}()
		begin := time.Now()
		for range 5 {
			time.Sleep(50 * time.Minute)
			_, err := app.Write([]byte("x"))
			require.NoError(t, err)
			_, err = client.Read(make([]byte, 1))
			require.NoError(t, err)
		}
		<-ended
		assert.Equal(t, 5*50*time.Minute+time.Hour, time.Since(begin))
		_, err := client.Read(make([]byte, 1))
		require.Error(t, err)
	})
}

// A flood of events with one reason has one line in a minute.
func TestWarnings(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		w := warnings{log: slog.New(slog.NewTextHandler(&log, nil))}
		for range 100 {
			w.warn("refused", "it is bad")
			w.warn("refused", "it is worse")
		}
		assert.Equal(t, 2, strings.Count(log.String(), "\n"))
		time.Sleep(time.Minute)
		w.warn("refused", "it is bad")
		assert.Equal(t, 3, strings.Count(log.String(), "\n"))
		assert.Contains(t, log.String(), "left_out=99")
	})
}
