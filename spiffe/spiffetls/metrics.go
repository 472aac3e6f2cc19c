package spiffetls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/svidkit/svidkit/internal/guard"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Metrics counts the handshakes of the configurations whose [Config] names it, and the requests that [RequirePeer]
// denies. Its zero value is ready to use. It is safe for concurrent use and must not be copied.
//
// [Metrics.Report] has these counts:
//
//	svidkit_tls_handshakes_total         by side (of this program): server or client; outcome: full, resumed or
//	                                     failed; and reason, for those that failed
//	svidkit_tls_denied_requests_total    by reason
//
// The other side cannot choose any part of a reason. It was refused:
//
//	not_an_svid             its certificate is not an X.509-SVID
//	unknown_trust_domain    there is no bundle of its trust domain
//	no_authority            the bundle of its trust domain has no authority
//	no_bundle               the source of bundles failed
//	unknown_authority       no authority of its trust domain, and for WebRoots no root, has signed its certificate
//	expired                 its certificate has expired, or is not valid yet
//	wrong_role              its certificate is not for this role
//	wrong_host              its certificate is for another host name
//	no_roots                the function of WebRoots failed
//	invalid                 its certificate does not verify for another reason
//	denied                  the policy does not allow it
//	no_certificate          a request came without a proven client
//	proof_expired           a request came on a connection whose proof has expired
//	unclear_path            a request came with a path that can be read in two ways
//
// Or the handshake failed otherwise:
//
//	no_identity     this side has none to present, or it has expired
//	not_tls         the other side does not speak TLS
//	no_hello        a client of ConfigureServer did not begin TLS before its connection ended
//	not_verified    a client ended the handshake before it was verified, or has no TLS version in common
//	not_proven      a client has not proved that its certificate is its own, or ended the handshake before that was seen
//	left            a client that needs no certificate ended the handshake
//	refused         the other side sent an alert: it refuses this side, or another version
//	closed          the other side closed the connection
//	timeout         it took too long
//	canceled        this side gave up: the context of a client, or a listener before the hello, was ended
//	too_many        the connection was closed at once, as MaxHandshakes was reached
//	ungoverned      the connection was not accepted by way of the Governor
//	other           anything else
//
// A handshake counts when it ends. A TLS 1.3 server sees that its client has refused it as not_verified or not_proven; a
// client learns only after the handshake, which therefore counts as good, that its server has refused it. Configurations
// of [Endpoint.ServerConfig] and [Endpoint.ClientConfig] learn of the verification and not of the end: their handshakes count as good when the
// other side is verified, and connections that end before the client's hello do not count. The others know the
// end.
//
// Counting takes some ten nanoseconds and no memory.
type Metrics struct {
	succeeded [2][2]atomic.Uint64 // by side, and resumed or not
	failures  [2][numCauses]atomic.Uint64
	denials   [numCauses]atomic.Uint64

	mu     sync.Mutex
	silent map[*tls.Conn]struct{} // connections of servers that net/http has accepted, before the hello
	kept   []kept                 // the newest first
}

// cause is why a handshake failed, a request was denied, or a connection was ended: one of a few, none of which the
// other side can choose.
type cause uint8

const (
	// Of the other side, or of a client's request.
	causeNotSVID cause = iota
	causeUnknownDomain
	causeNoAuthority
	causeNoBundle
	causeUnknownAuthority
	causeUnknownRoot
	causeExpired
	causeWrongRole
	causeWrongHost
	causeNoRoots
	causeInvalid
	causeDenied

	// Of handshakes.
	causeNoIdentity
	causeNotTLS
	causeNoHello
	causeNotVerified
	causeUnproven
	causeLeft
	causeRefused
	causeClosed
	causeTimeout
	causeCanceled
	causeTooMany
	causeUngoverned
	causeOther

	// Of requests.
	causeNoCertificate
	causeProofExpired
	causeUnclearPath

	// Of connections.
	causeProofEnds

	numCauses
)

