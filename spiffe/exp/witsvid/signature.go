package witsvid

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	_ "crypto/sha512" // for crypto.SHA512
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// HTTP message signatures (RFC 9421), as far as the WIMSE profile has them.

const (
	signatureTag   = "wimse-workload-to-workload"
	signatureLabel = "wimse"
)

// fieldsIfPresent are the header fields that a signature covers if the message has them (HSIG-2, HSIG-10).
var (
	requestFields  = []string{tokenField, txnField, authField, digestField, typeField}
	responseFields = []string{tokenField, digestField, typeField}
)

// message is an HTTP message as signatures see it.
type message struct {
	method, target string // of a request
	status         int    // of a response
	header         http.Header
	request        *message // that a response answers; nil in a request
}

func (m *message) has(field string) bool { return len(m.header[http.CanonicalHeaderKey(field)]) > 0 }

// required returns the components that a signature of the message has to cover.
func (m *message) required() []string {
	list, fields := []string{`"@method"`, `"@request-target"`}, requestFields
	if m.request != nil {
		list, fields = []string{`"@status"`, `"@method";req`, `"@request-target";req`}, responseFields
	}
	for _, f := range fields {
		if f == tokenField || m.has(f) {
			list = append(list, string(textItem(f)))
		}
	}
	return list
}

// base returns the signature base: a line for each component, and the parameters (RFC 9421 section 2.5).
func (m *message) base(list []string, params []param) ([]byte, error) {
	var b strings.Builder
	for _, c := range list {
		value, err := m.value(c)
		if err == nil && strings.ContainsAny(value, "\r\n") { // would be further lines
			err = errors.New("has a line break")
		}
		if err != nil {
			return nil, fmt.Errorf("the component %s %w", token.Clip(c, token.MaxQuoted), err)
		}
		b.WriteString(c + ": " + value + "\n")
	}
	b.WriteString(`"@signature-params": ` + formatList(list, params))
	return []byte(b.String()), nil
}

// value returns what a component of the message is.
func (m *message) value(c string) (string, error) {
	from := m
	c, ofRequest := strings.CutSuffix(c, ";req")
	if ofRequest {
		from = m.request
	}
	if from == nil || !textPattern.MatchString(c) {
		return "", errors.New("has parameters that are not understood")
	}
	name := item(c).text()
	switch {
	case name == "@method" && from.request == nil:
		return from.method, nil
	case name == "@request-target" && from.request == nil:
		return from.target, nil
	case name == "@status" && from.request != nil:
		return strconv.Itoa(from.status), nil
	case strings.HasPrefix(name, "@"), name != strings.ToLower(name):
		return "", errors.New("is not understood")
	}
	lines := slices.Clone(from.header[http.CanonicalHeaderKey(name)])
	if len(lines) == 0 {
		return "", errors.New("is no field of the message")
	}
	for i, l := range lines {
		lines[i] = trim(l)
	}
	return strings.Join(lines, ", "), nil
}

// sign signs the message and sets the header fields. More are further header fields to cover, in lower
// case; extra are parameters beyond the usual ones. It returns the nonce.
func (p *Prover) sign(s *SVID, now time.Time, m *message, more []string, extra ...param) (string, error) {
	if m.has("Signature-Input") || m.has("Signature") {
		return "", errors.New("the message has a signature already")
	}
	list := m.required()
	for _, f := range more {
		if c := string(textItem(f)); m.has(f) && !slices.Contains(list, c) {
			list = append(list, c)
		}
	}
	nonce := random()
	params := append([]param{
		{"created", item(strconv.FormatInt(now.Unix(), 10))},
		{"expires", item(strconv.FormatInt(p.expiry(s, now), 10))},
		{"nonce", textItem(nonce)},
		{"tag", textItem(signatureTag)},
	}, extra...)
	base, err := m.base(list, params)
	if err != nil {
		return "", err
	}
	sig, err := s.signer().Raw(base)
	if err != nil {
		return "", err
	}
	m.header.Set("Signature-Input", signatureLabel+"="+formatList(list, params))
	m.header.Set("Signature", signatureLabel+"="+string(bytesItem(sig)))
	return nonce, nil
}

// signed is a message signature that was read.
type signed struct {
	list   []string // the components that it covers
	params []param
	sig    []byte

	created, expires           time.Time
	nonce, audience, answersTo string
	signResponse               bool
}

// fields returns the header fields of the message itself that the signature covers.
func (s *signed) fields() []string {
	var names []string
	for _, c := range s.list {
		if textPattern.MatchString(c) && c[1] != '@' {
			names = append(names, item(c).text())
		}
	}
	return names
}

