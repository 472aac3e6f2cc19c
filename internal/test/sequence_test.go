package test_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/sequence"
)

func TestSequence(t *testing.T) {
	t.Parallel()
	for once, repeated := range map[bool]string{false: "    p0->>p1: asks\n    p1-->>p0: answers 200\n    p0->>p1: asks\n", true: "    p0->>p1: asks\n    p1-->>p0: answers 200\n"} {
		var out strings.Builder
		s := sequence.New(&out, once, "a", "b")
		s.Event("a", "b", "too early")
		assert.Empty(t, s.Current())
		s.PhaseWith("first", "a", "b", "asks")
		s.Event("b", "a", "answers 200")
		s.Event("a", "b", "asks")
		s.Pause()
		s.Event("a", "b", "again")
		s.Say("by the way")
		assert.Equal(t, "first", s.Current())
		s.Phase("second")
		s.Event("a", "b", "asks")
		assert.Equal(t, "sequenceDiagram\n    participant p0 as a\n    participant p1 as b\n"+
			"    Note over p0,p1: first\n"+repeated+"    Note over p0,p1: second\n    p0->>p1: asks\n", s.Diagram())
		assert.Contains(t, out.String(), "  first\n        a → b: asks\n")
		assert.Contains(t, out.String(), "by the way")
		assert.NotContains(t, out.String(), "again")
		assert.NotContains(t, out.String(), "too early")
	}
}
