package main

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// judgement verifies certificates and tokens.
type judgement struct {
	bundles  *spiffe.BundleSet   // nil if there are none
	policy   spiffe.PolicySource // nil if there is none
	role     spiffe.Role
	audience string // of a JWT-SVID; empty if unknown

	algorithms spiffe.Algorithms // of keys
}

const notReached = "not reached"

// stages are the stages of a spiffe.Verifier, in its order.
var stages = []string{"leaf", "bundle", "chain", "policy"}

// chain judges a chain, leaf first. It skips the checks after a failure.
func (j *judgement) chain(chain []*x509.Certificate) ([]check, error) {
	var bundles spiffe.BundleSource = j.bundles
	if j.bundles == nil {
		bundles = new(spiffe.BundleSet) // the form is judged before the bundle
	}
	policy := j.policy
	if policy == nil {
		policy = spiffe.AllowAnyPeer()
	}
	v, err := spiffe.NewVerifier(bundles, policy, nil)
	if err != nil {
		return nil, err
	}
	peer, err := v.WithAlgorithms(j.algorithms).VerifyChain(chain, j.role)
	at := len(stages)
	e, refused := errors.AsType[*spiffe.VerifyError](err)
	if refused {
		at = slices.Index(stages, e.Stage)
	}
	checks := make([]check, len(stages))
	for i, stage := range stages {
		checks[i] = check{Name: stage, Result: ok}
		if i >= at {
			checks[i] = check{Name: stage, Result: skipped, Detail: notReached}
		}
		if i == at {
			checks[i] = check{Name: stage, Result: failed, Rule: e.Rule, Detail: inner(e.Err)}
		}
	}
	leaf, bundle, path, policed := &checks[0], &checks[1], &checks[2], &checks[3]
	switch {
	case at == 0:
		leaf.Certificate = 1
		return checks, nil
	case refused && e.ID.IsZero(): // refused for its size, unparsed
		leaf.Result, leaf.Detail, bundle.Result, bundle.Detail = skipped, notReached, skipped, notReached
		return checks, nil
	}
	leaf.Detail = "it has the form of an X.509-SVID"
	if j.bundles == nil {
		*bundle = check{Name: "bundle", Result: skipped, Detail: "not verified: no -bundle"}
		*path = inTime(chain)
		return checks, nil
	}
	switch at {
	case 1:
		bundle.Remedy = "give the bundle of this trust domain, or federate with it"
		return checks, nil
	case 2:
		path.Certificate, path.Remedy = blame(chain, e.Err), advice(chain, e, j.bundles)
	}
	id := chainID(chain)
	bundle.Detail = fmt.Sprintf("there is one of %q", id.TrustDomain())
	if at > 2 {
		path.Detail = "it leads to an authority of the bundle"
		if peer != nil {
			path.Detail += ", until " + stamp(peer.NotAfter())
		}
		*policed = j.allowed(id)
	}
	return checks, nil
}

// inTime judges the validity of certificates without a bundle.
func inTime(chain []*x509.Certificate) check {
	now := time.Now()
	for i, c := range chain {
		switch {
		case now.After(c.NotAfter):
			return check{
				Name: "chain", Result: failed, Certificate: i + 1, Rule: "X5-30",
				Detail: fmt.Sprintf("it has expired %s ago", span(now.Sub(c.NotAfter))),
			}
		case now.Before(c.NotBefore):
			return check{
				Name: "chain", Result: failed, Certificate: i + 1, Rule: "X5-30",
				Detail: fmt.Sprintf("it becomes valid only in %s",
					span(c.NotBefore.Sub(now))), Remedy: "compare the clocks",
			}
		}
	}
	return check{Name: "chain", Result: skipped, Detail: "in time, and not verified: no -bundle"}
}

// allowed applies the policy to an ID.
func (j *judgement) allowed(id spiffe.ID) check {
	c := check{Name: "policy", Result: skipped, Detail: "not judged: no -allow"}
	if j.policy == nil {
		return c
	}
	c.Result, c.Detail = ok, "it allows this ID"
	if err := j.policy.Policy().Check(id); err != nil {
		c.Result, c.Detail = failed, inner(err)
	}
	return c
}

// chainID returns the ID that a chain claims.
func chainID(chain []*x509.Certificate) spiffe.ID {
	if len(chain) == 0 {
		return spiffe.ID{}
	}
	id, _ := spiffe.IDFromCertificate(chain[0]) // zero without an ID
	return id
}

