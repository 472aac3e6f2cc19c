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
	keyAbsent    = time.Minute // how long not to ask again for a missing key
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
	renewal *limit.Limiter // for known keys, each requested once in a minute

	mu   sync.Mutex
	keys map[string]fetchedKey // by the path
}

// fetchedKey is an answer of ZTS. The key is nil if there is none.
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
		url: strings.TrimRight(address, "/"), client: c, keys: map[string]fetchedKey{},
		unknown: limit.New(limit.Options{Concurrent: 8, Queue: 256, Rate: 50, Burst: 200}),
		renewal: limit.New(limit.Options{Concurrent: 8, Queue: maxKeys}),
	}
	return p.key, nil
}

// key implements [PublicKeys].
func (p *keyCache) key(ctx context.Context, owner athenzname.Service, keyID string) (crypto.PublicKey, error) {
	if err := owner.Check(); err != nil || !isTokenText(keyID) || keyID == "" || strings.Trim(keyID, ".") == "" {
		return nil, badToken("there is no such public key")
	}
	path := "/zts/v1/domain/" + owner.Domain + "/service/" + owner.Name + "/publickey/" + url.PathEscape(keyID)
	now := time.Now()
	known, usable, ask := p.known(path, now)
	if ask {
		from, l := ctx, p.unknown
		if usable { // other calls rely on this fetch, and this caller may leave before the answer
			from, l = context.WithoutCancel(ctx), p.renewal
		}
		key, err := p.fetch(from, path, l)
		switch {
		case err == nil:
			known = fetchedKey{key: key, at: now}
			p.remember(path, known)
		case !usable:
			return nil, err
		}
	}
	if known.key == nil {
		return nil, badToken("there is no such public key")
	}
	return known.key, nil
}

// known returns the cached answer, whether it may be used if ZTS does not answer now, and whether to ask ZTS. Of the
// callers with a usable key, one asks each minute, and the others do not wait for a server that is down.
func (p *keyCache) known(path string, now time.Time) (k fetchedKey, usable, ask bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, ok := p.keys[path]
	age := renew.Elapsed(k.at, now)
	switch {
	case !ok:
		return k, false, true
	case k.key == nil:
		return k, false, age >= keyAbsent
	}
	usable = age < keyStale
	if ask = age >= keyFresh && (!usable || renew.Elapsed(k.tried, now) >= keyAbsent); ask {
		k.tried = now
		p.keys[path] = k
	}
	return k, usable, ask
}

func (p *keyCache) remember(path string, k fetchedKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, there := p.keys[path]; !there && len(p.keys) >= maxKeys {
		// Drop a missing key, which any caller can name, or else any key; its users then ask once more.
		drop := ""
		for other, old := range p.keys {
			if drop = other; old.key == nil {
				break
			}
		}
		delete(p.keys, drop)
	}
	p.keys[path] = k
}

// fetch asks ZTS for a key. A nil key without an error means that there is none.
func (p *keyCache) fetch(ctx context.Context, path string, l *limit.Limiter) (crypto.PublicKey, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	if err := l.Acquire(ctx, ""); err != nil {
		return nil, err
	}
	defer l.Release()
	var body struct {
		Key string `json:"key"`
	}
	err := jsonapi.Call(ctx, p.client, http.MethodGet, p.url+path, nil, &body)
	if e, ok := errors.AsType[*jsonapi.StatusError](err); ok && e.Code == http.StatusNotFound {
		return nil, nil // there is none
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
	return key, nil
}
