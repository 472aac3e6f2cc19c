package spiffetls

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// HandshakeError says why this side ended a handshake: it refused the other side's certificate, or had
// none to present.
type HandshakeError struct {
	// Server says that this side is the server.
	Server bool

	// Err is the [*spiffe.VerifyError] of a refusal, with the stage, the rule and the ID, the
	// [*tls.CertificateVerificationError] of a client with [WebRoots], or says why there is no identity
	// to present.
	Err error

	// Off is how far this side's clock is from the validity of the refused certificate: positive if that
	// has expired, negative if it is not valid yet, and 0 if validity is not the reason.
	Off time.Duration

	// Clock is empty, or says in words why a clock may be wrong. It is a guess.
	Clock string

	hint string // what else may help
}

// Error names the side that was refused, the reason, and Clock if it is set.
func (e *HandshakeError) Error() string {
	text := "spiffetls: "
	if !e.refusal() {
		text += "no identity to present: "
	} else if e.Server {
		text += "the client is refused: "
	} else {
		text += "the server is refused: "
	}
	text += strings.TrimPrefix(strings.TrimPrefix(e.Err.Error(), "spiffetls: "), "spiffe: ") + e.hint
	if e.Clock != "" {
		text += "; " + e.Clock
	}
	return text
}

// Unwrap returns e.Err.
func (e *HandshakeError) Unwrap() error { return e.Err }

// otherSees returns the error that the other side gets for this failure, if it is written in Go.
func (e *HandshakeError) otherSees() string {
	switch {
	case e.refusal():
		return "remote error: tls: bad certificate"
	case e.Server:
		return "remote error: tls: internal error"
	}
	return "EOF, or in TLS 1.2 remote error: tls: internal error"
}

func (e *HandshakeError) refusal() bool {
	_, ok := errors.AsType[*spiffe.VerifyError](e.Err)
	return ok || webRefusal(e.Err)
}

