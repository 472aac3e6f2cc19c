package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

var bundleTD = spiffe.MustParseTrustDomain("example.org")

// bundleVector is one document of testdata/bundles/index.json.
type bundleVector struct {
	ID, Rule, File, Expect, Why string
	Choice                      bool

	X509, JWT, WIT int
	Sequence       *uint64
	Hint           int64
	Skipped        []skippedVector
	BadHint        bool // it is skipped

	Offset   int
	TooLarge bool
}

type skippedVector struct {
	Index     int
	Kid, Rule string
	WIT       bool // not skipped with WIT on
}

// String is what the error of a skipped entry says.
func (v skippedVector) String() string {
	entry := fmt.Sprintf("bundle of %q, entry %d", bundleTD, v.Index)
	if v.Kid != "" {
		entry += fmt.Sprintf(" with key ID %q", v.Kid)
	}
	return entry + " " + v.Rule
}

// bundleSequence is a sequence of documents, fetched one after the other.
type bundleSequence struct {
	ID, Rule, Why string
	Files         []string
	InForce       int
	Error, Alert  bool
	Held          bool // by a consumer with memory, until the publisher has repeated it: see spiffe/federation
}

type bundleIndex struct {
	About     string
	Documents []bundleVector
	Sequences []bundleSequence
}

func readBundleFile(t testing.TB, file string) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join("testdata", "bundles", file)))(t)
}

func readBundleIndex(t testing.TB) bundleIndex {
	t.Helper()
	var index bundleIndex
	d := json.NewDecoder(bytes.NewReader(readBundleFile(t, "index.json")))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&index))
	return index
}

// Every vector of the conformance table is there, once, and every file belongs to a vector.
func TestBundleVectorsComplete(t *testing.T) {
	t.Parallel()
	index := readBundleIndex(t)
	want := []string{"KAT"}
	for _, c := range []struct {
		prefix string
		n      int
	}{{"BV", 46}, {"BX", 46}, {"BS", 6}} {
		for i := range c.n {
			want = append(want, fmt.Sprintf("%s-%02d", c.prefix, i+1))
		}
	}
	var ids []string
	files := map[string]bool{}
	for _, v := range index.Documents {
		ids, files[v.File] = append(ids, v.ID), true
		assert.NotEmpty(t, v.Why, v.ID)
	}
	for _, s := range index.Sequences {
		ids = append(ids, s.ID)
		for _, f := range s.Files {
			files[f] = true
		}
	}
	assert.ElementsMatch(t, want, ids)
	var onDisk []string
	matches := must.Get(filepath.Glob("testdata/bundles/*.json"))(t)
	for _, m := range matches {
		if f := filepath.Base(m); f != "index.json" {
			onDisk = append(onDisk, f)
		}
	}
	assert.ElementsMatch(t, onDisk, slices.Collect(maps.Keys(files)))
}

