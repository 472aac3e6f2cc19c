package kube

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/svidkit/svidkit/internal/jws"
	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/strictjson"
)

// status is the answer of a TokenReview.
type status struct {
	Authenticated bool     `json:"authenticated"`
	Audiences     []string `json:"audiences,omitempty"`
	Error         string   `json:"error,omitempty"`
	User          struct {
		Username string              `json:"username"`
		UID      string              `json:"uid"`
		Groups   []string            `json:"groups"`
		Extra    map[string][]string `json:"extra"`
	} `json:"user,omitzero"`
}

// Names of Kubernetes for service accounts and the pods that their tokens are bound to.
const (
	accountsGroup = "system:serviceaccounts"
	extraPodName  = "authentication.kubernetes.io/pod-name"
	extraPodUID   = "authentication.kubernetes.io/pod-uid"
	extraNodeName = "authentication.kubernetes.io/node-name"
)

// account returns the account in an answer about the token. With wanted audiences, one must be confirmed.
func (s *status) account(token string, wanted []string) (*Account, error) {
	switch {
	case s.Error != "":
		return nil, fmt.Errorf("%w: the API server says: %s", ErrInvalidToken, redact(s.Error, token))
	case !s.Authenticated:
		return nil, fmt.Errorf("%w: the API server does not know it", ErrNotAuthenticated)
	case len(wanted) > 0 && !slices.ContainsFunc(s.Audiences, func(a string) bool { return slices.Contains(wanted, a) }):
		return nil, fmt.Errorf("%w: the API server does not confirm any of the audiences %.256q", ErrNotAuthenticated, wanted)
	}
	namespace, name, err := parseUsername(s.User.Username)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidToken, err)
	}
	if !slices.Contains(s.User.Groups, accountsGroup) {
		return nil, fmt.Errorf("%w: the user %q is not in the group %s", ErrInvalidToken, s.User.Username, accountsGroup)
	}
	a := &Account{
		Namespace:      namespace,
		ServiceAccount: name,
		UID:            s.User.UID,
		PodName:        s.extra(extraPodName),
		PodUID:         s.extra(extraPodUID),
		NodeName:       s.extra(extraNodeName),
	}
	switch {
	case a.PodName != "" && !k8s.ValidName(a.PodName):
		err = fmt.Errorf("%.300q is not the name of a pod", a.PodName)
	case a.NodeName != "" && !k8s.ValidName(a.NodeName):
		err = fmt.Errorf("%.300q is not the name of a node", a.NodeName)
	case !validUID(a.UID) || !validUID(a.PodUID):
		err = errors.New("a UID has more than 128 bytes, or some that are not printable ASCII")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidToken, err)
	}
	return a, nil
}

// extra returns the first value of an extra attribute of the user, or "".
func (s *status) extra(name string) string {
	if values := s.User.Extra[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// parseUsername reads the user name of a service account: system:serviceaccount:NAMESPACE:NAME.
func parseUsername(s string) (namespace, name string, err error) {
	parts := strings.SplitN(s, ":", 5)
	switch {
	case len(parts) != 4 || parts[0] != "system" || parts[1] != "serviceaccount":
		return "", "", fmt.Errorf("the user %.300q is not a service account (system:serviceaccount:NAMESPACE:NAME)", s)
	case !k8s.ValidLabel(parts[2]):
		return "", "", fmt.Errorf("%.300q in the user name is not a namespace (an RFC 1123 label)", parts[2])
	case !k8s.ValidName(parts[3]):
		return "", "", fmt.Errorf("%.300q in the user name is not a service account's name (an RFC 1123 subdomain)", parts[3])
	}
	return parts[2], parts[3], nil
}

func validUID(s string) bool {
	return len(s) <= 128 && !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' })
}

// redact makes a text of the API server fit for a log: one line of at most 300 bytes without any part of
// the token, which authenticators behind the API server may quote.
func redact(text, token string) string {
	const limit, piece = 300, 16
	text = text[:min(len(text), 4*limit)]
	secret := make([]bool, len(text)) // by byte
	for n, i := min(piece, len(token)), 0; n > 0 && i+n <= len(text); i++ {
		if strings.Contains(token, text[i:i+n]) {
			for j := range n {
				secret[i+j] = true
			}
		}
	}
	var b strings.Builder
	for i, c := range text {
		switch {
		case b.Len() >= limit:
			return b.String() + "…"
		case secret[i] && (i == 0 || !secret[i-1]):
			b.WriteString("[redacted]")
		case secret[i]:
		case unicode.IsPrint(c):
			b.WriteRune(c)
		default:
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// claims is what a token says of itself. A claim that is missing or has another form is zero.
type claims struct {
	expires   time.Time
	audiences []string
	issuer    string
}

// readClaims reads a token that is a JWT in its strict form, and returns nothing for any other. Of a token that the API
// server found good, they are true.
func readClaims(token string) claims {
	t, err := jws.Parse(token)
	if err != nil {
		return claims{}
	}
	var c claims
	r := strictjson.NewReader(t.Payload)
	for name := range r.Members() {
		switch string(name) {
		case "exp":
			if n, ok := r.Number(); ok {
				c.expires = jws.NumericDate(string(n))
			}
		case "aud":
			c.audiences = readAudiences(r)
		case "iss":
			text, _ := r.Text()
			c.issuer = string(text)
		}
	}
	if r.End() != nil {
		return claims{}
	}
	return c
}

// readAudiences reads a text or an array of texts.
func readAudiences(r *strictjson.Reader) []string {
	switch r.Kind() {
	case strictjson.String:
		text, _ := r.Text()
		return []string{string(text)}
	case strictjson.Array:
		var all []string
		good := true
		for range r.Elements() {
			text, ok := r.Text()
			good = good && ok
			all = append(all, string(text))
		}
		if good {
			return all
		}
	}
	return nil
}
