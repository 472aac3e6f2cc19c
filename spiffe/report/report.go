// Package report defines how the parts of a program report their state: their identities and trust bundles, their
// upstreams, their servers, and their metrics. A part is a [Reporter], such as a *secretcache.Manager, a
// *workloadapi.Source or a *sds.Handler. Package health answers probes and Prometheus from reports, and package
// statuspage makes a page of them. This package imports the standard library only.
//
// # A part of your own
//
// A part has one method, Report, which is called for each probe, scrape and page, from many goroutines at the same
// time.
//
//   - It does not block: it reads what the part already knows, and asks no other server.
//   - What it returns is the caller's: neither side changes it. Copy slices and maps that the part still writes to.
//   - It has no keys and no tokens. Everything else in it is for operators, and probes and Prometheus see it, too.
//   - Zero means unknown, or none. All of a Report may be empty.
//   - Readers cut long texts and escape them. Texts of other programs need no care, beyond having no secrets.
package report

import (
	"crypto/x509"
	"io"
	"time"
)

// Reporter is a part of a program that reports its state.
type Reporter interface {
	// Report returns the state of the part at this moment. It must not block and must be safe for concurrent use.
	Report() Report
}

// Report is the state of a part at one moment.
type Report struct {
	// NotReady says why the part cannot do its work now, for example because it has no identity yet; nil means that it
	// can. A part that works, but not as well as it should, is ready and has Problems.
	NotReady error

	Identities []Identity
	Bundles    []Bundle
	Upstreams  []Upstream
	Servers    []Server

	// Attempts are the last attempts to obtain an identity or a trust bundle, in no order.
	Attempts []Attempt

	// Problems need an operator's attention. Errors in the lists above need no repetition here.
	Problems []error

	// Metrics writes the metrics of the part in the text format of Prometheus, version 0.0.4; nil means none. It must
	// be safe for concurrent use. It must not use the label part, which package health adds. It returns the error of
	// w, or why there are no metrics.
	Metrics func(w io.Writer) error
}

// Identity is an identity, or another secret that expires.
type Identity struct {
	Name string // SPIFFE ID, or name of the secret

	// Own says that the identity is the part's own, not kept for others: the part is not ready without it, and not
	// alive once it has expired.
	Own bool

	NotBefore   time.Time
	NotAfter    time.Time // when it, or a verified certificate above it, expires; zero if there is none
	ChainEnd    time.Time // when the first certificate of its chain expires
	LastSuccess time.Time // when it was obtained
	Renewal     time.Time // when the next renewal or retry starts; zero while one is under way
	Failures    int       // attempts since LastSuccess
	Since       time.Time // when the first of the Failures was; zero if that is not known
	Err         error     // why there is none, or why the last attempt failed; or nil

	// Certificate returns the leaf, which is shared: do not modify it. A nil func means that the leaf is not known.
	// Readers call it only for some of many identities.
	Certificate func() *x509.Certificate
}

// Bundle is a part's trust bundle of one trust domain.
type Bundle struct {
	TrustDomain string
	Origin      string // where the part got it, such as "CA" or an address; empty means the part itself

	X509     []*x509.Certificate // authorities for X.509-SVIDs
	JWT, WIT []string            // IDs of the authorities for these tokens

	Sequence    *uint64       // nil if it has no sequence number
	RefreshHint time.Duration // how often its publisher suggests to fetch it

	Err error // why there is no bundle; nil if there is one
}

// Upstream is something that a part depends on: a CA, an agent, files, a control plane.
type Upstream struct {
	Name        string
	OK          bool      // it works; used if LastSuccess is not known
	LastSuccess time.Time // zero if there was none yet
	NextAttempt time.Time // zero if none is needed, or one is under way
	Failures    int       // attempts since LastSuccess
	Since       time.Time // when the first of the Failures was; zero if that is not known
	Err         error     // why the last attempt has failed, or nil
}

// Server is something that a part offers to clients.
type Server struct {
	Protocol string // such as "SDS"
	Streams  int    // that are open
	// the requested names, with the version served for each; "" while there is nothing to serve
	Names  map[string]string
	Pushes []Push // the last ones, in no order
}

// Attempt is an attempt to obtain something, or a series of attempts that ended alike.
type Attempt struct {
	Time    time.Time // when the last of them ended
	Names   []string  // the wanted names, such as SPIFFE IDs
	Count   int       // how many they are
	Failure string    // why they failed; empty if they succeeded
}

// Push is a version of resources that was sent to clients, or the rejection of one by clients.
type Push struct {
	Time    time.Time
	NACK    bool     // clients have rejected it
	Names   []string // of the resources
	Version string
	Streams int    // how many it was sent on, or how many clients rejected it
	Client  string // of a rejection: the name that the last client claims
	Message string // of a rejection: the reason that this client gives; do not trust it
}
