package caprogram

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/custodian"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
)

// kept is a program whose custodians of the kind memory are in memory, by the name that the options give, and whose
// stores of the scheme memory are below a directory.
type kept struct {
	Program
	custodians map[string]*custodian.Custodian
	dir        string
	closed     int
}

func newKept(t *testing.T) *kept {
	k := &kept{dir: t.TempDir(), custodians: map[string]*custodian.Custodian{"one": custodian.New(), "two": custodian.New()}}
	kind := caconfig.CustodianKind{Required: []string{"name"}, Optional: []string{"pin_file"}}
	kind.New = func(_ context.Context, o map[string]string, _ *slog.Logger) (ca.Custodian, func(), error) {
		c, ok := k.custodians[o["name"]]
		if !ok {
			return nil, nil, errors.New("there is no such custodian")
		}
		return c, func() { k.closed++ }, nil
	}
	makes := kind
	makes.New = func(ctx context.Context, o map[string]string, log *slog.Logger) (ca.Custodian, func(), error) {
		c, closes, err := kind.New(ctx, o, log)
		return struct{ ca.Custodian }{c}, closes, err
	}
	k.Program = Program{Name: "ca", Kinds: caconfig.Kinds{
		Flags:      func(fs *flag.FlagSet) { fs.String("store-password-file", "", "`file`") },
		Custodians: map[string]caconfig.CustodianKind{"memory": kind, "no-sealer": makes},
		Stores: map[string]caconfig.StoreKind{"memory": {
			Open: func(_ context.Context, at *url.URL, record string, _ *slog.Logger) (ca.Store, func(), error) {
				if at.Host == "away" {
					return nil, nil, errors.New("there is no such store")
				}
				store, err := ca.NewDirStore(filepath.Join(k.dir, record))
				return store, func() { k.closed++ }, err
			},
			Schema: func() (string, error) { return "CREATE TABLE x;\n", nil },
		}},
	}}
	for name, text := range map[string]string{
		"one": `{"name": "one"}`, "two": `{"name": "two", "pin_file": "/pin"}`, "three": `{"name": "three"}`,
		"number": `{"name": 1}`, "empty": `{"name": ""}`, "twice": `{"name": "one", "name": "two"}`,
		"keyless": `{"url": "https://127.0.0.1:1"}`, "unknown": `{"name": "one", "pin": "1234"}`, "none": `{}`, "text": `"one"`,
		"half": `{"url": "https://bao.test", "login_role": "ca", "key_file": "/key.pem"}`,
	} {
		require.NoError(t, os.WriteFile(k.file(name), []byte(text), 0o600))
	}
	return k
}

func (k *kept) file(name string) string { return filepath.Join(k.dir, name+".json") }

// spec is KIND:FILE.
func (k *kept) spec(name string) string { return "memory:" + k.file(name) }

// shell runs the program with one command, as its user does.
func (k *kept) shell(t testing.TB, args ...string) (string, error) {
	t.Helper()
	var out strings.Builder
	err := k.run(t.Context(), args, env{}.get, nil, &out, io.Discard)
	return out.String(), err
}

// secrets says what is in the store of a CA in dir: whether its keys can be read, and whether it is sealed.
func secrets(t *testing.T, dir string) (keys int, sealed bool) {
	t.Helper()
	store := must.Get(ca.NewDirStore(dir))(t)
	data := must.Get(store.Load(t.Context()))(t).Data()
	_, sealed = data["svidkit-sealed.json"]
	for _, b := range data {
		keys += strings.Count(string(b), "PRIVATE KEY")
	}
	return keys, sealed
}

