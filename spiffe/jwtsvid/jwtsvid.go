// Package jwtsvid validates, issues, fetches and presents JWT-SVIDs: signed tokens that name a workload by its
// SPIFFE ID and list their receivers. Use them where TLS ends before it reaches the service. Elsewhere an
// X.509-SVID is better: see package spiffetls.
//
// # A server
//
// A server needs trust bundles, for example from a workloadapi.Source, its own name, and a policy:
//
//	source, err := workloadapi.Start(ctx, workloadapi.Config{Address: address, JWTBundles: true})
//	…
//	defer source.Close()
//	validator, err := jwtsvid.NewValidator(source, []string{"db"}, nil)
//	…
//	protect, err := jwtsvid.Middleware(validator, spiffe.AllowIDs(web), nil)
//	…
//	server := &http.Server{Handler: protect(handler)}
//
// In the handler, [FromContext] returns the proof of the caller's identity.
//
// # A client
//
// A client needs a [Source] of tokens, such as a workloadapi.Source, and the audience of each host:
//
//	cache, err := jwtsvid.NewCache(source, nil)
//	…
//	transport, err := jwtsvid.NewTransport(cache, map[string]string{"db.example.org": "db"}, nil)
//	…
//	client := &http.Client{Transport: transport}
//
// [Cache.Run] fetches tokens before they are needed; it is for programs that manage their goroutines. Protocols
// other than HTTP use [Validator.Validate] on one side and [Cache.Fetch] on the other.
//
// # An authority or agent
//
// An authority uses an [Issuer]. An agent serves the Workload API with an Issuer, or a ca.Authority, and the
// Validator of [NewAgentValidator]; no adapters are needed.
//
// # An ID is a claim, a Verified is proof
//
// Anyone can write a token, and [ParseUnverified] reads it. A [Verified] is a proven token: it is signed by a key in
// the bundle of the trust domain that its own ID names, it is for this receiver, and it has not expired. Only a
// [Validator] makes one, so a function that needs a proven identity takes a *Verified.
//
// # A token is a bearer credential
//
// Any holder of a token can use it until it expires, towards all of its audience. So tokens are short-lived: five
// minutes by default. They have one receiver: an [Issuer] needs an option to name more, and a Validator has no
// option to accept tokens for others. They stay out of sight: no error carries a token, and no value prints one
// with a verb of package fmt, a slog handler or a JSON encoder; the caller guards the strings from [Issuer.Issue]
// and [Cache.Fetch]. And they go where they belong: the transport of [NewTransport] sends them to the listed hosts,
// over TLS, and never after a redirect to another host.
//
// # Guarantees
//
// The algorithm must be a known one, and is checked before anything else; the key is from the bundle, never from the
// token. Package crypto verifies signatures, and go-jose signs. The checks have a fixed order, see
// [Validator.Validate]. Errors match [ErrExpired] and the others with [errors.Is].
//
// A changed bundle counts at once: a Validator asks the source of bundles for each token. It remembers verified
// tokens, so that a repeated one costs no signature check, but only for the bundle that verified them.
//
// A [Cache] serves a token until it expires, even while its source fails, and asks for the next one when half of
// the token's life is over.
//
// # Strict readings
//
// Where the standards leave room, tokens are read strictly. A header may have "alg", "kid" and "typ" only (JWT-SVID
// section 2). A token whose "kid" is not in the bundle is refused without trying other keys
// (JWT-SVID section 2.2); without "kid", the keys that fit are tried, up to 16. JSON with duplicate members,
// base64url that is not canonical, and a "typ" of null are refused. "exp" may have a fraction and "aud" may
// be a string; issued tokens have neither. "iat" is ignored.
//
// # Limits
//
// Only [Middleware] decides which callers are allowed, by a [spiffe.PolicySource]. Uses are not counted: a token may
// be presented any number of times (JWT-SVID section 7.1). Nothing is stored on disk. Of OAuth the package has only
// the header that carries tokens.
package jwtsvid