// hasProfile reports whether a message has a signature with our tag. One that cannot be read counts, so
// that it is refused and not passed over.
func hasProfile(h http.Header) bool {
	if len(h["Signature-Input"]) == 0 {
		return false
	}
	inputs, err := parseDictionary(strings.Join(h["Signature-Input"], ", "))
	return err != nil || slices.ContainsFunc(inputs, member.hasTag)
}

func (m member) hasTag() bool {
	return slices.Contains(m.params, param{"tag", textItem(signatureTag)})
}

// readSignature reads the signature of a message and applies the rules of the profile that need no key.
func readSignature(m *message) (*signed, *token.Error) {
	fail := func(r token.Reason, rule, format string, args ...any) (*signed, *token.Error) {
		return nil, signatures.Refuse(r, rule, format, args...)
	}
	if !m.has("Signature-Input") || !m.has("Signature") {
		return fail("missing", "HSIG-7", "there is no Signature-Input or no Signature")
	}
	inputs, err := parseDictionary(strings.Join(m.header["Signature-Input"], ", "))
	if err != nil {
		return fail(token.Malformed, "HSIG-7", "Signature-Input: %w", err)
	}
	values, err := parseDictionary(strings.Join(m.header["Signature"], ", "))
	if err != nil {
		return fail(token.Malformed, "HSIG-7", "Signature: %w", err)
	}
	in := inputs[0]
	if len(inputs) > 1 {
		ours, labelled := 0, false
		for _, i := range inputs {
			if i.hasTag() {
				ours++
			}
			if i.key == signatureLabel {
				in, labelled = i, true
			}
		}
		if !labelled || ours > 1 {
			return fail(token.Malformed, "HSIG-7", "of several signatures, none has the label %q or more than one has our tag", signatureLabel)
		}
	}
	at := slices.IndexFunc(values, func(v member) bool { return v.key == in.key })
	if !in.isList || at < 0 || values[at].isList || values[at].value.kind() != ':' {
		return fail(token.Malformed, "HSIG-7", "Signature-Input and Signature do not belong together")
	}
	s := &signed{list: in.list, params: in.params}
	s.sig, _ = values[at].value.bytes() // which was checked
	if e := s.readParams(m.request != nil); e != nil {
		return nil, e
	}
	for i, c := range s.list {
		if slices.Contains(s.list[:i], c) {
			return fail(token.Malformed, "HSIG-1", "the component %s is there twice", token.Clip(c, token.MaxQuoted))
		}
	}
	for _, c := range m.required() {
		if !slices.Contains(s.list, c) {
			rule := "HSIG-2"
			switch {
			case m.request != nil:
				rule = "HSIG-10"
			case c[1] == '@':
				rule = "HSIG-1"
			}
			return fail("binding", rule, "the signature does not cover %s", c)
		}
	}
	return s, nil
}

// paramRules are the kinds of the parameters of a signature, and the ids of their rules.
var paramRules = map[string]struct {
	kind byte
	rule string
}{
	"created": {'0', "HSIG-4"}, "expires": {'0', "HSIG-4"}, "nonce": {'"', "HSIG-4"}, "tag": {'"', "HSIG-4"},
	"wimse-aud": {'"', "HSIG-5"}, "wimse-req-nonce": {'"', "HSIG-10"}, "wimse-sign-response": {'?', "HSIG-10"},
}

// readParams reads the parameters of a signature. Those that it does not know are covered by the signature
// and ignored.
func (s *signed) readParams(response bool) *token.Error {
	fail := func(rule, format string, args ...any) *token.Error {
		return signatures.Refuse("claim", rule, format, args...)
	}
	values := map[string]item{}
	for _, p := range s.params {
		want, known := paramRules[p.key]
		switch {
		case p.key == "keyid" || p.key == "alg":
			return fail("HSIG-6", "the parameter %q must not be used", p.key)
		case known && p.value.kind() != want.kind:
			return fail(want.rule, "the parameter %q is of the wrong type", p.key)
		}
		values[p.key] = p.value
	}
	s.created, s.expires = values["created"].time(), values["expires"].time()
	s.nonce, s.audience, s.answersTo = values["nonce"].text(), values["wimse-aud"].text(), values["wimse-req-nonce"].text()
	s.signResponse = values["wimse-sign-response"] == yes
	switch {
	case values["tag"].text() != signatureTag:
		return fail("HSIG-4", `"tag" is not %q`, signatureTag)
	case s.created.IsZero():
		return fail("HSIG-4", `"created" is missing`)
	case s.expires.IsZero():
		return fail("HSIG-4", `"expires" is missing`)
	case s.nonce == "":
		return fail("HSIG-4", `"nonce" is missing or empty`)
	case !response && s.audience == "":
		return fail("HSIG-5", `"wimse-aud" is missing or empty`)
	case response && s.answersTo == "":
		return fail("HSIG-10", `"wimse-req-nonce" is missing or empty`)
	}
	return nil
}

