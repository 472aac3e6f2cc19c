package jwtsvid_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
)

// refusal is the error of a Validator, as programs cannot see it.
type refusal = token.Error

const maxSize = token.MaxSize

func atNow() time.Time { return time.Unix(now, 0) }

// bundle reads testdata/bundles/NAME.json as the bundle of td.
func bundle(t testing.TB, td, name string) *spiffe.Bundle {
	t.Helper()
	doc := must.Get(os.ReadFile(filepath.Join("testdata", "bundles", name+".json")))(t)
	return must.Get(spiffe.ParseBundle(spiffe.MustParseTrustDomain(td), doc))(t)
}

// bundles are those of the vectors, with that of example.org from another file if name is not empty.
func bundles(t testing.TB, name string) *spiffe.BundleSet {
	t.Helper()
	if name == "" {
		name = "example.org"
	}
	return must.Get(spiffe.NewBundleSet(bundle(t, "example.org", name), bundle(t, "other.test", "other.test")))(t)
}

func validator(t testing.TB, source spiffe.BundleSource, opts jwtsvid.ValidatorOptions) *jwtsvid.Validator {
	t.Helper()
	if opts.Now == nil {
		opts.Now = atNow
	}
	return must.Get(jwtsvid.NewValidator(source, []string{"db"}, &opts))(t)
}

// refused asserts that err is an Error with this reason and rule, which does not show the token.
func refused(t testing.TB, err error, token, reason, rule string) *refusal {
	t.Helper()
	e := must.As[*refusal](err)(t)
	assert.Equal(t, reason, string(e.Reason), "%v", err)
	assert.Equal(t, rule, e.Rule, "%v", err)
	assert.Empty(t, leaks(err.Error(), token))
	return e
}

// leaks returns the part of token that is in text, or "".
func leaks(text, token string) string {
	for part := range strings.SplitSeq(token, ".") {
		if len(part) > 8 && strings.Contains(text, part) {
			return part
		}
	}
	return ""
}

func TestVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t,
		"JV-01", "JV-02", "JV-03", "JV-04", "JV-05", "JV-06", "JV-07", "JV-08", "JV-09", "JV-10",
		"JV-11", "JV-12", "JV-13", "JV-14", "JV-15", "JV-16", "JV-17", "JV-18", "JV-19", "JV-20",
		"JV-21", "JV-22", "JV-23", "JV-24", "JV-25", "JV-26", "JV-27", "JV-28", "JV-29", "JV-30",
		"JV-31", "JV-32", "JV-33", "JV-34", "JV-35", "JV-36", "JV-37", "JV-38", "JV-39", "JV-40",
		"JV-41", "JV-42", "JV-43", "JV-44", "JV-45", "JV-46", "JV-47", "JV-48", "JV-49", "JV-50",
		"JV-51", "JV-52", "JV-53", "JV-54", "JV-55", "JV-56", "JV-57", "JV-58", "JV-59", "JV-60",
		"JV-61", "JV-62")
	conformance.Covers(t, "JWT-1", "JWT-2", "JWT-3", "JWT-4", "JWT-6", "JWT-7", "JWT-8", "JWT-10", "JWT-11", "JWT-12", "JWT-13",
		"JWT-14", "JWT-18", "JWT-19", "JWT-22", "JWT-23", "JWT-24", "JWT-25", "JWT-26", "JWT-27", "JWT-28", "JWT-29", "JWT-30",
		"JWT-31", "SVID-1", "SVID-5", "AMB-2", "AMB-3", "AMB-12", "AMB-19", "AMB-28", "GO-9", "GO-10")

	files := must.Get(filepath.Glob("testdata/vectors/*.txt"))(t)
	var have, want []string
	for i := range 62 {
		want = append(want, fmt.Sprintf("JV-%02d", i+1))
	}
	for _, f := range files {
		have = append(have, strings.TrimSuffix(filepath.Base(f), ".txt"))
	}
	require.Equal(t, want, have)

	for _, f := range files {
		v := readVector(t, f)
		t.Run(v.id+" "+v.rule, func(t *testing.T) {
			t.Parallel()
			var opts jwtsvid.ValidatorOptions
			if v.leeway != "" {
				d := must.Get(time.ParseDuration(v.leeway))(t)
				opts.Leeway = &d
			}
			ver := validator(t, bundles(t, v.bundles), opts)
			for _, token := range v.tokens {
				for range 2 { // the second time it may be remembered
					proof, err := ver.Validate(token)
					if v.expect == "reject" {
						require.Error(t, err, v.why)
						assert.Nil(t, proof)
						refused(t, err, token, v.reason, v.rule)
						continue
					}
					require.Equal(t, "accept", v.expect)
					require.NoError(t, err, v.why)
					id := webID.String()
					if v.peer != "" {
						id = v.peer
					}
					assert.Equal(t, id, proof.ID().String())
					assert.Contains(t, proof.Audience(), "db")
					u := must.Get(jwtsvid.ParseUnverified(token))(t)
					assert.Equal(t, u.ID, proof.ID())
					assert.Equal(t, u.Audience, proof.Audience())
					assert.True(t, u.Expires.Equal(proof.Expires()))
				}
			}
		})
	}
}

func TestVectorDetails(t *testing.T) {
	t.Parallel()
	accepted := func(id string) *jwtsvid.Verified {
		v := readVector(t, filepath.Join("testdata", "vectors", id+".txt"))
		return must.Get(validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}).Validate(v.tokens[0]))(t)
	}
	assert.Equal(t, []string{"cache", "db"}, accepted("JV-03").Audience())
	assert.Equal(t, time.Unix(now+300, 5e8).UTC(), accepted("JV-15").Expires())
	var role string
	must.Get(accepted("JV-51").Claim("role", &role))(t)
	assert.Equal(t, "reader", role)
	assert.ErrorContains(t, bundle(t, "example.org", "example.org").Skipped()[0], `with key ID "wit-1"`)
	weak := bundle(t, "example.org", "weak").Skipped()
	require.Len(t, weak, 1)
	assert.ErrorContains(t, weak[0], "1024 bits")
}

// The known answer: a token that other code made.
func TestKnownAnswer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "KAT-2", "JWT-28", "GO-11")
	doc := must.Get(os.ReadFile("testdata/kat/bundle.json"))(t)
	b := must.Get(spiffe.ParseBundle(domain, doc))(t)
	v := validator(t, b, jwtsvid.ValidatorOptions{Leeway: new(time.Duration(0))})
	token := func(name string) string {
		text := must.Get(os.ReadFile(filepath.Join("testdata", "kat", name)))(t)
		return strings.TrimSpace(string(text))
	}

	p := must.Get(v.Validate(token("accept.txt")))(t)
	assert.Equal(t, webID, p.ID())
	assert.Equal(t, []string{"db"}, p.Audience())
	assert.Equal(t, int64(now+300), p.Expires().Unix())

	_, err := v.Validate(token("reject-asn1.txt"))
	refused(t, err, token("reject-asn1.txt"), "signature", "JWT-28")

	// The same key signs the same text here.
	m := newMaterial(t)
	own := sign(baseHeader, basePay, "ES256", m.kat)
	must.Get(v.Validate(own))(t)
	assert.Equal(t, token("accept.txt")[:len(own)-86], own[:len(own)-86])
}
