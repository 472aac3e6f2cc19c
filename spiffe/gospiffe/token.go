package gospiffe

import (
	"context"
	"fmt"
	"slices"
	"time"

	theirjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"

	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// FromTokenSource returns a source of the tokens that src fetches, such as a JWTSource of go-spiffe's workloadapi;
// put a [jwtsvid.Cache] in front to keep them. A token that [jwtsvid.ParseUnverified] refuses, or with another ID
// than src says, is an error. An expired token is an error that wraps [jwtsvid.ErrExpired], and a token whose
// audiences are not exactly the requested ones is an error that wraps [jwtsvid.ErrAudience]. No error has the token.
func FromTokenSource(src theirjwt.Source) jwtsvid.Source {
	if src == nil {
		panic("gospiffe: FromTokenSource needs a source")
	}
	return tokenSource(func(ctx context.Context, audience []string) (string, error) {
		if len(audience) == 0 {
			return "", errorf("token: %w: name the receiver of the token", jwtsvid.ErrAudience)
		}
		params := theirjwt.Params{Audience: audience[0], ExtraAudiences: slices.Clone(audience[1:])}
		svid, err := src.FetchJWTSVID(ctx, params)
		if err != nil {
			return "", errorf("token: %w", err)
		}
		if svid == nil {
			return "", errorf("token: the source returned none, and no error")
		}
		token := svid.Marshal()
		claims, err := jwtsvid.ParseUnverified(token)
		if err != nil {
			return "", errorf("token: %w", err)
		}
		id, err := fromID(svid.ID)
		switch {
		case err != nil:
			return "", err
		case id != claims.ID:
			return "", errorf("token: the source says that it is of %q, and it is of %q", id, claims.ID)
		}
		if err := fits(claims.ID, claims.Expires, claims.Audience, audience); err != nil {
			return "", err
		}
		return token, nil
	})
}

// ToTokenSource returns a source for go-spiffe of the tokens that src fetches, which is usually a [jwtsvid.Cache].
// The signature is not verified, as go-spiffe does not verify the tokens it fetches. The caller owns the result; its
// Marshal returns the token. Age and audience are checked as in [FromTokenSource].
//
// A source of this library has tokens of one identity. A different Subject in the parameters is an error: make a
// source of that identity.
func ToTokenSource(src jwtsvid.Source) theirjwt.Source {
	if src == nil {
		panic("gospiffe: ToTokenSource needs a source")
	}
	return jwtSource(func(ctx context.Context, p theirjwt.Params) (*theirjwt.SVID, error) {
		audience := append([]string{p.Audience}, p.ExtraAudiences...)
		token, err := src.Fetch(ctx, audience...)
		if err != nil {
			return nil, errorf("token: %w", err)
		}
		parsed, err := theirjwt.ParseInsecure(token, audience)
		if err != nil {
			return nil, errorf("token: %w", err)
		}
		if !p.Subject.IsZero() && parsed.ID != p.Subject {
			return nil, errorf("token: it is of %q and %q was asked for; make a source of that identity",
				parsed.ID, p.Subject)
		}
		if err := fits(parsed.ID, parsed.Expiry, parsed.Audience, audience); err != nil {
			return nil, err
		}
		return parsed, nil
	})
}

type (
	tokenSource func(context.Context, []string) (string, error)
	jwtSource   func(context.Context, theirjwt.Params) (*theirjwt.SVID, error)
)

func (f tokenSource) Fetch(ctx context.Context, audience ...string) (string, error) {
	return f(ctx, audience)
}

func (f jwtSource) FetchJWTSVID(ctx context.Context, p theirjwt.Params) (*theirjwt.SVID, error) {
	return f(ctx, p)
}

// fits returns an error if a token of id has expired, or is not for exactly the requested audiences.
func fits(id fmt.Stringer, expires time.Time, audience, want []string) error {
	if !time.Now().Before(expires) {
		return errorf("token of %q: %w", id, jwtsvid.ErrExpired)
	}
	if slices.Equal(audience, want) ||
		slices.Equal(slices.Sorted(slices.Values(audience)), slices.Sorted(slices.Values(want))) {
		return nil
	}
	return errorf("token of %q: %w: it is for %q, and %q was asked for", id, jwtsvid.ErrAudience, audience, want)
}