// All documents are read twice: with WIT off, as is the default, and on.
func TestBundleVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.7-9", "IST-1.7-11", "IST-1.7-14", "IST-1.7-15", "IST-1.7-16", "IST-1.7-17", "IST-1.7-18", "IST-1.7-19")
	for _, v := range readBundleIndex(t).Documents {
		for name, wit := range map[string]bool{"WIT off": false, "WIT on": true} {
			t.Run(v.ID+" "+name, func(t *testing.T) {
				t.Parallel()
				conformance.Covers(t, v.ID)
				doc := readBundleFile(t, v.File)
				parse := spiffe.ParseBundle
				if wit {
					parse = spiffe.ParseBundleWIT
				}
				b, err := parse(bundleTD, doc)
				if v.Expect == "reject" {
					e := must.As[*spiffe.ParseError](err)(t, v.Why)
					assert.Nil(t, b)
					assert.Equal(t, `bundle of "example.org"`, e.What)
					assert.Equal(t, v.Rule, e.Rule, "%v", err)
					assert.Equal(t, v.Offset, e.Offset, "%v", err)
					assert.Equal(t, v.TooLarge, errors.Is(err, spiffe.ErrTooLarge))
					return
				}
				require.Equal(t, "accept", v.Expect)
				require.NoError(t, err, v.Why)
				wits := 0
				if wit {
					wits = v.WIT
				}
				assert.Equal(t, bundleTD, b.TrustDomain())
				assert.Len(t, slices.Collect(b.X509Authorities()), v.X509)
				assert.Len(t, maps.Collect(b.JWTAuthorities()), v.JWT)
				assert.Len(t, b.Contents().WITAuthorities, wits)
				assert.Equal(t, v.Sequence, b.Contents().Sequence)
				hint, ok := b.RefreshHint()
				assert.Equal(t, v.Hint > 0, ok)
				assert.Equal(t, time.Duration(v.Hint)*time.Second, hint)

				var want, skipped []string
				if v.BadHint {
					want = append(want, fmt.Sprintf("bundle of %q BND-29", bundleTD))
				}
				for _, s := range v.Skipped {
					if !s.WIT || !wit {
						want = append(want, s.String())
					}
				}
				for _, err := range b.Skipped() {
					e := must.As[*spiffe.ParseError](err)(t)
					assert.True(t, e.Offset > 0 && e.Offset < len(doc))
					skipped = append(skipped, e.What+" "+e.Rule)
				}
				assert.Equal(t, want, skipped, "%v", b.Skipped())
				checkRoundTrip(t, b)
			})
		}
	}
}

// Documents with WIT keys, read with WIT on: the rules for JWT keys hold for them alike.
func TestParseBundleWIT(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-64", "STAB-2", "BND-12", "BND-13", "BND-14", "BND-30", "BND-32")
	m := newBundleMaterial()
	parse := func(t *testing.T, template string) (*spiffe.Bundle, error) {
		t.Helper()
		return spiffe.ParseBundleWIT(bundleTD, []byte(m.document(t, template)))
	}
	for name, c := range map[string]struct {
		template string
		wit      []string // key IDs
		skipped  []skippedVector
	}{
		"BND-12 other use":        {`{"keys":[{"use":"wit","kid":"a",«W1»},{"use":"wit-svid","kid":"b",«W1»}]}`, []string{"b"}, []skippedVector{{0, "a", "BND-12", false}}},
		"BND-13 upper case":       {`{"keys":[{"use":"WIT-SVID","kid":"a",«W1»}]}`, nil, []skippedVector{{0, "a", "BND-13", false}}},
		"BND-14 unknown type":     {`{"keys":[{"use":"wit-svid","kid":"a","kty":"AKP","pub":"AA"},{"use":"wit-svid","kid":"b",«J2»}]}`, []string{"b"}, []skippedVector{{0, "a", "BND-14", false}}},
		"BND-30 no key ID":        {`{"keys":[{"use":"wit-svid",«W1»},{"use":"wit-svid","kid":"",«W1»},{"use":"wit-svid","kid":"b",«W1»}]}`, []string{"b"}, []skippedVector{{0, "", "BND-30", false}, {1, "", "BND-30", false}}},
		"BND-32 Ed25519":          {`{"keys":[{"use":"wit-svid","kid":"ed",«Ed»},{"use":"wit-svid","kid":"b",«J4»}]}`, []string{"b"}, []skippedVector{{0, "ed", "BND-32", false}}},
		"the same entry twice":    {`{"keys":[{"use":"wit-svid","kid":"b",«W1»},{"use":"wit-svid","kid":"a",«J3»},{"use":"wit-svid","kid":"b",«W1»}]}`, []string{"a", "b"}, nil},
		"one key under two names": {`{"keys":[{"use":"wit-svid","kid":"b",«W1»},{"use":"wit-svid","kid":"a",«W1»}]}`, []string{"a", "b"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := must.Get(parse(t, c.template))(t)
			assert.Equal(t, c.wit, slices.Sorted(maps.Keys(b.Contents().WITAuthorities)))
			assert.Empty(t, maps.Collect(b.JWTAuthorities()))
			var want, skipped []string
			for _, s := range c.skipped {
				want = append(want, s.String())
			}
			for _, err := range b.Skipped() {
				e := must.As[*spiffe.ParseError](err)(t)
				skipped = append(skipped, e.What+" "+e.Rule)
			}
			assert.Equal(t, want, skipped)
			checkRoundTrip(t, b)
			plain := must.Get(spiffe.ParseBundle(bundleTD, []byte(m.document(t, c.template))))(t)
			assert.True(t, plain.Equal(mustBundle(t, bundleTD, spiffe.BundleContents{})), "WIT-64")
		})
	}

	// Two keys of one ID: ParseBundle does not look at them.
	const clash = `{"keys":[{"use":"wit-svid","kid":"k",«W1»},{"use":"jwt-svid","kid":"k",«J1»},{"use":"wit-svid","kid":"k",«J3»}]}`
	_, err := parse(t, clash)
	e := must.As[*spiffe.ParseError](err)(t)
	assert.Equal(t, "BND-30", e.Rule)
	assert.Equal(t, `two different keys have the key ID "k"`, e.Reason)
	assert.Equal(t, strings.LastIndex(m.document(t, clash), `{"use"`), e.Offset)
	b := must.Get(spiffe.ParseBundle(bundleTD, []byte(m.document(t, clash))))(t)
	assert.Len(t, maps.Collect(b.JWTAuthorities()), 1)

	_, err = spiffe.ParseBundleWIT(spiffe.TrustDomain{}, []byte(`{"keys":[]}`))
	require.ErrorIs(t, err, spiffe.ErrZero)
}

