package metrics_test

import (
	"errors"
	"io"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
)

func write(t testing.TB, s *metrics.Set) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, s.Write(&b))
	return b.String()
}

// TestWrite compares with text written by hand from the description of the format.
func TestWrite(t *testing.T) {
	t.Parallel()
	var s metrics.Set
	assert.Empty(t, write(t, &s))
	c := s.Counter("requests", `Requests in C:\ and`+"\nbelow.")
	by := s.Counters("errors", "Errors.", "error", "CSR_ERROR", "a\"b\\c\nd")
	left := 1.5
	there := true
	s.Gauge("left:seconds", "Time left.", func() (float64, bool) { return left, there })
	c.Inc()
	c.Inc()
	by["CSR_ERROR"].Inc()
	require.Equal(t, `# HELP requests Requests in C:\\ and\nbelow.
# TYPE requests counter
requests 2
# HELP errors Errors.
# TYPE errors counter
errors{error="CSR_ERROR"} 1
errors{error="a\"b\\c\nd"} 0
# HELP left:seconds Time left.
# TYPE left:seconds gauge
left:seconds 1.5
`, write(t, &s))
	assert.Nil(t, by["unknown"])

	there = false
	assert.NotContains(t, write(t, &s), "left", "a gauge without a value has no header either")
	there = true
	for v, want := range map[float64]string{
		-7: "-7", 4102444800: "4102444800", 1e300: "1e+300", 0: "0", math.Inf(1): "+Inf", math.Inf(-1): "-Inf", math.NaN(): "NaN", 0.25: "0.25",
	} {
		left = v
		assert.Contains(t, write(t, &s), "\nleft:seconds "+want+"\n")
	}
}

// TestFormat reads all of it back with a strict reader of the format.
func TestFormat(t *testing.T) {
	t.Parallel()
	var s metrics.Set
	s.Counter("a_total", "").Inc()
	s.Counters("b", "B", "x", "1", "2", "ü", "")
	s.Gauge("c", "C", func() (float64, bool) { return math.Pi, true })
	s.Gauges("none", "N", func(metrics.Add) {})
	text := must.Get(metricstest.Parse(write(t, &s)))(t)
	assert.Len(t, text.Samples, 6)
	assert.Len(t, text.Types, 3)
	assert.Equal(t, 1., text.Samples["a_total"])
	assert.Contains(t, text.Samples, `b{x="ü"}`)
}

type failing struct{ writes int }

func (f *failing) Write([]byte) (int, error) {
	f.writes++
	return 0, errors.New("full")
}

func TestWriteError(t *testing.T) {
	t.Parallel()
	var s metrics.Set
	s.Counter("a", "")
	s.Counter("b", "")
	f := &failing{}
	require.EqualError(t, s.Write(f), "full")
	assert.Equal(t, 1, f.writes)
}

func TestConcurrent(t *testing.T) {
	t.Parallel()
	var s metrics.Set
	c := s.Counters("a", "", "l", "x")["x"]
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				c.Inc()
			}
			_ = s.Write(&strings.Builder{})
		})
	}
	wg.Wait()
	assert.Contains(t, write(t, &s), "a{l=\"x\"} 8000\n")
}

func TestIncAllocatesNothing(t *testing.T) {
	var s metrics.Set
	c, by := s.Counter("a", ""), s.Counters("b", "", "l", "x")
	assert.Zero(t, testing.AllocsPerRun(100, func() { c.Inc(); by["x"].Inc() }))
}

func text(s string) func(io.Writer) error {
	return func(w io.Writer) error {
		return must.Err(io.WriteString(w, s))
	}
}

func merge(t testing.TB, parts ...metrics.Part) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, metrics.Merge(&b, "part", parts...))
	return b.String()
}

// TestMerge: two parts of one kind, one of another, and one with a histogram and comments, as of a client library.
func TestMerge(t *testing.T) {
	t.Parallel()
	var one, two, other metrics.Set
	one.Counter("a_total", "A.").Inc()
	one.Gauges("g", "G.", func(add metrics.Add) { add(1, "x", `y"z`) })
	two.Counter("a_total", "Another help.")
	two.Gauges("g", "G.", func(add metrics.Add) { add(2, "x", `y"z`); add(3, "x", "") })
	other.Gauge("own", "Own.", func() (float64, bool) { return 4, true })
	got := merge(t,
		metrics.Part{Write: other.Write}, metrics.Part{Name: "one", Write: one.Write}, metrics.Part{Name: "t\"w\\o\n", Write: two.Write},
		metrics.Part{Name: "lib", Write: text("# a comment\n# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_sum{} 2\nh_count 1\n\nbare 7\n# HELP h_count Its own.\n# TYPE h_count gauge\nh_count{a=\"b\"} 1\n# EOF\n")})
	assert.Equal(t, `# HELP own Own.
# TYPE own gauge
own 4
# HELP a_total A.
# TYPE a_total counter
a_total{part="one"} 1
a_total{part="t\"w\\o\n"} 0
# HELP g G.
# TYPE g gauge
g{part="one",x="y\"z"} 1
g{part="t\"w\\o\n",x="y\"z"} 2
g{part="t\"w\\o\n",x=""} 3
# HELP h H.
# TYPE h histogram
h_bucket{part="lib",le="+Inf"} 1
h_sum{part="lib"} 2
h_count{part="lib"} 1
bare{part="lib"} 7
# HELP h_count Its own.
# TYPE h_count gauge
h_count{part="lib",a="b"} 1
`, got)

	f := &failing{}
	fault := errors.New("gone")
	require.ErrorIs(t, metrics.Merge(f, "part", metrics.Part{Write: one.Write}, metrics.Part{Name: "x", Write: func(io.Writer) error { return fault }}), fault)
	assert.Zero(t, f.writes)
	require.EqualError(t, metrics.Merge(f, "part", metrics.Part{Write: one.Write}), "full")
	assert.Empty(t, merge(t))
}

