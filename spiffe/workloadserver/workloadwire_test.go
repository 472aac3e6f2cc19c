package workloadserver_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/protofield"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

const (
	unlimited = math.MaxInt
	maxDepth  = 100 // of claims
)

func isTooDeep(err error) bool {
	return err != nil && err.Error() == fmt.Sprintf("its claims are nested more than %d deep", maxDepth)
}

// kinds are our messages, each with the generated one that judges it.
var kinds = map[string]struct {
	read   func(data []byte) (any, error)
	write  func(m any) ([]byte, error)
	theirs func() proto.Message
	same   func(m any) proto.Message // the generated message that says the same
}{
	"X509SVIDResponse": {
		func(data []byte) (any, error) { return workloadwire.X509.ReadSVIDs(data, unlimited) },
		func(m any) ([]byte, error) { return workloadwire.X509.WriteSVIDs(m.(*workloadwire.SVIDs)) },
		func() proto.Message { return &wire.X509SVIDResponse{} },
		func(m any) proto.Message {
			o := m.(*workloadwire.SVIDs)
			p := &wire.X509SVIDResponse{Crl: o.CRLs, FederatedBundles: o.Federated}
			for _, s := range o.SVIDs {
				p.Svids = append(p.Svids, &wire.X509SVID{SpiffeId: s.ID, X509Svid: s.Parts[0], X509SvidKey: s.Parts[1], Bundle: s.Parts[2], Hint: s.Hint})
			}
			return p
		},
	},
	"X509BundlesResponse": {
		func(data []byte) (any, error) { return workloadwire.X509.ReadBundles(data, unlimited) },
		func(m any) ([]byte, error) { return workloadwire.X509.WriteBundles(m.(*workloadwire.Bundles)) },
		func() proto.Message { return &wire.X509BundlesResponse{} },
		func(m any) proto.Message {
			o := m.(*workloadwire.Bundles)
			return &wire.X509BundlesResponse{Crl: o.CRLs, Bundles: o.Bundles}
		},
	},
	"JWTSVIDRequest": {
		func(data []byte) (any, error) {
			audience, id, err := workloadwire.ReadJWTSVIDRequest(data, unlimited)
			return append(audience, id), err
		},
		func(m any) ([]byte, error) {
			all := m.([]string)
			return workloadwire.WriteJWTSVIDRequest(all[:len(all)-1], all[len(all)-1])
		},
		func() proto.Message { return &wire.JWTSVIDRequest{} },
		func(m any) proto.Message {
			all := m.([]string)
			return &wire.JWTSVIDRequest{Audience: all[:len(all)-1], SpiffeId: all[len(all)-1]}
		},
	},
	"JWTSVIDResponse": {
		func(data []byte) (any, error) { return workloadwire.JWT.ReadSVIDs(data, unlimited) },
		func(m any) ([]byte, error) { return workloadwire.JWT.WriteSVIDs(m.(*workloadwire.SVIDs)) },
		func() proto.Message { return &wire.JWTSVIDResponse{} },
		func(m any) proto.Message {
			p := &wire.JWTSVIDResponse{}
			for _, s := range m.(*workloadwire.SVIDs).SVIDs {
				p.Svids = append(p.Svids, &wire.JWTSVID{SpiffeId: s.ID, Svid: string(s.Parts[0]), Hint: s.Hint})
			}
			return p
		},
	},
	"JWTBundlesResponse": {
		func(data []byte) (any, error) { return workloadwire.JWT.ReadBundles(data, unlimited) },
		func(m any) ([]byte, error) { return workloadwire.JWT.WriteBundles(m.(*workloadwire.Bundles)) },
		func() proto.Message { return &wire.JWTBundlesResponse{} },
		func(m any) proto.Message { return &wire.JWTBundlesResponse{Bundles: m.(*workloadwire.Bundles).Bundles} },
	},
	"ValidateJWTSVIDRequest": {
		func(data []byte) (any, error) { return readTexts(data, 2) },
		func(m any) ([]byte, error) { return workloadwire.WriteTexts(m.([]string)...) },
		func() proto.Message { return &wire.ValidateJWTSVIDRequest{} },
		func(m any) proto.Message {
			all := m.([]string)
			return &wire.ValidateJWTSVIDRequest{Audience: all[0], Svid: all[1]}
		},
	},
	"ValidateJWTSVIDResponse": {
		func(data []byte) (any, error) {
			id, c, err := workloadwire.ReadClaims(data)
			return claims{id, c}, err
		},
		func(m any) ([]byte, error) { return workloadwire.WriteClaims(m.(claims).id, m.(claims).claims) },
		func() proto.Message { return &wire.ValidateJWTSVIDResponse{} },
		func(m any) proto.Message {
			o := m.(claims)
			p := &wire.ValidateJWTSVIDResponse{SpiffeId: o.id}
			if o.claims != nil {
				var err error
				if p.Claims, err = structpb.NewStruct(o.claims); err != nil {
					panic(err)
				}
			}
			return p
		},
	},
	"WITSVIDRequest": {
		func(data []byte) (any, error) { return readTexts(data, 1) },
		func(m any) ([]byte, error) { return workloadwire.WriteTexts(m.([]string)...) },
		func() proto.Message { return &wire.WITSVIDRequest{} },
		func(m any) proto.Message { return &wire.WITSVIDRequest{SpiffeId: m.([]string)[0]} },
	},
	"WITSVIDResponse": {
		func(data []byte) (any, error) { return workloadwire.WIT.ReadSVIDs(data, unlimited) },
		func(m any) ([]byte, error) { return workloadwire.WIT.WriteSVIDs(m.(*workloadwire.SVIDs)) },
		func() proto.Message { return &wire.WITSVIDResponse{} },
		func(m any) proto.Message {
			p := &wire.WITSVIDResponse{}
			for _, s := range m.(*workloadwire.SVIDs).SVIDs {
				p.Svids = append(p.Svids, &wire.WITSVID{SpiffeId: s.ID, WitSvid: string(s.Parts[0]), WitSvidKey: string(s.Parts[1]), Hint: s.Hint})
			}
			return p
		},
	},
	"WITBundlesResponse": {
		func(data []byte) (any, error) { return workloadwire.WIT.ReadBundles(data, unlimited) },
		func(m any) ([]byte, error) { return workloadwire.WIT.WriteBundles(m.(*workloadwire.Bundles)) },
		func() proto.Message { return &wire.WITBundlesResponse{} },
		func(m any) proto.Message {
			p := &wire.WITBundlesResponse{}
			for key, v := range m.(*workloadwire.Bundles).Bundles {
				if p.Bundles == nil {
					p.Bundles = map[string]string{}
				}
				p.Bundles[key] = string(v)
			}
			return p
		},
	},
}

