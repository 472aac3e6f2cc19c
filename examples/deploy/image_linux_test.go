package deploy_test

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// image is what the Dockerfile makes, in a folder in the place of the root.
type image struct {
	root       string
	user       uint32
	entrypoint string
}

// build does what the Dockerfile says: the last RUN of its first stage, and the COPY, USER and ENTRYPOINT of its second.
func build(t *testing.T, program string) *image {
	t.Helper()
	first, second, ok := strings.Cut(string(must.Get(os.ReadFile("Dockerfile"))(t)), "\nFROM scratch\n")
	require.True(t, ok, "the image begins with nothing")
	only := func(text, pattern string) []string {
		t.Helper()
		all := regexp.MustCompile(`(?m)^`+pattern+`$`).FindAllStringSubmatch(text, -1)
		require.Len(t, all, 1, pattern)
		return all[0]
	}
	module := must.Get(os.ReadFile("../../go.mod"))(t)
	assert.Equal(t, only(string(module), `go (\d+\.\d+).*`)[1], only(first, `FROM \S+/golang:(\S+) AS build`)[1], "the version of Go")
	out, root := t.TempDir(), t.TempDir()
	require.NoError(t, os.Chmod(root, 0o755))
	command := strings.ReplaceAll(only(first, `RUN (.* go build .*)`)[1], "/out/", out+"/")
	cmd := exec.Command("sh", "-euc", command)
	cmd.Dir, cmd.Env = filepath.Join("..", ".."), append(os.Environ(), "PROGRAM="+program, "GOFLAGS=", "GODEBUG=")
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", command, said)
	i := &image{root: root, entrypoint: only(second, `ENTRYPOINT \["(\S+)"\]`)[1]}
	number := only(second, `USER (\d+):(\d+)`)
	require.Equal(t, number[1], number[2])
	user := must.Get(strconv.ParseUint(number[1], 10, 32))(t)
	require.NotZero(t, user)
	i.user = uint32(user)
	copies := regexp.MustCompile(`(?m)^COPY --from=build (\S+) (\S+)$`).FindAllStringSubmatch(second, -1)
	require.Equal(t, strings.Count(second, "\nCOPY "), len(copies)-1, "the first line is a COPY, too")
	for _, m := range copies {
		from, to := m[1], filepath.Join(root, m[2])
		if strings.HasPrefix(from, "/out/") {
			from = strings.Replace(from, "/out", out, 1)
		} else if _, err := os.Stat(from); err != nil {
			continue // this system has its roots elsewhere
		}
		if strings.HasSuffix(m[2], "/") {
			to = filepath.Join(to, filepath.Base(from))
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
		require.NoError(t, os.WriteFile(to, must.Get(os.ReadFile(from))(t), 0o755))
	}
	return i
}

// command runs the program in the image as its user. It may write to the folders of the volumes alone.
func (i *image) command(t *testing.T, volumes []string, args ...string) *exec.Cmd {
	t.Helper()
	for _, at := range volumes {
		require.NoError(t, os.MkdirAll(filepath.Join(i.root, at), 0o700))
		require.NoError(t, os.Chown(filepath.Join(i.root, at), int(i.user), int(i.user)))
	}
	cmd := exec.Command(i.entrypoint, args...)
	cmd.Dir, cmd.Env = "/", []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: i.root, Credential: &syscall.Credential{Uid: i.user, Gid: i.user}, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// TestImage builds the image of the CA without a container runtime, and runs the CA in it: one static file, no shell, a user without
// rights. It makes a CA, serves, answers its probes, and ends when it is told to.
func TestImage(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can make a folder the root of a program")
	}
	i := build(t, "ca")
	binary := must.Get(elf.Open(filepath.Join(i.root, i.entrypoint)))(t)
	for _, p := range binary.Progs {
		assert.NotEqual(t, elf.PT_INTERP, p.Type, "it is static")
	}
	require.NoError(t, binary.Close())
	out, err := i.command(t, nil, "-version").CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Regexp(t, `^ca \S.*, go\S+\n$`, string(out))

	log := new(programtest.Log)
	args := []string{"-state-dir", "/state/ca", "-create", "-trust-domain", "example.org", "-jwt-rule", `{"issuer": "https://issuer.example.org", "audiences": ["ca"]}`,
		"-istio-addr", "127.0.0.1:0", "-linkerd-addr=", "-bundle-addr=", "-admin-addr", "127.0.0.1:0"}
	cmd := i.command(t, []string{"/state"}, args...)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var admin []string
	for _, path := range []string{"/ready", "/live"} {
		require.Eventually(t, func() bool {
			admin = regexp.MustCompile(`metrics, health: +(\S+)/metrics`).FindStringSubmatch(log.String())
			return admin != nil && answers(admin[1]+path, "ok") == nil
		}, time.Minute, 20*time.Millisecond, "%s", log)
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "%s", log)
	info := must.Get(os.Stat(filepath.Join(i.root, "state/ca/audit.jsonl")))(t)
	assert.Equal(t, i.user, info.Sys().(*syscall.Stat_t).Uid)

	// Elsewhere than in a volume it can write nothing.
	args[1] = "/elsewhere"
	out, err = i.command(t, nil, args...).CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), "permission denied")
}
