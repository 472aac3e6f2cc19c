package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// event is one thing that happened. As JSON it is one line of -json.
type event struct {
	At       float64   `json:"at"`  // seconds since the start
	Who      string    `json:"who"` // ca, frontend, backend, sds, envoy, traffic
	What     string    `json:"what"`
	ID       string    `json:"id,omitempty"`
	Serial   string    `json:"serial,omitempty"`
	NotAfter time.Time `json:"not_after,omitzero"`
	Detail   string    `json:"detail,omitempty"`
	Progress *progress `json:"progress,omitempty"`
	Summary  *summary  `json:"summary,omitempty"`
}

// progress is how the traffic goes.
type progress struct {
	Done   int64 `json:"done"`
	Failed int64 `json:"failed"`
}

// summary is the last event.
type summary struct {
	Renewals         int64 `json:"renewals"`
	RootRotations    int64 `json:"root_rotations"`
	SDSUpdates       int64 `json:"sds_updates"`
	Requests         int64 `json:"requests"`
	FailedHandshakes int64 `json:"failed_handshakes"`
}

// narrator writes events as they happen: lines for people, with a live line below them on a
// terminal, or JSON.
type narrator struct {
	start time.Time
	json  bool
	live  bool // the output is a terminal

	mu   sync.Mutex
	out  io.Writer
	last string // the live line that is on the screen
}

func (n *narrator) say(e event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Since(n.start).Seconds()
	if n.json {
		e.At = float64(int(now*1000)) / 1000
		line, err := json.Marshal(e)
		if err == nil {
			fmt.Fprintf(n.out, "%s\n", line)
		}
		return
	}
	n.clear()
	text := []string{e.What}
	if e.ID != "" {
		text = append(text, e.ID)
	}
	if e.Serial != "" {
		text = append(text, "serial "+e.Serial)
	}
	if !e.NotAfter.IsZero() {
		layout := "15:04:05"
		if time.Until(e.NotAfter) > 24*time.Hour {
			layout = time.DateOnly
		}
		text = append(text, "until "+e.NotAfter.Local().Format(layout))
	}
	if e.Detail != "" {
		text = append(text, e.Detail)
	}
	fmt.Fprintf(n.out, "%5.1fs  %-8s  %s\n", now, e.Who, strings.Join(text, "  "))
	n.draw()
}

// status shows how the traffic goes: on the live line of a terminal, else as an event.
func (n *narrator) status(p progress) {
	if n.json {
		n.say(event{Who: "traffic", What: "progress", Progress: &p})
		return
	}
	line := fmt.Sprintf("%d requests done, %d failed", p.Done, p.Failed)
	if !n.live {
		n.say(event{Who: "traffic", What: line})
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clear()
	n.last = fmt.Sprintf("%5.1fs  %-8s  %s", time.Since(n.start).Seconds(), "traffic", line)
	n.draw()
}

// print writes text as it is; -json leaves it out.
func (n *narrator) print(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.json {
		return
	}
	n.clear()
	fmt.Fprint(n.out, text)
	n.draw()
}

// clear and draw take the live line off the screen and put it back.
func (n *narrator) clear() {
	if n.last != "" {
		fmt.Fprint(n.out, "\r\x1b[K")
	}
}

func (n *narrator) draw() { fmt.Fprint(n.out, n.last) }

// end leaves the last live line where it is.
func (n *narrator) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.last != "" {
		fmt.Fprintln(n.out)
		n.last = ""
	}
}

// finish says how it went.
func (n *narrator) finish(s summary) {
	if n.json {
		n.say(event{Who: "summary", What: "over", Summary: &s})
		return
	}
	n.print(fmt.Sprintf("\nrenewals %d, root rotations %d, SDS updates %d, requests %d, failed handshakes: %d\n",
		s.Renewals, s.RootRotations, s.SDSUpdates, s.Requests, s.FailedHandshakes))
}