type claims struct {
	id     string
	claims map[string]any
}

func readTexts(data []byte, n int) ([]string, error) {
	all := make([]string, n)
	to := make([]*string, n)
	for i := range all {
		to[i] = &all[i]
	}
	err := workloadwire.ReadTexts(data, to...)
	return all, err
}

// normal replaces the numbers of claims that JSON does not have, as our reader does.
func normal(m proto.Message) proto.Message {
	if r, ok := m.(*wire.ValidateJWTSVIDResponse); ok && r.GetClaims() != nil {
		claims, err := structpb.NewStruct(r.GetClaims().AsMap())
		if err != nil {
			panic(err)
		}
		return &wire.ValidateJWTSVIDResponse{SpiffeId: r.GetSpiffeId(), Claims: claims}
	}
	return m
}

// agree holds our reading of data, and what we write of it, against the generated messages.
func agree(t *testing.T, data []byte) {
	t.Helper()
	for name, k := range kinds {
		again := slices.Clone(data)
		ours, err := k.read(again)
		if isTooDeep(err) || err != nil && strings.Contains(err.Error(), "it has more than 16 elements") {
			continue
		}
		theirs := k.theirs()
		want := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, theirs)
		require.Equal(t, want == nil, err == nil, "%s: %v, %v", name, want, err)
		if err != nil {
			require.Equal(t, protofield.ErrMalformed, err)
			continue
		}
		theirs = normal(theirs)
		require.True(t, proto.Equal(theirs, k.same(ours)), "%s: want %v, got %v", name, theirs, k.same(ours))
		wantBytes, err := proto.MarshalOptions{Deterministic: true}.Marshal(theirs)
		require.NoError(t, err)
		got, err := k.write(ours)
		require.NoError(t, err)
		require.Equal(t, string(wantBytes), string(got), name)
		clear(again)
		after, err := k.write(ours)
		require.NoError(t, err)
		require.Equal(t, got, after, "%s keeps a part of what it reads", name)
	}
}

