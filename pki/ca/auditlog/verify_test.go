package auditlog_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
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

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

// chain returns the lines of n records.
func chain(t testing.TB, n int) []string {
	t.Helper()
	var prev [32]byte
	lines := make([]string, n)
	for i := range lines {
		line := must.Get(auditlog.Line(record(fmt.Sprint(i)), prev))(t)
		lines[i], prev = line, sha256.Sum256([]byte(line))
	}
	return lines
}

// verify returns what Verify prints of a text that may follow any line, and its error.
func verify(text string) (string, error) {
	var out strings.Builder
	err := auditlog.Verify(&out, "any", "", strings.NewReader(text))
	return out.String(), err
}

// Any change to a line is seen: in the line itself if it is no record any more, else by the line
// after it.
func TestTampering(t *testing.T) {
	t.Parallel()
	lines := chain(t, 5)
	join := func(lines ...string) string { return strings.Join(lines, "\n") + "\n" }
	for name, tc := range map[string]struct {
		text string
		at   int // the line that Verify complains about first, counted from 1
		want string
	}{
		"taken out":     {join(slices.Delete(slices.Clone(lines), 2, 3)...), 3, "the line before is not the one"},
		"changed":       {join(lines[0], strings.Replace(lines[1], `"1"`, `"7"`, 1), lines[2], lines[3], lines[4]), 3, "the line before is not the one"},
		"swapped":       {join(lines[0], lines[2], lines[1]), 2, "the line before is not the one"},
		"twice":         {join(lines[0], lines[1], lines[1]), 3, "the line before is not the one"},
		"first changed": {join(strings.Replace(lines[0], "x509", "y509", 1), lines[1]), 2, "the line before is not the one"},
		"empty line":    {join(lines[0], "", lines[1]), 2, "not an audit record"},
		"space":         {join(lines[0]+" ", lines[1]), 1, "not an audit record"},
		"indented":      {join(" "+lines[0], lines[1]), 1, "not an audit record"},
		"CR LF":         {join(lines[0]+"\r", lines[1]), 1, "not an audit record"},
		"overwritten":   {join(lines[0], strings.Repeat("x", len(lines[1])), lines[2]), 2, "not an audit record"},
		"last one, too": {join(lines[0], strings.Repeat("x", len(lines[1]))), 2, "not an audit record"},
		"BOM":           {join("\ufeff"+lines[0], lines[1]), 1, "not an audit record"},
		"glued":         {join(lines[0]+lines[1], lines[2]), 1, "not an audit record"},
		"last cut":      {lines[0] + "\n" + lines[1][:50], 2, "an unfinished line"},
	} {
		out, err := verify(tc.text)
		require.True(t, strings.HasPrefix(out, fmt.Sprintf("auditlog: line %d: %s", tc.at, tc.want)), "%s: %s", name, out)
		require.Equal(t, name != "last cut", err != nil, name)
	}
	_, err := verify(join(lines[2:]...))
	require.NoError(t, err, "a file that begins in the middle of the chain")
}

