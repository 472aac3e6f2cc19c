package readme_test

import (
	"go/constant"
	"go/token"
	"go/types"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestScale computes what SCALE.md computes. A row of its tables begins with a name; the inputs have one value, and
// the results one for each lifetime and the formula, in the names of the rows before.
func TestScale(t *testing.T) {
	t.Parallel()
	page := string(must.Get(os.ReadFile("../../../examples/SCALE.md"))(t))
	number := func(text string) (string, bool) {
		text = strings.ReplaceAll(strings.TrimSpace(text), ",", "")
		_, err := strconv.ParseFloat(text, 64)
		return text, err == nil
	}
	short := func(text string) string {
		return strconv.FormatFloat(must.Get(strconv.ParseFloat(text, 64))(t), 'g', 2, 64)
	}
	var known [2]map[string]string // by lifetime
	for i, life := range []string{"86400", "3600"} {
		known[i] = map[string]string{"life": life}
	}
	word := regexp.MustCompile(`[A-Za-z]+`)
	inputs, results := 0, 0
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Za-z]+)` \\|(.*)\\|$").FindAllStringSubmatch(page, -1) {
		name, cells := row[1], strings.Split(row[2], "|")
		value, ok := number(cells[0])
		require.True(t, ok, "%s: %q", name, cells[0])
		formula := regexp.MustCompile("^ `(.*)` $").FindStringSubmatch(cells[2])
		if other, two := number(cells[1]); formula == nil && two {
			known[0][name], known[1][name] = value, other
			inputs++
			continue
		} else if formula == nil {
			known[0][name], known[1][name] = value, value
			inputs++
			continue
		}
		results++
		for i, names := range known {
			shown, ok := number(cells[i])
			require.True(t, ok, "%s: %q", name, cells[i])
			text := word.ReplaceAllStringFunc(formula[1], func(n string) string {
				require.Contains(t, names, n, "%s: the formula", name)
				return "(" + names[n] + "*1.0)"
			})
			v := must.Get(types.Eval(token.NewFileSet(), nil, token.NoPos, text))(t)
			f, _ := constant.Float64Val(constant.ToFloat(v.Value))
			computed := strconv.FormatFloat(f, 'f', -1, 64)
			assert.Equal(t, short(computed), short(shown), "%s: %s = %s", name, formula[1], computed)
			names[name] = computed
		}
	}
	for i, life := range []string{"24", "1"} { // from the table of the hour
		assert.Regexp(t, `(?m)^\| `+life+` h \|[^|]*\| `+known[i]["back"]+` \|`, page)
	}
	assert.Greater(t, inputs, 10)
	assert.Greater(t, results, 10)
}
