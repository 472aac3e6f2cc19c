package spiffe_test

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

// idVector is one line of testdata/ids.jsonl.
type idVector struct {
	ID     string
	In     string
	Prefix string
	Repeat string
	Count  int
	Suffix string
	OK     bool
	TD     string
	Path   string
	Why    string
}

func (v idVector) input() string {
	if v.Count > 0 {
		return v.Prefix + strings.Repeat(v.Repeat, v.Count) + v.Suffix
	}
	return v.In
}

func readLines[T any](t testing.TB, file string) []T {
	t.Helper()
	data := must.Get(os.ReadFile(filepath.Join("testdata", file)))(t)
	var all []T
	for line := range bytes.Lines(data) {
		var v T
		d := json.NewDecoder(bytes.NewReader(line))
		require.NoError(t, d.Decode(&v), "%s", line)
		all = append(all, v)
	}
	return all
}

func TestIDVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.4-1")
	vectors := readLines[idVector](t, "ids.jsonl")
	require.Len(t, vectors, 157)
	for i, v := range vectors {
		require.Equal(t, fmt.Sprintf("IV-%03d", i+1), v.ID)
		t.Run(v.ID, func(t *testing.T) {
			t.Parallel()
			in := v.input()
			id, err := spiffe.ParseID(in)
			if !v.OK {
				e := must.As[*spiffe.ParseError](err)(t, v.Why, id)
				assert.True(t, id.IsZero())
				assert.Equal(t, in, e.Input)
				assert.LessOrEqual(t, e.Offset, len(in))
				assert.Regexp(t, `^ID-\d+$`, e.Rule)
				return
			}
			require.NoError(t, err, v.Why)
			assert.Equal(t, in, id.String())
			if v.Count == 0 {
				assert.Equal(t, v.TD, id.TrustDomain().String())
				assert.Equal(t, v.Path, id.Path())
			}
			assert.Equal(t, in, "spiffe://"+id.TrustDomain().String()+id.Path())
		})
	}
}

func TestComparisonVectors(t *testing.T) {
	t.Parallel()
	type vector struct {
		ID, Op, A, B string
		Segments     []string
		Want, OK     bool
		Why          string
	}
	var seen []string
	for _, v := range readLines[vector](t, "compare.jsonl") {
		seen = append(seen, v.ID)
		switch v.Op {
		case "equal":
			a, b := spiffe.MustParseID(v.A), spiffe.MustParseID(v.B)
			assert.Equal(t, v.Want, a == b, v.ID)
		case "member":
			a, td := spiffe.MustParseID(v.A), spiffe.MustParseTrustDomain(v.B)
			assert.Equal(t, v.Want, a.MemberOf(td), v.ID)
		case "prefix":
			a := spiffe.MustParseID(v.A)
			assert.Equal(t, v.Want, allows(spiffe.AllowPathPrefix(a.TrustDomain(), v.B), a), v.ID)
		case "join":
			id, err := spiffe.MustParseTrustDomain("example.org").WorkloadID(v.Segments...)
			if !v.OK {
				_, ok := errors.AsType[*spiffe.ParseError](err)
				assert.True(t, ok, "%s: %v, %v", v.ID, id, err)
				continue
			}
			require.NoError(t, err, v.ID)
			assert.Equal(t, v.B, id.String(), v.ID)
		default:
			t.Errorf("%s: unknown op %q", v.ID, v.Op)
		}
	}
	assert.Equal(t, []string{
		"CV-01", "CV-02", "CV-03", "CV-04", "CV-05", "CV-06", "CV-07", "CV-08", "CV-09",
		"CV-10a", "CV-10b", "CV-10c", "CV-10d", "CV-10e", "CV-11",
	}, seen)
}

// x509Vector is one file of testdata/x509: a header and named sections. A chain and bundles are
// verified; an svid with its key, both base64 of DER, is loaded.
type x509Vector struct {
	header   map[string]string
	sections map[string]string
}

var vectorHeader = []string{"id", "rule", "id-rule", "expect", "stage", "peer", "role", "now", "why"}

