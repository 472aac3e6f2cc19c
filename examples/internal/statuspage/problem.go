package statuspage

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/spiffe/report"
)

// problem is one cause and its effects.
type problem struct {
	Part   string `json:"part"`
	What   string `json:"what,omitempty"`
	Cause  string `json:"cause,omitempty"` // in words; empty for an unknown kind of error
	Error  string `json:"error"`
	Action string `json:"action,omitempty"`

	State      string    `json:"state,omitempty"` // of an identity, with its times
	Begin      time.Time `json:"not_before,omitzero"`
	End        time.Time `json:"not_after,omitzero"`
	Since      time.Time `json:"since,omitzero"`
	Next       time.Time `json:"next_attempt,omitzero"`
	Identities int       `json:"identities,omitempty"` // affected
}

// wrong adds a problem, and merges problems with one cause: an identity, others, and the CA that did not renew them.
// The merged problem shows the identity that ends first. The first of from is the identity's source.
func (c *collection) wrong(p problem, err error, from ...report.Upstream) {
	switch {
	case err != nil:
		p.Error = err.Error()
		p.Cause, p.Action = explain(err)
	case p.State == notYet:
		p.Error, p.Action = p.State, "compare the clocks of this machine and of the CA"
	default:
		p.Error, p.Action = p.State, "see why what writes or renews it has no newer one"
		if len(from) > 0 {
			p.Action += ": " + from[0].Name
		}
	}
	key := [2]string{p.Part, cmp.Or(p.Cause, p.Error)}
	i, there := c.causes[key]
	if !there || err == nil { // a state is no cause
		if err != nil {
			c.causes[key] = len(c.Problems.Rows)
		}
		c.Problems.Rows = append(c.Problems.Rows, p)
		return
	}
	have := &c.Problems.Rows[i]
	if p.Identities > 0 && (have.Identities == 0 || p.urgency(c.now).Before(have.urgency(c.now))) {
		p, *have = *have, p
	}
	have.Identities += p.Identities
	have.Since = earlier(have.Since, p.Since)
	have.Next = earlier(have.Next, p.Next)
}

// earlier returns the earlier of two times. Either may be unknown.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// urgency is the sort key of problems: expired identities come first, then identities never obtained, then those that
// expire; the rest follows.
func (p problem) urgency(now time.Time) time.Time {
	switch {
	case p.Identities == 0:
		return time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	case p.End.IsZero():
		return now
	}
	return p.End
}

// Words describes the problem in words and figures.
func (p problem) Words(now time.Time) string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	switch {
	case p.State == missing:
		add("there is none yet")
	case p.State == expired:
		add("expired %s", when(p.End, now))
	case p.State == notYet:
		add("valid %s", when(p.Begin, now))
	case p.State != "" && !p.End.IsZero():
		add("expires %s", when(p.End, now))
	}
	why := p.Cause
	if why == "" && p.Error != p.State {
		why = p.Error
	}
	if why != "" {
		if !p.Since.IsZero() && seconds(p.Since, now) >= 1 {
			why += ", for " + span(seconds(p.Since, now))
		}
		add("%s", why)
	}
	if !p.Next.IsZero() {
		add("next attempt %s", when(p.Next, now))
	}
	if p.Identities > 1 {
		add("%d identities", p.Identities)
	}
	return strings.Join(all, "; ")
}

// explain returns the cause and the remedy of an error of a known kind.
func explain(err error) (cause, action string) {
	at := "the other side"
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Addr != nil && op.Addr.String() != "" {
		at = op.Addr.String()
	}
	if name, ok := errors.AsType[*net.DNSError](err); ok {
		return "no address is known for " + name.Name, "correct the name, or mend the name server"
	}
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		at = path.Path
	}
	_, untrusted := errors.AsType[x509.UnknownAuthorityError](err)
	timeout, _ := errors.AsType[net.Error](err)
	switch {
	case untrusted:
		return "the certificate of the other side does not lead to the roots that are trusted here", "give this " +
			"program the roots of the CA that it asks; compare the fingerprints below"
	case errors.Is(err, syscall.ECONNREFUSED):
		return at + " refuses connections", "start what listens there, or correct the address"
	case errors.Is(err, fs.ErrNotExist):
		return at + " is not there", "mount or write it, or correct its path"
	case errors.Is(err, fs.ErrPermission):
		return "this process may not open " + at, "let the user of this process read it"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), timeout != nil &&
		timeout.Timeout():
		return at + " does not answer in time", "see whether it hangs, or a firewall is between"
	}
	return "", "" // our own errors say it themselves
}
