package auditlog_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/spiffe"
)

var _ interface {
	ca.Auditor
	RecordKeyEvent(context.Context, *ca.KeyEvent) error
	Err() error
} = (*auditlog.Log)(nil)

// full has every field.
func full() *ca.Issuance {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
	return &ca.Issuance{
		Time: at, Kind: "x509-svid", Serial: "5d1c", ID: spiffe.MustParseID("spiffe://example.org/ns/a/sa/b"),
		DNSNames: []string{"a.example.org", "b"}, IPs: []net.IP{net.ParseIP("192.0.2.1"), net.ParseIP("2001:db8::1")},
		Audience: []string{"x", "y"}, NotBefore: at.Truncate(time.Second), NotAfter: at.Truncate(time.Second).Add(time.Hour),
		Issuer: "77", Fingerprint: "00ff", PublicKey: "ff00", Caller: "spiffe://example.org/node", Method: "token-review",
		Pod:        spiffe.Pod{Cluster: "east", Namespace: "kube-system", ServiceAccount: "ztunnel", Name: "ztunnel-x", UID: "u-1", Node: "n1"},
		PodRequest: "r-1",
	}
}

// fullEvent has every field.
func fullEvent() *ca.KeyEvent {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
	return &ca.KeyEvent{
		Time: at, Event: "tainted", Key: "root", Serial: "5d1c", NotAfter: at.Truncate(time.Second), Fingerprint: "00ff", Successor: "77",
		Detail: "why", Actor: ca.Actor{UID: "1000", Host: "h", Command: "ca -taint 5d1c"},
	}
}

func record(serial string) *ca.Issuance {
	return &ca.Issuance{Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Kind: "x509-svid", Serial: serial}
}

