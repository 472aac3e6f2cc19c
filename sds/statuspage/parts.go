package statuspage

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// reporter returns what source says of itself, or false.
func reporter(src any) (report func() Report, ok bool) {
	switch s := src.(type) {
	case Reporter:
		return s.Report, true
	case *secretcache.Manager:
		return func() Report { return ofManager(s) }, true
	case *workloadapi.Source:
		return func() Report { return ofWorkloadAPI(s) }, true
	case *filesource.Source:
		return func() Report { return ofFiles(s) }, true
	case *filesink.Sink:
		return func() Report { return ofSink(s) }, true
	case *federation.Manager:
		return func() Report { return ofFederation(s) }, true
	case *source.LastGood:
		return func() Report { return ofLastGood(s) }, true
	case *sdssource.Files:
		return func() Report { return ofNamedFiles(s) }, true
	case *sds.Handler:
		return func() Report { return ofSDS(s) }, true
	case *xdsproxy.Handler:
		return func() Report { return ofXDS(s) }, true
	}
	_, identity := src.(spiffe.SVIDSource)
	_, bundles := src.(spiffe.BundleSource)
	return func() Report { return ofSource(src) }, identity || bundles
}

// ofSource returns the identity and the roots of a source of them.
func ofSource(src any) (r Report) {
	var own []spiffe.TrustDomain
	if s, ok := src.(spiffe.SVIDSource); ok {
		svid, err := s.SVID()
		switch {
		case err != nil:
			r.Identities = []Identity{{Err: err}}
		case svid != nil:
			r.Identities = []Identity{{Name: svid.ID().String(), NotBefore: svid.Leaf().NotBefore, NotAfter: svid.NotAfter()}}
			own = append(own, svid.ID().TrustDomain())
		}
	}
	r.Roots = rootsOf(src, "", own...)
	return r
}

// rootsOf returns the bundles of a source: all of them if it tells, and else those of the trust domains.
func rootsOf(src any, origin string, own ...spiffe.TrustDomain) (all []Roots) {
	var set *spiffe.BundleSet
	switch s := src.(type) {
	case *spiffe.Bundle:
		return []Roots{{s, origin}}
	case *spiffe.BundleSet:
		set = s
	case interface{ Bundles() *spiffe.BundleSet }:
		set = s.Bundles()
	case interface {
		Snapshot() (*spiffe.Snapshot, error)
	}:
		if snap, err := s.Snapshot(); err == nil && snap != nil {
			set = snap.Bundles()
		}
	}
	if set != nil {
		for b := range set.All() {
			all = append(all, Roots{b, origin})
		}
		return all
	}
	if s, ok := src.(spiffe.BundleSource); ok {
		for _, td := range own {
			if b, err := s.Bundle(td); err == nil && b != nil {
				all = append(all, Roots{b, origin})
			}
		}
	}
	return all
}

func ofManager(m *secretcache.Manager) (r Report) {
	const ca = "CA"
	up := Upstream{Name: ca}
	for _, st := range m.Status() {
		if st.LastSuccess.After(up.LastSuccess) {
			up.LastSuccess = st.LastSuccess
		}
		if st.Err != nil {
			up.Failures = max(up.Failures, st.Failures)
			up.Err = cmp.Or(up.Err, st.Err)
			up.NextAttempt = sooner(up.NextAttempt, st.NextAttempt)
		}
		if bundles := !st.ID.IsZero() && st.ID.Path() == ""; bundles {
			r.Roots = rootsOf(m, ca, st.ID.TrustDomain())
			continue
		}
		name := "default"
		if !st.ID.IsZero() {
			name = st.ID.String()
		}
		r.Identities = append(r.Identities, Identity{
			Name: name, NotBefore: st.NotBefore, NotAfter: st.NotAfter, Renewal: st.NextAttempt, Failures: st.Failures, Err: st.Err,
		})
	}
	r.Upstreams = []Upstream{up}
	return r
}

