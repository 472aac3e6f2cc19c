package filesink

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// tokenWait bounds a round of fetches, so that files are written without tokens if the source of tokens hangs.
const tokenWait = 5 * time.Second

// token is the JWT-SVID for a file.
type token struct {
	text, subject     string
	received, expires time.Time

	asked    string    // the identity for which it was last asked
	due      time.Time // when to ask again
	failures int       // in a row
	err      error     // of the last attempt
}

// of reports whether the token is for the identity id, or id is unknown.
func (t *token) of(id string) bool { return id == "" || t.subject == id }

// identity returns the ID of the source's identity, for which tokens are fetched; "" while there is none.
func (s *Sink) identity() string {
	snap, err := s.cfg.Source.Snapshot()
	if err != nil {
		return ""
	}
	svid, _ := snap.SVID() // of a snapshot: never an error
	return svid.ID().String()
}

// fetchTokens fetches the tokens that are due: when half of their life is over, and when they are not for the identity.
// It returns how long to wait, and why not all tokens are as they should be. If a fetch fails, the old token stays.
// writing is held.
func (s *Sink) fetchTokens(ctx context.Context) (wait time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, tokenWait,
		fmt.Errorf("no answer in %v: %w", tokenWait, context.DeadlineExceeded))
	defer cancel()
	if s.tokens == nil {
		s.recallTokens()
	}
	id := s.identity()
	var fetching sync.WaitGroup
	for name, t := range s.tokens {
		if !t.of(id) && t.asked != id || !time.Now().Before(t.due) {
			// all at once: a fetch that hangs does not delay the others
			fetching.Go(func() { s.renew(ctx, t, id, s.cfg.Tokens[name]) })
		}
	}
	fetching.Wait()
	wait = look
	for _, name := range slices.Sorted(maps.Keys(s.tokens)) {
		t := s.tokens[name]
		wait = min(wait, time.Until(t.due))
		if t.err != nil {
			err = errors.Join(err, fmt.Errorf("JWT-SVID for %q: %w", s.cfg.Tokens[name], t.err))
		}
	}
	return max(wait, time.Second/10), err
}

// renew asks for a new token in the place of t.
func (s *Sink) renew(ctx context.Context, t *token, id, audience string) {
	next, err := s.fetchToken(ctx, id, audience)
	if err == nil {
		*t = next
		return
	}
	t.failures++
	now := time.Now()
	wait := patience.Wait(renew.NewFailure(t.failures, err), t.expires.Sub(t.received), t.expires.Sub(now),
		rand.Float64())
	t.asked, t.err, t.due = id, err, now.Add(max(wait, time.Second))
}

// recallTokens adopts the tokens that an earlier process left in the files, so that they stay until there are new
// ones.
func (s *Sink) recallTokens() {
	s.tokens = make(map[string]*token)
	now := time.Now()
	for name, audience := range s.cfg.Tokens {
		t := new(token)
		s.tokens[name] = t
		data, err := files.Read(filepath.Join(s.cfg.Dir, name), jws.MaxSize)
		if err != nil {
			continue
		}
		if claims, ok := jws.ReadClaims(string(data)); ok && slices.Equal(claims.Audience, []string{audience}) &&
			now.Before(claims.Expires.At) {
			*t = token{text: string(data), subject: claims.Subject, received: now, expires: claims.Expires.At}
		}
	}
}

func (s *Sink) fetchToken(ctx context.Context, id, audience string) (token, error) {
	text, err := s.cfg.TokenSource.Fetch(ctx, audience)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return token{}, err
	}
	now := time.Now()
	claims, ok := jws.ReadClaims(text)
	got := token{text: text, subject: claims.Subject, received: now, expires: claims.Expires.At, asked: id,
		due: renew.RenewAt(now, now, claims.Expires.At, 0.5, 0.1, rand.Float64())}
	switch {
	case !ok || !slices.Equal(claims.Audience, []string{audience}):
		return token{}, fmt.Errorf("the source gave a token for %.256q", claims.Audience)
	case !now.Before(claims.Expires.At):
		return token{}, fmt.Errorf("the source gave a token that ended at %s; compare the clocks",
			claims.Expires.At.UTC().Format(time.RFC3339))
	case !got.of(id):
		return token{}, fmt.Errorf("the source gave a token of %.256q, and the certificate is that of %q",
			claims.Subject, id)
	}
	return got, nil
}