func tagged(n protowire.Number, kind protowire.Type, value ...byte) []byte {
	return append(protowire.AppendTag(nil, n, kind), value...)
}

func inField(n protowire.Number, parts ...[]byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, n, protowire.BytesType), slices.Concat(parts...))
}

func inText(n protowire.Number, s string) []byte { return inField(n, []byte(s)) }

func inDouble(f float64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(nil, 2, protowire.Fixed64Type), math.Float64bits(f))
}

// claimsOf is a ValidateJWTSVIDResponse with one claim "c" whose value has these fields.
func claimsOf(value ...[]byte) []byte {
	return inField(2, inField(1, inText(1, "c"), inField(2, value...)))
}

// oddMessages is bytes that readers may take in two ways, or for one thing too many.
func oddMessages() map[string][]byte {
	list := func(values ...[]byte) []byte {
		var all []byte
		for _, v := range values {
			all = append(all, inField(1, v)...)
		}
		return inField(6, all)
	}
	structOf := func(key string, value []byte) []byte {
		return inField(5, inField(1, inText(1, key), inField(2, value)))
	}
	return map[string][]byte{
		"empty":                    nil,
		"a text":                   inText(1, "spiffe://example.org/web"),
		"a text twice":             slices.Concat(inText(1, "a"), inText(1, "b"), inText(2, "c"), inText(2, "")),
		"an empty text":            inText(1, ""),
		"not UTF-8":                inText(1, "\xff"),
		"not UTF-8, and then good": slices.Concat(inText(1, "\xff"), inText(1, "x")),
		"a surrogate":              inText(1, "\xed\xa0\x80"),
		"svid":                     inField(1, inText(1, "i"), inText(2, "c"), inText(3, "k"), inText(4, "b"), inText(5, "h")),
		"svid, in another order":   inField(1, inText(5, "h"), inText(4, "b"), inText(1, "i")),
		"svid with a field twice":  inField(1, inText(1, "i"), inText(1, "j"), inText(2, "c"), inText(2, "")),
		"svid, not UTF-8":          inField(1, inText(5, "\xff")),
		"two svids":                slices.Concat(inField(1, inText(1, "i")), inField(1, inText(1, "j"))),
		"an empty svid":            inField(1),
		"svid that is cut":         inField(1, []byte{0x0a, 5, 'x'}),
		"entry":                    inField(3, inText(1, "k"), inText(2, "v")),
		"entry, value first":       slices.Concat(inField(3, inText(2, "v"), inText(1, "k")), inField(2, inText(2, "v"), inText(1, "k"))),
		"entry without value":      slices.Concat(inField(1, inText(1, "k")), inField(2, inText(1, "k")), inField(3, inText(1, "k"))),
		"entry without key":        slices.Concat(inField(1, inText(2, "v")), inField(2, inText(2, "v")), inField(3, inText(2, "v"))),
		"entry with two keys":      slices.Concat(inField(1, inText(1, "k"), inText(1, "l"), inText(2, "v"), inText(2, "w")), inField(3, inText(1, "k"), inText(1, "l"), inText(2, "v"), inText(2, "w"))),
		"two entries of a key":     slices.Concat(inField(1, inText(1, "k"), inText(2, "v")), inField(1, inText(1, "k"), inText(2, "w")), inField(3, inText(1, "k"), inText(2, "v")), inField(3, inText(1, "k"))),
		"entry, key not UTF-8":     slices.Concat(inField(3, inText(1, "\xff")), inField(2, inText(1, "\xff"))),
		"entry, value not UTF-8":   inField(1, inText(1, "k"), inText(2, "\xff")),
		"entry with more":          inField(3, inText(1, "k"), inText(7, "x"), tagged(9, protowire.VarintType, 1), inText(2, "v")),
		"entry, key of a number":   inField(3, tagged(1, protowire.VarintType, 1), inText(2, "v")),
		"keys in disorder":         slices.Concat(inField(3, inText(1, "b")), inField(3, inText(1, "a")), inField(2, inText(1, "b")), inField(2, inText(1, "a"))),
		"unknown fields":           slices.Concat(inText(99, "x"), tagged(100, protowire.VarintType, 0xff, 1), tagged(101, protowire.Fixed32Type, 1, 2, 3, 4), tagged(102, protowire.Fixed64Type, 1, 2, 3, 4, 5, 6, 7, 8)),
		"a group":                  slices.Concat(tagged(9, protowire.StartGroupType), inText(1, "\xff"), tagged(9, protowire.EndGroupType)),
		"a group without end":      tagged(9, protowire.StartGroupType),
		"an end without group":     tagged(9, protowire.EndGroupType),
		"groups that cross":        slices.Concat(tagged(9, protowire.StartGroupType), tagged(8, protowire.StartGroupType), tagged(9, protowire.EndGroupType), tagged(8, protowire.EndGroupType)),
		"field of another type":    slices.Concat(tagged(1, protowire.VarintType, 5), tagged(2, protowire.Fixed32Type, 1, 2, 3, 4), tagged(3, protowire.Fixed64Type, 1, 2, 3, 4, 5, 6, 7, 8)),
		"field 0":                  {0x02, 0},
		"field 2^29":               protowire.AppendVarint(nil, 1<<32|2),
		"a number in field 2^29":   append(protowire.AppendVarint(nil, 1<<32), 1),
		"an entry with field 2^29": inField(3, inText(1, "k"), append(protowire.AppendVarint(nil, 1<<32), 1)),
		"a claim with field 2^29":  claimsOf(append(protowire.AppendVarint(nil, 1<<32), 1)),
		"a long tag":               {0x8a, 0x80, 0x80, 0x80, 0x00, 0},
		"a tag of 11 bytes":        {0x8a, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01},
		"wire type 6":              {0x0e},
		"wire type 7":              {0x0f},
		"a length that is missing": {0x0a},
		"a length too large":       {0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f},
		"a length of 2^63":         {0x0a, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01},
		"a number without end":     {0x08, 0xff},

		"claims":                   claimsOf(inText(3, "v")),
		"no claims":                inField(2),
		"claims twice":             slices.Concat(claimsOf(inText(3, "v")), inField(2, inField(1, inText(1, "d"), inField(2, inDouble(1))))),
		"a claim twice":            slices.Concat(claimsOf(structOf("a", inText(3, "1"))), claimsOf(structOf("b", inText(3, "2")))),
		"a claim without value":    inField(2, inField(1, inText(1, "c"))),
		"a claim without kind":     claimsOf(),
		"a claim without name":     inField(2, inField(1, inField(2, inText(3, "v")))),
		"claim of null":            claimsOf(tagged(1, protowire.VarintType, 0)),
		"claim of null 7":          claimsOf(tagged(1, protowire.VarintType, 7)),
		"claim of true":            claimsOf(tagged(4, protowire.VarintType, 2)),
		"claim of false":           claimsOf(tagged(4, protowire.VarintType, 0)),
		"claim of a number":        claimsOf(inDouble(-0.5)),
		"claim of minus zero":      claimsOf(inDouble(math.Copysign(0, -1))),
		"claim of NaN":             claimsOf(inDouble(math.NaN())),
		"claim of infinity":        slices.Concat(claimsOf(inDouble(math.Inf(1))), inField(2, inField(1, inText(1, "d"), inField(2, inDouble(math.Inf(-1)))))),
		"claim of an empty text":   claimsOf(inText(3, "")),
		"claim of an empty object": claimsOf(inField(5)),
		"claim of an empty list":   claimsOf(inField(6)),
		"claim of a list":          claimsOf(list(inText(3, "a"), nil, inDouble(2), list(), structOf("x", nil))),
		"two lists are one":        claimsOf(list(inText(3, "a")), list(inText(3, "b"))),
		"two objects are one":      claimsOf(structOf("a", inText(3, "1")), structOf("b", inText(3, "2")), structOf("a", inText(3, "3"))),
		"the last kind counts":     claimsOf(structOf("a", inText(3, "1")), inDouble(1), structOf("b", inText(3, "2"))),
		"null after an object":     claimsOf(structOf("a", nil), tagged(1, protowire.VarintType, 0)),
		"values in one entry":      inField(2, inField(1, inText(1, "c"), inField(2, structOf("a", nil)), inField(2, structOf("b", nil)))),
		"entries of one claim":     inField(2, inField(1, inText(1, "c"), inField(2, structOf("a", nil))), inField(1, inText(1, "c"), inField(2, structOf("b", nil)))),
		"claim of another type":    claimsOf(tagged(2, protowire.Fixed32Type, 1, 2, 3, 4), tagged(3, protowire.VarintType, 1), tagged(9, protowire.VarintType, 1)),
		"claim, not UTF-8":         claimsOf(inText(3, "\xff")),
		"claim, name not UTF-8":    inField(2, inField(1, inText(1, "\xff"), inField(2, inText(3, "v")))),
		"claim that is cut":        claimsOf([]byte{0x11, 1, 2, 3}),
		"claims of 90 levels":      nest(90),
	}
}

