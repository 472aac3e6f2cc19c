package sdstest

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	service      = "/envoy.service.secret.v3.SecretDiscoveryService/"
	secretURL    = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
	validatorURL = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.SPIFFECertValidatorConfig"
)

// contents makes secrets for the words in scripts.
type contents struct {
	make  map[string]func(name string) (*pki.Secret, error)
	words map[string]string // by fingerprint
}

const roots = 9

func newContents(t testing.TB) *contents {
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.example")
	c := &contents{make: make(map[string]func(string) (*pki.Secret, error)), words: make(map[string]string)}
	for i := range roots {
		ca.Rotate()
		ca.DropOldRoots()
		b := ca.Bundle()
		c.make[strconv.Itoa(i+1)] = func(name string) (*pki.Secret, error) { return pki.NewTrustSecret(name, b) }
	}
	for _, word := range []string{"pair", "otherpair"} {
		svid := ca.SVID("/web")
		c.make[word] = func(name string) (*pki.Secret, error) { return pki.NewKeyPairSecret(name, svid) }
	}
	set, err := spiffe.NewBundleSet(ca.Bundle(), other.Bundle())
	if err != nil {
		t.Fatal(err)
	}
	ticket := []byte(strings.Repeat("key1", 20))
	c.make["tickets"] = func(name string) (*pki.Secret, error) {
		return pki.NewTicketKeysSecret(name, ticket, []byte(strings.Repeat("key2", 20)))
	}
	c.make["generic"] = func(name string) (*pki.Secret, error) {
		return pki.NewGenericSecret(name, map[string][]byte{"": []byte("value")})
	}
	c.make["values"] = func(name string) (*pki.Secret, error) {
		return pki.NewGenericSecret(name, map[string][]byte{"user": []byte("me"), "password": []byte("value")})
	}
	c.make["domains"] = func(name string) (*pki.Secret, error) { return pki.NewTrustDomainsSecret(name, set) }
	for word, f := range c.make {
		s, err := f("x")
		if err != nil {
			t.Fatal(err)
		}
		c.words[fingerprint(s)] = word
	}
	return c
}

// secret returns the secret for a word; nil for "-".
func (c *contents) secret(name, word string) (*pki.Secret, error) {
	if word == "-" {
		return nil, nil
	}
	f := c.make[word]
	if f == nil {
		return nil, fmt.Errorf("there is no content %q", word)
	}
	return f(name)
}

// fingerprint returns a text that distinguishes the content of a secret, without its name, from others.
func fingerprint(s *pki.Secret) string {
	var parts []string
	add := func(kind string, values ...[]byte) {
		for _, v := range values {
			parts = append(parts, kind+"="+string(v))
		}
	}
	if chain, key, ok := s.KeyPair(); ok {
		add("chain", chain)
		add("key", key)
	}
	if pem, ok := s.Roots(); ok {
		add("roots", pem)
	}
	keys, _ := s.TicketKeys()
	add("ticket", keys...)
	values, _ := s.Generic()
	for _, k := range slices.Sorted(maps.Keys(values)) {
		add("value "+k, values[k])
	}
	domains, _ := s.TrustDomains()
	byName := func(a, b spiffe.TrustDomain) int { return strings.Compare(a.String(), b.String()) }
	for _, td := range slices.SortedFunc(maps.Keys(domains), byName) {
		add("domain "+td.String(), domains[td])
	}
	return strings.Join(parts, "\n")
}

// received is a Secret of a response.
type received struct {
	name  string
	parts []string
}

func (r *received) read(f *protofield.Field) {
	part := func(kind string) func(*protofield.Field) {
		return func(f *protofield.Field) { // of a DataSource
			if f.Number == 2 || f.Number == 3 {
				r.parts = append(r.parts, kind+"="+string(f.Data))
			}
		}
	}
	fields := func(kinds map[protofield.Number]string) func(*protofield.Field) {
		return func(f *protofield.Field) {
			if kind, ok := kinds[f.Number]; ok {
				f.Message(part(kind))
			}
		}
	}
	switch f.Number {
	case 1:
		f.Text(&r.name)
	case 2:
		f.Message(fields(map[protofield.Number]string{1: "chain", 2: "key"}))
	case 3:
		f.Message(fields(map[protofield.Number]string{1: "ticket"}))
	case 4:
		f.Message(func(f *protofield.Field) {
			if f.Number == 1 {
				f.Message(part("roots"))
			}
			if f.Number == 12 {
				f.Message(r.readValidator)
			}
		})
	case 5:
		f.Message(func(f *protofield.Field) {
			if f.Number == 1 {
				f.Message(part("value "))
			}
			if f.Number == 2 {
				var value *protofield.Field
				key := f.Entry(func(f *protofield.Field) { c := *f; value = &c })
				if value != nil {
					value.Message(part("value " + key))
				}
			}
		})
		slices.Sort(r.parts) // a map has no order
	}
}

