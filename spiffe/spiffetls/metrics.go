package spiffetls

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Metrics counts the handshakes of the configurations whose [Config] names it, and the requests that [RequirePeer]
// denies. Its zero value is ready to use. It is safe for concurrent use and must not be copied.
//
// [Metrics.Report] has these counts:
//
//	svidkit_tls_handshakes_total         by side (of this program): server or client; outcome: full, resumed or
//	                                     failed; and reason, for those that failed
//	svidkit_tls_algorithms_total         those that succeeded, by side, key_exchange, such as X25519MLKEM768, and
//	                                     peer_key, the kind of the other side's key, such as ecdsa or ml-dsa-65, or none
//	svidkit_tls_denied_requests_total    by reason
//
// The other side cannot choose any part of a reason. These mean that the other side was refused:
//
//	not_an_svid             its certificate is not an X.509-SVID
//	unknown_trust_domain    there is no bundle of its trust domain
//	no_authority            the bundle of its trust domain has no authority
//	no_bundle               the source of bundles failed
//	unknown_authority       no authority of its trust domain, and for WebRoots no root, has signed its certificate
//	expired                 its certificate has expired, or is not valid yet
//	wrong_role              its certificate is not for this role
//	wrong_host              its certificate is for another host name
//	algorithm               its certificate, or one above it, has a key of a kind that Algorithms does not have
//	no_roots                the function of WebRoots failed
//	invalid                 its certificate does not verify for another reason
//	denied                  the policy does not allow it
//	no_certificate          a request came without a proven client
//	proof_expired           a request came on a connection whose proof has expired
//	unclear_path            a request came with a path that can be read in two ways
//
// These mean that the handshake failed otherwise:
//
//	no_identity     this side has none to present, or it has expired
//	not_tls         the other side does not speak TLS
//	not_verified    a client ended the handshake before it was verified, was too slow, or has no TLS version in common
//	not_proven      a client has not proved that it owns its certificate, or ended the handshake before that
//	refused         the other side sent an alert: it refuses this side, or another version
//	closed          the other side closed the connection
//	timeout         it took too long
//	canceled        this side gave up: the context of a client, or a listener before the hello, was ended
//	too_many        the connection was closed at once, as MaxHandshakes was reached
//	ungoverned      the connection was not accepted by way of the Governor
//	other           anything else
//
// A handshake counts when it ends. A TLS 1.3 server counts a refusal by its client as not_verified or not_proven; a
// client learns only after the handshake that its server has refused it, so that handshake counts as good.
// Configurations of [Endpoint.ServerConfig] and [Endpoint.ClientConfig] see the verification alone: their handshakes
// count when the other side is verified or refused, or when this side has nothing to present. The others see the end.
// Connections to a server that end before the client's hello do not count.
//
// Counting takes a tenth of a microsecond.
type Metrics struct {
	mu     sync.Mutex
	counts map[count]uint64
	last   map[count]failure // the last of each kind
}

// count names a counter: of handshakes, or of requests with the outcome denied. For the algorithms of handshakes the
// outcome is the key exchange, and the reason the kind of the peer's key.
type count struct{ side, outcome, reason string }

func (c count) compare(o count) int {
	return cmp.Or(cmp.Compare(c.side, o.side), cmp.Compare(c.outcome, o.outcome), cmp.Compare(c.reason, o.reason))
}

// The reasons, none of which the other side can choose. The refusals are also reasons for ended connections.
var (
	refusals = []string{
		"not_an_svid", "unknown_trust_domain", "no_authority", "no_bundle", "unknown_authority", "expired",
		"wrong_role", "wrong_host", "algorithm", "no_roots", "invalid", "denied",
	}
	otherFailures = []string{
		"no_identity", "not_tls", "not_verified", "not_proven", "refused", "closed", "timeout",
		"canceled", "too_many", "ungoverned", "other",
	}
	denials = []string{"denied", "no_certificate", "proof_expired", "unclear_path"}
)