// checkRoundTrip marshals and parses b, and checks what the standards say about documents.
func checkRoundTrip(t *testing.T, b *spiffe.Bundle) {
	t.Helper()
	doc := must.Get(b.Marshal())(t)
	again := must.Get(spiffe.ParseBundleWIT(b.TrustDomain(), doc))(t)
	assert.True(t, b.Equal(again), "%s", doc)
	assert.Empty(t, again.Skipped())
	doc2 := must.Get(again.Marshal())(t)
	assert.Equal(t, string(doc), string(doc2), "the bytes are stable")
	checkDocument(t, b, doc)
}

// checkDocument looks at a document with encoding/json, which knows nothing of bundles.
func checkDocument(t *testing.T, b *spiffe.Bundle, doc []byte) {
	t.Helper()
	var d map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(doc, &d))
	n, hasSequence := b.Sequence()
	hint, hasHint := b.RefreshHint()
	want := []string{"keys"}
	if hasSequence {
		want = append(want, "spiffe_sequence")
		assert.Equal(t, fmt.Sprint(n), string(d["spiffe_sequence"])) // BND-17
	}
	if hasHint {
		want = append(want, "spiffe_refresh_hint")
		assert.Equal(t, fmt.Sprint(int64(hint/time.Second)), string(d["spiffe_refresh_hint"])) // BND-20
	}
	assert.ElementsMatch(t, want, slices.Collect(maps.Keys(d)))

	members := map[string][]string{"EC": {"crv", "x", "y"}, "RSA": {"n", "e"}, "OKP": {"crv", "x"}}
	var keys []map[string]any
	require.NoError(t, json.Unmarshal(d["keys"], &keys))
	require.NotNil(t, keys) // [] and not null
	kids := map[string][]string{}
	certs := slices.Collect(b.X509Authorities())
	for i, k := range keys {
		want := append([]string{"use", "kty"}, members[k["kty"].(string)]...) // BND-24
		if i < len(certs) {
			assert.Equal(t, "x509-svid", k["use"]) // X5-51
			var c struct {
				Keys []struct{ X5c [][]byte }
			}
			require.NoError(t, json.Unmarshal(doc, &c))
			assert.Equal(t, [][]byte{certs[i].Raw}, c.Keys[i].X5c) // X5-53
			want = append(want, "x5c")                             // and no kid: X5-52
		} else {
			use := k["use"].(string)
			kids[use], want = append(kids[use], k["kid"].(string)), append(want, "kid") // JWT-35, WIT-60
		}
		assert.ElementsMatch(t, want, slices.Collect(maps.Keys(k)))
	}
	uses := map[string][]string{}
	for use, keys := range map[string]map[string]crypto.PublicKey{"jwt-svid": b.Contents().JWTAuthorities, "wit-svid": b.Contents().WITAuthorities} {
		if len(keys) > 0 {
			uses[use] = slices.Sorted(maps.Keys(keys))
		}
	}
	assert.Equal(t, uses, kids)
}

