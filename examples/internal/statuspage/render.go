package statuspage

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/internal/peerkey"
)

var (
	//go:embed page.html
	html string
	//go:embed page.css
	css []byte
	//go:embed page.js
	script []byte

	pages = template.Must(template.New("").Funcs(template.FuncMap{"stamp": stamp, "when": when, "bar": newBar,
		"short": short, "at": newAt}).Parse(html))
)

// sections are the parts of the page that a live page replaces.
var sections = []string{"clock", "host", "summary", "problems", "identities", "attempts", "upstreams", "servers",
	"names", "events", "roots"}

// rendering is the page at one moment. It never changes.
type rendering struct {
	until time.Time // when it becomes stale
	view  *view
	parts map[string]string // by section
}

// share limits rendering to one part in share of the time.
const share = 20

// render returns the current page, or a very recent one.
func (h *Handler) render() *rendering {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if h.now != nil && now.Before(h.now.until) {
		return h.now
	}
	r := &rendering{view: h.view(now), parts: map[string]string{}}
	for _, name := range sections {
		r.parts[name] = r.execute(name)
	}
	h.now = r
	r.until = now.Add(max(100*time.Millisecond, share*time.Since(now)))
	return r
}

// execute renders a template with the view.
func (r *rendering) execute(name string) string {
	var b strings.Builder
	if err := pages.ExecuteTemplate(&b, name, r.view); err != nil {
		panic(fmt.Sprintf("statuspage: template %s: %v", name, err)) // it is part of the program
	}
	return strings.TrimSpace(b.String())
}

func (r *rendering) page() []byte { return []byte("<!DOCTYPE html>\n" + r.execute("page") + "\n") }

func (r *rendering) json() []byte {
	b, err := json.MarshalIndent(r.view, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("statuspage: %v", err)) // all values are texts, numbers and times of four digits
	}
	return append(b, '\n')
}

// at is a time to show, and the current time.
type at struct{ T, Now time.Time }

func newAt(t, now time.Time) at { return at{t, now} }

// short is the beginning of a hash.
func short(s string) string { return s[:min(len(s), 12)] }

// bar is a drawn lifetime, 100 wide.
type bar struct {
	Drawn   bool
	Now     int // the part that has passed
	Renewal int // -1 for none
	State   string
	Text    string
}

// Tick is where the mark of the renewal begins.
func (b bar) Tick() int { return min(b.Renewal, 99) }

func newBar(row any, now time.Time) bar {
	var begin, end, renewal time.Time
	b := bar{Renewal: -1}
	switch row := row.(type) {
	case identity:
		begin, end, renewal, b.State = row.Begin, row.End, row.Renewal, row.State
	case root:
		begin, end, b.State = row.Begin, row.End, row.State
	}
	if begin.IsZero() || !end.After(begin) {
		return b
	}
	passed := func(t time.Time) int {
		return int(math.Round(100 * min(max(seconds(begin, t)/seconds(begin, end), 0), 1)))
	}
	b.Drawn, b.Now = true, passed(now)
	b.Text = fmt.Sprintf("%d %% of the life from %s to %s has passed", b.Now, stamp(begin), stamp(end))
	if !renewal.IsZero() {
		b.Renewal = passed(renewal)
		b.Text += fmt.Sprintf("; the next attempt to renew is at %d %%, %s", b.Renewal, stamp(renewal))
	}
	return b
}

const (
	tick      = time.Second      // between two updates of a live page
	heartbeat = 15 * time.Second // write at least this often
	slow      = 10 * time.Second // in which a client must read a write
)

// serveEvents writes the sections as server-sent events: first all of them, then each that changes.
func (h *Handler) serveEvents(w http.ResponseWriter, r *http.Request) {
	select {
	case <-h.done:
		http.Error(w, "the program ends", http.StatusServiceUnavailable)
		return
	default:
	}
	peer := cmp.Or(peerkey.UserFromContext(r.Context()), loopback.Name(r.RemoteAddr))
	if err := h.live.Take(peer, 1); err != nil {
		http.Error(w, fmt.Sprintf("too many pages are live, of which %d can be, and %d for one user; close one of "+
			"them", maxLive, maxLiveEach), http.StatusServiceUnavailable)
		return
	}
	defer h.live.Give(peer, 1)
	w.Header().Set("Content-Type", "text/event-stream")
	if r.Method == http.MethodHead {
		return
	}
	control := http.NewResponseController(w)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	sent, last := map[string]string{}, time.Now()
	b := bytes.NewBufferString("retry: 2000\n\n")
	for {
		now := h.render()
		for _, name := range sections {
			if before, ok := sent[name]; !ok || before != now.parts[name] {
				html := now.parts[name]
				sent[name] = html
				fmt.Fprintf(b, "event: %s\ndata: %s\n\n", name, strings.ReplaceAll(html, "\n", "\ndata: "))
			}
		}
		if b.Len() == 0 && time.Since(last) >= heartbeat {
			b.WriteString(":\n\n")
		}
		if b.Len() > 0 {
			_ = control.SetWriteDeadline(time.Now().Add(slow)) // not supported by a test's recorder
			if _, err := b.WriteTo(w); err != nil {
				return
			}
			if err := control.Flush(); err != nil {
				return
			}
			// HTTP/2 would end the stream at the deadline, even without a write.
			_ = control.SetWriteDeadline(time.Time{})
			last = time.Now()
		}
		select {
		case <-ticker.C:
		case <-r.Context().Done():
			return
		case <-h.done:
			return
		}
	}
}
