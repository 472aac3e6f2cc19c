package sds

import (
	"bytes"
	"log/slog"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// kindsOf returns a secret of each kind; internal/compare has them with revocation lists, too.
func kindsOf(t testing.TB) map[string]*pki.Secret {
	t.Helper()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.example")
	set := must.Get(spiffe.NewBundleSet(ca.Bundle(), other.Bundle()))(t)
	web := pair(t, ca, "s")
	chain, _, _ := web.KeyPair()
	all := map[string]*pki.Secret{"pair": web, "roots": roots(t, ca, "s")}
	add := func(kind string) func(*pki.Secret, error) {
		return func(s *pki.Secret, err error) {
			require.NoError(t, err)
			all[kind] = s
		}
	}
	add("provider")(pki.NewKeyProviderSecret("s", chain, providerOf(t, "hsm", "type.googleapis.com/google.protobuf.Empty")))
	add("domains")(pki.NewTrustDomainsSecret("s", set))
	add("tickets")(pki.NewTicketKeysSecret("s", []byte(strings.Repeat("k", 80))))
	add("generic")(pki.NewGenericSecret("s", map[string][]byte{"": []byte("hunter2")}))
	add("values")(pki.NewGenericSecret("s", map[string][]byte{"a": []byte("1"), "b": []byte("2")}))
	return all
}

func providerOf(t testing.TB, name, url string) []byte {
	t.Helper()
	b := must.Get(protofield.Write(func(w *protofield.Writer) {
		w.Text(1, name)
		if url != "" {
			w.Message(3, func(w *protofield.Writer) { w.Text(1, url) })
		}
	}))(t)
	return b
}

// valueOf returns the encoded Secret of an entry.
func valueOf(t testing.TB, e *entry) []byte {
	t.Helper()
	var value []byte
	require.NoError(t, protofield.Read(e.any, func(f *protofield.Field) {
		if f.Number == 2 {
			f.Bytes(&value)
		}
	}))
	return value
}

// Versions differ by kind and by content, and those of what can be guessed by the server, too.
func TestKindVersions(t *testing.T) {
	t.Parallel()
	versions := make(map[version]string)
	for kind, s := range kindsOf(t) {
		a := must.Get(newEntry("s", s, []byte("salt")))(t)
		b := must.Get(newEntry("s", s, []byte("pepper")))(t)
		assert.Empty(t, versions[a.version])
		versions[a.version] = kind
		guessable := kind == "generic" || kind == "values" || kind == "provider"
		assert.Equal(t, guessable, a.version != b.version, kind)
		assert.Equal(t, a.any, b.any)
	}
	salts := make(map[string]bool)
	for range 2 {
		tab := newTable(newAnswers(), slog.New(slog.DiscardHandler))
		salts[string(tab.salt)] = true
		tab.close()
	}
	assert.Len(t, salts, 2, "each server has its own")
}

// A provider that Envoy would reject is an error of the source, and an empty secret is one.
func TestKindsRefused(t *testing.T) {
	t.Parallel()
	chain, _, _ := pair(t, spiffetest.NewCA(t, "example.org"), "s").KeyPair()
	for name, provider := range map[string][]byte{
		"no name": providerOf(t, "", "x"), "no configuration": providerOf(t, "hsm", ""), "garbage": []byte("garbage"), "cut short": providerOf(t, "hsm", "x")[:4],
	} {
		_, err := newEntry("s", must.Get(pki.NewKeyProviderSecret("s", chain, provider))(t), nil)
		assert.ErrorContains(t, err, "key provider", name)
	}
	assert.ErrorContains(t, must.Err(newEntry("s", new(pki.Secret), nil)), "empty")
}

// A client takes every kind, and nothing that it would take for something else.
func TestParseSecret(t *testing.T) {
	t.Parallel()
	kinds := kindsOf(t)
	for kind, want := range kinds {
		e := must.Get(newEntry("s", want, nil))(t)
		var m secret
		require.NoError(t, protofield.Read(valueOf(t, e), m.read))
		got, err := m.parse()
		require.NoError(t, err, kind)
		assert.True(t, sameSecret(want, got), kind)
		assert.Equal(t, want.String(), got.String())
		for other, s := range kinds {
			assert.Equal(t, kind == other, sameSecret(s, got), "%s, %s", kind, other)
		}
	}

	chain, key, _ := kinds["pair"].KeyPair()
	trust, _ := kinds["roots"].Roots()
	provider := providerOf(t, "hsm", "x")
	message := func(fields ...func(*protofield.Writer)) func(*protofield.Writer) {
		return func(w *protofield.Writer) {
			for _, f := range fields {
				f(w)
			}
		}
	}
	in := func(n protofield.Number, f func(*protofield.Writer)) func(*protofield.Writer) {
		return func(w *protofield.Writer) { w.Message(n, f) }
	}
	inline := func(n protofield.Number, data []byte) func(*protofield.Writer) {
		return func(w *protofield.Writer) { writeInline(w, n, data) }
	}
	file := func(n protofield.Number) func(*protofield.Writer) {
		return in(n, func(w *protofield.Writer) { w.Text(1, "/etc/passwd") })
	}
	raw := func(n protofield.Number, b []byte) func(*protofield.Writer) {
		return func(w *protofield.Writer) { w.AddBytes(n, b) }
	}
	validator := func(url string, config func(*protofield.Writer)) func(*protofield.Writer) {
		return in(12, message(func(w *protofield.Writer) { w.Text(1, validatorName) }, in(2, message(func(w *protofield.Writer) { w.Text(1, url) }, in(2, config)))))
	}
	domain := func(name string, bundle func(*protofield.Writer)) func(*protofield.Writer) {
		return in(1, message(func(w *protofield.Writer) { w.Text(1, name) }, bundle))
	}
	for name, tc := range map[string]struct {
		write func(*protofield.Writer)
		want  string
	}{
		"another validator":        {in(4, validator("type.googleapis.com/x", message())), "validator"},
		"no validator":             {in(4, in(12, message())), "validator"},
		"no trust domain":          {in(4, validator(validatorURL, message())), "no X.509"},
		"a bad trust domain":       {in(4, validator(validatorURL, domain("spiffe://example.org", inline(2, trust)))), "trust domain"},
		"a trust domain twice":     {in(4, validator(validatorURL, message(domain("a", inline(2, trust)), domain("a", inline(2, trust))))), "a"},
		"no bundle":                {in(4, validator(validatorURL, domain("a", message()))), "inline"},
		"a bundle in a file":       {in(4, validator(validatorURL, domain("a", file(2)))), "inline"},
		"an empty bundle":          {in(4, validator(validatorURL, domain("a", inline(2, nil)))), ""},
		"a leaf in a bundle":       {in(4, validator(validatorURL, domain("a", inline(2, chain)))), ""},
		"a key in a bundle":        {in(4, validator(validatorURL, domain("a", inline(2, append(bytes.Clone(trust), key...))))), ""},
		"a damaged bundle":         {in(4, validator(validatorURL, domain("a", inline(2, append(bytes.Clone(trust), "-----BEGIN X509 CRL-----\n%\n-----END X509 CRL-----\n"...))))), "damaged"},
		"a bad list in a bundle":   {in(4, validator(validatorURL, domain("a", inline(2, append(bytes.Clone(trust), "-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----\n"...))))), "revocation list"},
		"a map of bundles":         {in(4, validator(validatorURL, message(domain("a", inline(2, trust)), inline(2, []byte("{}"))))), "trust_bundles"},
		"a malformed validator":    {in(4, validator(validatorURL, raw(1, []byte{0xff}))), "malformed"},
		"lists beside a validator": {in(4, message(inline(7, trust), validator(validatorURL, domain("a", inline(2, trust))))), "beside"},
		"lists that are roots":     {in(4, message(inline(1, trust), inline(7, trust))), "revocation list"},
		"lists in a file":          {in(4, message(inline(1, trust), file(7))), "inline"},
		"provider and key":         {in(2, message(inline(1, chain), inline(2, key), raw(6, provider))), "beside"},
		"provider without a chain": {in(2, raw(6, provider)), "without"},
		"no ticket keys":           {in(3, message()), "ticket key"},
		"a short ticket key":       {in(3, inline(1, make([]byte, 79))), "79"},
		"a ticket key in a file":   {in(3, file(1)), "0 bytes"},
		"no value":                 {in(5, message()), "value"},
		"a value in a file":        {in(5, file(1)), "inline"},
		"an empty value":           {in(5, inline(1, nil)), "empty"},
		"values and a value":       {in(5, message(inline(1, key), in(2, message(func(w *protofield.Writer) { w.Text(1, "k") }, inline(2, key))))), "alone"},
		"an unknown kind":          {in(9, message()), "without content"},
	} {
		b := must.Get(protofield.Write(message(func(w *protofield.Writer) { w.Text(1, "s") }, tc.write)))(t)
		var m secret
		err := protofield.Read(b, m.read)
		if err == nil {
			var s *pki.Secret
			s, err = m.parse()
			assert.Nil(t, s, name)
		}
		require.ErrorContains(t, err, tc.want, name)
		assert.NotContains(t, err.Error(), string(key[30:60]), name)
	}
}

// FuzzSecret reads what a server may send to a client. What is accepted means the same when it is encoded again.
func FuzzSecret(f *testing.F) {
	for _, s := range kindsOf(f) {
		f.Add(valueOf(f, must.Do(newEntry("s", s, nil))))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var m secret
		if protofield.Read(data, m.read) != nil || m.name == "" {
			return
		}
		s, err := m.parse()
		if err != nil {
			return
		}
		e, err := newEntry(m.name, s, nil)
		if err != nil { // a key provider is passed on as it is, also to a program that finds it wrong
			return
		}
		var again secret
		require.NoError(t, protofield.Read(valueOf(t, e), again.read))
		back := must.Get(again.parse())(t)
		require.True(t, sameSecret(s, back))
		a, _ := s.Generic()
		b, _ := back.Generic()
		require.True(t, maps.EqualFunc(a, b, bytes.Equal))
	})
}
