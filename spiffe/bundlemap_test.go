package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/elliptic"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// mapVector is one document of testdata/bundlemaps/index.json.
type mapVector struct {
	ID, Rule, File, Expect, Why string
	Domains                     []string
}

func readMapFile(t testing.TB, file string) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join("testdata", "bundlemaps", file)))(t)
}

func readMapIndex(t testing.TB) []mapVector {
	t.Helper()
	var index struct {
		About     string
		Documents []mapVector
	}
	d := json.NewDecoder(bytes.NewReader(readMapFile(t, "index.json")))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&index))
	return index.Documents
}

func mapDomains(set *spiffe.BundleSet) []string {
	names := []string{}
	for b := range set.All() {
		names = append(names, b.TrustDomain().String())
	}
	return names
}

// Every vector of the conformance table is there, once, and every file belongs to a vector.
func TestBundleMapVectorsComplete(t *testing.T) {
	t.Parallel()
	want := []string{"MV-10-old", "MV-10-new"}
	for i := range 9 {
		want = append(want, fmt.Sprintf("MV-%02d", i+1))
	}
	for i := range 16 {
		want = append(want, fmt.Sprintf("MX-%02d", i+1))
	}
	var ids, files []string
	for _, v := range readMapIndex(t) {
		ids, files = append(ids, v.ID), append(files, filepath.Join("testdata", "bundlemaps", v.File))
		assert.NotEmpty(t, v.Why, v.ID)
	}
	assert.ElementsMatch(t, want, ids)
	onDisk := must.Get(filepath.Glob("testdata/bundlemaps/M*.json"))(t)
	assert.ElementsMatch(t, files, onDisk)
}

func TestBundleMapVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "MV-01", "MV-02", "MV-03", "MV-04", "MV-05", "MV-06", "MV-07", "MV-08", "MV-09", "MAP-1", "MAP-2", "MAP-4", "MAP-10")
	for _, v := range readMapIndex(t) {
		t.Run(v.ID, func(t *testing.T) {
			t.Parallel()
			doc := readMapFile(t, v.File)
			set, err := spiffe.ParseBundleMap(doc)
			if v.Expect == "reject" {
				e := must.As[*spiffe.ParseError](err)(t, v.Why)
				assert.Nil(t, set, "nothing of a refused map is applied")
				assert.Equal(t, v.Rule, e.Rule, "%v", err)
				assert.True(t, e.Offset >= 0 && e.Offset <= len(doc), "%v", err)
				return
			}
			require.Equal(t, "accept", v.Expect)
			require.NoError(t, err, v.Why)
			assert.Equal(t, v.Domains, mapDomains(set))
			for b := range set.All() {
				_, hint := b.RefreshHint()
				assert.False(t, hint, "a member's hint must not get any further (MAP-6)")
			}
			checkMapRoundTrip(t, set)
		})
	}
}

// A map is the state of the world: what is not in the next one is gone.
func TestBundleMapStateOfTheWorld(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "MV-10", "MAP-7", "MAP-8")
	other := spiffe.MustParseTrustDomain("other.test")
	before := must.Get(spiffe.ParseBundleMap(readMapFile(t, "MV-10-old.json")))(t)
	b := must.Get(before.Bundle(other))(t)
	n, ok := b.Sequence()
	assert.True(t, ok)
	assert.Equal(t, uint64(3), n, "each member has its own sequence number")

	after := must.Get(spiffe.ParseBundleMap(readMapFile(t, "MV-10-new.json")))(t)
	_, err := after.Bundle(other)
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	assert.Equal(t, 1, after.Len())
}

func checkMapRoundTrip(t *testing.T, set *spiffe.BundleSet) {
	t.Helper()
	doc := must.Get(set.Marshal())(t)
	again := must.Get(spiffe.ParseBundleMap(doc))(t)
	assert.True(t, set.Equal(again), "%s", doc)
	doc2 := must.Get(again.Marshal())(t)
	assert.Equal(t, string(doc), string(doc2), "the bytes are stable")
}

// mapBundle is a bundle with an authority of each kind.
func mapBundle(t testing.TB, td string, hint time.Duration) *spiffe.Bundle {
	t.Helper()
	c := benchmarkBundle(t, 2).Contents()
	c.RefreshHint = hint
	return mustBundle(t, spiffe.MustParseTrustDomain(td), c)
}

