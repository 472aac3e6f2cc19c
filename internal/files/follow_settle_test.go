package files_test

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// A notification between two changes of one set has the files read again, and not taken sooner: that they are as they were a
// moment ago says nothing of the writer.
func TestFollowNotificationIsNoAgreement(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	put := func(name, text string) {
		require.NoError(t, os.WriteFile(name+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(name+".new", name))
	}
	put(cert, "0")
	put(key, "0")
	var mixed atomic.Int64
	var last atomic.Pointer[string]
	f := follow.New([]string{cert, key}, func(_ context.Context, files follow.Files) error {
		have := string(files[key].Data)
		if string(files[cert].Data) != have {
			mixed.Add(1)
		}
		last.Store(&have)
		return nil
	}, &follow.Options{Open: openFile})
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, f.Read(ctx))
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(ctx) }()
	defer func() { cancel(); <-done }()
	tried := 0
	for n := 1; tried < 4 && n < 40; n++ {
		text, before, begun := string(rune('0'+n)), mixed.Load(), time.Now()
		put(cert, text)
		for range 2 {
			time.Sleep(20 * time.Millisecond)
			put(cert, text) // as it is
		}
		time.Sleep(20 * time.Millisecond)
		put(key, text)
		if time.Since(begun) < 80*time.Millisecond { // the machine did not stand still
			tried++
			assert.Equal(t, before, mixed.Load(), "files of two versions were taken")
		}
		require.Eventually(t, func() bool { return *last.Load() == text }, time.Minute, time.Millisecond)
	}
	assert.Positive(t, tried)
}
