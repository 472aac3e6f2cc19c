package athenzdemo

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/athenzprog"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/testtree"
)

var update = flag.Bool("update", false, "write the diagram and the tables in the READMEs of the examples")

// The demo ends well, and the README has its trace.
func TestDemo(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-1-1", "ATH-1-2", "ATH-1-3", "ATH-1-4", "ATH-1-5", "ATH-1-6", "ATH-7.1-1", "ATH-7.1-3", "ATH-7.1-4", "ATH-7.2-1", "ATH-7.2-2", "ATH-7.2-3",
		"ATH-7.2-4", "ATH-7.2-5", "ATH-8-1", "ATH-8-2", "ATH-8-3", "ATH-8-4", "ATH-8-5", "ATH-8-7", "ATH-18-6")
	var out bytes.Buffer
	trace, err := run(t.Context(), &out)
	require.NoError(t, err, out.String())
	assert.Contains(t, out.String(), "no key, document or token is in a log")
	inside(t, "athenz-sia", "```mermaid\n", "```\n", trace.Diagram())
}

// The READMEs have the variables of their programs.
func TestTables(t *testing.T) {
	t.Parallel()
	for _, p := range []athenzprog.Program{athenzprog.Agent(), athenzprog.Provider(), athenzprog.SIA()} {
		var table strings.Builder
		require.NoError(t, p.Table.WriteMarkdown(&table))
		inside(t, p.Name, "<!-- environment -->\n", "<!-- end of environment -->\n", "\n"+table.String()+"\n")
	}
}

// inside compares what is between two marks in the README of an example, or writes it.
func inside(t *testing.T, example, begin, end, text string) {
	t.Helper()
	testtree.Section(t, *update, filepath.Join("..", "..", "examples", example, "README.md"), begin, end, text)
}

// What fails outside of a test is an error, after everything was put in order.
func TestOutside(t *testing.T) {
	t.Parallel()
	var dir string
	var order []int
	err := outside(t.Context(), func(t testing.TB) {
		t.Helper()
		dir = t.TempDir()
		t.Cleanup(func() { order = append(order, 1) })
		t.Cleanup(func() { order = append(order, 2) })
		t.Errorf("the %s", "first")
		t.Fatalf("second")
		t.Cleanup(func() { order = append(order, 3) })
	})
	require.ErrorContains(t, err, "the first")
	require.ErrorContains(t, err, "second")
	assert.Equal(t, []int{2, 1}, order)
	assert.NoDirExists(t, dir)
	require.NoError(t, outside(t.Context(), func(t testing.TB) {
		if t.Context().Err() != nil {
			t.Fatalf("the context has ended")
		}
	}))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("stopped"))
	require.Error(t, Run(ctx, new(bytes.Buffer)), "a demo that is stopped does not say that all is well")
}