func TestBundleMapMarshal(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "MAP-3", "MAP-5", "MAP-9", "FED-15")
	a, b := mapBundle(t, "b.test", 300*time.Second), mapBundle(t, "a.test", 0)
	_, err := spiffe.NewBundleSet(a, b, a)
	require.ErrorContains(t, err, "two bundles", "MAP-3")
	set := must.Get(spiffe.NewBundleSet(a, b))(t)
	doc := must.Get(set.Marshal())(t)
	assert.NotContains(t, string(doc), "hint", "MAP-5")

	var judge struct {
		Domains map[string]json.RawMessage `json:"trust_domains"`
	}
	require.NoError(t, json.Unmarshal(doc, &judge))
	assert.ElementsMatch(t, []string{"a.test", "b.test"}, slices.Collect(maps.Keys(judge.Domains)))
	assert.Less(t, bytes.Index(doc, []byte("a.test")), bytes.Index(doc, []byte("b.test")), "sorted")
	member := must.Get(b.Marshal())(t)
	assert.Equal(t, string(member), string(judge.Domains["a.test"]), "a member is a bundle document")

	again := must.Get(spiffe.ParseBundleMap(doc))(t)
	got := must.Get(again.Bundle(a.TrustDomain()))(t)
	want := a.Contents()
	want.RefreshHint = 0
	assert.True(t, got.Equal(mustBundle(t, a.TrustDomain(), want)), "all but the hint")

	doc = must.Get(new(spiffe.BundleSet).Marshal())(t)
	assert.Equal(t, `{"trust_domains":{}}`, string(doc))

	p224 := bundleKey(elliptic.P224(), "svidkit-bundle-ca224")
	odd := mustBundle(t, bundleTD, spiffe.BundleContents{X509Authorities: a.Contents().X509Authorities})
	c := odd.Contents()
	c.X509Authorities = append(c.X509Authorities, bundleCert(p224.Public(), p224, 3, ""))
	_, err = set.With(mustBundle(t, bundleTD, c)).Marshal()
	require.ErrorContains(t, err, "cannot hold its kind of key")
}

// A bundle that was read is published as it is, with a refresh hint or without: that two of its keys have
// one ID is its publisher's fault, and tolerated (WIT-61).
func TestBundleMapMarshalTolerates(t *testing.T) {
	t.Parallel()
	for _, hint := range []string{"", `"spiffe_refresh_hint":300,`} {
		doc := strings.Replace(string(readBundleFile(t, "KAT.json")), `"spiffe_refresh_hint":300,`, hint, 1)
		doc = strings.Replace(doc, `"kid":"wit-1"`, `"kid":"jwt-1"`, 1)
		b := must.Get(spiffe.ParseBundleWIT(bundleTD, []byte(doc)))(t)
		require.Contains(t, b.Contents().WITAuthorities, "jwt-1")
		set := must.Get(spiffe.NewBundleSet(b))(t)
		_, err := set.Marshal()
		assert.NoError(t, err)
	}
}

// What is written can be read: WIT keys, which a reader skips, count for it as for the writer.
func TestBundleMapMarshalCountsAllKeys(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	key := bundleKey(elliptic.P256(), "svidkit-bundle-wit").Public()
	c := spiffe.BundleContents{WITAuthorities: map[string]crypto.PublicKey{}}
	for i := range jws.MaxSetKeys {
		c.WITAuthorities[fmt.Sprint(i)] = key
	}
	set := new(spiffe.BundleSet)
	full := set
	for i := range 100_000/jws.MaxSetKeys + 1 {
		full, set = set, set.With(mustBundle(t, spiffe.MustParseTrustDomain(fmt.Sprintf("%d.test", i)), c))
	}
	_, err := set.Marshal()
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	doc := must.Get(full.Marshal())(t)
	_, err = spiffe.ParseBundleMap(doc)
	assert.NoError(t, err)
}

