package ca_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// keyAuditor keeps what happens to keys.
type keyAuditor struct {
	auditor
	mu     sync.Mutex
	events []*ca.KeyEvent
	broken error
}

func (k *keyAuditor) RecordKeyEvent(_ context.Context, e *ca.KeyEvent) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.broken != nil {
		return k.broken
	}
	k.events = append(k.events, e)
	return nil
}

func (k *keyAuditor) breaks(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.broken = err
}

// take returns what was recorded since the last call: "prepared root B" with names for serial numbers.
func (k *keyAuditor) take() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []string
	for _, e := range k.events {
		out = append(out, e.Event+" "+e.Key)
	}
	k.events = nil
	return out
}

// logBuffer is what a logger has written.
type logBuffer = logtest.Buffer

// all returns what was recorded since the last take.
func (k *keyAuditor) all() []*ca.KeyEvent {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.events)
}

var operator = ca.Actor{UID: "1000", Host: "host-a", Command: "ca -rotate"}

// Everything that happens to a key is in the audit record, with the process that did it, and in the log.
func TestKeyEvents(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		records := &keyAuditor{}
		var log logBuffer
		a := make(withJWT, func(c *ca.Config) {
			c.Auditor, c.Actor, c.Logger, c.Rotation.Manual = records, operator, slog.New(slog.NewTextHandler(&log, nil)), true
			c.MaxTTL = time.Hour
		})
		run(t, a)
		synctest.Wait()
		root := a.Roots()[0]
		require.Len(t, records.all(), 2)
		assert.Equal(t, &ca.KeyEvent{
			Time: time.Now().Round(0), Event: "created", Key: "root", Serial: root.ID, NotAfter: root.Certificate.NotAfter,
			Fingerprint: hash(root.Certificate.Raw), Detail: records.all()[0].Detail, Actor: operator,
		}, records.all()[0])
		assert.Contains(t, log.String(), `msg="CA created" trust_domain=example.org serial=`+root.ID+" not_after="+root.Certificate.NotAfter.Format("2006-01-02"))
		assert.Equal(t, a.Status().JWTKeys[0].ID, records.all()[1].Serial)
		step := func(what string, want ...string) {
			t.Helper()
			synctest.Wait()
			for _, e := range records.all() {
				assert.Equal(t, operator, e.Actor)
				assert.NotEmpty(t, e.Serial)
			}
			got := records.take()
			require.Equal(t, want, got, what)
			for _, event := range got {
				word, key, _ := strings.Cut(event, " ")
				if word != "created" {
					assert.Contains(t, log.String(), `msg="`+map[string]string{"root": "root", "jwt": "JWT key"}[key]+" "+word+`"`)
				}
			}
		}
		step("start", "created root", "created jwt")
		must.Get(a.Rotate(t.Context()))(t)
		assert.Regexp(t, `^asked for; signs from 2000-01-01T00:25:00Z$`, records.all()[0].Detail)
		step("rotate", "prepared root")
		must.Get(a.RotateJWT(t.Context()))(t)
		step("rotate tokens", "prepared jwt")
		sign(t, a, newCSR(t), time.Hour)
		signJWT(t, a, time.Hour)
		time.Sleep(25 * time.Minute)
		step("time", "activated root", "activated jwt")
		time.Sleep(2 * time.Hour)
		step("time", "retired root", "retired jwt")
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		step("taint", "tainted root", "prepared root")
		require.NoError(t, a.Taint(t.Context(), a.Roots()[1].ID))
		step("taint the successor", "revoked root", "prepared root")
		require.NoError(t, must.Err(a.Revoke(t.Context(), a.Roots()[1].ID, false)))
		step("revoke the successor", "revoked root")
		old := a.Roots()[0].ID
		must.Get(a.Revoke(t.Context(), old, true))(t)
		assert.Equal(t, a.Roots()[0].ID, records.all()[0].Successor)
		step("revoke now", "revoked root", "prepared root", "activated root")
		require.NoError(t, a.Taint(t.Context(), a.Status().JWTKeys[0].ID))
		step("taint tokens", "tainted jwt", "prepared jwt")
		assert.Equal(t, strings.Count(log.String(), "\n"), strings.Count(log.String(), "level=INFO")+strings.Count(log.String(), "level=WARN"), "nothing failed")
	})
}

// With stores: starts, adoption, what others wrote, and a record that had vanished.
func TestKeyEventsOfStores(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		store := &swapStore{Store: ca.NewMemoryStore()}
		records, others := &keyAuditor{}, &keyAuditor{}
		a := open(t, store, func(c *ca.Config) { c.Auditor = records })
		require.Equal(t, []string{"created root"}, records.take())
		b := open(t, store, func(c *ca.Config) { c.Auditor = others })
		require.Empty(t, others.take(), "a command that fails writes nothing")
		run(t, a)
		run(t, b)
		synctest.Wait()
		require.Equal(t, []string{"loaded root"}, others.take())
		must.Get(a.Rotate(t.Context()))(t)
		require.Equal(t, []string{"prepared root"}, records.take())
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.Len(t, others.all(), 1)
		assert.Contains(t, others.all()[0].Detail, "another process wrote it")
		require.Equal(t, []string{"prepared root"}, others.take())
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		time.Sleep(31 * time.Second)
		must.Get(a.Revoke(t.Context(), a.Roots()[0].ID, true))(t)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"tainted root", "revoked root", "activated root"}, others.take())
		records.take()

		store.swap(ca.NewMemoryStore())
		time.Sleep(31 * time.Second)
		synctest.Wait()
		all := append(records.take(), others.take()...)
		require.Contains(t, all, "recovered root")

		// Istio's.
		cert, key := istioCA(t)
		adopting := put(t, istioSecret(t, cert, key))
		records = &keyAuditor{}
		c := open(t, adopting, withJWT, func(c *ca.Config) { c.Auditor = records })
		require.Equal(t, []string{"prepared jwt", "adopted root"}, records.take(), "others may have its bundle, so the key waits")
		run(t, c)
		next, nextKey := istioCA(t)
		r := load(t, adopting)
		r.Data()["ca-cert.pem"], r.Data()["ca-key.pem"] = pki.MarshalCertificatesPEM(next), pkcs1(nextKey)
		delete(r.Data(), "root-cert.pem")
		must.Get(adopting.Save(t.Context(), r))(t)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"replaced root", "activated root"}, records.take())
	})
}