// The keys of a CA move to a custodian, to another one and back while a server runs, by commands; then its store is
// sealed, sealed by another, and opened again.
func TestMoveKeys(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	k, dir := newKept(t), t.TempDir()
	rotates := []string{"-propagation", "1s", "-default-ttl", "3s", "-max-ttl", "3s", "-backdate", "1s",
		"-refresh-hint", "1s", "-linkerd-addr="}
	flags := func(more ...string) []string { return arguments(dir, append(rotates, more...)...) }
	one, two := []string{"-custodian", k.spec("one")}, []string{"-custodian", k.spec("two"), "-former-custodian",
		k.spec("one")}
	store := filepath.Join(dir, "ca")
	active := regexp.MustCompile(`(?m)^(?:root|JWT key) [0-9a-f]+: active since [^,\n]+(?:, private key (svidkit-[^,\n]+))?`)
	for _, tc := range []struct {
		name  string
		flags []string
		has   *custodian.Custodian // nil: the store
	}{
		{"in the store", nil, nil},
		{"at a custodian", one, k.custodians["one"]},
		{"at another", two, k.custodians["two"]},
		{"in the store again", []string{"-former-custodian", k.spec("two")}, nil},
	} {
		_, stop := start(t, must.Get(k.parse(flags(tc.flags...), env{}.get, io.Discard))(t).Config)
		if tc.flags != nil {
			must.Get(k.shell(t, flags(append(tc.flags, "-rotate")...)...))(t)
			must.Get(k.shell(t, flags(append(tc.flags, "-rotate-jwt")...)...))(t)
		}
		require.Eventually(t, func() bool {
			said := must.Get(k.shell(t, flags(append(tc.flags, "-status")...)...))(t)
			moved := true
			for _, m := range active.FindAllStringSubmatch(said, -1) {
				moved = moved && (tc.has == nil && m[1] == "" || tc.has != nil && slices.Contains(tc.has.Names(), m[1]))
			}
			return moved
		}, time.Minute, 20*time.Millisecond, tc.name)
		token := must.Get(k.shell(t, flags(append(tc.flags, "-jwt", "db", "-id", "spiffe://cluster.local/web")...)...))(t)
		assert.Equal(t, 2, strings.Count(token, "."), tc.name)
		stop()
	}
	must.Get(k.custodians["one"].NewKey(t.Context(), "svidkit-"+authorityOf(t, store)+"-0123456789abcdef",
		"ecdsa-p256"))(t)
	status := must.Get(k.shell(t, flags("-custodian", k.spec("one"), "-status")...))(t)
	assert.Regexp(t, `private key svidkit-[0-9a-f]+-0123456789abcdef: the store does not know it; destroy it`, status)

	keys, sealed := secrets(t, store)
	assert.Positive(t, keys)
	assert.False(t, sealed)
	for _, tc := range []struct {
		flags  []string
		sealed bool
	}{
		{[]string{"-seal", k.spec("one")}, true},
		{[]string{"-seal", k.spec("two"), "-unseal", k.spec("one")}, true},
		{[]string{"-unseal", k.spec("two")}, false},
	} {
		all := flags(append(tc.flags, "-former-custodian", k.spec("one"))...)
		said := must.Get(k.shell(t, append(all, "-reseal")...))(t)
		keys, sealed := secrets(t, store)
		assert.Equal(t, tc.sealed, sealed, tc.flags)
		assert.Equal(t, tc.sealed, keys == 0, tc.flags)
		assert.Equal(t, tc.sealed, strings.HasPrefix(said, "the CA in "+store+" is sealed\n"), said)
		if !tc.sealed {
			continue
		}
		for _, wrong := range [][]string{nil, {"-seal", k.spec("one")}, {"-unseal", k.spec("one")}} {
			if len(tc.flags) == 2 && wrong != nil {
				continue
			}
			_, err := k.shell(t, flags(append(wrong, "-status")...)...)
			require.ErrorIs(t, err, ca.ErrUnfit, wrong)
			require.ErrorContains(t, err, "-custodian, -former-custodian, -seal and -unseal name custodians")
		}
	}
	assert.Positive(t, k.closed)
}

// authorityOf returns the ID of the CA in a store, which is in the names of its keys at a custodian.
func authorityOf(t *testing.T, dir string) string {
	store := must.Get(ca.NewDirStore(dir))(t)
	var state struct{ Authority string }
	require.NoError(t, json.Unmarshal(must.Get(store.Load(t.Context()))(t).Data()["svidkit-state.json"], &state))
	return state.Authority
}

