package auditlog_test

import (
	"bytes"
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

	text, err := os.ReadFile(path)
	require.NoError(t, err)
	lines := strings.Split(string(text), "\n")
	want := `{"time":"2026-01-02T03:04:05.678Z","event":"tainted","key":"root","serial":"5d1c","not_after":"2026-01-02T03:04:05Z",` +
		`"fingerprint":"00ff","successor":"77","detail":"why","uid":"1000","host":"h","command":"ca -taint 5d1c","prev":"`
	assert.Equal(t, want, lines[1][:len(want)])
	var got []auditlog.Entry
	for e, err := range auditlog.Read(bytes.NewReader(text)) {
		require.NoError(t, err)
		got = append(got, e)
	}
	require.Equal(t, event, got[1].KeyEvent)
	require.Nil(t, got[1].Issuance)

	for _, change := range [][2]string{{`"event":"tainted",`, ``}, {`"5d1c","not`, `"5d1d","not`}, {`,"uid":"1000"`, ``}, {`"host":"h"`, `"host":"h","x":1`}} {
		require.Contains(t, lines[1], change[0])
		changed := bytes.Replace(text, []byte(change[0]), []byte(change[1]), 1)
		wrong := 0
		for _, err := range auditlog.Read(bytes.NewReader(changed)) {
			if err != nil {
				wrong++
			}
		}
		require.NotZero(t, wrong, change[0])
	}
	require.ErrorContains(t, l.RecordKeyEvent(t.Context(), &ca.KeyEvent{Event: "revoked", Detail: strings.Repeat("x", 65_536)}), `event "revoked"`)
}

// writeAway writes n records into files of one record each, the last of which is the present one.
func writeAway(t *testing.T, l *auditlog.Log, from, n int) {
	t.Helper()
	for i := range n {
		require.NoError(t, l.Record(t.Context(), record(fmt.Sprint(from+i))))
	}
}

// The oldest full files go when they are more than KeepSize, and the log says which. The rest is a chain.
func TestKeepSize(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	keep := &auditlog.Options{MaxSize: 1, KeepSize: 1200}
	l := open(t, path, keep, nil)
	writeAway(t, l, 1, 20)
	left := files(t, path)
	all := contents(t, left...)
	require.Equal(t, "20", all[len(all)-1])
	require.NotContains(t, strings.Join(all, "|"), "chain")
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	total := int64(0)
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		if e.Name() != "audit.jsonl" {
			total += info.Size()
		}
	}
	require.LessOrEqual(t, total, int64(1200))
	require.GreaterOrEqual(t, len(entries), 3)
	require.FileExists(t, path)

	// Less than one file: the newest stays, so that the chain goes on, also in another process.
	require.NoError(t, l.Close())
	l = open(t, path, &auditlog.Options{MaxSize: 1, KeepSize: 1}, nil)
	writeAway(t, l, 21, 3)
	require.NoError(t, l.Close())
	require.NoError(t, open(t, path, keep, nil).Record(t.Context(), record("24")))
	entries, err = os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 3)
	var names []string
	for _, e := range entries[:2] {
		names = append(names, filepath.Join(filepath.Dir(path), e.Name()))
	}
	got := strings.Join(contents(t, append(names, path)...), "|")
	require.NotContains(t, got, "chain")
	require.Regexp(t, `^(removed audit-.*\|)?22\|removed audit-[^|]*\|23\|24$`, got)
}

// What is left of a log that removes files is whole, from the line after them to the one that the Log has at its end; without its
// first line it is not.
func TestVerifyKept(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	l := open(t, path, &auditlog.Options{MaxSize: 700, KeepSize: 2000}, nil)
	require.Equal(t, strings.Repeat("0", 64), l.End())
	for i := range 40 {
		require.NoError(t, l.Record(t.Context(), record(fmt.Sprint(i))))
		ends := l.End()
		verify := func(cut int) (string, error) {
			paths, err := auditlog.Files(path)
			require.NoError(t, err)
			var all []io.Reader
			for i, p := range paths {
				text, err := os.ReadFile(p)
				require.NoError(t, err)
				if i == 0 {
					text = bytes.Join(bytes.SplitAfter(text, []byte("\n"))[cut:], nil)
				}
				all = append(all, bytes.NewReader(text))
			}
			var out strings.Builder
			err = auditlog.Verify(&out, ends, all...)
			return out.String(), err
		}
		out, err := verify(0)
		require.NoError(t, err, out)
		require.Contains(t, out, "is here, and 0 after it")
		if i > 30 {
			require.Contains(t, out, "where the files end that the log has removed itself")
			out, err = verify(1)
			require.ErrorContains(t, err, "places: 1", out)
		}
	}
	require.NoError(t, l.Close())
	paths, err := auditlog.Files(path)
	require.NoError(t, err)
	require.Greater(t, len(paths), 2)
	require.Equal(t, path, paths[len(paths)-1])
}

// keptFiles returns a folder with full files whose last records are of some days ago, and the path of their log.
func keptFiles(t *testing.T, days ...int) (path string, full []string) {
	path = logPath(t)
	l := open(t, path, &auditlog.Options{MaxSize: 1}, nil)
	writeAway(t, l, 1, len(days)+1)
	require.NoError(t, l.Close())
	full = files(t, path)
	full = full[:len(full)-1]
	require.Len(t, full, len(days))
	for i, d := range days {
		at := time.Now().Add(-time.Duration(d) * 24 * time.Hour)
		require.NoError(t, os.Chtimes(full[i], at, at))
	}
	return path, full
}

