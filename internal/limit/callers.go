package limit

import (
	"hash/maphash"
	"time"
)

// maxCallers bounds what is remembered of callers.
const maxCallers = 1 << 16

// callers remembers the buckets that are not full, the least recently used one being forgotten
// first when there are too many. A bucket that has filled up again is forgotten too, as it says
// nothing. Names are kept as hashes with a secret seed, so that long ones cost no more than short
// ones, and nobody can choose a name to share the bucket of another.
type callers struct {
	size
	seed  maphash.Seed
	index map[uint64]int32 // into slots
	slots []slot           // slots[0] is the ring's beginning: next is the newest, prev the oldest
	free  []int32
}

type slot struct {
	name       uint64
	full       time.Duration
	next, prev int32
}

func newCallers(s size) callers {
	if s.every == 0 {
		return callers{}
	}
	return callers{size: s, seed: maphash.MakeSeed(), index: make(map[uint64]int32), slots: make([]slot, 1)}
}

// own is a caller's bucket, and where it is remembered.
type own struct {
	bucket
	name uint64
	at   int32 // 0: nowhere
}

func (c *callers) find(caller string, now time.Duration) own {
	if c.every == 0 {
		return own{}
	}
	o := own{bucket: bucket{size: c.size, full: now}, name: maphash.String(c.seed, caller)}
	if o.at = c.index[o.name]; o.at != 0 {
		o.full = c.slots[o.at].full
		c.unlink(o.at)
		c.link(o.at) // refused or not, it is in use
	}
	return o
}

// put remembers o.
func (c *callers) put(o own, now time.Duration) {
	if c.every == 0 {
		return
	}
	if o.at == 0 {
		// Two go for each one that comes, so that the table shrinks after a flood.
		for range 2 {
			if oldest := c.slots[0].prev; oldest != 0 && (c.slots[oldest].full <= now || len(c.index) >= maxCallers) {
				c.forget(oldest)
			}
		}
		o.at = c.room()
		c.slots[o.at].name = o.name
		c.index[o.name] = o.at
		c.link(o.at)
	}
	c.slots[o.at].full = o.full
}

func (c *callers) room() int32 {
	if n := len(c.free); n > 0 {
		at := c.free[n-1]
		c.free = c.free[:n-1]
		return at
	}
	c.slots = append(c.slots, slot{})
	return int32(len(c.slots) - 1)
}

func (c *callers) forget(at int32) {
	c.unlink(at)
	delete(c.index, c.slots[at].name)
	c.free = append(c.free, at)
}

func (c *callers) link(at int32) {
	s := &c.slots[at]
	s.prev, s.next = 0, c.slots[0].next
	c.slots[s.next].prev = at
	c.slots[0].next = at
}

func (c *callers) unlink(at int32) {
	s := c.slots[at]
	c.slots[s.prev].next = s.next
	c.slots[s.next].prev = s.prev
}