// nest is claims with lists inside each other.
func nest(levels int) []byte {
	v := inText(3, "x")
	for range levels {
		v = inField(6, inField(1, v))
	}
	return claimsOf(v)
}

func TestWireMessages(t *testing.T) {
	t.Parallel()
	for name, data := range oddMessages() {
		t.Run(name, func(t *testing.T) { agree(t, data) })
	}
}

// Every message that says something of each field passes through both.
func TestWireMessagesRoundTrip(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]proto.Message{
		"X509SVIDResponse": &wire.X509SVIDResponse{
			Svids:            []*wire.X509SVID{{SpiffeId: "i", X509Svid: []byte("c"), X509SvidKey: []byte("k"), Bundle: []byte("b"), Hint: "ö"}, {}},
			Crl:              [][]byte{[]byte("r"), {}},
			FederatedBundles: map[string][]byte{"t": []byte("f"), "s": nil, "": {0}},
		},
		"X509BundlesResponse":     &wire.X509BundlesResponse{Crl: [][]byte{{}, []byte("r")}, Bundles: map[string][]byte{"t": []byte("b"), "": nil}},
		"JWTSVIDRequest":          &wire.JWTSVIDRequest{Audience: []string{"a", "", "b"}, SpiffeId: "i"},
		"JWTSVIDResponse":         &wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{{SpiffeId: "i", Svid: "t", Hint: "h"}, {}}},
		"JWTBundlesResponse":      &wire.JWTBundlesResponse{Bundles: map[string][]byte{"t": []byte("b"), "s": {}}},
		"ValidateJWTSVIDRequest":  &wire.ValidateJWTSVIDRequest{Audience: "a", Svid: "t"},
		"ValidateJWTSVIDResponse": &wire.ValidateJWTSVIDResponse{SpiffeId: "i", Claims: &structpb.Struct{Fields: map[string]*structpb.Value{"a": structpb.NewNumberValue(1), "b": structpb.NewNullValue()}}},
		"WITSVIDRequest":          &wire.WITSVIDRequest{SpiffeId: "i"},
		"WITSVIDResponse":         &wire.WITSVIDResponse{Svids: []*wire.WITSVID{{SpiffeId: "i", WitSvid: "t", WitSvidKey: "k", Hint: "h"}, {}}},
		"WITBundlesResponse":      &wire.WITBundlesResponse{Bundles: map[string]string{"t": "b", "": "", "ä": "ö"}},
	} {
		k, ok := kinds[name]
		require.True(t, ok, name)
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
		require.NoError(t, err)
		ours, err := k.read(data)
		require.NoError(t, err)
		assert.True(t, proto.Equal(p, k.same(ours)), name)
		agree(t, data)
	}
}

