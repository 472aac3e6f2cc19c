package federation

import (
	"container/heap"
	"time"
)

// longestSleep bounds every sleep of the scheduler. Timers stand still while the machine is
// suspended, revocations do not.
const longestSleep = time.Minute

// ticks is the scheduler's time. It never goes back, so that a wall clock that is put back does not
// move the next fetch into the far future, and it leaps when the wall clock does, so that a machine
// that wakes up sees at once what is due. It needs a lock around it.
type ticks struct {
	last time.Time
	sum  time.Duration
}

// advance returns the scheduler's time at now.
func (t *ticks) advance(now time.Time) time.Duration {
	t.sum += elapsed(now.Sub(t.last), now.Round(0).Sub(t.last.Round(0)))
	t.last = now
	return t.sum
}

// elapsed returns how much time has passed if the monotonic clock and the wall clock say this. The
// wall clock is believed when it leaps ahead, and not when it merely drifts.
func elapsed(mono, wall time.Duration) time.Duration {
	if wall > mono+time.Second {
		return wall
	}
	return max(mono, 0)
}

// requeue puts r into the queue that it belongs to. The caller holds mu, as for all that follows.
func (m *Manager) requeue(r *relation, due time.Duration) {
	m.unqueue(r)
	if r.failures > 0 {
		m.failing.push(r, due)
	} else {
		m.healthy.push(r, due)
	}
}

// hasten makes r due at once, if no attempt is under way.
func (m *Manager) hasten(r *relation) {
	if r.index > 0 {
		m.requeue(r, m.ticks.advance(time.Now()))
		m.kick()
	}
}

func (m *Manager) unqueue(r *relation) {
	if r.index > 0 {
		heap.Remove(&r.queue.h, r.index-1)
	}
}

// kick has Run look at the queues again.
func (m *Manager) kick() {
	if m.run == nil {
		return
	}
	select {
	case m.run.wake <- struct{}{}:
	default:
	}
}

// queue has relations that are not busy, the next one due in front.
type queue struct{ h relationHeap }

func (q *queue) push(r *relation, due time.Duration) {
	r.due, r.queue = due, q
	heap.Push(&q.h, r)
}

func (q *queue) front() *relation {
	if len(q.h) == 0 {
		return nil
	}
	return q.h[0]
}

// relationHeap implements [heap.Interface].
type relationHeap []*relation

func (h relationHeap) Len() int           { return len(h) }
func (h relationHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h relationHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i+1, j+1
}

func (h *relationHeap) Push(x any) {
	r := x.(*relation)
	*h = append(*h, r)
	r.index = len(*h)
}

func (h *relationHeap) Pop() any {
	last := len(*h) - 1
	r := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	r.index = 0
	return r
}