func open(t *testing.T, path string, log *slog.Logger, f *auditlog.Faults) *auditlog.Log {
	t.Helper()
	if f == nil {
		f = &auditlog.Faults{}
	}
	l := must.Get(auditlog.OpenFaulty(path, log, f))(t)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

func logPath(t *testing.T) string { return filepath.Join(t.TempDir(), "audit.jsonl") }

// contents returns the serials of the records in the files together, or the event and what it is about. It has "torn"
// for what is no record, and "chain" before a record that does not follow the line before it.
func contents(t *testing.T, paths ...string) (got []string) {
	t.Helper()
	var all []byte
	for _, p := range paths {
		text := must.Get(os.ReadFile(p))(t)
		all = append(all, text...)
	}
	var before []byte
	for line := range bytes.SplitSeq(bytes.TrimSuffix(all, []byte{'\n'}), []byte{'\n'}) {
		var r struct {
			ca.KeyEvent
			Prev string `json:"prev"`
		}
		if json.Unmarshal(line, &r) != nil {
			got = append(got, "torn")
		} else {
			if before != nil && r.Prev != fmt.Sprintf("%x", sha256.Sum256(before)) {
				got = append(got, "chain")
			}
			got = append(got, strings.TrimSpace(r.Event+" "+r.Serial+r.Detail))
		}
		before = line
	}
	return got
}

// What is written is what is read, in the form that the documentation names.
func TestFormat(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	l := open(t, path, nil, nil)
	all := full()
	for i, v := 0, reflect.ValueOf(*all); i < v.NumField(); i++ {
		require.False(t, v.Field(i).IsZero(), "the record must have %s", v.Type().Field(i).Name)
	}
	require.NoError(t, l.Record(t.Context(), all))
	require.NoError(t, l.Record(t.Context(), &ca.Issuance{}))

	text := must.Get(os.ReadFile(path))(t)
	first, second, _ := strings.Cut(string(text), "\n")
	assert.Equal(t, `{"time":"2026-01-02T03:04:05.678Z","kind":"x509-svid","serial":"5d1c","id":"spiffe://example.org/ns/a/sa/b",`+
		`"dns_names":["a.example.org","b"],"ips":["192.0.2.1","2001:db8::1"],"audience":["x","y"],`+
		`"not_before":"2026-01-02T03:04:05Z","not_after":"2026-01-02T04:04:05Z","issuer":"77","fingerprint":"00ff","public_key":"ff00",`+
		`"caller":"spiffe://example.org/node","method":"token-review",`+
		`"cluster":"east","namespace":"kube-system","service_account":"ztunnel","pod":"ztunnel-x","pod_uid":"u-1","node":"n1","request":"r-1","prev":"`+strings.Repeat("0", 64)+`"}`, first)
	assert.Equal(t, fmt.Sprintf(`{"time":"0001-01-01T00:00:00Z","prev":"%x"}`+"\n", sha256.Sum256([]byte(first))), second)

	var got ca.Issuance
	require.NoError(t, json.Unmarshal([]byte(first), &got))
	require.Equal(t, *all, got)
}

// Names from outside cannot break out of their line.
func TestHostileText(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	l := open(t, path, nil, nil)
	texts := []string{
		"a\nb", "a\r\nb", `"}`, `\`, "\x00", "\u2028", "a\xffb", "\xed\xa0\x80", strings.Repeat("x", 60_000),
		`,"prev":"` + strings.Repeat("0", 64) + `"}`, "]}", "\u202egnp", "\x1b[2J",
	}
	for _, s := range texts {
		i := record("1")
		i.Caller, i.DNSNames, i.Audience = s, []string{"", s[:min(len(s), 100)]}, []string{s[:min(len(s), 100)]}
		require.NoError(t, l.Record(t.Context(), i), "%.100q", s)
	}
	text := must.Get(os.ReadFile(path))(t)
	require.NoError(t, auditlog.Verify(io.Discard, "", l.End(), bytes.NewReader(text)))
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	require.Len(t, lines, len(texts))
	for n, line := range lines {
		var i ca.Issuance
		require.NoError(t, json.Unmarshal([]byte(line), &i))
		require.Equal(t, string([]rune(texts[n])), i.Caller)
	}
}

// What is no line is refused, and those that share its write are not harmed.
func TestRefused(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		path := logPath(t)
		gate := make(chan struct{})
		calls := 0
		l := open(t, path, nil, &auditlog.Faults{Sync: func() error {
			if calls++; calls == 2 {
				<-gate
			}
			return nil
		}})
		var wg sync.WaitGroup
		wg.Go(func() { assert.NoError(t, l.Record(t.Context(), record("1"))) })
		synctest.Wait() // the disk is at work, so the rest shares a write
		bad := []struct {
			want  string
			spoil func(*ca.Issuance)
		}{
			{"65536 bytes", func(i *ca.Issuance) { i.Caller = strings.Repeat("x", 65_500) }},
			{"year", func(i *ca.Issuance) { i.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }},
			{"year", func(i *ca.Issuance) { i.NotAfter = time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC) }},
			{"year", func(i *ca.Issuance) { i.NotBefore = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }},
			{"invalid IP", func(i *ca.Issuance) { i.IPs = []net.IP{{1, 2, 3}} }},
			{"bytes", func(i *ca.Issuance) { i.DNSNames = make([]string, 30_000) }},
			{"of more than", func(i *ca.Issuance) { i.Caller = strings.Repeat("\x01", 20_000) }},
		}
		n := 0
		for _, tt := range bad {
			i := record("bad")
			tt.spoil(i)
			require.ErrorContains(t, l.Record(t.Context(), i), tt.want)
			serial := fmt.Sprint(n)
			wg.Go(func() { assert.NoError(t, l.Record(t.Context(), record(serial))) })
			synctest.Wait()
			n++
			require.Equal(t, n, l.Pending())
		}
		close(gate)
		wg.Wait()
		require.Len(t, contents(t, path), 1+len(bad))
		require.NotContains(t, strings.Join(contents(t, path), " "), "bad")
	})
}

// Record returns when fsync has, not before; those that come meanwhile share the next one.
func TestGroupCommit(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		path := logPath(t)
		syncs := 0
		l := open(t, path, nil, &auditlog.Faults{Sync: func() error {
			if syncs++; syncs > 1 { // the first is Open's
				time.Sleep(time.Second)
			}
			return nil
		}})
		begin := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			assert.NoError(t, l.Record(t.Context(), record("0")))
			assert.Equal(t, time.Second, time.Since(begin))
		})
		synctest.Wait()
		for i := range 50 {
			wg.Go(func() {
				assert.NoError(t, l.Record(t.Context(), record(fmt.Sprint(i+1))))
				assert.Equal(t, 2*time.Second, time.Since(begin))
			})
		}
		wg.Wait()
		require.Equal(t, 3, syncs)
		require.Len(t, contents(t, path), 51)
	})
}

// A disk that does not answer pushes back: the queue is bounded.
func TestPushBack(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		path := logPath(t)
		gate := make(chan struct{})
		syncs := 0
		l := open(t, path, nil, &auditlog.Faults{Sync: func() error {
			if syncs++; syncs > 1 {
				<-gate
			}
			return nil
		}})
		var wg sync.WaitGroup
		write := func() { wg.Go(func() { assert.NoError(t, l.Record(t.Context(), record("1"))) }) }
		write()
		synctest.Wait() // the disk is at work
		for range auditlog.MaxQueue {
			write()
		}
		synctest.Wait()
		require.Equal(t, auditlog.MaxQueue, l.Pending())
		require.ErrorContains(t, l.Record(t.Context(), record("too many")), "wait for the disk already")
		close(gate)
		wg.Wait()
		require.NoError(t, l.Record(t.Context(), record("2")))
		got := contents(t, path)
		require.Len(t, got, 1+auditlog.MaxQueue+1)
		require.NotContains(t, got, "too many")
	})
}

// A caller that gives up while the disk is at work gets an error; the line may be there.
func TestGivingUp(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		path := logPath(t)
		gate := make(chan struct{})
		syncs := 0
		l := open(t, path, nil, &auditlog.Faults{Sync: func() error {
			if syncs++; syncs == 2 {
				<-gate
			}
			return nil
		}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := l.Record(ctx, record("1"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "waiting for the disk")
		close(gate)
		require.NoError(t, l.Record(t.Context(), record("2")))
		require.Equal(t, []string{"1", "2"}, contents(t, path))
	})
}

// A full disk: all that share the write are refused, and the log goes on behind what was written in part.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	for _, written := range []int{0, 1, 100, 1 << 20} {
		synctest.Test(t, func(t *testing.T) {
			path := logPath(t)
			var full atomic.Bool
			l := open(t, path, nil, &auditlog.Faults{Write: func(p []byte) (int, error) {
				if full.Load() {
					time.Sleep(time.Millisecond)
					return min(written, len(p)), syscall.ENOSPC
				}
				return len(p), nil
			}})
			require.NoError(t, l.Record(t.Context(), record("1")))
			full.Store(true)
			var wg sync.WaitGroup
			for i := range 5 {
				wg.Go(func() {
					err := l.Record(t.Context(), record(fmt.Sprint("no", i)))
					assert.ErrorIs(t, err, syscall.ENOSPC)
					assert.ErrorContains(t, err, path)
				})
			}
			wg.Wait()
			full.Store(false)
			require.NoError(t, l.Record(t.Context(), record("2")))
			got := contents(t, path)
			require.Equal(t, "1", got[0])
			require.Equal(t, "2", got[len(got)-1])
			require.NotContains(t, got, "chain")
			switch written {
			case 0:
				require.Len(t, got, 2)
			case 1:
				require.Equal(t, []string{"1", "torn", "2"}, slices.Compact(got))
			}
		})
	}
}

// A lost fsync is not forgotten: its record is refused, and the next write opens the file again.
func TestLostFsync(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	var broken error
	l := open(t, path, nil, &auditlog.Faults{Sync: func() error { return broken }})
	require.NoError(t, l.Record(t.Context(), record("1")))
	broken = syscall.EIO
	require.ErrorIs(t, l.Record(t.Context(), record("lost")), syscall.EIO)
	require.ErrorIs(t, l.Reopen(), syscall.EIO)
	broken = nil
	require.NoError(t, l.Record(t.Context(), record("2")))
	require.Equal(t, []string{"1", "lost", "2"}, contents(t, path))
}

// A file that cannot be opened any more fails the log, until it can.
func TestCannotReopen(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	l := open(t, path, nil, nil)
	require.NoError(t, l.Record(t.Context(), record("1")))
	require.NoError(t, os.Rename(path, path+".old"))
	require.NoError(t, os.Mkdir(path, 0o700))
	require.ErrorContains(t, l.Record(t.Context(), record("no")), path)
	require.Error(t, l.Reopen())
	require.NoError(t, os.Remove(path))
	require.NoError(t, l.Record(t.Context(), record("2")))
	require.Equal(t, []string{"1"}, contents(t, path+".old"))
	require.Equal(t, []string{"1", "2"}, contents(t, path+".old", path))
}

// Whatever a crash left at the end of the file is ended, so that nothing is glued to it.
func TestTornEnd(t *testing.T) {
	t.Parallel()
	whole := must.Get(auditlog.Line(record("1"), [32]byte{}))(t)
	second := must.Get(auditlog.Line(record("2"), sha256.Sum256([]byte(whole))))(t)
	for name, tc := range map[string]struct {
		text string
		want []string
	}{
		"nothing":             {"", []string{"new"}},
		"whole":               {whole + "\n", []string{"1", "new"}},
		"two":                 {whole + "\n" + second + "\n", []string{"1", "2", "new"}},
		"no newline":          {whole, []string{"1", "new"}},
		"second, no newline":  {whole + "\n" + second, []string{"1", "2", "new"}},
		"a byte":              {"{", []string{"torn", "new"}},
		"half":                {whole[:len(whole)/2], []string{"torn", "new"}},
		"second, half":        {whole + "\n" + second[:len(second)/2], []string{"1", "torn", "new"}},
		"all but one byte":    {whole + "\n" + second[:len(second)-1], []string{"1", "torn", "new"}},
		"all but two":         {whole + "\n" + second[:len(second)-2], []string{"1", "torn", "new"}},
		"zeros":               {whole + "\n" + string(make([]byte, 4096)), []string{"1", "torn", "new"}},
		"a lot of zeros":      {whole + "\n" + string(make([]byte, 300_000)), []string{"1", "torn", "new"}},
		"zeros, then newline": {whole + "\n" + string(make([]byte, 300_000)) + "\n", []string{"1", "torn", "new"}},
		"a newline":           {"\n", []string{"torn", "new"}},
		"newlines":            {whole + "\n\n\n", []string{"1", "torn", "torn", "new"}},
	} {
		path := logPath(t)
		require.NoError(t, os.WriteFile(path, []byte(tc.text), 0o600))
		l := open(t, path, nil, nil)
		opened := must.Get(os.ReadFile(path))(t)
		assert.Equal(t, tc.text, string(opened), "%s: a file that ends as a crash leaves it does so until there is a record", name)
		require.NoError(t, l.Record(t.Context(), record("new")))
		assert.Equal(t, tc.want, contents(t, path), name)
		text := must.Get(os.ReadFile(path))(t)
		assert.Equal(t, tc.text, string(text[:len(tc.text)]), "%s: nothing is taken away", name)
	}
}

// Open says what is wrong with the file.
func TestOpenErrors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := auditlog.Open(filepath.Join(dir, "none", "audit.jsonl"), nil)
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = auditlog.Open(dir, nil)
	require.ErrorContains(t, err, dir)
	if runtime.GOOS == "linux" {
		_, err = auditlog.Open("/dev/null", nil)
		require.ErrorContains(t, err, "not a regular file")
	}
	big := filepath.Join(dir, "big")
	require.NoError(t, os.WriteFile(big, nil, 0o600))
	require.NoError(t, os.Truncate(big, 65<<20))
	_, err = auditlog.Open(big, nil)
	require.ErrorContains(t, err, "this is no audit log")
}

// What is in a new file is lost with its name, so that the name has to be on the disk, too.
func TestNamesAreDurable(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	broken, syncs := error(syscall.EIO), 0
	faults := &auditlog.Faults{SyncDir: func() error { syncs++; return broken }}
	_, err := auditlog.OpenFaulty(path, nil, faults)
	require.ErrorIs(t, err, syscall.EIO)
	broken = nil
	l := open(t, path, nil, faults)
	require.Equal(t, 2, syncs, "it is new as long as it is empty")
	require.NoError(t, l.Record(t.Context(), record("1")))
	require.Equal(t, 3, syncs)
	require.NoError(t, l.Record(t.Context(), record("1a")))
	require.Equal(t, 3, syncs)

	require.NoError(t, os.Rename(path, path+".1"))
	broken = syscall.EIO
	require.ErrorIs(t, l.Record(t.Context(), record("no")), syscall.EIO)
	broken = nil
	require.NoError(t, l.Reopen())
	require.NoError(t, l.Record(t.Context(), record("2")))
	require.Equal(t, []string{"1", "1a", "2"}, contents(t, path+".1", path))
	if runtime.GOOS != "windows" {
		info := must.Get(os.Stat(path))(t)
		require.Equal(t, fs.FileMode(0o600), info.Mode(), "for its owner only")
	}
}

// Another program rotates the log as logrotate does, with records all the time: none is lost, and all files are one chain,
// also over a restart. Files of other programs and users are none of the log.
func TestRotation(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	for _, name := range []string{".gz", ".1.gz", ".probe", ".1~"} {
		require.NoError(t, os.WriteFile(path+name, []byte("not ours"), 0o600))
	}
	l := open(t, path, nil, nil)
	first, written := "", 0
	write := func(l *auditlog.Log) {
		require.NoError(t, l.Record(t.Context(), record(fmt.Sprint(written))))
		written++
	}
	for round := range 5 {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 5 {
					assert.NoError(t, l.Record(t.Context(), record("x")))
				}
			})
		}
		written += 20
		write(l)
		for n := round; n > 0; n-- { // a number more for each file
			require.NoError(t, os.Rename(fmt.Sprint(path, ".", n), fmt.Sprint(path, ".", n+1)))
		}
		require.NoError(t, os.Rename(path, path+".1"))
		require.NoError(t, l.Reopen())
		wg.Wait()
		write(l)
		if round == 2 {
			require.NoError(t, l.Close())
			require.NoError(t, os.Rename(path, path+"-20260102"))
			l = open(t, path, nil, nil) // by a file that was moved away it knows what to follow
			write(l)
		}
		time.Sleep(20 * time.Millisecond) // files differ by their times
		if round == 0 {
			first = l.End()
		}
	}
	verify := func(after string) (string, error) {
		paths := must.Get(auditlog.Files(path))(t)
		var all []io.Reader
		for _, p := range paths {
			f := must.Get(os.Open(p))(t)
			defer f.Close()
			all = append(all, f)
		}
		var out strings.Builder
		err := auditlog.Verify(&out, after, l.End(), all...)
		return out.String(), err
	}
	out, err := verify("")
	require.NoError(t, err, out)
	require.Contains(t, out, fmt.Sprintf("%d records", written))

	// Of files that were deleted, Verify has to be told the last line.
	all := must.Get(auditlog.Files(path))(t)
	require.Len(t, all, 7)
	require.NoError(t, os.Remove(all[0]))
	out, err = verify("")
	require.ErrorContains(t, err, "places: 1", out)
	_, after, _ := strings.Cut(out, "begins with the line after ")
	after, _, _ = strings.Cut(after, ",")
	out, err = verify(after)
	require.NoError(t, err, out)
	require.Contains(t, out, "as it should")
	_, err = verify(first)
	require.Error(t, err)
}

// Another program moves, deletes or empties the file: the next record goes to where the path leads
// now, and vouches for the last one all the same.
func TestMovedAway(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	l := open(t, path, nil, nil)
	require.NoError(t, l.Record(t.Context(), record("1")))
	require.NoError(t, os.Rename(path, path+".1"))
	require.NoError(t, l.Record(t.Context(), record("2")))
	require.Equal(t, []string{"2"}, contents(t, path))
	require.Equal(t, []string{"1", "2"}, contents(t, path+".1", path))

	require.NoError(t, os.Rename(path, path+".2"))
	require.NoError(t, l.Reopen())
	require.FileExists(t, path)
	require.NoError(t, l.Record(t.Context(), record("3")))
	require.Equal(t, []string{"1", "2", "3"}, contents(t, path+".1", path+".2", path))

	kept := must.Get(os.ReadFile(path))(t)
	require.NoError(t, os.Truncate(path, 0))
	require.NoError(t, l.Record(t.Context(), record("4")))
	require.NoError(t, os.WriteFile(path+".3", kept, 0o600))
	require.Equal(t, []string{"3", "4"}, contents(t, path+".3", path))

	require.NoError(t, os.Remove(path))
	require.NoError(t, l.Record(t.Context(), record("5")))
	require.Equal(t, []string{"5"}, contents(t, path))
}

// Several logs of one file, as in several processes, do not tear each other's lines or the chain, though the file is moved.
func TestShared(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" || runtime.GOOS == "plan9" || runtime.GOOS == "solaris" || runtime.GOOS == "aix" {
		t.Skip("no flock")
	}
	path := logPath(t)
	var wg sync.WaitGroup
	for w := range 3 {
		l := open(t, path, nil, nil)
		for c := range 4 {
			wg.Go(func() {
				for i := range 10 {
					assert.NoError(t, l.Record(t.Context(), record(fmt.Sprint(w, c, i))))
				}
			})
		}
	}
	require.NoError(t, os.Rename(path, path+".1"))
	wg.Wait()
	got := contents(t, path+".1", path)
	require.Len(t, got, 3*4*10)
	seen := map[string]bool{}
	for _, serial := range got {
		require.False(t, seen[serial] || strings.HasPrefix(serial, "chain"), serial)
		seen[serial] = true
	}
}

// Close writes what waits, and nothing is taken after it.
func TestClose(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		path := logPath(t)
		l := open(t, path, nil, &auditlog.Faults{Sync: func() error { time.Sleep(time.Second); return nil }})
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() { assert.NoError(t, l.Record(t.Context(), record(fmt.Sprint(i)))) })
			synctest.Wait()
		}
		require.NoError(t, l.Close())
		require.Len(t, contents(t, path), 5)
		wg.Wait()
		require.NoError(t, l.Close())
		require.ErrorIs(t, l.Record(t.Context(), record("no")), fs.ErrClosed)
		require.ErrorIs(t, l.Reopen(), fs.ErrClosed)
		require.Len(t, contents(t, path), 5)
	})
}

func BenchmarkRecord(b *testing.B) {
	for _, tc := range []struct {
		name    string
		clients int
		sync    bool
	}{{"1", 1, true}, {"32", 32, true}, {"32/nosync", 32, false}} {
		b.Run(tc.name, func(b *testing.B) {
			b.ReportAllocs()
			l, err := auditlog.OpenFaulty(filepath.Join(b.TempDir(), "audit.jsonl"), nil, &auditlog.Faults{NoSync: !tc.sync})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			i := full()
			b.SetParallelism(max(1, tc.clients/runtime.GOMAXPROCS(0)))
			if tc.clients == 1 {
				for b.Loop() {
					if err := l.Record(b.Context(), i); err != nil {
						b.Fatal(err)
					}
				}
				return
			}
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := l.Record(b.Context(), i); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}