// Texts that are not UTF-8 are not sent, wherever they are.
func TestWireEncodeRefuses(t *testing.T) {
	t.Parallel()
	const bad = "\xff"
	svids := func(p *workloadwire.Profile, s workloadwire.SVID) error {
		_, err := p.WriteSVIDs(&workloadwire.SVIDs{SVIDs: []workloadwire.SVID{s}})
		return err
	}
	bundles := func(p *workloadwire.Profile, key, value string) error {
		_, err := p.WriteBundles(&workloadwire.Bundles{Bundles: map[string][]byte{key: []byte(value)}})
		return err
	}
	second := func(_ []byte, err error) error { return err }
	federated := &workloadwire.SVIDs{Federated: map[string][]byte{bad: nil}}
	for name, err := range map[string]error{
		"X.509 ID":           svids(workloadwire.X509, workloadwire.SVID{ID: bad}),
		"X.509 hint":         svids(workloadwire.X509, workloadwire.SVID{Hint: bad}),
		"federated":          second(workloadwire.X509.WriteSVIDs(federated)),
		"X.509 bundle":       bundles(workloadwire.X509, bad, ""),
		"audience":           second(workloadwire.WriteJWTSVIDRequest([]string{"a", bad}, "")),
		"ID of a request":    second(workloadwire.WriteJWTSVIDRequest(nil, bad)),
		"JWT":                svids(workloadwire.JWT, workloadwire.SVID{Parts: [3][]byte{[]byte(bad)}}),
		"JWT bundle":         bundles(workloadwire.JWT, bad, ""),
		"text":               second(workloadwire.WriteTexts(bad)),
		"another text":       second(workloadwire.WriteTexts("", bad)),
		"WIT key":            svids(workloadwire.WIT, workloadwire.SVID{Parts: [3][]byte{nil, []byte(bad)}}),
		"WIT bundle":         bundles(workloadwire.WIT, bad, ""),
		"WIT bundle's value": bundles(workloadwire.WIT, "", bad),
	} {
		assert.ErrorContains(t, err, "not UTF-8", name)
	}
	binary := workloadwire.SVID{Parts: [3][]byte{[]byte(bad), []byte(bad), []byte(bad)}}
	assert.NoError(t, svids(workloadwire.X509, binary))
	assert.NoError(t, bundles(workloadwire.X509, "", bad))
}

