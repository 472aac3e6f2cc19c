package auditlog_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

// chain returns the lines of n records.
func chain(t testing.TB, n int) []string {
	t.Helper()
	var prev [32]byte
	lines := make([]string, n)
	for i := range lines {
		line, err := auditlog.Line(auditlog.Entry{Issuance: record(fmt.Sprint(i))}, prev)
		require.NoError(t, err)
		lines[i], prev = line, sha256.Sum256([]byte(line))
	}
	return lines
}

type found struct {
	serial string
	err    error
}

func read(text string) (got []found) {
	for i, err := range auditlog.Read(strings.NewReader(text)) {
		got = append(got, found{serial(i), err})
	}
	return got
}

// Any change to a line is seen: in the line itself if it is no record any more, else by the line
// after it.
func TestTampering(t *testing.T) {
	t.Parallel()
	lines := chain(t, 5)
	join := func(lines ...string) string { return strings.Join(lines, "\n") + "\n" }
	for name, tc := range map[string]struct {
		text string
		at   int // the line that Read complains about, counted from 1
		kind error
	}{
		"taken out":     {join(slices.Delete(slices.Clone(lines), 2, 3)...), 3, auditlog.ErrChain},
		"changed":       {join(lines[0], strings.Replace(lines[1], `"1"`, `"7"`, 1), lines[2], lines[3], lines[4]), 3, auditlog.ErrChain},
		"swapped":       {join(lines[0], lines[2], lines[1]), 2, auditlog.ErrChain},
		"twice":         {join(lines[0], lines[1], lines[1]), 3, auditlog.ErrChain},
		"first changed": {join(strings.Replace(lines[0], "x509", "y509", 1), lines[1]), 2, auditlog.ErrChain},
		"empty line":    {join(lines[0], "", lines[1]), 2, auditlog.ErrTorn},
		"space":         {join(lines[0]+" ", lines[1]), 1, auditlog.ErrTorn},
		"indented":      {join(" "+lines[0], lines[1]), 1, auditlog.ErrMalformed},
		"CR LF":         {join(lines[0]+"\r", lines[1]), 1, auditlog.ErrTorn},
		"BOM":           {join("\ufeff"+lines[0], lines[1]), 1, auditlog.ErrMalformed},
		"glued":         {join(lines[0]+lines[1], lines[2]), 1, auditlog.ErrMalformed},
		"last cut":      {join(lines[0], lines[1][:50]), 2, auditlog.ErrTorn},
	} {
		got := read(tc.text)
		for i, f := range got[:tc.at-1] {
			require.NoError(t, f.err, "%s, line %d", name, i+1)
		}
		err := got[tc.at-1].err
		require.ErrorIs(t, err, tc.kind, name)
		require.ErrorContains(t, err, fmt.Sprintf("auditlog: line %d: ", tc.at))
		require.Equal(t, tc.kind == auditlog.ErrChain, got[tc.at-1].serial != "", "%s: the record is given", name)
	}
	require.Len(t, read(join(lines[2:]...)), 3)
	for _, f := range read(join(lines[2:]...)) {
		require.NoError(t, f.err, "a file that begins in the middle of the chain")
	}
	require.Empty(t, read(""))
}

