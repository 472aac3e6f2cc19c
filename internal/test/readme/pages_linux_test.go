package readme_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// block is commands of a page, after a comment that says how they are run:
//
//	<!-- run -->                 to their end, without an error
//	<!-- run as 1000 -->         as that user
//	<!-- run … until TEXT -->    again and again until TEXT is printed
//	<!-- start: TEXT -->         in a terminal of their own, until TEXT is printed
type block struct{ start, user, until, commands string }

var marked = regexp.MustCompile(`<!-- (?:run|start: (.*?))(?: as (\d+))?(?: until (.*?))? -->\n\n((?:    .*\n|\n)+)`)

func blocks(t *testing.T, page string) []block {
	text := must.Get(os.ReadFile(page))(t)
	var all []block
	for _, m := range marked.FindAllStringSubmatch(string(text), -1) {
		commands := regexp.MustCompile(`(?m)^    `).ReplaceAllString(m[4], "")
		all = append(all, block{m[1], m[2], m[3], commands})
	}
	require.Len(t, all, strings.Count(string(text), "<!-- run")+strings.Count(string(text), "<!-- start"), "each comment has its commands")
	require.NotEmpty(t, all)
	return all
}

// walk does what a page says, and ends what it has started.
func walk(t *testing.T, page string, environ ...string) {
	for _, b := range blocks(t, page) {
		if b.start != "" {
			c := open(t, b.commands, environ...)
			c.await(b.start)
			t.Cleanup(func() { c.interrupt() })
			continue
		}
		args := []string{"sh", "-euc", b.commands}
		if b.user != "" {
			args = append([]string{"setpriv", "--reuid=" + b.user, "--regid=" + b.user, "--clear-groups"}, args...)
		}
		until := time.Now().Add(30 * time.Second)
		for {
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Dir = "../../.."
			cmd.Env = append(os.Environ(), environ...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			out, err := cmd.CombinedOutput()
			t.Logf("%s\n%s", b.commands, out)
			if b.until != "" && !strings.Contains(string(out), b.until) && time.Now().Before(until) {
				time.Sleep(100 * time.Millisecond)
				continue
			}
			require.NoError(t, err, "%s\n%s", b.commands, out)
			require.Contains(t, string(out), b.until)
			break
		}
	}
}

// TestMachine does what MACHINE.md says, as root, where nobody else sees it.
func TestMachine(t *testing.T) {
	rounds.Slow(t)
	if os.Getuid() != 0 {
		t.Skip("the page is for root")
	}
	if isolate(t, "/etc", "/run", "/var/lib", "/usr/local/bin", "/tmp") {
		walk(t, "../../../examples/MACHINE.md")
	}
}

// TestService does what SERVICE.md says, in a home of its own. A workspace is in the place of "go get", so that the programs are
// built with this tree.
func TestService(t *testing.T) {
	rounds.Slow(t)
	if !isolate(t) {
		return
	}
	root := must.Get(filepath.Abs("../../.."))(t)
	home, err := os.MkdirTemp("", "home") // shorter than that of the test, for the address of a socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	work := filepath.Join(home, "go.work")
	text := "go " + strings.TrimPrefix(runtime.Version(), "go") + "\n\nuse (\n\t" + filepath.Join(home, "hello") + "\n\t" + root + "\n)\n"
	require.NoError(t, os.WriteFile(work, []byte(text), 0o600))
	environ := []string{"HOME=" + home, "GOWORK=" + work, "GOFLAGS="}
	for _, name := range []string{"GOENV", "GOCACHE", "GOMODCACHE"} { // which would be in that home, too
		value := must.Get(exec.Command("go", "env", name).Output())(t)
		environ = append(environ, name+"="+strings.TrimSpace(string(value)))
	}
	walk(t, "../../../examples/SERVICE.md", environ...)
}
