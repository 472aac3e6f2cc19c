// Package workloadserver serves the SPIFFE Workload API: the local endpoint at which a workload gets its
// identity. It is the agent's side; package workloadapi is the workload's.
package workloadserver

import (
	"context"

	"github.com/svidkit/svidkit/spiffe"
)

// JWTIssuer makes JWT-SVIDs; a *ca.Authority is one. Its method is called from many goroutines.
type JWTIssuer interface {
	// IssueJWTSVID returns a JWT-SVID for id, an identity that the caller has, in compact form. Its "aud"
	// has all of audience (WAPI-40).
	IssueJWTSVID(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)
}

// JWTValidator judges JWT-SVIDs; a *jwtsvid.Validator is one, and so is a *workloadapi.Client, which asks
// another server. Its method is called from many goroutines.
type JWTValidator interface {
	// ValidateJWTSVID returns the ID in a token that is valid for audience, and all claims of the token, as
	// encoding/json decodes them. The audience is the word of the workload that received the token, and is
	// one of the workload's own names.
	//
	// An error says that the token is not valid, with two exceptions that say that it could not be
	// judged: an error of package context, and one with the method
	// Retryable() (after time.Duration, ok bool) that reports true, such as for a bundle source that
	// fails. Callers are then told to come back.
	ValidateJWTSVID(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)
}
