package ca_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

func notCreating(c *ca.Config) { c.Create = false }

// A volume that is not mounted is an empty store, and must not get a new root.
func TestOpenCreatesOnlyWithPermission(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start, store := time.Now(), ca.NewMemoryStore()
		_, err := tryOpen(t.Context(), store, notCreating)
		require.ErrorIs(t, err, ca.ErrNoRecord)
		assert.Regexp(t, `^ca: there is no CA of example.org: .*: no record; if there was one, mount its volume or restore it from a backup; to make a new one set Config.Create$`, err.Error())
		assert.Equal(t, start, time.Now(), "waiting does not help")
		_, err = store.Load(t.Context())
		require.ErrorIs(t, err, ca.ErrNoRecord, "nothing was written")

		a := open(t, store)
		assert.Equal(t, a.Roots(), open(t, store, notCreating).Roots(), "what is there needs no permission")

		cert, key := istioCA(t)
		istios := open(t, put(t, istioSecret(t, cert, key)), notCreating)
		assert.True(t, istios.Roots()[0].Certificate.Equal(cert), "nor does Istio's")
	})
}

// The directory, too: not even the directory is made.
func TestOpenMakesNoFolder(t *testing.T) {
	t.Parallel()
	store, dir := newDirStore(t)
	_, err := tryOpen(t.Context(), store, notCreating)
	require.ErrorIs(t, err, ca.ErrNoRecord)
	require.ErrorContains(t, err, dir)
	require.NoDirExists(t, dir)
}

// The CA of files is there, and the keys for tokens are made.
func TestLoadCreatesOnlyWithPermission(t *testing.T) {
	t.Parallel()
	files := newFolder(newOffline(t).files(t, 1000*time.Hour))
	store := ca.NewMemoryStore()
	_, err := tryLoadCA(t.Context(), files, store, notCreating, withJWT)
	require.ErrorIs(t, err, ca.ErrNoRecord)
	require.ErrorContains(t, err, "there are no keys for JWT-SVIDs of example.org")
	_, err = tryLoadCA(t.Context(), files, ca.NewMemoryStore(), notCreating)
	require.NoError(t, err, "without tokens there is nothing to make")
	a := must.Get(tryLoadCA(t.Context(), files, store, withJWT))(t)
	b := must.Get(tryLoadCA(t.Context(), files, store, withJWT, notCreating))(t)
	assert.Equal(t, a.Status().JWTKeys, b.Status().JWTKeys)
}

// unfitStore says what an operator has to put right.
type unfitStore struct{ ca.Store }

func (unfitStore) Load(context.Context) (ca.Record, error) {
	return ca.Record{}, fmt.Errorf("test: %w: others may read it", ca.ErrUnfit)
}

// closedStore cannot be written.
type closedStore struct {
	ca.Store
	why error
}

func (s closedStore) Save(context.Context, ca.Record) (string, error) {
	return "", &fs.PathError{Op: "mkdir", Path: "/ca", Err: s.why}
}

// What does not pass ends Open at once.
func TestOpenEndsWhenWaitingDoesNotHelp(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		_, err := tryOpen(t.Context(), unfitStore{ca.NewMemoryStore()})
		require.ErrorIs(t, err, ca.ErrUnfit)
		require.ErrorContains(t, err, "others may read it")
		for _, why := range []error{fs.ErrPermission, syscall.EACCES, syscall.EROFS} {
			_, err = tryOpen(t.Context(), closedStore{ca.NewMemoryStore(), why})
			require.ErrorIs(t, err, why, "it is not tried again")
		}
		assert.Equal(t, start, time.Now())
	})
}

// While the store of a running authority is unfit, it goes on, says so, and is back when that is put right.
func TestRunOutlivesAnUnfitStore(t *testing.T) {
	conformance.Covers(t, "IST-3.6-3")
	bubble.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		swap := &swapStore{Store: store}
		a := open(t, swap)
		run(t, a)
		swap.swap(unfitStore{store})
		time.Sleep(2 * time.Minute)
		require.ErrorIs(t, a.Health().Store, ca.ErrUnfit)
		sign(t, a, newCSR(t), time.Minute)
		swap.swap(store)
		time.Sleep(time.Minute)
		require.NoError(t, a.Health().Store)
	})
}

// Of a record that lost its state, the copies for other programs look like a CA of Istio's.
func TestLostStateIsRefused(t *testing.T) {
	t.Parallel()
	cert, key := istioCA(t)
	for name, store := range map[string]*ca.MemoryStore{"our root": ca.NewMemoryStore(), "Istio's root": put(t, istioSecret(t, cert, key))} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := open(t, store)
			require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID)) // which must not be forgotten
			r := load(t, store)
			state := r.Data()[stateName]
			delete(r.Data(), stateName)
			lost := put(t, r.Data())
			_, err := tryOpen(t.Context(), lost)
			require.ErrorIs(t, err, ca.ErrUnfit)
			require.ErrorContains(t, err, "svidkit-state.json is missing, and svidkit-note.txt says that it was there: restore the record from a backup")
			require.Equal(t, "1", load(t, lost).Version, "it is left as it is")

			r.Data()[stateName] = state
			require.Equal(t, a.Roots(), open(t, put(t, r.Data())).Roots(), "restored")

			// An operator may decide to go on without.
			assert.Contains(t, string(r.Data()["svidkit-note.txt"]), "remove this file, too")
			delete(r.Data(), stateName)
			delete(r.Data(), "svidkit-note.txt")
			var log bytes.Buffer
			b := open(t, put(t, r.Data()), func(c *ca.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			assert.Contains(t, log.String(), `msg="CA adopted"`)
			assert.True(t, b.Roots()[len(b.Roots())-1].Certificate.Equal(a.Roots()[0].Certificate))
		})
	}
}

