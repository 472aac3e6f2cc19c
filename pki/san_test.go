package pki_test

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"encoding/json"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// sanVector is one line of testdata/sans.jsonl: names with their types, and the extension in hex.
type sanVector struct {
	Why      string
	SANs     [][2]string
	DER      string
	OK       bool
	ReadOnly bool
}

func (v sanVector) typed(t testing.TB) []pki.SAN {
	t.Helper()
	var sans []pki.SAN
	for _, s := range v.SANs {
		kind, text := s[0], s[1]
		switch kind {
		case "URI":
			if id, err := spiffe.ParseID(text); err == nil {
				sans = append(sans, pki.IDSAN(id))
			} else {
				sans = append(sans, pki.SAN{Type: pki.URI, Value: text})
			}
		case "DNS":
			sans = append(sans, pki.DNSSAN(text))
		case "IP":
			sans = append(sans, pki.IPSAN(net.ParseIP(text)))
		case "email":
			sans = append(sans, pki.SAN{Type: pki.Email, Value: text})
		default:
			tag := must.Get(strconv.Atoi(kind))(t)
			raw := must.Get(hex.DecodeString(text))(t)
			sans = append(sans, pki.SAN{Type: tag, Value: string(raw)})
		}
	}
	return sans
}

func sanVectors(t testing.TB) []sanVector {
	t.Helper()
	data := must.Get(os.ReadFile("testdata/sans.jsonl"))(t)
	var all []sanVector
	for line := range bytes.Lines(data) {
		var v sanVector
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		require.NoError(t, d.Decode(&v), "%s", line)
		all = append(all, v)
	}
	require.Greater(t, len(all), 40)
	return all
}

func TestSANVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.4-2", "IST-2.4-3", "IST-2.4-7", "IST-2.4-8")
	for _, v := range sanVectors(t) {
		t.Run(v.Why, func(t *testing.T) {
			t.Parallel()
			der := must.Get(hex.DecodeString(v.DER))(t)
			sans, err := readSANs(der)
			if !v.OK {
				requireIs(t, err, errSAN)
				require.NotErrorIs(t, err, spiffe.ErrTooLarge)
				require.True(t, strings.HasPrefix(err.Error(), "pki: invalid subject alternative name: "), "%v", err)
				require.Nil(t, sans)
				return
			}
			require.NoError(t, err)
			want := v.typed(t)
			require.Equal(t, want, sans)
			out, err := writeSANs(want...)
			if v.ReadOnly {
				requireIs(t, err, errSAN)
				return
			}
			require.NoError(t, err)
			require.Equal(t, v.DER, hex.EncodeToString(out))
		})
	}
}

func TestSANLimits(t *testing.T) {
	t.Parallel()
	many := make([]pki.SAN, 1000)
	for i := range many {
		many[i] = pki.DNSSAN("a")
	}
	der := must.Get(writeSANs(many...))(t)
	require.Equal(t, many, must.Get(readSANs(der))(t))

	_, err := writeSANs(append(many, many[0])...)
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
	requireIs(t, err, errSAN)
	// 1,001 names, put together by hand.
	content := append(der[4:], 0x82, 1, 'a')
	_, err = readSANs(append([]byte{0x30, 0x82, byte(len(content) >> 8), byte(len(content))}, content...))
	require.ErrorIs(t, err, spiffe.ErrTooLarge)

	// A value of exactly 64 KiB: 4 bytes for the sequence, 4 for the name.
	issuer := newRoot(t)
	issue := func(n int) (*x509.Certificate, error) {
		o := certOptions()
		o.SANs = []pki.SAN{uriSAN("a:" + strings.Repeat("a", n-2))}
		return issuer.Issue(o)
	}
	der = sanValue(uriSAN("a:" + strings.Repeat("a", 64<<10-10)))
	require.Len(t, der, 64<<10)
	must.Get(issue(64<<10 - 8))(t)
	must.Get(readSANs(der))(t)
	for _, n := range []int{64<<10 - 7, 64 << 10, 1 << 20} {
		require.ErrorIs(t, must.Err(issue(n)), spiffe.ErrTooLarge)
	}
	require.ErrorIs(t, must.Err(readSANs(make([]byte, 64<<10+1))), spiffe.ErrTooLarge)
}

