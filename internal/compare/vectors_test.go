package compare

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	peerwit "github.com/spiffe/go-spiffe/v2/exp/svid/witsvid"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

const (
	spiffeVectors = "../../spiffe/testdata"
	jwtVectors    = "../../spiffe/jwtsvid/testdata"
	witVectors    = "../../spiffe/exp/witsvid/testdata"
)

// The outcomes of most vectors. For one that is accepted, the ID that comes out of it follows.
const (
	refuses = "refuses"
	accepts = "accepts"
)

// judged compares the outcomes of vectors with the table of differences.
type judged struct {
	table map[string]difference
	seen  []string
}

func (j *judged) vector(t *testing.T, id, ours, peer, why string) {
	t.Helper()
	j.seen = append(j.seen, id)
	d, listed := j.table[id]
	switch {
	case ours == peer && listed:
		t.Errorf("%s: both %s, yet the table has a difference", id, ours)
	case ours != peer && !listed:
		t.Errorf("%s (%s): svidkit %s, peer %s: a new difference", id, why, ours, peer)
	case ours != peer:
		assert.Equal(t, d.peer, strings.Split(peer, " spiffe://")[0], "%s: what the peer does has changed", id)
	}
}

// done asserts that n vectors were met, none twice and all of the table among them.
func (j *judged) done(t *testing.T, n int) {
	t.Helper()
	slices.Sort(j.seen)
	assert.Len(t, slices.Compact(j.seen), n)
	for id, d := range j.table {
		assert.Contains(t, j.seen, id)
		assert.Regexp(t, `^[A-Z0-9]+-\d+$`, d.rule, id)
	}
}

func verdict(id string, err error) string {
	if err != nil {
		return refuses
	}
	return strings.TrimSpace(accepts + " " + id)
}

func readFile(t testing.TB, path ...string) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join(path...)))(t)
}

type idVector struct {
	ID, In, Prefix, Repeat, Suffix, Why string
	Count                               int
	OK                                  bool
}

func idVectors(t testing.TB) []idVector {
	t.Helper()
	var all []idVector
	for line := range bytes.Lines(readFile(t, spiffeVectors, "ids.jsonl")) {
		var v idVector
		require.NoError(t, json.Unmarshal(line, &v))
		if v.Count > 0 {
			v.In = v.Prefix + strings.Repeat(v.Repeat, v.Count) + v.Suffix
		}
		all = append(all, v)
	}
	return all
}

func TestIDVectors(t *testing.T) {
	t.Parallel()
	j := judged{table: idDifferences}
	for _, v := range idVectors(t) {
		id, err := spiffe.ParseID(v.In)
		require.Equal(t, v.OK, err == nil, "%s: %v", v.ID, err)
		peer, peerErr := spiffeid.FromString(v.In)
		j.vector(t, v.ID, verdict(id.String(), err), verdict(peer.String(), peerErr), v.Why)
	}
	j.done(t, 157)
}

// x509Vector is one file of testdata/x509: a header and named sections.
type x509Vector struct{ header, sections map[string]string }

func readX509Vector(t testing.TB, file string) x509Vector {
	t.Helper()
	v := x509Vector{header: map[string]string{}, sections: map[string]string{}}
	section := ""
	for line := range strings.Lines(string(readFile(t, file))) {
		text := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]"):
			section = strings.Trim(text, "[]")
			v.sections[section] = ""
		case section != "":
			v.sections[section] += line
		case text != "":
			k, s, ok := strings.Cut(text, ": ")
			require.True(t, ok, "%s: %q", file, text)
			v.header[k] = s
		}
	}
	return v
}