// What we publish is the known-answer document; with WIT off, but for the WIT entry.
func TestBundleKnownAnswer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-60", "IST-1.7-7", "IST-1.7-18")
	kat := readBundleFile(t, "KAT.json")
	whole := must.Get(spiffe.ParseBundleWIT(bundleTD, kat))(t)
	doc := must.Get(whole.Marshal())(t)
	assert.Equal(t, strings.TrimSuffix(string(kat), "\n"), string(doc))
	wit := whole.Contents().WITAuthorities["wit-1"]
	assert.True(t, bundleKey(elliptic.P256(), "spiffe-kat-wit1").PublicKey.Equal(wit))

	b := must.Get(spiffe.ParseBundle(bundleTD, kat))(t)
	doc = must.Get(b.Marshal())(t)
	without, _, ok := bytes.Cut(kat, []byte(`,{"use":"wit-svid"`))
	require.True(t, ok)
	assert.Equal(t, string(without)+"]}", string(doc))

	root := readBundleFile(t, "kat-ca1.pem")
	assert.Equal(t, string(root), string(b.MarshalPEM()))
	key, ok := b.JWTAuthority("jwt-1")
	require.True(t, ok)
	assert.True(t, bundleKey(elliptic.P256(), "spiffe-kat-jwt1").PublicKey.Equal(key))
}

// A consumer as the comments of ParseBundle and Supersedes describe it.
func TestBundleSequences(t *testing.T) {
	t.Parallel()
	leaf := bundleLeaf()
	trusted := func(b *spiffe.Bundle) bool {
		_, err := leaf.Verify(x509.VerifyOptions{
			Roots: b.CertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
			CurrentTime: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		})
		return err == nil
	}
	for _, s := range readBundleIndex(t).Sequences {
		t.Run(s.ID, func(t *testing.T) {
			t.Parallel()
			var current *spiffe.Bundle
			var failed, alert bool
			for _, f := range s.Files {
				b, err := spiffe.ParseBundle(bundleTD, readBundleFile(t, f))
				switch {
				case err != nil:
					failed = true
				case b.Supersedes(current):
					if current != nil && !b.Equal(current) {
						old, ok := current.Sequence()
						n, ok2 := b.Sequence()
						alert = ok && ok2 && old == n
					}
					current = b
				default:
					alert = true
				}
			}
			assert.Equal(t, s.Error, failed)
			assert.Equal(t, s.Alert, alert)
			want := must.Get(spiffe.ParseBundle(bundleTD, readBundleFile(t, s.Files[s.InForce])))(t)
			assert.True(t, current.Equal(want), s.Why)

			first := must.Get(spiffe.ParseBundle(bundleTD, readBundleFile(t, s.Files[0])))(t)
			assert.True(t, trusted(first), "CA1 is in the first document")
			assert.Equal(t, s.InForce == 0, trusted(current), s.Why)
		})
	}
}

func TestParseBundleZeroTrustDomain(t *testing.T) {
	t.Parallel()
	_, err := spiffe.ParseBundle(spiffe.TrustDomain{}, []byte(`{"keys":[]}`))
	require.ErrorIs(t, err, spiffe.ErrZero)
	_, err = spiffe.ParseBundlePEM(spiffe.TrustDomain{}, readBundleFile(t, "kat-ca1.pem"))
	require.ErrorIs(t, err, spiffe.ErrZero)
}

