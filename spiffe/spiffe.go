// Package spiffe has the types of SPIFFE workload identity: IDs and trust domains, X.509-SVIDs, trust bundles,
// policies, and the verification of peers. It depends on the standard library only.
//
// Start with these four:
//
//   - [ParseID] and [ParseTrustDomain] parse names.
//   - [AllowIDs], [AllowMembersOf] and others make a [Policy], which says which peers are allowed. [ParsePolicy]
//     reads one from configuration. A [LivePolicy] can be replaced while it is in use.
//   - [NewVerifier] and [Verifier.VerifyChain] turn a chain of certificates into a [Peer]. For TLS, package
//     spiffetls calls them at the right moment of the handshake.
//   - [SVIDSource] and [BundleSource] are the interfaces of everything that obtains and renews an identity.
//     [ParseSVIDPEM] and [ParseBundlePEM] read a fixed identity.
//
// # An ID is a claim, a Peer is proof
//
// An [ID] is a parsed name and proves nothing. A [Peer] is a proven name: its chain of certificates was verified
// against the bundle of the name's own trust domain, and the policy allows the name. Only a [Verifier] makes a
// Peer, so a function that takes a *Peer cannot be called with an unproven name.
//
// # Guarantees
//
// Trust is by domain. An authority speaks only for the trust domain whose bundle holds it. No call verifies
// against the roots of several domains or of the host.
//
// The default is no. A policy is a required argument, the zero [Policy] allows no peer, [NewVerifier] refuses a
// mistaken policy, and the open choice is called [AllowAnyPeer].
//
// Only a leaf authenticates. A certificate that may sign others, has more than one URI name, or lacks a path in
// its ID or the digitalSignature usage is refused, each by its own rule in [ParseError].
//
// Values do not change. An SVID, Bundle, BundleSet, Snapshot or Policy is fixed when it is made and safe for
// concurrent use. The certificates and keys that it returns are shared and must not be changed.
//
// Keys do not print. No verb of package fmt, no slog handler and no JSON encoder shows the key of an [SVID].
//
// Input is bounded before it is parsed: IDs at 2048 bytes, chains at 16 certificates, RSA keys of certificates at
// 8192 bits, documents and PEM at 1 MiB. Errors quote a bounded part of it.
//
// # Strict readings
//
// Where the SPIFFE standards contradict themselves or are silent, this package reads them strictly:
//
//   - Upper case in a scheme or a trust domain name is an error; nothing is folded.
//     Two IDs are equal when their bytes are.
//   - Nothing is normalised: an ID prints as it was parsed. A trust domain name may look like
//     an IP address, a DNS name or neither, and is handled as bytes (SPIFFE-ID section 2.1).
//   - An ID of more than 2048 bytes is refused, in parsing and in building.
//   - A leaf without key usage, or without digitalSignature, is refused (X509-SVID section 4.3). The extended key
//     usage, if there is one, must include the peer's role and may have others.
//   - Signing certificates may have digitalSignature, no URI name, or a URI name that breaks the
//     rules: the fault is the issuer's, and the anchor stays usable.
//   - The names of a certificate are read from its bytes, because crypto/x509 passes them through a
//     URL parser, which normalises them.
//   - An ID without a path names a trust domain. It is a member of that domain, but only [AllowIDs]
//     can allow it.
//
// The field Rule of an error is the id of a row in CONFORMANCE.md, such as X5-36. The vectors in testdata have the
// same ids.
//
// # Other packages
//
// Package pki makes certificates. Packages workloadapi and secretcache obtain and renew identities, and package
// federation the bundles of other trust domains. Package jwtsvid reads JWT-SVIDs; a [Bundle] holds the keys for
// them. Revocation lists are not read: an authority is revoked by removal from its bundle, and a leaf expires.
//
// Two things are legal in SPIFFE and not supported by crypto/x509: a trust domain name with an empty
// label, such as "a..b", parses here but cannot be read from a certificate, and URI name
// constraints refuse every trust domain name that looks like an IP address.
package spiffe
