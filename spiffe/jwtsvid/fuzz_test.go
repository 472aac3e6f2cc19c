package jwtsvid_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

func vectorFiles(t testing.TB) []vector {
	t.Helper()
	files := must.Get(filepath.Glob("testdata/vectors/*.txt"))(t)
	require.Len(t, files, 62)
	var all []vector
	for _, f := range files {
		all = append(all, readVector(t, f))
	}
	return all
}

// FuzzValidate gives the validator whole tokens. What it accepts it accepts again, and so does another
// one; what it refuses does not show in the error.
func FuzzValidate(f *testing.F) {
	for _, v := range vectorFiles(f) {
		for _, token := range v.tokens {
			f.Add(token)
		}
	}
	f.Add("..")
	f.Add("e30.e30.")
	set := bundles(f, "")
	f.Fuzz(func(t *testing.T, token string) {
		v := validator(t, set, jwtsvid.ValidatorOptions{})
		proof, err := v.Validate(token)
		u, parseErr := jwtsvid.ParseUnverified(token)
		if err != nil {
			if _, ok := errors.AsType[*refusal](err); !ok || proof != nil {
				t.Fatalf("%T, %v", err, proof)
			}
			if part := leaks(err.Error(), token); part != "" {
				t.Fatalf("the error %q shows %q", err, part)
			}
			return
		}
		if parseErr != nil || u.ID != proof.ID() || !slices.Equal(u.Audience, proof.Audience()) || !u.Expires.Equal(proof.Expires()) {
			t.Fatalf("%v is not what ParseUnverified reads: %v, %v", proof, u, parseErr)
		}
		if again, err := v.Validate(token); err != nil || again != proof {
			t.Fatalf("not accepted again: %v", err)
		}
		other := validator(t, set, jwtsvid.ValidatorOptions{})
		if again, err := other.Validate(token); err != nil || again.ID() != proof.ID() {
			t.Fatalf("not accepted by another: %v", err)
		}
		var sub string
		if ok, err := proof.Claim("sub", &sub); !ok || err != nil || sub != proof.ID().String() {
			t.Fatalf("claim: %q, %v", sub, err)
		}
	})
}

// FuzzSigned signs what it is given, so that the rules behind the signature are reached, and compares
// with a slow and obvious reference, and with go-jose.
func FuzzSigned(f *testing.F) {
	for _, v := range vectorFiles(f) {
		for _, token := range v.tokens {
			if p := strings.Split(token, "."); len(p) == 3 {
				header, payload := parts(f, strings.TrimSpace(token))
				f.Add(header, payload)
			}
		}
	}
	f.Add(`{"alg":"ES256","kid":"jwt-1"}`, `{"sub":"spiffe://example.org/a","aud":"\u0064b","exp":1e300,"nbf":-0.5e-1,"x":[[{}]]}`)
	f.Add("{\"alg\":\"ES256\"\n}", "\t{ \"sub\" : \"spiffe://example.org\" , \"aud\" : [ \"x\" , \"db\" ] , \"exp\" : 1767225540.000001 }")
	set := bundles(f, "")
	key := newMaterial(f).jwt1
	f.Fuzz(func(t *testing.T, header, payload string) {
		token := sign(header, payload, "ES256", key)
		if len(token) > maxSize {
			return
		}
		proof, err := validator(t, set, jwtsvid.ValidatorOptions{}).Validate(token)
		if err == nil {
			agrees(t, proof, token, key.Public())
		}
		want := refHeader(header)
		if want == nil {
			want = refPayload(payload)
		}
		switch {
		case errors.Is(want, errClose):
		case err == nil && want != nil:
			t.Fatalf("accepted, but %v: %s %s", want, header, payload)
		// The reference takes half a surrogate pair for a character.
		case err != nil && want == nil && !strings.Contains(header+payload, `\u`):
			t.Fatalf("the reference accepts: %v: %s %s", err, header, payload)
		}
	})
}

func refHeader(text string) error {
	m, err := refObject(text)
	if err != nil {
		return err
	}
	for name, v := range m {
		switch name {
		case "alg":
		case "kid":
			if v != "jwt-1" {
				return errors.New("kid")
			}
		case "typ":
			if v != "JWT" && v != "JOSE" {
				return errors.New("typ")
			}
		default:
			return errors.New("a member too many")
		}
	}
	if m["alg"] != "ES256" { // the others do not fit the key
		return errors.New("alg")
	}
	return nil
}

var refID = regexp.MustCompile(`^spiffe://example\.org(/[A-Za-z0-9._-]+)*$`)

func refPayload(text string) error {
	m, err := refObject(text)
	if err != nil {
		return err
	}
	sub, _ := m["sub"].(string)
	if !refID.MatchString(sub) || len(sub) > 2048 || slices.ContainsFunc(strings.Split(sub[9:], "/"), func(s string) bool { return s == "." || s == ".." }) {
		return errors.New("sub")
	}
	found := m["aud"] == "db"
	list, _ := m["aud"].([]any)
	for _, a := range list {
		if _, ok := a.(string); !ok {
			return errors.New("aud")
		}
		found = found || a == "db"
	}
	if !found {
		return errors.New("not ours")
	}
	exp, err := refSeconds(m["exp"])
	if err != nil || exp <= now-60 {
		return errors.Join(errors.New("expired"), err)
	}
	if v, ok := m["nbf"]; ok {
		if nbf, err := refSeconds(v); err != nil || nbf > now+60 {
			return errors.Join(errors.New("not yet"), err)
		}
	}
	return nil
}

// errClose says that a float is not the judge of this.
var errClose = errors.New("too close to tell")

func refSeconds(v any) (float64, error) {
	n, ok := v.(json.Number)
	if !ok {
		return 0, errors.New("not a number")
	}
	f, _ := n.Float64()
	for _, edge := range []float64{now - 60, now + 60} {
		if f != edge && math.Abs(f-edge) < 1e-5 {
			return 0, errClose
		}
	}
	return f, nil
}

// refObject reads an object token by token.
func refObject(text string) (map[string]any, error) {
	if !utf8.ValidString(text) {
		return nil, errors.New("not UTF-8")
	}
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	v, err := refValue(d, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something behind it")
	}
	m, ok := v.(map[string]any)
	if !ok || !json.Valid(bytes.TrimSpace([]byte(text))) { // Token alone forgives a comma too many
		return nil, errors.New("not an object")
	}
	return m, nil
}

func refValue(d *json.Decoder, depth int) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	delim, ok := t.(json.Delim)
	if !ok {
		return t, nil
	}
	if depth == 64 {
		return nil, errors.New("too deep")
	}
	m, list := map[string]any{}, []any{}
	for d.More() {
		name := ""
		if delim == '{' {
			t, err := d.Token()
			if err != nil {
				return nil, err
			}
			name = fmt.Sprint(t)
			if _, ok := m[name]; ok {
				return nil, errors.New("a member twice")
			}
		}
		v, err := refValue(d, depth+1)
		if err != nil {
			return nil, err
		}
		m[name] = v
		list = append(list, v)
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	if delim == '{' {
		return m, nil
	}
	return list, nil
}
