// Package fuzzid holds spiffe.ParseID against go-spiffe's parser with arbitrary input. It is a package of its own
// because a fuzz target is slow in a binary that links every peer: the instrumentation of each is copied for each input.
package fuzzid

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
)

// explain returns the rule by which an ID is refused here that the peer accepts. Nothing else may
// differ, and nothing that is accepted here may be refused there.
func explain(in string) (rule string, ok bool) {
	domain, _, _ := strings.Cut(strings.TrimPrefix(in, "spiffe://"), "/")
	switch {
	case len(in) > 2048: // is found first
		return "ID-21", true
	case len(domain) > 255:
		return "ID-13", true
	}
	return "", false
}

func FuzzID(f *testing.F) {
	data, err := os.ReadFile("../../../spiffe/testdata/ids.jsonl")
	require.NoError(f, err)
	for line := range bytes.Lines(data) {
		var v struct {
			In, Prefix, Repeat, Suffix string
			Count                      int
		}
		require.NoError(f, json.Unmarshal(line, &v))
		f.Add(v.In + v.Prefix + strings.Repeat(v.Repeat, v.Count) + v.Suffix)
	}
	f.Add("spiffe://" + strings.Repeat("d", 3000)) // too long in both ways
	f.Fuzz(func(t *testing.T, in string) {
		id, err := spiffe.ParseID(in)
		peer, peerErr := spiffeid.FromString(in)
		switch {
		case err == nil && peerErr == nil:
			if id.String() != peer.String() || id.Path() != peer.Path() || id.TrustDomain().String() != peer.TrustDomain().Name() {
				t.Errorf("%q: %v is %v with the peer", in, id, peer)
			}
		case err == nil:
			t.Errorf("%q: refused by the peer: %v", in, peerErr)
		case peerErr == nil:
			rule, ok := explain(in)
			if !ok {
				t.Errorf("%q: accepted by the peer: %v", in, err)
			} else if e, _ := errors.AsType[*spiffe.ParseError](err); e.Rule != rule {
				t.Errorf("%q: %v, not %s", in, err, rule)
			}
		}
	})
}