// causes are the labels of the metrics, and the reasons in the log. Some that the log tells apart have one label.
var causes = [numCauses]struct{ label, text string }{
	causeNotSVID:          {"not_an_svid", "its certificate is not an X.509-SVID"},
	causeUnknownDomain:    {"unknown_trust_domain", "its trust domain is not known"},
	causeNoAuthority:      {"no_authority", "its trust domain has no authority"},
	causeNoBundle:         {"no_bundle", "there is no bundle of its trust domain"},
	causeUnknownAuthority: {"unknown_authority", "no authority of its trust domain has signed its certificate"},
	causeUnknownRoot:      {"unknown_authority", "no web root has signed its certificate"},
	causeExpired:          {"expired", "its certificate has expired, or is not valid yet"},
	causeWrongRole:        {"wrong_role", "its certificate is not for this role"},
	causeWrongHost:        {"wrong_host", "its certificate is for another host name"},
	causeNoRoots:          {"no_roots", errNoWebRoots.Error()},
	causeInvalid:          {"invalid", "its certificate does not verify"},
	causeDenied:           {"denied", "the policy does not allow it"},
	causeNoIdentity:       {"no_identity", "no identity"},
	causeNotTLS:           {"not_tls", "TLS"},
	causeNoHello:          {"no_hello", "TLS"},
	causeNotVerified:      {"not_verified", errNotJudged.Error()},
	causeUnproven:         {"not_proven", errUnproven.Error()},
	causeLeft:             {"left", errAnonymous.Error()},
	causeRefused:          {"refused", "TLS"},
	causeClosed:           {"closed", "TLS"},
	causeTimeout:          {"timeout", errSlow.Error()},
	causeCanceled:         {"canceled", "TLS"},
	causeTooMany:          {"too_many", "TLS"},
	causeUngoverned:       {"ungoverned", errForeign.Error()},
	causeOther:            {"other", "TLS"},
	causeNoCertificate:    {"no_certificate", errNoProof.Error()},
	causeProofExpired:     {"proof_expired", "its proof has expired"},
	causeUnclearPath:      {"unclear_path", guard.ErrPath.Error()},
	causeProofEnds:        {"proof_ends", "the proof is about to expire"},
}

// causeOf returns the cause of err, which occurred at a stage of a failure.
func causeOf(stage string, err error) cause {
	switch stage {
	case "leaf":
		return causeNotSVID
	case "bundle":
		switch {
		case errors.Is(err, spiffe.ErrUnknownTrustDomain):
			return causeUnknownDomain
		case errors.Is(err, spiffe.ErrNoAuthority):
			return causeNoAuthority
		}
		return causeNoBundle
	case "chain", "web":
		if _, ok := errors.AsType[x509.HostnameError](err); ok {
			return causeWrongHost
		}
		if errors.Is(err, errNoWebRoots) {
			return causeNoRoots
		}
		if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
			if stage == "web" {
				return causeUnknownRoot
			}
			return causeUnknownAuthority
		}
		if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
			switch e.Reason {
			case x509.Expired:
				return causeExpired
			case x509.IncompatibleUsage:
				return causeWrongRole
			}
		}
		return causeInvalid
	case "policy":
		return causeDenied
	case "request":
		switch {
		case errors.Is(err, errProofExpired):
			return causeProofExpired
		case errors.Is(err, errNoProof):
			return causeNoCertificate
		case errors.Is(err, guard.ErrPath):
			return causeUnclearPath
		}
		return causeDenied
	case "identity":
		return causeNoIdentity
	}
	for _, known := range []struct {
		err   error
		cause cause
	}{
		{errSlow, causeTimeout}, {errNotJudged, causeNotVerified}, {errUnproven, causeUnproven}, {errAnonymous, causeLeft}, {errTooMany, causeTooMany},
		{errForeign, causeUngoverned},
		{context.DeadlineExceeded, causeTimeout}, {os.ErrDeadlineExceeded, causeTimeout}, {context.Canceled, causeCanceled},
		{io.EOF, causeClosed}, {io.ErrUnexpectedEOF, causeClosed}, {syscall.ECONNRESET, causeClosed}, {syscall.EPIPE, causeClosed},
	} {
		if errors.Is(err, known.err) {
			return known.cause
		}
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return causeNotTLS
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "remote error" { // as crypto/tls says it
		return causeRefused
	}
	return causeOther
}

func side(server bool) int {
	if server {
		return 1
	}
	return 0
}

