// Package tokensource obtains the bearer tokens that prove a program's identity: from a file, from Google's metadata
// server, and from the token endpoint of an authorization server.
//
// Every constructor returns a [*Source]. Clients of CAs take its method value:
//
//	machine, err := tokensource.GCE("cluster.local", nil)
//	…
//	ca, err := istioca.New(istioca.Options{Endpoint: caclient.Endpoint{…, Token: machine.Token}})
//
// The constructors start nothing, open no file and send nothing.
//
// # Which one
//
//	[Static]             a text that the program has: tests, and one-time tokens of an operator
//	[File]               a file that another process keeps fresh: the projected token of a Kubernetes pod, the web
//	                     identity token of EKS, the federated token of AKS
//	[SVID]               JWT-SVIDs of this program, for one audience
//	[GCE]                an identity token of a Google machine or GKE pod, with an audience
//	[Exchange]           an access token that a token endpoint gives for the token of another Source
//	[ClientCredentials]  an access token that a token endpoint gives to this program itself, without a secret
//
// # How tokens are kept
//
// [Static], [File] and [SVID] read the token at each call. The others keep it. They fetch the next one after half of
// the token's remaining life, a little earlier at random, and only when a call needs a token: an idle Source does
// nothing. Meanwhile, calls get the old token. There is one fetch at a time, which all calls share.
//
// A fetch is one request, or one for each Source that it needs, with 5 seconds for each; it ends after 30 seconds.
// When it fails, calls get the old token until it expires, and the next fetch comes after a second or less, growing
// to 30 seconds. Without a valid token, calls return the last failure at once until the next attempt, after 5 seconds
// at most. A token without an expiry is fetched again after 5 minutes. The context of a call bounds its own wait; the
// fetch goes on for the others.
//
// # What it promises
//
// No Source in any printed form, error or log contains a token, even if a server quotes a token that it was sent.
// Answers are limited to 64 KiB and tokens to 16 KiB. Redirects are not followed. A Source
// never returns an expired token. A token requested for an audience is for that audience, as far as it says; [File]
// takes any.
//
// Unencrypted http is allowed for loopback addresses. A metadata server may also use it on link-local addresses,
// which no router forwards, and is called without a proxy, whatever the environment says.
//
// # What it does not do
//
// It verifies no signature: the server that the token is for does that. It reads only the expiry and the
// audiences of a token. JWT-SVIDs come from a SPIFFE agent, by packages workloadapi and jwtsvid.
package tokensource

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

var (
	// ErrNoToken means that there is no token: the file does not exist or is empty. A caller with another credential,
	// such as a client certificate, can go on without a token. The error is also an [io/fs.ErrNotExist], which the
	// clients of package caclient test for.
	ErrNoToken = errors.New("no token")

	// ErrExpired means that the only token has expired.
	ErrExpired = errors.New("the token has expired")
)

const (
	maxToken       = jws.MaxSize
	requestTimeout = 5 * time.Second
	fetchTimeout   = 30 * time.Second
	unknownLife    = 5 * time.Minute // between two fetches of tokens that do not say when they expire
	shortestLife   = time.Second     // between two fetches, for tokens with less than two seconds to live
)

// patience matches jwtsvid.Cache: a caller without a token fails until the next fetch.
var patience = renew.Patience{Impatient: 5 * time.Second, Longest: 30 * time.Second, Wish: 5 * time.Second}

// noToken is an error for which ErrNoToken holds.
type noToken struct{ reason error }

func (e *noToken) Error() string { return "no token: " + e.reason.Error() }
func (e *noToken) Unwrap() error { return e.reason }

// Is matches both sentinels themselves.
func (e *noToken) Is(target error) bool { return target == ErrNoToken || target == fs.ErrNotExist }