// Full files go when their last record is older than KeepAge; never the present file, the newest full one, and what
// only has such a name.
func TestKeepAge(t *testing.T) {
	t.Parallel()
	path, full := keptFiles(t, 40, 31, 29, 31, 50)
	old := time.Now().Add(-100 * 24 * time.Hour)
	require.NoError(t, os.Chtimes(path, old, old))
	notOurs := filepath.Join(filepath.Dir(path), "audit-20000101.1.jsonl")
	require.NoError(t, os.WriteFile(notOurs, []byte("notes of the operator\n"), 0o600))
	require.NoError(t, os.Chtimes(notOurs, old, old))
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "audit-20000101.1.jsonl.gz"), nil, 0o600))
	l := open(t, path, &auditlog.Options{KeepAge: 30 * 24 * time.Hour}, nil)
	for i, name := range full {
		_, err := os.Stat(name)
		assert.Equal(t, i == 2 || i == 4, err == nil, "%d: %v", i, err)
	}
	assert.FileExists(t, notOurs)
	assert.FileExists(t, notOurs+".gz")
	require.NoError(t, l.Record(t.Context(), record("7")))
	got := contents(t, path)
	require.Len(t, got, 3, "%q", got)
	for _, i := range []int{0, 1, 3} {
		assert.Contains(t, got[1], filepath.Base(full[i]))
	}
	assert.NotContains(t, got[1], filepath.Base(full[2]))

	// It is looked at again while there are records, and not each time.
	require.NoError(t, os.Chtimes(full[2], old, old))
	require.NoError(t, l.Record(t.Context(), record("8")))
	assert.FileExists(t, full[2])
	require.NoError(t, l.Close())
	open(t, path, &auditlog.Options{KeepAge: 30 * 24 * time.Hour}, nil)
	assert.NoFileExists(t, full[2])
}

// An hour later it is looked at again.
func TestKeepAgeLater(t *testing.T) {
	t.Parallel()
	path, full := keptFiles(t, 0, 0)
	synctest.Test(t, func(t *testing.T) {
		at := time.Now().Add(-24 * time.Hour) // in the time of the test
		for _, name := range full {
			require.NoError(t, os.Chtimes(name, at, at))
		}
		l := open(t, path, &auditlog.Options{KeepAge: 24*time.Hour + time.Minute}, nil)
		time.Sleep(59 * time.Minute)
		require.NoError(t, l.Record(t.Context(), record("4")))
		require.FileExists(t, full[0])
		time.Sleep(2 * time.Minute)
		require.NoError(t, l.Record(t.Context(), record("5")))
		require.NoFileExists(t, full[0])
		require.FileExists(t, full[1])
	})
}

// Many files at once are named in more than one line, and none makes a line too long.
func TestKeepManyFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, strings.Repeat("a", 200)+".jsonl")
	line, err := auditlog.Line(auditlog.Entry{Issuance: record("1")}, [32]byte{})
	require.NoError(t, err)
	const many = 500
	for i := range many {
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-20200101.%d.jsonl", strings.Repeat("a", 200), i+1)), []byte(line+"\n"), 0o600))
	}
	l := open(t, path, &auditlog.Options{KeepSize: 1}, nil)
	for i := range 20 {
		require.NoError(t, l.Record(t.Context(), record(fmt.Sprint(i))))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, many-1, strings.Count(string(text), "-20200101."))
	assert.NotContains(t, strings.Join(contents(t, path), "|"), "chain")
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

// On a real disk: a full one, where the system has such a file, and a folder that is gone.
func TestErrOnDisk(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "log")
	require.NoError(t, os.Mkdir(dir, 0o700))
	path := filepath.Join(dir, "audit.jsonl")
	l, err := auditlog.OpenHasty(path)
	require.NoError(t, err)
	defer l.Close()
	require.NoError(t, l.Err())
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing is left lying about")
	require.NoError(t, os.RemoveAll(dir))
	require.Eventually(t, func() bool { return l.Err() != nil }, time.Minute, 20*time.Millisecond)
	require.ErrorIs(t, l.Err(), os.ErrNotExist)
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.Eventually(t, func() bool { return l.Err() == nil }, time.Minute, 20*time.Millisecond)
	require.NoError(t, l.Record(t.Context(), record("1")))
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
		o := &auditlog.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
		l := open(t, path, o, nil)
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
	l := open(t, path, &auditlog.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, nil)
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
		other, err := os.Open(path) // a process that may read it may lock it
		require.NoError(t, err)
		defer other.Close()
		require.NoError(t, flock.Lock(other))
		begin := time.Now()
		require.ErrorContains(t, l.Record(t.Context(), record("no")), "another process holds its lock")
		require.Less(t, time.Since(begin), time.Minute)
		require.ErrorContains(t, l.Err(), "another process holds its lock")
		require.NoError(t, flock.Unlock(other))
		time.Sleep(time.Second)
		require.NoError(t, l.Err())
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
		require.ErrorContains(t, l.Err(), "another process holds its lock")
		require.NoError(t, flock.Unlock(other))
	})
}