func TestIPSAN(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.4-2")
	for text, want := range map[string]string{
		"192.0.2.1":        "\xc0\x00\x02\x01",
		"::ffff:192.0.2.1": "\xc0\x00\x02\x01",
		"0.0.0.0":          "\x00\x00\x00\x00",
		"::":               strings.Repeat("\x00", 16),
	} {
		assert.Equal(t, pki.SAN{Type: pki.IP, Value: want}, pki.IPSAN(net.ParseIP(text)))
	}
	for _, bad := range []net.IP{nil, {}, {1, 2, 3}, make(net.IP, 5), make(net.IP, 17)} {
		_, err := writeSANs(pki.IPSAN(bad))
		requireIs(t, err, errSAN)
		assert.EqualError(t, err, "pki: invalid certificate signing request: invalid subject alternative name: IP address of "+strconv.Itoa(len(bad))+" bytes, want 4 or 16")
	}
}

func TestSANString(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]pki.SAN{
		"URI:spiffe://example.org/web": pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web")),
		"URI:":                         pki.IDSAN(spiffe.ID{}),
		"DNS:a,b":                      pki.DNSSAN("a,b"),
		`DNS:"a\nb\u00fc"`:             pki.DNSSAN("a\nbü"),
		"IP:::1":                       pki.IPSAN(net.IPv6loopback),
		"IP:616263":                    {Type: pki.IP, Value: "abc"},
		"email:a@b.c":                  {Type: pki.Email, Value: "a@b.c"},
		"type 4:3000":                  {Type: 4, Value: "\x30\x00"},
		"type 0:":                      {},
	} {
		assert.Equal(t, want, s.String())
	}
}

// slowSANs reads the same extension with encoding/asn1, which shares no code with the reader.
func slowSANs(der []byte) (sans []pki.SAN, ok bool) {
	var seq asn1.RawValue
	rest, err := asn1.Unmarshal(der, &seq)
	if err != nil || len(rest) > 0 || seq.Class != asn1.ClassUniversal || seq.Tag != asn1.TagSequence || !seq.IsCompound {
		return nil, false
	}
	for rest = seq.Bytes; len(rest) > 0; {
		var v asn1.RawValue
		if rest, err = asn1.Unmarshal(rest, &v); err != nil || v.Class != asn1.ClassContextSpecific || v.Tag > 30 {
			return nil, false
		}
		s := pki.SAN{Type: v.Tag, Value: string(v.Bytes)}
		switch s.Type {
		case pki.DNS, pki.URI, pki.Email:
			for _, c := range v.Bytes {
				ok = ' ' <= c && c <= '~'
				if !ok {
					return nil, false
				}
			}
			ok = !v.IsCompound
		case pki.IP:
			ok = !v.IsCompound && (len(v.Bytes) == 4 || len(v.Bytes) == 16)
		default:
			ok = true
		}
		if !ok {
			return nil, false
		}
		sans = append(sans, s)
	}
	return sans, len(sans) > 0
}

func FuzzParseSANs(f *testing.F) {
	for _, v := range sanVectors(f) {
		der := must.Get(hex.DecodeString(v.DER))(f)
		f.Add(der)
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		sans, err := readSANs(der)
		if len(der) <= 64<<10 && len(sans) < 1000 {
			if slow, ok := slowSANs(der); ok && len(slow) <= 1000 || err == nil {
				require.Equal(t, ok, err == nil, "the slow reader disagrees: %v", err)
				require.Equal(t, slow, sans)
			}
		}
		if err != nil {
			require.Nil(t, sans)
			return
		}
		for _, s := range sans {
			if s.Type != pki.DNS && s.Type != pki.URI && s.Type != pki.IP {
				return // not written
			}
		}
		require.Equal(t, der, sanValue(sans...))
		if out, err := writeSANs(sans...); err == nil {
			require.Equal(t, der, out)
		}
	})
}
