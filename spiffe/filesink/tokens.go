package filesink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// tokenWait is how long a round of fetches may take, so that the files of a source that hangs come without its tokens.
const tokenWait = 5 * time.Second

// tokens are the JWT-SVIDs for the files.
type tokens struct {
	mu     sync.Mutex
	byName map[string]token
	err    error // of the last round
}

// token is one that was fetched.
type token struct {
	text                   string
	received, expires, due time.Time
}

// file returns the text of a token, or nothing before the first.
func (t *tokens) file(name string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byName[name].text
}

// failed returns why the last round did not have all tokens.
func (t *tokens) failed() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// keepTokens fetches tokens when half of their life is over, and has them written.
func (s *Sink) keepTokens(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		fetched, wait, err := s.fetchTokens(ctx, &failures)
		if fetched {
			_, _ = s.Write() // which says itself what went wrong
		}
		if err != nil && failures == 1 && ctx.Err() == nil {
			s.log.LogAttrs(ctx, slog.LevelWarn, "filesink: not all JWT-SVIDs could be fetched, and their files stay as they are",
				slog.String("folder", s.cfg.Dir), slog.Any("err", err), slog.Duration("retry_in", wait))
		}
		renew.Wait(ctx, wait, nil)
	}
}

// fetchTokens fetches the tokens that are due, and returns whether there is a new one and when to come again. A token that is not to be had
// leaves the one before.
func (s *Sink) fetchTokens(ctx context.Context, failures *int) (fetched bool, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, tokenWait, fmt.Errorf("no answer in %v: %w", tokenWait, context.DeadlineExceeded))
	defer cancel()
	wait = look
	for _, name := range slices.Sorted(maps.Keys(s.cfg.Tokens)) {
		s.tokens.mu.Lock()
		have := s.tokens.byName[name]
		s.tokens.mu.Unlock()
		if now := time.Now(); now.Before(have.due) {
			wait = min(wait, have.due.Sub(now))
			continue
		}
		got, failed := s.fetchToken(ctx, s.cfg.Tokens[name])
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("JWT-SVID for %q: %w", s.cfg.Tokens[name], failed))
			again := patience.Wait(renew.NewFailure(*failures+1, failed), have.expires.Sub(have.received), time.Until(have.expires), rand.Float64())
			wait = min(wait, max(again, time.Second))
			continue
		}
		s.tokens.mu.Lock()
		s.tokens.byName[name], fetched = got, true
		s.tokens.mu.Unlock()
		wait = min(wait, time.Until(got.due))
	}
	if *failures++; err == nil {
		*failures = 0
	}
	s.tokens.mu.Lock()
	s.tokens.err = err
	s.tokens.mu.Unlock()
	return fetched, max(wait, time.Second/10), err
}

func (s *Sink) fetchToken(ctx context.Context, audience string) (token, error) {
	text, err := s.cfg.TokenSource.Fetch(ctx, audience)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return token{}, err
	}
	now := time.Now()
	claims, ok := jws.ReadClaims(text)
	switch {
	case !ok || !slices.Equal(claims.Audience, []string{audience}):
		return token{}, fmt.Errorf("the source gave a token for %.256q", claims.Audience)
	case !now.Before(claims.Expires):
		return token{}, fmt.Errorf("the source gave a token that ended at %s; compare the clocks", claims.Expires.UTC().Format(time.RFC3339))
	}
	return token{text, now, claims.Expires, renew.RenewAt(now, now, claims.Expires, 0.5, 0.1, rand.Float64())}, nil
}
