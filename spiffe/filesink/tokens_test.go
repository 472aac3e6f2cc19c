package filesink_test

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// tokenSource is a source of JWT-SVIDs.
type tokenSource func(ctx context.Context, audience ...string) (string, error)

func (f tokenSource) Fetch(ctx context.Context, audience ...string) (string, error) {
	return f(ctx, audience...)
}

// tokenFor returns what has the form of a token, whose signature a Sink does not judge.
func tokenFor(expires time.Time, audience string) string {
	return tokenOf("spiffe://example.org/web", expires, audience)
}

func tokenOf(subject string, expires time.Time, audience string) string {
	b := base64.RawURLEncoding.EncodeToString
	return b([]byte(`{"alg":"ES256"}`)) + "." + b(fmt.Appendf(nil, `{"sub":%q,"aud":[%s],"exp":%d,"iat":%d}`, subject, audience, expires.Unix(), time.Now().UnixNano())) + ".c2ln"
}

// issue returns a source of tokens of some life.
func issue(life time.Duration) tokenSource {
	return func(_ context.Context, audience ...string) (string, error) {
		return tokenFor(time.Now().Add(life), `"`+strings.Join(audience, `","`)+`"`), nil
	}
}

func TestTokens(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		dir := t.TempDir()
		var down atomic.Pointer[error]
		var mu sync.Mutex
		asked := map[string]int{}
		fresh := issue(10 * time.Minute)
		src := ca.Source("/web")
		s := start(t, filesink.Config{
			Source: src, Dir: dir, Tokens: map[string]string{"aws": "sts.amazonaws.com", "azure": "api://AzureADTokenExchange"},
			TokenSource: tokenSource(func(ctx context.Context, audience ...string) (string, error) {
				if err := down.Load(); err != nil && audience[0] == "sts.amazonaws.com" {
					return "", *err
				}
				mu.Lock()
				asked[audience[0]]++
				mu.Unlock()
				return fresh(ctx, audience...)
			}),
		})
		read := func(name string) string {
			return string(must.Get(os.ReadFile(filepath.Join(dir, name)))(t))
		}
		aws, azure := read("aws"), read("azure")
		require.NotEqual(t, aws, azure, "they are among the first files, each for its audience")
		assert.Equal(t, fs.FileMode(0o600), must.Get(os.Stat(filepath.Join(dir, "aws")))(t).Mode())

		time.Sleep(4 * time.Minute)
		synctest.Wait()
		require.Equal(t, aws, read("aws"))
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		require.NotEqual(t, aws, read("aws"), "at half of its life")
		require.NotEqual(t, azure, read("azure"))

		// One audience is not to be had: its file stays, the others are renewed, and so is the identity.
		down.Store(new(errors.New("denied")))
		aws, azure = read("aws"), read("azure")
		time.Sleep(9 * time.Minute)
		synctest.Wait()
		require.Equal(t, aws, read("aws"))
		require.NotEqual(t, azure, read("azure"))
		r := s.Report()
		require.ErrorContains(t, r.Upstreams[1].Err, `JWT-SVID for "sts.amazonaws.com": denied`)
		require.NoError(t, r.NotReady)
		key := read("key.pem")
		src.Renew()
		synctest.Wait()
		require.NotEqual(t, key, read("key.pem"))
		require.Equal(t, aws, read("aws"))

		down.Store(nil)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		require.NotEqual(t, aws, read("aws"))
		require.NoError(t, s.Report().Upstreams[1].Err)

		count := func() int { mu.Lock(); defer mu.Unlock(); return asked["api://AzureADTokenExchange"] }
		before := count()
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Less(t, count()-before, 60/4, "and no more often")
	})
}

