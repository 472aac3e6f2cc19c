package auditlog_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

// A change of keys is a line of the same chain.
func TestKeyEvents(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	l := open(t, path, nil, nil)
	event := fullEvent()
	for i, v := 0, reflect.ValueOf(*event); i < v.NumField(); i++ {
		require.False(t, v.Field(i).IsZero(), "the event must have %s", v.Type().Field(i).Name)
	}
	require.NoError(t, l.Record(t.Context(), record("1")))
	require.NoError(t, l.RecordKeyEvent(t.Context(), event))
	require.NoError(t, l.RecordKeyEvent(t.Context(), &ca.KeyEvent{Detail: "\xff\n"}))
	require.NoError(t, l.Record(t.Context(), record("2")))
	require.Equal(t, []string{"1", "tainted 5d1cwhy", "\uFFFD", "2"}, contents(t, path))

	text := must.Get(os.ReadFile(path))(t)
	lines := strings.Split(string(text), "\n")
	want := `{"time":"2026-01-02T03:04:05.678Z","event":"tainted","key":"root","serial":"5d1c","not_after":"2026-01-02T03:04:05Z",` +
		`"fingerprint":"00ff","successor":"77","detail":"why","uid":"1000","host":"h","command":"ca -taint 5d1c","prev":"`
	assert.Equal(t, want, lines[1][:len(want)])
	var got ca.KeyEvent
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &got))
	require.Equal(t, *event, got)
	require.NoError(t, auditlog.Verify(io.Discard, "", "", bytes.NewReader(text)))
	for _, change := range [][2]string{{`"event":"tainted",`, ``}, {`"5d1c","not`, `"5d1d","not`}, {`,"uid":"1000"`, ``}, {`"host":"h"`, `"host":"h","x":1`}} {
		require.Contains(t, lines[1], change[0])
		changed := bytes.Replace(text, []byte(change[0]), []byte(change[1]), 1)
		require.Error(t, auditlog.Verify(io.Discard, "", "", bytes.NewReader(changed)), change[0])
	}
	require.ErrorContains(t, l.RecordKeyEvent(t.Context(), &ca.KeyEvent{Event: "revoked", Detail: strings.Repeat("x", 65_536)}), `event "revoked"`)
}

// Err knows a full disk without a record to write, and when there is room again.
func TestErr(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		path := logPath(t)
		var full atomic.Bool
		writes, syncs := 0, 0
		l := open(t, path, nil, &auditlog.Faults{
			Write: func(p []byte) (int, error) {
				writes++
				if full.Load() {
					return 0, syscall.ENOSPC
				}
				return len(p), nil
			},
			Sync: func() error { syncs++; return nil },
		})
		require.NoError(t, l.Err())
		time.Sleep(2 * time.Second)
		full.Store(true)
		err := l.Err()
		require.ErrorIs(t, err, syscall.ENOSPC, "though no record was refused yet")
		require.ErrorContains(t, err, path)
		w, s := writes, syncs
		for range 1000 {
			require.ErrorIs(t, l.Err(), syscall.ENOSPC)
		}
		require.Equal(t, [2]int{w, s}, [2]int{writes, syncs}, "the disk is left alone")
		require.ErrorIs(t, l.Record(t.Context(), record("no")), syscall.ENOSPC)
		full.Store(false)
		time.Sleep(time.Second)
		require.NoError(t, l.Err(), "by itself")
		require.NoError(t, l.Record(t.Context(), record("1")))
		w, s = writes, syncs
		require.NoError(t, l.Err())
		require.Equal(t, [2]int{w, s}, [2]int{writes, syncs}, "the record says it")

		// Another one fills the disk between records.
		full.Store(true)
		require.ErrorIs(t, l.Record(t.Context(), record("no")), syscall.ENOSPC)
		require.ErrorIs(t, l.Err(), syscall.ENOSPC)
		full.Store(false)
		time.Sleep(time.Second)
		require.NoError(t, l.Record(t.Context(), record("2")))
		require.NoError(t, l.Err())
		require.NoError(t, l.Close())
		require.ErrorIs(t, l.Err(), os.ErrClosed)
		require.Equal(t, []string{"1", "2"}, contents(t, path))
	})
}