// webRefusal reports whether err is that of a client with [WebRoots] about the server's certificate.
func webRefusal(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// clockSkew is the largest difference that is blamed on a clock.
const clockSkew = 5 * time.Minute

// refused makes the error for a peer that was not accepted.
func (e *endpoint) refused(role spiffe.Role, err error) *HandshakeError {
	he := &HandshakeError{Server: role == spiffe.ClientRole, Err: err}
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	if !ok || invalid.Reason != x509.Expired || invalid.Cert == nil {
		return he
	}
	now, cert := e.now(), invalid.Cert
	var own time.Time // when this side's identity was issued, by the CA's clock
	if svid, err := e.self.SVID(); err == nil && svid != nil {
		own = svid.Leaf().NotBefore
	}
	switch {
	case now.Before(cert.NotBefore):
		he.Off = now.Sub(cert.NotBefore)
		he.Clock = fmt.Sprintf("the certificate becomes valid only in %s: compare the clocks", readable(-he.Off))
		if now.Before(own) {
			he.Clock += "; this side's is slow, as its own certificate is not valid yet either"
		}
	case now.After(cert.NotAfter):
		he.Off = now.Sub(cert.NotAfter)
		if he.Off <= clockSkew && !own.After(cert.NotAfter) { // else it has expired by the CA's clock too
			he.Clock = fmt.Sprintf("the certificate expired %s ago: if the other side renews in time, compare the clocks", readable(he.Off))
		}
	}
	return he
}

func readable(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}

// Failure is one kind of failure in a [FailureLog]: handshakes that failed, or requests that [RequirePeer]
// denied, in the same way.
type Failure struct {
	Count uint64    `json:"count"`
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`

	// Side is the role of this side: "server" or "client".
	Side string `json:"side"`

	// Remote is the last address of the other side. A client that knows no address has the name that it
	// dialled.
	Remote string `json:"remote,omitempty"`

	// Stage is where the verification of the other side failed, as in [spiffe.VerifyError]; or "identity" if
	// this side had none to present, "web" if a client with [WebRoots] refused the server, "request" if a
	// request was denied, and "tls" if TLS itself failed or the other side ended the handshake.
	Stage string `json:"stage"`

	// Rule, ID and TrustDomain are those of the [spiffe.VerifyError]. The ID is a claim of the other side, also at the stage
	// policy: a handshake is judged before the other side has proved that it holds its key, and certificates can be copied.
	// At the stage request it is proven.
	Rule        string             `json:"rule,omitempty"`
	ID          spiffe.ID          `json:"id,omitzero"`
	TrustDomain spiffe.TrustDomain `json:"trust_domain,omitzero"`

	Reason    string `json:"reason"`               // the error, cut if it is long
	Clock     string `json:"clock,omitempty"`      // as in [HandshakeError]
	OtherSees string `json:"other_sees,omitempty"` // the error that the other side gets, if it is written in Go
}

// same reports whether f and g are the same failure at another time. A client has a new port each time.
func (f *Failure) same(g *Failure) bool {
	return f.Side == g.Side && f.Stage == g.Stage && f.Rule == g.Rule && f.ID == g.ID && host(f.Remote) == host(g.Remote)
}

func host(addr string) string {
	if h, _, err := net.SplitHostPort(addr); err == nil {
		return h
	}
	return addr
}

const (
	maxFailures = 64
	maxReason   = 1024
)

// FailureLog keeps the last failures of the configurations whose [Options] name it, at most 64 kinds,
// which is at most 256 KiB; a failure of the same kind and host increases its count. Its zero value is
// ready to use. It is safe for concurrent use and must not be copied.
//
// It is also an [http.Handler] for operators: text, or JSON if the request has "Accept:
// application/json" or the query "format=json". It shows IDs, addresses, rules and errors, and no
// certificates or keys. Mount it where only operators can read it.
type FailureLog struct {
	mu    sync.Mutex
	total uint64
	kept  []Failure // the newest first
}

// Failures returns what is kept, the newest first, and how many failures there were in all.
func (l *FailureLog) Failures() (kept []Failure, total uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.kept), l.total
}

// add records f, whose Count and times it sets. A nil log drops it.
func (l *FailureLog) add(now time.Time, f Failure) {
	if l == nil {
		return
	}
	f.Count, f.First, f.Last = 1, now, now
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	if i := slices.IndexFunc(l.kept, func(old Failure) bool { return old.same(&f) }); i >= 0 {
		f.Count, f.First = l.kept[i].Count+1, l.kept[i].First
		l.kept = slices.Delete(l.kept, i, i+1)
	} else if len(l.kept) == maxFailures {
		l.kept = l.kept[:maxFailures-1]
	}
	l.kept = slices.Insert(l.kept, 0, f)
}

// failureOf returns err as the Failure of a handshake.
func failureOf(server bool, remote string, err error) Failure {
	f := Failure{Side: "client", Remote: remote, Stage: stageOf(err), Reason: err.Error()}
	if server {
		f.Side = "server"
	}
	if he, ok := errors.AsType[*HandshakeError](err); ok {
		f.Reason, f.Clock, f.OtherSees = he.Err.Error(), he.Clock, he.otherSees()
	}
	if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		f.Rule, f.ID, f.TrustDomain = ve.Rule, ve.ID, ve.ID.TrustDomain()
	}
	return f
}

// stageOf returns the stage of a [Failure] at which a handshake, or the judgement of a connection, has failed.
func stageOf(err error) string {
	if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		return ve.Stage
	}
	if webRefusal(err) {
		return "web"
	}
	if _, ok := errors.AsType[*HandshakeError](err); ok {
		return "identity"
	}
	return "tls"
}

// clip bounds the parts that the other side can make long.
func (f *Failure) clip() {
	if len(f.Reason) > maxReason {
		f.Reason = strings.ToValidUTF8(f.Reason[:maxReason], "") + "…"
	}
}

// message is what a Logger is told of f.
func (f *Failure) message() string {
	switch {
	case f.Stage == "request":
		return "spiffetls: request denied"
	case f.Stage == "identity":
		return "spiffetls: handshake failed: no identity to present"
	case f.Stage == "tls":
		return "spiffetls: handshake failed"
	case f.Side == "server":
		return "spiffetls: client refused"
	}
	return "spiffetls: server refused"
}

// attrs are the attributes for a Logger. Before the end of a handshake a peer has claimed an ID, and not proved it.
func (f *Failure) attrs() []slog.Attr {
	attrs := []slog.Attr{slog.String("remote", f.Remote)}
	if !f.ID.IsZero() {
		key := "unverified_id"
		if f.Stage == "request" {
			key = "id"
		}
		attrs = append(attrs, slog.String(key, f.ID.String()))
	}
	attrs = append(attrs, slog.String("err", f.Reason))
	if f.Clock != "" {
		attrs = append(attrs, slog.String("clock", f.Clock))
	}
	return attrs
}

// ServeHTTP implements [http.Handler] for GET and HEAD.
func (l *FailureLog) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	kept, total := l.Failures()
	if r.URL.Query().Get("format") == "json" || strings.Contains(r.Header.Get("Accept"), "application/json") {
		h.Set("Content-Type", "application/json")
		if kept == nil {
			kept = []Failure{} // so that it is a list in JSON too
		}
		_ = json.NewEncoder(w).Encode(struct {
			Total    uint64    `json:"total"`
			Failures []Failure `json:"failures"`
		}{total, kept}) // an error means that the client is gone
		return
	}
	h.Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, failureText(kept, total))
}

func failureText(kept []Failure, total uint64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d failures since the start; the last of each kind, newest first\n", total)
	for _, f := range kept {
		fmt.Fprintf(&b, "\n%s  %d times since %s\n", f.Last.UTC().Format(time.RFC3339), f.Count, f.First.UTC().Format(time.RFC3339))
		var id, td string
		if !f.ID.IsZero() {
			id, td = f.ID.String(), f.TrustDomain.String()
		}
		for _, line := range [][2]string{
			{"this side", f.Side}, {"remote", f.Remote}, {"stage", f.Stage}, {"id", id}, {"trust domain", td},
			{"reason", strconv.Quote(f.Reason)}, // parts may be hostile
			{"clock", f.Clock}, {"other sees", f.OtherSees},
		} {
			if line[1] != "" {
				fmt.Fprintf(&b, "  %-13s %s\n", line[0], line[1])
			}
		}
	}
	return b.String()
}
