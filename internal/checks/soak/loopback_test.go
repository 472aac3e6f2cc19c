package soak

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// TestOperatorsPorts: the port for operators of each program is on loopback unless the operator chooses another address.
func TestOperatorsPorts(t *testing.T) {
	rounds.Slow(t)
	all := map[string]string{
		"agent": `-admin address [^)]*default "127\.0\.0\.1:15020"`, "ca": `-admin-addr address [^)]*default "127\.0\.0\.1:15014"`,
		"linkerd-proxy": `-admin address [^)]*default "127\.0\.0\.1:4191"`, "service": `-health-addr [^)]*default: none`,
		"athenz-agent": `HEALTH_ADDR.*127\.0\.0\.1:9080`, "athenz-provider": `HEALTH_ADDR.*127\.0\.0\.1:9080`, "athenz-sia": `HEALTH_ADDR.*127\.0\.0\.1:9080`,
	}
	var names []string
	for name := range all {
		names = append(names, name)
	}
	dir := programtest.Build(t, names...)
	for name, want := range all {
		help, err := exec.Command(filepath.Join(dir, name), "-h").CombinedOutput()
		require.NoError(t, err, name)
		assert.Regexp(t, regexp.MustCompile(want), strings.Join(strings.Fields(string(help)), " "), name)
	}
}
