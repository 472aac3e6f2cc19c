package filesink_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A token that lies there is taken over if it is what the sink itself would have written, and nothing else: for this audience
// and no other, for a while yet.
func TestWhichTokensStay(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := base64.RawURLEncoding.EncodeToString
		token := func(audience string, left time.Duration) string {
			return b([]byte(`{"alg":"ES256"}`)) + "." + b(fmt.Appendf(nil, `{"sub":"spiffe://example.org/web","aud":%s,"exp":%d}`, audience, time.Now().Add(left).Unix())) + ".c2ln"
		}
		away := tokenSource(func(context.Context, ...string) (string, error) { return "", errors.New("away") })
		cases := map[string]struct {
			text  string
			stays bool
		}{
			"good":                  {token(`["db"]`, time.Hour), true},
			"its audience as text":  {token(`"db"`, time.Hour), true},
			"for a second":          {token(`["db"]`, time.Second), true},
			"ends now":              {token(`["db"]`, 0), false},
			"for another, too":      {token(`["db", "bank"]`, time.Hour), false},
			"for another first":     {token(`["bank", "db"]`, time.Hour), false},
			"for another":           {token(`["bank"]`, time.Hour), false},
			"for a longer name":     {token(`["db2"]`, time.Hour), false},
			"for none":              {token(`[]`, time.Hour), false},
			"torn":                  {token(`["db"]`, time.Hour)[:30], false},
			"something else":        {"a text", false},
			"nothing":               {"", false},
			"without an audience":   {b([]byte(`{"alg":"ES256"}`)) + "." + b(fmt.Appendf(nil, `{"sub":"spiffe://example.org/web","exp":%d}`, time.Now().Add(time.Hour).Unix())) + ".c2ln", false},
			"without an expiration": {b([]byte(`{"alg":"ES256"}`)) + "." + b([]byte(`{"sub":"spiffe://example.org/web","aud":"db"}`)) + ".c2ln", false},
		}
		// The files of an earlier process, which are others now.
		src, dir := spiffetest.NewCA(t, "example.org").Source("/web"), t.TempDir()
		cfg := filesink.Config{Source: src, Dir: dir, Tokens: map[string]string{}, TokenSource: issue(time.Hour)}
		for name := range cases {
			cfg.Tokens[name] = "db"
		}
		require.NoError(t, must.Get(filesink.Start(t.Context(), cfg))(t).Close())
		for name, c := range cases {
			require.NoError(t, os.WriteFile(must.Get(filepath.EvalSymlinks(filepath.Join(dir, name)))(t), []byte(c.text), 0o600))
		}
		src.Renew()
		cfg.TokenSource = away
		start(t, cfg)
		for name, c := range cases {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if c.stays {
				assert.NoError(t, err, name)
				assert.Equal(t, c.text, string(data), name)
			} else {
				assert.ErrorIs(t, err, os.ErrNotExist, name)
			}
		}
	})
}
