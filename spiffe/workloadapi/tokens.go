package workloadapi

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// TokenSVID is a JWT-SVID, or a WIT-SVID with the private key that it is bound to, as the server sent it, neither
// parsed nor verified. It prints as its ID alone, because any process that has a JWT-SVID can use it until it expires.
type TokenSVID struct {
	redacted

	// ID is the identity that the token is for, as the server says.
	ID spiffe.ID

	// Hint is the operator's label; see [Identity].
	Hint string

	// a func, because no printer, not even one that uses reflection, sees what it holds
	secret func() (token string, key []byte)
}

// Token returns the token, a JWS in compact form.
func (s *TokenSVID) Token() string {
	if s.secret == nil {
		return ""
	}
	token, _ := s.secret()
	return token
}

// KeyJWK returns the private key of a WIT-SVID, a JWK in JSON, in a new slice. It returns nil for a
// JWT-SVID, which has none.
func (s *TokenSVID) KeyJWK() []byte {
	if s.secret == nil {
		return nil
	}
	_, key := s.secret()
	return slices.Clone(key)
}

// FetchJWTSVIDs asks once for JWT-SVIDs for one or more audiences: one of each identity that the caller has, the
// default one first, or of id alone unless that is the zero ID. An identity that may have no token for the audience
// can be left out; if that leaves none, the error wraps [ErrDenied]. It takes at most 30 seconds.
//
// Each call makes a new token. A program that sends many requests puts a *jwtsvid.Cache in front of [Source.Fetch].
func (c *Client) FetchJWTSVIDs(ctx context.Context, id spiffe.ID, audience ...string) ([]TokenSVID, error) {
	const rpc = workloadwire.FetchJWTSVID
	if len(audience) == 0 || slices.Contains(audience, "") {
		return nil, c.mistake(rpc, "an audience is missing or empty")
	}
	request, err := workloadwire.WriteJWTSVIDRequest(audience, idText(id))
	if err != nil {
		return nil, c.mistake(rpc, "an audience is not UTF-8")
	}
	data, err := c.call(ctx, rpc, maxTokens, request)
	if e, ok := errors.AsType[*Error](err); ok && errors.Is(e, ErrDenied) {
		e.Err = fmt.Errorf("for the audience %.256q: %w", audience, e.Err)
	}
	if err != nil {
		return nil, err
	}
	all, err := readTokens(workloadwire.JWT, data, id)
	if err != nil {
		return nil, c.badResponse(rpc, err)
	}
	return all, nil
}

// idText returns an ID as requests have it.
func idText(id spiffe.ID) string {
	if id.IsZero() {
		return ""
	}
	return id.String()
}

func readTokens(p *workloadwire.Profile, data []byte, want spiffe.ID) ([]TokenSVID, error) {
	m, err := p.ReadSVIDs(data, maxIdentities)
	if err != nil {
		return nil, err
	}
	entries, _, err := readEntries(p, m.SVIDs)
	if err != nil {
		return nil, err
	}
	all := make([]TokenSVID, len(entries))
	for i, e := range entries {
		if !want.IsZero() && e.id != want {
			return nil, fmt.Errorf("SVID %d: it is that of %q, not %q", e.n, e.id, want)
		}
		token, key := string(e.Parts[0]), e.Parts[1]
		all[i] = TokenSVID{redacted: redact.New(e.id.String()), ID: e.id, Hint: e.Hint,
			secret: func() (string, []byte) { return token, key }}
	}
	return all, nil
}

// ValidateJWTSVID asks the server to judge a token from a peer, for one audience, a name of this workload. It
// returns the ID in the token and its claims, with numbers as float64 and times in seconds since 1970. If the token
// is not valid, the error wraps [ErrRefused]. A claim "cnf" says that the token is bound to a key of its holder,
// which servers do not compare: refuse such a token.
//
// A program that receives many requests validates tokens itself, with a *jwtsvid.Validator and a [Source] that has
// [Config].JWTBundles.
func (c *Client) ValidateJWTSVID(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any,
	err error) {
	const rpc = workloadwire.ValidateJWTSVID
	if audience == "" || token == "" {
		return spiffe.ID{}, nil, c.mistake(rpc, "the audience or the token is empty")
	}
	request, err := workloadwire.WriteTexts(audience, token)
	if err != nil {
		return spiffe.ID{}, nil, c.mistake(rpc, "the audience or the token is not UTF-8")
	}
	data, err := c.call(ctx, rpc, maxClaims, request)
	if err != nil {
		return spiffe.ID{}, nil, err
	}
	if id, claims, err = readClaims(data); err != nil {
		return spiffe.ID{}, nil, c.badResponse(rpc, err)
	}
	return id, claims, nil
}

func readClaims(data []byte) (spiffe.ID, map[string]any, error) {
	text, claims, err := workloadwire.ReadClaims(data)
	if err != nil {
		return spiffe.ID{}, nil, err
	}
	id, err := parseID(text)
	if err == nil && len(claims) == 0 {
		err = errors.New("claims are empty")
	}
	if err != nil {
		return spiffe.ID{}, nil, err
	}
	return id, claims, nil
}

// WatchWITSVIDs yields the WIT-SVIDs of this workload, all at each change, as [Client.WatchX509SVIDs]
// does; if id is not the zero ID, those of that identity only. The bundles that verify the WIT-SVIDs of
// peers come by [Client.WatchWITBundles].
//
// The WIT profile is Incubating: it is implemented as of revision
// 665a28f3253ecdce59f26f3ef29c0d6408b37c3d of the standards, and may change, and this method and
// WatchWITBundles with it. A server without it ends the watch with an error that wraps
// [ErrUnimplemented].
func (c *Client) WatchWITSVIDs(ctx context.Context, id spiffe.ID) iter.Seq2[[]TokenSVID, error] {
	return func(yield func([]TokenSVID, error) bool) {
		request, err := workloadwire.WriteTexts(idText(id))
		if err != nil {
			panic(err) // an ID is ASCII
		}
		(&watch[[]TokenSVID]{
			client: c, name: workloadwire.FetchWITSVID, request: request,
			read: func(data []byte) ([]TokenSVID, error) { return readTokens(workloadwire.WIT, data, id) },
		}).run(ctx, yield)
	}
}

// WatchWITBundles yields the bundles for WIT-SVIDs, all at each change, as [Client.WatchX509SVIDs] does:
// a JWK Set in JSON for each trust domain, as it was received. An entry whose name is not that of a
// trust domain is left out. See [Client.WatchWITSVIDs] for the state of this profile.
func (c *Client) WatchWITBundles(ctx context.Context) iter.Seq2[map[spiffe.TrustDomain][]byte, error] {
	return func(yield func(map[spiffe.TrustDomain][]byte, error) bool) {
		(&watch[map[spiffe.TrustDomain][]byte]{client: c, name: workloadwire.FetchWITBundles,
			read: readWITBundles}).run(ctx, yield)
	}
}

func readWITBundles(data []byte) (map[spiffe.TrustDomain][]byte, error) {
	m, err := workloadwire.WIT.ReadBundles(data, maxElements)
	if err != nil {
		return nil, err
	}
	all := make(map[spiffe.TrustDomain][]byte, len(m.Bundles))
	for key, set := range m.Bundles {
		if td, err := trustDomain(key); err == nil {
			all[td] = set
		}
	}
	if len(all) == 0 {
		return nil, errors.New("it has no bundles")
	}
	return all, nil
}
