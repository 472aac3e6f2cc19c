// Package witsvid issues, presents and validates WIT-SVIDs: tokens that name a workload by its SPIFFE ID and confirm
// its public key. With each request the workload also proves that it holds the private key, so that a stolen token
// is worth nothing.
//
// # Experimental
//
// The standards behind this package are not finished. It may change in ways that break programs, or be removed. It
// implements:
//
//   - WIT-SVID, an Incubating SPIFFE standard, as of commit 665a28f3253ecdce59f26f3ef29c0d6408b37c3d (1 July 2026)
//   - the token and its header field, from draft-ietf-wimse-workload-creds
//   - the Workload Proof Token, from draft-ietf-wimse-wpt-01 (2 March 2026)
//
// It does not implement:
//
//   - HTTP message signatures, from draft-ietf-wimse-http-signature
//   - the working group's changes to the Workload Proof Token since August 2026: the proof is in Authorization, with
//     the scheme WPT, instead of a field of its own; there is no claim "ath"; and a refusal is a 401 with a
//     challenge instead of a 400. The two forms do not interoperate over HTTP
//
// Nothing else in this library imports the package, and a trust bundle has keys for it only after
// [spiffe.ParseBundleWIT], [spiffe.ParseJWKSWIT] or a watch of WIT bundles.
//
// # Use
//
// A client makes an [SVID] from a token and its key with [NewSVID], and presents it with a transport.
// Each request then carries the token and a proof that is good for this request, for one minute, once:
//
//	prover := &witsvid.Prover{Source: func() (*witsvid.SVID, error) { return svid, nil }}
//	transport, err := witsvid.NewTransport(prover, nil)
//	…
//	client := &http.Client{Transport: transport}
//
// A server needs trust bundles, a policy, and the names that clients call it by:
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
// An [Issuer] makes tokens, and answers the Workload API of an agent. Its key belongs in the trust bundle: see
// [NewIssuer].
//
// # Guarantees
//
// A token alone is never accepted, and a WIT-SVID in the field Authorization is refused on both sides.
//
// A proof is for one call. It names its target, which the receiver compares with its own configuration and never
// with a header field. It covers the other tokens in the request: those in Authorization and Txn-Token, and no other
// field. It is accepted once:
// used proofs are remembered until they expire, in bounded memory of which each ID gets a share, see
// [ValidatorOptions].Proofs. Each [Validator] remembers for itself, so several servers of one name each accept a
// proof once.
//
// Only the WIT keys in the bundle of the trust domain in "sub" count. Nothing in a token or proof leads to
// another key, and nothing is fetched.
//
// Tokens travel over TLS. A transport never sends one by http, and a middleware never accepts one, unless it is told
// that TLS ends in front of it.
//
// Tokens and proofs are limited to 16 KiB each before they are parsed. No error carries one, and no value
// prints a token or a key.
//
// # Strict readings
//
//   - A token with an "aud", even an empty one, is refused, and so is a key in "cnf" that does not
//     fit its "alg" or shows its private half.
//   - "nbf" has the same leeway as "exp". "iat" is ignored.
//   - An ID without a path is valid in a token; a policy allows it only if it lists that ID. An
//     Issuer never makes such a token, and never sets "iss".
//   - A proof for more than one audience is refused: each of them could present it to the others.
//   - A proof that covers a token that is not in the request is refused: the token was removed on the way.
//   - A header with "crit" or "b64" is refused. A "jwk" or "x5c" in a header is ignored if it can be read.
package witsvid
