// Package jwtsvid validates, issues, fetches and presents JWT-SVIDs: signed tokens that name a workload
// by its SPIFFE ID and say whom they are for. They are for where TLS ends before the service does. Where
// it does not, an X.509-SVID is better: see package spiffetls.
//
// A service that is called needs its trust bundles, its own name, and a policy:
//
//	validator, err := jwtsvid.NewValidator(bundles, []string{"db"}, nil)
//	…
//	protect, err := jwtsvid.Middleware(validator, spiffe.AllowIDs(web), nil)
//	…
//	server := &http.Server{Handler: protect(handler)}
//
// In the handler, [FromRequest] gives the proof of who is calling. A client needs a source of tokens, such
// as a client of the Workload API, and the audience of each host:
//
//	cache, err := jwtsvid.NewCache(source, nil)
//	…
//	go cache.Run(ctx) // in a group that waits for it
//	transport, err := jwtsvid.NewTransport(cache, map[string]string{"db.example.org": "db"}, nil)
//	…
//	client := &http.Client{Transport: transport}
//
// An authority has an [Issuer]. Whatever speaks by other means than HTTP has [Validator.Validate] on one
// side and [Cache.Fetch] on the other.
//
// # An ID is a claim, a Verified is proof
//
// Anyone can write a token, and [ParseUnverified] reads it. A [Verified] is a token that was proved: the
// signature is that of a key in the bundle of the trust domain that the token's own ID names, it is for
// us, and it is in time. Only a [Validator] makes one, so a function that must not be called on a
// stranger's word takes a *Verified, and the compiler sees to the rest.
//
// # A token is a bearer credential
//
// Whoever has seen a token can use it until it expires, against everybody in its audience. All that this
// package does about tokens follows from that:
//
// They are short: five minutes unless asked otherwise. They are for one receiver: the issuer wants to be
// told if more are meant, and a validator has no switch to accept those that are for others. They do not
// show: no error carries one, and no value of this package prints one with a verb of package fmt, a slog
// handler or a JSON encoder. Those that come as strings, from [Issuer.Issue], [Cache.Fetch] and
// [Verified.Token], are the caller's to guard. They do not stray: a [Transport] sends one to the hosts that
// it was told of, over TLS, and nowhere by redirect.
//
// # What it promises
//
// The algorithm is one of nine, checked before anything else is looked at; the key is the bundle's, never
// the token's. The checks have a fixed order, see [Validator.Validate], and each refusal is an [*Error]
// with a [Reason] for code and a rule for people.
//
// A changed bundle counts at once. The source is asked for each token, and a token that is remembered, so
// that it costs no signature check when it comes again, is forgotten with the bundle that verified it.
//
// Old before new. A [Cache] serves the token that it has until that expires, whatever happens to its
// source, and asks for the next one when half of its life is over.
//
// # Strict readings
//
// Where the standards leave room, tokens are read strictly. In a header nothing but "alg", "kid" and "typ"
// is tolerated (AMB-2, JWT-6). A "kid" that the bundle does not have is no invitation to try others
// (JWT-8); without "kid", those that fit are tried, up to 16 (JWT-7). JSON with duplicate members, base64url
// that is not in its only form, and a "typ" of null are refused. "exp" may have a fraction and "aud" may be
// a string (AMB-3); what is issued has neither. "iat" plays no part in validation (JWT-23).
//
// Ids such as JWT-13 in comments and errors name a rule; the test vectors in testdata carry the ids of the
// conformance table.
//
// # What it does not do
//
// It does not decide who may come in, except in [Middleware], which wants a [spiffe.Policy]. It does not
// count uses: a token may be presented any number of times (JWT-25). It keeps nothing on disk, and it
// knows no OAuth beyond the header that tokens travel in.
package jwtsvid