// Only what this package writes is a record.
func TestMalformed(t *testing.T) {
	t.Parallel()
	zeros := strings.Repeat("0", 64)
	const at = `"time":"2026-01-02T03:04:05Z"`
	end := `,"prev":"` + zeros + `"}`
	good := "{" + at + `,"kind":"x509-svid","id":"spiffe://a/b","ips":["192.0.2.1"],"not_after":"2026-01-02T03:04:05.5Z"` + end
	require.Equal(t, []found{{"", nil}}, read(good))
	for _, body := range []string{
		``, `{`, `[`, `null`, `{"kind":"ca"`, `{"kind":"ca",` + at,
		`{"time":"2026-01-02T03:04:05+00:00"`, `{"time":"2026-01-02T04:04:05+01:00"`, `{"time":"2026-01-02 03:04:05Z"`,
		`{"time":"2026-01-02T03:04:05.50Z"`, `{"time":"2026-02-30T03:04:05Z"`, `{"time":1`, `{"time":null`, `{"time":""`, `{"time":"10000-01-01T00:00:00Z"`,
		`{` + at + `,"kind":""`, `{` + at + `,"kind":1`, `{` + at + `,"kind":["ca"]`, `{` + at + `,"kind":"\u0063a"`, `{` + at + `,"kind":"c\/a"`,
		`{` + at + `,"Kind":"ca"`, `{` + at + `,"other":"x"`, `{` + at + `,"kind":"ca","kind":"ca"`, `{` + at + `,"serial":"1","kind":"ca"`,
		`{` + at + `,"id":"spiffe://A/b"`, `{` + at + `,"id":"b"`, `{` + at + `,"id":""`,
		`{` + at + `,"dns_names":"a"`, `{` + at + `,"dns_names":[]`, `{` + at + `,"dns_names":[1]`, `{` + at + `,"dns_names":["a",null]`, `{` + at + `,"dns_names":[["a"]]`,
		`{` + at + `,"ips":["192.0.2.01"]`, `{` + at + `,"ips":["::ffff:192.0.2.1"]`, `{` + at + `,"ips":["2001:DB8::1"]`, `{` + at + `,"ips":["x"]`, `{` + at + `,"ips":[""]`,
		`{` + at + `,"not_after":"0001-01-01T00:00:00Z"`, `{` + at + `,"caller":"` + "\xff" + `"`, `{` + at + `,"caller":"\ud800"`, `{` + at + `,"caller":"` + "\t" + `"`,
		`{ ` + at, `{` + at + ` `, `{` + at + `,"prev":"` + zeros + `"`, `{"prev":"` + zeros + `",` + at, `{` + at + `}{` + at, `{` + at + `}`,
		`{` + at + `,"caller":"` + strings.Repeat("x", 65_500) + `"`, strings.Repeat("[", 60_000),
	} {
		got := read(body + end)
		require.Len(t, got, 1, "%.100q", body)
		require.ErrorIs(t, got[0].err, auditlog.ErrMalformed, "%.100q", body)
	}
	for _, hash := range []string{strings.Repeat("0", 63), strings.Repeat("0", 65), strings.ToUpper(strings.Repeat("a", 64)), strings.Repeat("g", 64), ""} {
		got := read("{" + at + `,"prev":"` + hash + `"}`)
		require.Len(t, got, 1)
		require.Error(t, got[0].err, hash)
	}
}

// A line of any length is passed over, and the chain goes on behind it.
func TestLongLines(t *testing.T) {
	t.Parallel()
	lines := chain(t, 2)
	for _, length := range []int{65_535, 65_536, 65_537, 131_072, 131_073, 500_000} {
		for _, end := range []string{"", lines[1][len(lines[1])-75:]} {
			long := strings.Repeat("x", length-len(end)) + end
			next, err := auditlog.Line(auditlog.Entry{Issuance: record("next")}, sha256.Sum256([]byte(long)))
			require.NoError(t, err)
			got := read(lines[0] + "\n" + long + "\n" + next + "\n")
			require.Len(t, got, 3)
			require.NoError(t, got[0].err)
			want := auditlog.ErrTorn
			if end != "" {
				want = auditlog.ErrMalformed
			}
			require.ErrorIs(t, got[1].err, want, length)
			require.NoError(t, got[2].err, length)
			require.Len(t, read(long), 1, "at the end, without a newline")
		}
	}

	// The end of a line that is too long is no record, whatever it looks like.
	for pad := 65_537 - 200; pad < 65_538; pad++ {
		got := read(strings.Repeat("x", pad) + lines[0])
		require.Len(t, got, 1)
		require.ErrorIs(t, got[0].err, auditlog.ErrMalformed, pad)
	}
}

// TestLongLinesMemory is not parallel, as what others allocate would be counted.
func TestLongLinesMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, err := range auditlog.Read(io.LimitReader(endless('x'), 64<<20)) {
		require.ErrorIs(t, err, auditlog.ErrTorn)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(16<<20))
}

// endless is one byte again and again.
type endless byte

func (e endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(e)
	}
	return len(p), nil
}

