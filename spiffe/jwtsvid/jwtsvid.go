// Package jwtsvid validates, issues, fetches and presents JWT-SVIDs: signed tokens that name a workload
// by its SPIFFE ID and list their receivers. Use them where TLS ends before it reaches the service.
// Elsewhere an X.509-SVID is better: see package spiffetls.
//
// # A server
//
// A service that is called needs its trust bundles, such as those of a workloadapi.Source, its own name, and a policy:
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
// A program that has a group for what it runs adds [Cache.Run], which fetches tokens before they are asked for.
// Protocols other than HTTP use [Validator.Validate] on one side and [Cache.Fetch] on the other.
//
// # An authority or agent
//
// An authority has an [Issuer]. An agent serves the Workload API with an Issuer and with what
// [NewAgentValidator] returns, or with a ca.Authority in place of the Issuer; no adapters are needed.
//
// # An ID is a claim, a Verified is proof
//
// Anyone can write a token, and [ParseUnverified] reads it. A [Verified] is a token that was proved: its
// signature is by a key in the bundle of the trust domain that its own ID names, it is for this receiver,
// and it is in time. Only a [Validator] makes one, so a function that needs a proved identity takes a
// *Verified.
//
// # A token is a bearer credential
//
// Any holder of a token can use it until it expires, towards all of its audience. So this package keeps
// tokens short: five minutes by default. It keeps them to one receiver: an [Issuer] needs an option to name
// more, and a Validator has no option to accept tokens for others. It keeps them out of sight: no error
// carries one, and no value prints one with a verb of package fmt, a slog handler or a JSON encoder; the
// strings from [Issuer.Issue] and [Cache.Fetch] are the caller's to guard. And it keeps them on their way:
// what [NewTransport] returns sends one to the hosts that it was given, over TLS, and never after a redirect
// to another host.
//
// # Guarantees
//
// The algorithm is one of nine, checked before anything else; the key is from the bundle, never from the
// token. go-jose parses, verifies and signs, after a check of the form that refuses what go-jose lets pass.
// The checks have a fixed order, see [Validator.Validate]. Errors match [ErrExpired] and its siblings with
// [errors.Is].
//
// A changed bundle counts at once. The source of bundles is asked for each token, and a token that is
// remembered, so that it costs no signature check when it comes again, counts only with the bundle that
// verified it.
//
// A [Cache] serves the token that it has until that expires, whatever happens to its source, and asks for
// the next one when half of its life is over.
//
// # Strict readings
//
// Where the standards leave room, tokens are read strictly. In a header nothing but "alg", "kid" and "typ"
// is accepted (AMB-2, JWT-6). A token whose "kid" is not in the bundle is refused without trying other keys
// (JWT-8); without "kid", the keys that fit are tried, up to 16 (JWT-7). JSON with duplicate members,
// base64url that is not canonical, and a "typ" of null are refused. "exp" may have a fraction and "aud" may
// be a string (AMB-3); issued tokens have neither. "iat" is ignored (JWT-23).
//
// Ids such as JWT-13 in comments name rules in CONFORMANCE.md of package spiffe.
//
// # Limits
//
// This package decides who may call only in [Middleware], by a [spiffe.PolicySource]. It does not count
// uses: a token may be presented any number of times (JWT-25). It stores nothing on disk, and it knows no
// OAuth beyond the header that tokens travel in.
package jwtsvid
