package workloadapi

import (
	"errors"
	"slices"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Status is the state of a [Source] at one moment, for health checks and diagnosis. It has no
// secrets.
type Status struct {
	// Server is the address.
	Server string

	// ID and NotAfter are the identity that the source hands out, and when its certificate ends;
	// zero if there is none.
	ID       spiffe.ID
	NotAfter time.Time

	// TrustDomains are those that there is a bundle for.
	TrustDomains int

	// Ready is what [Source.Ready] waits for.
	Ready bool

	// X509 is the stream of X.509-SVIDs, or of bundles with BundlesOnly; JWT is that of the bundles
	// for JWT-SVIDs, which is zero without JWTBundles.
	X509, JWT StreamStatus
}

// Healthy reports whether the source is ready and its identity, if it is to have one, is valid at
// now. An outage of the server is no reason to be unhealthy: what was received before stays good
// until it expires.
func (s Status) Healthy(now time.Time) bool {
	return s.Ready && (s.NotAfter.IsZero() || !now.After(s.NotAfter))
}

// StreamStatus is the state of one stream of a [Source].
type StreamStatus struct {
	Open        bool      // there is a stream, and it has brought something
	Updates     uint64    // good responses, since New
	LastUpdate  time.Time // when the last of them came
	Failures    int       // since then
	Err         error     // the last failure, or nil after a good response
	NextAttempt time.Time // when it is tried again, after a failure that ended the stream
	Skipped     []error   // what was not taken over of the last good response
}

// Status returns the state of the source.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.cur.Load()
	out := Status{Server: s.client.server, Ready: s.ready(), X509: s.x509.status(), JWT: s.jwt.status()}
	out.JWT.Skipped = append(out.JWT.Skipped, s.clash...)
	if st.snap != nil {
		svid, _ := st.snap.SVID() // of a snapshot: never an error
		out.ID, out.NotAfter = svid.ID(), svid.NotAfter()
	}
	if st.bundles != nil {
		out.TrustDomains = st.bundles.Len()
	}
	return out
}

// ready reports whether the source has what it is configured for. The caller holds mu.
func (s *Source) ready() bool {
	return (s.cur.Load().snap != nil || s.cfg.BundlesOnly && s.x509.has) && (s.jwt.has || !s.cfg.JWTBundles)
}

// track is what a Source knows of one stream. The Source's mu guards it.
type track struct {
	has     bool // something was received, and not withdrawn
	update  *X509Update
	bundles *spiffe.BundleSet
	crls    [][]byte
	skipped []error

	open        bool
	updates     uint64
	lastUpdate  time.Time
	failures    int
	err         *Error
	nextAttempt time.Time
	final       bool
}

func (t *track) good() {
	t.has, t.open = true, true
	t.updates++
	t.lastUpdate = time.Now()
	t.failures, t.err, t.nextAttempt, t.final = 0, nil, time.Time{}, false
}

// bad takes note of e. After a response that was discarded the stream goes on.
func (t *track) bad(e *Error) {
	t.failures++
	t.err, t.final = e, e.Final
	if errors.Is(e, ErrBadResponse) {
		return
	}
	t.open, t.nextAttempt = false, time.Time{}
	if !e.Final {
		t.nextAttempt = time.Now().Add(e.RetryIn)
	}
}

// withdraw forgets what was received.
func (t *track) withdraw() {
	t.has, t.update, t.bundles, t.crls, t.skipped = false, nil, nil, nil, nil
}

// cause returns the last failure.
func (t *track) cause() error {
	if t.err == nil {
		return nil
	}
	return t.err
}

func (t *track) status() StreamStatus {
	return StreamStatus{
		Open: t.open, Updates: t.updates, LastUpdate: t.lastUpdate, Failures: t.failures,
		Err: t.cause(), NextAttempt: t.nextAttempt, Skipped: slices.Clone(t.skipped),
	}
}
