package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/programtest"
)

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_GRPC"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// A usage error ends the program with 2.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	for _, c := range []struct {
		args, out, errOut string
		code              int
	}{
		{"-version", "grpc ", "", 0},
		{"-h", "-version", "", 0},
		{"-nonsense", "", "there is no flag -nonsense; -h lists the flags", 2},
		{"show", "", `grpc: "show" is not understood`, 2},
	} {
		cmd := exec.CommandContext(t.Context(), self, strings.Fields(c.args)...)
		cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + t.TempDir()}
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.args, errOut.String())
		assert.Contains(t, out.String(), c.out)
		assert.Contains(t, errOut.String(), c.errOut)
		if c.args == "-h" {
			programtest.Help(t, out.String(), errOut.String())
		}
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, show(t.Context(), &out))
	assert.Equal(t, `server: /grpc.health.v1.Health/Check by spiffe://example.org/web
web: Check: SERVING
web: List: PermissionDenied
other: Check: Unavailable
operator: only spiffe://example.org/ops from now on
governor: the connection of web has ended
web: Check: Unavailable
server: /grpc.health.v1.Health/Check by spiffe://example.org/ops
ops: Check: SERVING
server: /grpc.health.v1.Health/Check by spiffe://example.org/ops
ops: Check: NOT_SERVING
server: ended
`, out.String())
}
