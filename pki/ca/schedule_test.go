package ca

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/conformance"
)

func TestReplaceAt(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.12-4")
	const day = 24 * time.Hour
	for _, tt := range []struct {
		name    string
		r       Rotation
		longest time.Duration
		life    time.Duration // of the certificate
		left    time.Duration
	}{
		{"the defaults: two years, 90 days and 25 minutes before", Rotation{RootTTL: 3650 * day, GraceRatio: 0.2, Propagation: 25 * time.Minute}, 90 * day, 3650 * day, 730*day + 90*day + 25*time.Minute},
		{"a long maximum: at half of its life", Rotation{GraceRatio: 0.2, Propagation: time.Hour}, 90 * day, 100 * day, 50 * day},
		{"a maximum beyond all reason", Rotation{GraceRatio: 0.2, Propagation: time.Hour}, 1<<63 - 1, 100 * day, 50 * day},
		{"the three just fit into half", Rotation{GraceRatio: 0.2, Propagation: 10 * day}, 20 * day, 100 * day, 50 * day},
		{"minutes", Rotation{RootTTL: time.Hour, GraceRatio: 0.2, Propagation: time.Minute}, time.Minute, time.Hour, 14 * time.Minute},
		{"a larger grace ratio", Rotation{GraceRatio: 0.4, Propagation: time.Hour}, day, 100 * day, 41*day + time.Hour},
		{"never before half of its life", Rotation{GraceRatio: 0.5, Propagation: time.Hour}, day, 100 * day, 50 * day},
		{"a root from elsewhere with a shorter life", Rotation{GraceRatio: 0.2, Propagation: time.Hour}, day, 10 * day, 3*day + time.Hour},
		{"with its own key: the ratio alone", Rotation{GraceRatio: 0.2, KeepKey: true, Propagation: time.Hour}, 40 * day, 100 * day, 20 * day},
		{"with its own key, a shorter life", Rotation{GraceRatio: 0.2, KeepKey: true}, 0, 10 * day, 2 * day},
	} {
		if tt.r.RootTTL == 0 {
			tt.r.RootTTL = 100 * day
		}
		now := time.Now()
		c := &x509.Certificate{NotBefore: now, NotAfter: now.Add(tt.life)}
		assert.Equal(t, tt.left, c.NotAfter.Sub(tt.r.replaceAt(c, tt.longest)).Round(time.Second), tt.name)
	}
}
