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
		"empty line":    {join(lines[0], "", lines[1]), 2, auditlog.ErrMalformed},
		"space":         {join(lines[0]+" ", lines[1]), 1, auditlog.ErrMalformed},
		"indented":      {join(" "+lines[0], lines[1]), 1, auditlog.ErrMalformed},
		"CR LF":         {join(lines[0]+"\r", lines[1]), 1, auditlog.ErrMalformed},
		"overwritten":   {join(lines[0], strings.Repeat("x", len(lines[1])), lines[2]), 2, auditlog.ErrMalformed},
		"last one, too": {join(lines[0], strings.Repeat("x", len(lines[1]))), 2, auditlog.ErrMalformed},
		"BOM":           {join("\ufeff"+lines[0], lines[1]), 1, auditlog.ErrMalformed},
		"glued":         {join(lines[0]+lines[1], lines[2]), 1, auditlog.ErrMalformed},
		"last cut":      {lines[0] + "\n" + lines[1][:50], 2, auditlog.ErrTorn},
	} {
		got := read(tc.text)
		for i, f := range got[:tc.at-1] {
			require.NoError(t, f.err, "%s, line %d", name, i+1)
		}
		err := got[tc.at-1].err
		require.ErrorIs(t, err, tc.kind, name)
		require.Equal(t, tc.kind == auditlog.ErrTorn, errors.Is(err, auditlog.ErrTorn), "%s: what no crash leaves is not torn", name)
		require.ErrorContains(t, err, fmt.Sprintf("auditlog: line %d: ", tc.at))
		require.Equal(t, tc.kind == auditlog.ErrChain, got[tc.at-1].serial != "", "%s: the record is given", name)
	}
	require.Len(t, read(join(lines[2:]...)), 3)
	for _, f := range read(join(lines[2:]...)) {
		require.NoError(t, f.err, "a file that begins in the middle of the chain")
	}
	require.Empty(t, read(""))
}

