package gospiffe

import (
	"fmt"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/svidkit/svidkit/spiffe"
)

// fromID converts an ID. This library refuses an ID of more than 2048 bytes, and the additional characters that
// go-spiffe accepts if it is built with the tag spiffeid_charset_backcompat.
func fromID(id spiffeid.ID) (spiffe.ID, error) {
	if id.IsZero() {
		return spiffe.ID{}, errorf("SPIFFE ID: %w", spiffe.ErrZero)
	}
	return spiffe.ParseID(id.String())
}

func toID(id spiffe.ID) (spiffeid.ID, error) {
	if id.IsZero() {
		return spiffeid.ID{}, errorf("SPIFFE ID: %w", spiffe.ErrZero)
	}
	theirs, err := spiffeid.FromString(id.String())
	if err != nil {
		return spiffeid.ID{}, errorf("go-spiffe refuses the ID %q: %w", id, err)
	}
	return theirs, nil
}

func fromTrustDomain(td spiffeid.TrustDomain) (spiffe.TrustDomain, error) {
	if td.IsZero() {
		return spiffe.TrustDomain{}, errorf("trust domain: %w", spiffe.ErrZero)
	}
	return spiffe.ParseTrustDomain(td.Name())
}

func toTrustDomain(td spiffe.TrustDomain) (spiffeid.TrustDomain, error) {
	if td.IsZero() {
		return spiffeid.TrustDomain{}, errorf("trust domain: %w", spiffe.ErrZero)
	}
	theirs, err := spiffeid.TrustDomainFromString(td.String())
	if err != nil {
		return spiffeid.TrustDomain{}, errorf("go-spiffe refuses the trust domain %q: %w", td, err)
	}
	return theirs, nil
}

// ToMatcher returns a matcher that accepts the IDs that the policy allow permits at the moment of the call. Its
// error wraps [spiffe.ErrDenied]. For an Authorizer of go-spiffe's tlsconfig pass the matcher to
// tlsconfig.AdaptMatcher. A policy that can allow no peer gives a matcher that accepts no ID; see
// [spiffe.CheckPolicySource].
func ToMatcher(allow spiffe.PolicySource) spiffeid.Matcher {
	need(allow != nil, "ToMatcher needs a policy")
	return func(theirs spiffeid.ID) error {
		id, err := fromID(theirs)
		if err != nil {
			return err
		}
		return allow.Policy().Check(id)
	}
}

// need panics with a message if an argument is missing.
func need(ok bool, message string) {
	if !ok {
		panic("gospiffe: " + message)
	}
}

func errorf(format string, args ...any) error {
	return fmt.Errorf("gospiffe: "+format, args...)
}