// Verify says where a log begins and ends, and takes nothing for a log that is none, or is not all there.
func TestVerify(t *testing.T) {
	t.Parallel()
	all := chain(t, 5)
	hash := func(line string) string { sum := sha256.Sum256([]byte(line)); return hex.EncodeToString(sum[:]) }
	join := func(lines ...string) string { return strings.Join(lines, "\n") + "\n" }
	event := func(what, fingerprint, after string) string {
		line, err := auditlog.Line(&ca.KeyEvent{Time: time.Unix(0, 0).UTC(), Event: what, Fingerprint: fingerprint}, sha256.Sum256([]byte(after)))
		require.NoError(t, err)
		return line
	}
	torn := `{"time":"20`
	afterTorn := must.Get(auditlog.Line(record("next"), sha256.Sum256([]byte(torn))))(t)
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

// What does not begin and end like a line of this package, or is not one object, is no record.
func TestMalformed(t *testing.T) {
	t.Parallel()
	zeros := strings.Repeat("0", 64)
	const at = `"time":"2026-01-02T03:04:05Z"`
	end := `,"prev":"` + zeros + `"}`
	_, err := verify("{" + at + `,"kind":"x509-svid","id":"spiffe://a/b","ips":["192.0.2.1"],"not_after":"2026-01-02T03:04:05.5Z"` + end)
	require.NoError(t, err)
	bad := []string{"{" + at + `,"caller":"` + strings.Repeat("x", 65_500) + `"` + end}
	for _, body := range []string{
		``, `[`, `null`, `{"kind":"ca"},{"kind":"ca"`, `{"kind":"ca"`, `{"time":1`, `{"time":""`, `{"time":"2026-02-30T03:04:05Z"`,
		`{` + at + `,"caller":"` + "\t" + `"`, `{` + at + `}{` + at, `{` + at + `}`, strings.Repeat("[", 60_000), ` {` + at, `{ ` + at,
	} {
		bad = append(bad, body+end)
	}
	for _, hash := range []string{zeros[1:], zeros + "0", strings.Repeat("A", 64), strings.Repeat("g", 64), ""} {
		bad = append(bad, "{"+at+`,"prev":"`+hash+`"}`)
	}
	for _, line := range bad {
		_, err := verify(line + "\n")
		require.Error(t, err, "%.100q", line)
	}
}

// A line of any length is passed over, and the chain goes on behind it.
func TestLongLines(t *testing.T) {
	t.Parallel()
	lines := chain(t, 2)
	for _, length := range []int{65_535, 65_536, 65_537, 131_072, 131_073, 500_000} {
		long := strings.Repeat("x", length)
		next := must.Get(auditlog.Line(record("next"), sha256.Sum256([]byte(long))))(t)
		out, err := verify(lines[0] + "\n" + long + "\n" + next + "\n")
		require.NoError(t, err, length)
		require.Contains(t, out, "line 2: an unfinished line", length)
		_, err = verify(lines[0] + "\n" + long + "\n" + lines[1] + "\n")
		require.ErrorContains(t, err, "places: 2", length)
	}
}

// TestLongLinesMemory is not parallel, as what others allocate would be counted.
func TestLongLinesMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	require.Error(t, auditlog.Verify(io.Discard, "", "", io.LimitReader(endless('x'), 24<<20)))
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

// An error of the reader ends Verify, in whatever pieces the lines came.
func TestReadErrors(t *testing.T) {
	t.Parallel()
	errBroken := errors.New("broken")
	for text, want := range map[string]string{strings.Join(chain(t, 3), "\n"): "line 3", strings.Repeat("x", 100_000): "line 1"} {
		r := iotest.OneByteReader(io.MultiReader(strings.NewReader(text), iotest.ErrReader(errBroken)))
		err := auditlog.Verify(io.Discard, "", "", r)
		require.ErrorIs(t, err, errBroken)
		require.ErrorContains(t, err, want)
	}
}

// FuzzVerify: a text that is in order is a chain of JSON objects, and no longer one when a byte of a line with a
// successor is changed.
func FuzzVerify(f *testing.F) {
	lines := chain(f, 3)
	all := must.Get(auditlog.Line(full(), [32]byte{}))(f)
	event := must.Get(auditlog.Line(fullEvent(), sha256.Sum256([]byte(all))))(f)
	f.Add([]byte(strings.Join(lines, "\n")))
	f.Add([]byte(all + "\n" + event))
	f.Add([]byte(lines[0] + "\n" + lines[1][:40] + "\n"))
	f.Add([]byte(`{"time":"2026-01-02T03:04:05Z","kind":"\"}","prev":"` + strings.Repeat("0", 64) + `"}`))
	f.Add([]byte("\n\n\x00\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		out, err := verify(string(text))
		if err != nil || strings.Contains(out, "unfinished") {
			return
		}
		var before []byte
		for line := range bytes.SplitSeq(bytes.TrimSuffix(text, []byte{'\n'}), []byte{'\n'}) {
			var r struct{ Prev string }
			require.NoError(t, json.Unmarshal(line, &r))
			if before != nil {
				require.Equal(t, fmt.Sprintf("%x", sha256.Sum256(before)), r.Prev)
			}
			before = line
		}
		if i := bytes.IndexByte(text, '\n'); i > 0 && i < len(text)-1 {
			changed := bytes.Clone(text)
			changed[i/2] ^= 1
			_, err := verify(string(changed))
			require.Error(t, err)
		}
	})
}

// FuzzRecord: whatever the names are, the line that is written is one line and reads back.
func FuzzRecord(f *testing.F) {
	f.Add("x509-svid", "5d1c", "a.example.org", int64(1), []byte{192, 0, 2, 1})
	f.Add("\"}\n", "\\", "\xff", int64(-62135596800), []byte{})
	f.Add("", "", "", int64(253402300800), bytes.Repeat([]byte{0xff}, 16))
	f.Fuzz(func(t *testing.T, kind, serial, name string, at int64, ip []byte) {
		i := &ca.Issuance{Time: time.Unix(at, 5).UTC(), Kind: kind, Serial: serial, DNSNames: []string{name}, Caller: name, NotAfter: time.Unix(at, 0).UTC()}
		if len(ip) > 0 {
			i.IPs = append(i.IPs, ip)
		}
		line, err := auditlog.Line(i, [32]byte{})
		if err != nil {
			return
		}
		_, err = verify(line + "\n")
		require.NoError(t, err, "%q", line)
		var got ca.Issuance
		require.NoError(t, json.Unmarshal([]byte(line), &got))
		require.Equal(t, string([]rune(serial)), got.Serial)
	})
}
