package jwt

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	fetchTimeout = 10 * time.Second // of both documents together
	refetch      = 10 * time.Second // the shortest time between two fetches for unknown keys
	refresh      = renew.UsualPoll  // the age at which keys in use are fetched again

	maxKeys   = 256
	maxTrials = 16 // keys to try for a token that names none
)

// backoff is for fetches that failed.
var backoff = renew.Backoff{Low: time.Second, First: 2 * time.Second, High: 30 * time.Second}

type key struct {
	id, algorithm string // empty if missing
	public        crypto.PublicKey
}

// keySet is the content of a key set document. It never changes.
type keySet struct {
	document []byte
	keys     []key
}

// keys are the keys of an issuer, as last fetched.
type keys struct {
	client  *http.Client
	issuer  string // for discovery; else empty
	jwksURL string

	mu       sync.Mutex    // guards the fields below
	set      *keySet       // empty until there are keys
	at       time.Time     // of the last fetch that gave keys
	running  chan struct{} // closed at the end of the fetch that is under way; nil if none is
	err      error         // of the last fetch
	failures int           // in a row
	next     time.Time     // when another fetch may begin
}

func newKeys(o *Options) (*keys, error) {
	k := &keys{
		issuer: o.Issuer, jwksURL: o.JWKSURL, client: &http.Client{Transport: token.BaseTransport("")},
		set: new(keySet),
	}
	if o.HTTPClient != nil {
		c := *o.HTTPClient
		k.client = &c
	}
	k.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	if o.JWKSURL != "" {
		k.issuer = ""
		return k, prefix("Options.JWKSURL", jws.CheckURL(o.JWKSURL))
	}
	return k, prefix("Options.Issuer", jws.CheckURL(o.Issuer))
}

func prefix(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", name, err)
}

// current returns the key set. It starts a new fetch for an old one.
func (k *keys) current(now time.Time) *keySet {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.set.keys) > 0 && renew.Elapsed(k.at, now) >= refresh {
		k.start()
	}
	return k.set
}

// start starts a fetch, unless one is under way or it is too soon; k.mu is held.
func (k *keys) start() {
	if k.running == nil && !time.Now().Before(k.next) {
		k.running = make(chan struct{})
		go k.attempt()
	}
}

// renew fetches the keys if a fetch is due. It returns the key set, and the error of the last fetch, or the cause of
// ctx's end.
func (k *keys) renew(ctx context.Context) (*keySet, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.start()
	if running := k.running; running != nil {
		k.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
		}
		k.mu.Lock()
	}
	return k.set, cmp.Or(context.Cause(ctx), k.err)
}

// attempt fetches the keys for all callers that wait, and goes on if they leave.
func (k *keys) attempt() {
	ctx, cancel := context.WithTimeoutCause(context.Background(), fetchTimeout,
		fmt.Errorf("no answer within %v", fetchTimeout))
	defer cancel()
	set, err := k.fetch(ctx)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now, wait := time.Now(), refetch
	if err != nil {
		k.failures++
		wait = backoff.Wait(renew.NewFailure(k.failures, err), rand.Float64())
	} else {
		k.failures = 0
		if !bytes.Equal(k.set.document, set.document) { // else tokens verified with it still count
			k.set = set
		}
		k.at = now
	}
	k.err, k.next = err, now.Add(wait)
	close(k.running)
	k.running = nil
}

func (k *keys) fetch(ctx context.Context) (*keySet, error) {
	at := k.jwksURL
	if k.issuer != "" {
		doc, err := k.get(ctx, strings.TrimSuffix(k.issuer, "/")+jws.Discovery)
		if err == nil {
			at, err = readDiscovery(doc, k.issuer)
		}
		if err != nil {
			return nil, fmt.Errorf("the discovery document of %.256q: %w", k.issuer, err)
		}
	}
	var set *keySet
	doc, err := k.get(ctx, at)
	if err == nil {
		set, err = readKeySet(doc)
	}
	if err != nil {
		return nil, fmt.Errorf("the key set at %.256q: %w", at, err)
	}
	return set, nil
}

func (k *keys) get(ctx context.Context, at string) ([]byte, error) {
	var doc json.RawMessage
	err := jsonapi.Call(ctx, k.client, http.MethodGet, at, nil, &doc)
	if e, ok := errors.AsType[*jsonapi.StatusError](err); ok { // which says that a 403 is for good
		err = fmt.Errorf("the status is %d, not 200; redirects are not followed", e.Code)
	}
	return doc, err
}