func TestBundleParseErrorText(t *testing.T) {
	t.Parallel()
	_, err := spiffe.ParseBundle(bundleTD, []byte(`{"keys":{}}`))
	require.EqualError(t, err, `spiffe: invalid bundle of "example.org" at byte 8: "keys" is not an array`)
	_, err = spiffe.ParseBundle(bundleTD, bytes.Repeat([]byte(" "), jws.MaxSetSize+1))
	require.EqualError(t, err, `spiffe: invalid bundle of "example.org" at byte 1048576: longer than 1048576 bytes: input too large`)

	b := must.Get(spiffe.ParseBundle(bundleTD, readBundleFile(t, "BV-12.json")))(t)
	require.Len(t, b.Skipped(), 1)
	require.EqualError(t, b.Skipped()[0], `spiffe: invalid bundle of "example.org", entry 0 with key ID "pq" at byte 9: "alg" and "pub" are not those of ML-DSA-44 or ML-DSA-65, which need a program built with Go 1.27`)

	// Hostile text is cut: key IDs, and what crypto/x509 quotes.
	long := strings.Repeat("k", 5000)
	b, err = spiffe.ParseBundle(bundleTD, fmt.Appendf(nil, `{"keys":[{"use":"%s","kid":"%s","kty":"%s"},{"use":"jwt-svid","kid":"%s","kty":"%s"}]}`, long, long, long, long, long))
	require.NoError(t, err)
	require.Len(t, b.Skipped(), 2)
	for _, err := range b.Skipped() {
		assert.Less(t, len(err.Error()), 600)
	}
	cause := &spiffe.ParseError{What: "bundle", Reason: "why", Rule: "X", Err: errors.New(strings.Repeat("é", 5000))}
	assert.Less(t, len(cause.Error()), 400)
	assert.True(t, strings.HasSuffix(cause.Error(), "é…"), cause.Error())
}

// The result of ParseBundle keeps nothing of the document, which may be a reused buffer.
func TestParseBundleKeepsNothing(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"KAT.json", "BX-01.json", "BX-11.json", "BX-14.json"} {
		doc := readBundleFile(t, file)
		before := bytes.Clone(doc)
		b := must.Get(spiffe.ParseBundle(bundleTD, doc))(t)
		assert.Equal(t, before, doc, "the document was changed")
		want := must.Get(b.Marshal())(t)
		skipped := fmt.Sprint(b.Skipped())
		clear(doc)
		got := must.Get(b.Marshal())(t)
		assert.Equal(t, string(want), string(got))
		assert.Equal(t, skipped, fmt.Sprint(b.Skipped()))
	}
}

func TestBundleLimits(t *testing.T) {
	t.Parallel()
	entries := func(n int) []byte {
		return []byte(`{"keys":[` + strings.TrimSuffix(strings.Repeat(`{"use":"sig"},`, n), ",") + `]}`)
	}
	b := must.Get(spiffe.ParseBundle(bundleTD, entries(jws.MaxSetKeys)))(t)
	assert.Len(t, b.Skipped(), jws.MaxSetKeys)
	_, err := spiffe.ParseBundle(bundleTD, entries(jws.MaxSetKeys+1))
	require.ErrorIs(t, err, spiffe.ErrTooLarge)

	pad := func(n int) []byte {
		const empty = `{"keys":[]}`
		return append([]byte(empty), bytes.Repeat([]byte(" "), n-len(empty))...)
	}
	must.Get(spiffe.ParseBundle(bundleTD, pad(jws.MaxSetSize)))(t)
	_, err = spiffe.ParseBundle(bundleTD, pad(jws.MaxSetSize+1))
	require.ErrorIs(t, err, spiffe.ErrTooLarge)

	// What cannot be read back is not written: 1,000 keys of 8192 bits are too much.
	keys := map[string]crypto.PublicKey{}
	wide := must.Get(spiffe.ParseBundle(bundleTD, readBundleFile(t, "BX-12.json")))(t)
	key, ok := wide.JWTAuthority("8192")
	require.True(t, ok)
	for i := range jws.MaxSetKeys {
		keys[fmt.Sprint(i)] = key
	}
	full := must.Get(spiffe.NewBundle(bundleTD, spiffe.BundleContents{JWTAuthorities: keys}))(t)
	_, err = full.Marshal()
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
}