// good counts a handshake that succeeded. A nil Metrics counts nothing.
func (m *Metrics) good(server, resumed bool) {
	if m != nil {
		m.succeeded[side(server)][side(resumed)].Add(1)
	}
}

// failed counts a failure.
func (m *Metrics) failed(f failure) {
	switch c := causeOf(f.stage, f.err); {
	case m == nil:
	case f.stage == "request":
		m.denials[c].Add(1)
	default:
		m.failures[side(f.server)][c].Add(1)
	}
}

// connState is the ConnState hook of net/http, which tells nothing else of a connection that ends before the hello.
func (m *Metrics) connState(c net.Conn, s http.ConnState) {
	conn, ok := c.(*tls.Conn)
	if !ok || m == nil {
		return
	}
	switch s {
	case http.StateNew:
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.silent == nil {
			m.silent = make(map[*tls.Conn]struct{})
		}
		m.silent[conn] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		if m.heard(conn) {
			m.failures[side(true)][causeNoHello].Add(1)
		}
	}
}

// heard notes that a client has sent its hello, and reports whether it had not before.
func (m *Metrics) heard(conn *tls.Conn) (first bool) {
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	_, first = m.silent[conn]
	delete(m.silent, conn)
	return first
}

// Report implements [report.Reporter] with the counts, and with the last failures as problems: of the last hour, the
// newest of up to eight kinds. An error wraps the [*HandshakeError], if there is one.
func (m *Metrics) Report() report.Report {
	return report.Report{Metrics: m.write, Problems: m.problems()}
}

func (m *Metrics) write(w io.Writer) error {
	var s metrics.Set
	const handshakes = "The number of TLS handshakes that have ended, by the side of this program, the outcome, and the reason of a failure."
	s.Totals("svidkit_tls_handshakes_total", handshakes, func(add metrics.Add) {
		for i, side := range []string{"client", "server"} {
			add(float64(m.succeeded[i][0].Load()), "side", side, "outcome", "full")
			add(float64(m.succeeded[i][1].Load()), "side", side, "outcome", "resumed")
			byReason(causeNotSVID, causeOther, func(c cause) uint64 { return m.failures[i][c].Load() }, func(v float64, reason string) {
				add(v, "side", side, "outcome", "failed", "reason", reason)
			})
		}
	})
	s.Totals("svidkit_tls_denied_requests_total", "The number of requests that RequirePeer has denied, by the reason.", func(add metrics.Add) {
		for _, c := range []cause{causeDenied, causeNoCertificate, causeProofExpired, causeUnclearPath} {
			add(float64(m.denials[c].Load()), "reason", causes[c].label)
		}
	})
	return s.Write(w)
}

// byReason adds the counts of causes from first to last, those with one label together.
func byReason(first, last cause, count func(cause) uint64, add func(v float64, reason string)) {
	var n uint64
	for c := first; c <= last; c++ {
		n += count(c)
		if c == last || causes[c+1].label != causes[c].label {
			add(float64(n), causes[c].label)
			n = 0
		}
	}
}

// Report implements [report.Reporter] with these metrics:
//
//	svidkit_governor_connections                that it holds, by state: open or draining
//	svidkit_governor_ended_connections_total    that have ended while they were drained, by reason: proof_ends, as
//	                                            the proof was about to expire, or one of those for which [Metrics]
//	                                            says that the other side was refused
func (g *Governor) Report() report.Report { return report.Report{Metrics: g.writeMetrics} }

func (g *Governor) writeMetrics(w io.Writer) error {
	g.mu.Lock()
	held, draining, ended := len(g.queue), g.draining, g.endedBy
	g.mu.Unlock()
	var s metrics.Set
	s.Gauges("svidkit_governor_connections", "The number of connections that the Governor holds, by state.", func(add metrics.Add) {
		add(float64(held-draining), "state", "open")
		add(float64(draining), "state", "draining")
	})
	s.Totals("svidkit_governor_ended_connections_total", "The number of connections that have ended while they were drained, by the reason why they were.", func(add metrics.Add) {
		one := func(v float64, reason string) { add(v, "reason", reason) }
		of := func(c cause) uint64 { return ended[c] }
		byReason(causeProofEnds, causeProofEnds, of, one)
		byReason(causeNotSVID, causeDenied, of, one)
	})
	return s.Write(w)
}
