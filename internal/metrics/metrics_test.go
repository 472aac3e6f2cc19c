package metrics_test

import (
	"errors"
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
