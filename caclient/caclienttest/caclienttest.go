// Package caclienttest gives tests a certificate authority that is called over the network, on a TLS socket of
// 127.0.0.1, with faults that the test injects: [NewIstio] serves Istio's certificate API, and [NewLinkerd] Linkerd's
// identity API.
//
//	ca := spiffetest.NewCA(t, "example.org")
//	istiod := caclienttest.NewIstio(t, ca, "/ns/default/sa/web")
//	client, err := istioca.New(istioca.Options{Endpoint: istiod.Endpoint()})
//
// The [spiffetest.CA] decides what is signed, and what goes wrong with it: it fails (FailNext), is slow (Delay),
// changes its root (Rotate), and gives wrong answers (EditTemplates, EditAnswers), which the [Fake] sends as they
// are, although a real server would check them first. The Fake decides what goes wrong on the way: Deny, Hang,
// Garble, Drop and Mend, and [Fake.Refuse].
//
// [Run] is a suite that checks whether a client keeps what [caclient.CA] promises, whatever the CA answers.
//
// The servers behind the faults are those of packages pki/caserver/istioca and pki/caserver/linkerd. That a client
// works with them does not show that it works with the real CA.
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

// Deny refuses every request, as from a caller that may not make it, until Mend.
func (f *Fake) Deny() { f.fake.Deny() }

// Hang leaves every request without an answer, until Mend.
func (f *Fake) Hang() { f.fake.Hang() }

// Garble answers every request with success and nonsense, until Mend.
func (f *Fake) Garble() { f.fake.Garble() }

// Drop cuts the connections, open and new ones, until Mend.
func (f *Fake) Drop() { f.fake.Drop() }

// Mend ends Deny, Hang, Garble and Drop: the CA works.
func (f *Fake) Mend() { f.fake.Mend() }

// Requests returns how many requests have come so far, whatever became of them.
func (f *Fake) Requests() int { return f.fake.Requests() }

// Endpoint returns what a client needs to reach the CA and to be recognised by it as the workload: the URL, an HTTP
// client that trusts the server, the trust domain, and tokens.
func (f *Fake) Endpoint() caclient.Endpoint { return f.fake.Endpoint() }

// Expectation returns what a certificate for the workload has to be for: its SPIFFE ID, or its DNS name in a mesh of
// Linkerd.
func (f *Fake) Expectation() pki.Expectation { return f.fake.Expectation() }

// Refuse refuses every request in the words of the API for the kind of e, with its RetryAfter and the text of its Err,
// until Refuse(nil).
func (f *Fake) Refuse(e *caclient.Error) { f.fake.Refuse(e) }

// Signer returns the CA as the servers of package caserver and caclient/local take it, with its faults. An error of
// FailNext that is a [*caclient.Error] comes as a *ca.SignError of the nearest kind.
func (f *Fake) Signer() ca.Signer { return f.fake.Signer() }

// InMemory returns t for [NewIstio] and [NewLinkerd], which then make a Fake without a socket, as a testing/synctest
// bubble needs. Only the HTTPClient of its Endpoint reaches it. That of NewLinkerd is then without TLS, as for a
// proxy on the same host, because its clients make TLS connections by themselves.
func InMemory(t testing.TB) testing.TB { return cafake.InMemory(t) }

// Run checks that a client keeps what [caclient.CA] promises: the kinds of its errors, the end of its context, what
// it does with hostile answers, alone, within [caclient.New] and below package secretcache, that no token is told,
// and that new roots arrive. fake is one of the functions of this package, or nil for a CA in this process; client
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