func (v x509Vector) text() string {
	var b strings.Builder
	for _, k := range vectorHeader {
		if s := v.header[k]; s != "" {
			fmt.Fprintf(&b, "%s: %s\n", k, s)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(v.sections)) {
		fmt.Fprintf(&b, "\n[%s]\n%s", k, v.sections[k])
	}
	return b.String()
}

func readX509Vector(t testing.TB, file string) x509Vector {
	t.Helper()
	data := must.Get(os.ReadFile(file))(t)
	v := x509Vector{header: make(map[string]string), sections: make(map[string]string)}
	section := ""
	for line := range strings.Lines(string(data)) {
		text := strings.TrimSpace(line)
		name, opens := strings.CutPrefix(text, "[")
		name, closes := strings.CutSuffix(name, "]")
		switch {
		case opens && closes:
			section = name
			v.sections[section] = ""
		case section != "":
			v.sections[section] += line
		case text != "":
			k, s, ok := strings.Cut(text, ": ")
			require.True(t, ok && slices.Contains(vectorHeader, k), "%s: bad header line %q", file, text)
			v.header[k] = s
		}
	}
	require.Equal(t, v.header["id"]+".txt", filepath.Base(file))
	return v
}

// run does what the vector asks for and returns the ID, and else the stage and the error.
func (v x509Vector) run(t *testing.T) (spiffe.ID, string, error) {
	if certs, ok := v.sections["svid"]; ok {
		c := must.Get(base64.StdEncoding.DecodeString(certs))(t)
		k := must.Get(base64.StdEncoding.DecodeString(v.sections["key"]))(t)
		s, err := spiffe.ParseSVID(c, k)
		if err != nil {
			return spiffe.ID{}, "load", err
		}
		return s.ID(), "", nil
	}

	now := must.Get(time.Parse(time.RFC3339, v.header["now"]))(t)
	role, ok := map[string]spiffe.Role{"any": spiffe.AnyRole, "server": spiffe.ServerRole, "client": spiffe.ClientRole}[v.header["role"]]
	require.True(t, ok, "role %q", v.header["role"])
	var bundles []*spiffe.Bundle
	for name, certs := range v.sections {
		domain, ok := strings.CutPrefix(name, "bundle ")
		if !ok {
			require.Equal(t, "chain", name)
			continue
		}
		roots := must.Get(parseBlocks(certs))(t)
		b, err := spiffe.NewBundle(spiffe.MustParseTrustDomain(domain), spiffe.BundleContents{X509Authorities: roots})
		if err != nil {
			return spiffe.ID{}, "bundle", err
		}
		bundles = append(bundles, b)
	}
	set := must.Get(spiffe.NewBundleSet(bundles...))(t)
	chain, err := parseBlocks(v.sections["chain"])
	if err != nil {
		return spiffe.ID{}, "parse", err
	}
	ver, err := spiffe.NewVerifier(set, spiffe.AllowAnyPeer(), func() time.Time { return now })
	require.NoError(t, err)
	peer, err := ver.VerifyChain(chain, role)
	if err != nil {
		e := must.As[*spiffe.VerifyError](err)(t)
		return spiffe.ID{}, string(e.Stage), err
	}
	assert.Equal(t, chain[0], peer.Chain()[0])
	return peer.ID(), "", nil
}

func parseBlocks(text string) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for rest := []byte(text); ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			return certs, nil
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, c)
	}
}

// errorRule returns the rule that err names, the most telling one first.
func errorRule(err error) string {
	if e, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		return e.Rule
	}
	if e, ok := errors.AsType[*spiffe.ParseError](err); ok {
		return e.Rule
	}
	return ""
}

func TestX509Vectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-8", "IST-1.5-11", "IST-1.5-12")
	files := must.Get(filepath.Glob("testdata/x509/*.txt"))(t)
	var have []string
	for _, f := range files {
		have = append(have, strings.TrimSuffix(filepath.Base(f), ".txt"))
	}
	want := []string{"XV-19b"}
	for i := range 68 {
		want = append(want, fmt.Sprintf("XV-%02d", i+1))
	}
	require.ElementsMatch(t, want, have)

	for _, f := range files {
		v := readX509Vector(t, f)
		t.Run(v.header["id"], func(t *testing.T) {
			t.Parallel()
			id, stage, err := v.run(t)
			if v.header["expect"] == "accept" {
				require.NoError(t, err, v.header["why"])
				assert.Equal(t, v.header["peer"], id.String())
				return
			}
			require.Equal(t, "reject", v.header["expect"])
			require.Error(t, err, v.header["why"])
			assert.Equal(t, v.header["stage"], stage, "%v", err)
			if rule := errorRule(err); rule != "" {
				assert.Equal(t, v.header["rule"], rule, "%v", err)
			}
			var idRule string
			if pe, ok := errors.AsType[*spiffe.ParseError](err); ok {
				if inner, ok := errors.AsType[*spiffe.ParseError](pe.Err); ok {
					idRule = inner.Rule
				}
			}
			assert.Equal(t, v.header["id-rule"], idRule, "%v", err)
		})
	}
}

// The known answer: a bundle and a leaf that other code made.
func TestKnownAnswer(t *testing.T) {
	t.Parallel()
	doc := must.Get(os.ReadFile("testdata/kat/bundle.json"))(t)
	leaf := must.Get(os.ReadFile("testdata/kat/leaf.pem"))(t)
	chain := must.Get(parseBlocks(string(leaf)))(t)

	b := must.Get(spiffe.ParseBundle(spiffe.MustParseTrustDomain("example.org"), doc))(t)
	v := must.Get(spiffe.NewVerifier(b, spiffe.AllowIDs(webID), atNow))(t)
	peer := must.Get(v.VerifyChain(chain, spiffe.ClientRole))(t)
	assert.Equal(t, webID, peer.ID())
	assert.Len(t, peer.Chain(), 2)
}