// FuzzMerge: whatever the labels, the text of two parts is valid, and has all samples of both.
func FuzzMerge(f *testing.F) {
	f.Add("one", "two", "value", "help")
	f.Add(`a"b`, `a\b`, "x\ny", "\\\n")
	f.Add("{}", `",c="`, "} 1\n# TYPE a counter", "# HELP")
	f.Fuzz(func(t *testing.T, name1, name2, value, help string) {
		for _, s := range []*string{&name1, &name2, &value, &help} {
			*s = strings.ToValidUTF8(*s, "")
		}
		if name1 == name2 || name1 == "" || name2 == "" {
			return
		}
		var s metrics.Set
		s.Counters("a_total", help, "l", value, value+"2")
		s.Gauges("g", help, func(add metrics.Add) { add(1.5, "m", value, "n", value) })
		s.Gauge("h", help, func() (float64, bool) { return -1, true })
		whole, err := metricstest.Parse(merge(t, metrics.Part{Name: name1, Write: s.Write}, metrics.Part{Name: name2, Write: s.Write}))
		require.NoError(t, err)
		assert.Len(t, whole.Samples, 8)
		for _, name := range []string{name1, name2} {
			assert.Equal(t, 1.5, whole.Samples[metricstest.Key("g", map[string]string{"part": name, "m": value, "n": value})])
		}
	})
}

// TestStrict: the reader of the tests refuses what is not the format.
func TestStrict(t *testing.T) {
	t.Parallel()
	const head = "# HELP a A\n# TYPE a gauge\n"
	for _, good := range []string{"", head + "a 1\n", head + "a{x=\"1\"} 1\na{x=\"2\"} 1\n", "# HELP a \\\\ \\n\n# TYPE a counter\na 0\n"} {
		must.Get(metricstest.Parse(good))(t, good)
	}
	for _, bad := range []string{
		"a 1\n", head, head + "a 1", head + "b 1\n", head + "a NaN\n", head + "a +Inf\n", head + "a one\n", head + "a  1\n", head + "a 1 1700000000\n", head + "a 1\r\n",
		head + "a 1\na 2\n", head + "a{x=\"1\"} 1\na{x=\"1\"} 2\n", head + "a 1\n" + head + "a 2\n", head + "a{} 1\n", head + "a{x=1} 1\n", head + "a{x=\"1\",} 1\n",
		head + "a{x=\"1\"}1\n", head + "a{x=\"1} 1\n", head + "a{x=\"\\t\"} 1\n", head + "a{x=\"1\",x=\"2\"} 1\n", head + "a{1x=\"\"} 1\n", head + "a{__x=\"\"} 1\n", head + "a{x=\"1\" y=\"2\"} 1\n",
		"# TYPE a gauge\na 1\n", "# HELP a A\na 1\n", "# HELP a A\n# HELP b B\n# TYPE b gauge\nb 1\n", "# TYPE a gauge\n# HELP a A\na 1\n", "# HELP a A\n# TYPE a thing\na 1\n",
		"# HELP a \\t\n# TYPE a gauge\na 1\n", "# HELP a-b A\n# TYPE a-b gauge\na-b 1\n", "# HELP a A\n# TYPE a counter\na -1\n", head + "a \xff\n", "\n" + head + "a 1\n", head + "a 1\n# HELP b B\n# TYPE b gauge\nb 1\na 2\n",
	} {
		require.Error(t, must.Err(metricstest.Parse(bad)), bad)
	}
	lint := func(s string) []string {
		return must.Get(metricstest.Parse(s))(t).Lint()
	}
	assert.Empty(t, lint("# HELP svidkit_a_timestamp_seconds A\n# TYPE svidkit_a_timestamp_seconds gauge\nsvidkit_a_timestamp_seconds 1\n"))
	assert.Len(t, lint("# HELP svidkit_a_ms A\n# TYPE svidkit_a_ms counter\nsvidkit_a_ms 1\n"), 2)
	assert.Len(t, lint("# HELP a_total A\n# TYPE a_total gauge\na_total 1\n"), 2)
	assert.Len(t, lint("# HELP svidkit_A_timestamp A\n# TYPE svidkit_A_timestamp gauge\nsvidkit_A_timestamp 1\n"), 2)
}