// idText returns an ID as shown in records.
func idText(id spiffe.ID) string {
	if id.IsZero() {
		return ""
	}
	return id.String()
}

// blame returns the number of the certificate that an error is about, from 1, or 0 for none of them.
func blame(chain []*x509.Certificate, err error) int {
	var cert *x509.Certificate
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		cert = e.Cert
	} else if e, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		cert = e.Cert
	} else if _, ok := errors.AsType[x509.UnhandledCriticalExtension](err); ok { // names no certificate
		return 1 + slices.IndexFunc(chain, func(c *x509.Certificate) bool {
			return len(c.UnhandledCriticalExtensions) > 0
		})
	}
	return 1 + slices.IndexFunc(chain, func(c *x509.Certificate) bool { return cert != nil && c.Equal(cert) })
}

// advice tells an operator what to check after a chain was refused.
func advice(chain []*x509.Certificate, e *spiffe.VerifyError, bundles *spiffe.BundleSet) string {
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](e.Err); ok {
		switch {
		case invalid.Reason == x509.IncompatibleUsage:
			return "its extended key usages do not permit this role"
		case invalid.Reason == x509.Expired && blame(chain, e.Err) == 0:
			return "an authority of the bundle is out of its time: renew the bundle"
		case invalid.Reason == x509.Expired:
			return "see that it is renewed, and compare the clocks"
		}
		return ""
	}
	if errors.Is(e.Err, spiffe.ErrAlgorithm) {
		return "a peer accepts it if its settings name this kind of key, as -algorithms does here"
	}
	b, err := bundles.Bundle(e.ID.TrustDomain())
	if _, unknown := errors.AsType[x509.UnknownAuthorityError](e.Err); !unknown || err != nil {
		return ""
	}
	var have []string
	for c := range b.X509Authorities() {
		have = append(have, short(c.SubjectKeyId))
	}
	from := "a key without an id"
	if n := blame(chain, e.Err); n > 0 {
		id := chain[n-1].AuthorityKeyId
		if bytes.Equal(chain[n-1].RawIssuer, chain[n-1].RawSubject) { // a root may name only its own key
			id = chain[n-1].SubjectKeyId
		}
		if len(id) > 0 {
			from = "key " + short(id)
		}
	}
	return fmt.Sprintf("it was signed by %s, and the bundle has %s: it is the bundle of another CA or an old one, "+
		"or the chain lacks an intermediate certificate",
		from, strings.Join(few(have), ", "))
}

// short is the beginning of a key identifier. A certificate's identifier may have any length.
func short(id []byte) string { return hex.EncodeToString(id[:min(len(id), 10)]) }

// inner returns an error's text without the prefix of package spiffe.
func inner(err error) string { return strings.TrimPrefix(err.Error(), "spiffe: ") }

// token judges a token, and returns its claims. Neither result contains its signature.
func (j *judgement) token(text string) (record, []check) {
	header, claims := payload(text)
	wit := header.Typ == "wit+jwt"
	r := record{{"kind", "JWT-SVID"}}
	var id spiffe.ID
	var err error
	if wit {
		r[0].value = "WIT-SVID"
		var u *witsvid.Unverified
		if u, err = witsvid.ParseUnverified(text); err == nil {
			id = u.ID
			r = append(r, field{"spiffe_id", u.ID.String()}, field{"expires", u.Expires}, field{"key_id", u.KeyID})
		}
	} else {
		var u *jwtsvid.Unverified
		if u, err = jwtsvid.ParseUnverified(text); err == nil {
			id = u.ID
			r = append(r, field{"spiffe_id", u.ID.String()}, field{"audience", few(u.Audience)},
				field{"expires", u.Expires}, field{"key_id", u.KeyID})
		}
	}
	if err != nil {
		return r, []check{tokenCheck("form", err), {Name: "proof", Result: skipped, Detail: notReached},
			{Name: "policy", Result: skipped, Detail: notReached}}
	}
	r = append(r, field{"algorithm", header.Alg}, field{"issued", claims.Issued.time()},
		field{"not_before", claims.NotBefore.time()},
		field{"other_claims", few(claims.others)})
	checks := []check{
		{Name: "form", Result: ok, Detail: "it has the form of a " + r[0].value.(string)},
		{Name: "proof", Result: skipped, Detail: "not verified: no -bundle"},
		{Name: "policy", Result: skipped, Detail: notReached},
	}
	proof := &checks[1]
	switch {
	case j.bundles == nil:
		if u := claims.Expires.time(); !u.IsZero() && time.Now().After(u) {
			*proof = check{Name: "proof", Result: failed, Rule: map[bool]string{false: "JWT-19", true: "WIT-16"}[wit],
				Detail: fmt.Sprintf("it has expired %s ago", span(time.Since(u)))}
		}
		return r, checks
	case wit:
		*proof = j.wit(text)
		checks = slices.Insert(checks, 2, check{
			Name: "possession", Result: skipped, Detail: "a WIT-SVID alone proves nothing: its presenter has to " +
				"prove that it holds the key",
		})
		proof = &checks[1]
	default:
		*proof = j.jwt(text, r)
	}
	if proof.Result == ok {
		checks[len(checks)-1] = j.allowed(id)
	}
	return r, checks
}