// readDiscovery returns the URL of the key set from a discovery document (OpenID Connect Discovery 1.0 section 4.3).
func readDiscovery(doc []byte, issuer string) (jwks string, err error) {
	var named string
	r := strictjson.NewReader(doc)
	for name := range r.Members() {
		switch string(name) {
		case "issuer":
			named = text(r)
		case "jwks_uri":
			jwks = text(r)
		}
	}
	if err := r.End(); err != nil {
		return "", err
	}
	if named != issuer {
		return "", fmt.Errorf("it is that of the issuer %.256q", named)
	}
	return jwks, prefix("jwks_uri", jws.CheckURL(jwks))
}

// readKeySet parses a key set (RFC 7517 section 5). It drops keys that cannot verify a token; if no key is left, the
// error says why.
func readKeySet(doc []byte) (*keySet, error) {
	s, skipped, n := &keySet{document: doc}, "it has no keys", 0
	r := strictjson.NewReader(doc)
	for name := range r.Members() {
		if string(name) != "keys" {
			continue
		}
		for range r.Elements() {
			if n++; n > maxKeys {
				return nil, fmt.Errorf("it has more than %d keys", maxKeys)
			}
			k, reason := readKey(r)
			if reason != "" {
				skipped = "no key can be used: " + reason
				continue
			}
			s.keys = append(s.keys, k)
		}
	}
	if err := r.End(); err != nil {
		return nil, err
	}
	if len(s.keys) == 0 {
		return nil, errors.New(skipped)
	}
	return s, nil
}

// readKey parses a key, or returns the reason to drop it.
func readKey(r *strictjson.Reader) (k key, reason string) {
	if r.Kind() != strictjson.Object {
		r.Skip()
		return k, "it is no object"
	}
	var jwk jws.JWK
	for name := range r.Members() {
		switch string(name) {
		case "kid":
			if r.Kind() != strictjson.String {
				reason = `"kid" is not a string`
			}
			k.id = text(r)
		case "alg":
			if k.algorithm = text(r); k.algorithm == "" {
				reason = `"alg" is not a name`
			}
		case "use":
			if text(r) != "sig" {
				reason = `"use" is not "sig"`
			}
		case "key_ops":
			verify := false
			for range r.Elements() {
				verify = text(r) == "verify" || verify
			}
			if !verify {
				reason = `"key_ops" has no "verify"`
			}
		case "d", "k", "p", "q", "dp", "dq", "qi", "oth":
			reason = "it is a secret key"
		default:
			jwk.Member(name, r)
		}
	}
	if reason == "" {
		k.public, reason = jwk.PublicKey()
	}
	return k, reason
}

// verify verifies the signature of a token, and returns the key set used. If no key matches, it fetches the keys
// again if a fetch is due.
func (k *keys) verify(ctx context.Context, s *token.Signed) (*keySet, error) {
	set := k.current(time.Now())
	e := set.verify(s)
	if e == nil {
		return set, nil
	}
	if e.Reason != unknownKey && s.HasKeyID {
		return nil, refuse(e)
	}
	newer, failed := k.renew(ctx)
	if newer != set {
		if e = newer.verify(s); e == nil {
			return newer, nil
		}
	}
	if e.Reason == unknownKey && failed != nil {
		return nil, fmt.Errorf("the keys of the issuer cannot be fetched now: %w", failed)
	}
	return nil, refuse(e)
}

// unknownKey is the reason for refusing a token whose key is not in the set.
const unknownKey token.Reason = "unknown key"

// verify verifies the signature of a token with a key of the set.
func (s *keySet) verify(t *token.Signed) *token.Error {
	var fit []crypto.PublicKey
	for _, k := range s.keys {
		if (!t.HasKeyID || k.id == t.KeyID) && (k.algorithm == "" || k.algorithm == t.Algorithm.String()) &&
			t.Algorithm.Fits(k.public) {
			fit = append(fit, k.public)
		}
	}
	switch {
	case len(fit) == 0 && t.HasKeyID:
		return kind.Refuse(unknownKey, "", "the issuer has no key %q for %v",
			token.Clip(t.KeyID, token.MaxQuoted), t.Algorithm)
	case len(fit) == 0:
		return kind.Refuse(unknownKey, "", "the token names no key, and the issuer has none for %v", t.Algorithm)
	case len(fit) > maxTrials:
		return kind.Refuse("too many keys", "", "%d keys fit, more than the %d that are tried", len(fit), maxTrials)
	}
	var err error
	for _, key := range fit {
		if err = t.Verify(key, spiffe.Algorithms{}); err == nil {
			return nil
		}
	}
	return kind.Refuse("signature", "", "%w", err)
}
