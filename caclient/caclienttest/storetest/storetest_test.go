package storetest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
)

// bugs are faults of a store, and a case that finds each.
var bugs = map[string]string{
	"makes a record that is not there":    "no record",
	"has no error without a record":       "no record",
	"keeps items":                         "contents",
	"shares items":                        "contents",
	"drops empty items":                   "contents",
	"has the hash as version":             "versions",
	"replaces any version":                "versions",
	"has another error for a conflict":    "versions",
	"ignores the context":                 "ended context",
	"prints":                              "printing",
	"takes damage for nothing":            "damage",
	"takes a missing place for no record": "missing place",
	"compares first, then sets":           "first of many",
	"compares, waits, and sets":           "many writers",
	"writes items one by one":             "readers",
	"has a cache":                         "readers",
	"takes a lost answer for a conflict":  "lost answer",
	"loses what had no answer":            "lost answer",
	"takes lost connections for nothing":  "lost connections",
	"answers from memory":                 "no answer",
	"waits longer than its context":       "no answer",
	"asks a copy":                         "copy that is behind",
	"loses the last record in a failover": "failover",
	"loses a record without an answer":    "failover before the answer",
}

// Each case finds a store that does what it must not.
func TestFindsBugs(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for bug, name := range bugs {
		t.Run(bug, func(t *testing.T) {
			t.Parallel()
			pattern := "^TestStore$/^" + regexp.MustCompile(`[ ,]+`).ReplaceAllString(name, "_") + "$"
			cmd := exec.Command(os.Args[0], "-test.run", pattern, "-test.v", "-test.short=false", "-test.timeout=4m")
			cmd.Env = append(os.Environ(), "STORETEST_BUG="+bug)
			out, err := cmd.CombinedOutput()
			assert.IsType(t, new(exec.ExitError), err)
			assert.Contains(t, string(out), "storetest.go:", "the case does not say what is wrong")
			assert.NotContains(t, string(out), "panic")
		})
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	bug := os.Getenv("STORETEST_BUG")
	storetest.Run(t, func(t *testing.T) storetest.Place {
		t.Parallel()
		p := &place{bug: bug}
		during := func(fault string) func() func() {
			return func() func() {
				p.set(func() { p.fault = fault })
				return func() { p.set(func() { p.fault = "" }) }
			}
		}
		return storetest.Place{
			Open: func() (ca.Store, error) { return &store{redact.New("store"), p, nil}, nil },
			Cut:  func(meanwhile func()) { p.set(func() { p.cut = meanwhile }) },
			FailOver: func() {
				p.set(func() {
					if bug == "loses the last record in a failover" || bug == "loses a record without an answer" && p.cutting {
						p.record = p.before
					}
				})
			},
			Break: during("broken"), Hang: during("hangs"), Remove: during("missing"),
			Behind: func() (ca.Store, error) {
				if bug == "asks a copy" {
					return &store{redact.New("store"), &place{record: p.record}, nil}, nil
				}
				return &store{redact.New("store"), p, nil}, nil
			},
			Dump: func() func() {
				old := p.record
				return func() { p.set(func() { p.record = old }) }
			},
			Damage: func() { p.fault = "damaged" },
		}
	})
}

// A place has a record in memory.
type place struct {
	mu             sync.Mutex
	bug, fault     string
	cut            func()
	cutting        bool
	record, before ca.Record
	saves, loads   int
}

func (p *place) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

type text = redact.Text

type store struct {
	text
	place *place
	seen  *ca.Record // by a cache
}

func (s *store) Format(f fmt.State, verb rune) {
	if s.place.bug == "prints" {
		_, _ = fmt.Fprintf(f, "%s", s.place.record.Data())
		return
	}
	_, _ = fmt.Fprint(f, "store")
}

func copyOf(data map[string][]byte) map[string][]byte {
	out := map[string][]byte{}
	for name, b := range data {
		out[name] = bytes.Clone(b)
	}
	return out
}

// fails returns the error of a call.
func (s *store) fails(ctx context.Context) error {
	p := s.place
	p.mu.Lock()
	fault := p.fault
	p.mu.Unlock()
	switch {
	case ctx.Err() != nil && p.bug != "ignores the context":
		return context.Cause(ctx)
	case fault == "hangs" && p.bug != "answers from memory":
		<-ctx.Done()
		for hangs := true; hangs && p.bug == "waits longer than its context"; time.Sleep(time.Millisecond) {
			p.set(func() { hangs = p.fault == "hangs" })
		}
		return ctx.Err()
	case fault == "broken" && p.bug == "takes lost connections for nothing",
		fault == "missing" && p.bug == "takes a missing place for no record",
		fault == "damaged" && p.bug == "takes damage for nothing":
		return ca.ErrNoRecord
	case fault == "broken", fault == "missing":
		return errors.New(fault)
	case fault == "damaged":
		return ca.ErrUnfit
	}
	return nil
}

func (s *store) Load(ctx context.Context) (ca.Record, error) {
	if err := s.fails(ctx); err != nil {
		return ca.Record{}, err
	}
	p := s.place
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.record
	p.loads++
	switch {
	case r.Version == "" && p.bug != "has no error without a record":
		return ca.Record{}, ca.ErrNoRecord
	case p.bug == "has a cache" && s.seen != nil && p.loads%2 == 0:
		return ca.NewRecord(s.seen.Version, copyOf(s.seen.Data())), nil
	case p.bug == "shares items":
		return r, nil
	}
	s.seen = &r
	return ca.NewRecord(r.Version, copyOf(r.Data())), nil
}

func (s *store) Save(ctx context.Context, r ca.Record) (string, error) {
	if err := s.fails(ctx); err != nil {
		return "", err
	}
	p := s.place
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.Version != p.record.Version && !(p.record.Version == "" && p.bug == "makes a record that is not there") &&
		!(p.record.Version != "" && r.Version != "" && p.bug == "replaces any version") {
		if p.bug == "has another error for a conflict" && r.Version != "" && p.record.Version != "" {
			return "", errors.New("it has changed")
		}
		return "", ca.ErrConflict
	}
	pause := func() {
		p.mu.Unlock()
		time.Sleep(10 * time.Millisecond) // in which all others get here on a slow machine, too
		p.mu.Lock()
	}
	if p.bug == "compares first, then sets" || p.bug == "compares, waits, and sets" {
		pause()
	}
	p.saves++
	data := copyOf(r.Data())
	version := strconv.Itoa(p.saves)
	switch p.bug {
	case "keeps items":
		for name, b := range p.record.Data() {
			if data[name] == nil {
				data[name] = b
			}
		}
	case "drops empty items":
		maps.DeleteFunc(data, func(_ string, b []byte) bool { return len(b) == 0 })
	case "has the hash as version":
		version = fmt.Sprint(sha256.Sum256(fmt.Append(nil, data)))
	case "writes items one by one":
		half := copyOf(p.record.Data())
		half["svidkit-text"] = data["svidkit-text"]
		p.record = ca.NewRecord("half", half)
		pause()
	}
	p.before, p.record = p.record, ca.NewRecord(version, data)
	if cut := p.cut; cut != nil {
		if p.cut = nil; p.bug == "loses what had no answer" {
			p.record = p.before
		}
		p.cutting = true
		p.mu.Unlock()
		cut()
		p.mu.Lock()
		if p.bug == "takes a lost answer for a conflict" {
			return "", ca.ErrConflict
		}
		return "", errors.New("lost")
	}
	return version, nil
}

func (s *store) Watch(ctx context.Context, changed func()) {
	for last := -1; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		s.place.mu.Lock()
		now := s.place.saves
		s.place.mu.Unlock()
		if now != last {
			last = now
			changed()
		}
	}
}
