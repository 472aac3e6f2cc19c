// Package spiffe has the words that SPIFFE workload identity is spoken in: names, certificates,
// trust bundles, and the decision whether a peer is who it says and may come in. It imports the
// standard library only.
//
// Most programs need four of its parts:
//
//   - [ParseID] and [ParseTrustDomain], where a name comes in as text.
//   - [AllowIDs] and its siblings, to write down who is allowed, or [ParsePolicy] where that is
//     configuration. A [LivePolicy] may change while it is in use.
//   - [NewVerifier] and [Verifier.VerifyChain], which turn a chain of certificates into a [Peer].
//     For TLS, package spiffetls calls them at the right moment of the handshake.
//   - [SVIDSource] and [BundleSource], the two interfaces that whatever obtains and renews an
//     identity has in common. A fixed identity is [ParseSVIDPEM] and [ParseBundlePEM].
//
// # An ID is a claim, a Peer is proof
//
// An [ID] is a name that was parsed. Anyone can write one. A [Peer] is a name that was proved: the
// chain of certificates was verified against the bundle of the name's own trust domain, and the
// policy allows the name. Only a [Verifier] makes a Peer, so a function that must not be called on a
// stranger's word takes a *Peer, and the compiler sees to the rest.
//
// # What it promises
//
// Trust is by domain. An authority speaks for the trust domain whose bundle it is in and for no
// other; there is no call that verifies against the roots of several domains or of the host.
//
// The default is no. A policy is a required argument, the zero [Policy] allows nobody, a mistaken
// one is refused when the Verifier is made, and the open choice is called [AllowAnyPeer].
//
// Only a leaf authenticates. A certificate that may sign others, that carries more than one URI
// name, no path, or no digitalSignature usage is refused, each with its own rule in a
// [CertificateError].
//
// Values do not change. An SVID, a Bundle, a BundleSet, a Snapshot and a Policy are fixed when they
// are made and may be read from many goroutines; a newer one is a new value. They share what the
// standard library cannot freeze: do not change the certificates they return.
//
// Keys do not print. No verb of package fmt, no slog handler and no JSON encoder shows the key of an
// [SVID].
//
// Input is bounded before it is believed: IDs at 2048 bytes, chains at 16 certificates, RSA keys of
// certificates at 8192 bits, documents and PEM at 1 MiB. What goes into an error is cut to a
// length that is fit for a log.
//
// # Strict readings
//
// Where the SPIFFE standards contradict themselves or are silent, this package reads them strictly:
//
//   - Upper case in a scheme or a trust domain name is an error; nothing is folded (AMB-1, ID-8).
//     Two IDs are equal when their bytes are.
//   - Nothing is normalised: an ID prints as it was parsed (ID-26). A trust domain name may look like
//     an IP address, a DNS name or neither, and is handled as bytes (ID-12).
//   - An ID of more than 2048 bytes is refused in both directions, parsing and building (AMB-22).
//   - A leaf without key usage, or without digitalSignature, is refused (X5-40). The extended key
//     usage, if there is one, must hold the peer's role, and nothing more is asked of it (AMB-16).
//   - Signing certificates may have digitalSignature, no URI name, or a URI name that breaks the
//     rules: those are their issuer's faults, and the anchor stays usable (AMB-4, AMB-14, AMB-27).
//   - The names of a certificate are read from its bytes, because crypto/x509 shows them after a
//     URL parser has repaired them (GO-1, GO-2).
//   - An ID without a path names a trust domain. It is a member of that domain, but only [AllowIDs]
//     can allow it (AMB-19).
//
// Ids such as ID-8 or X5-36 in comments and errors name a rule; the test vectors in testdata carry
// the same ids.
//
// # What it does not do
//
// It makes no certificates: see package pki. It obtains and renews nothing: see packages workloadapi,
// secretcache and, for the bundles of others, federation. It knows no JWT-SVIDs, only the keys for
// them in a [Bundle]: see package jwtsvid. It reads no revocation
// lists: an authority is revoked by leaving its bundle, and a leaf by not being renewed.
//
// Two things are legal in SPIFFE and cannot be had from crypto/x509: a trust domain name with an
// empty label, such as "a..b", parses here but cannot be read from a certificate (GO-3), and URI
// name constraints refuse every trust domain name that looks like an IP address (GO-4).
package spiffe
