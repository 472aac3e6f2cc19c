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
		src := spiffetest.NewCA(t, "example.org").Source("/web")
		for name, c := range map[string]struct {
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
		} {
			dir := t.TempDir()
			// The files of an earlier process, of which one is another now.
			cfg := filesink.Config{Source: src, Dir: dir, Tokens: map[string]string{"db.token": "db"}, TokenSource: issue(time.Hour)}
			s := must.Get(filesink.Start(t.Context(), cfg))(t)
			require.NoError(t, s.Close())
			path := filepath.Join(dir, "db.token")
			require.NoError(t, os.WriteFile(must.Get(filepath.EvalSymlinks(path))(t), []byte(c.text), 0o600))

			src.Renew()
			cfg.TokenSource = away
			s = must.Get(filesink.Start(t.Context(), cfg))(t, name)
			data, err := os.ReadFile(path)
			if c.stays {
				if assert.NoError(t, err, name) {
					assert.Equal(t, c.text, string(data), name)
				}
			} else {
				assert.ErrorIs(t, err, os.ErrNotExist, name)
			}
			require.NoError(t, s.Close())
		}
	})
}