// sooner returns the earlier of two times, of which a zero one is none.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func ofWorkloadAPI(s *workloadapi.Source) Report {
	r, st := ofSource(s), s.Status()
	for i := range r.Roots {
		r.Roots[i].Origin = st.Server
	}
	if st.ID.IsZero() && st.X509.Err == nil && st.Ready { // bundles alone are asked for
		r.Identities = nil
	}
	for _, stream := range []struct {
		name string
		workloadapi.StreamStatus
	}{{"X.509", st.X509}, {"JWT bundles", st.JWT}} {
		if stream.name != "X.509" && stream.Updates == 0 && stream.Err == nil {
			continue // it is not asked for
		}
		r.Upstreams = append(r.Upstreams, Upstream{
			Name: st.Server + " (" + stream.name + ")", LastSuccess: stream.LastUpdate, NextAttempt: stream.NextAttempt, Failures: stream.Failures, Err: stream.Err,
		})
		r.Problems = append(r.Problems, stream.Skipped...)
	}
	return r
}

func ofFiles(s *filesource.Source) Report {
	r, st := ofSource(s), s.Status()
	for i := range r.Roots {
		r.Roots[i].Origin = "files"
	}
	if st.ID.IsZero() && st.Ready { // there are bundles alone
		r.Identities = nil
	}
	r.Upstreams = []Upstream{{Name: "files", LastSuccess: st.Checked, Err: st.Err}}
	r.Problems = st.Notes
	return r
}

func ofSink(s *filesink.Sink) (r Report) {
	st := s.Status()
	if !st.ID.IsZero() {
		r.Identities = []Identity{{Name: st.ID.String(), NotAfter: st.NotAfter}}
	}
	r.Upstreams = []Upstream{{Name: "files that it writes", LastSuccess: st.Checked, Err: st.Err}}
	return r
}

func ofFederation(m *federation.Manager) (r Report) {
	for _, st := range m.Status() {
		if st.Bundle != nil {
			r.Roots = append(r.Roots, Roots{st.Bundle, st.URL})
		}
		r.Upstreams = append(r.Upstreams, Upstream{
			Name: st.TrustDomain.String() + " at " + st.URL, LastSuccess: st.LastSuccess, NextAttempt: st.NextAttempt, Failures: st.Failures, Err: st.Err,
		})
	}
	return r
}

func ofLastGood(l *source.LastGood) Report {
	r, st := ofSource(l), l.Status()
	r.Upstreams = []Upstream{{Name: "stored identity", LastSuccess: st.Saved, Err: st.Err}}
	if st.InUse {
		r.Problems = append(r.Problems, fmt.Errorf("what was stored at %s is in use, as the live source is not ready", stamp(st.Saved)))
	}
	if st.Refused != nil {
		r.Problems = append(r.Problems, st.Refused)
	}
	return r
}

func ofNamedFiles(f *sdssource.Files) (r Report) {
	for _, st := range f.Status() {
		r.Upstreams = append(r.Upstreams, Upstream{Name: st.Name, OK: st.Have, Err: st.Err})
		if !st.NotAfter.IsZero() {
			r.Identities = append(r.Identities, Identity{Name: st.Name, NotAfter: st.NotAfter})
		}
		if st.Note != nil {
			r.Problems = append(r.Problems, st.Note)
		}
	}
	return r
}

func ofSDS(h *sds.Handler) Report {
	st := h.Status()
	server := Server{Protocol: "SDS", Streams: st.Streams, Names: st.Names}
	for _, p := range st.Pushes {
		server.Events = append(server.Events, Event{Time: p.Time, Names: p.Names, Version: p.Version, Streams: p.Streams})
		if n := p.LastNACK; n != nil {
			server.Events = append(server.Events, Event{
				Time: n.Time, NACK: true, Names: n.Names, Version: n.Version, Streams: p.NACKs, Client: n.Node, Message: n.Message,
			})
		}
	}
	if n := st.LastNACK; n != nil && !slices.ContainsFunc(st.Pushes, func(p sds.Push) bool { return p.LastNACK == n }) {
		server.Events = append(server.Events, Event{
			Time: n.Time, NACK: true, Names: n.Names, Version: n.Version, Streams: 1, Client: n.Node, Message: n.Message,
		})
	}
	return Report{Servers: []Server{server}}
}

func ofXDS(h *xdsproxy.Handler) Report {
	st := h.Status()
	return Report{
		Servers:   []Server{{Protocol: "ADS", Streams: st.Streams}},
		Upstreams: []Upstream{{Name: st.URL, LastSuccess: st.LastResponse, Failures: st.Failures, Err: st.Err}},
	}
}
