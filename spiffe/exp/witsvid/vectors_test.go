package witsvid_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
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
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

var exampleOrg = spiffe.MustParseTrustDomain("example.org")

func readVectors(t testing.TB) (vectorFile, *spiffe.BundleSet) {
	t.Helper()
	var f vectorFile
	d := json.NewDecoder(bytes.NewReader(vectorsOnDisk(t)))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&f))
	set := &spiffe.BundleSet{}
	for td, doc := range f.Bundles {
		set = set.With(parseBundle(t, td, doc))
	}
	return f, set
}

func parseBundle(t testing.TB, td string, doc []byte) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.ParseBundleWIT(spiffe.MustParseTrustDomain(td), doc))(t)
}

// atNow are the options of the vectors: the clock of the table and leeway 0.
func atNow(edit ...func(*witsvid.ValidatorOptions)) *witsvid.ValidatorOptions {
	o := &witsvid.ValidatorOptions{Leeway: new(time.Duration), Now: func() time.Time { return time.Unix(now, 0) }}
	for _, e := range edit {
		e(o)
	}
	return o
}

func newValidator(t testing.TB, bundles spiffe.BundleSource, opts *witsvid.ValidatorOptions) *witsvid.Validator {
	t.Helper()
	return must.Get(witsvid.NewValidator(bundles, spiffe.AllowAnyPeer(), opts))(t)
}

// refused is the error of a Validator, as programs cannot see it.
type refused = token.Error

const maxSize = token.MaxSize

// refusal returns err as a *refused, and checks what holds for all of them.
func refusal(t testing.TB, err error, secrets ...string) *refused {
	t.Helper()
	e := must.As[*refused](err)(t)
	assert.NotEmpty(t, e.What)
	assert.NotEmpty(t, e.Reason)
	assert.Less(t, len(e.Error()), 2000)
	for _, s := range secrets {
		if parts := strings.Split(s, "."); len(parts) == 3 && len(parts[2]) > 20 {
			assert.NotContains(t, e.Error(), parts[2], "an error does not carry a token")
		}
	}
	return e
}

func TestVectorsComplete(t *testing.T) {
	t.Parallel()
	f, _ := readVectors(t)
	var want, ids []string
	for i := 1; i <= 43; i++ {
		if i != 29 && i != 30 { // the table has none
			want = append(want, fmt.Sprintf("WV-%02d", i))
		}
	}
	for _, v := range f.Vectors {
		ids = append(ids, v.ID)
		assert.NotEmpty(t, v.Why, v.ID)
		assert.NotEmpty(t, v.Steps, v.ID)
	}
	assert.Equal(t, want, ids)
}

// All vectors over HTTP.
func TestVectors(t *testing.T) {
	t.Parallel()
	f, bundles := readVectors(t)
	for _, v := range f.Vectors {
		t.Run(v.ID, func(t *testing.T) {
			t.Parallel()
			conformance.Covers(t, v.ID)
			logs := &logged{}
			wrap := must.Get(witsvid.Middleware(newValidator(t, bundles, atNow()), []string{"https://db.example.org"},
				&witsvid.MiddlewareOptions{TLSTerminated: true, Logger: logs.logger()}))(t)
			for _, s := range v.Steps {
				r := httptest.NewRequest(http.MethodGet, f.URL, nil)
				for name, value := range map[string]string{headerToken: s.Token, headerProof: s.Proof, "Authorization": s.Authorization} {
					if value != "" {
						r.Header.Set(name, value)
					}
				}
				var proof *witsvid.Proof
				w := httptest.NewRecorder()
				wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { proof, _ = witsvid.FromContext(r.Context()) })).ServeHTTP(w, r)
				if s.Expect == "accept" {
					require.NoError(t, logs.take(), v.Why)
					assert.Equal(t, http.StatusOK, w.Code)
					require.NotNil(t, proof)
					assert.Equal(t, webID, proof.ID().String())
					assert.Equal(t, int64(1767225900), proof.NotAfter().Unix())
					continue
				}
				e := refusal(t, logs.take(), s.Token, s.Proof)
				assert.Equal(t, v.Rule, e.Rule, "%v", e)
				assert.Equal(t, v.What, e.What, "%v", e)
				assert.Equal(t, v.Reason, string(e.Reason), "%v", e)
				assert.Nil(t, proof, "the handler was not called")
				assert.Equal(t, http.StatusBadRequest, w.Code)
			}
		})
	}
}

func TestKnownAnswers(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "KAT-3", "KAT-4", "WIT-15", "WPT-10")
	read := func(name string) string {
		data := must.Get(os.ReadFile(filepath.Join("testdata", "kat", name)))(t)
		return strings.TrimSpace(string(data))
	}
	token, proof := read("kat-3.txt"), read("kat-4.txt")
	bundle := parseBundle(t, "example.org", []byte(read("bundle.json")))
	v := newValidator(t, bundle, atNow())
	got := must.Get(v.Validate(token, proof, witsvid.Call{Target: "https://db.example.org/query"}))(t)
	assert.Equal(t, webID, got.ID().String())
	assert.Equal(t, int64(now+3600), got.NotAfter().Unix())
	assert.Equal(t, "Zx7iF-nmYQDGWX4B6ieCCFDqftQ7_FZX0g_XwF8kqA4", hashOf(token))

	u := must.Get(witsvid.ParseUnverified(token))(t)
	assert.Equal(t, &witsvid.Unverified{ID: spiffe.MustParseID(webID), Expires: time.Unix(now+3600, 0).UTC(), KeyID: "wit-1"}, u)

	// The same bundle without WIT support knows no such key (WIT-64).
	plain := must.Get(spiffe.ParseBundle(exampleOrg, []byte(read("bundle.json"))))(t)
	_, err := newValidator(t, plain, atNow()).Validate(token, proof, witsvid.Call{Target: "https://db.example.org/query"})
	e := refusal(t, err, token, proof)
	assert.Equal(t, "unknown key", string(e.Reason))
	assert.Equal(t, "WIT-63", e.Rule)
	assert.EqualError(t, e, `witsvid: token of "spiffe://example.org/ns/prod/sa/web": unknown key: the bundle of "example.org" has no WIT keys; ParseBundle leaves them out, ParseBundleWIT reads them`)
}
