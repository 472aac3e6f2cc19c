// Package witsvid issues, presents and validates WIT-SVIDs: tokens that name a workload by its SPIFFE ID
// and confirm a public key of it. The presenter of a token also proves, for each request, that it holds the
// private key. A stolen token is worth nothing without the key.
//
// The standards behind it are Incubating: they change, and this package changes with them, in ways that
// break programs. So it is a package of its own, a trust bundle has keys for it only after
// [spiffe.ParseBundleWIT], and nothing else in this library imports it (STAB-2). It follows drafts of the
// WIMSE working group as they were in August 2026: a Workload Proof Token in a header field of its own, and
// message signatures over "@method" and "@request-target". Later drafts put the proof into Authorization
// and sign "@path" and "@query"; the two do not interoperate. [Revision] names the documents.
//
// # A client
//
// A client needs an [SVID], or a [Source] that renews one, and presents it through a transport:
//
//	prover, err := witsvid.NewProver(source, nil)
//	…
//	transport, err := witsvid.NewTransport(prover, nil)
//	…
//	client := &http.Client{Transport: transport}
//
// Each request then carries the token and a Workload Proof Token: a second, small token that is good for
// this request, for one minute, once. With [TransportOptions.SignMessages] it carries an HTTP message
// signature in its place (RFC 9421), which covers the body as well, and with
// [TransportOptions.Responses] the answer has to be signed too.
//
// # A server
//
// A server needs its trust bundles, a policy, and the names that clients call it by:
//
//	validator, err := witsvid.NewValidator(bundles, spiffe.AllowIDs(web), nil)
//	…
//	wrap, err := witsvid.Middleware(validator, []string{"https://db.example.org"}, nil)
//	…
//	server := &http.Server{Handler: wrap(handler)}
//
// In the handler, [FromContext] returns the proof of the caller's identity. Protocols other than HTTP use
// [Prover.Prove] on one side and [Validator.Validate] on the other.
//
// # An issuer
//
// [Issuer.IssueSVID] makes a key and a token for it, [Issuer.Issue] a token for a key that the workload
// has made. An agent serves the Workload API with an Issuer as it is. The key of the issuer goes into the
// trust bundle: see [Issuer.Authority].
//
// # Guarantees
//
// There is no way to accept a token alone (WIT-30). [Validator.Validate] and [Middleware] take a token
// and a proof and return a [Proof], which nothing else makes. A WIT-SVID in the field Authorization is refused on both sides (WIT-42).
//
// A proof is for one call. It names its target, and a receiver compares that with its own configuration
// and never with what a header field says of the host. It covers the other tokens that travel along, and
// [Proof.Covers] tells which. It is accepted once: used proofs are remembered until they are over, in
// bounded memory of which each holder has a part, and if that is full, its further ones are refused. A holder
// that uses up its part takes nothing from the others; see [ValidatorOptions].Proofs. The token itself may
// come any number of times (WIT-22).
//
// Only the WIT keys in the bundle of the trust domain in "sub" count; nothing in a token or proof leads to
// another key, and nothing is fetched.
//
// Tokens travel over TLS. A transport refuses to send one by http, and a middleware to accept one, unless
// it is told that TLS ends in front of it (WIT-44).
//
// Input is bounded before it is parsed: tokens and proofs at 16 KiB, structured fields at 8 KiB, bodies
// that a digest is made of at 1 MiB by default. Errors carry neither tokens nor proofs, and no printer shows
// a key.
//
// # Strict readings
//
//   - A token with an "aud", even an empty one, is refused (WIT-25), and so is a key in "cnf" that does not
//     fit its "alg" (WIT-14) or shows its private half (WIT-13).
//   - "nbf" has the same leeway as "exp" (AMB-18). "iat" is ignored (WIT-20, DIV-6).
//   - An ID without a path is valid in a token; a policy allows it only if it lists that ID (AMB-19). An
//     Issuer never makes such a token, and never sets "iss" (AMB-17).
//   - A proof for more than one audience is refused: each of them could present it to the others.
//   - A proof that covers a token that is not in the request is refused: the token was removed on the way.
//   - A header with "crit" or "b64" is refused. A "jwk" or "x5c" in a header is ignored if it can be read.
//   - A message signature covers at least what the profile lists. It may cover more header fields, and no
//     other derived components. Every field has one spelling: no member, parameter or component twice.
//   - A client that demands signed responses refuses every unsigned one, errors included.
//
// # Limits
//
// This package obtains and renews no tokens; a [Source] does. It does not fetch bundles: see package
// federation. Used proofs are remembered by each [Validator] alone, so several servers of one name each
// accept a proof once.
package witsvid

// Revision names the documents that this package implements (STAB-3).
const Revision = "SPIFFE standards at commit 665a28f3253ecdce59f26f3ef29c0d6408b37c3d (2026-07-01); " +
	"WIMSE drafts workload-creds, wpt and http-signature, editor's copies of August 2026"
