package statuspage

import (
	"cmp"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// What is shown of each list.
const (
	maxRows   = 200
	maxEvents = 50
	maxNames  = 8 // of an event
)

// view is what is shown at one moment: the JSON form, and what the HTML is made of.
type view struct {
	Title      string         `json:"title"`
	Time       time.Time      `json:"time"`
	Problems   list[problem]  `json:"problems"`
	Identities list[identity] `json:"identities"`
	Roots      list[root]     `json:"roots"`
	Upstreams  list[upstream] `json:"upstreams"`
	Servers    list[server]   `json:"servers"`
	Names      list[name]     `json:"names"`
	Events     list[event]    `json:"events"`
}

// list is the first rows of a list.
type list[T any] struct {
	Rows    []T `json:"rows"`
	Omitted int `json:"omitted,omitempty"`
}

// Total returns how many rows there would be.
func (l list[T]) Total() int { return len(l.Rows) + l.Omitted }

type problem struct {
	Part  string `json:"part"`
	What  string `json:"what,omitempty"`
	Error string `json:"error"`

	state bool // the error says how What is, and not why
}

type identity struct {
	Part     string    `json:"part"`
	Name     string    `json:"name"`
	State    string    `json:"state"`
	Begin    time.Time `json:"not_before,omitzero"`
	End      time.Time `json:"not_after,omitzero"`
	Renewal  time.Time `json:"renewal,omitzero"`
	Failures int       `json:"failures,omitempty"`
	Error    string    `json:"error,omitempty"`
}

type root struct {
	TrustDomain string    `json:"trust_domain"`
	Kind        string    `json:"kind"` // X.509, JWT or WIT; none for an empty bundle
	Name        string    `json:"name,omitempty"`
	SHA256      string    `json:"sha256,omitempty"` // of the certificate, in hex
	State       string    `json:"state"`
	Begin       time.Time `json:"not_before,omitzero"`
	End         time.Time `json:"not_after,omitzero"`
	From        []string  `json:"from"`
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
	Kind    string    `json:"kind"` // push or NACK
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
	retrying = "retrying" // the last attempt has failed
	notYet   = "not yet valid"
	expired  = "expired"
	missing  = "missing"
	empty    = "empty"

	good    = "ok"
	failing = "failing"
	waiting = "waiting" // neither has been
)

// view asks the parts. Texts are made fit to be shown once it is clear which rows are.
func (h *Handler) view(now time.Time) *view {
	v := &view{Title: h.title, Time: now.UTC()}
	var problems []problem
	var identities []identity
	var names []name
	roots := map[string]*root{}
	for _, p := range h.parts {
		r := p.report()
		wrong := func(what string, err error) {
			if err != nil {
				problems = append(problems, problem{Part: p.name, What: what, Error: err.Error()})
			}
		}
		for _, i := range r.Identities {
			row := identity{p.name, i.Name, i.state(now), utc(i.NotBefore), utc(i.NotAfter), utc(i.Renewal), i.Failures, errorText(i.Err)}
			identities = append(identities, row)
			if i.Err == nil && (row.State == expired || row.State == notYet) {
				problems = append(problems, problem{p.name, row.Name, row.State, true})
			}
			wrong(row.Name, i.Err)
		}
		for _, b := range r.Roots {
			if b.Bundle != nil {
				addRoots(roots, cmp.Or(b.Origin, p.name), p.name, b, now)
			}
		}
		for _, u := range r.Upstreams {
			v.Upstreams.Rows = append(v.Upstreams.Rows, upstream{p.name, u.Name, u.state(), utc(u.LastSuccess), utc(u.NextAttempt), u.Failures, errorText(u.Err)})
			wrong(u.Name, u.Err)
		}
		for _, s := range r.Servers {
			row := server{Part: p.name, Protocol: s.Protocol, Streams: s.Streams}
			for n, version := range s.Names {
				if version == "" {
					row.Waiting++
				} else {
					row.Served++
				}
				names = append(names, name{p.name, n, version})
			}
			v.Servers.Rows = append(v.Servers.Rows, row)
			for _, e := range s.Events {
				kind := "push"
				if e.NACK {
					kind = "NACK"
				}
				v.Events.Rows = append(v.Events.Rows, event{utc(e.Time), p.name, kind, e.Names, e.Version, e.Streams, e.Client, e.Message})
			}
		}
		for _, err := range r.Problems {
			wrong("", err)
		}
	}
	for _, r := range roots {
		if r.State == empty || r.State == expired {
			problems = append(problems, problem{strings.Join(r.From, ", "), r.TrustDomain, strings.TrimSpace("the trust bundle is " + r.State + " " + r.Name), true})
		}
		v.Roots.Rows = append(v.Roots.Rows, *r)
	}

	order := map[string]int{}
	for i, p := range h.parts {
		order[p.name] = i
	}
	v.Problems = first(maxRows, unique(problems))
	v.Identities = first(maxRows, identities, func(a, b identity) int {
		return cmp.Or(a.next().Compare(b.next()), strings.Compare(a.Name, b.Name))
	}, func(a, b identity) int {
		return cmp.Or(order[a.Part]-order[b.Part], strings.Compare(a.Name, b.Name))
	})
	v.Roots = first(maxRows, v.Roots.Rows, func(a, b root) int {
		return cmp.Or(a.End.Compare(b.End), strings.Compare(a.SHA256+a.Name, b.SHA256+b.Name))
	}, func(a, b root) int {
		return cmp.Or(strings.Compare(a.TrustDomain, b.TrustDomain), strings.Compare(b.Kind, a.Kind), a.Begin.Compare(b.Begin), strings.Compare(a.SHA256+a.Name, b.SHA256+b.Name))
	})
	v.Upstreams = first(maxRows, v.Upstreams.Rows)
	v.Servers = first(maxRows, v.Servers.Rows)
	v.Names = first(maxRows, names, func(a, b name) int { // what is waited for comes first
		return cmp.Or(min(len(a.Version), 1)-min(len(b.Version), 1), order[a.Part]-order[b.Part], strings.Compare(a.Name, b.Name))
	})
	v.Events = first(maxEvents, v.Events.Rows, func(a, b event) int { return b.Time.Compare(a.Time) })
	v.clean()
	return v
}

// first returns the first n rows by the first of the orders, sorted by the last.
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

// unique returns what differs of all.
func unique(all []problem) (some []problem) {
	seen := map[problem]bool{}
	for _, p := range all {
		key := p
		if !p.state { // an identity and the CA that did not renew it have the same reason
			key.What = ""
		}
		if !seen[key] {
			seen[key] = true
			some = append(some, p)
		}
	}
	return some
}

// clean makes what others have named or said fit to be shown: lines of printable characters, of at most 500 bytes.
func (v *view) clean() {
	text := func(texts ...*string) {
		for _, t := range texts {
			*t = bearer.Redact(*t)
		}
	}
	text(&v.Title)
	for i := range v.Problems.Rows {
		p := &v.Problems.Rows[i]
		text(&p.Part, &p.What, &p.Error)
	}
	for i := range v.Identities.Rows {
		r := &v.Identities.Rows[i]
		text(&r.Name, &r.Error)
	}
	for i := range v.Roots.Rows {
		r := &v.Roots.Rows[i]
		text(&r.Name)
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
	for i := range v.Events.Rows {
		e := &v.Events.Rows[i]
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

// state says how i is at a time.
func (i *Identity) state(now time.Time) string {
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

// next is when something is to happen to i; zero if it is late already.
func (i identity) next() time.Time {
	if i.Renewal.IsZero() || i.End.Before(i.Renewal) {
		return i.End
	}
	return i.Renewal
}

func (u *Upstream) state() string {
	switch {
	case u.Err != nil:
		return failing
	case u.LastSuccess.IsZero() && !u.OK:
		return waiting
	}
	return good
}

// addRoots adds the authorities of a bundle to those that are known, by what they are.
func addRoots(all map[string]*root, origin, part string, b Roots, now time.Time) {
	if origin != part {
		origin = part + " (" + origin + ")"
	}
	td := b.Bundle.TrustDomain().String()
	add := func(r root) {
		key := td + " " + r.Kind + " " + r.SHA256 + " " + r.Name
		have := all[key]
		if have == nil {
			r.TrustDomain = td
			have = &r
			all[key] = have
		}
		if !slices.Contains(have.From, origin) {
			have.From = append(have.From, origin)
		}
	}
	n := 0
	for c := range b.Bundle.X509Authorities() {
		n++
		sum := sha256.Sum256(c.Raw)
		r := root{Kind: "X.509", Name: subject(c), SHA256: hex.EncodeToString(sum[:]), State: valid, Begin: utc(c.NotBefore), End: utc(c.NotAfter)}
		switch {
		case now.After(c.NotAfter):
			r.State = expired
		case now.Before(c.NotBefore):
			r.State = notYet
		}
		add(r)
	}
	for _, keys := range []struct {
		kind string
		ids  iter.Seq2[string, crypto.PublicKey]
	}{{"JWT", b.Bundle.JWTAuthorities()}, {"WIT", b.Bundle.WITAuthorities()}} {
		for id := range keys.ids {
			n++
			add(root{Kind: keys.kind, Name: id, State: valid})
		}
	}
	if n == 0 {
		add(root{Kind: "none", State: empty})
	}
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

// utc returns t, or the time next to it of a year that has four digits, which is all that JSON has.
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

// stamp is how a time is written.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// seconds returns how many there are from one time to another, which may be more than a [time.Duration] has.
func seconds(from, to time.Time) float64 {
	return float64(to.Unix()-from.Unix()) + float64(to.Nanosecond()-from.Nanosecond())/1e9
}

// span is a number of seconds in the coarsest unit that says enough, so that a page does not change each second.
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

// when says how far a time is from now.
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