// Documents of a megabyte that are made to be expensive. Not parallel: it counts memory.
func TestParseBundleHostile(t *testing.T) {
	fill := func(before, unit, after string) string {
		n := (jws.MaxSetSize - len(before) - len(after)) / len(unit)
		return before + strings.Repeat(unit, n) + after
	}
	names := func(format string) string {
		var s strings.Builder
		s.WriteString(`{"keys":[]`)
		for i := 0; s.Len() < jws.MaxSetSize-16; i++ {
			fmt.Fprintf(&s, format, i)
		}
		return s.String() + "}"
	}
	m := newBundleMaterial()
	const tooLarge, refused, accepted = "too large", "refused", "accepted"
	for name, c := range map[string]struct{ doc, want string }{
		"nested arrays":        {fill(`{"keys":`, "[", ""), tooLarge},
		"nested in a key":      {fill(`{"keys":[{"a":`, `[`, ""), tooLarge},
		"nested objects":       {fill("", `{"a":`, ""), tooLarge},
		"100,000 keys":         {fill(`{"keys":[`, `{},`, `{}]}`), tooLarge},
		"numbers for keys":     {fill(`{"keys":[`, `1,`, `1]}`), tooLarge},
		"flat arrays":          {fill(`{"keys":[],"a":[`, `[],`, `[]]}`), accepted},
		"wide names":           {names(`,"%x":1`), tooLarge},
		"escaped names":        {names(`,"\u0061%x":1`), tooLarge},
		"the same name":        {fill(`{"keys":[]`, `,"a":1`, `}`), refused},
		"a huge number":        {fill(`{"keys":[],"a":1`, `0`, `}`), accepted},
		"a huge sequence":      {fill(`{"keys":[],"spiffe_sequence":1`, `0`, `}`), refused},
		"a huge hint":          {fill(`{"keys":[],"spiffe_refresh_hint":1`, `0`, `}`), accepted},
		"a huge string":        {fill(`{"keys":[],"a":"`, `\n`, `"}`), accepted},
		"a string cut off":     {fill(`{"keys":[],"a":"`, `\u00e9`, ``), refused},
		"a huge key ID":        {fill(`{"keys":[{"use":"jwt-svid","kid":"`, `k`, `","kty":"EC"}]}`), accepted},
		"a huge modulus":       {fill(`{"keys":[{"use":"jwt-svid","kid":"k","kty":"RSA","e":"AQAB","n":"`, `A`, `"}]}`), accepted},
		"a huge exponent":      {fill(`{"keys":[{"use":"jwt-svid","kid":"k","kty":"RSA","n":"AQAB","e":"`, `A`, `"}]}`), accepted},
		"a huge coordinate":    {fill(`{"keys":[{"use":"jwt-svid","kid":"k","kty":"EC","crv":"P-256","y":"","x":"`, `A`, `"}]}`), accepted},
		"a huge certificate":   {fill(`{"keys":[{"use":"x509-svid","kty":"EC","x5c":["`, `AAAA`, `"]}]}`), accepted},
		"many x5c values":      {fill(`{"keys":[{"use":"x509-svid","kty":"EC","x5c":["`+m.expand["der:CA1"]+`"`, `,"AAAA"`, `]}]}`), accepted},
		"white space":          {fill(`{"keys":[]}`, "\r\n\t ", ``), accepted},
		"not UTF-8 at the end": {fill(`{"keys":[]}`, " ", "\xff"), refused},
	} {
		t.Run(name, func(t *testing.T) {
			require.LessOrEqual(t, len(c.doc), jws.MaxSetSize)
			require.Greater(t, len(c.doc), jws.MaxSetSize-100)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := spiffe.ParseBundle(bundleTD, []byte(c.doc))
			runtime.ReadMemStats(&after)
			switch c.want {
			case accepted:
				require.NoError(t, err)
			case refused:
				require.Error(t, err)
				require.NotErrorIs(t, err, spiffe.ErrTooLarge)
			default:
				require.ErrorIs(t, err, spiffe.ErrTooLarge)
			}
			// All that was allocated, garbage and the copy of the document included.
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(8<<20))
		})
	}
}

