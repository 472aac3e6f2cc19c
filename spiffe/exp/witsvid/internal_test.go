package witsvid

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"encoding/base64"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// The signed response of RFC 9421 appendix B.2.4, whose key and signature are public.
func TestSignatureBaseKnownAnswer(t *testing.T) {
	t.Parallel()
	m := &message{status: 200, request: &message{}, header: http.Header{
		"Date":           {"Tue, 20 Apr 2021 02:07:56 GMT"},
		"Content-Type":   {"application/json"},
		"Content-Digest": {"sha-512=:mEWXIS7MaLRuGgxOBdODa3xqM1XdEvxoYhvlCFJ41QJgJc4GTsPp29l5oGX69wWdXymyU0rjJuahq4l5aGgfLQ==:"},
		"Content-Length": {"23"},
	}}
	inputs, err := parseDictionary(`sig-b24=("@status" "content-type" "content-digest" "content-length");created=1618884473;keyid="test-key-ecc-p256"`)
	require.NoError(t, err)
	values, err := parseDictionary(`sig-b24=:wNmSUAhwb5LxtOtOpNa6W5xj067m5hFrj0XQ4fvpaCLx0NKocgPquLgyahnzDnDAUy5eCdlYUEkLIj+32oiasw==:`)
	require.NoError(t, err)
	base, err := m.base(inputs[0].list, inputs[0].params)
	require.NoError(t, err)
	assert.Equal(t, `"@status": 200
"content-type": application/json
"content-digest": sha-512=:mEWXIS7MaLRuGgxOBdODa3xqM1XdEvxoYhvlCFJ41QJgJc4GTsPp29l5oGX69wWdXymyU0rjJuahq4l5aGgfLQ==:
"content-length": 23
"@signature-params": ("@status" "content-type" "content-digest" "content-length");created=1618884473;keyid="test-key-ecc-p256"`, string(base))

	point := []byte{4}
	for _, c := range []string{"qIVYZVLCrPZHGHjP17CTW0_-D9Lfw0EkjqF7xB4FivA", "Mc4nN9LTDOBhfoUeg8Ye9WedFRhnZXZJA12Qp0zZ6F0"} {
		b, err := base64.RawURLEncoding.DecodeString(c)
		require.NoError(t, err)
		point = append(point, b...)
	}
	key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point)
	require.NoError(t, err)
	sig, err := values[0].value.bytes()
	require.NoError(t, err)
	require.NoError(t, token.VerifyRaw(jws.ES256, key, base, sig))

	// The digest there is that of this body.
	require.Nil(t, checkDigest(m, []byte(`{"message": "good dog"}`)))
	require.NotNil(t, checkDigest(m, []byte(`{"message": "bad dog"}`)))
}

func TestParseDictionary(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{ // "" is an error
		`a=1`:                  `a=1`,
		` a=1 `:                `a=1`,
		"a=1 \t,\t b=-2":       `a=1, b=-2`,
		`a`:                    `a`,
		`a=?1`:                 `a`,
		`a=?0`:                 `a=?0`,
		`a;x;y=?0;z=?1`:        `a;x;y=?0;z`,
		`a=()`:                 `a=()`,
		`a=( "x"  "y";q=1 );p`: `a=("x" "y";q=1);p`,
		`a=("x");  p=tok/en`:   `a=("x");p=tok/en`,
		`a="q\"\\"`:            `a="q\"\\"`,
		`a=" !~"`:              `a=" !~"`,
		`a=b!c`:                `a=b!c`,
		`a=:AAAA:`:             `a=:AAAA:`,
		`a=::`:                 `a=::`,
		`*a_-.*=*t`:            `*a_-.*=*t`,
		`a=999999999999999`:    `a=999999999999999`,
		``:                     ``,
		`,`:                    ``,
		`a=1,`:                 ``,
		`a=1 b=2`:              ``,
		`A=1`:                  ``,
		`a=`:                   ``,
		`a=1,a=2`:              ``,
		`a;x;x`:                ``,
		`a=1.5`:                ``,
		`a=1000000000000000`:   ``,
		`a=01`:                 ``,
		`a=-0`:                 ``,
		`a=-`:                  ``,
		`a=@1`:                 ``,
		`a=?2`:                 ``,
		`a="x`:                 ``,
		`a="\x"`:               ``,
		"a=\"\x00\"":           ``,
		`a="é"`:                ``,
		`a=:AAA:`:              ``,
		`a=:AA==`:              ``,
		"a=:AA\n==:":           ``,
		`a=:AB==:`:             ``,
		`a=(`:                  ``,
		`a=("x"`:               ``,
		`a=("x""y")`:           ``,
		`a=(x)`:                ``,
		`a=(1)`:                ``,
		`a=("x" ("y"))`:        ``,
		"a=1\x00":              ``,
		`a=(` + strings.TrimSuffix(strings.Repeat(`"x" `, maxItems+1), " ") + `)`: ``,
		`a` + params(maxParams+1):            ``,
		strings.Repeat("x", maxStructured+1): ``,
		dictionary(maxMembers + 1):           ``,
		dictionary(maxMembers):               dictionary(maxMembers),
		`a` + params(maxParams):              `a` + params(maxParams),
	} {
		members, err := parseDictionary(in)
		if want == "" {
			assert.Error(t, err, in)
			continue
		}
		require.NoError(t, err, in)
		assert.Equal(t, want, serialize(members), in)
	}
}