func certificates(text string) ([]*x509.Certificate, error) {
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

// load gives an identity in the form of the Workload API to both.
func (v x509Vector) load(t *testing.T) (ours, peer string) {
	t.Helper()
	certs := must.Get(base64.StdEncoding.DecodeString(v.sections["svid"]))(t)
	key := must.Get(base64.StdEncoding.DecodeString(v.sections["key"]))(t)
	o, err := spiffe.ParseSVID(certs, key)
	if err != nil {
		ours = refuses
	} else {
		ours = verdict(o.ID().String(), nil)
	}
	p, err := x509svid.ParseRaw(certs, key)
	if err != nil {
		peer = refuses
	} else {
		peer = verdict(p.ID.String(), nil)
	}
	return ours, peer
}

// verify gives a chain and the bundles to both.
func (v x509Vector) verify(t *testing.T) (ours, peer string) {
	t.Helper()
	now := must.Get(time.Parse(time.RFC3339, v.header["now"]))(t)
	role, ok := map[string]spiffe.Role{"any": spiffe.AnyRole, "server": spiffe.ServerRole, "client": spiffe.ClientRole}[v.header["role"]]
	require.True(t, ok)
	chain, err := certificates(v.sections["chain"])
	if err != nil { // it does not come as far as either
		return refuses, refuses
	}
	var set spiffe.BundleSet
	peers := x509bundle.NewSet()
	refused := false
	for name, text := range v.sections {
		domain, ok := strings.CutPrefix(name, "bundle ")
		if !ok {
			continue
		}
		roots := must.Get(certificates(text))(t)
		b, err := spiffe.NewBundle(spiffe.MustParseTrustDomain(domain), spiffe.BundleContents{X509Authorities: roots})
		if err != nil {
			refused = true
		} else {
			set = *set.With(b)
		}
		peers.Add(x509bundle.FromX509Authorities(spiffeid.RequireTrustDomainFromString(domain), roots))
	}
	ver, err := spiffe.NewVerifier(&set, spiffe.AllowAnyPeer(), func() time.Time { return now })
	require.NoError(t, err)
	if proof, err := ver.VerifyChain(chain, role); err != nil || refused {
		ours = refuses
	} else {
		ours = verdict(proof.ID().String(), nil)
	}
	id, _, err := x509svid.Verify(chain, peers, x509svid.WithTime(now))
	return ours, verdict(id.String(), err)
}

func TestX509Vectors(t *testing.T) {
	t.Parallel()
	files := must.Get(filepath.Glob(spiffeVectors + "/x509/*.txt"))(t)
	j := judged{table: x509Differences}
	for _, f := range files {
		v := readX509Vector(t, f)
		var ours, peer string
		if _, ok := v.sections["svid"]; ok {
			ours, peer = v.load(t)
		} else {
			ours, peer = v.verify(t)
		}
		require.Equal(t, v.header["expect"] == "accept", ours != refuses, "%s: %s", f, ours)
		j.vector(t, v.header["id"], ours, peer, v.header["why"])
	}
	j.done(t, 69)
}

// contents says what was read from a bundle document. A hint that is not positive is none.
func contents(certs, tokens, wits int, sequence *uint64, hint time.Duration) string {
	text := fmt.Sprintf("accepts %d X.509, %d JWT, %d WIT", certs, tokens, wits)
	if sequence != nil {
		text += fmt.Sprintf(", sequence %d", *sequence)
	}
	if hint > 0 {
		text += fmt.Sprintf(", hint %d", hint/time.Second)
	}
	return text
}

func ourContents(doc []byte) string {
	b, err := spiffe.ParseBundleWIT(spiffe.MustParseTrustDomain("example.org"), doc)
	if err != nil {
		return refuses
	}
	c := b.Contents()
	return contents(len(c.X509Authorities), len(c.JWTAuthorities), len(c.WITAuthorities), c.Sequence, c.RefreshHint)
}

func peerContents(doc []byte) string {
	b, err := spiffebundle.Parse(spiffeid.RequireTrustDomainFromString("example.org"), doc)
	if err != nil {
		return refuses
	}
	var sequence *uint64
	if n, ok := b.SequenceNumber(); ok {
		sequence = &n
	}
	hint, _ := b.RefreshHint()
	return contents(len(b.X509Authorities()), len(b.JWTAuthorities()), len(b.WITAuthorities()), sequence, hint)
}

// Our parser reads WIT keys here, as the peer's does.
func TestBundleVectors(t *testing.T) {
	t.Parallel()
	var index struct {
		Documents []struct{ ID, File, Expect, Why string }
	}
	require.NoError(t, json.Unmarshal(readFile(t, spiffeVectors, "bundles", "index.json"), &index))
	j := judged{table: bundleDifferences}
	for _, v := range index.Documents {
		doc := readFile(t, spiffeVectors, "bundles", v.File)
		ours := ourContents(doc)
		require.Equal(t, v.Expect == "accept", ours != refuses, v.ID)
		j.vector(t, v.ID, ours, peerContents(doc), v.Why)
	}
	j.done(t, 93)
}

type jwtVector struct {
	header map[string]string
	tokens []string
}

func readJWTVector(t testing.TB, file string) jwtVector {
	t.Helper()
	head, body, ok := strings.Cut(string(readFile(t, file)), "\n\n")
	require.True(t, ok, file)
	v := jwtVector{header: map[string]string{}}
	for line := range strings.SplitSeq(head, "\n") {
		name, value, ok := strings.Cut(line, ": ")
		require.True(t, ok, "%s: %q", file, line)
		v.header[name] = value
	}
	for line := range strings.Lines(body) {
		token, err := strconv.Unquote(strings.TrimSpace(line))
		require.NoError(t, err, file)
		v.tokens = append(v.tokens, token)
	}
	return v
}

// peerJWTBundles has the authorities of ours, so that only tokens are judged.
func peerJWTBundles(set *spiffe.BundleSet) *jwtbundle.Set {
	peers := jwtbundle.NewSet()
	for b := range set.All() {
		td := spiffeid.RequireTrustDomainFromString(b.TrustDomain().String())
		peers.Add(jwtbundle.FromJWTAuthorities(td, maps.Collect(b.JWTAuthorities())))
	}
	return peers
}

// The peer validates at the present moment, so the vectors are read in a bubble whose clock is set to
// their time.
func TestJWTVectors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Unix(1767225600, 0))) // at which all of them are judged
		files := must.Get(filepath.Glob(jwtVectors + "/vectors/*.txt"))(t)
		j := judged{table: jwtDifferences}
		for _, f := range files {
			v := readJWTVector(t, f)
			parse := func(td, name string) *spiffe.Bundle {
				b, err := spiffe.ParseBundle(spiffe.MustParseTrustDomain(td), readFile(t, jwtVectors, "bundles", name+".json"))
				require.NoError(t, err)
				return b
			}
			name := v.header["bundles"]
			if name == "" {
				name = "example.org"
			}
			set := must.Get(spiffe.NewBundleSet(parse("example.org", name), parse("other.test", "other.test")))(t)
			var opts jwtsvid.ValidatorOptions
			if s := v.header["leeway"]; s != "" {
				leeway := must.Get(time.ParseDuration(s))(t)
				opts.Leeway = &leeway
			}
			validator := must.Get(jwtsvid.NewValidator(set, []string{"db"}, &opts))(t)
			var ours, peer []string
			for _, token := range v.tokens {
				proof, err := validator.Validate(token)
				require.Equal(t, v.header["expect"] == "accept", err == nil, "%s: %v", f, err)
				if err != nil {
					ours = append(ours, refuses)
				} else {
					ours = append(ours, verdict(proof.ID().String(), nil))
				}
				svid, err := peerjwt.ParseAndValidate(token, peerJWTBundles(set), []string{"db"})
				if err != nil {
					peer = append(peer, refuses)
				} else {
					peer = append(peer, verdict(svid.ID.String(), nil))
				}
			}
			j.vector(t, v.header["id"], strings.Join(ours, ", "), strings.Join(peer, ", "), v.header["why"])
		}
		j.done(t, 62)
	})
}