func (r *received) readValidator(f *protofield.Field) {
	if f.Number != 2 {
		return
	}
	url, config := f.Any()
	if url != validatorURL {
		f.Fail(fmt.Errorf("a validator of type %q", url))
		return
	}
	f.Fail(protofield.Read(config, func(f *protofield.Field) {
		if f.Number != 1 {
			return
		}
		var name, pem string
		f.Message(func(f *protofield.Field) {
			switch f.Number {
			case 1:
				f.Text(&name)
			case 2:
				f.Message(func(f *protofield.Field) { pem = string(f.Data) })
			}
		})
		r.parts = append(r.parts, "domain "+name+"="+pem)
	}))
}

// response is a DiscoveryResponse, or a DeltaDiscoveryResponse.
type response struct {
	typeURL, version, nonce string
	items                   []item
	removed                 []string
}

// item is a secret in a response.
type item struct {
	name    string
	version string // delta
	word    string
}

// item returns the item for a received Secret, whose content the source must have had.
func (c *contents) item(r *received) (item, error) {
	word, ok := c.words[strings.Join(r.parts, "\n")]
	if !ok {
		return item{}, fmt.Errorf("the secret %q has content that the source never had, %d parts of %d bytes", r.name,
			len(r.parts), len(strings.Join(r.parts, "")))
	}
	return item{name: r.name, word: word}, nil
}

func (c *contents) fromAny(f *protofield.Field) (item, error) {
	url, value := f.Any()
	if url != secretURL {
		return item{}, fmt.Errorf("a resource of type %q, not %s", url, secretURL)
	}
	var r received
	if err := protofield.Read(value, r.read); err != nil {
		return item{}, fmt.Errorf("a resource that is not a Secret: %w", err)
	}
	return c.item(&r)
}

// decode reads a message. ours has what the scripts call the server's names.
func (c *contents) decode(msg []byte, delta bool, ours map[string]string) (*response, error) {
	var r response
	err := protofield.Read(msg, func(f *protofield.Field) {
		switch {
		case f.Number == 1:
			f.Text(&r.version)
		case f.Number == 2 && !delta:
			it, err := c.fromAny(f)
			f.Fail(err)
			r.items = append(r.items, it)
		case f.Number == 2:
			var it item
			var name, version string
			f.Message(func(f *protofield.Field) {
				var err error
				switch f.Number {
				case 1:
					f.Text(&version)
				case 2:
					it, err = c.fromAny(f)
					f.Fail(err)
				case 3:
					f.Text(&name)
				}
			})
			if name != it.name || version == "" {
				f.Fail(fmt.Errorf("a resource with the name %q and the version %q, and the secret %q in it", name,
					version, it.name))
			}
			it.version = version
			r.items = append(r.items, it)
		case f.Number == 4:
			f.Text(&r.typeURL)
		case f.Number == 5:
			f.Text(&r.nonce)
		case f.Number == 6 && delta:
			var name string
			f.Text(&name)
			r.removed = append(r.removed, name)
		}
	})
	if err == nil && r.typeURL != secretURL {
		err = fmt.Errorf("a response of type %q", r.typeURL)
	}
	for i, it := range r.items {
		r.items[i].name = cmp.Or(ours[it.name], it.name)
	}
	for i, name := range r.removed {
		r.removed[i] = cmp.Or(ours[name], name)
	}
	return &r, err
}

// request is a DiscoveryRequest, or a DeltaDiscoveryRequest.
type request struct {
	delta                bool
	node                 string
	names, drop          []string
	have                 map[string]string
	typeURL, nonce, what string // what names the version in SotW
	reason               string // "" is no error_detail
}

// encode returns the message, with the names that theirs returns.
func (r *request) encode(theirs func(name string) string) ([]byte, error) {
	numbers := []protofield.Number{2, 3, 0, 0, 4, 5, 6} // node, names, drop, have, type, nonce, error
	if r.delta {
		numbers = []protofield.Number{1, 3, 4, 5, 2, 6, 7}
	}
	msg, err := protofield.Write(func(w *protofield.Writer) {
		if !r.delta {
			w.Text(1, r.what)
		}
		if r.node != "" {
			w.Message(numbers[0], func(w *protofield.Writer) {
				w.Text(1, r.node)
				w.Text(2, "cluster")
			})
		}
		for _, name := range r.names {
			w.AddText(numbers[1], theirs(name))
		}
		for _, name := range r.drop {
			w.AddText(numbers[2], theirs(name))
		}
		for _, name := range slices.Sorted(maps.Keys(r.have)) {
			w.Entry(numbers[3], theirs(name), []byte(r.have[name]))
		}
		w.Text(numbers[4], r.typeURL)
		w.Text(numbers[5], r.nonce)
		if r.reason != "" {
			w.Message(numbers[6], func(w *protofield.Writer) {
				w.Varint(1, 3)
				w.Text(2, r.reason)
			})
		}
	})
	if err != nil {
		return nil, err
	}
	if len(r.have)+len(r.drop) > 0 && !r.delta {
		return nil, errors.New("only delta requests have unsub and have")
	}
	return msg, nil
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic("sdstest: in a script: " + err.Error())
	}
	return n
}