// Err does not wait for a disk that hangs, and says so when that takes long.
func TestErrHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		gate, hangs := make(chan struct{}), false
		l := open(t, logPath(t), nil, &auditlog.Faults{Sync: func() error {
			if hangs {
				<-gate
			}
			return nil
		}})
		hangs = true
		done := make(chan error, 1)
		go func() { done <- l.Record(t.Context(), record("1")) }()
		synctest.Wait()
		for range 10 {
			require.NoError(t, l.Err())
			time.Sleep(time.Second)
		}
		time.Sleep(time.Second)
		require.ErrorContains(t, l.Err(), "has not answered for 11s")
		close(gate)
		require.NoError(t, <-done)
		require.NoError(t, l.Err())
	})
}

// A file that others can write to or read is complained of, once; one of another user is refused.
func TestModesAreComplainedOf(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("no modes")
	}
	for mode, want := range map[os.FileMode]string{
		0o600: "", 0o640: "", 0o660: "", 0o644: "chmod o-r", 0o666: "chmod o-w", 0o777: "chmod o-w", 0o602: "chmod o-w",
	} {
		var log bytes.Buffer
		path := logPath(t)
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		require.NoError(t, os.Chmod(path, mode))
		l := open(t, path, slog.New(slog.NewTextHandler(&log, nil)), nil)
		require.NoError(t, l.Reopen())
		require.NoError(t, l.Record(t.Context(), record("1")))
		if want == "" {
			assert.Empty(t, log.String(), "%v", mode)
			continue
		}
		assert.Equal(t, 1, strings.Count(log.String(), "level=WARN"), "%v: %s", mode, log.String())
		assert.Contains(t, log.String(), want, "%v", mode)
		assert.Contains(t, log.String(), path)
	}
	// An emptyDir of Kubernetes.
	var log bytes.Buffer
	path := logPath(t)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o777))
	l := open(t, path, slog.New(slog.NewTextHandler(&log, nil)), nil)
	require.NoError(t, l.Record(t.Context(), record("1")))
	assert.Contains(t, log.String(), "chmod o-w")
	if os.Geteuid() != 0 {
		return
	}
	for _, of := range []string{path, filepath.Dir(path)} {
		require.NoError(t, os.Chown(of, 54321, -1))
		require.ErrorContains(t, l.Reopen(), "belongs to user 54321")
		require.Error(t, l.Record(t.Context(), record("no")))
		_, err := auditlog.Open(path, nil)
		require.ErrorContains(t, err, fmt.Sprintf("run: chown 0 %q", of))
		require.NoError(t, os.Chown(of, 0, -1))
	}
	require.NoError(t, l.Reopen())
	require.NoError(t, l.Record(t.Context(), record("2")))
}

// A process that holds the lock on the file makes records fail, and keeps none waiting for ever.
func TestLockIsHeld(t *testing.T) {
	t.Parallel()
	if !flock.Supported {
		t.Skip("no flock on this system")
	}
	synctest.Test(t, func(t *testing.T) {
		path := logPath(t)
		l := open(t, path, nil, nil)
		other := must.Get(os.Open(path))(t) // a process that may read it may lock it
		defer other.Close()
		require.NoError(t, flock.Lock(other))
		begin := time.Now()
		require.ErrorContains(t, l.Record(t.Context(), record("no")), "another process holds its lock")
		require.Less(t, time.Since(begin), time.Minute)
		require.ErrorContains(t, l.Err(), "another process holds its lock")
		require.NoError(t, flock.Unlock(other))
		require.NoError(t, l.Record(t.Context(), record("1")))

		// Err waits for it no longer than a second.
		require.NoError(t, flock.Lock(other))
		time.Sleep(2 * time.Second)
		for range 5 {
			begin := time.Now()
			require.NoError(t, l.Err(), "what it knew")
			require.LessOrEqual(t, time.Since(begin), time.Second)
			time.Sleep(time.Second)
		}
		time.Sleep(5 * time.Second)
		require.Error(t, l.Err(), "the lock, or that it has not answered for 10 seconds")
		require.NoError(t, flock.Unlock(other))
	})
}
