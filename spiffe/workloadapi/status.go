package workloadapi

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Status is the state of a [Source] at one moment, for health checks and diagnosis. It has no
// secrets. A health check looks at Ready and NotAfter: an outage of the server is no reason to be
// unhealthy, because what was received stays valid until it expires.
type Status struct {
	// Server is the address.
	Server string

	// ID and NotAfter are the identity that the source hands out, and when its certificate ends;
	// zero if there is none.
	ID       spiffe.ID
	NotAfter time.Time

	// Fallback says that this is the default identity, which stands in for the one that was picked: see
	// [Choice].OrDefault.
	Fallback bool

	// TrustDomains is how many trust domains there is a bundle for.
	TrustDomains int

	// Ready is what [Source.Ready] waits for.
	Ready bool

	// X509 is the stream of X.509-SVIDs, or of bundles with BundlesOnly; JWT is that of the bundles
	// for JWT-SVIDs, which is zero without JWTBundles.
	X509, JWT StreamStatus
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
	return s.status()
}

// status is Status for a caller that holds mu.
func (s *Source) status() Status {
	st := s.now()
	out := Status{Server: s.client.server, Fallback: st.fallback, Ready: s.ready(st.snap), X509: s.x509.StreamStatus, JWT: s.jwt.StreamStatus}
	out.X509.Skipped, out.JWT.Skipped = slices.Clone(s.x509.Skipped), slices.Concat(s.jwt.Skipped, s.unmerged)
	if st.snap != nil {
		svid, _ := st.snap.SVID() // of a snapshot: never an error
		out.ID, out.NotAfter = svid.ID(), svid.NotAfter()
	}
	if st.bundles != nil {
		out.TrustDomains = st.bundles.Len()
	}
	return out
}

// ready reports whether the source has what it is configured for, with the identity of snap. The caller holds mu.
func (s *Source) ready(snap *spiffe.Snapshot) bool {
	return (snap != nil || s.cfg.BundlesOnly && s.x509.update != nil) && (s.jwt.update != nil || !s.cfg.JWTBundles)
}

// track is what a Source knows of one stream. The Source's mu guards it.
type track struct {
	turn sync.Mutex // held by took and failed, also while subscribers are told; mu is taken after it

	StreamStatus
	update *Update   // nil before the first, and after it was withdrawn
	last   *Update   // as it was received; update is what is in force since
	again  time.Time // when an identity in last begins to be valid; zero if none does
	denied bool      // the server has said that there is nothing, and has not taken that back
	final  bool
	failed uint64 // failures since New

	began, stopped time.Time // of Run
}

// begin notes that the stream is now asked for.
func (t *track) begin() {
	t.final, t.began, t.stopped = false, time.Now(), time.Time{}
}

// end notes that it is not asked for any more.
func (t *track) end() { t.Open, t.stopped = false, time.Now() }

// silence is the error for a server that has neither answered nor failed.
func (t *track) silence(server string) error {
	var waited time.Duration
	switch {
	case !t.stopped.IsZero():
		waited = t.stopped.Sub(t.began)
	case !t.began.IsZero(): // else Run is about to begin
		waited = time.Since(t.began)
	}
	return fmt.Errorf("%s has not answered for %v (see the log of that server)", server, waited.Round(100*time.Millisecond))
}

// bundles returns the bundles of the stream, nil if there are none.
func (t *track) bundles() *spiffe.BundleSet {
	if t.update == nil {
		return nil
	}
	return t.update.Bundles
}

// good takes u over.
func (t *track) good(u *Update) {
	t.last, t.denied, t.final = u, false, false
	t.StreamStatus = StreamStatus{Open: true, Updates: t.Updates + 1, LastUpdate: time.Now()}
}

// settle puts what is valid at now of the last response in force.
func (t *track) settle(now time.Time) {
	if t.last != nil { // else it was withdrawn
		t.update, t.again = t.last.inForce(t.update, now)
		t.Skipped = t.update.Skipped
	}
}

// bad records e, and reports whether it withdraws what was received. After a response that was discarded
// the stream goes on.
func (t *track) bad(e *Error) (withdrawn bool) {
	t.Failures++
	t.failed++
	t.Err, t.final = e, e.Final
	if errors.Is(e, ErrBadResponse) {
		return false
	}
	t.Open, t.NextAttempt = false, time.Time{}
	if !e.Final {
		t.NextAttempt = time.Now().Add(e.RetryIn)
	}
	denied := errors.Is(e, ErrDenied)
	withdrawn = t.update != nil && denied
	t.denied = t.denied || denied
	if withdrawn {
		t.update, t.last, t.again, t.Skipped = nil, nil, time.Time{}, nil
	}
	return withdrawn
}