// Verify says where a log begins and ends, and takes nothing for a log that is none, or is not all there.
func TestVerify(t *testing.T) {
	t.Parallel()
	all := chain(t, 5)
	hash := func(line string) string { sum := sha256.Sum256([]byte(line)); return hex.EncodeToString(sum[:]) }
	join := func(lines ...string) string { return strings.Join(lines, "\n") + "\n" }
	event := func(what, fingerprint, after string) string {
		line, err := auditlog.Line(auditlog.Entry{KeyEvent: &ca.KeyEvent{Time: time.Unix(0, 0), Event: what, Fingerprint: fingerprint}}, sha256.Sum256([]byte(after)))
		require.NoError(t, err)
		return line
	}
	torn := `{"time":"20`
	afterTorn, err := auditlog.Line(auditlog.Entry{Issuance: record("next")}, sha256.Sum256([]byte(torn)))
	require.NoError(t, err)
	zeros := bytes.Repeat([]byte{0}, 300)
	for name, tc := range map[string]struct {
		last  string
		files []string
		out   string // a part of what is printed
		err   string // empty: in order
	}{
		"whole":                              {"", []string{join(all...)}, "5 records, from 2026-", ""},
		"its end":                            {"", []string{join(all...)}, "\nthe chain ends with the line " + hash(all[4]) + "\n", ""},
		"its begin":                          {"", []string{join(all...)}, "\nthe chain begins with the first line of all\n", ""},
		"several files":                      {hash(all[4]), []string{join(all[:2]...), join(all[2:3]...), join(all[3:]...)}, "is here, and 0 after it", ""},
		"an older end":                       {hash(all[1]), []string{join(all...)}, "the line " + hash(all[1]) + ", which was the last one once, is here, and 3 after it", ""},
		"a crash at the end":                 {"", []string{join(all...) + all[0][:40]}, "an unfinished line, as a crash leaves it", ""},
		"zeros after a crash":                {"", []string{join(all...) + string(zeros)}, "5 records", ""},
		"a crash before":                     {hash(torn), []string{join(all...) + join(torn, afterTorn)}, "6 records", ""},
		"files before that were deleted":     {"", []string{join(all[2:]...)}, "begins with the line after " + hash(all[1]) + ", as it should", ""},
		"the whole last line cut":            {hash(all[4]), []string{join(all[:4]...)}, "ends with the line " + hash(all[3]), "the end was cut off or changed"},
		"the end cut":                        {hash(all[4]), []string{join(all[:3]...)}, "", "the end was cut off or changed"},
		"the end cut in its line":            {hash(all[4]), []string{join(all[:4]...) + all[4][:60]}, "", "the end was cut off or changed"},
		"the last line changed":              {hash(all[4]), []string{join(all[:4]...) + join(strings.Replace(all[4], `"4"`, `"7"`, 1))}, "", "the end was cut off or changed"},
		"the last line no record":            {"", []string{join(all[:4]...) + join(strings.Repeat("x", len(all[4])))}, "line 5: not an audit record: it is unfinished", "places: 1"},
		"all of it rewritten":                {hash(all[4]), []string{join(chain(t, 5)[0], event("created", "", all[0]))}, "", "the end was cut off or changed"},
		"not the hash of a line":             {"x", []string{join(all...)}, "", `the line "x" was the last one once`},
		"the head cut":                       {"", []string{join(all[1:]...)}, "begins with the line after " + hash(all[0]) + ", which is not here", "places: 1"},
		"more than the files before":         {"", []string{join(all[3:]...)}, "which is not here", "places: 1"},
		"a file between":                     {"", []string{join(all[:2]...), join(all[3:]...)}, "line 1: the line before is not the one", "places: 1"},
		"every line overwritten":             {"", []string{join(strings.Repeat("x", 300), strings.Repeat("x", 300), "")}, "line 1: not an audit record", "there is no record"},
		"zeros":                              {"", []string{string(zeros)}, "", "there is no record"},
		"another file":                       {"", []string{"root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"}, "", "there is no record"},
		"nothing":                            {"", []string{""}, "", "there is no record"},
		"no file":                            {"", nil, "", "there is no record"},
		"two unfinished lines":               {"", []string{join(all...) + join(torn, torn, afterTorn)}, "line 6: not an audit record", "places: 1"},
		"an unfinished line in place of one": {"", []string{join(all[0], torn, all[2], all[3])}, "line 2: not an audit record: it is unfinished", "places: 2"},
	} {
		var out strings.Builder
		var files []io.Reader
		for _, text := range tc.files {
			files = append(files, strings.NewReader(text))
		}
		after := ""
		if strings.Contains(name, "files before") {
			after = hash(all[1])
		}
		err := auditlog.Verify(&out, after, tc.last, files...)
		if tc.err == "" {
			require.NoError(t, err, "%s\n%s", name, out.String())
		} else {
			require.ErrorContains(t, err, tc.err, "%s\n%s", name, out.String())
		}
		require.Contains(t, out.String(), tc.out, name)
	}
	var out strings.Builder
	errBroken := errors.New("broken")
	require.ErrorIs(t, auditlog.Verify(&out, "", "", strings.NewReader(join(all...)), iotest.ErrReader(errBroken)), errBroken)
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
		``, `[`, `null`, `{"kind":"ca"},{"kind":"ca"`, `{"time":1`, `{"time":""`, `{"time":"2026-02-30T03:04:05Z"`,
		`{` + at + `,"kind":1`, `{` + at + `,"kind":["ca"]`, `{` + at + `,"other":"x"`, `{` + at + `,"event":"tainted","kind":"ca"`,
		`{` + at + `,"id":"spiffe://A/b"`, `{` + at + `,"id":"b"`, `{` + at + `,"dns_names":"a"`, `{` + at + `,"ips":["x"]`,
		`{` + at + `,"caller":"` + "\t" + `"`, `{` + at + `,"prev":"` + zeros + `"`, `{` + at + `}{` + at, `{` + at + `}`,
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

// FuzzRead: whatever is read without an error can be written and read again, and a line cannot be both that and part of
// another one.
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
			for j, err := range auditlog.Read(strings.NewReader(again)) {
				require.NoError(t, err)
				require.Equal(t, i, j)
			}
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
		require.Equal(t, string([]rune(serial)), got[0].serial)
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
