package statuspage

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Limits of each list.
const (
	maxRows   = 200
	maxEvents = 50
	maxNames  = 8 // of an event
)

// view is the page's content at one moment: its JSON form, and the data of the HTML.
type view struct {
	Title      string         `json:"title"`
	Time       time.Time      `json:"time"`
	Host       string         `json:"host"`
	Version    string         `json:"version"`
	Started    time.Time      `json:"started"`
	Links      []string       `json:"-"`
	Problems   list[problem]  `json:"problems"`
	Identities list[identity] `json:"identities"`
	Roots      list[root]     `json:"roots"`
	Upstreams  list[upstream] `json:"upstreams"`
	Servers    list[server]   `json:"servers"`
	Names      list[name]     `json:"names"`
	Events     list[event]    `json:"events"`
	Attempts   list[event]    `json:"attempts"` // to obtain identities
}

// list is the first rows of a list.
type list[T any] struct {
	Rows    []T `json:"rows"`
	Omitted int `json:"omitted,omitempty"`
}

// Total returns the number of rows before the cut.
func (l list[T]) Total() int { return len(l.Rows) + l.Omitted }

type identity struct {
	Part     string    `json:"part"`
	Name     string    `json:"name"`
	State    string    `json:"state"`
	Begin    time.Time `json:"not_before,omitzero"`
	End      time.Time `json:"not_after,omitzero"`
	Renewal  time.Time `json:"renewal,omitzero"`
	Failures int       `json:"failures,omitempty"`
	Error    string    `json:"error,omitempty"`

	certificate

	leaf func() *x509.Certificate // only of shown rows
}

type root struct {
	TrustDomain string    `json:"trust_domain"`
	Kind        string    `json:"kind"` // X.509, JWT or WIT; none for an empty bundle
	Name        string    `json:"name,omitempty"`
	State       string    `json:"state"`
	Begin       time.Time `json:"not_before,omitzero"`
	End         time.Time `json:"not_after,omitzero"`
	From        []string  `json:"from"`

	certificate
}

// certificate describes a certificate in the form of "openssl x509 -serial -fingerprint -sha256 -issuer -nameopt
// RFC2253". All fields are empty without one.
type certificate struct {
	Serial string `json:"serial,omitempty"` // in hex
	SHA256 string `json:"sha256,omitempty"` // in hex
	Issuer string `json:"issuer,omitempty"`
}

func certificateOf(c *x509.Certificate) certificate {
	if c == nil {
		return certificate{}
	}
	sum := sha256.Sum256(c.Raw)
	return certificate{c.SerialNumber.Text(16), hex.EncodeToString(sum[:]), c.Issuer.String()}
}

type upstream struct {
	Part        string    `json:"part"`
	Name        string    `json:"name"`
	State       string    `json:"state"`
	LastSuccess time.Time `json:"last_success,omitzero"`
	NextAttempt time.Time `json:"next_attempt,omitzero"`
	Failures    int       `json:"failures,omitempty"`
	Error       string    `json:"error,omitempty"`
}

type server struct {
	Part     string `json:"part"`
	Protocol string `json:"protocol"`
	Streams  int    `json:"streams"`
	Served   int    `json:"served"`  // names with something to serve
	Waiting  int    `json:"waiting"` // names without
}

type name struct {
	Part    string `json:"part"`
	Name    string `json:"name"`
	Version string `json:"version,omitempty"` // empty: nothing to serve
}

type event struct {
	Time    time.Time `json:"time"`
	Part    string    `json:"part"`
	Kind    string    `json:"kind"` // push or NACK; for attempts renewed or failed
	Names   []string  `json:"names"`
	Version string    `json:"version,omitempty"`
	Streams int       `json:"streams,omitempty"`
	Client  string    `json:"client,omitempty"`
	Message string    `json:"message,omitempty"`
}

// States of an identity, a root and an upstream.
const (
	valid    = "valid"
	renewing = "renewing" // an attempt is due or under way
	retrying = "retrying" // the last attempt failed
	notYet   = "not yet valid"
	expired  = "expired"
	missing  = "missing"
	empty    = "empty"

	good    = "ok"
	failing = "failing"
	waiting = "waiting" // no success and no failure yet
)