// The peer has no proofs of possession: it judges the token of each vector alone. It too validates at the present
// moment.
func TestWITVectors(t *testing.T) {
	t.Parallel()
	var f struct {
		Now     int64
		URL     string
		Bundles map[string]json.RawMessage
		Vectors []struct {
			ID, Why string
			Steps   []struct{ Token, Proof, Authorization, Expect string }
		}
	}
	require.NoError(t, json.Unmarshal(readFile(t, witVectors, "vectors.json"), &f))
	target, _, _ := strings.Cut(f.URL, "?")
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Unix(f.Now, 0)))
		set, peers := new(spiffe.BundleSet), spiffebundle.NewSet()
		for td, doc := range f.Bundles {
			set = set.With(must.Get(spiffe.ParseBundleWIT(spiffe.MustParseTrustDomain(td), doc))(t))
			peers.Add(must.Get(spiffebundle.Parse(spiffeid.RequireTrustDomainFromString(td), doc))(t))
		}
		j := judged{table: witDifferences}
		for _, v := range f.Vectors {
			opts := &witsvid.ValidatorOptions{Leeway: new(time.Duration)}
			validator := must.Get(witsvid.NewValidator(set, spiffe.AllowAnyPeer(), opts))(t)
			var ours, peer []string
			for _, s := range v.Steps {
				id := ""
				proof, err := validator.Validate(s.Token, s.Proof, witsvid.Call{Target: target})
				require.Equal(t, s.Expect == "accept", err == nil, "%s: %v", v.ID, err)
				if err == nil {
					id = proof.ID().String()
				}
				ours = append(ours, verdict(id, err))
				svid, err := peerwit.ParseAndValidate(s.Token+strings.TrimPrefix(s.Authorization, "Bearer "), peers)
				if err == nil {
					id = svid.ID.String()
				}
				peer = append(peer, verdict(id, err))
			}
			j.vector(t, v.ID, strings.Join(ours, ", "), strings.Join(peer, ", "), v.Why)
		}
		j.done(t, 41)
	})
}
