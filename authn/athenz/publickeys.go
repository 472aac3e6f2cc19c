package athenz

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	keyFresh     = 10 * time.Minute
	keyPause     = time.Minute // between requests for a newer key
	keyStale     = time.Hour   // how long a key stays valid while ZTS does not answer
	fetchTimeout = 5 * time.Second
	maxKeys      = 4096
)

// PublicKeys returns the public key of a service by its ID. The error wraps [ErrServiceToken] if there is no such
// key; any other error means that the key is unavailable now. It must be safe for concurrent use.
type PublicKeys func(ctx context.Context, owner athenzname.Service, keyID string) (crypto.PublicKey, error)

// keyCache fetches public keys from ZTS and remembers them.
type keyCache struct {
	url     string
	client  *http.Client
	unknown *limit.Limiter // for unknown keys: any caller can name them

	mu   sync.Mutex
	keys map[string]*fetchedKey // by the path
}

type fetchedKey struct {
	key   crypto.PublicKey
	at    time.Time
	tried time.Time // when a newer answer was requested
}

// NewPublicKeys returns the PublicKeys of the ZTS at an https address without a path, such as
// https://zts.athenz.svc:4443. It caches a key for ten minutes. While ZTS does not answer, it keeps the key for an
// hour and asks again each minute. The client decides which server is trusted; it is copied, and follows no
// redirects. NewPublicKeys fetches nothing.
func NewPublicKeys(address string, client *http.Client) (PublicKeys, error) {
	c, err := toServer(address, client)
	if err == nil && strings.Count(strings.TrimRight(address, "/"), "/") > 2 {
		err = errors.New("the address has a path, and has to be https://host:port")
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: new public keys: %w", err)
	}
	p := &keyCache{
		url: strings.TrimRight(address, "/"), client: c, keys: map[string]*fetchedKey{},
		unknown: limit.New(limit.Options{Concurrent: 8, Queue: 256, Rate: 50, Burst: 200}),
	}
	return p.key, nil
}

// key implements [PublicKeys].
func (p *keyCache) key(ctx context.Context, owner athenzname.Service, keyID string) (crypto.PublicKey, error) {
	if err := owner.Check(); err != nil || !isTokenText(keyID) || keyID == "" || strings.Trim(keyID, ".") == "" {
		return nil, badToken("there is no such public key")
	}
	path := "/zts/v1/domain/" + owner.Domain + "/service/" + owner.Name + "/publickey/" + url.PathEscape(keyID)
	known, again := p.known(path, time.Now())
	if known != nil && !again {
		return known, nil
	}
	if known != nil { // other calls rely on this fetch, and this caller may leave before the answer
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	if known == nil {
		if err := p.unknown.Acquire(ctx, ""); err != nil {
			return nil, err
		}
		defer p.unknown.Release()
	}
	key, err := p.fetch(ctx, path)
	if err != nil && known != nil && !errors.Is(err, ErrServiceToken) {
		return known, nil
	}
	return key, err
}

// known returns the cached key, or nil, and whether to fetch it again. Of the callers with a key, one asks each
// minute, and the others do not wait for a server that is down.
func (p *keyCache) known(path string, now time.Time) (key crypto.PublicKey, again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.keys[path]
	if k == nil || renew.Elapsed(k.at, now) >= keyStale {
		return nil, true
	}
	again = renew.Elapsed(k.at, now) >= keyFresh && renew.Elapsed(k.tried, now) >= keyPause
	if again {
		k.tried = now
	}
	return k.key, again
}

// fetch asks ZTS for a key and caches the answer.
func (p *keyCache) fetch(ctx context.Context, path string) (crypto.PublicKey, error) {
	asked := time.Now()
	var body struct {
		Key string `json:"key"`
	}
	err := jsonapi.Call(ctx, p.client, http.MethodGet, p.url+path, nil, &body)
	if e, ok := errors.AsType[*jsonapi.StatusError](err); ok && e.Code == http.StatusNotFound {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.keys, path)
		return nil, badToken("there is no such public key")
	}
	if err != nil {
		return nil, fmt.Errorf("ask ZTS for a public key: %w", err)
	}
	text, ok := decodeY64(body.Key)
	if !ok {
		return nil, errors.New("the answer of ZTS has a key that is not in the base64 of Athenz")
	}
	key, err := certpem.PublicKey(text)
	if err != nil {
		return nil, fmt.Errorf("the answer of ZTS: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for other := range p.keys { // make space for one more
		if len(p.keys) < maxKeys {
			break
		}
		delete(p.keys, other)
	}
	p.keys[path] = &fetchedKey{key: key, at: asked}
	return key, nil
}