// view asks the parts. It cleans only the texts of shown rows.
func (h *Handler) view(now time.Time) *view {
	c := collection{view: view{Title: h.title, Time: now.UTC(), Host: host, Version: version, Started: started.UTC(),
		Links: h.links}, now: now,
		roots: map[string]*root{}, causes: map[[2]string]int{}, order: map[string]int{}}
	for i, p := range h.parts {
		c.order[p.Name] = i
		c.add(p.Name, p.Source.Report())
	}
	return c.limited()
}

// Constants of the process.
var (
	started = time.Now()
	host, _ = os.Hostname()
	version = func() string {
		if info, ok := debug.ReadBuildInfo(); ok {
			return strings.TrimSpace(info.Main.Version + " " + info.GoVersion)
		}
		return runtime.Version()
	}()
)

// Uptime is how long the process has been running.
func (v *view) Uptime() string { return span(seconds(v.Started, v.Time)) }

// collection gathers the parts' reports before they are sorted and cut.
type collection struct {
	view
	now   time.Time
	roots map[string]*root // by content
	order map[string]int   // of the parts

	causes map[[2]string]int // index of the problem of a part and a cause
}

// add adds a part's report.
func (c *collection) add(part string, r report.Report) {
	for _, i := range r.Identities {
		row := identity{part, i.Name, identityState(&i, c.now), utc(i.NotBefore), utc(i.NotAfter), utc(i.Renewal),
			i.Failures, errorText(i.Err), certificate{}, i.Certificate}
		c.Identities.Rows = append(c.Identities.Rows, row)
		if i.Err != nil || row.State == expired || row.State == notYet {
			c.wrong(problem{Part: part, What: row.Name, State: row.State, Begin: row.Begin, End: row.End,
				Since: utc(i.Since), Next: row.Renewal, Identities: 1}, i.Err, r.Upstreams...)
		}
	}
	for _, b := range r.Bundles {
		if b.Err == nil {
			c.addRoots(part, &b)
		}
	}
	for _, u := range r.Upstreams {
		row := upstream{part, u.Name, upstreamState(&u), utc(u.LastSuccess), utc(u.NextAttempt), u.Failures,
			errorText(u.Err)}
		c.Upstreams.Rows = append(c.Upstreams.Rows, row)
		if u.Err != nil {
			c.wrong(problem{Part: part, What: u.Name, Since: utc(u.Since), Next: utc(u.NextAttempt)}, u.Err)
		}
	}
	for _, s := range r.Servers {
		c.addServer(part, &s)
	}
	for _, err := range r.Problems {
		c.wrong(problem{Part: part}, err)
	}
	for _, a := range r.Attempts {
		kind := "renewed"
		if a.Failure != "" {
			kind = "failed"
		}
		c.Attempts.Rows = append(c.Attempts.Rows, event{Time: utc(a.Time), Part: part, Kind: kind, Names: a.Names,
			Streams: a.Count, Message: a.Failure})
	}
}

// addRoots adds a bundle's authorities to those that other parts also have.
func (c *collection) addRoots(part string, b *report.Bundle) {
	origin := part
	if b.Origin != "" && b.Origin != part {
		origin += " (" + b.Origin + ")"
	}
	add := func(r root) {
		key := b.TrustDomain + " " + r.Kind + " " + r.SHA256 + " " + r.Name
		have := c.roots[key]
		if have == nil {
			r.TrustDomain = b.TrustDomain
			have = &r
			c.roots[key] = have
		}
		if !slices.Contains(have.From, origin) {
			have.From = append(have.From, origin)
		}
	}
	for _, cert := range b.X509 {
		r := root{Kind: "X.509", Name: subject(cert), State: valid, Begin: utc(cert.NotBefore),
			End: utc(cert.NotAfter), certificate: certificateOf(cert)}
		switch {
		case c.now.After(cert.NotAfter):
			r.State = expired
		case c.now.Before(cert.NotBefore):
			r.State = notYet
		}
		add(r)
	}
	for _, id := range b.JWT {
		add(root{Kind: "JWT", Name: id, State: valid})
	}
	for _, id := range b.WIT {
		add(root{Kind: "WIT", Name: id, State: valid})
	}
	if len(b.X509)+len(b.JWT)+len(b.WIT) == 0 {
		add(root{Kind: "none", State: empty})
	}
}