// What is no token for the audience is not written, and a source that hangs does not keep the identity out of its files.
func TestTokensThatAreNone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		hour := time.Now().Add(time.Hour)
		for says, fetch := range map[string]tokenSource{
			`for []`:              func(context.Context, ...string) (string, error) { return "opaque", nil },
			`for ["other"]`:       func(context.Context, ...string) (string, error) { return tokenFor(hour, `"other"`), nil },
			`for ["db" "other"]`:  func(context.Context, ...string) (string, error) { return tokenFor(hour, `"db","other"`), nil },
			"that ended at":       func(context.Context, ...string) (string, error) { return tokenFor(time.Now(), `"db"`), nil },
			"no answer in 5s":     func(ctx context.Context, _ ...string) (string, error) { <-ctx.Done(); return "", ctx.Err() },
			"denied to this user": func(context.Context, ...string) (string, error) { return "", errors.New("denied to this user") },
		} {
			dir, begin := t.TempDir(), time.Now()
			cfg := filesink.Config{Source: ca.Source("/web"), Dir: dir, Tokens: map[string]string{"db.token": "db"}, TokenSource: fetch}
			s := start(t, cfg)
			assert.LessOrEqual(t, time.Since(begin), 5*time.Second)
			synctest.Wait()
			time.Sleep(6 * time.Second)
			synctest.Wait()
			require.ErrorContains(t, s.Report().Upstreams[1].Err, says)
			require.ErrorIs(t, must.Err(os.Stat(filepath.Join(dir, "db.token"))), fs.ErrNotExist, says)
			_, err := writeOnce(t, filesink.Config{Source: cfg.Source, Dir: t.TempDir(), Tokens: cfg.Tokens, TokenSource: fetch})
			require.ErrorContains(t, err, says, "for a program that writes once")
			require.NotContains(t, err.Error(), "c2ln")
		}
	})
	ca := spiffetest.NewCA(t, "example.org")
	for says, c := range map[string]filesink.Config{
		"no TokenSource":              {Tokens: map[string]string{"a": "b"}},
		"an empty name or audience":   {Tokens: map[string]string{"": "b"}, TokenSource: issue(time.Hour)},
		"empty name or audience":      {Tokens: map[string]string{"a": ""}, TokenSource: issue(time.Hour)},
		`"../a", which is not`:        {Tokens: map[string]string{"../a": "b"}, TokenSource: issue(time.Hour)},
		`"..data"`:                    {Tokens: map[string]string{"..data": "b"}, TokenSource: issue(time.Hour)},
		`the name "key.pem"`:          {Tokens: map[string]string{"key.pem": "b"}, TokenSource: issue(time.Hour)},
		`two files with the name "x"`: {Tokens: map[string]string{"x": "b"}, BundlesName: "x", TokenSource: issue(time.Hour)},
	} {
		c.Source, c.Dir = ca.Source("/web"), t.TempDir()
		require.ErrorContains(t, must.Err(filesink.New(c)), says)
	}
}

// An audience whose fetches hang holds up no other, whatever their order.
func TestTokenThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir, fresh := t.TempDir(), issue(10*time.Minute)
		start(t, filesink.Config{
			Source: spiffetest.NewCA(t, "example.org").Source("/web"), Dir: dir, Tokens: map[string]string{"a": "a", "b": "b", "c": "c"},
			TokenSource: tokenSource(func(ctx context.Context, audience ...string) (string, error) {
				if audience[0] != "b" {
					<-ctx.Done()
				}
				if ctx.Err() != nil {
					return "", ctx.Err()
				}
				return fresh(ctx, audience...)
			}),
		})
		first := must.Get(os.ReadFile(filepath.Join(dir, "b")))(t)
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		require.NotEqual(t, string(first), string(must.Get(os.ReadFile(filepath.Join(dir, "b")))(t)))
	})
}

