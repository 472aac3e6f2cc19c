package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// Participants, beside the two applications and their proxies.
const (
	injector  = "injector"
	kubelet   = "kubelet"
	identity  = "identity service"
	apiServer = "API server"
	operator  = "operator"
)

func proxyOf(name string) string { return name + " proxy" }

// trace is what has happened, by phases. In each phase an event counts once.
type trace struct {
	out   io.Writer
	begun time.Time

	mu     sync.Mutex
	phases []phase
	whose  string // the workload whose requests to the identity service count; empty for all
}

type phase struct {
	title  string
	events []event
}

type event struct{ from, to, text string }

// phase begins the next phase, with its first event.
func (t *trace) phase(title, from, to, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.phases = append(t.phases, phase{title: title})
	fmt.Fprintf(t.out, "%5.1fs  %s\n", time.Since(t.begun).Seconds(), title)
	t.add(event{from, to, text})
}

// current returns the title of the phase.
func (t *trace) current() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.phases[len(t.phases)-1].title
}

// watch has only one workload's requests to the identity service count from now on, as those of several come in any order.
func (t *trace) watch(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.whose = name
}

// eventOf is event for what the identity service has to do with one workload.
func (t *trace) eventOf(name, from, to, text string) {
	t.mu.Lock()
	whose := t.whose
	t.mu.Unlock()
	if whose == "" || whose == name {
		t.event(from, to, text)
	}
}

// event notes what one participant sends to another one.
func (t *trace) event(from, to, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.add(event{from, to, text})
}

// add notes an event. The caller holds mu.
func (t *trace) add(e event) {
	p := &t.phases[len(t.phases)-1]
	if slices.Contains(p.events, e) {
		return
	}
	p.events = append(p.events, e)
	fmt.Fprintf(t.out, "        %s → %s: %s\n", e.from, e.to, e.text)
}

// diagram returns the trace as a sequence diagram in Mermaid. In each phase it is in the order of what causes what.
func (t *trace) diagram() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	order := []string{operator, injector, kubelet, "voting", "voting proxy", "web proxy", "web", identity, apiServer}
	var b strings.Builder
	b.WriteString("sequenceDiagram\n")
	for i, name := range order {
		fmt.Fprintf(&b, "    participant p%d as %s\n", i, name)
	}
	for _, p := range t.phases {
		fmt.Fprintf(&b, "    Note over p0,p%d: %s\n", len(order)-1, p.title)
		for _, e := range p.events {
			fmt.Fprintf(&b, "    p%d->>p%d: %s\n", slices.Index(order, e.from), slices.Index(order, e.to), e.text)
		}
	}
	return b.String()
}
