package sdstest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// RunModel plays seeds random scripts, each against a new server: clients of both kinds that ask, drop, reject,
// answer late, reconnect and send stale requests, while secrets change, disappear and return. The reference model is
// the requests of each client and the history of the source: a client must not get anything else, or anything older
// than it has, or again what it has rejected; in the end every client must have the source's content, and nothing
// more may come. A seed always gives the same script. A failing script is shortened, and printed for [RunScript].
func RunModel(t *testing.T, start Start, seeds int) {
	contents := newContents(t)
	var failed atomic.Bool
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			if failed.Load() {
				t.Skip("a seed has failed")
			}
			fails := func(patience time.Duration, lines []string) error {
				s := start(t, Options{})
				if s == nil {
					t.Skip("the server cannot be started")
				}
				return play(t.Context(), s, contents, patience, lines)
			}
			lines := randomScript(uint64(seed))
			if err := fails(patience, lines); err != nil && failed.CompareAndSwap(false, true) {
				lines, err = shrink(lines, err, func(lines []string) error { return fails(impatience, lines) },
					time.Now().Add(time.Minute))
				t.Errorf("%v\nthe script, for RunScript:\n%s", err, strings.Join(lines, "\n"))
			}
		})
	}
}

// randomScript returns the script for a seed.
func randomScript(seed uint64) []string {
	rnd := rand.New(rand.NewPCG(seed, 1))
	names := []string{"a", "b", "c", "e"}
	pick := func(from []string) string { return from[rnd.IntN(len(from))] }
	some := func() []string {
		return slices.DeleteFunc(slices.Clone(names), func(string) bool { return rnd.IntN(2) == 0 })
	}
	var lines []string
	add := func(words ...string) { lines = append(lines, strings.Join(words, " ")) }
	for _, name := range names[:1+rnd.IntN(len(names))] {
		add("set", name, "1")
	}
	for range 10 + rnd.IntN(40) {
		sotw, delta := pick([]string{"s1", "s2", "s3"}), pick([]string{"d1", "d2", "d3"})
		switch rnd.IntN(16) {
		case 0, 1, 2, 3:
			add("set", pick(names), pick([]string{"1", "2", "3", "-", "pair"}))
		case 4, 5, 6:
			add(append([]string{sotw, "ask"}, some()...)...)
		case 7, 8:
			add(append([]string{delta, "sub"}, some()...)...)
		case 9:
			add(append([]string{delta, "unsub"}, some()...)...)
		case 10, 11:
			add(pick([]string{sotw, delta}), "sync ack")
		case 12:
			add(pick([]string{sotw, delta}), pick([]string{"sync nack", "flush"}))
		case 13:
			add(sotw, "send nonce=stale names="+strings.Join(some(), ","))
			add(delta, "send nonce=stale sub="+pick(names), "unsub="+pick(names))
		case 14:
			add(sotw, "close")
			add(append([]string{sotw, "ask"}, some()...)...)
		case 15:
			brings := strings.Join(some(), ",")
			add(delta, "close")
			add(delta, "send sub="+brings, "have="+brings)
		}
	}
	return append(lines, "finish")
}

// finish waits until every client has the source's content, and checks that nothing more comes, nor dropped names.
func (p *player) finish() error {
	var open []*stream
	for _, s := range p.sorted() {
		if s.on != nil {
			open = append(open, s)
		}
	}
	names := p.names()
	for _, s := range open {
		if err := p.flush(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.name, err)
		}
	}
	p.strict = true
	for _, name := range names {
		if err := p.set(name, "5"); err != nil {
			return err
		}
	}
	for _, s := range open {
		if err := p.sync(s, false); err != nil {
			return fmt.Errorf("stream %s, at the end: %w", s.name, err)
		}
	}
	for _, s := range open {
		if err := p.line(s.name + " quiet"); err != nil {
			return fmt.Errorf("stream %s, at the end: %w", s.name, err)
		}
	}
	return nil
}

// shrink removes lines while the script still fails and time is left. It returns the rest and its error.
func shrink(lines []string, err error, fails func([]string) error, until time.Time) ([]string, error) {
	for size := len(lines) / 2; size > 0; {
		shorter := false
		for from := 0; from+size < len(lines); { // the last line stays
			without := slices.Concat(lines[:from], lines[from+size:])
			var again error
			for range 3 { // concurrent steps differ from run to run
				if again = fails(without); again != nil || time.Now().After(until) {
					break
				}
			}
			if time.Now().After(until) {
				return lines, err
			}
			if again == nil {
				from += size
				continue
			}
			lines, err, shorter = without, again, true
		}
		if size = size / 2; size == 0 && shorter {
			size = 1
		}
	}
	return lines, err
}
