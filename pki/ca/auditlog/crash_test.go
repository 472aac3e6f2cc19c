package auditlog_test

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

var long = flag.Bool("long", false, "run the crash test 1,000 times")

// childPath is set in the processes that the crash test starts.
const childPath = "SVIDKIT_AUDITLOG_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childPath); path != "" {
		child(path)
		return
	}
	os.Exit(m.Run())
}

// child records without end and prints each serial once its record is said to be durable.
func child(path string) {
	l, err := auditlog.Open(path, nil)
	if err != nil {
		fmt.Println("error", err)
		return
	}
	var mu sync.Mutex
	for w := range 8 {
		go func() {
			for n := 0; ; n++ {
				i := record(fmt.Sprint(os.Getpid(), ".", w, ".", n))
				i.Caller = strings.Repeat("x", rand.IntN(2000))
				err := l.Record(context.Background(), i)
				mu.Lock()
				if err != nil {
					fmt.Println("error", err)
				}
				fmt.Println(i.Serial)
				mu.Unlock()
			}
		}()
	}
	time.Sleep(time.Minute) // the parent kills it before
}

// A process that is killed at any moment loses no record that it was promised, and what comes after
// it is not harmed by what it left behind.
func TestKill(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	kills := rounds.Of(3)
	if *long {
		kills = 1000
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	promised := make(map[string]bool)
	for range kills {
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), childPath+"="+path)
		out := must.Get(cmd.StdoutPipe())(t)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(out)
		var kill *time.Timer
		for lines.Scan() {
			if kill == nil { // it is up
				kill = time.AfterFunc(rand.N(60*time.Millisecond), func() { _ = cmd.Process.Kill() })
			}
			require.NotContains(t, lines.Text(), "error")
			promised[lines.Text()] = true
		}
		require.Error(t, cmd.Wait())
	}
	require.Greater(t, len(promised), kills)

	l := must.Get(auditlog.Open(path, nil))(t) // which ends the last line
	require.NoError(t, l.Close())
	torn := 0
	for _, serial := range contents(t, path) {
		require.False(t, strings.HasPrefix(serial, "chain"), serial)
		if serial == "torn" {
			torn++
		}
		delete(promised, serial)
	}
	require.Empty(t, promised, "promised, and not there")
	require.LessOrEqual(t, torn, kills)
}