func TestBundleMapErrorText(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]string{
		`{}`:                     `spiffe: invalid bundle map at byte 0: the member "trust_domains" is missing`,
		`{"trust_domains":[]}`:   `spiffe: invalid bundle map at byte 17: "trust_domains" is not an object`,
		`{"trust_domains":{}} x`: `spiffe: invalid bundle map at byte 21: something follows the document`,
		`{"trust_domains":{"a.test":{"keys":{}}}}`:                        `spiffe: invalid bundle map at byte 35: a member is not a bundle document: invalid bundle of "a.test" at byte 35: "keys" is not an array`,
		`{"trust_domains":{"a.test":{"keys":[]},"a.test":{"keys":[]}}}`:   `spiffe: invalid bundle map at byte 48: the member "a.test" occurs twice`,
		`{"trust_domains":{"A.test":{"keys":[]}}}`:                        `spiffe: invalid bundle map at byte 27: the name of a member is not that of a trust domain: invalid trust domain "A.test" at byte 0: upper case is not allowed in a trust domain name`,
		`{"trust_domains":{"` + strings.Repeat("x", 4000) + `":{"a":1}}}`: `longer than 255 bytes`,
	} {
		_, err := spiffe.ParseBundleMap([]byte(doc))
		require.ErrorContains(t, err, want)
		assert.Less(t, len(err.Error()), 1000)
	}
	_, err := spiffe.ParseBundleMap([]byte(`{"trust_domains":{"a.test":{"keys":{}}}}`))
	me := must.As[*spiffe.ParseError](err)(t)
	assert.Equal(t, "MAP-10", me.Rule)
	be := must.As[*spiffe.ParseError](me.Err)(t)
	assert.Equal(t, "BND-9", be.Rule)
	assert.Equal(t, 35, be.Offset, "counted in the map")

	doc := []byte(`{"trust_domains":{"a.test":{"keys":[{"use":"sig"}]}}}`)
	set := must.Get(spiffe.ParseBundleMap(doc))(t)
	b := must.Get(set.Bundle(spiffe.MustParseTrustDomain("a.test")))(t)
	require.Len(t, b.Skipped(), 1)
	be = must.As[*spiffe.ParseError](b.Skipped()[0])(t)
	assert.Equal(t, bytes.Index(doc, []byte(`{"use"`)), be.Offset)
}

func TestParseBundleMapKeepsNothing(t *testing.T) {
	t.Parallel()
	set := must.Get(spiffe.NewBundleSet(mapBundle(t, "a.test", 0), mapBundle(t, "b.test", 0)))(t)
	doc := must.Get(set.Marshal())(t)
	before := bytes.Clone(doc)
	got := must.Get(spiffe.ParseBundleMap(doc))(t)
	assert.Equal(t, before, doc, "the document was changed")
	clear(doc)
	assert.True(t, set.Equal(got))
	assert.Equal(t, []string{"a.test", "b.test"}, mapDomains(got))
}

// manyDomains is a map of n members.
func manyDomains(n int, member string) []byte {
	doc := []byte(`{"trust_domains":{`)
	for i := range n {
		if i > 0 {
			doc = append(doc, ',')
		}
		doc = fmt.Appendf(doc, `"td-%d.test":%s`, i, member)
	}
	return append(doc, "}}"...)
}

