package jwt

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/internal/tokens/verifycache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// SVID returns an [authn.Authenticator] that proves callers by JWT-SVIDs. v validates the token, and the policy must
// allow its ID. The token is in the authorization header, see [authn.Bearer]. The method of the caller is "jwt-svid".
//
// Its errors wrap [authn.ErrNoCredential] if there is no token, and [authn.ErrRefused] if it is refused; the
// cause is an error of package jwtsvid or [spiffe.ErrDenied]. They wrap [jwtsvid.ErrUnavailable] alone if the
// source of bundles failed.
func SVID(v *jwtsvid.Validator, allow spiffe.PolicySource) (authn.Authenticator, error) {
	if v == nil {
		return nil, errors.New("authn/jwt: no jwtsvid.Validator")
	}
	if err := spiffe.CheckPolicySource(allow); err != nil {
		return nil, fmt.Errorf("authn/jwt: JWT-SVIDs: %w", err)
	}
	return &svids{v, allow, verifycache.New[*jwtsvid.Verified, *authn.Caller](maxRemembered)}, nil
}

type svids struct {
	validator *jwtsvid.Validator
	allow     spiffe.PolicySource
	// the validator returns the same proof while its token is cached
	memory *verifycache.Table[*jwtsvid.Verified, *authn.Caller]
}

// Authenticate implements [authn.Authenticator].
func (s *svids) Authenticate(r *http.Request) (*authn.Caller, error) {
	text, ok := bearer.Token(r.Header) // whose form the validator checks, unless it remembers the token
	if !ok || !bearer.Confidential(r) {
		var err error
		if text, err = authn.Bearer(r); err != nil {
			return nil, err
		}
	}
	proof, err := s.validator.Validate(text)
	if err == nil {
		err = s.allow.Policy().Check(proof.ID())
	}
	switch {
	case errors.Is(err, jwtsvid.ErrUnavailable):
		return nil, fmt.Errorf("authn/jwt: %w", err)
	case err != nil:
		return nil, fmt.Errorf("authn/jwt: %w", refuse(err))
	}
	if caller, ok := s.memory.Find(proof); ok {
		return caller, nil
	}
	caller := &authn.Caller{ID: proof.ID(), Method: "jwt-svid", NotAfter: proof.Expires()}
	s.memory.Keep(proof, caller, func(old *authn.Caller) int64 { return old.NotAfter.Unix() })
	return caller, nil
}
