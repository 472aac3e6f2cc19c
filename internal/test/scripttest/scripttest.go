// Package scripttest runs scripts of an operator's day: commands, what they print, and how they end. A script is a
// file of package testscript, whose commands it may use beside these:
//
//	flags PROGRAM [FLAG …]       give these flags to each later run of the program, before those that the script has
//	serve [-as NAME] [VARIABLE=VALUE …] PROGRAM [ARGUMENT …]   start a server, and wait until it is ready
//	quit [NAME]                  end it as a signal does; it must end in order
//	crash [NAME]                 kill it
//	exits CODE PROGRAM …         run a command that ends with the code; a failure of ca or agent is one line
//	remedy                       run the command that the last error names after "run: "
//	set VARIABLE PATTERN         set a variable to what the group of the pattern with its name, or else the first,
//	                             finds in the last output
//	until PATTERN PROGRAM …      repeat a command until it prints the pattern
//	await PATTERN FILE           wait until a file, as the log of a server is one, has the pattern
//	get URL                      print an answer of HTTP, after its status
//	record STORE DIRECTORY       write the items of a CA's record to files in a directory
//
// A server that has no other name is server: its standard output is in the file server.out, and its log in
// server.err. The ports of a ca are free ones unless flags name others. The variables ISTIO, LINKERD, BUNDLE and
// ADMIN are their addresses; DIR is the directory of a CA that no flag names.
package scripttest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/svidkit/svidkit/internal/test/programtest"
)

const patience = 2 * time.Minute

// ready is what a server prints at last.
var ready = map[string]string{"ca": "metrics, health:", "agent": "secrets for Envoy:"}

// Run runs each script in the directory as a parallel subtest, with the programs of the directory examples that have these
// names.
func Run(t *testing.T, dir string, programs ...string) {
	t.Helper()
	bin := programtest.Build(t, programs...)
	root, err := os.MkdirTemp(short(), "svid") // sockets are made below it, and their paths have 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	testscript.Run(t, testscript.Params{
		Dir:                dir,
		WorkdirRoot:        root,
		RequireUniqueNames: true,
		Deadline:           time.Now().Add(5 * time.Minute), // for a command that serves where the script has an error
		Setup: func(e *testscript.Env) error {
			home := filepath.Join(e.WorkDir, "home")
			e.Setenv("HOME", home)
			e.Setenv("DIR", filepath.Join(home, ".local/state/svidkit-ca/cluster.local"))
			e.Setenv("PATH", bin+string(filepath.ListSeparator)+e.Getenv("PATH"))
			e.Values[servers{}], e.Values[usual{}] = map[string]*server{}, map[string][]string{}
			return os.Mkdir(home, 0o700)
		},
		Cmds: commands(programs),
	})
}

// short is the directory for temporary files, by its short name where it has one.
func short() string {
	if info, err := os.Stat("/tmp"); err == nil && info.IsDir() {
		return "/tmp"
	}
	return os.TempDir()
}

// commands are those of scripts, to which the programs belong.
func commands(programs []string) map[string]func(*testscript.TestScript, bool, []string) {
	all := map[string]func(*testscript.TestScript, bool, []string){
		"flags":  flags,
		"serve":  serve,
		"quit":   func(ts *testscript.TestScript, _ bool, args []string) { end(ts, args, syscall.SIGTERM) },
		"crash":  func(ts *testscript.TestScript, _ bool, args []string) { end(ts, args, syscall.SIGKILL) },
		"exits":  exits,
		"remedy": remedy,
		"set":    set,
		"until":  until,
		"await":  await,
		"get":    get,
		"record": record,
	}
	for _, name := range programs {
		all[name] = func(ts *testscript.TestScript, not bool, args []string) {
			if err := run(ts, name, args...); (err != nil) != not {
				ts.Fatalf("%s: %v", name, err)
			}
		}
	}
	return all
}

// usual is the key of the flags that each run of a program gets, by its name.
type usual struct{}

func flags(ts *testscript.TestScript, _ bool, args []string) {
	ts.Value(usual{}).(map[string][]string)[args[0]] = args[1:]
}

// run runs a program of the script, or any other one.
func run(ts *testscript.TestScript, name string, args ...string) error {
	return ts.Exec(name, arguments(ts, name, args)...)
}

// arguments returns args after the usual ones, and after free ports for a ca, as scripts run at once.
func arguments(ts *testscript.TestScript, program string, args []string) []string {
	all := slices.Concat(ts.Value(usual{}).(map[string][]string)[program], args)
	if program != "ca" {
		return all
	}
	return append([]string{"-istio-addr=127.0.0.1:0", "-linkerd-addr=127.0.0.1:0", "-bundle-addr=127.0.0.1:0",
		"-admin-addr=127.0.0.1:0"}, all...)
}

// servers is the key of the servers of a script, by their names.
type servers struct{}

type server struct {
	cmd  *exec.Cmd
	done chan struct{} // closed after its end
	err  error         // of Wait, after done
}

func all(ts *testscript.TestScript) map[string]*server {
	return ts.Value(servers{}).(map[string]*server)
}

