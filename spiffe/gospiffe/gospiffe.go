// Package gospiffe converts between the types of this library and the types of github.com/spiffe/go-spiffe/v2, in
// both directions, so that a program can move from one to the other one package at a time. It is a module of its
// own, so that go-spiffe reaches no other program.
//
// The prefix names the direction: a function From… takes a go-spiffe value, and a function To… returns one. There are
// adapters for sources only, because an SVID or a bundle is a source of itself on both sides. IDs and trust domains
// cross as text: spiffe.ParseID(id.String()) and spiffeid.FromString(id.String()). README.md beside this file has the
// counterpart of each call of go-spiffe.
//
// # Sources
//
// A program that keeps its go-spiffe source and moves its TLS configuration:
//
//	theirs, err := workloadapi.NewX509Source(ctx) // of go-spiffe
//	…
//	self, peers := gospiffe.FromSVIDSource(theirs), gospiffe.FromX509BundleSource(theirs)
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: self, Peers: peers, Allow: spiffe.AllowMembersOf(td)})
//	…
//	config, err := endpoint.ServerConfig()
//
// A program that moves its source and keeps its TLS configuration:
//
//	ours, err := workloadapi.Start(ctx, workloadapi.Config{Address: address}) // of svidkit
//	…
//	config := tlsconfig.MTLSServerConfig(gospiffe.ToSVIDSource(ours), gospiffe.ToBundleSource(ours),
//		tlsconfig.AdaptMatcher(gospiffe.ToMatcher(spiffe.AllowMembersOf(td))))
//
// [FromTokenSource] and [ToTokenSource] do the same for tokens. An adapter calls the source behind it at each call,
// starts nothing, and has nothing to close: the program runs and closes its own source. Adapters panic if they are
// given a nil source. No printer shows their keys or tokens.
//
// # Guarantees
//
// Nothing is renamed. An ID, a trust domain, an SVID or a bundle that the other side would not accept, or would read
// differently, is an error.
//
// Values from go-spiffe must follow the rules of this library: an X.509-SVID the rules of [spiffe.NewSVID], a bundle
// the rules of [spiffe.NewBundle], a token the rules of [jwtsvid.ParseUnverified]. A value that breaks them is an
// error, and so is an SVID whose field ID is not the ID in its certificate. As before, verification decides whether
// a chain leads to an authority.
//
// Unchanged values are not converted again. Any holder can change a value of go-spiffe, but a value of this library
// never changes. So a From… source compares the contents of each value with the last, and returns the same result
// until they differ: an authority that is removed from a bundle in place is distrusted from the next call on, and a
// [spiffe.Verifier] keeps its memory of verified peers. The caller owns the bundles and tokens from a To… source. An
// SVID is shared by its readers, as with a go-spiffe source.
//
// Certificates and keys are never copied. Both sides share them, and neither may change them.
//
// # Errors
//
// The errors of sources are wrapped, so that errors.Is and errors.As work as before. go-spiffe has no error to test
// for a missing bundle. So each error of its bundle sources wraps [spiffe.ErrUnknownTrustDomain] here, except the
// error of a closed source.
//
// # Limits
//
// [ToMatcher] has no reverse: give a function to [spiffe.AllowFunc]. Only verification makes a [spiffe.Peer]: the
// PeerFromState of a spiffetls.Endpoint verifies a connection with a go-spiffe configuration once more. go-spiffe
// has WIT-SVIDs below exp; they are not adapted, but the keys for them in a bundle are.
package gospiffe
