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

// TokenSVID is a JWT-SVID, or a WIT-SVID with the private key that it is bound to. The token is unparsed and
// unverified, as the server sent it. A TokenSVID prints only its ID, because any process that reads a JWT-SVID can use
// it until it expires.
type TokenSVID struct {
	redacted

	// ID is the identity that the token is for, according to the server.
	ID spiffe.ID

	// Hint is the operator's label; see [Identity].
	Hint string

	// a func, so that no printer can show the secret, not even by reflection
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

// KeyJWK returns the private key of a WIT-SVID, as a JWK in JSON, in a new slice; nil for a JWT-SVID, which has no
// key.
func (s *TokenSVID) KeyJWK() []byte {
	if s.secret == nil {
		return nil
	}
	_, key := s.secret()
	return slices.Clone(key)
}

// FetchJWTSVIDs makes one call for JWT-SVIDs for one or more audiences. If id is the zero ID, it returns a token for
// each identity of the caller, the default one first; otherwise only a token for id. The server may leave out
// identities that may have no token for the audience; if none remains, the error wraps [ErrDenied]. It takes at most
// 30 seconds.
//
// Each call fetches new tokens. A program that sends many requests puts a *jwtsvid.Cache in front of [Source.Fetch].
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

// idText returns the form of id in requests: "" for the zero ID.
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

// ValidateJWTSVID asks the server to validate a peer's token for audience, a name of this workload. It returns the ID
// in the token and its claims, with numbers as float64 and times in seconds since 1970. If the token is not valid, the
// error wraps [ErrRefused]. Refuse a token with a "cnf" claim: it is bound to a key of its holder, and servers do not
// check that key.
//
// A program that receives many requests should validate tokens itself, with a *jwtsvid.Validator and a [Source] with
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
	id, err := spiffe.ParseID(text)
	if err == nil && len(claims) == 0 {
		err = errors.New("claims are empty")
	}
	return id, claims, err
}

// WatchWITSVIDs yields all WIT-SVIDs of this workload at each change, like [Client.WatchX509SVIDs]. If id is not the
// zero ID, it yields only the WIT-SVIDs of id. [Client.WatchWITBundles] yields the bundles that verify the WIT-SVIDs
// of peers.
//
// The WIT profile is Incubating: it is implemented as of revision 665a28f3253ecdce59f26f3ef29c0d6408b37c3d of the
// standards. If it changes, so will this method and WatchWITBundles. A server without WIT support ends the watch with
// an error that wraps [errors.ErrUnsupported].
func (c *Client) WatchWITSVIDs(ctx context.Context, id spiffe.ID) iter.Seq2[[]TokenSVID, error] {
	return func(yield func([]TokenSVID, error) bool) {
		request, _ := workloadwire.WriteTexts(idText(id)) // never an error: an ID is ASCII
		(&watch[[]TokenSVID]{
			client: c, name: workloadwire.FetchWITSVID, request: request,
			read: func(data []byte) ([]TokenSVID, error) { return readTokens(workloadwire.WIT, data, id) },
		}).run(ctx, yield)
	}
}

// WatchWITBundles yields the trust bundles for WIT-SVIDs, like [Client.WatchX509SVIDs]: they have WIT authorities. See
// [Client.WatchWITSVIDs] for the state of this profile.
func (c *Client) WatchWITBundles(ctx context.Context) iter.Seq2[*Update, error] {
	return c.watchUpdates(ctx, workloadwire.FetchWITBundles, (*reader).witBundles)
}