// A token that an earlier process has written stays while there is no other, if it is still good and for the same audience.
func TestTokenStaysOverRestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src, dir := spiffetest.NewCA(t, "example.org").Source("/web"), t.TempDir()
		cfg := filesink.Config{Source: src, Dir: dir, Tokens: map[string]string{"a": "a", "b": "b"}, TokenSource: issue(10 * time.Minute)}
		s := must.Get(filesink.Start(t.Context(), cfg))(t)
		require.NoError(t, s.Close())
		before := must.Get(os.ReadFile(filepath.Join(dir, "a")))(t)

		src.Renew() // so that the files are replaced
		cfg.Tokens = map[string]string{"a": "a", "b": "other"}
		var asked atomic.Int32 // for a
		cfg.TokenSource = tokenSource(func(_ context.Context, audience ...string) (string, error) {
			if audience[0] == "a" {
				asked.Add(1)
			}
			return "", errors.New("away")
		})
		s = must.Get(filesink.Start(t.Context(), cfg))(t)
		require.Equal(t, string(before), string(must.Get(os.ReadFile(filepath.Join(dir, "a")))(t)))
		_, err := os.Stat(filepath.Join(dir, "b"))
		require.ErrorIs(t, err, fs.ErrNotExist, "it is for another receiver now")
		require.Zero(t, asked.Load(), "it is good")
		require.NoError(t, s.Close())
		require.Error(t, must.Err(must.Get(filesink.New(cfg))(t).Write()))
		require.EqualValues(t, 1, asked.Load(), "nothing would renew it later")

		time.Sleep(11 * time.Minute)
		start(t, cfg)
		src.Renew()
		synctest.Wait()
		require.ErrorIs(t, must.Err(os.Stat(filepath.Join(dir, "a"))), fs.ErrNotExist, "it has ended")
	})
}

// The certificate and the tokens in a directory are of one identity: after a restart with another one, when the source has another one,
// and if the source of tokens gives those of another one.
func TestTokensOfOneIdentity(t *testing.T) {
	t.Parallel()
	for _, plain := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ca, dir := spiffetest.NewCA(t, "example.org"), t.TempDir()
			api := func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "spiffe", Host: "example.org", Path: "/api"}} }
			var subject, away atomic.Value
			subject.Store("spiffe://example.org/web")
			away.Store("")
			cfg := filesink.Config{
				Source: ca.Source("/web"), Dir: dir, Plain: plain, Tokens: map[string]string{"a": "a"},
				TokenSource: tokenSource(func(context.Context, ...string) (string, error) {
					if why := away.Load().(string); why != "" {
						return "", errors.New(why)
					}
					return tokenOf(subject.Load().(string), time.Now().Add(10*time.Hour), `"a"`), nil
				}),
			}
			has := func(certificate, token string) {
				t.Helper()
				assert.Equal(t, certificate, read(t, dir).ID().Path())
				data, err := os.ReadFile(filepath.Join(dir, "a"))
				switch {
				case token != "":
					require.NoError(t, err)
					payload := must.Get(base64.RawURLEncoding.DecodeString(strings.Split(string(data), ".")[1]))(t)
					assert.Contains(t, string(payload), `"sub":"spiffe://example.org`+token+`"`)
				case plain:
					require.NoError(t, err)
					assert.Empty(t, data)
				default:
					require.ErrorIs(t, err, fs.ErrNotExist)
				}
			}
			require.NoError(t, must.Get(filesink.Start(t.Context(), cfg))(t).Close())
			has("/web", "/web")

			away.Store("away")
			other := ca.Source("/api")
			cfg.Source = other
			s := start(t, cfg)
			has("/api", "")

			away.Store("")
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			has("/api", "")
			require.ErrorContains(t, s.Report().Upstreams[1].Err, `the source gave a token of "spiffe://example.org/web", and the certificate is that of "spiffe://example.org/api"`)
			subject.Store("spiffe://example.org/api")
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			has("/api", "/api")
			require.NoError(t, s.Report().Upstreams[1].Err)

			subject.Store("spiffe://example.org/web")
			other.Renew(func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "spiffe", Host: "example.org", Path: "/web"}} })
			synctest.Wait()
			has("/web", "/web") // at once, and not at half of the life of the token before
			away.Store("away")
			other.Renew(api)
			synctest.Wait()
			has("/api", "")
		})
	}
}
