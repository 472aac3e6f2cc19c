package conns

import "testing"

// Usable returns how many of n descriptors are for accepted connections.
func Usable(n int) int { return usableOf(n) }

// CloseAll gives all connections back.
func (l *Listener) CloseAll() {
	for c := range l.held {
		l.Closed(c)
	}
}

// Held returns how many connections count at present.
func (l *Listener) Held() int {
	l.own.Lock()
	defer l.own.Unlock()
	return len(l.held)
}

// MaxWork and AnswerTime are the bounds of requests.
const MaxWork, AnswerTime = maxWork, answerTime

// UnderWay returns how many requests are under way.
func UnderWay() int {
	underWay.Lock()
	defer underWay.Unlock()
	return underWay.held
}

// Waiting returns how many streams wait for their handlers.
func Waiting() int { return int(waiting.Load()) }

// TakeAll takes all that is there for requests, until back is called.
func TakeAll(t *testing.T) (back func()) {
	t.Helper()
	n := 0
	for underWay.take(nil, 1) == nil {
		n++
	}
	return func() { underWay.give(nil, n) }
}
