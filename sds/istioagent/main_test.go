package istioagent

import (
	"testing"

	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}