func FuzzParseBundle(f *testing.F) {
	for _, v := range readBundleIndex(f).Documents {
		f.Add(readBundleFile(f, v.File))
	}
	f.Add(must.Get(os.ReadFile("testdata/quantum/bundle.json"))(f))
	f.Fuzz(func(t *testing.T, doc []byte) {
		plain, plainErr := spiffe.ParseBundle(bundleTD, doc)
		b, err := spiffe.ParseBundleWIT(bundleTD, doc)
		if plainErr != nil {
			require.Error(t, err)
		} else {
			require.Empty(t, plain.Contents().WITAuthorities)
		}
		if err != nil {
			e := must.As[*spiffe.ParseError](err)(t)
			require.True(t, e.Offset >= 0 && e.Offset <= len(doc) && e.Rule != "" && e.Reason != "", "%+v", e)
			return
		}
		if !json.Valid(doc) {
			t.Fatalf("accepted what is not JSON: %q", doc)
		}
		out := must.Get(b.Marshal())(t)
		require.LessOrEqual(t, len(out), len(doc)+2)
		again := must.Get(spiffe.ParseBundleWIT(bundleTD, out))(t)
		require.True(t, b.Equal(again))
		require.Empty(t, again.Skipped())

		// But for WIT, it is the same bundle.
		c := b.Contents()
		c.WITAuthorities = nil
		without := must.Get(spiffe.NewBundle(bundleTD, c))(t)
		require.True(t, without.Equal(plain))

		// The parts are good for NewBundle, which checks by itself.
		for id := range b.Contents().WITAuthorities {
			if _, ok := b.JWTAuthority(id); ok {
				return // tolerated in what others publish (WIT-61)
			}
		}
		built := must.Get(spiffe.NewBundle(bundleTD, b.Contents()))(t)
		require.True(t, built.Equal(b))
	})
}

// benchmarkBundle has n authorities, every second one for JWT.
func benchmarkBundle(tb testing.TB, n int) *spiffe.Bundle {
	tb.Helper()
	c := spiffe.BundleContents{Sequence: new(uint64(7)), RefreshHint: 5 * time.Minute, JWTAuthorities: map[string]crypto.PublicKey{}}
	for i := range n {
		key := bundleKey(elliptic.P256(), fmt.Sprint("benchmark ", i))
		if i%2 == 0 {
			c.X509Authorities = append(c.X509Authorities, bundleCert(key.Public(), key, int64(i+1), ""))
		} else {
			c.JWTAuthorities[fmt.Sprintf("key-%03d", i)] = key.Public()
		}
	}
	return must.Get(spiffe.NewBundle(bundleTD, c))(tb)
}

func TestMaxRefreshHint(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.7-19")
	const longest = math.MaxInt64 / time.Second * time.Second
	b := must.Get(spiffe.NewBundle(bundleTD, spiffe.BundleContents{RefreshHint: longest}))(t)
	checkRoundTrip(t, b)
}

// A refresh hint that is no number of seconds does not concern who is trusted: it is reported, and counts as absent.
func TestUnusableHint(t *testing.T) {
	t.Parallel()
	for _, hint := range []string{"null", "300.0", "3e2", `"300"`, "[300]", `{"a":1}`, "true", "9223372036854775807"} {
		b, err := spiffe.ParseBundle(bundleTD, []byte(`{"spiffe_sequence":7,"spiffe_refresh_hint":`+hint+`,"keys":[]}`))
		require.NoError(t, err, hint)
		_, ok := b.RefreshHint()
		assert.False(t, ok, hint)
		n, _ := b.Sequence()
		assert.Equal(t, uint64(7), n)
		skipped := b.Skipped()
		require.Len(t, skipped, 1, hint)
		assert.ErrorContains(t, skipped[0], `"spiffe_refresh_hint" is `, hint)
		assert.ErrorContains(t, skipped[0], "; it counts as absent", hint)
	}
}