// The limits, and maps that are made to be expensive. Not parallel: it counts memory.
func TestParseBundleMapHostile(t *testing.T) {
	rounds.NotShort(t)
	conformance.Covers(t, "BND-33")
	keys := func(n int) string { return `{"keys":[` + strings.TrimSuffix(strings.Repeat(`{},`, n), ",") + `]}` }
	const most = 16 << 20
	size := rounds.Of(rounds.Of(most / 16))
	fill := func(size int, before, unit, after string) []byte {
		n := (size - len(before) - len(after)) / len(unit)
		return slices.Concat([]byte(before), bytes.Repeat([]byte(unit), n), []byte(after))
	}
	const tooLarge, refused, accepted = "too large", "refused", "accepted"
	for name, c := range map[string]struct {
		doc  []byte
		want string
	}{
		"as many domains as allowed": {manyDomains(4096, `{"keys":[]}`), accepted},
		"one domain more":            {manyDomains(4096+1, `{"keys":[]}`), tooLarge},
		"as many keys as allowed":    {manyDomains(100, keys(1000)), accepted},
		"more keys":                  {manyDomains(101, keys(1000)), tooLarge},
		"too many keys in one":       {manyDomains(1, keys(100_000)), tooLarge},
		"as long as allowed":         {fill(most, `{"trust_domains":{}`, " ", "}"), accepted},
		"one byte longer":            {make([]byte, most+1), tooLarge},
		"a member too long":          {fill(most/4, `{"trust_domains":{"a.test":{"keys":[]`, " ", "}}}"), tooLarge},
		"nested":                     {fill(size, `{"trust_domains":{"a.test":`, "[", ""), tooLarge},
		"the same name":              {fill(size, `{"trust_domains":{"a.test":{}`, `,"a.test":{}`, "}}"), refused},
		"a long name":                {fill(size, `{"trust_domains":{"`, "a", `":{}}}`), refused},
		"wide":                       {fill(size, `{"trust_domains":{},"a":[1`, ",1", "]}"), accepted},
		"not UTF-8 at the end":       {fill(size, `{"trust_domains":{}`, " ", "\xff"), refused},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := spiffe.ParseBundleMap(c.doc)
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
			// All that was allocated, garbage included: a map that is full of keys that cannot be used
			// costs a fault for each.
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(96<<20))
		})
	}

	// What cannot be read back is not written.
	bundles := make([]*spiffe.Bundle, 0, 4096+1)
	for i := range 4096 + 1 {
		bundles = append(bundles, mustBundle(t, spiffe.MustParseTrustDomain(fmt.Sprintf("td-%d.test", i)), spiffe.BundleContents{}))
	}
	set := must.Get(spiffe.NewBundleSet(bundles...))(t)
	_, err := set.Marshal()
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
	set = must.Get(spiffe.NewBundleSet(bundles[:4096]...))(t)
	must.Get(set.Marshal())(t)
}

func FuzzParseBundleMap(f *testing.F) {
	for _, v := range readMapIndex(f) {
		f.Add(readMapFile(f, v.File))
	}
	for _, v := range readBundleIndex(f).Documents[:10] {
		f.Add(fmt.Appendf(nil, `{"trust_domains":{"example.org":%s}}`, readBundleFile(f, v.File)))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		set, err := spiffe.ParseBundleMap(doc)
		if err != nil {
			e := must.As[*spiffe.ParseError](err)(t)
			require.True(t, e.Offset >= 0 && e.Offset <= len(doc) && e.Rule != "" && e.Reason != "", "%+v", e)
			return
		}
		if !json.Valid(doc) {
			t.Fatalf("accepted what is not JSON: %q", doc)
		}
		out := must.Get(set.Marshal())(t)
		again := must.Get(spiffe.ParseBundleMap(out))(t)
		require.True(t, set.Equal(again))
		for b := range set.All() {
			// Each member is what it would be alone, but for the hint.
			var judge struct {
				Domains map[string]json.RawMessage `json:"trust_domains"`
			}
			require.NoError(t, json.Unmarshal(doc, &judge))
			alone := must.Get(spiffe.ParseBundle(b.TrustDomain(), judge.Domains[b.TrustDomain().String()]))(t)
			c := alone.Contents()
			c.RefreshHint = 0
			want := must.Get(spiffe.NewBundle(b.TrustDomain(), c))(t)
			require.True(t, want.Equal(b))
		}
	})
}

// A control plane reads the bundles of all domains that it federates with from one document.
func ExampleParseBundleMap() {
	set, err := spiffe.ParseBundleMap([]byte(`{"trust_domains": {
		"example.org": {"spiffe_sequence": 7, "keys": []},
		"other.test":  {"spiffe_sequence": 3, "keys": []}
	}}`))
	if err != nil {
		fmt.Println(err) // and the last good set stays in force
		return
	}
	for b := range set.All() {
		n, _ := b.Sequence()
		fmt.Println(b.TrustDomain(), "sequence", n)
	}

	_, err = spiffe.ParseBundleMap([]byte(`{"trust_domains": {"spiffe://example.org": {"keys": []}}}`))
	if e, ok := errors.AsType[*spiffe.ParseError](err); ok {
		fmt.Println(e.Rule, e.Reason)
	}
	// Output:
	// example.org sequence 7
	// other.test sequence 3
	// MAP-2 the name of a member is not that of a trust domain
}
