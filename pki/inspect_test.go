package pki_test

import (
	"crypto/x509"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
)

func TestRenewIn(t *testing.T) {
	t.Parallel()
	from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	const day = 24 * time.Hour
	lived := func(d time.Duration) *x509.Certificate {
		return &x509.Certificate{NotBefore: from, NotAfter: from.Add(d)}
	}
	ages := &x509.Certificate{NotBefore: time.Date(1950, 1, 1, 0, 0, 0, 0, time.UTC), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)}
	for name, tc := range map[string]struct {
		cert  *x509.Certificate
		ratio float64
		now   time.Time
		wait  time.Duration
		err   error
	}{
		"a fifth of ten days":           {lived(10 * day), 0.2, from, 8 * day, nil},
		"half":                          {lived(10 * day), 0.5, from.Add(day), 4 * day, nil},
		"just before":                   {lived(10 * day), 0.2, from.Add(8*day - 1), 1, nil},
		"on the dot":                    {lived(10 * day), 0.2, from.Add(8 * day), 0, pki.ErrRenewalDue},
		"in the grace":                  {lived(10 * day), 0.2, from.Add(9 * day), 0, pki.ErrRenewalDue},
		"at the end":                    {lived(10 * day), 0.2, from.Add(10 * day), 0, pki.ErrRenewalDue},
		"after the end":                 {lived(10 * day), 0.2, from.Add(10*day + 1), 0, pki.ErrExpired},
		"long after the end":            {lived(10 * day), 0, from.AddDate(500, 0, 0), 0, pki.ErrExpired},
		"before the beginning":          {lived(10 * day), 0.2, from.Add(-day), 9 * day, nil},
		"0 waits until the end":         {lived(10 * day), 0, from, 10 * day, nil},
		"0, one nanosecond left":        {lived(10 * day), 0, from.Add(10*day - 1), 1, nil},
		"0, at the end":                 {lived(10 * day), 0, from.Add(10 * day), 0, pki.ErrRenewalDue},
		"1 renews at once":              {lived(10 * day), 1, from, 0, pki.ErrRenewalDue},
		"1, not yet valid":              {lived(10 * day), 1, from.Add(-time.Second), time.Second, nil},
		"less than a second of grace":   {lived(time.Second), 0.25, from, 750 * time.Millisecond, nil},
		"a lifetime of nothing":         {lived(0), 0.5, from, 0, pki.ErrRenewalDue},
		"8,050 years, half":             {ages, 0.5, ages.NotBefore, math.MaxInt64, nil},
		"8,050 years, the last hundred": {ages, 100.0 / 8050, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC), 0, pki.ErrRenewalDue},
		"8,050 years, none left":        {ages, 0, time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), 0, pki.ErrExpired},
		"8,050 years, the last second":  {ages, 0, ages.NotAfter.Add(-time.Second), time.Second, nil},
		"8,050 years, all":              {ages, 1, ages.NotBefore, 0, pki.ErrRenewalDue},
		"another time zone":             {lived(10 * day), 0.5, from.In(time.FixedZone("", -5*3600)), 5 * day, nil},
	} {
		wait, err := pki.RenewIn(tc.cert, tc.ratio, tc.now)
		assert.Equal(t, tc.wait, wait, name)
		assert.Equal(t, tc.err != nil, errors.Is(err, pki.ErrRenewalDue), "%s: %v", name, err)
		assert.Equal(t, tc.err == pki.ErrExpired, errors.Is(err, pki.ErrExpired), "%s: %v", name, err)
		assert.Equal(t, tc.err == nil, err == nil, "%s: %v", name, err)
		if err != nil {
			assert.True(t, strings.HasPrefix(err.Error(), "pki: renewal: certificate "), "%v", err)
		}
	}
	for name, tc := range map[string]struct {
		cert  *x509.Certificate
		ratio float64
	}{
		"no certificate":        {nil, 0.5},
		"ends before it begins": {lived(-time.Second), 0.5},
		"negative":              {lived(day), -0.1},
		"more than 1":           {lived(day), 1.0000001},
		"NaN":                   {lived(day), math.NaN()},
		"infinite":              {lived(day), math.Inf(1)},
	} {
		wait, err := pki.RenewIn(tc.cert, tc.ratio, from)
		require.Error(t, err, name)
		require.NotErrorIs(t, err, pki.ErrRenewalDue, name)
		require.Zero(t, wait, name)
	}
}

// Whoever waits as long as it says and asks again is told that it is time, and not a moment earlier.
func TestRenewInIsReached(t *testing.T) {
	t.Parallel()
	from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for seconds := int64(1); seconds < 400*365*86400; seconds = seconds*3 + 1 {
		cert := &x509.Certificate{NotBefore: from, NotAfter: time.Unix(from.Unix()+seconds, 0)}
		for _, ratio := range []float64{0, 0.01, 0.1, 1.0 / 3, 0.5, 0.9} {
			wait, err := pki.RenewIn(cert, ratio, from)
			require.NoError(t, err)
			require.Positive(t, wait)
			if wait == math.MaxInt64 {
				continue
			}
			_, err = pki.RenewIn(cert, ratio, from.Add(wait))
			require.ErrorIs(t, err, pki.ErrRenewalDue)
			_, err = pki.RenewIn(cert, ratio, from.Add(wait-1))
			require.NoError(t, err)
		}
	}
}
