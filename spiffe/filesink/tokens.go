package filesink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// tokens are the JWT-SVIDs for the files.
type tokens struct {
	mu     sync.Mutex
	byName map[string]token
	err    error // of the last round
}

// token is a fetched token.
type token struct {
	text, subject          string
	received, expires, due time.Time
}

// of reports whether the token is for the identity id, or id is unknown.
func (t token) of(id string) bool { return id == "" || t.subject == id }

// get returns the token for a file; the zero token before the first fetch.
func (t *tokens) get(name string) token {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byName[name]
}

// identity returns the ID of the source's identity, for which tokens are fetched; "" while there is none.
func (s *Sink) identity() string {
	snap, err := s.cfg.Source.Snapshot()
	if err != nil {
		return ""
	}
	svid, err := snap.SVID()
	if err != nil {
		return ""
	}
	return svid.ID().String()
}

// failed returns why the last round did not get all tokens.
func (t *tokens) failed() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// keepTokens fetches new tokens when half of their life is over, and writes them.
func (s *Sink) keepTokens(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		changed := s.cfg.Source.Changed() // the identity may change
		fetched, wait, err := s.fetchTokens(ctx, &failures)
		if fetched {
			_, _ = s.Write() // Write logs failures itself
		}
		if err != nil && failures == 1 && ctx.Err() == nil {
			s.log.LogAttrs(ctx, slog.LevelWarn,
				"filesink: not all JWT-SVIDs could be fetched, and their files stay as they are",
				slog.String("folder", s.cfg.Dir), slog.Any("err", err), slog.Duration("retry_in", wait))
		}
		renew.Wait(ctx, wait, changed)
	}
}

// fetchTokens fetches the tokens that are due. It reports whether there is a new one, and how long to wait. If a fetch
// fails, the old token stays.
func (s *Sink) fetchTokens(ctx context.Context, failures *int) (fetched bool, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, tokenWait,
		fmt.Errorf("no answer in %v: %w", tokenWait, context.DeadlineExceeded))
	defer cancel()
	wait = look
	type result struct {
		token
		err error
	}
	s.tokens.mu.Lock()
	old, results := maps.Clone(s.tokens.byName), map[string]*result{}
	s.tokens.mu.Unlock()
	id := s.identity()
	var fetching sync.WaitGroup
	for name, audience := range s.cfg.Tokens {
		if now := time.Now(); now.Before(old[name].due) && old[name].of(id) {
			wait = min(wait, old[name].due.Sub(now))
			continue
		}
		r := new(result)
		results[name] = r
		// all at once: a fetch that hangs does not delay the others
		fetching.Go(func() { r.token, r.err = s.fetchToken(ctx, id, audience) })
	}
	fetching.Wait()
	s.tokens.mu.Lock()
	defer s.tokens.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(results)) {
		r, have := results[name], old[name]
		if r.err != nil {
			err = errors.Join(err, fmt.Errorf("JWT-SVID for %q: %w", s.cfg.Tokens[name], r.err))
			again := patience.Wait(renew.NewFailure(*failures+1, r.err), have.expires.Sub(have.received),
				time.Until(have.expires), rand.Float64())
			wait = min(wait, max(again, time.Second))
			continue
		}
		s.tokens.byName[name], fetched = r.token, true
		wait = min(wait, time.Until(r.due))
	}
	if *failures++; err == nil {
		*failures = 0
	}
	s.tokens.err = err
	return fetched, max(wait, time.Second/10), err
}

// recallTokens adopts the tokens that an earlier process left in the files, so that they stay until there are new
// ones.
func (s *Sink) recallTokens() {
	s.tokens.mu.Lock()
	defer s.tokens.mu.Unlock()
	for name, audience := range s.cfg.Tokens {
		data, err := files.Read(filepath.Join(s.cfg.Dir, name), jws.MaxSize)
		if err != nil || s.tokens.byName[name].text != "" {
			continue
		}
		now := time.Now()
		if claims, ok := jws.ReadClaims(string(data)); ok && slices.Equal(claims.Audience, []string{audience}) &&
			now.Before(claims.Expires.At) {
			s.tokens.byName[name] = token{text: string(data), subject: claims.Subject, received: now,
				expires: claims.Expires.At}
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
	got := token{text, claims.Subject, now, claims.Expires.At,
		renew.RenewAt(now, now, claims.Expires.At, 0.5, 0.1, rand.Float64())}
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
