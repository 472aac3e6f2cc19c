package testtree_test

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/testtree"
)

func TestFiles(t *testing.T) {
	t.Parallel()
	const src = `package a

import "testing"

func TestA(t *testing.T) { t.Parallel() }

func TestSkipped(t *testing.T) {
	t.Parallel()
	t.Skip("later")
}

func TestSometimes(t *testing.T) {
	if testing.Short() {
		t.Skip("it is long")
	}
}

func Testify(t *testing.T) {}

func Example() {}

func FuzzA(f *testing.F) { f.SkipNow() }

func helper(t *testing.T) { t.Skipf("%d", 1) }

type kind struct{}

func (kind) TestMethod(t *testing.T) {}
`
	files, err := testtree.Files(fstest.MapFS{
		"spiffe/a_test.go":          {Data: []byte(src)},
		"spiffe/a.go":               {Data: []byte("package a\n\nfunc TestNo() {}\n")},
		"spiffe/testdata/a_test.go": {Data: []byte("not Go")},
		".git/a_test.go":            {Data: []byte("not Go")},
		"_old/a_test.go":            {Data: []byte("not Go")},
	})
	require.NoError(t, err)
	got := map[string]bool{}
	for _, f := range files {
		for _, fn := range f.Functions() {
			if name, runs := f.Test(fn); runs {
				got[name] = testtree.Skipped(fn)
			}
		}
	}
	assert.Equal(t, map[string]bool{
		"spiffe.TestA": false, "spiffe.TestSkipped": true, "spiffe.TestSometimes": false, "spiffe.Example": false, "spiffe.FuzzA": true,
	}, got)

	_, err = testtree.Files(fstest.MapFS{"a_test.go": {Data: []byte("not Go")}})
	assert.Error(t, err)
}
