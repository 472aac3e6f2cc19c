package caconfig

import (
	"bytes"
	"context"
	"crypto/x509"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// A second workload that is granted less than it asks for is seen in the log.
func TestShortenedAreNamed(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	l := lifetimes{time.Hour, true, ratelog.New(slog.New(slog.NewTextHandler(&log, nil)), 0)}
	for range 5 {
		for _, name := range []string{"/web", "/db"} {
			r := ca.Request{ID: spiffe.MustParseID("spiffe://example.org" + name), TTL: 2 * time.Hour}
			must.Get(l.grant(t.Context(), granted{t: t}, r))(t)
			assert.Contains(t, log.String(), "id="+r.ID.String())
		}
	}
	assert.Equal(t, 2, strings.Count(log.String(), "\n"), log.String())
}

type granted struct {
	ca.Signer
	t *testing.T
}

func (g granted) Sign(_ context.Context, r ca.Request) ([]*x509.Certificate, error) {
	assert.Equal(g.t, time.Hour, r.TTL)
	return nil, nil
}