// Flags about stores and custodians that are wrong, and what helps. No error has a password.
func TestCustodyFlags(t *testing.T) {
	t.Parallel()
	k, dir := newKept(t), t.TempDir()
	require.NoError(t, os.Chmod(k.file("two"), 0o666))
	for _, tc := range []struct {
		args, want string
	}{
		{"-custodian memory", "it is not KIND:FILE with one of these kinds: memory, no-sealer, openbao"},
		{"-custodian memory:", "it is not KIND:FILE"},
		{"-seal file:x", "it is not KIND:FILE"},
		{"-former-custodian " + k.file("one"), "it is not KIND:FILE"},
		{"-custodian memory:" + k.file("missing"), "-custodian: " + k.file("missing") + ": "},
		{"-custodian " + k.spec("number"), "name is not a text"},
		{"-custodian " + k.spec("empty"), "name is not a text, or an empty one"},
		{"-custodian " + k.spec("twice"), "at byte"},
		{"-custodian " + k.spec("unknown"), `"pin" is none of its members: name, pin_file`},
		{"-custodian " + k.spec("none"), "it has no name; its members are name, pin_file"},
		{"-custodian " + k.spec("text"), "not a JSON object"},
		{"-former-custodian " + k.spec("three"), "-former-custodian: " + k.file("three") + ": there is no such custodian"},
		{"-seal no-sealer:" + k.file("one"), "-seal: a custodian of this kind does not seal"},
		{"-seal openbao:" + k.file("keyless"), "-seal: openbao:" + k.file("keyless") + " has no seal_key"},
		{"-custodian openbao:" + k.file("one"), `"name" is none of its members: url, roots_file`},
		{"-custodian openbao:" + k.file("half"), "only one of CertificateFile and KeyFile is set"},
		{"-reseal", "-reseal: name a custodian in -seal, or the one of before in -unseal"},
		{"-store oracle://db/ca", "-store: it is not a URL of memory"},
		{"-store memory://ca:SECRET@db/ca", "of -store-password-file"},
		{"-store memory://db/ca?password=SECRET", "of -store-password-file"},
		{"-store memory://ca:SECRET@db:%zz/ca", "-store: it is not a URL"},
		{"-store memory://away/ca", "-store: there is no such store"},
		{"-store memory://db/ca -create=false", "there is no CA in memory://db/ca, as cluster.local; if there was one, name " +
			"its database in -store or restore it"},
		{"-store=", "-store: it is not a URL of memory"},
		{"-store-schema", "-store: name a database, as -store-schema is for one"},
		{"-store-password-file /x", "-store: name a database, as -store-password-file is for one"},
	} {
		args := arguments(dir, strings.Fields(tc.args)...)
		if !strings.Contains(tc.args, "-reseal") && !strings.Contains(tc.args, "-store-schema") {
			args = append(args, "-jwt", "db", "-id", "spiffe://cluster.local/web")
		}
		_, err := k.shell(t, args...)
		require.ErrorContains(t, err, tc.want, tc.args)
		require.NotContains(t, err.Error(), "SECRET")
	}
	for _, args := range []string{"-custodian " + k.spec("one"), "-store memory://db/ca"} {
		_, err := k.parse(append(strings.Fields(args), "-kubernetes", "-external-ca", "ISTIOD_RA_KUBERNETES_API",
			"-k8s-signer", "example.org/x"), env{}.get, io.Discard)
		require.ErrorIs(t, err, caconfig.ErrUsage)
		require.ErrorContains(t, err, "with -external-ca", args)
	}
	if runtime.GOOS != "windows" {
		_, err := k.shell(t, arguments(dir, "-seal", k.spec("two"), "-jwt", "db", "-id", "spiffe://cluster.local/web")...)
		require.ErrorIs(t, err, private.ErrUnsafe)
	}
	require.ErrorContains(t, must.Err(shell(t, "", "-store", "postgres://db/ca")),
		"-store: this program has no databases; examples/ca-full is the same program with them")
	require.NoError(t, must.Err(k.shell(t, "-store", "memory://db/ca", "-store-schema")))
}

// With a custodian that is lost for good, the CA gets keys in its store, and the commands for that succeed.
func TestLostCustodian(t *testing.T) {
	t.Parallel()
	k, dir := newKept(t), t.TempDir()
	sign := []string{"-jwt", "db", "-id", "spiffe://cluster.local/web"}
	must.Get(k.shell(t, arguments(dir, append(sign, "-create", "-custodian", k.spec("one"))...)...))(t)
	k.custodians["one"].Fault = func(context.Context, string, string) error { return errors.New("lost") }
	_, err := k.shell(t, arguments(dir, "-former-custodian", k.spec("one"), "-status")...)
	require.ErrorContains(t, err, "lost")
	status := must.Get(k.shell(t, arguments(dir, "-status")...))(t)
	ids := regexp.MustCompile(`(?m)^(?:root|JWT key) ([0-9a-f]+):`).FindAllStringSubmatch(status, -1)
	require.Len(t, ids, 2)
	for _, id := range ids {
		said := must.Get(k.shell(t, arguments(dir, "-former-custodian", k.spec("one"), "-revoke", id[1], "-now")...))(t)
		assert.Contains(t, said, "lost\n")
	}
	must.Get(k.shell(t, arguments(dir, sign...)...))(t)
}

// A store that a URL names is made with -create alone, has the record of the trust domain, and is closed.
func TestStoreKind(t *testing.T) {
	t.Parallel()
	k := newKept(t)
	common := []string{"-store", "memory://db/ca", "-root-ca-dir="}
	sign := []string{"-jwt", "db", "-id", "spiffe://cluster.local/web"}
	in := func(more ...string) []string {
		return append(append([]string{"-state-dir", t.TempDir()}, common...), more...)
	}
	_, err := k.shell(t, in(sign...)...)
	require.ErrorIs(t, err, ca.ErrNoRecord)
	must.Get(k.shell(t, in(append(sign, "-create")...)...))(t)
	require.Equal(t, 2, k.closed)
	must.Get(k.shell(t, in(sign...)...))(t)
	require.DirExists(t, filepath.Join(k.dir, "cluster.local"))

	state := filepath.Join(t.TempDir(), "new") // of an operator on another machine
	said := must.Get(k.shell(t, append([]string{"-state-dir", state, "-rotate"}, common...)...))(t)
	assert.Contains(t, said, "CA of cluster.local, in memory://db/ca, as cluster.local, bundle 2\n")
	require.FileExists(t, filepath.Join(state, "audit.jsonl"))
}

// The default state directory is no reason to make a CA in a database.
func TestStoreIsNotCreated(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	k := newKept(t)
	_, err := k.shell(t, "-store", "memory://db/ca", "-root-ca-dir=", "-jwt", "db", "-id", "spiffe://cluster.local/web")
	require.ErrorIs(t, err, ca.ErrNoRecord)
}