// verifyMessage verifies the signature of a message, whose token was verified before (HSIG-8), with the
// key that the token confirms. The audience is left to the caller, and so is the body: it is not worth
// reading before this.
func (v *Validator) verifyMessage(h *holder, m *message, now time.Time) (*signed, *token.Error) {
	s, e := readSignature(m)
	if e != nil {
		return nil, e
	}
	base, err := m.base(s.list, s.params)
	if err != nil {
		return nil, signatures.Refuse("binding", "HSIG-2", "%w", err)
	}
	if err := token.VerifyRaw(h.alg, h.key, base, s.sig); err != nil {
		return nil, signatures.Refuse("signature", "HSIG-6", "%w", err)
	}
	e = v.checkProofTime(signatures, "HSIG-4", s.created, s.expires, now)
	if e == nil && s.expires.Sub(s.created) > v.maxProof {
		e = signatures.Refuse("lifetime", "HSIG-4", "it lasts longer than %v", v.maxProof)
	}
	if e != nil {
		return nil, e
	}
	return s, nil
}

// evidence returns what the signature proves.
func (s *signed) evidence(k *token.Kind) evidence {
	if s == nil {
		return evidence{}
	}
	return evidence{k, s.nonce, s.expires, s.fields()}
}

// readBody reads a body that a digest is made of, and refuses one of more than limit bytes. A nil body is
// empty. The length is what the message says, or -1.
func readBody(body io.Reader, length, limit int64) ([]byte, error) {
	if body == nil {
		return nil, nil
	}
	if length > limit {
		return nil, errBodyTooLarge(limit)
	}
	data, err := io.ReadAll(io.LimitReader(body, max(limit, limit+1))) // the largest limit has no successor
	if err == nil && int64(len(data)) > limit {
		err = errBodyTooLarge(limit)
	}
	return data, err
}

func errBodyTooLarge(limit int64) error {
	return fmt.Errorf("the body has more than %d bytes: %w", limit, spiffe.ErrTooLarge)
}

// checkBody reads the body of a message of kind k, compares it with its digest, and returns it to be read
// again.
func (m *message) checkBody(k *token.Kind, body io.Reader, length, limit int64) (io.ReadCloser, *token.Error) {
	data, err := readBody(body, length, limit)
	if err != nil {
		reason := token.Malformed
		if errors.Is(err, spiffe.ErrTooLarge) {
			reason = token.TooLarge
		}
		return nil, &token.Error{Kind: k, Reason: reason, Rule: "HSIG-3", Err: err}
	}
	return io.NopCloser(bytes.NewReader(data)), checkDigest(m, data)
}

// contentDigest returns the value of Content-Digest for a body (RFC 9530).
func contentDigest(body []byte) string {
	sum := sha256.Sum256(body)
	return "sha-256=" + string(bytesItem(sum[:]))
}

// checkDigest compares a body with the Content-Digest of its message (HSIG-3). Of several digests, all
// that we can compute have to agree.
func checkDigest(m *message, body []byte) *token.Error {
	fail := func(r token.Reason, format string, args ...any) *token.Error {
		return signatures.Refuse(r, "HSIG-3", format, args...)
	}
	if !m.has(digestField) {
		if len(body) == 0 {
			return nil
		}
		return fail("binding", "there is a body and no Content-Digest")
	}
	digests, err := parseDictionary(strings.Join(m.header["Content-Digest"], ", "))
	if err != nil {
		return fail(token.Malformed, "Content-Digest: %w", err)
	}
	found := false
	for _, d := range digests {
		hash, known := map[string]crypto.Hash{"sha-256": crypto.SHA256, "sha-512": crypto.SHA512}[d.key]
		if !known {
			continue
		}
		h := hash.New()
		h.Write(body)
		if d.isList || d.value != bytesItem(h.Sum(nil)) {
			return fail("binding", "Content-Digest is not that of the body")
		}
		found = true
	}
	if !found {
		return fail("binding", "Content-Digest has neither sha-256 nor sha-512")
	}
	return nil
}