func params(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, ";p%d", i)
	}
	return b.String()
}

func dictionary(n int) string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("k%d", i))
	}
	return strings.Join(list, ", ")
}

func serialize(members []member) string {
	var b []byte
	for i, m := range members {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = append(b, m.key...)
		if m.isList {
			b = append(b, "="+formatList(m.list, m.params)...)
			continue
		}
		if m.value != yes {
			b = append(append(b, '='), m.value...)
		}
		b = append(b, formatParams(m.params)...)
	}
	return string(b)
}

// FuzzSignatureInput reads what unauthenticated clients write into Signature-Input and Signature, and looks whether what
// was read can be written in one way only.
func FuzzSignatureInput(f *testing.F) {
	for _, s := range []string{
		`wimse=("@method" "@request-target" "workload-identity-token");created=1767225600;expires=1767225660;nonce="n";tag="wimse-workload-to-workload";wimse-aud="https://db.example.org/query"`,
		`sig=("@status" "@method";req "a";b=?0;c=tok;d=-1);x, y=:AAAA:`, `a="\\\"";b`, `a=(),b=?0`, ``, `a=("@query-param";name="x")`,
	} {
		f.Add(s, `wimse=:AAAA:, sig=:AA==:`)
	}
	f.Fuzz(func(t *testing.T, input, signature string) {
		for _, s := range []string{input, signature} {
			members, err := parseDictionary(s)
			if err != nil {
				require.Less(t, len(err.Error()), 200)
				continue
			}
			text := serialize(members)
			again, err := parseDictionary(text)
			require.NoError(t, err, text)
			require.Equal(t, members, again)
			require.Equal(t, text, serialize(again))
			require.True(t, printable(text))
		}
		m := &message{method: "GET", target: "/query", header: http.Header{
			"Signature-Input": {input}, "Signature": {signature}, headerToken: {"x"}, "A": {"b"},
		}}
		s, e := readSignature(m)
		if e != nil {
			require.NotEmpty(t, e.Rule)
			return
		}
		for _, c := range m.required() {
			require.Contains(t, s.list, c)
		}
		require.NotEmpty(t, s.nonce)
		require.NotEmpty(t, s.audience)
		base, err := m.base(s.list, s.params)
		if err != nil {
			return
		}
		require.Equal(t, len(s.list), strings.Count(string(base), "\n"), "a line for each component")
	})
}

// Components with parameters, in a response and in a request.
func TestComponents(t *testing.T) {
	t.Parallel()
	request := &message{method: "GET", target: "/a?b", header: http.Header{"X": {"of the request"}}}
	response := &message{status: 404, header: http.Header{"X": {"of the response"}}, request: request}
	for in, want := range map[string]string{ // "" is an error
		`"@method";req`: "GET", `"@request-target";req`: "/a?b", `"x";req`: "of the request", `"x"`: "of the response", `"@status"`: "404",
		`"@method"`: "", `"@status";req`: "", `"@method";req;sf`: "", `"@method";sf;req`: "", `"x";sf`: "", `"@method";req=?0`: "", `"@method";req="x"`: "",
		`"y"`: "", `"y";req`: "", `""`: "", `"@query"`: "",
	} {
		members, err := parseDictionary("a=(" + in + ")")
		require.NoError(t, err)
		got, err := response.value(members[0].list[0])
		assert.Equal(t, want, got, in)
		assert.Equal(t, want == "", err != nil, in)
		if strings.Contains(in, "req") {
			_, err = request.value(members[0].list[0])
			assert.Error(t, err, in)
		}
	}
}

