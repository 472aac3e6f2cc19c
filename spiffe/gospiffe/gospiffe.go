// Package gospiffe converts between the types of this library and those of
// github.com/spiffe/go-spiffe/v2, in both directions, so that a program can move from one to the other
// one package at a time. It is a module of its own, so that go-spiffe reaches no other program.
//
// The prefix names the direction: a function From… takes what go-spiffe has, and a function To… returns
// what go-spiffe takes. An SVID or a bundle is a source of itself on both sides, so that there are adapters of
// sources only. IDs and trust domains cross as text: spiffe.ParseID(id.String()) and
// spiffeid.FromString(id.String()). README.md beside this file has the counterpart of each call of go-spiffe.
//
// # Sources
//
// A program that keeps its go-spiffe source and moves its TLS configuration:
//
//	theirs, err := workloadapi.NewX509Source(ctx) // of go-spiffe
//	…
//	self, peers := gospiffe.FromSVIDSource(theirs), gospiffe.FromX509BundleSource(theirs)
//	config, err := spiffetls.ServerConfig(self, peers, spiffe.AllowMembersOf(td), nil)
//
// A program that moves its source and keeps its TLS configuration:
//
//	ours, err := workloadapi.Start(ctx, workloadapi.Config{Address: address}) // of svidkit
//	…
//	config := tlsconfig.MTLSServerConfig(gospiffe.ToSVIDSource(ours), gospiffe.ToBundleSource(ours),
//		tlsconfig.AdaptMatcher(gospiffe.ToMatcher(spiffe.AllowMembersOf(td))))
//
// Tokens are the same with [FromTokenSource] and [ToTokenSource]. A source of this package asks the source
// behind it at each call, starts nothing, and has nothing to close: the program runs and closes the source
// that it has made. Adapters panic if they are given a nil source, and however they are printed, no key and
// no token shows.
//
// # What it promises
//
// Nothing is renamed. An ID, a trust domain, an SVID or a bundle that the other side would not accept, or
// would read differently, is an error.
//
// What comes from go-spiffe is held to the rules of this library: an X.509-SVID to those of
// [spiffe.NewSVID], a bundle to those of [spiffe.NewBundle], a token to those of
// [jwtsvid.ParseUnverified]. One that breaks them is an error, and so is an SVID whose field ID is not the
// ID in its certificate. That a chain leads to an authority is decided where it is verified, as before.
//
// What has not changed is not converted again. The values of go-spiffe can be changed by any holder, those
// of this library cannot. So a From… source compares what it has converted with what it is given, the
// contents and not the address, and returns the same value until they differ: an authority that is removed
// from a bundle in place is trusted no more from the next call on, and a [spiffe.Verifier] goes on to remember
// the peers that it has verified. Of what a To… source returns, bundles and tokens are the caller's own. An
// SVID is shared by its readers, as that of a source of go-spiffe is.
//
// Certificates and keys are never copied. They are shared by both sides, and neither may change them.
//
// # Errors
//
// An error that a source returns is wrapped, so that errors.Is and errors.As find what they found before.
// go-spiffe has no error to test for where there is no bundle of a trust domain. So each error of its bundle
// sources wraps [spiffe.ErrUnknownTrustDomain] here, but for that of a source that was closed.
//
// # What it does not do
//
// A go-spiffe authorizer is a function and a [spiffe.Policy] is data, so that there is a [ToMatcher] and no
// reverse; README.md has what to do instead. A [spiffe.Peer] is made by verification alone: for a
// connection that was made with a configuration of go-spiffe, spiffetls.PeerFromState verifies once more.
// What go-spiffe has below exp (WIT-SVIDs) is not adapted, beside the keys for them in a bundle.
package gospiffe
