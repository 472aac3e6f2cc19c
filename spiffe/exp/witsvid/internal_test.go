package witsvid

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
)

// What is remembered is forgotten when it is over, and costs what the documentation says.
func TestReplaysMemory(t *testing.T) {
	rounds.NotShort(t)
	start := time.Unix(1767225600, 0)
	const places = 20_000
	r, one := newReplays(places), spiffe.MustParseID("spiffe://example.org/web")
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC() // what other tests left in pools goes with the second
	runtime.ReadMemStats(&before)
	fill := func(at time.Time) {
		for i := range places {
			if fresh, full := r.use(one, "holder", fmt.Sprint(at, i), at, at.Add(2*time.Minute)); !fresh || full {
				t.Fatal(i, fresh, full)
			}
		}
	}
	fill(start)
	runtime.GC()
	runtime.ReadMemStats(&after)
	assert.Less(t, int64(after.HeapAlloc-before.HeapAlloc)/places, int64(100))
	_, full := r.use(one, "holder", "one more", start, start.Add(time.Minute))
	assert.True(t, full)
	fresh, full := r.use(one, "holder", fmt.Sprint(start, 7), start, start.Add(time.Minute))
	assert.False(t, fresh || full, "a replay is told apart even then")
	_, full = r.use(one, "holder", "one more", start.Add(119*time.Second), start.Add(3*time.Minute))
	assert.True(t, full, "nothing is forgotten before its time")
	fill(start.Add(130 * time.Second))
	assert.Len(t, r.used, places)
	assert.Len(t, r.ends, 1)
	assert.Equal(t, places, r.ids[one].held)

	// A clock that goes back forgets nothing.
	fresh, _ = r.use(one, "holder", fmt.Sprint(start.Add(130*time.Second), 7), start, start.Add(time.Minute))
	assert.False(t, fresh)
	// One that jumps ahead costs no loop over the years.
	fresh, full = r.use(one, "holder", "later", start.AddDate(100, 0, 0), start.AddDate(100, 0, 1))
	assert.True(t, fresh && !full)
	assert.Len(t, r.used, 1)
}

// However many holders take all that they can get, there is room for one more, and what is remembered is bounded.
func TestReplayShares(t *testing.T) {
	t.Parallel()
	start := time.Unix(1767225600, 0)
	const each = 10_000
	one := func(id int) spiffe.ID { return spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/%d", id)) }
	// flood uses proofs of n IDs in turn until none is accepted any more.
	flood := func(r *replays, n int) {
		for k, more := 0, n > 0; more; k++ {
			more = false
			for i := range n {
				_, full := r.use(one(i), fmt.Sprint(i), fmt.Sprint(k), start, start.Add(2*time.Minute))
				more = more || !full
			}
		}
	}
	for n, c := range map[int]struct {
		held   int // by the flood
		others int // at least, for an ID that is not in the flood
	}{
		0: {0, each}, 1: {each, each / 3}, 10: {each * 15 / 10 * 20 / 21, each / 22},
	} {
		r := newReplays(each)
		flood(r, n)
		assert.InDelta(t, c.held, len(r.used), 12, n)
		more := 0
		for full := false; !full; more++ {
			_, full = r.use(one(99), "good", fmt.Sprint(more), start, start.Add(2*time.Minute))
		}
		assert.GreaterOrEqual(t, more, c.others, n)
		assert.LessOrEqual(t, len(r.used), each*3/2, n)
		fresh, full := r.use(one(98), "late", "x", start.Add(3*time.Minute), start.Add(4*time.Minute))
		assert.True(t, fresh && !full)
		assert.Len(t, r.used, 1, "all else is over")
		assert.Len(t, r.ids, 1)
	}
}

func TestTargetPath(t *testing.T) {
	t.Parallel()
	for target, want := range map[string]string{
		"/":               "/",
		"/a?b":            "/a",
		"/a//b/":          "/a//b/",
		"/a?x=http://b/c": "/a",
		"/http://b/c":     "/http://b/c",
		"https://h/a?b":   "/a",
		"https://h":       "/",
		"https://h?b":     "/",
		"*":               "/",
		"":                "",
		"h:443":           "h:443",
	} {
		assert.Equal(t, want, targetPath(target), target)
	}
	at := must.Get(newTargets([]string{"https://db.example.org"}))(t)
	assert.True(t, at.accept("https://db.example.org/", "*"))
	assert.True(t, at.accept("https://db.example.org", "/?x"))
	assert.True(t, at.accept("https://db.example.org/a", "https://other.test/a"), "the host in a request target plays no part")
	for _, target := range []string{"", "h:443", ":443"} { // of CONNECT
		assert.False(t, at.accept("https://db.example.org"+target, target), target)
		assert.False(t, at.accept("https://db.example.org/"+target, target), target)
	}
}
