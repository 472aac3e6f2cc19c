package witsvid_test

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

// The header fields of a request.
const (
	headerToken = "Workload-Identity-Token"
	headerProof = "Workload-Proof-Token"
)

// logged is a log whose records are errors, to be looked at one by one.
type logged struct {
	mu   sync.Mutex
	errs []error
	slog.Handler

	summarised bool // as for a program that does not want Debug
}

func (l *logged) logger() *slog.Logger { return slog.New(l) }

func (l *logged) Enabled(_ context.Context, level slog.Level) bool {
	return level > slog.LevelDebug || !l.summarised
}

func (l *logged) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok {
			l.errs = append(l.errs, err)
		}
		return true
	})
	return nil
}

// take returns the error that was logged first and not taken, or nil.
func (l *logged) take() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.errs) == 0 {
		return nil
	}
	err := l.errs[0]
	l.errs = l.errs[1:]
	return err
}

// prove makes a proof with s at the time of now, or by the real clock if that is nil.
func prove(t testing.TB, s *witsvid.SVID, now func() time.Time, c witsvid.Call) (token, proof string) {
	t.Helper()
	p, err := witsvid.NewProver(s, &witsvid.ProverOptions{Now: now})
	require.NoError(t, err)
	token, proof, err = p.Prove(c)
	require.NoError(t, err)
	return token, proof
}

// freshProof is proofFor by the real clock.
func freshProof(token string) string {
	exp := strconv.FormatInt(time.Now().Add(time.Minute).Unix(), 10)
	return sign(proofHeader, claims(`"aud":"`+vectorTarget+`"`, `"exp":`+exp, `"jti":"`+exp+`"`, `"wth":"`+hashOf(token)+`"`), wk)
}
