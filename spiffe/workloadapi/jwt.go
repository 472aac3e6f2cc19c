package workloadapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/svidkit/svidkit/spiffe"
)

// JWTSVID is a token that was fetched, as the server sent it: it is not parsed, let alone verified.
// Whoever has it can use it until it expires, so it does not print.
type JWTSVID struct {
	// ID is the identity that the token is for, as the server says.
	ID spiffe.ID

	// Hint is the operator's label; see [Identity].
	Hint string

	token func() string // a func, because no printer, not even one that uses reflection, sees what it holds
}

// Token returns the token: a JWS in compact form, to be sent as a bearer token.
func (s *JWTSVID) Token() string {
	if s.token == nil {
		return ""
	}
	return s.token()
}

// String returns the ID.
func (s JWTSVID) String() string { return s.ID.String() }

// GoString returns the ID in a form that is not taken for Go source.
func (s JWTSVID) GoString() string { return "workloadapi.JWTSVID(" + s.ID.String() + ")" }

// LogValue is String as a log value.
func (s JWTSVID) LogValue() slog.Value { return slog.StringValue(s.ID.String()) }

// FetchJWTSVID asks for a token of the default identity for an audience, and more audiences if
// they are given. It asks once: a server that cannot be reached is an [*Error] whose method Retryable
// reports true. The call takes 30 seconds at most.
//
// Each call is a new token. A program that sends many requests keeps a token for most of its life.
func (c *Client) FetchJWTSVID(ctx context.Context, audience string, extra ...string) (*JWTSVID, error) {
	all, err := c.FetchJWTSVIDs(ctx, spiffe.ID{}, append([]string{audience}, extra...)...)
	if err != nil {
		return nil, err
	}
	return &all[0], nil
}

// FetchJWTSVIDs asks for tokens for one or more audiences: one of each identity that the caller has,
// the default one first or, if id is not the zero ID, of that one only. See [Client.FetchJWTSVID].
func (c *Client) FetchJWTSVIDs(ctx context.Context, id spiffe.ID, audience ...string) ([]JWTSVID, error) {
	req := &jwtSVIDRequest{audience: audience}
	if !id.IsZero() {
		req.spiffeID = id.String()
	}
	if len(audience) == 0 || slices.Contains(audience, "") {
		return nil, c.mistake(fetchJWTSVID, "an audience is missing or empty")
	}
	m, err := encode(req)
	if err != nil {
		return nil, c.mistake(fetchJWTSVID, "an audience is not UTF-8")
	}
	data, err := c.call(ctx, fetchJWTSVID, maxTokens, m)
	if err != nil {
		return nil, err
	}
	all, err := readJWTSVIDs(data, id)
	if err != nil {
		return nil, c.badResponse(fetchJWTSVID, err)
	}
	return all, nil
}

func readJWTSVIDs(data []byte, want spiffe.ID) ([]JWTSVID, error) {
	var m jwtSVIDResponse
	if err := decode(data, &m, maxIdentities); err != nil {
		return nil, err
	}
	if len(m.svids) == 0 {
		return nil, errors.New("it has no SVIDs (WAPI-43)")
	}
	var all []JWTSVID
	hints := make(map[string]bool)
	for i, s := range m.svids {
		if h := s.hint; h != "" && hints[h] {
			continue // WAPI-24
		}
		hints[s.hint] = true
		id, err := parsedID(s.spiffeID)
		switch {
		case err != nil:
			return nil, fmt.Errorf("SVID %d: %w", i+1, err)
		case s.svid == "":
			return nil, fmt.Errorf("SVID %d: svid is empty (WAPI-14)", i+1)
		case !want.IsZero() && id != want:
			return nil, fmt.Errorf("SVID %d: it is that of %q, not %q", i+1, id, want)
		}
		token := s.svid
		all = append(all, JWTSVID{ID: id, Hint: s.hint, token: func() string { return token }})
	}
	return all, nil
}

// ValidateJWTSVID has the server judge a token that a peer has sent, for one audience: the
// server's own. It returns the ID in it and its claims, with numbers as float64 and times in seconds
// since 1970. A token that is not good is an error that wraps [ErrRefused].
//
// It is the server's word. A program that receives many requests validates them itself, with the
// bundles of [Client.WatchJWTBundles].
func (c *Client) ValidateJWTSVID(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error) {
	if audience == "" || token == "" {
		return spiffe.ID{}, nil, c.mistake(validateJWTSVID, "the audience or the token is empty")
	}
	m, err := encode(&validateJWTSVIDRequest{audience: audience, svid: token})
	if err != nil {
		return spiffe.ID{}, nil, c.mistake(validateJWTSVID, "the audience or the token is not UTF-8")
	}
	data, err := c.call(ctx, validateJWTSVID, maxClaims, m)
	if err != nil {
		return spiffe.ID{}, nil, err
	}
	if id, claims, err = readClaims(data); err != nil {
		return spiffe.ID{}, nil, c.badResponse(validateJWTSVID, err)
	}
	return id, claims, nil
}

func readClaims(data []byte) (spiffe.ID, map[string]any, error) {
	var m validateJWTSVIDResponse
	if err := decode(data, &m, 16); err != nil {
		return spiffe.ID{}, nil, err
	}
	id, err := parsedID(m.spiffeID)
	switch {
	case err != nil:
		return spiffe.ID{}, nil, err
	case len(m.claims) == 0:
		return spiffe.ID{}, nil, errors.New("claims are empty (WAPI-52)")
	}
	return id, m.claims, nil
}

// mistake is a request that the server would refuse.
func (c *Client) mistake(rpc, reason string) *Error {
	return &Error{RPC: rpc, Server: c.server, Final: true, Err: fmt.Errorf("%w, and was not sent it: %s", ErrRefused, reason)}
}
