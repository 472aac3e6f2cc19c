// Package sequence notes what the participants of a demo send to each other, as lines while it happens and as a
// sequence diagram in Mermaid afterwards, which the tests of the demos compare with their pages.
package sequence

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// Trace is what has happened, by phases, in the order of time. [New] makes one. It is safe for concurrent use.
type Trace struct {
	out          io.Writer
	participants []string
	once         bool
	begun        time.Time

	mu     sync.Mutex
	paused bool
	phases []phase
}

type phase struct {
	title  string
	events []event
}

type event struct{ from, to, text string }

// New returns a Trace that writes to out. The participants are those of all events, in the order of the diagram. With
// once, an event that has been in its phase is not noted again, for demos whose participants repeat themselves.
func New(out io.Writer, once bool, participants ...string) *Trace {
	return &Trace{out: out, participants: participants, once: once, begun: time.Now()}
}

// Phase begins the next phase.
func (t *Trace) Phase(title string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(title)
}

// PhaseWith begins the next phase with its first event, so that no other one comes before it.
func (t *Trace) PhaseWith(title, from, to, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(title)
	t.add(event{from, to, text})
}

func (t *Trace) begin(title string) {
	t.phases, t.paused = append(t.phases, phase{title: title}), false
	t.say(title)
}

// Current returns the title of the present phase; empty before the first.
func (t *Trace) Current() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.phases) == 0 {
		return ""
	}
	return t.phases[len(t.phases)-1].title
}

// Say writes a line that is no part of the diagram.
func (t *Trace) Say(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.say(text)
}

func (t *Trace) say(text string) {
	fmt.Fprintf(t.out, "%5.1fs  %s\n", time.Since(t.begun).Seconds(), text)
}

// Pause ends the phase: what comes until the next one is not noted, such as a retry.
func (t *Trace) Pause() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.paused = true
}

// Event notes what one participant sends to another one. Before the first phase it notes nothing.
func (t *Trace) Event(from, to, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.paused && len(t.phases) > 0 {
		t.add(event{from, to, text})
	}
}

// add notes an event. The caller holds mu.
func (t *Trace) add(e event) {
	p := &t.phases[len(t.phases)-1]
	if t.once && slices.Contains(p.events, e) {
		return
	}
	p.events = append(p.events, e)
	fmt.Fprintf(t.out, "        %s → %s: %s\n", e.from, e.to, e.text)
}

// Diagram returns the trace as a sequence diagram in Mermaid. Texts that begin with "answers " have the arrow of an
// answer.
func (t *Trace) Diagram() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	b.WriteString("sequenceDiagram\n")
	for i, name := range t.participants {
		fmt.Fprintf(&b, "    participant p%d as %s\n", i, name)
	}
	for _, p := range t.phases {
		fmt.Fprintf(&b, "    Note over p0,p%d: %s\n", len(t.participants)-1, p.title)
		for _, e := range p.events {
			arrow := "->>"
			if strings.HasPrefix(e.text, "answers ") {
				arrow = "-->>"
			}
			fmt.Fprintf(&b, "    p%d%sp%d: %s\n", slices.Index(t.participants, e.from), arrow,
				slices.Index(t.participants, e.to), e.text)
		}
	}
	return b.String()
}
