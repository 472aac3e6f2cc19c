package gospiffe_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestReach shows that the adapters link go-spiffe's types and not its client, which brings grpc-go.
func TestReach(t *testing.T) {
	t.Parallel()
	out := must.Get(exec.Command("go", "list", "-deps", ".").Output())(t)
	reached := strings.Fields(string(out))
	assert.Contains(t, reached, "github.com/spiffe/go-spiffe/v2/spiffeid")
	for _, p := range reached {
		for _, heavy := range []string{"google.golang.org/", "github.com/spiffe/go-spiffe/v2/workloadapi", "golang.org/x/net", "github.com/fsnotify"} {
			assert.False(t, strings.HasPrefix(p, heavy), "%s is linked", p)
		}
	}
}