// A message with more elements than the limit is refused before memory is spent on them.
func TestWireLimits(t *testing.T) {
	t.Parallel()
	many := func(n int) []byte { return []byte(strings.Repeat("\x0a\x00", n)) }
	for name, read := range map[string]func(data []byte) error{
		"SVIDs":    func(data []byte) error { _, err := workloadwire.X509.ReadSVIDs(data, 16); return err },
		"bundles":  func(data []byte) error { _, err := workloadwire.WIT.ReadBundles(data, 16); return err },
		"audience": func(data []byte) error { _, _, err := workloadwire.ReadJWTSVIDRequest(data, 16); return err },
		"texts":    func(data []byte) error { return workloadwire.ReadTexts(data, new(string)) },
		"claims":   func(data []byte) error { _, _, err := workloadwire.ReadClaims(data); return err },
	} {
		assert.NoError(t, read(many(16)), name)
		assert.EqualError(t, read(many(17)), "it has more than 16 elements", name)
		assert.EqualError(t, read(append(many(16), 0x78, 1)), "it has more than 16 elements", "%s: unknown fields count", name)
	}
}

// Claims are written as the generated code writes them, whatever Go type a validator has for them.
func TestWireEncodeClaims(t *testing.T) {
	t.Parallel()
	for _, v := range []any{
		nil, true, false, "", "ö", 1, int8(-1), int16(-2), int32(-3), int64(1 << 60), uint(1), uint8(2), uint16(3), uint32(4), uint64(math.MaxUint64),
		float32(0.5), 0.1, json.Number("12"), json.Number("1e3"), []byte("bytes"), []byte{}, []any{}, []any{1, "x", nil, []any{2}},
		map[string]any{}, map[string]any{"b": 1, "a": map[string]any{"": nil}},
		json.Number("x"), json.Number("1e999"), make(chan int), []any{func() {}},
	} {
		claims := map[string]any{"sub": "s", "v": v}
		want, err := structpb.NewStruct(claims)
		got, mine := workloadwire.WriteClaims("", claims)
		require.Equal(t, err == nil, mine == nil, "%T: %v, %v", v, err, mine)
		if err != nil {
			continue
		}
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(&wire.ValidateJWTSVIDResponse{Claims: want})
		require.NoError(t, err)
		assert.Equal(t, b, got, "%T %v", v, v)
	}
}

