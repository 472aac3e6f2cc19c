package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

const (
	success     = `{"status":"Success"}`
	podUID      = "0f6d1f0c-52c1-4f0e-9b1e-3f1f4b9c7a11"
	withOptions = `{"kubernetes.io/fsType":"","kubernetes.io/pod.name":"frontend-0","kubernetes.io/pod.namespace":"media-sports",` +
		`"kubernetes.io/pod.uid":"` + podUID + `","kubernetes.io/pvOrVolumeName":"sia-identity","kubernetes.io/readwrite":"rw","kubernetes.io/serviceAccount.name":"frontend"}`
)

// node is a mount namespace of its own, as if this were the node: mounts are shared there, as systemd has it, or private.
func node(t *testing.T, sharing string) (pid int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount")
	}
	for _, need := range []string{"nsenter", "mount"} {
		if _, err := exec.LookPath(need); err != nil {
			t.Skip("the driver runs in a mount namespace of its own: " + err.Error())
		}
	}
	cmd := exec.Command("sh", "-c", "mount --make-r"+sharing+" / && echo there && exec sleep 300")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out := must.Get(cmd.StdoutPipe())(t)
	if err := cmd.Start(); err != nil {
		t.Skip("there is no mount namespace: " + err.Error())
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if n, _ := out.Read(make([]byte, 10)); n == 0 {
		t.Skip("mounts cannot be made " + sharing)
	}
	return cmd.Process.Pid
}

// The kubelet calls a script by the name of the driver, with its arguments, and reads all that is written. The pod finds its
// handle and the socket of the agent at the path, and can change neither. A mount may be repeated, and so may its end, after which
// the agent knows the handle no more.
func TestFlexVolume(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-1", "ATH-7.3-2", "ATH-7.3-4", "ATH-7.3-5")
	programs := programtest.Build(t, "athenz-agent")
	driver := filepath.Join(t.TempDir(), "athenz-volume-driver")
	script := "#!/bin/sh\nexec '" + filepath.Join(programs, "athenz-agent") + "' flexvolume \"$@\"\n" // README.md has it
	require.NoError(t, os.WriteFile(driver, []byte(script), 0o700))
	for _, sharing := range []string{"private", "shared"} {
		t.Run(sharing, func(t *testing.T) {
			pid := node(t, sharing)
			p := athenztest.NewPlace(t)
			programtest.Serve(t, run, environ(p), io.Discard, 1)
			path := p.Path("pods", podUID, "volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity")
			env := environ(p)
			kubelet := func(args ...string) (says string, code int) {
				cmd := exec.Command("nsenter", append([]string{"-t", fmt.Sprint(pid), "-m", "--", driver}, args...)...)
				cmd.Env = env
				out, err := cmd.CombinedOutput()
				if err != nil {
					require.ErrorAs(t, err, new(*exec.ExitError))
				}
				return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
			}
			works := func(want string, args ...string) {
				t.Helper()
				says, code := kubelet(args...)
				assert.Equal(t, want, says)
				assert.Zero(t, code)
			}
			works(`{"capabilities":{"attach":false},"status":"Success"}`, "init")
			inside := filepath.Join("/proc", fmt.Sprint(pid), "root", path) // what the pod has at /identity
			read := func() string {
				handle := must.Get(os.ReadFile(filepath.Join(inside, "id")))(t)
				require.Len(t, string(handle), 43)
				return string(handle)
			}
			var handle string
			ask := func() string {
				dir := must.Get(os.Open(filepath.Join(inside, "connect")))(t)
				defer dir.Close()
				client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/agent.sock", dir.Fd())) // a path that is short enough
				}, DisableKeepAlives: true}, Timeout: 10 * time.Second}
				answer := must.Get(client.Post("http://agent/v1/init/"+handle, "application/json", nil))(t)
				defer answer.Body.Close()
				return string(must.Get(io.ReadAll(answer.Body))(t))
			}
			works(success, "mount", path, withOptions)
			handle = read()
			assert.NotContains(t, ask(), "there is no volume with this handle")
			for _, name := range []string{"id", "new", "connect/new"} {
				require.ErrorIs(t, os.WriteFile(filepath.Join(inside, name), nil, 0o600), syscall.EROFS, name)
			}
			data := must.Get(os.ReadFile(p.Path("made/volumes", handle, "data.json")))(t)
			assert.JSONEq(t, `{"namespace":"media-sports","name":"frontend-0","uid":"`+podUID+`"}`, string(data))

			works(success, "mount", path, withOptions) // once more, as after a kubelet that was restarted
			assert.Equal(t, handle, read())
			works(success, "unmount", path)
			assert.Empty(t, must.Get(os.ReadDir(inside))(t), "nothing is mounted below what was")
			assert.NoDirExists(t, p.Path("made/volumes", handle))
			mounts := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/mounts", pid)))(t)
			assert.NotContains(t, string(mounts), p.Path())
			assert.FileExists(t, p.Path("made/agent.sock"), "what was mounted is not deleted through the mount")
			works(success, "unmount", path)
			works(success, "unmount", p.Path("never/there"))

			for name, c := range map[string]struct {
				args []string
				want string
			}{
				"another pod":    {[]string{"mount", path, strings.Replace(withOptions, podUID, "1"+podUID[1:], 1)}, "is not one of the pod"},
				"no UID":         {[]string{"mount", path, `{"kubernetes.io/pod.name":"a","kubernetes.io/pod.namespace":"b"}`}, "is not one of the pod"},
				"no namespace":   {[]string{"mount", path, `{"kubernetes.io/pod.name":"a","kubernetes.io/pod.uid":"` + podUID + `"}`}, "not the names of a namespace and a pod"},
				"no JSON":        {[]string{"mount", path, "{"}, "not the JSON of the kubelet"},
				"a path of none": {[]string{"mount", "pods/" + podUID + "/x", withOptions}, "is not one of the pod"},
			} {
				says, code := kubelet(c.args...)
				assert.Equal(t, 1, code, name)
				assert.Regexp(t, `^{"message":".*","status":"Failure"}$`, says)
				assert.Contains(t, says, c.want, name)
			}
			for _, args := range [][]string{{"attach", "{}", "node"}, {"getvolumename", "{}"}, {"mount"}, {"init", "x"}, {}} {
				says, code := kubelet(args...)
				assert.Equal(t, 1, code)
				assert.Regexp(t, `^{"message":".*","status":"Not supported"}$`, says)
			}
			// What of a mount was done before it failed is undone.
			env = environ(p, "AGENT_SOCKET="+p.Path("nowhere/agent.sock"))
			says, code := kubelet("mount", path, withOptions)
			assert.Equal(t, 1, code)
			assert.Contains(t, says, "nowhere")
			mounts = must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/mounts", pid)))(t)
			assert.NotContains(t, string(mounts), p.Path())
			volumes := must.Get(os.ReadDir(p.Path("made/volumes")))(t)
			assert.Len(t, volumes, 1, "the secret of the handles, and no volume")
		})
	}
}

