package verifycache_test

import (
	"hash/maphash"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/tokens/verifycache"
)

type entry struct {
	name  string
	worth int64
}

func keep(t *verifycache.Table[entry], hash uint64, name string, worth int64) {
	t.Keep(hash, &entry{name, worth}, func(old *entry) int64 {
		if old.name == name {
			return verifycache.Older
		}
		return old.worth
	})
}

func find(t *verifycache.Table[entry], hash uint64, name string) *entry {
	return t.Find(hash, func(e *entry) bool { return e.name == name })
}

func TestTable(t *testing.T) {
	t.Parallel()
	m := verifycache.New[entry](4)
	assert.Nil(t, find(m, 7, "a"), "an empty table")
	for i, name := range []string{"a", "b", "c", "d"} {
		keep(m, 7, name, int64(10+i))
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		assert.NotNil(t, find(m, 7, name), name)
	}
	assert.Nil(t, find(m, 7, "e"), "an equal hash is not an equal credential")

	keep(m, 7, "e", 5) // in the place of a
	assert.Nil(t, find(m, 7, "a"))
	keep(m, 7, "f", 50) // in the place of e
	assert.Nil(t, find(m, 7, "e"))
	few := verifycache.New[entry](4)
	keep(few, 7, "a", 1)
	keep(few, 7, "a", 2) // in its own place, though others are free
	assert.EqualValues(t, 2, find(few, 7, "a").worth)

	keep(m, 7, "d", 60) // in its own place, and not in that of b
	assert.NotNil(t, find(m, 7, "b"))
	assert.EqualValues(t, 60, find(m, 7, "d").worth)
}

// A table never holds more than it was made for, and most of what fits.
func TestBounds(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 40; n++ {
		m := verifycache.New[entry](n)
		hash := func(i int) uint64 { return maphash.String(m.Seed, strconv.Itoa(i)) }
		for i := range 500 {
			keep(m, hash(i), strconv.Itoa(i), int64(i))
		}
		found := 0
		for i := range 500 {
			if find(m, hash(i), strconv.Itoa(i)) != nil {
				found++
			}
		}
		assert.LessOrEqual(t, found, n)
		assert.Greater(t, found, n-4)
	}
}

// For the race detector.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	m := verifycache.New[entry](3)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 200 {
				name := strconv.Itoa(i % 9)
				keep(m, uint64(i%9), name, int64(i))
				if e := find(m, uint64(i%9), name); e != nil {
					assert.Equal(t, name, e.name)
				}
			}
		})
	}
	wg.Wait()
}
