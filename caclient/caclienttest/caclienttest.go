// Package caclienttest gives tests a certificate authority that is called over the network, on a TLS socket of
// 127.0.0.1, with faults that the test injects: [NewIstio] serves Istio's certificate API, and [NewLinkerd] Linkerd's
// identity API.
//
//	ca := spiffetest.NewCA(t, "example.org")
//	istiod := caclienttest.NewIstio(t, ca, "/ns/default/sa/web")
//	client, err := istioca.New(istioca.Options{Endpoint: istiod.Endpoint()})
//
// The [spiffetest.CA] decides what is signed, and which faults it has: it fails (FailNext), is slow (Delay), changes
// its root (Rotate), and gives wrong answers (EditTemplates, EditAnswers), which the [Fake] sends as they are,
// although a real server would check them first. The Fake injects faults on the network: Deny, Hang, Garble, Drop and
// Mend, and [Fake.Refuse].
//
// [Run] is a suite that checks that a client keeps the promises of [caclient.CA], whatever the CA answers.
//
// The servers behind the faults are packages pki/caserver/istioca and pki/caserver/linkerd. A client that works with
// them may still fail with the real CA.
package caclienttest

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Fake is a CA behind one API, which serves until the test is over. [NewIstio] and [NewLinkerd] make one. Its methods
// are safe for concurrent use.
type Fake struct {
	redacted
	fake *cafake.Fake
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

func newFake(f *cafake.Fake) *Fake { return &Fake{f.Text(), f} }

// Deny refuses every request, as if the caller were not allowed to make it, until Mend.
func (f *Fake) Deny() { f.fake.Deny() }

// Hang leaves every request without an answer, until Mend.
func (f *Fake) Hang() { f.fake.Hang() }

// Garble answers every request with success and nonsense, until Mend.
func (f *Fake) Garble() { f.fake.Garble() }

// Drop cuts the connections, open and new ones, until Mend.
func (f *Fake) Drop() { f.fake.Drop() }

// Mend ends Deny, Hang, Garble and Drop: the CA works.
func (f *Fake) Mend() { f.fake.Mend() }

// Requests returns how many requests have come so far, with any outcome.
func (f *Fake) Requests() int { return f.fake.Requests() }

// Endpoint returns a client's settings for reaching the CA as the workload: the URL, an HTTP client that trusts the
// server, the trust domain, and tokens.
func (f *Fake) Endpoint() caclient.Endpoint { return f.fake.Endpoint() }

// Expectation describes a certificate for the workload: it has the SPIFFE ID, or the DNS name in a mesh of Linkerd.
func (f *Fake) Expectation() pki.Expectation { return f.fake.Expectation() }

// Refuse refuses every request, until Refuse(nil), as the API reports the kind of e, with its RetryAfter and the text
// of its Err.
func (f *Fake) Refuse(e *caclient.Error) { f.fake.Refuse(e) }

// Signer returns the CA, with its faults, for the servers of package caserver and for caclient/local. An error of
// FailNext that is a [*caclient.Error] becomes a *ca.SignError of the nearest kind.
func (f *Fake) Signer() ca.Signer { return f.fake.Signer() }

// InMemory returns t for [NewIstio] and [NewLinkerd], which then make a Fake without a socket, as a testing/synctest
// bubble needs. Only the HTTPClient of its Endpoint reaches it. With NewLinkerd it uses no TLS, as for a proxy on the
// same host, because Linkerd's clients make TLS connections themselves.
func InMemory(t testing.TB) testing.TB { return cafake.InMemory(t) }

// Run checks that a client keeps the promises of [caclient.CA]: the kinds of its errors, the end of its context, its
// reaction to hostile answers (alone, within [caclient.New] and below package secretcache), that it reveals no token,
// and that new roots arrive. fake is a New function of this package, or nil for a CA in this process; client
// makes the client under test from [Fake.Endpoint], or from [Fake.Signer].
//
//	caclienttest.Run(t, caclienttest.NewIstio, func(f *caclienttest.Fake) (caclient.CA, error) {
//		return istioca.New(istioca.Options{Endpoint: f.Endpoint()})
//	})
func Run(t *testing.T, fake func(t testing.TB, ca *spiffetest.CA, path string) *Fake,
	client func(*Fake) (caclient.CA, error)) {
	var inner func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake
	if fake != nil {
		inner = func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake { return fake(t, ca, path).fake }
	}
	cafake.Run(t, inner, func(f *cafake.Fake) (caclient.CA, error) { return client(newFake(f)) })
}
