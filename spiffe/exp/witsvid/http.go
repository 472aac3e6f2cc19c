package witsvid

import (
	"net/http"
	"strings"

	"github.com/svidkit/svidkit/internal/tokens/token"
)

// The header fields for a token and a Workload Proof Token. A request has each exactly once.
const (
	headerToken = "Workload-Identity-Token"
	headerProof = "Workload-Proof-Token"
)

// Header fields, in lower case as proofs name them.
const (
	authField = "authorization"
	txnField  = "txn-token"
)

// oneField returns the value of a header field, or "" without one. More than one value is an error.
func oneField(h http.Header, field, rule string) (string, *token.Error) {
	lines := h[http.CanonicalHeaderKey(field)]
	switch {
	case len(lines) == 0:
		return "", nil
	case len(lines) > 1:
		return "", requests.Refuse("binding", rule,
			"the field %q is there %d times, and a proof can cover it once", field, len(lines))
	case trim(lines[0]) == "":
		return "", requests.Refuse("binding", rule, "the field %q is empty", field)
	}
	return trim(lines[0]), nil
}

// fields returns the tokens in a request that a Workload Proof Token must cover. An Authorization other than an OAuth
// access token counts as another token. The caller sets the target.
func fields(h http.Header) (Call, *token.Error) {
	var c Call
	auth, e := oneField(h, authField, "WPT-11")
	if e != nil {
		return c, e
	}
	scheme, token, _ := strings.Cut(auth, " ")
	switch {
	case auth == "":
	case !strings.EqualFold(scheme, "Bearer") && !strings.EqualFold(scheme, "DPoP"):
		c.Tokens = map[string]string{authField: auth}
	case trim(token) == "":
		return c, requests.Refuse("binding", "WPT-11", "Authorization has a scheme and no token")
	default:
		c.AccessToken = trim(token)
	}
	c.TxnToken, e = oneField(h, txnField, "WPT-12")
	return c, e
}

// misplaced refuses a WIT-SVID in Authorization, where it would be a bearer token.
func misplaced(h http.Header) *token.Error {
	for _, line := range h["Authorization"] {
		for part := range strings.FieldsSeq(line) {
			if s, e := tokens.Parse(strings.TrimRight(part, ",")); e == nil && s.Type == tokenType {
				return requests.Refuse("misplaced", "WIT-42",
					"there is a WIT-SVID in Authorization; it is never a bearer token")
			}
		}
	}
	return nil
}

// single returns the only value of a header field.
func single(h http.Header, name, rule string) (string, *token.Error) {
	if lines := h[name]; len(lines) != 1 {
		return "", requests.Refuse("missing", rule, "%s is there %d times, not once", name, len(lines))
	}
	return h[name][0], nil
}
