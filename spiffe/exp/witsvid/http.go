package witsvid

import (
	"fmt"
	"net/http"
	"slices"
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
	tokenField = "workload-identity-token"
	proofField = "workload-proof-token"
	authField  = "authorization"
	txnField   = "txn-token"
)

// tokenFields checks the names of further header fields for tokens, and returns them in lower case.
func tokenFields(names []string) ([]string, error) {
	var list []string
	for _, n := range names {
		f := strings.ToLower(n)
		switch {
		case f == "" || strings.ContainsFunc(f,
			func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, c) }):
			return nil, fmt.Errorf("%q is not the name of a header field", token.Clip(n, token.MaxQuoted))
		case slices.Contains([]string{tokenField, proofField, authField, txnField, "host"}, f):
			return nil, fmt.Errorf("the field %q is always covered and must not be among Tokens", f)
		case slices.Contains(list, f):
			return nil, fmt.Errorf("the field %q is there twice", f)
		}
		list = append(list, f)
	}
	return list, nil
}

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

// fields returns the tokens in a request that a Workload Proof Token must cover: the tokens in the fields of the
// drafts and in the further fields. An Authorization other than an OAuth access token counts as a further field. The
// caller sets the target.
func fields(h http.Header, further []string) (Call, *token.Error) {
	var c Call
	other := func(field, value string) {
		if c.Tokens == nil {
			c.Tokens = map[string]string{}
		}
		c.Tokens[field] = value
	}
	auth, e := oneField(h, authField, "WPT-11")
	if e != nil {
		return c, e
	}
	scheme, token, _ := strings.Cut(auth, " ")
	switch {
	case auth == "":
	case !strings.EqualFold(scheme, "Bearer") && !strings.EqualFold(scheme, "DPoP"):
		other(authField, auth)
	case trim(token) == "":
		return c, requests.Refuse("binding", "WPT-11", "Authorization has a scheme and no token")
	default:
		c.AccessToken = trim(token)
	}
	if c.TxnToken, e = oneField(h, txnField, "WPT-12"); e != nil {
		return c, e
	}
	for _, f := range further {
		switch value, e := oneField(h, f, "WPT-13"); {
		case e != nil:
			return c, e
		case value != "":
			other(f, value)
		}
	}
	return c, nil
}

// covered returns the names of the fields that a proof for the call covers.
func (c *Call) covered() []string {
	list := []string{tokenField}
	if c.AccessToken != "" {
		list = append(list, authField)
	}
	if c.TxnToken != "" {
		list = append(list, txnField)
	}
	for name := range c.Tokens {
		list = append(list, name)
	}
	return list
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