func TestKeyEventsOfFiles(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		root, records := newOffline(t), &keyAuditor{}
		files := newFolder(root.files(t, 1000*time.Hour))
		a := loadCA(t, files, func(c *ca.Config) { c.Auditor = records })
		require.Empty(t, records.take())
		require.Error(t, a.Taint(t.Context(), "5"))
		require.Empty(t, records.take(), "a command that fails writes nothing")
		run(t, a)
		time.Sleep(time.Second)
		require.Equal(t, []string{"loaded root"}, records.take())
		files.put(root.files(t, 1000*time.Hour))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []string{"replaced root"}, records.take())
	})
}

// A renewal with Istio's rotation is one event.
func TestKeyEventsOfIstioRotation(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		records := &keyAuditor{}
		a := make(func(c *ca.Config) { c.Auditor, c.Rotation.KeepKey = records, true })
		records.take()
		renewed := must.Get(a.Rotate(t.Context()))(t)
		require.Equal(t, renewed.ID, records.all()[0].Serial)
		require.Equal(t, []string{"renewed root"}, records.take())
	})
}

// A full disk must not prevent an emergency: it is done, the log has all of it, health says so, and the record is made
// when that works.
func TestKeyEventsOfAFullDisk(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		records, full := &keyAuditor{}, errors.New("disk full")
		var log logBuffer
		a := make(func(c *ca.Config) {
			c.Auditor, c.Actor, c.Logger = records, operator, slog.New(slog.NewTextHandler(&log, nil))
		})
		run(t, a)
		synctest.Wait()
		records.take()
		records.breaks(full)
		stolen := a.Roots()[0].ID
		must.Get(a.Revoke(t.Context(), stolen, true))(t)
		assert.Contains(t, log.String(), `level=ERROR msg="key event not recorded" trust_domain=example.org err="disk full" waiting=3 event=revoked key=root serial=`+stolen+` actor="{UID:1000 Host:host-a Command:ca -rotate}"`)
		require.ErrorIs(t, a.Health().Audit, full)
		require.NoError(t, a.Health().Signing, "certificates have records")
		time.Sleep(time.Hour)
		assert.Equal(t, 1, strings.Count(log.String(), "key event not recorded"), "once")
		records.breaks(nil)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"revoked root", "prepared root", "activated root"}, records.take())
		require.NoError(t, a.Health().Audit)
	})
}

// slowAuditor takes a second for an event.
type slowAuditor struct{ keyAuditor }

func (s *slowAuditor) RecordKeyEvent(ctx context.Context, e *ca.KeyEvent) error {
	select {
	case <-time.After(time.Second):
		return s.keyAuditor.RecordKeyEvent(ctx, e)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// A process that ends right after its start finishes the record of that start.
func TestKeyEventOfAShortRun(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		open(t, store)
		var slow slowAuditor
		a := open(t, store, func(c *ca.Config) { c.Auditor = &slow })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		require.NoError(t, a.Run(ctx))
		assert.Equal(t, []string{"loaded root"}, slow.take())
		require.NoError(t, a.Health().Audit)

		slow.breaks(errors.New("disk full"))
		must.Get(a.Revoke(t.Context(), a.Roots()[0].ID, true))(t)
		slow.breaks(nil)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		start := time.Now()
		require.NoError(t, a.Run(ctx))
		assert.Equal(t, time.Second, time.Since(start), "the others wait")
		assert.Len(t, slow.take(), 1)
	})
}

// What waits for a record is bounded.
func TestKeyEventsAreBounded(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		records := &keyAuditor{broken: errors.New("full")}
		a := newAuthority(t, func(c *ca.Config) { c.Auditor = records })
		for range 200 {
			next := must.Get(a.Rotate(t.Context()))(t)
			require.NoError(t, must.Err(a.Revoke(t.Context(), next.ID, false)))
		}
		records.breaks(nil)
		must.Get(a.Rotate(t.Context()))(t)
		got := records.take()
		assert.Len(t, got, 256)
		assert.Equal(t, "prepared root", got[255])
	})
}

// An Auditor that keeps certificates only is an Auditor.
func TestKeyEventsNeedNoKeyAuditor(t *testing.T) {
	t.Parallel()
	records := &auditor{}
	a := newAuthority(t, func(c *ca.Config) { c.Auditor = records })
	must.Get(a.Rotate(t.Context()))(t)
	assert.Empty(t, records.all)
	require.NoError(t, a.Health().Audit)
}
