package internal_test

import (
	"bytes"
	"debug/elf"
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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// unit is a unit of systemd: the values of each key of [Service], in their order.
type unit map[string][]string

func readUnit(t *testing.T, name string) unit {
	t.Helper()
	text := must.Get(os.ReadFile(filepath.Join("../deploy", name)))(t)
	u := unit{}
	_, service, _ := strings.Cut(string(text), "\n[Service]\n")
	service, _, _ = strings.Cut(service, "\n[Install]\n")
	for line := range strings.Lines(service) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
			u[key] = append(u[key], value)
		}
	}
	return u
}

// on reports whether a switch of the unit is on.
func (u unit) on(key string) bool { return slices.Equal(u[key], []string{"yes"}) }

// words returns all words of all values of a key.
func (u unit) words(key string) []string { return strings.Fields(strings.Join(u[key], " ")) }

// environment returns what the comment at the head of a unit says is in its file of variables.
func environment(t *testing.T, name string) (all []string) {
	t.Helper()
	text := must.Get(os.ReadFile(filepath.Join("../deploy", name)))(t)
	for _, m := range regexp.MustCompile(`(?m)^#     ([A-Z_]+)=(.*)$`).FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1]+"="+strings.Trim(m[2], "'"))
	}
	return all
}

func needs(t *testing.T, programs ...string) {
	t.Helper()
	for _, name := range programs {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
}

// TestUnits has systemd judge each unit: it is well written, and exposes little.
func TestUnits(t *testing.T) {
	t.Parallel()
	needs(t, "systemd-analyze")
	units := must.Get(filepath.Glob("../deploy/*.service"))(t)
	require.Len(t, units, 3)
	for _, file := range units {
		name := filepath.Base(file)
		u := readUnit(t, name)
		dir := t.TempDir()
		text := must.Get(os.ReadFile(file))(t)
		program := filepath.Base(u.words("ExecStart")[0])
		assert.Equal(t, program+".service", name)
		assert.FileExists(t, filepath.Join("..", program, "main.go"))
		text = bytes.ReplaceAll(text, []byte("/usr/local/bin/"+program), []byte("/bin/true")) // nothing is installed here
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, text, 0o600))

		out, err := exec.Command("systemd-analyze", "verify", "--man=no", path).CombinedOutput()
		require.NoError(t, err, "%s", out)
		assert.Empty(t, string(out), name)
		out, err = exec.Command("systemd-analyze", "security", "--offline=true", "--threshold=25", path).CombinedOutput()
		require.NoError(t, err, "%s", out)
		m := regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+) `).FindSubmatch(out)
		require.NotNil(t, m, "%s", out)
		exposure := must.Get(strconv.ParseFloat(string(m[1]), 64))(t)
		t.Logf("%s: %v", name, exposure)
		assert.LessOrEqual(t, exposure, 2.5, "%s", out)
	}
}

const inUnits = "SVIDKIT_TEST_UNITS" // the unit that the process is for

// TestUnitsRun runs the programs of the units as systemd does, as far as that can be had without it: with their arguments,
// environment, user, capabilities and namespaces, on file systems that may be read only but for the unit's own directories. Each does its work there:
// the agent of a machine serves another user, by that user's number and by what it runs, and writes files; the CA makes a CA and
// serves; and the agent of a mesh starts and says what it waits for. Under strace none of them calls what the unit forbids.
func TestUnitsRun(t *testing.T) {
	rounds.Slow(t)
	if name := os.Getenv(inUnits); name != "" {
		runUnit(t, name)
		return
	}
	t.Parallel()
	needs(t, "setpriv", "unshare", "mount", "strace", "systemd-analyze")
	if os.Getuid() != 0 {
		t.Skip("only root can be systemd")
	}
	programs := programtest.Build(t, "ca", "agent", "workload-agent", "svid")
	require.NoError(t, os.Chmod(filepath.Dir(programs), 0o755))
	for _, name := range []string{"ca.service", "agent.service", "workload-agent.service"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run", "^TestUnitsRun$", "-test.v")
			cmd.Env = append(os.Environ(), inUnits+"="+name, "PROGRAMS="+programs)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
			out, err := cmd.CombinedOutput()
			if err != nil && cmd.ProcessState == nil {
				t.Skipf("no namespaces can be made here: %v", err)
			}
			t.Logf("%s", out)
			require.NoError(t, err)
		})
	}
}

// runUnit is [TestUnitsRun] in namespaces of its own, which it furnishes as a machine.
func runUnit(t *testing.T, name string) {
	u := readUnit(t, name)
	sh := func(script string) {
		out, err := exec.Command("sh", "-euc", script).CombinedOutput()
		require.NoError(t, err, "%s\n%s", script, out)
	}
	sh(`ip link set lo up 2>/dev/null || true
mount --make-rprivate /
for at in /usr/local/bin /etc /run /var/lib; do
  layers=$(mktemp -d) && mount -t tmpfs -o mode=0755 layers "$layers" && mkdir "$layers/upper" "$layers/work"
  mount -t overlay -o "lowerdir=$at,upperdir=$layers/upper,workdir=$layers/work" overlay "$at"
