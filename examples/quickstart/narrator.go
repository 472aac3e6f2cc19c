package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
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

// progress counts requests.
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

// narrator writes events as they happen: lines for people, or JSON.
type narrator struct {
	start time.Time
	json  bool

	mu  sync.Mutex
	out io.Writer
}

// say writes an event.
func (n *narrator) say(e event) {
	e.At = math.Trunc(1000*time.Since(n.start).Seconds()) / 1000
	if !n.json {
		n.print(e.line() + "\n")
		return
	}
	if line, err := json.Marshal(e); err == nil {
		n.write(string(line) + "\n")
	}
}

// line returns an event for people.
func (e event) line() string {
	text := []string{fmt.Sprintf("%5.1fs  %-8s  %s", e.At, e.Who, e.What)}
	if e.ID != "" {
		text = append(text, e.ID)
	}
	if e.Serial != "" {
		text = append(text, "serial "+e.Serial)
	}
	if !e.NotAfter.IsZero() {
		layout := "15:04:05Z"
		if time.Until(e.NotAfter) > 24*time.Hour {
			layout = time.DateOnly
		}
		text = append(text, "until "+e.NotAfter.UTC().Format(layout))
	}
	if e.Detail != "" {
		text = append(text, e.Detail)
	}
	return strings.Join(text, "  ")
}

// status writes the numbers of requests.
func (n *narrator) status(p progress) {
	if n.json {
		n.say(event{Who: "traffic", What: "progress", Progress: &p})
		return
	}
	n.say(event{Who: "traffic", What: fmt.Sprintf("%d requests done, %d failed", p.Done, p.Failed)})
}

// print writes text as it is, except with -json.
func (n *narrator) print(text string) {
	if !n.json {
		n.write(text)
	}
}

func (n *narrator) write(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	fmt.Fprint(n.out, text)
}

// finish writes the summary.
func (n *narrator) finish(s summary) {
	if n.json {
		n.say(event{Who: "summary", What: "over", Summary: &s})
	}
	n.print(fmt.Sprintf("\nrenewals %d, root rotations %d, SDS updates %d, requests %d, failed handshakes: %d\n",
		s.Renewals, s.RootRotations, s.SDSUpdates, s.Requests, s.FailedHandshakes))
}