func (c *collection) addServer(part string, s *report.Server) {
	row := server{Part: part, Protocol: s.Protocol, Streams: s.Streams}
	for n, version := range s.Names {
		if version == "" {
			row.Waiting++
		} else {
			row.Served++
		}
		c.Names.Rows = append(c.Names.Rows, name{part, n, version})
	}
	c.Servers.Rows = append(c.Servers.Rows, row)
	for _, p := range s.Pushes {
		kind := "push"
		if p.NACK {
			kind = "NACK"
		}
		c.Events.Rows = append(c.Events.Rows, event{utc(p.Time), part, kind, p.Names, p.Version, p.Streams, p.Client,
			p.Message})
	}
}

// limited returns the view: the rows to show, sorted.
func (c *collection) limited() *view {
	v := &c.view
	for _, key := range slices.Sorted(maps.Keys(c.roots)) {
		r := c.roots[key]
		if r.State == empty || r.State == expired {
			what := strings.TrimSpace("the trust bundle is " + r.State + " " + r.Name)
			v.Problems.Rows = append(v.Problems.Rows, problem{Part: strings.Join(r.From, ", "), What: r.TrustDomain,
				Error: what, Action: "see that what it comes from has a newer one"})
		}
		v.Roots.Rows = append(v.Roots.Rows, *r)
	}
	v.Problems = first(maxRows, v.Problems.Rows, func(a, b problem) int {
		return a.urgency(c.now).Compare(b.urgency(c.now))
	})
	v.Identities = first(maxRows, v.Identities.Rows, func(a, b identity) int {
		return cmp.Or(a.next().Compare(b.next()), strings.Compare(a.Name, b.Name))
	}, func(a, b identity) int {
		return cmp.Or(c.order[a.Part]-c.order[b.Part], strings.Compare(a.Name, b.Name))
	})
	v.Roots = first(maxRows, v.Roots.Rows, func(a, b root) int {
		return cmp.Or(a.End.Compare(b.End), strings.Compare(a.SHA256+a.Name, b.SHA256+b.Name))
	}, func(a, b root) int {
		return cmp.Or(strings.Compare(a.TrustDomain, b.TrustDomain), strings.Compare(b.Kind, a.Kind),
			a.Begin.Compare(b.Begin), strings.Compare(a.SHA256+a.Name, b.SHA256+b.Name))
	})
	v.Upstreams = first(maxRows, v.Upstreams.Rows)
	v.Servers = first(maxRows, v.Servers.Rows)
	v.Names = first(maxRows, v.Names.Rows, func(a, b name) int { // waiting names come first
		return cmp.Or(min(len(a.Version), 1)-min(len(b.Version), 1), c.order[a.Part]-c.order[b.Part],
			strings.Compare(a.Name, b.Name))
	})
	newest := func(a, b event) int { return b.Time.Compare(a.Time) }
	v.Events = first(maxEvents, v.Events.Rows, newest)
	v.Attempts = first(maxEvents, v.Attempts.Rows, newest)
	v.clean()
	return v
}

// first selects n rows by the first of the orders, and sorts them by the last.
func first[T any](n int, all []T, orders ...func(a, b T) int) list[T] {
	if len(orders) > 0 {
		slices.SortStableFunc(all, orders[0])
	}
	l := list[T]{Rows: all[:min(n, len(all)):min(n, len(all))], Omitted: max(len(all)-n, 0)}
	if len(orders) > 1 {
		slices.SortStableFunc(l.Rows, orders[1])
	}
	if l.Rows == nil {
		l.Rows = []T{} // an empty list in JSON
	}
	return l
}

