package workloadapi

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"

	"github.com/svidkit/svidkit/spiffe"
)

// WITClient calls the WIT profile of the Workload API. That profile is Incubating: it is implemented
// as of revision 665a28f3253ecdce59f26f3ef29c0d6408b37c3d of the standards, it may change, and with it
// this type. Nothing else in this package uses it. Servers may not have it: then a watch ends with an
// error that wraps [ErrUnimplemented], and everything else goes on (WAPI-3).
//
// It hands out what the server sent, and looks into no token, key or bundle.
type WITClient struct{ c *Client }

// NewWITClient opts in to the WIT profile.
func NewWITClient(c *Client) *WITClient { return &WITClient{c: c} }

// WITSVID is a WIT-SVID with the private key that it is bound to, as the server sent them. It does not
// print.
type WITSVID struct {
	ID   spiffe.ID // as the server says
	Hint string    // the operator's label; see [Identity]

	secret func() (token string, key []byte) // a func, because no printer sees what it holds
}

// Token returns the WIT-SVID: a JWS in compact form.
func (s *WITSVID) Token() string {
	if s.secret == nil {
		return ""
	}
	token, _ := s.secret()
	return token
}

// KeyJWK returns the private key, a JWK in JSON, in a new slice.
func (s *WITSVID) KeyJWK() []byte {
	if s.secret == nil {
		return nil
	}
	_, key := s.secret()
	return slices.Clone(key)
}

// String returns the ID.
func (s WITSVID) String() string { return s.ID.String() }

// GoString returns the ID in a form that is not taken for Go source.
func (s WITSVID) GoString() string { return "workloadapi.WITSVID(" + s.ID.String() + ")" }

// LogValue is String as a log value.
func (s WITSVID) LogValue() slog.Value { return slog.StringValue(s.ID.String()) }

// WatchSVIDs yields the WIT-SVIDs of this workload, all at each change, as [Client.WatchX509SVIDs]
// does; if id is not the zero ID, those of that identity only. The bundles to verify those of
// others come by [WITClient.WatchBundles] (WAPI-63).
func (w *WITClient) WatchSVIDs(ctx context.Context, id spiffe.ID) iter.Seq2[[]WITSVID, error] {
	return func(yield func([]WITSVID, error) bool) {
		req := &witSVIDRequest{}
		if !id.IsZero() {
			req.spiffeID = id.String()
		}
		m, err := encode(req)
		if err != nil {
			panic(err) // an ID is ASCII
		}
		(&watch[[]WITSVID]{
			client: w.c, name: fetchWITSVID, request: m,
			read:   func(data []byte) ([]WITSVID, error) { return readWITSVIDs(data, id) },
			forget: func() {},
		}).run(ctx, yield)
	}
}

func readWITSVIDs(data []byte, want spiffe.ID) ([]WITSVID, error) {
	var m witSVIDResponse
	if err := decode(data, &m, maxIdentities); err != nil {
		return nil, err
	}
	if len(m.svids) == 0 {
		return nil, errors.New("it has no SVIDs (WAPI-60)")
	}
	var all []WITSVID
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
		case s.witSVID == "" || s.witSVIDKey == "":
			return nil, fmt.Errorf("SVID %d: wit_svid or wit_svid_key is empty (WAPI-14)", i+1)
		case !want.IsZero() && id != want:
			return nil, fmt.Errorf("SVID %d: it is that of %q, not %q", i+1, id, want)
		}
		token, key := s.witSVID, []byte(s.witSVIDKey)
		all = append(all, WITSVID{ID: id, Hint: s.hint, secret: func() (string, []byte) { return token, key }})
	}
	return all, nil
}

// WatchBundles yields the bundles for WIT-SVIDs, all at each change, as [Client.WatchX509SVIDs] does:
// a JWK Set in JSON for each trust domain, as it was received. An entry whose name is not that of a
// trust domain is left out.
func (w *WITClient) WatchBundles(ctx context.Context) iter.Seq2[map[spiffe.TrustDomain][]byte, error] {
	return func(yield func(map[spiffe.TrustDomain][]byte, error) bool) {
		(&watch[map[spiffe.TrustDomain][]byte]{
			client: w.c, name: fetchWITBundles, request: &raw{},
			read: readWITBundles, forget: func() {},
		}).run(ctx, yield)
	}
}

func readWITBundles(data []byte) (map[spiffe.TrustDomain][]byte, error) {
	var m witBundlesResponse
	if err := decode(data, &m, maxElements); err != nil {
		return nil, err
	}
	all := make(map[spiffe.TrustDomain][]byte, len(m.bundles))
	for key, set := range maps.All(m.bundles) {
		if td, err := trustDomain(key); err == nil {
			all[td] = []byte(set)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("it has no bundles (WAPI-14)")
	}
	return all, nil
}