// An error of the reader ends the records, in whatever pieces they came.
func TestReadErrors(t *testing.T) {
	t.Parallel()
	lines := chain(t, 3)
	text := strings.Join(lines, "\n")
	errBroken := errors.New("broken")
	var got []error
	for _, err := range auditlog.Read(iotest.OneByteReader(io.MultiReader(strings.NewReader(text), iotest.ErrReader(errBroken)))) {
		got = append(got, err)
	}
	require.Len(t, got, 3)
	require.NoError(t, got[1])
	require.ErrorIs(t, got[2], errBroken)
	require.ErrorContains(t, got[2], "line 3")
	got = nil
	for _, err := range auditlog.Read(io.MultiReader(strings.NewReader(strings.Repeat("x", 100_000)), iotest.ErrReader(errBroken))) {
		got = append(got, err)
	}
	require.Len(t, got, 1)
	require.ErrorIs(t, got[0], errBroken)

	n := 0
	for range auditlog.Read(strings.NewReader(text)) {
		if n++; n == 2 {
			break
		}
	}
	require.Equal(t, 2, n)
}

// FuzzRead: whatever is read without an error is written in the same way again, and a line cannot be
// both that and part of another one.
func FuzzRead(f *testing.F) {
	lines := chain(f, 3)
	all, err := auditlog.Line(auditlog.Entry{Issuance: full()}, [32]byte{})
	require.NoError(f, err)
	f.Add([]byte(strings.Join(lines, "\n")))
	f.Add([]byte(all + "\n"))
	f.Add([]byte(lines[0] + "\n" + lines[1][:40] + "\n"))
	f.Add([]byte(`{"time":"2026-01-02T03:04:05Z","kind":"\"}","prev":"` + strings.Repeat("0", 64) + `"}`))
	f.Add([]byte("\n\n\x00\n"))
	event, err := auditlog.Line(auditlog.Entry{KeyEvent: fullEvent()}, [32]byte{})
	require.NoError(f, err)
	f.Add([]byte(event + "\n" + all))
	f.Add([]byte(strings.Replace(event, `"event":"tainted"`, `"kind":"tainted"`, 1)))
	f.Add([]byte(strings.Replace(all, `"kind":"x509-svid"`, `"event":"x509-svid"`, 1)))
	f.Fuzz(func(t *testing.T, text []byte) {
		rest := bytes.Split(bytes.TrimSuffix(text, []byte{'\n'}), []byte{'\n'})
		n := 0
		for i, err := range auditlog.Read(bytes.NewReader(text)) {
			line := rest[n]
			n++
			if errors.Is(err, auditlog.ErrTorn) || errors.Is(err, auditlog.ErrMalformed) {
				require.Zero(t, i)
				continue
			}
			if err != nil {
				require.ErrorIs(t, err, auditlog.ErrChain)
			}
			var prev [32]byte
			_, broken := hex.Decode(prev[:], line[len(line)-66:len(line)-2])
			require.NoError(t, broken)
			again, refused := auditlog.Line(i, prev)
			require.NoError(t, refused)
			require.Equal(t, string(line), again)
			if n > 1 {
				require.Equal(t, prev == sha256.Sum256(rest[n-2]), err == nil)
			}
		}
		if len(text) > 0 {
			require.Equal(t, len(rest), n, "one result for each line")
		} else {
			require.Zero(t, n)
		}
	})
}

// FuzzRecord: whatever the names are, the line that is written is one line and reads back.
func FuzzRecord(f *testing.F) {
	f.Add("x509-svid", "5d1c", "a.example.org", int64(1), []byte{192, 0, 2, 1})
	f.Add("\"}\n", "\\", "\xff", int64(-62135596800), []byte{})
	f.Add("", "", "", int64(253402300800), bytes.Repeat([]byte{0xff}, 16))
	f.Fuzz(func(t *testing.T, kind, serial, name string, at int64, ip []byte) {
		i := &ca.Issuance{Time: time.Unix(at, 5), Kind: kind, Serial: serial, DNSNames: []string{name}, Caller: name, NotAfter: time.Unix(at, 0)}
		if len(ip) > 0 {
			i.IPs = append(i.IPs, ip)
		}
		line, err := auditlog.Line(auditlog.Entry{Issuance: i}, [32]byte{})
		if err != nil || len(line) > 64<<10 {
			return
		}
		got := read(line + "\n")
		require.Len(t, got, 1)
		require.NoError(t, got[0].err, "%q", line)
		require.Equal(t, strings.ToValidUTF8(serial, "\uFFFD"), got[0].serial)
	})
}

func BenchmarkRead(b *testing.B) {
	text := strings.Join(chain(b, 1000), "\n")
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		for _, err := range auditlog.Read(strings.NewReader(text)) {
			if err != nil {
				b.Fatal(err)
			}
		}
	}
}
