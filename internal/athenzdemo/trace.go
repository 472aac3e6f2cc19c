package athenzdemo

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// participants are in the order of the diagram.
var participants = []string{operator, apiServer, kubelet, sia, agent, signing, zts, provider, intruder}

const (
	operator  = "operator"
	apiServer = "API server"
	kubelet   = "kubelet"
	sia       = "athenz-sia"
	agent     = "athenz-agent"
	signing   = "signing service"
	zts       = "ZTS"
	provider  = "athenz-provider"
	intruder  = "intruder"
)

// Trace is what has happened, in the order of time.
type Trace struct {
	out   io.Writer
	begun time.Time

	mu     sync.Mutex
	quiet  bool
	phases []phase
}

type phase struct {
	title  string
	events []event
}

type event struct{ from, to, text string }

// phase begins the next phase.
func (t *Trace) phase(title string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.phases, t.quiet = append(t.phases, phase{title: title}), false
	fmt.Fprintf(t.out, "%5.1fs  %s\n", time.Since(t.begun).Seconds(), title)
}

// pause ends the phase: what comes until the next one is not noted, such as a retry.
func (t *Trace) pause() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.quiet = true
}

// event notes what one participant sends to another one.
func (t *Trace) event(from, to, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.quiet || len(t.phases) == 0 {
		return
	}
	p := &t.phases[len(t.phases)-1]
	p.events = append(p.events, event{from, to, text})
	fmt.Fprintf(t.out, "        %s → %s: %s\n", from, to, text)
}

// Diagram returns the trace as a sequence diagram in Mermaid.
func (t *Trace) Diagram() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	b.WriteString("sequenceDiagram\n")
	for i, name := range participants {
		fmt.Fprintf(&b, "    participant p%d as %s\n", i, name)
	}
	for _, p := range t.phases {
		fmt.Fprintf(&b, "    Note over p0,p%d: %s\n", len(participants)-1, p.title)
		for _, e := range p.events {
			arrow := "->>"
			if strings.HasPrefix(e.text, "answers ") {
				arrow = "-->>"
			}
			fmt.Fprintf(&b, "    p%d%sp%d: %s\n", slices.Index(participants, e.from), arrow, slices.Index(participants, e.to), e.text)
		}
	}
	return b.String()
}
