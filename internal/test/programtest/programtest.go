// Package programtest builds the programs of the directory examples and runs them as a user does.
package programtest

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// patience is for what a program is to do soon.
const patience = time.Minute

// Build builds the programs with these names, and returns the directory that they are in. It skips the test as
// [rounds.Slow] does, and where there is no signal to stop a program by.
func Build(t testing.TB, names ...string) (dir string) {
	t.Helper()
	rounds.Slow(t)
	if runtime.GOOS == "windows" {
		t.Skip("there are no signals to stop a program by")
	}
	dir = t.TempDir()
	args := []string{"build", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)} // which links faster
	for _, name := range names {
		args = append(args, "github.com/svidkit/svidkit/examples/"+name)
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return dir
}

// Program is a program that runs.
type Program struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines chan string
	addrs map[string]string
	stop  func()
}

// Start runs a program with this environment and no other variables until Stop is called or the test ends. Its logs
// go to log; if that is nil, they are shown if the test fails. What it prints are lines of a name and an address; see
// [Program.Addr].
func Start(t testing.TB, path string, log io.Writer, environ []string, args ...string) *Program {
	t.Helper()
	p := &Program{t: t, cmd: exec.Command(path, args...), lines: make(chan string, 100), addrs: map[string]string{}}
	if log == nil {
		logs := new(Log)
		log = logs
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("%s:\n%s", filepath.Base(path), logs.String())
			}
		})
	}
	p.cmd.Env, p.cmd.Stderr = environ, log
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case p.lines <- s.Text():
			default: // a program that runs for long prints more than a test looks at
			}
		}
	}()
	p.stop = sync.OnceFunc(func() {
		_ = p.cmd.Process.Signal(os.Interrupt) // it may have ended
		late := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
		defer late.Stop()
		<-read // before Wait, which closes the pipe
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("%s has ended: %v", filepath.Base(path), err)
		}
	})
	t.Cleanup(p.stop)
	return p
}

// Addr returns the address that the program has printed with a name, once it has.
func (p *Program) Addr(name string) string {
	p.t.Helper()
	for late := time.After(patience); p.addrs[name] == ""; {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.stop()
				p.t.Fatalf("the program has ended before it has printed %s", name)
			}
			if name, addr, ok := strings.Cut(line, ": "); ok {
				p.addrs[name] = addr
			}
		case <-late:
			p.t.Fatalf("the program does not print %s", name)
		}
	}
	return p.addrs[name]
}

// PID returns the number of the process.
func (p *Program) PID() int { return p.cmd.Process.Pid }

// Stop tells the program to stop, and waits for it. That it ends well is required.
func (p *Program) Stop() { p.stop() }

// Run runs a program to its end, which is to come soon.
func Run(t testing.TB, path string, log io.Writer, environ []string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Stderr = environ, log
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v", filepath.Base(path), err)
	}
}

// ExitCodes requires that the programs in a directory end with 0 for -version and -help, and with 2 for what is wrong
// with an argument or with a variable of theirs.
func ExitCodes(t *testing.T, dir string, programs map[string]string) {
	t.Helper()
	for name, variable := range programs {
		for _, c := range []struct {
			environ, args []string
			code          int
		}{{nil, []string{"-version"}, 0}, {nil, []string{"-help"}, 0}, {nil, []string{"-none"}, 2}, {nil,
			[]string{"none"}, 2}, {[]string{variable}, nil, 2}} {
			cmd := exec.CommandContext(t.Context(), filepath.Join(dir, name), c.args...)
			cmd.Env = append(c.environ, "GODEBUG=") // or else it is that of the test
			var out, errOut strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &errOut
			_ = cmd.Run()
			if got := cmd.ProcessState.ExitCode(); got != c.code {
				t.Errorf("%s %v %v ends with %d and not with %d:\n%s%s", name, c.args, c.environ, got, c.code,
					out.String(), errOut.String())
			}
			if slices.Contains(c.args, "-help") {
				Help(t, out.String(), errOut.String())
			}
		}
	}
}

// Help requires that what a program has printed for -h is on standard output alone, in lines of at most 80
// characters, with a title over each flag, and with the exit codes at its end.
func Help(t *testing.T, out, errOut string) {
	t.Helper()
	if errOut != "" || !strings.HasPrefix(out, "Usage: ") || !strings.Contains(out, "xit code") {
		t.Errorf("the help begins with Usage and ends with the exit codes, and is on standard output alone:\n%s\n%s",
			out, errOut)
	}
	titled := false
	for line := range strings.Lines(out) {
		if utf8.RuneCountInString(line) > 80+1 && strings.Contains(strings.TrimSpace(line), " ") {
			t.Errorf("more than 80 columns: %s", line)
		}
		switch {
		case strings.HasPrefix(line, "  -") && !titled:
			t.Errorf("no title is over %s", line)
		case strings.HasSuffix(line, ":\n") && line[0] != ' ':
			titled = true
		}
	}
}

// Log keeps what programs log, and may be used by several at once.
type Log struct{ logtest.Buffer }

// Healthy ends the test if the programs have warned of something by now.
func (l *Log) Healthy(t testing.TB) {
	t.Helper()
	for line := range strings.Lines(l.String()) {
		for _, level := range []string{"level=WARN", "level=ERROR", `"level":"WARN"`, `"level":"ERROR"`} {
			if strings.Contains(line, level) {
				t.Fatalf("a program warns, and all is well: %s", line)
			}
		}
	}
}
