package caprogram

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/examples/internal/statuspage"
	"github.com/svidkit/svidkit/spiffe/report"
)

// page returns the page for operators at "/" of -admin-addr. It lives until ctx is done.
func (o *options) page(ctx context.Context, a *caconfig.Authority) (http.Handler, error) {
	p, err := statuspage.New("CA", statuspage.Part{Name: "ca", Source: authority{a, &o.pods, o.refusals},
		Links: []string{"metrics", "ready", "status"}})
	if err == nil {
		context.AfterFunc(ctx, func() { _ = p.Close() })
	}
	return p, err
}

// authority reports the state of a CA: its keys and their next steps, its store, its audit log, and the requests of
// pods.
type authority struct {
	*caconfig.Authority
	pods     *pods
	refusals *refusals // nil for none
}

// refusals keeps the last refusals in the log, for the page.
type refusals struct {
	mu       sync.Mutex
	attempts []report.Attempt
}

func (r *refusals) last() []report.Attempt {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.attempts)
}

// noting is a log handler that also keeps refusals.
type noting struct {
	slog.Handler
	kept *refusals
}

// Handle implements [slog.Handler].
func (n noting) Handle(ctx context.Context, record slog.Record) error {
	if what, ok := strings.CutSuffix(record.Message, ": certificate refused"); ok {
		e := report.Attempt{Time: record.Time, Names: []string{what}, Count: 1, Failure: "refused"}
		record.Attrs(func(a slog.Attr) bool {
			switch a.Key {
			case "id", "caller", "peer":
				e.Names = append(e.Names, a.Value.String())
			case "err":
				e.Failure = a.Value.String()
			}
			return true
		})
		n.kept.mu.Lock()
		n.kept.attempts = append(n.kept.attempts, e)
		n.kept.attempts = n.kept.attempts[max(0, len(n.kept.attempts)-10):]
		n.kept.mu.Unlock()
	}
	return n.Handler.Handle(ctx, record)
}

// WithAttrs implements [slog.Handler].
func (n noting) WithAttrs(attrs []slog.Attr) slog.Handler {
	return noting{n.Handler.WithAttrs(attrs), n.kept}
}

// WithGroup implements [slog.Handler].
func (n noting) WithGroup(name string) slog.Handler { return noting{n.Handler.WithGroup(name), n.kept} }

// Report implements [report.Reporter].
func (a authority) Report() (r report.Report) {
	if a.Own == nil { // a signer of the cluster
		if b := a.Signer.Bundle(); b != nil {
			r.Bundles = []report.Bundle{{TrustDomain: b.TrustDomain().String(), Origin: a.Where}}
			for c := range b.X509Authorities() {
				r.Bundles[0].X509 = append(r.Bundles[0].X509, c)
			}
		}
		r.Upstreams = []report.Upstream{{Name: a.Where, OK: true}}
		return r
	}
	s, h := a.Own.Status(), a.Own.Health()
	if a.pods.signer != nil {
		r.Upstreams = a.pods.signer.Report().Upstreams
	}
	for _, k := range s.Roots {
		r.Bundles = append(r.Bundles, report.Bundle{TrustDomain: s.TrustDomain.String(), Origin: k.String(),
			X509: []*x509.Certificate{k.Certificate}})
	}
	for _, k := range s.JWTKeys {
		r.Bundles = append(r.Bundles, report.Bundle{TrustDomain: s.TrustDomain.String(), Origin: k.String(),
			JWT: []string{k.ID}})
	}
	r.Upstreams = append(r.Upstreams, report.Upstream{Name: a.Where, OK: true, LastSuccess: h.Synced, Err: h.Store},
		report.Upstream{Name: "audit log", OK: true, Err: h.Audit})
	// The page begins with the CA's certificates, and its last refusals and changes.
	signs := report.Identity{Name: "certificates of " + s.TrustDomain.String(), Own: true, NotAfter: h.Until,
		Err: h.Signing}
	for _, k := range s.Roots {
		if k.Phase == "active" {
			signs.NotBefore, signs.Certificate = k.Certificate.NotBefore, func() *x509.Certificate {
				return k.Certificate
			}
			break // of two kinds, the one that h.Until is of
		}
	}
	r.Identities = []report.Identity{signs}
	for _, k := range append(s.Roots, s.JWTKeys...) {
		at := k.Prepared
		if k.Activates.Before(time.Now()) {
			at = k.Activates
		}
		r.Attempts = append(r.Attempts, report.Attempt{Time: at, Names: []string{k.String()}, Count: 1})
	}
	if a.refusals != nil {
		r.Attempts = append(r.Attempts, a.refusals.last()...)
	}
	r.NotReady = h.Signing
	if h.Root != nil {
		r.Problems = append(r.Problems, h.Root)
	}
	return r
}