// The copies in PEM beside the state are for other programs, and for the way back.
func TestCopiesBesideTheState(t *testing.T) {
	t.Parallel()
	made := ca.NewMemoryStore()
	first := open(t, made)
	good := load(t, made)
	otherKey := must.Get(pki.NewKey("ecdsa-p256"))(t)
	other := must.Get(pki.MarshalPrivateKeyPEM(otherKey))(t)
	for name, tt := range map[string]struct {
		item    string
		is      []byte // nil: missing
		refused string // else the next save writes it again
	}{
		"no key":             {"ca-key.pem", nil, ""},
		"an empty key":       {"ca-key.pem", []byte("\n"), ""},
		"no certificate":     {"ca-cert.pem", nil, ""},
		"no roots":           {"root-cert.pem", nil, ""},
		"another's key":      {"ca-key.pem", other, "ca-key.pem is not the key of the active root"},
		"a key that is none": {"ca-key.pem", []byte("garbage"), "remove ca-key.pem"},
		"half a key":         {"ca-key.pem", good.Data()["ca-key.pem"][:50], "remove ca-key.pem"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			data := load(t, made).Data()
			if data[tt.item] = tt.is; tt.is == nil {
				delete(data, tt.item)
			}
			store := put(t, data)
			a, err := tryOpen(t.Context(), store)
			if tt.refused != "" {
				require.ErrorIs(t, err, ca.ErrUnfit)
				require.ErrorContains(t, err, tt.refused)
				require.Equal(t, tt.is, load(t, store).Data()[tt.item], "it may be the only copy")
				return
			}
			require.NoError(t, err)
			assert.Equal(t, first.Roots(), a.Roots())
			must.Get(a.Rotate(t.Context()))(t)
			assert.NotEmpty(t, load(t, store).Data()[tt.item])
		})
	}
}

// A volume that is unmounted while an authority runs gets no keys: the directory is not made again, and the authority goes on
// until the volume is back.
func TestVolumeUnmountedWhileRunning(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	volume := t.TempDir()
	dir := filepath.Join(volume, "ca")
	store := must.Get(ca.NewDirStore(dir))(t)
	a := open(t, store)
	a.SetSyncInterval(20 * time.Millisecond)
	run(t, a)
	away := filepath.Join(t.TempDir(), "ca")
	require.NoError(t, os.Rename(dir, away))
	require.Eventually(t, func() bool { return errors.Is(a.Health().Store, ca.ErrUnfit) }, time.Minute, 5*time.Millisecond)
	require.ErrorContains(t, a.Health().Store, "mount its volume")
	_, err := a.Rotate(t.Context())
	require.ErrorIs(t, err, ca.ErrUnfit)
	time.Sleep(100 * time.Millisecond)
	require.NoDirExists(t, dir)
	sign(t, a, newCSR(t), time.Minute)
	require.NoError(t, os.Rename(away, dir))
	require.Eventually(t, func() bool { return a.Health().Store == nil }, time.Minute, 5*time.Millisecond)
	assert.Equal(t, a.Roots(), open(t, store, notCreating).Roots())
	must.Get(a.Rotate(t.Context()))(t)

	// To have the record there again, an operator makes the directory. It goes by a rename: what is being written meanwhile
	// would be in the way of RemoveAll.
	require.NoError(t, os.Rename(dir, away))
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.Eventually(t, func() bool { _, err := store.Load(t.Context()); return err == nil }, time.Minute, 5*time.Millisecond)
	assert.Equal(t, a.Roots(), open(t, store, notCreating).Roots())
}

// An error is one line that names the package once, however deep its cause is.
func TestErrorsNameThePackageOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		// The errors of a directory have the name of the package, too.
		folder, dir := newDirStore(t)
		_, err := tryOpen(ctx, folder, notCreating)
		all := []error{err}
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.Chmod(dir, 0o755)) // whatever the umask
		_, err = tryOpen(ctx, folder)
		all = append(all, err)
		failing := &faultStore{Store: ca.NewMemoryStore(), decide: always("load", before)}
		_, err = tryOpen(ctx, failing)
		all = append(all, err)
		_, err = tryOpen(t.Context(), put(t, map[string][]byte{stateName: []byte("{}")}))
		all = append(all, err)
		lost := ca.NewMemoryStore()
		store := &swapStore{Store: lost}
		a := open(t, store)
		store.swap(folder)
		_, err = a.Rotate(t.Context())
		all = append(all, err)
		_, err = a.Revoke(t.Context(), a.Roots()[0].ID, true)
		all = append(all, err, a.Health().Store)
		time.Sleep(100 * time.Hour)
		_, err = a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
		all = append(all, err)
		for i, err := range all {
			require.Error(t, err, "%d", i)
			assert.Equal(t, 1, strings.Count(" "+err.Error(), " ca: "), err.Error())
			assert.NotContains(t, err.Error(), "\n")
		}
	})
}