// The driver is a command, too. A bad variable is told in its answer, as the kubelet reads nothing else.
func TestFlexVolumeCommand(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), []string{"flexvolume", "init"}, environ(p), &out, io.Discard))
	assert.JSONEq(t, `{"status":"Success","capabilities":{"attach":false}}`, out.String())
	out.Reset()
	require.ErrorIs(t, run(t.Context(), []string{"flexvolume", "init"}, environ(p, "VOLUMES_DIR=x", "LOG_LEVEL=loud"), &out, io.Discard), program.ErrAnswered)
	assert.Contains(t, out.String(), "LOG_LEVEL")
}

// What a pod has at the path of its volume is for reading and for nothing else: no program runs from there, and no device and no set user counts. Both
// mounts of a volume are so, and nothing of them is left.
func TestBindNarrow(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount")
	}
	dir := t.TempDir()
	folder, path := filepath.Join(dir, "folder"), filepath.Join(dir, "path")
	require.NoError(t, os.Mkdir(folder, 0o755))
	require.NoError(t, os.Mkdir(path, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "id"), []byte("handle"), 0o644))
	type seen struct {
		skip                string
		bound, again, ended error
		options             []string
		write               error
		after               string
	}
	result := make(chan seen)
	go func() {
		var s seen
		defer func() { result <- s }()
		runtime.LockOSThread() // and it ends with this goroutine, with its mounts
		if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
			s.skip = "there is no mount namespace: " + err.Error()
			return
		}
		if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
			s.skip = "mounts cannot be made private: " + err.Error()
			return
		}
		mounted := func() string {
			info, _ := os.ReadFile("/proc/thread-self/mountinfo")
			for line := range strings.Lines(string(info)) {
				if fields := strings.Fields(line); len(fields) > 5 && fields[4] == path {
					return fields[5]
				}
			}
			return ""
		}
		if s.bound = bind(folder, path); s.bound != nil {
			return
		}
		s.options = strings.Split(mounted(), ",")
		s.write = os.WriteFile(filepath.Join(path, "id"), []byte("other"), 0o644)
		s.ended, s.again = unbind(path), unbind(path)
		s.after = mounted()
	}()
	s := <-result
	if s.skip != "" {
		t.Skip(s.skip)
	}
	require.NoError(t, s.bound)
	for _, want := range []string{"ro", "nosuid", "nodev", "noexec"} {
		assert.True(t, slices.Contains(s.options, want), "%s is not in %q", want, s.options)
	}
	assert.ErrorIs(t, s.write, syscall.EROFS)
	assert.NoError(t, s.ended)
	assert.NoError(t, s.again, "nothing there is no error")
	assert.Empty(t, s.after)
}
