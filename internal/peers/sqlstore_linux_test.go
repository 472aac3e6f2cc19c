package peers_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/sqlstore"
)

func TestSQLSmoke(t *testing.T) {
	for name, start := range map[string]func(testing.TB, ...string) *peers.Database{"postgres": peers.NewPostgreSQL, "mysql": peers.NewMariaDB} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := start(t)
			o := sqlstore.Options{Dialect: name}
			d.Admin(t, must.Get(sqlstore.Schema(o))(t))
			d.NewUser(t, "issuer", "svidkit_ca")
			db := d.Open(t, "issuer", "svidkit")
			defer db.Close()
			s := must.Get(sqlstore.New(db, o))(t)
			_, err := s.Load(t.Context())
			require.ErrorIs(t, err, ca.ErrNoRecord)
			v := must.Get(s.Save(t.Context(), ca.NewRecord("", map[string][]byte{"a": {0, 1}})))(t)
			_, err = s.Save(t.Context(), ca.NewRecord("", map[string][]byte{"a": {0, 1}}))
			require.ErrorIs(t, err, ca.ErrConflict)
			t.Log(err)
			r := must.Get(s.Load(t.Context()))(t)
			require.Equal(t, v, r.Version)
			v = must.Get(s.Save(t.Context(), ca.NewRecord(v, map[string][]byte{"a": {0, 2}})))(t)
			d.Restart(t)
			d.Kill(t)
			d.Start(t)
			if name == "postgres" {
				sb := d.NewStandby(t)
				d.Kill(t)
				sb.Promote(t)
				db2 := sb.Open(t, "issuer", "svidkit", d)
				defer db2.Close()
				s := must.Get(sqlstore.New(db2, o))(t)
				require.Equal(t, v, must.Get(s.Load(t.Context()))(t).Version)
				d.Follow(t, sb)
				must.Get(s.Save(t.Context(), ca.NewRecord(v, nil)))(t)
			}
		})
	}
}