// jwt verifies the signature, the audience and the lifetime of a JWT-SVID.
func (j *judgement) jwt(text string, r record) check {
	audience, detail := j.audience, "signature, audience and time are good"
	if audience == "" {
		u, err := jwtsvid.ParseUnverified(text)
		if err != nil {
			return tokenCheck("proof", err)
		}
		audience, detail = u.Audience[0], "signature and time are good; the audience was not judged: no -audience"
	}
	v, err := jwtsvid.NewValidator(j.bundles, []string{audience},
		&jwtsvid.ValidatorOptions{Algorithms: j.algorithms})
	if err == nil {
		_, err = v.Validate(text)
	}
	if err != nil {
		return tokenCheck("proof", err)
	}
	return check{Name: "proof", Result: ok, Detail: detail}
}

// wit verifies the signature and the lifetime of a WIT-SVID. A validator judges the token before the proof of
// possession, which is missing here.
func (j *judgement) wit(text string) check {
	v, err := witsvid.NewValidator(j.bundles, spiffe.AllowAnyPeer(), &witsvid.ValidatorOptions{Proofs: -1})
	if err == nil {
		_, err = v.Validate(text, "", witsvid.Call{Target: "https://unnamed.invalid/"})
	}
	if e, refused := errors.AsType[ruled](err); refused && strings.HasPrefix(e.RuleID(), "WPT-") { // about the proof
		return check{Name: "proof", Result: ok, Detail: "signature and time are good"}
	}
	return tokenCheck("proof", err)
}

// ruled is an error of package jwtsvid or witsvid with the broken rule of spiffe/CONFORMANCE.md.
type ruled interface {
	error
	RuleID() string
}

// tokenCheck returns the failed check of a token.
func tokenCheck(name string, err error) check {
	c := check{Name: name, Result: failed, Detail: err.Error()}
	if e, ok := errors.AsType[ruled](err); ok {
		c.Rule = e.RuleID()
		_, c.Detail, _ = strings.Cut(c.Detail, ": ") // drop the package name
	}
	return c
}

type header struct {
	Alg string `json:"alg"`
	Typ string `json:"typ"`
}

type claims struct {
	Expires   date `json:"exp"`
	Issued    date `json:"iat"`
	NotBefore date `json:"nbf"`
	others    []string
}

type date float64

func (d date) time() time.Time {
	if d < 1 || d > 1<<37 {
		return time.Time{}
	}
	return time.Unix(int64(d), 0).UTC()
}

const maxToken = 16 << 10 // bytes, as in packages jwtsvid and witsvid

// payload reads the shown parts of a token beyond those that its package parses. It returns only the names of other
// claims.
func payload(text string) (h header, c claims) {
	parts := strings.Split(text, ".")
	if len(parts) != 3 || len(text) > maxToken {
		return h, c
	}
	head, _ := base64.RawURLEncoding.DecodeString(parts[0])
	body, _ := base64.RawURLEncoding.DecodeString(parts[1])
	_ = json.Unmarshal(head, &h) // the packages refuse malformed tokens
	_ = json.Unmarshal(body, &c)
	var all map[string]json.RawMessage
	_ = json.Unmarshal(body, &all)
	for name := range all {
		if !slices.Contains([]string{"sub", "aud", "exp", "iat", "nbf"}, name) {
			c.others = append(c.others, fmt.Sprintf("%.40q", name))
		}
	}
	slices.Sort(c.others)
	return h, c
}
