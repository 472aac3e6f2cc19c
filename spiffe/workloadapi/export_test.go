package workloadapi

import (
	"context"
	"crypto"
	"net"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// For tests.
const (
	MaxIdentities = maxIdentities
	MaxElements   = maxElements
	MaxAudiences  = maxAudiences
	MaxHint       = maxHint
	MaxEncodings  = maxEncodings
	SilenceLimit  = silenceLimit
)

// HTTPClient returns the http.Client that is made for an address, with another way to dial.
func HTTPClient(dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Client {
	c := httpClient(Address{})
	c.Transport.(*http.Transport).DialContext = dial
	return c
}

// Backoff is a plan of attempts.
type Backoff struct{ b backoff }

func (b *Backoff) Next(good, denied bool, now time.Time, u float64) time.Duration {
	return b.b.next(good, denied, now, u)
}

// X509Reader reads responses of FetchX509SVID as a watch does.
type X509Reader struct{ r x509Reader }

func (r *X509Reader) Read(data []byte) (*X509Update, error) { return r.r.read(data) }

// BundlesReader reads responses of FetchX509Bundles or FetchJWTBundles as a watch does.
type BundlesReader struct{ r bundlesReader }

func (r *BundlesReader) ReadX509(data []byte) (*BundlesUpdate, error) { return r.r.readX509(data) }
func (r *BundlesReader) ReadJWT(data []byte) (*BundlesUpdate, error)  { return r.r.readJWT(data) }

func ReadJWTSVIDs(data []byte) ([]JWTSVID, error)    { return readJWTSVIDs(data, spiffe.ID{}) }
func ReadWITSVIDs(data []byte) ([]WITSVID, error)    { return readWITSVIDs(data, spiffe.ID{}) }
func ReadClaims(data []byte) (map[string]any, error) { _, c, err := readClaims(data); return c, err }
func ReadWITBundles(data []byte) (int, error)        { m, err := readWITBundles(data); return len(m), err }
func WithUse(doc []byte) ([]byte, error)             { return withUse(doc) }
func WithoutToken(text, token string) string         { return withoutToken(text, token) }
func (h *Handler) Encodings() (nodes int)            { return h.enc.cur.nodes }

// EncodeX509SVIDs returns the shared response for a list of identities.
func (h *Handler) EncodeX509SVIDs(snap *spiffe.Snapshot, ids []Identity) ([]byte, error) {
	m, err := h.enc.x509SVIDs(snap, h.crls(), ids)
	if err != nil {
		return nil, err
	}
	return m.b, nil
}

// CheckWIT checks what a WITIssuer returns, and returns the key as it is sent.
func CheckWIT(token string, id spiffe.ID, key crypto.Signer, now time.Time) (exp time.Time, jwk string, err error) {
	exp, alg, err := checkWIT(token, id, key, now)
	if err == nil {
		jwk, err = privateJWK(key, alg)
	}
	return exp, jwk, err
}