// What is remembered is forgotten when it is over, and costs what the documentation says.
func TestReplaysMemory(t *testing.T) {
	start := time.Unix(1767225600, 0)
	const places = 50_000
	r, one := newReplays(places), &holder{id: spiffe.MustParseID("spiffe://example.org/web")}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	fill := func(at time.Time) {
		for i := range places {
			fresh, full := r.use(one, "holder", fmt.Sprint(at, i), at, at.Add(2*time.Minute))
			require.True(t, fresh && !full)
		}
	}
	fill(start)
	runtime.GC()
	runtime.ReadMemStats(&after)
	assert.Less(t, (after.HeapAlloc-before.HeapAlloc)/places, uint64(100))
	_, full := r.use(one, "holder", "one more", start, start.Add(time.Minute))
	assert.True(t, full)
	fresh, full := r.use(one, "holder", fmt.Sprint(start, 7), start, start.Add(time.Minute))
	assert.False(t, fresh || full, "a replay is told apart even then")
	_, full = r.use(one, "holder", "one more", start.Add(119*time.Second), start.Add(3*time.Minute))
	assert.True(t, full, "nothing is forgotten before its time")
	fill(start.Add(130 * time.Second))
	assert.Len(t, r.used, places)
	assert.Len(t, r.ends, 1)
	assert.Equal(t, places, r.keys[keyName{id: one.id}].held)
	assert.Equal(t, places, r.ids[one.id])

	// A clock that goes back forgets nothing.
	fresh, _ = r.use(one, "holder", fmt.Sprint(start.Add(130*time.Second), 7), start, start.Add(time.Minute))
	assert.False(t, fresh)
	// One that jumps ahead costs no loop over the years.
	fresh, full = r.use(one, "holder", "later", start.AddDate(100, 0, 0), start.AddDate(100, 0, 1))
	assert.True(t, fresh && !full)
	assert.Len(t, r.used, 1)
}

// However many holders take all that they can get, there is room for one more, and what is remembered is bounded.
func TestReplayShares(t *testing.T) {
	t.Parallel()
	start := time.Unix(1767225600, 0)
	const each = 10_000
	one := func(id, key int) *holder {
		return &holder{id: spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/%d", id)), thumbprint: replayKey{byte(key), byte(key >> 8)}}
	}
	// flood uses proofs of the holders in turn until none is accepted any more.
	flood := func(r *replays, holders ...*holder) {
		for n, more := 0, true; more; n++ {
			more = false
			for i, h := range holders {
				_, full := r.use(h, fmt.Sprint(i), fmt.Sprint(n), start, start.Add(2*time.Minute))
				more = more || !full
			}
		}
	}
	room := func(r *replays, h *holder) (n int) {
		for full := false; ; n++ {
			if _, full = r.use(h, "good", fmt.Sprint(n), start, start.Add(2*time.Minute)); full {
				return n
			}
		}
	}
	keysOfOne := make([]*holder, 2000)
	for i := range keysOfOne {
		keysOfOne[i] = one(1, i)
	}
	var ten []*holder
	for i := range 10 {
		ten = append(ten, one(i, i))
	}
	for name, c := range map[string]struct {
		flood  []*holder
		held   int // by the flood
		others int // at least, for a holder that is not in the flood
		same   int // for another key of the ID
	}{
		"no flood":               {nil, 0, each, each},
		"one key":                {[]*holder{one(1, 1)}, each, each / 3, each / 6},
		"many keys of one ID":    {keysOfOne, each * 12 / 10, each / 5, 0},
		"ten IDs, a key of each": {ten, each * 15 / 10 * 20 / 21, each / 22, each / 22},
	} {
		r := newReplays(each)
		flood(r, c.flood...)
		assert.InDelta(t, c.held, len(r.used), 12, name)
		assert.GreaterOrEqual(t, room(r, one(99, 1))+1, c.others, name)
		r = newReplays(each)
		flood(r, c.flood...)
		assert.InDelta(t, c.same, room(r, one(1, 5000)), each/20, name)
		assert.LessOrEqual(t, len(r.used), each*3/2, name)
		fresh, full := r.use(one(98, 1), "late", "x", start.Add(3*time.Minute), start.Add(4*time.Minute))
		assert.True(t, fresh && !full)
		assert.Len(t, r.used, 1, "all else is over")
		assert.Len(t, r.keys, 1)
		assert.Len(t, r.ids, 1)
	}
}

func TestTargetPath(t *testing.T) {
	t.Parallel()
	for target, want := range map[string]string{
		"/":               "/",
		"/a?b":            "/a",
		"/a//b/":          "/a//b/",
		"/a?x=http://b/c": "/a",
		"/http://b/c":     "/http://b/c",
		"https://h/a?b":   "/a",
		"https://h":       "/",
		"https://h?b":     "/",
		"*":               "/",
		"":                "",
		"h:443":           "h:443",
	} {
		assert.Equal(t, want, targetPath(target), target)
	}
	at, err := newTargets([]string{"https://db.example.org"})
	require.NoError(t, err)
	assert.True(t, at.accept("https://db.example.org/", "*"))
	assert.True(t, at.accept("https://db.example.org", "/?x"))
	assert.True(t, at.accept("https://db.example.org/a", "https://other.test/a"), "the host in a request target plays no part")
	for _, target := range []string{"", "h:443", ":443"} { // of CONNECT
		assert.False(t, at.accept("https://db.example.org"+target, target), target)
		assert.False(t, at.accept("https://db.example.org/"+target, target), target)
	}
}
