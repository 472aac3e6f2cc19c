package witsvid_test

import (
	"context"
	"crypto"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
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

// workload is a WIT-SVID with what it was made of.
type workload struct {
	*witsvid.SVID
	id    spiffe.ID
	token string
	key   crypto.Signer
}

// issue makes a WIT-SVID with a key of its own.
func issue(t testing.TB, i *witsvid.Issuer, id string) *workload {
	t.Helper()
	w := &workload{id: spiffe.MustParseID(id)}
	w.token, w.key = must.Get2(i.IssueWITSVID(t.Context(), w.id, ""))(t)
	w.SVID = must.Get(witsvid.NewSVID(w.token, w.key))(t)
	return w
}

// fixed is a source of one SVID.
func fixed(s *witsvid.SVID) func() (*witsvid.SVID, error) {
	return func() (*witsvid.SVID, error) { return s, nil }
}

// proverOf returns a Prover of one SVID.
func proverOf(s *witsvid.SVID) *witsvid.Prover { return &witsvid.Prover{Source: fixed(s)} }

// prove makes a proof with s at the time of now, or by the real clock if that is nil.
func prove(t testing.TB, s *witsvid.SVID, now func() time.Time, c witsvid.Call) (token, proof string) {
	t.Helper()
	token, proof = must.Get2((&witsvid.Prover{Source: fixed(s), Now: now}).Prove(c))(t)
	return token, proof
}

// freshProof is proofFor by the real clock.
func freshProof(token string) string {
	exp := strconv.FormatInt(time.Now().Add(time.Minute).Unix(), 10)
	return sign(proofHeader, claims(`"aud":"`+vectorTarget+`"`, `"exp":`+exp, `"jti":"`+exp+`"`, `"wth":"`+hashOf(token)+`"`), wk)
}