// Claims that are nested without end are refused on both sides, before the stack is.
func TestWireClaimDepth(t *testing.T) {
	t.Parallel()
	_, m, err := workloadwire.ReadClaims(nest(maxDepth - 1))
	require.NoError(t, err)
	_, err = workloadwire.WriteClaims("", m)
	require.NoError(t, err)
	for _, levels := range []int{maxDepth, 300} {
		_, _, err := workloadwire.ReadClaims(nest(levels))
		assert.True(t, isTooDeep(err), err)
	}
	object := func(levels int) (v any) {
		for range levels {
			v = map[string]any{"x": v}
		}
		return v
	}
	data, err := workloadwire.WriteClaims("", object(maxDepth).(map[string]any))
	require.NoError(t, err)
	_, _, err = workloadwire.ReadClaims(data)
	require.NoError(t, err)
	_, err = workloadwire.WriteClaims("", object(maxDepth+1).(map[string]any))
	assert.True(t, isTooDeep(err), err)
	loop := map[string]any{}
	loop["self"] = []any{loop}
	_, err = workloadwire.WriteClaims("", loop)
	require.Error(t, err)
	deep, err := structpb.NewStruct(object(maxDepth + 1).(map[string]any))
	require.NoError(t, err)
	b, err := proto.Marshal(&wire.ValidateJWTSVIDResponse{Claims: deep})
	require.NoError(t, err)
	_, _, err = workloadwire.ReadClaims(b)
	assert.True(t, isTooDeep(err), err)
}

// Claims of types that encoding/json knows and generated code does not are written as their JSON.
func TestWireOtherClaims(t *testing.T) {
	t.Parallel()
	data, err := workloadwire.WriteClaims("i", map[string]any{
		"aud": []string{"a", "b"}, "n": map[string]int{"x": 1}, "s": struct{}{}, "t": json.RawMessage(`[1]`),
	})
	require.NoError(t, err)
	id, got, err := workloadwire.ReadClaims(data)
	require.NoError(t, err)
	assert.Equal(t, "i", id)
	assert.Equal(t, map[string]any{"aud": []any{"a", "b"}, "n": map[string]any{"x": 1.0}, "s": map[string]any{}, "t": []any{1.0}}, got)
}

// Our messages and the generated ones agree on every input: what it says, whether it says anything, and
// how that is written.
func FuzzWireMessages(f *testing.F) {
	for _, data := range oddMessages() {
		f.Add(data)
	}
	f.Fuzz(agree)
}

// Claims from JSON are written as the generated code writes them, and come back.
func FuzzWireClaims(f *testing.F) {
	f.Add(`{"sub":"spiffe://example.org/web","aud":["a","b"],"exp":1.5e9,"x":{"y":[null,true,{}]}}`)
	f.Add(`{"a":-0,"b":1e308,"c":"\u0000"}`)
	f.Add(`{"a":` + strings.Repeat("[", 20) + strings.Repeat("]", 20) + `}`)
	f.Fuzz(func(t *testing.T, doc string) {
		var claims map[string]any
		if json.Unmarshal([]byte(doc), &claims) != nil || claims == nil {
			return
		}
		want, err := structpb.NewStruct(claims)
		require.NoError(t, err)
		got, err := workloadwire.WriteClaims("", claims)
		if isTooDeep(err) {
			return
		}
		require.NoError(t, err)
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(&wire.ValidateJWTSVIDResponse{Claims: want})
		require.NoError(t, err)
		require.Equal(t, b, got)
		_, back, err := workloadwire.ReadClaims(got)
		require.NoError(t, err)
		require.Equal(t, claims, back)
	})
}