// Source gives tokens. It is safe for concurrent use. No printed form of it contains the token.
type Source struct {
	redacted
	name   string
	direct bool // each call fetches
	logger *slog.Logger

	// fetch obtains a token. It is not called concurrently, unless direct is set.
	fetch func(ctx context.Context) (token, error)
	kind  string // of the token, by RFC 8693 section 3

	state  atomic.Pointer[state] // replaced, never changed; writers hold mu
	mu     sync.Mutex
	loop   renew.Loop[*flight]
	flight flight
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

func printed(name string) redacted { return redact.New("tokensource.Source(" + name + ")") }

// flight is the entry of the loop: a Source has one fetch at a time.
type flight struct{ renew.Entry }

type token struct {
	text    string
	expires time.Time // zero if that is not known
}

type state struct {
	token
	received time.Time
	err      error         // of the last fetch
	planned  time.Time     // when the next fetch was planned
	wait     time.Duration // from then to the next fetch
	asked    atomic.Bool   // a call has found the fetch due
}

func (st *state) valid(now time.Time) bool {
	return st.text != "" && (st.expires.IsZero() || now.Before(st.expires))
}
func (st *state) due(now time.Time) bool { return renew.Elapsed(st.planned, now) >= st.wait }

// newSource returns a Source that caches the tokens of fetch.
func newSource(name string, logger *slog.Logger, fetch func(context.Context) (token, error)) *Source {
	s := &Source{redacted: printed(name), name: name, fetch: fetch, kind: typeJWT, logger: ratelog.Patient(logger)}
	s.state.Store(new(state))
	s.loop = renew.Loop[*flight]{Mu: &s.mu, Attempt: s.attempt}
	return s
}

// Token returns a bearer token that has not expired: printable ASCII without spaces. Errors to test for are
// [ErrNoToken], [ErrExpired] and [*StatusError].
func (s *Source) Token(ctx context.Context) (string, error) {
	if s == nil || s.fetch == nil {
		return "", errors.New("tokensource: this Source was not made by a constructor")
	}
	if s.direct {
		t, err := s.fetch(ctx)
		if err != nil {
			return "", s.failed(err)
		}
		return t.text, nil
	}
	now := time.Now()
	st := s.state.Load()
	if !st.valid(now) {
		return s.await(ctx)
	}
	if st.due(now) && st.asked.CompareAndSwap(false, true) {
		s.mu.Lock()
		s.loop.Start(&s.flight)
		s.mu.Unlock()
	}
	return st.text, nil
}

// await returns a token for a call that has none.
func (s *Source) await(ctx context.Context) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		st, now := s.state.Load(), time.Now()
		switch {
		case st.valid(now):
			return st.text, nil
		case st.err != nil && !s.flight.Busy() && !st.due(now):
			return "", s.failed(st.err)
		case ctx.Err() != nil:
			return "", s.failed(context.Cause(ctx))
		}
		s.loop.Start(&s.flight)
		_ = s.loop.Await(ctx, &s.flight) // nothing runs the loop, so there is no error
		if got := s.state.Load(); got != st && got.err != nil {
			return "", s.failed(got.err)
		}
	}
}

func (s *Source) failed(err error) error { return fmt.Errorf("tokensource: %s: %w", s.name, err) }

// attempt makes a fetch, and plans the next one.
func (s *Source) attempt(ctx context.Context, f *flight) {
	ctx, cancel := context.WithTimeoutCause(ctx, fetchTimeout,
		fmt.Errorf("no token in %v: %w", fetchTimeout, context.DeadlineExceeded))
	defer cancel()
	got, err := s.fetch(ctx)
	s.mu.Lock()
	now, old := time.Now(), s.state.Load()
	next := &state{token: got, received: now, planned: now}
	if err != nil {
		next.token, next.received, next.err = old.token, old.received, err
		var life, left time.Duration
		if old.valid(now) {
			life, left = unknownLife, unknownLife
			if !old.expires.IsZero() {
				life, left = old.expires.Sub(old.received), old.expires.Sub(now)
			}
		}
		next.wait = patience.Wait(f.Failed(err), life, left, rand.Float64())
	} else {
		f.Succeeded()
		expires := got.expires
		if expires.IsZero() {
			expires = now.Add(2 * unknownLife)
		}
		next.wait = max(renew.RenewAt(now, now, expires, 0.5, 0.1, rand.Float64()).Sub(now), shortestLife)
	}
	s.state.Store(next)
	s.loop.Done(f, next.wait)
	s.mu.Unlock()
	switch {
	case err == nil:
		s.logger.LogAttrs(ctx, slog.LevelDebug, "tokensource: new token", slog.String("source", s.name),
			slog.Time("expires", got.expires.UTC()))
	case next.valid(now): // else the calls that wait return the error
		s.logger.LogAttrs(ctx, slog.LevelWarn, "tokensource: no new token; the old one stays",
			slog.String("source", s.name),
			slog.Any("err", err), slog.Duration("retry_in", next.wait), slog.Time("expires", next.expires.UTC()))
	}
}

