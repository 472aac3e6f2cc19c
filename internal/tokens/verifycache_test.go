package tokens_test

import (
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/tokens/verifycache"
)

func own(old int64) int64 { return old }

func has(t *verifycache.Table[string, int64], name string) bool {
	_, ok := t.Find(name)
	return ok
}

func TestVerifycacheTable(t *testing.T) {
	t.Parallel()
	m := verifycache.New[string, int64](4) // one set
	assert.False(t, has(m, "a"), "an empty table")
	for i, name := range []string{"a", "b", "c", "d"} {
		m.Keep(name, int64(10+i), own)
	}
	for i, name := range []string{"a", "b", "c", "d"} {
		value, ok := m.Find(name)
		assert.True(t, ok, name)
		assert.EqualValues(t, 10+i, value)
	}
	assert.False(t, has(m, "e"))
	m.Keep("e", 5, own) // in the place of a
	assert.False(t, has(m, "a"))
	m.Keep("f", 50, own) // in the place of e
	assert.False(t, has(m, "e"))
	m.Keep("d", 60, own) // in its own place, and not in that of b
	assert.True(t, has(m, "b"))
	value, _ := m.Find("d")
	assert.EqualValues(t, 60, value)
	m.Keep("g", 1, func(old int64) int64 {
		if old == 60 {
			return verifycache.Useless
		}
		return old
	})
	assert.False(t, has(m, "d"))

	few := verifycache.New[string, int64](4)
	few.Keep("a", 1, own)
	few.Keep("a", 2, own) // in its own place, though others are free
	for _, name := range []string{"b", "c", "d"} {
		few.Keep(name, 3, own)
	}
	value, _ = few.Find("a")
	assert.EqualValues(t, 2, value)
}

// A table never holds more than it was made for, and most of what fits.
func TestVerifycacheBounds(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 40; n++ {
		m := verifycache.New[string, int64](n)
		for i := range 500 {
			m.Keep(strconv.Itoa(i), int64(i), own)
		}
		found := 0
		for i := range 500 {
			if has(m, strconv.Itoa(i)) {
				found++
			}
		}
		assert.LessOrEqual(t, found, n)
		assert.Greater(t, found, n-4)
	}
}

// For the race detector.
func TestVerifycacheConcurrentUse(t *testing.T) {
	t.Parallel()
	m := verifycache.New[string, int64](3)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 200 {
				name := strconv.Itoa(i % 9)
				m.Keep(name, int64(i%9), own)
				if value, ok := m.Find(name); ok {
					assert.Equal(t, name, strconv.FormatInt(value, 10))
				}
			}
		})
	}
	wg.Wait()
}

// A repeated credential costs no memory.
func TestVerifycacheAllocations(t *testing.T) {
	m := verifycache.New[string, int64](1000)
	m.Keep("a", 1, own)
	hashes := verifycache.New[[32]byte, int64](1000)
	hashes.Keep([32]byte{1}, 1, own)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = m.Find("a") }))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = hashes.Find([32]byte{1}) }))
}