func serve(ts *testscript.TestScript, _ bool, args []string) {
	name, environ := "server", []string(nil)
	if len(args) > 2 && args[0] == "-as" {
		name, args = args[1], args[2:]
	}
	for len(args) > 0 && strings.Contains(args[0], "=") {
		environ, args = append(environ, args[0]), args[1:]
	}
	if len(args) == 0 || ready[args[0]] == "" {
		ts.Fatalf("usage: serve [-as NAME] [VARIABLE=VALUE …] ca|agent [ARGUMENT …]")
	}
	program, args := args[0], args[1:]
	out, err := os.Create(ts.MkAbs(name + ".out"))
	ts.Check(err)
	defer out.Close()
	errOut, err := os.Create(ts.MkAbs(name + ".err"))
	ts.Check(err)
	defer errOut.Close()
	s := &server{cmd: command(ts, program, args...), done: make(chan struct{})}
	s.cmd.Env, s.cmd.Stdout, s.cmd.Stderr = append(s.cmd.Env, environ...), out, errOut
	ts.Check(s.cmd.Start())
	go func() {
		s.err = s.cmd.Wait()
		close(s.done)
	}()
	all(ts)[name] = s
	ts.Defer(func() {
		_ = s.cmd.Process.Kill()
		<-s.done
	})
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		ended := false
		select {
		case <-s.done:
			ended = true
		default:
		}
		printed := ts.ReadFile(name + ".out")
		if _, rest, ok := strings.Cut(printed, ready[program]); ok && strings.Contains(rest, "\n") {
			addresses(ts, printed)
			return
		}
		if ended || time.Now().After(deadline) {
			ts.Fatalf("%s is not ready:\n%s%s", program, printed, ts.ReadFile(name+".err"))
		}
	}
}

// addresses sets the variables with the ports that a server has printed.
func addresses(ts *testscript.TestScript, printed string) {
	for variable, line := range map[string]string{"ISTIO": "Istio's API:", "LINKERD": "Linkerd's API:",
		"BUNDLE": "bundle endpoint:", "ADMIN": "metrics, health:", "AGENT": "status page:"} {
		if m := regexp.MustCompile(regexp.QuoteMeta(line) + ` *https?://([^/\s]*)`).FindStringSubmatch(
			printed); m != nil {
			ts.Setenv(variable, m[1])
		}
	}
}

// command returns a program of the script as a process.
func command(ts *testscript.TestScript, program string, args ...string) *exec.Cmd {
	bin, _, _ := strings.Cut(ts.Getenv("PATH"), string(filepath.ListSeparator))
	cmd := exec.Command(filepath.Join(bin, program), arguments(ts, program, args)...)
	cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"PATH", "HOME", "TMPDIR"} {
		cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
	}
	return cmd
}

// end sends a signal to a server, and waits for its end.
func end(ts *testscript.TestScript, args []string, signal syscall.Signal) {
	name := "server"
	if len(args) > 0 {
		name = args[0]
	}
	s := all(ts)[name]
	if s == nil {
		ts.Fatalf("there is no server %s", name)
	}
	ts.Check(s.cmd.Process.Signal(signal))
	select {
	case <-s.done:
	case <-time.After(patience):
		ts.Fatalf("%s does not end", name)
	}
	if signal == syscall.SIGTERM && s.err != nil {
		ts.Fatalf("%s ends with %v:\n%s", name, s.err, ts.ReadFile(name+".err"))
	}
}

func exits(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM [ARGUMENT …]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := run(ts, args[1], args[2:]...); err != nil {
		failed, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = failed.ExitCode()
	}
	if got != want {
		ts.Fatalf("the exit code is %d", got)
	}
	if lines := strings.Count(ts.ReadFile("stderr"), "\n"); want != 0 && args[1] != "svid" && args[1] != "sh" &&
		lines != 1 {
		ts.Fatalf("the error has %d lines", lines)
	}
}

func remedy(ts *testscript.TestScript, _ bool, _ []string) {
	_, command, ok := strings.Cut(ts.ReadFile("stderr"), "run: ")
	if !ok {
		ts.Fatalf("the error names no command")
	}
	command, _, _ = strings.Cut(strings.TrimSpace(command), "; ")
	ts.Logf("remedy: %s", command)
	ts.Check(ts.Exec("sh", "-c", command))
}

func set(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: set VARIABLE PATTERN")
	}
	pattern := regexp.MustCompile("(?m)" + args[1])
	m := pattern.FindStringSubmatch(ts.ReadFile("stdout") + ts.ReadFile("stderr"))
	if i := max(1, pattern.SubexpIndex(args[0])); i < len(m) {
		ts.Setenv(args[0], m[i])
		return
	}
	ts.Fatalf("nothing that was printed matches %s", args[1])
}

func until(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: until PATTERN PROGRAM [ARGUMENT …]")
	}
	pattern, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		out, _ := command(ts, args[1], args[2:]...).CombinedOutput() // with the exit code of any answer
		if found := pattern.Match(out); found || time.Now().After(deadline) {
			_, _ = ts.Stdout().Write(out)
			if !found {
				ts.Fatalf("it does not print %s", args[0])
			}
			return
		}
	}
}

func await(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: await PATTERN FILE")
	}
	pattern, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	for deadline := time.Now().Add(patience); !pattern.MatchString(ts.ReadFile(args[1])); time.Sleep(
		10 * time.Millisecond) {
		if time.Now().After(deadline) {
			ts.Fatalf("%s does not have %s:\n%s", args[1], args[0], ts.ReadFile(args[1]))
		}
	}
}

func get(ts *testscript.TestScript, _ bool, args []string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, args[0], nil)
	ts.Check(err)
	resp, err := http.DefaultClient.Do(req)
	ts.Check(err)
	defer resp.Body.Close()
	var body bytes.Buffer
	_, err = io.Copy(&body, resp.Body)
	ts.Check(err)
	fmt.Fprintf(ts.Stdout(), "%s\n%s\n", resp.Status, body.Bytes())
}

func record(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: record STORE DIRECTORY")
	}
	var r struct {
		Data map[string][]byte `json:"data"`
	}
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(filepath.Join(args[0], "record.json"))), &r))
	ts.Check(os.MkdirAll(ts.MkAbs(args[1]), 0o700))
	for name, item := range r.Data {
		ts.Check(os.WriteFile(filepath.Join(ts.MkAbs(args[1]), name), item, 0o600))
	}
}