// clean makes texts from others safe to show: lines of printable characters, of at most 500 bytes.
func (v *view) clean() {
	text := func(texts ...*string) {
		for _, t := range texts {
			*t = bearer.Redact(*t)
		}
	}
	text(&v.Title)
	for i := range v.Problems.Rows {
		p := &v.Problems.Rows[i]
		text(&p.Part, &p.What, &p.Error, &p.Cause)
	}
	for i := range v.Identities.Rows {
		r := &v.Identities.Rows[i]
		if r.leaf != nil {
			r.certificate = certificateOf(r.leaf())
		}
		text(&r.Name, &r.Error, &r.Issuer)
	}
	for i := range v.Roots.Rows {
		r := &v.Roots.Rows[i]
		text(&r.TrustDomain, &r.Name, &r.Issuer)
		for j := range r.From {
			text(&r.From[j])
		}
	}
	for i := range v.Upstreams.Rows {
		u := &v.Upstreams.Rows[i]
		text(&u.Name, &u.Error)
	}
	for i := range v.Servers.Rows {
		text(&v.Servers.Rows[i].Protocol)
	}
	for i := range v.Names.Rows {
		n := &v.Names.Rows[i]
		text(&n.Name, &n.Version)
	}
	events := func(yield func(*event) bool) {
		for _, rows := range [][]event{v.Events.Rows, v.Attempts.Rows} {
			for i := range rows {
				if !yield(&rows[i]) {
					return
				}
			}
		}
	}
	for e := range events {
		text(&e.Version, &e.Client, &e.Message)
		names := e.Names
		e.Names = []string{}
		for _, n := range names[:min(len(names), maxNames)] {
			text(&n)
			e.Names = append(e.Names, n)
		}
		if more := len(names) - maxNames; more > 0 {
			e.Names = append(e.Names, fmt.Sprintf("and %d more", more))
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func identityState(i *report.Identity, now time.Time) string {
	switch {
	case i.NotAfter.IsZero():
		return missing
	case now.After(i.NotAfter):
		return expired
	case now.Before(i.NotBefore):
		return notYet
	case i.Err != nil:
		return retrying
	case !i.Renewal.IsZero() && now.After(i.Renewal):
		return renewing
	}
	return valid
}

// next is the time of the next event of i; zero if that is overdue.
func (i identity) next() time.Time {
	if i.Renewal.IsZero() || i.End.Before(i.Renewal) {
		return i.End
	}
	return i.Renewal
}

func upstreamState(u *report.Upstream) string {
	switch {
	case u.Err != nil:
		return failing
	case u.LastSuccess.IsZero() && !u.OK:
		return waiting
	}
	return good
}

// subject names a root.
func subject(c *x509.Certificate) string {
	if s := c.Subject.String(); s != "" {
		return s
	}
	if len(c.URIs) > 0 {
		return c.URIs[0].String()
	}
	return "serial number " + c.SerialNumber.Text(16)
}

// utc returns t, or the nearest time whose year has four digits, as JSON has no others.
func utc(t time.Time) time.Time {
	t = t.UTC()
	switch y := t.Year(); {
	case y < 0:
		return time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC)
	case y > 9999:
		return time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	}
	return t
}

// stamp formats a time.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// seconds returns the seconds from one time to another, which may exceed a [time.Duration].
func seconds(from, to time.Time) float64 {
	return float64(to.Unix()-from.Unix()) + float64(to.Nanosecond()-from.Nanosecond())/1e9
}

// span formats seconds in a unit coarse enough that the page does not change each second.
func span(s float64) string {
	for _, u := range []struct {
		seconds float64
		name    string
	}{{365 * 24 * 3600, "y"}, {24 * 3600, "d"}, {3600, "h"}, {60, "min"}} {
		if s >= 2*u.seconds {
			return strconv.FormatInt(int64(s/u.seconds), 10) + " " + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + " s"
}

// when describes the distance of a time from now.
func when(t, now time.Time) string {
	switch s := seconds(now, t); {
	case t.IsZero():
		return "–"
	case s < -1:
		return span(-s) + " ago"
	case s < 1:
		return "now"
	default:
		return "in " + span(s)
	}
}
