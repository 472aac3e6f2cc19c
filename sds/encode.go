package sds

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// version is a hash of content. The version of a set of secrets is the XOR of their versions: it does not depend on
// their order, is updated in one step, and equals the secret's version if there is only one.
type version [16]byte

func (v version) String() string { return hex.EncodeToString(v[:]) }

func (v version) xor(w version) version {
	for i := range v {
		v[i] ^= w[i]
	}
	return v
}

// parseVersion returns the version in s, or zero, which no content has, if s is not a version.
func parseVersion(s string) (v version) {
	if len(s) == hex.EncodedLen(len(v)) {
		_, _ = hex.Decode(v[:], []byte(s))
	}
	return v
}

// entry is the secret served for a name at one moment. All streams share it. It never changes.
type entry struct {
	name    string
	secret  *pki.Secret
	version version
	any     []byte // the encoded google.protobuf.Any with the Secret, encoded only once
}

func (e *entry) String() string       { return e.name + "@" + e.version.String() }
func (e *entry) GoString() string     { return "sds.entry(" + e.String() + ")" }
func (e *entry) LogValue() slog.Value { return slog.StringValue(e.String()) }

// newEntry encodes s under the name that the client asked for, the only name that Envoy accepts. Guessable content is
// hashed with salt, because operators see versions.
func newEntry(name string, s *pki.Secret, salt []byte) (*entry, error) {
	if s == nil {
		return nil, errors.New("the source returned no secret and no error")
	}
	guessable := false
	encoded, err := protofield.Write(func(w *protofield.Writer) {
		w.Text(1, typeURL)
		w.Message(2, func(w *protofield.Writer) {
			w.Text(1, name)
			guessable = writeContent(w, s)
		})
	})
	if err != nil {
		return nil, err
	}
	h := sha256.New()
	h.Write(encoded)
	if guessable {
		h.Write(salt)
	}
	return &entry{name: name, secret: s, version: version(h.Sum(nil)[:16]), any: encoded}, nil
}

// Fields of a Secret, one for each kind.
const (
	tlsCertificate    = 2
	sessionTicketKeys = 3
	validationContext = 4
	genericSecret     = 5
)

// Fields of Envoy's SPIFFE validator.
const (
	validatorName = "envoy.tls.cert_validator.spiffe"
	validatorURL  = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.SPIFFECertValidatorConfig"
)

// writeContent writes the content of a secret, and reports whether people may have chosen some of it.
func writeContent(w *protofield.Writer, s *pki.Secret) (guessable bool) {
	if chain, key, ok := s.KeyPair(); ok {
		w.Message(tlsCertificate, func(w *protofield.Writer) {
			writeInline(w, 1, chain)
			writeInline(w, 2, key)
		})
	} else if chain, provider, ok := s.KeyProvider(); ok {
		guessable = true
		w.Fail(checkProvider(provider))
		w.Message(tlsCertificate, func(w *protofield.Writer) {
			writeInline(w, 1, chain)
			w.AddBytes(6, provider)
		})
	} else if roots, ok := s.Roots(); ok {
		w.Message(validationContext, func(w *protofield.Writer) { writeRoots(w, roots, s) })
	} else if domains, ok := s.TrustDomains(); ok {
		w.Message(validationContext, func(w *protofield.Writer) { writeDomains(w, domains) })
	} else if keys, ok := s.TicketKeys(); ok {
		w.Message(sessionTicketKeys, func(w *protofield.Writer) {
			for _, key := range keys {
				writeInline(w, 1, key)
			}
		})
	} else if values, ok := s.Generic(); ok {
		guessable = true
		w.Message(genericSecret, func(w *protofield.Writer) { writeValues(w, values) })
	} else {
		w.Fail(errors.New("the secret is empty"))
	}
	return guessable
}

func writeRoots(w *protofield.Writer, roots []byte, s *pki.Secret) {
	writeInline(w, 1, roots)
	crls, leafOnly := s.CRLs()
	if crls != nil {
		writeInline(w, 7, crls)
	}
	if leafOnly {
		w.AddVarint(14, 1)
	}
}

// writeDomains writes a validation context for Envoy's SPIFFE validator.
func writeDomains(w *protofield.Writer, domains map[spiffe.TrustDomain][]byte) {
	w.Message(12, func(w *protofield.Writer) {
		w.Text(1, validatorName)
		w.Message(2, func(w *protofield.Writer) {
			w.Text(1, validatorURL)
			w.Message(2, func(w *protofield.Writer) {
				byName := func(a, b spiffe.TrustDomain) int { return strings.Compare(a.String(), b.String()) }
				for _, td := range slices.SortedFunc(maps.Keys(domains), byName) {
					w.Message(1, func(w *protofield.Writer) {
						w.Text(1, td.String())
						writeInline(w, 2, domains[td])
					})
				}
			})
		})
	})
}

func writeValues(w *protofield.Writer, values map[string][]byte) {
	if value, ok := values[""]; ok {
		writeInline(w, 1, value)
		return
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		w.Message(2, func(w *protofield.Writer) {
			w.Text(1, key)
			writeInline(w, 2, values[key])
		})
	}
}

// writeInline writes a DataSource.
func writeInline(w *protofield.Writer, field protofield.Number, data []byte) {
	w.Message(field, func(w *protofield.Writer) { w.AddBytes(2, data) })
}

// checkProvider returns an error unless provider is a PrivateKeyProvider with a name and a configuration. Envoy
// rejects any other.
func checkProvider(provider []byte) error {
	var name, url string
	err := protofield.Read(provider, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&name)
		case 3:
			url, _ = f.Any()
		}
	})
	if err != nil || name == "" || url == "" {
		return errors.New("the key provider is not a PrivateKeyProvider with provider_name and typed_config")
	}
	return nil
}

// response is a DiscoveryResponse or a DeltaDiscoveryResponse, assembled from encoded entries.
type response struct {
	delta   bool
	version version // of all that the client holds once it has accepted the response
	nonce   string
	entries []*entry
	removed []string // delta only
	push    *report.Push
}

func (r *response) encode() []byte {
	b, _ := protofield.Write(func(w *protofield.Writer) { // cannot fail: names are UTF-8
		w.Text(1, r.version.String())
		for _, e := range r.entries {
			if !r.delta {
				w.AddBytes(2, e.any)
				continue
			}
			w.Message(2, func(w *protofield.Writer) {
				w.Text(1, e.version.String())
				w.AddBytes(2, e.any)
				w.Text(3, e.name)
			})
		}
		w.Text(4, typeURL)
		w.Text(5, r.nonce)
		for _, name := range r.removed {
			w.AddText(6, name)
		}
	})
	return b
}

// names returns the names of the secrets, and of some that are removed.
func (r *response) names() (names []string) {
	for _, e := range r.entries {
		names = append(names, e.name)
	}
	size := 0
	for _, name := range r.removed {
		if size += len(name); size > maxText {
			break // clients choose these names, and no limit counts them here
		}
		names = append(names, strings.Clone(name))
	}
	return names
}