done
cp "$PROGRAMS"/* /usr/local/bin && chmod 0755 /usr/local/bin/*
mkdir -p /etc/svidkit`)
	if u.on("PrivateNetwork") {
		t.Fatal("its network is not tried")
	}
	const number = 61234
	environ := []string{"PATH=/usr/bin:/bin", "MINIMUM_DRAIN_DURATION=1s"}
	for _, value := range u["Environment"] {
		environ = append(environ, strings.Fields(value)...)
	}
	if u["EnvironmentFile"] != nil {
		environ = append(environ, environment(t, name)...)
	}
	var own strings.Builder // directories of the unit
	owner := 0
	if !slices.Equal(u["User"], []string{"root"}) {
		owner = number
	}
	folder := func(path, mode string) {
		fmt.Fprintf(&own, "mkdir -p %[1]s && chmod %[2]s %[1]s && chown %[3]d:%[3]d %[1]s && mount --bind %[1]s %[1]s\n", path, mode, owner)
	}
	for _, name := range u.words("StateDirectory") {
		folder("/var/lib/"+name, u["StateDirectoryMode"][0])
	}
	for _, name := range u.words("RuntimeDirectory") {
		folder("/run/"+name, "0755")
	}
	sh(own.String())
	for _, key := range []string{"PrivateTmp", "PrivateDevices", "ProtectHome", "NoNewPrivileges"} {
		require.True(t, u.on(key), key)
	}
	require.Equal(t, []string{"strict"}, u["ProtectSystem"])
	writable := append([]string{"/proc", "/sys", "/dev", "/tmp"}, u.words("StateDirectory")...)
	for i := range writable[4:] {
		writable[4+i] = "/var/lib/" + writable[4+i]
	}
	for _, name := range u.words("RuntimeDirectory") {
		writable = append(writable, "/run/"+name)
	}
	script := `mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o ro,mode=0 none /home; mount -t tmpfs -o ro,mode=0 none /root
cut -d" " -f5 /proc/self/mountinfo | while read -r at; do
  case $at in ` + strings.Join(writable, "|") + `|/proc/*|/sys/*|/dev/*) ;; *) mount -o remount,bind,ro "$at" 2>/dev/null || true ;; esac
done
if touch /etc/x /usr/x /var/x /run/x 2>/dev/null; then exit 3; fi
umask ` + u["UMask"][0] + "\n"
	if slices.Equal(u["ProtectProc"], []string{"invisible"}) {
		script += "mount -t proc -o hidepid=invisible proc /proc\n"
	}
	var bounding strings.Builder
	bounding.WriteString("-all")
	for _, name := range u.words("CapabilityBoundingSet") {
		bounding.WriteString(",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_")))
	}
	script += "exec setpriv --no-new-privs --inh-caps=-all --bounding-set=" + bounding.String()
	if owner != 0 {
		script += fmt.Sprintf(" --reuid=%[1]d --regid=%[1]d --clear-groups", owner)
	}
	if u.on("PrivateUsers") {
		script += " unshare --user --map-current-user"
	}
	calls := filepath.Join(t.TempDir(), "calls")
	require.NoError(t, os.WriteFile(calls, nil, 0o666))
	require.NoError(t, os.Chmod(calls, 0o666))
	for at := filepath.Dir(calls); at != "/tmp" && at != "/"; at = filepath.Dir(at) {
		require.NoError(t, os.Chmod(at, 0o755))
	}
	log := new(programtest.Log)
	start := func(more ...string) (end func()) {
		args := append(u.words("ExecStart"), more...)
		// The trace is a descriptor of this process, so that it is written where the unit may not.
		trace := must.Get(os.OpenFile(calls, os.O_WRONLY|os.O_APPEND, 0))(t)
		cmd := exec.Command("unshare", append([]string{"-m", "sh", "-euc", script + ` strace -f -qq -e signal=none -o /proc/self/fd/3 "$@"`, "sh"}, args...)...)
		cmd.Env, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = environ, log, log, []*os.File{trace}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		require.NoError(t, cmd.Start())
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		return func() {
			t.Helper()
			require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM))
			select {
			case <-ended:
			case <-time.After(20 * time.Second):
				require.Fail(t, "it does not end", "%s", log)
			}
			require.NoError(t, trace.Close())
		}
	}
	eventually := func(what func() error) {
		t.Helper()
		until := time.Now().Add(30 * time.Second)
		for err := what(); err != nil; err = what() {
			require.True(t, time.Now().Before(until), "%v\n%s", err, log)
			time.Sleep(50 * time.Millisecond)
		}
	}
	switch name {
	case "ca.service":
		end := start()
		eventually(func() error { return answers("http://127.0.0.1:15014/ready", "ok") })
		end()
		require.FileExists(t, "/var/lib/svidkit-ca/audit.jsonl")
		environ = slices.DeleteFunc(environ, func(v string) bool { return v == "CA_CREATE=true" })
		end = start()
		eventually(func() error { return answers("http://127.0.0.1:15014/ready", "ok") })
		end()
	case "agent.service":
		sh(`cp /etc/ssl/certs/ca-certificates.crt /etc/svidkit/root-cert.pem && d=/var/lib/svidkit-agent/var/run/secrets/tokens && mkdir -p $d && echo token >$d/istio-token && chown -R 61234 /var/lib/svidkit-agent/var`)
		end := start()
		eventually(func() error { return answers("http://127.0.0.1:15020/metrics", "svidkit_build_info") })
		eventually(func() error { // it has come as far as the CA, whose name does not exist
			if !strings.Contains(log.String(), "istiod.example.org") {
				return errors.New("it does not ask the CA")
			}
			return nil
		})
		require.FileExists(t, "/var/lib/svidkit-agent/var/run/secrets/workload-spiffe-uds/socket")
		end()
	case "workload-agent.service":
		require.NoError(t, os.WriteFile("/etc/svidkit/workloads.json", []byte(`{"workloads": [
			{"match": {"uid": 1000, "executable": "/usr/local/bin/svid"}, "identities": [{"id": "spiffe://example.org/svid"}]},
			{"identities": [{"id": "spiffe://example.org/nginx", "files": [{"folder": "/run/identity/nginx"}]}]}
		]}`), 0o644))
		end := start("-ca-option", "create=true")
		fetch := func() error {
			cmd := exec.Command("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "svid", "fetch", "-dir", "/tmp/fetched")
			cmd.Env = []string{"SPIFFE_ENDPOINT_SOCKET=unix:///run/svidkit/agent.sock", "PATH=/usr/local/bin:/usr/bin:/bin"}
			out, err := cmd.CombinedOutput()
			if err == nil && !strings.Contains(string(out), "spiffe://example.org/svid") {
				err = errors.New("it has another identity")
			}
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err
		}
		eventually(fetch)
		require.NoError(t, answers("http://127.0.0.1:15024/ready", "ok"))
		eventually(func() error {
			return must.Err(os.Stat("/run/identity/nginx/credential-bundle.private-key.x509.pem"))
		})
		end()
	}
	judgeCalls(t, u, calls)
	assert.NotContains(t, log.String(), "level=ERROR")
}

// answers returns nil if a page has a text.
func answers(url, want string) error {
	answer, err := http.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && (answer.StatusCode != http.StatusOK || !strings.Contains(string(text), want)) {
		err = fmt.Errorf("%s: %s %s", url, answer.Status, text)
	}
	return err
}

// judgeCalls requires that all system calls in a trace are allowed by the filter of a unit, as are the families of sockets.
func judgeCalls(t *testing.T, u unit, trace string) {
	t.Helper()
	text := must.Get(exec.Command("systemd-analyze", "syscall-filter").Output())(t)
	groups, group := map[string][]string{}, ""
	for line := range strings.Lines(string(text)) {
		switch word := strings.TrimSpace(line); {
		case strings.HasPrefix(line, "@"):
			group = word
		case word == "" && group != "":
		case word != "" && !strings.HasPrefix(word, "#"):
			groups[group] = append(groups[group], word)
		}
	}
	var expand func(word string) []string
	expand = func(word string) (all []string) {
		if !strings.HasPrefix(word, "@") {
			return []string{word}
		}
		for _, inner := range groups[word] {
			all = append(all, expand(inner)...)
		}
		return all
	}
	allowed := map[string]bool{}
	for _, name := range expand("@default") { // which is in each list
		allowed[name] = true
	}
	for _, line := range u["SystemCallFilter"] {
		words, forbids := strings.CutPrefix(line, "~")
		for word := range strings.FieldsSeq(words) {
			for _, name := range expand(word) {
				allowed[name] = !forbids
			}
		}
	}
	require.Greater(t, len(allowed), 200)
	calls := must.Get(os.ReadFile(trace))(t)
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\d+ +([a-z_0-9]+)\((?:(AF_[A-Z0-9]+))?`).FindAllSubmatch(calls, -1) {
		name, family := string(m[1]), string(m[2])
		if !seen[name] {
			seen[name] = true
			// What systemd does not know yet is answered with ENOSYS, after which Go does it in another way.
			known := slices.Contains(expand("@known"), name)
			assert.True(t, allowed[name] || !known, "the unit forbids %s", name)
		}
		if name == "socket" && !seen[family] {
			seen[family] = true
			assert.Contains(t, u.words("RestrictAddressFamilies"), family)
		}
	}
	assert.Greater(t, len(seen), 20, "the trace has what the program did")
}

// image is what the Dockerfile makes, in a directory in the place of the root.
type image struct {
	root       string
	user       uint32
	entrypoint string
}

// build does what the Dockerfile says: the last RUN of its first stage, and the COPY, USER and ENTRYPOINT of its second.
func build(t *testing.T, program string) *image {
	t.Helper()
	first, second, ok := strings.Cut(string(must.Get(os.ReadFile("../deploy/Dockerfile"))(t)), "\nFROM scratch\n")
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

// command runs the program in the image as its user. It may write to the directories of the volumes alone.
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
		t.Skip("only root can make a directory the root of a program")
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