// add counts f, and keeps it if it has an error. A nil Metrics counts nothing.
func (m *Metrics) add(f failure) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.counts == nil {
		m.counts, m.last = map[count]uint64{}, map[count]failure{}
	}
	m.counts[f.count]++
	if f.err != nil {
		m.last[f.count] = f
	}
}

// Report implements [report.Reporter] with the counts, and with the failures of the last hour as problems: the newest
// for each reason. An error wraps the [*HandshakeError], if there is one.
func (m *Metrics) Report() report.Report {
	return report.Report{Metrics: m.write, Problems: m.problems()}
}

// problems returns the failures of the last hour, the newest first.
func (m *Metrics) problems() (all []error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	latest := slices.SortedFunc(maps.Values(m.last), func(a, b failure) int { return b.at.Compare(a.at) })
	for _, f := range latest {
		if time.Since(f.at) < time.Hour {
			all = append(all, fmt.Errorf("%s: from %s at %s: %w",
				messages[f.outcome], f.remote, f.at.UTC().Format(time.RFC3339), f.err))
		}
	}
	return all
}

func (m *Metrics) write(w io.Writer) error {
	m.mu.Lock()
	counts := maps.Clone(m.counts)
	m.mu.Unlock()
	var s metrics.Set
	const handshakes = "The number of TLS handshakes that have ended, by the side of this program, the outcome, " +
		"and the reason of a failure."
	const algorithms = "The number of TLS handshakes that have succeeded, by the side of this program, the key exchange, " +
		"and the kind of the other side's key."
	const denied = "The number of requests that RequirePeer has denied, by the reason."
	s.Totals("svidkit_tls_handshakes_total", handshakes, func(add metrics.Add) {
		for _, side := range []string{"client", "server"} {
			for _, outcome := range []string{"full", "resumed"} {
				add(float64(counts[count{side, outcome, ""}]), "side", side, "outcome", outcome)
			}
			for _, reason := range slices.Concat(refusals, otherFailures) {
				n := float64(counts[count{side, "failed", reason}])
				add(n, "side", side, "outcome", "failed", "reason", reason)
			}
		}
	})
	s.Totals("svidkit_tls_algorithms_total", algorithms, func(add metrics.Add) {
		for _, c := range slices.SortedFunc(maps.Keys(counts), count.compare) {
			if !slices.Contains([]string{"full", "resumed", "failed", "denied"}, c.outcome) {
				add(float64(counts[c]), "side", c.side, "key_exchange", c.outcome, "peer_key", c.reason)
			}
		}
	})
	s.Totals("svidkit_tls_denied_requests_total", denied, func(add metrics.Add) {
		for _, reason := range denials {
			add(float64(counts[count{"server", "denied", reason}]), "reason", reason)
		}
	})
	return s.Write(w)
}

// Report implements [report.Reporter] with these metrics:
//
//	svidkit_governor_connections                that it holds, by state: open or draining
//	svidkit_governor_ended_connections_total    that have ended while they were drained, by reason: proof_ends, as
//	                                            the proof was about to expire, or a reason in [Metrics] for
//	                                            refusing the other side
func (g *Governor) Report() report.Report { return report.Report{Metrics: g.writeMetrics} }

func (g *Governor) writeMetrics(w io.Writer) error {
	g.mu.Lock()
	held, draining, ended := len(g.conns), 0, maps.Clone(g.endedBy)
	for _, c := range g.conns {
		if c.cause != "" {
			draining++
		}
	}
	g.mu.Unlock()
	var s metrics.Set
	const conns = "The number of connections that the Governor holds, by state."
	s.Gauges("svidkit_governor_connections", conns, func(add metrics.Add) {
		add(float64(held-draining), "state", "open")
		add(float64(draining), "state", "draining")
	})
	const help = "The number of connections that have ended while they were drained, by the reason why they were."
	s.Totals("svidkit_governor_ended_connections_total", help, func(add metrics.Add) {
		for _, reason := range append([]string{"proof_ends"}, refusals...) {
			add(float64(ended[reason]), "reason", reason)
		}
	})
	return s.Write(w)
}