// Static returns a Source of one token that never changes. If it is a JWT that has expired, [Source.Token] fails.
func Static(token string) *Source {
	return newDirect("static", func(context.Context) (string, error) { return token, nil })
}

// File returns a Source that reads a file at each call, without the white space around the token. If the token is a
// JWT, one that has expired is refused. [ErrNoToken] holds for the error if the file does not exist or is empty.
func File(path string) *Source {
	return newDirect("file "+path, func(context.Context) (string, error) {
		data, err := files.Read(path, maxAnswer)
		if errors.Is(err, fs.ErrNotExist) {
			err = &noToken{err}
		}
		return string(data), err
	})
}

// SVID returns a Source of JWT-SVIDs of this program for one audience, which source fetches at each call: a
// *jwtsvid.Cache, which keeps them fresh, or a *workloadapi.Source.
func SVID(source interface {
	Fetch(ctx context.Context, audience ...string) (token string, err error)
}, audience string) *Source {
	return newDirect("JWT-SVID", func(ctx context.Context) (string, error) {
		if source == nil || audience == "" {
			return "", errors.New("there is no source of JWT-SVIDs, or no audience")
		}
		return source.Fetch(ctx, audience)
	}, audience)
}

// newDirect returns a Source that reads a token at each call.
func newDirect(name string, read func(context.Context) (string, error), audiences ...string) *Source {
	return &Source{redacted: printed(name), name: name, direct: true, kind: typeJWT,
		fetch: func(ctx context.Context) (token, error) {
			if ctx.Err() != nil {
				return token{}, context.Cause(ctx)
			}
			text, err := read(ctx)
			if err != nil {
				return token{}, err
			}
			return newToken(strings.TrimSpace(text), time.Time{}, audiences...)
		}}
}

// newToken checks a token. A JWT ends at its own expiry or at expires, whichever is first. With audiences the token
// must be a JWT for all of them.
func newToken(text string, expires time.Time, audiences ...string) (token, error) {
	switch {
	case text == "":
		return token{}, &noToken{errors.New("it is empty")}
	case len(text) > maxToken:
		return token{}, fmt.Errorf("the token has %d bytes, the limit is %d", len(text), maxToken)
	case strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }):
		return token{}, errors.New("the token has characters other than printable ASCII, or spaces")
	}
	claims, isJWT := jws.ReadClaims(text)
	if !claims.Expires.At.IsZero() && (expires.IsZero() || claims.Expires.At.Before(expires)) {
		expires = claims.Expires.At
	}
	switch {
	case !expires.IsZero() && !time.Now().Before(expires):
		return token{}, fmt.Errorf("%w: it ended at %s; have it renewed, or compare the clocks", ErrExpired,
			expires.UTC().Format(time.RFC3339))
	case len(audiences) > 0 && !isJWT:
		return token{}, errors.New("what was given is not a JWT")
	}
	for _, a := range audiences {
		if !slices.Contains(claims.Audience, a) {
			return token{}, fmt.Errorf("the token is for %.256q, and not for %.256q", claims.Audience, a)
		}
	}
	return token{text, expires}, nil
}
