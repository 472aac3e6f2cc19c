package workloadapi

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// WITIssuer makes WIT-SVIDs for a [Handler]. The profile is Incubating: see [WITClient].
//
// It is asked for each identity of a caller when a stream of WIT-SVIDs begins, and again when half of the
// life of one is over, or when the WIT authorities of its trust domain change. What it returns is checked:
// the form, "sub", "exp", and that token and key belong together. Its methods are called from many
// goroutines.
type WITIssuer interface {
	// IssueWITSVID returns a new WIT-SVID for id, which the caller was found to have under this hint, and
	// which may be of any trust domain that Options.Identities knows. The key in it is new as well
	// (WIT-52). The context is that of the request, for [unixsocket.PeerFromContext], and ends after 30 seconds.
	//
	// An error that wraps [ErrDenied] says that this identity has no WIT-SVID, or none any more. Any
	// other leaves in force what the caller has, until it expires, and the Handler tries again: after a
	// second at first, and half a minute at most.
	IssueWITSVID(ctx context.Context, id spiffe.ID, hint string) (IssuedWITSVID, error)
}

// IssuedWITSVID is what a [WITIssuer] has made; a *witsvid.SVID is one.
type IssuedWITSVID interface {
	// Token returns the WIT-SVID: a JWS in compact form.
	Token() string

	// Signer returns the private key that the token confirms, an *ecdsa.PrivateKey or *rsa.PrivateKey,
	// as it goes to the caller.
	Signer() crypto.Signer
}

// witStream makes the responses of one stream of WIT-SVIDs. Each WIT-SVID is issued for this stream
// alone, kept, and replaced when half of its life is over, or when the WIT authorities of its trust
// domain are others: nobody may accept it any longer.
type witStream struct {
	h    *Handler
	want spiffe.ID // zero means all

	held     map[label]*heldWIT
	sent     bool      // there is a response that the caller goes on with
	failures int       // of the issuer, in a row
	retry    time.Time // not before, after a failure
}

// label tells the identities of a caller apart.
type label struct {
	id   spiffe.ID
	hint string
}

// heldWIT is a WIT-SVID in force.
type heldWIT struct {
	m           witSVID
	renew, exp  time.Time
	authorities map[string]crypto.PublicKey // of its trust domain, when it was issued
}

func (h *Handler) fetchWITSVID(request []byte) (answer, error) {
	var req witSVIDRequest
	if decode(request, &req, 16) != nil {
		return nil, refusal("the request is not a WITSVIDRequest")
	}
	s := &witStream{h: h}
	if id := req.spiffeID; id != "" {
		var err error
		if s.want, err = spiffe.ParseID(id); err != nil {
			return nil, refusal("spiffe_id is not a SPIFFE ID")
		}
	}
	return s.answer, nil
}

// answer makes the current response: every identity of the caller has a WIT-SVID in the first one.
// After that one that cannot be issued is left out until it can, so that neither the renewal nor the
// withdrawal of the others waits for it; so is one that has expired meanwhile (WIT-51).
func (s *witStream) answer(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (*raw, time.Time, error) {
	if err := checkIdentities(ids); err != nil {
		return nil, time.Time{}, s.h.unavailable(ctx, fetchWITSVID, err)
	}
	now := time.Now()
	attempt := !now.Before(s.retry)
	resp := &witSVIDResponse{}
	held := make(map[label]*heldWIT)
	var failure, missing error
	expired := 0
	for _, id := range ids {
		l := label{id.SVID.ID(), id.Hint}
		if held[l] != nil || !s.want.IsZero() && l.id != s.want {
			continue
		}
		authorities := witAuthorities(snap, l.id.TrustDomain())
		w := s.held[l]
		if w != nil && !now.Before(w.exp) {
			w = nil
			expired++
		}
		if attempt && (w == nil || !now.Before(w.renew) || !sameKeys(w.authorities, authorities)) {
			fresh, err := s.issue(ctx, l, now)
			switch {
			case errors.Is(err, ErrDenied):
				continue
			case err != nil:
				failure = cmp.Or(failure, err)
			default:
				fresh.authorities = authorities
				w = fresh
			}
		}
		if w == nil {
			missing = cmp.Or(failure, errRetryLater)
			continue
		}
		held[l] = w
		resp.svids = append(resp.svids, w.m)
	}
	switch {
	case failure != nil:
		told := s.h.unavailable(ctx, fetchWITSVID, failure)
		if !s.sent {
			return nil, time.Time{}, told
		}
		s.retry = now.Add(min(firstWait<<min(s.failures, 8), lastWait))
		s.failures++
	case attempt:
		s.failures, s.retry = 0, time.Time{}
	}
	if len(resp.svids) == 0 {
		if missing != nil && expired == len(s.held) { // nothing is taken away
			return nil, time.Time{}, status(grpchttp.Unavailable, "the WIT-SVIDs of this caller have expired, and there are no others now; try again later")
		}
		if missing != nil { // and all that there was has been taken away, which only this code says (WAPI-17)
			return nil, time.Time{}, status(grpchttp.PermissionDenied, "the identities of this caller are others now; call again")
		}
		return nil, time.Time{}, errDenied()
	}
	m, err := encode(resp)
	if err != nil {
		return nil, time.Time{}, s.h.unavailable(ctx, fetchWITSVID, err)
	}
	s.held, s.sent = held, true
	next := s.retry
	for _, w := range held {
		if w.renew.After(now) && (next.IsZero() || w.renew.Before(next)) {
			next = w.renew
		}
	}
	return m, next, nil
}

var errRetryLater = errors.New("the issuer has failed a moment ago")

// issue asks the issuer and checks what it returns.
func (s *witStream) issue(ctx context.Context, l label, now time.Time) (*heldWIT, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	svid, err := s.h.opts.WITIssuer.IssueWITSVID(ctx, l.id, l.hint)
	if err == nil && svid == nil {
		err = errors.New("the issuer returned no WIT-SVID and no error")
	}
	if err != nil {
		return nil, err
	}
	token, signer := svid.Token(), svid.Signer()
	exp, alg, err := checkWIT(token, l.id, signer, now)
	if err != nil {
		return nil, fmt.Errorf("the issuer's WIT-SVID for %q: %w", l.id, err)
	}
	key, err := privateJWK(signer, alg)
	if err != nil {
		return nil, fmt.Errorf("the issuer's key for %q: %w", l.id, err)
	}
	return &heldWIT{
		m:     witSVID{spiffeID: l.id.String(), witSVID: token, witSVIDKey: key, hint: l.hint},
		renew: now.Add(max(exp.Sub(now)/2, firstWait)),
		exp:   exp,
	}, nil
}

// checkWIT refuses a token that a workload could not use, and returns when it expires, and the
// algorithm of the workload's key. Whether its signature is good is for those to judge who have the
// authorities.
func checkWIT(token string, id spiffe.ID, key crypto.Signer, now time.Time) (exp time.Time, alg jws.Algorithm, err error) {
	t, err := jws.Parse(token)
	if err != nil {
		return time.Time{}, 0, err
	}
	h, err := jws.ParseHeader(t.Header)
	switch {
	case err != nil:
		return time.Time{}, 0, err
	case h.Type != "wit+jwt":
		return time.Time{}, 0, errors.New(`"typ" is not "wit+jwt" (WIT-5)`)
	case h.KeyID == "":
		return time.Time{}, 0, errors.New(`"kid" is missing or empty (WIT-2)`)
	case slices.Contains(h.Extra, "crit"):
		return time.Time{}, 0, errors.New(`there is a "crit" (WIT-9)`)
	}

	var sub, number []byte
	var cnf jws.Confirmation
	aud := false
	r := strictjson.NewReader(t.Payload)
	if r.Kind() != strictjson.Object {
		r.Skip()
	}
	for name := range r.Members() {
		switch string(name) {
		case "sub":
			sub, _ = r.Text()
		case "aud":
			aud = true
		case "exp":
			number, _ = r.Number()
		case "cnf":
			cnf.Read(r)
		}
	}
	if err := r.End(); err != nil {
		return time.Time{}, 0, fmt.Errorf("the payload is not strict JSON: %w (WIT-1)", err)
	}
	switch {
	case string(sub) != id.String():
		return time.Time{}, 0, errors.New(`"sub" is missing or another ID (WIT-10)`)
	case aud:
		return time.Time{}, 0, errors.New(`there is an "aud" (WIT-24)`)
	case number == nil:
		return time.Time{}, 0, errors.New(`"exp" is missing or not a number (WIT-16)`)
	case cnf.Secret:
		return time.Time{}, 0, errors.New(`the key in "cnf" shows its private half (WIT-13)`)
	}
	if exp = jws.NumericDate(string(number)); !now.Before(exp) {
		return time.Time{}, 0, errors.New("it has expired (WIT-16)")
	}
	confirmed, reason := cnf.PublicKey()
	if reason != "" {
		return time.Time{}, 0, fmt.Errorf(`the key in "cnf": %s (WIT-11)`, reason)
	}
	alg, ok := jws.ParseAlgorithm(string(cnf.Alg))
	if !ok || !alg.Fits(confirmed) {
		return time.Time{}, 0, errors.New(`the "alg" in "cnf" is missing or does not fit its key (WIT-12)`)
	}
	if key == nil {
		return time.Time{}, 0, errors.New("it comes without its private key")
	}
	if pub, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(confirmed) {
		return time.Time{}, 0, errors.New("the private key is not the one that the token confirms (WAPI-26)")
	}
	return exp, alg, nil
}

// privateJWK returns a private key as a JWK. Its public half is one that a WIT-SVID can confirm.
func privateJWK(key crypto.Signer, alg jws.Algorithm) (string, error) {
	b := []byte{'{'}
	add := func(name string, v []byte) {
		b = append(append(append(b, `,"`...), name...), `":"`...)
		b = append(base64.RawURLEncoding.AppendEncode(b, v), '"')
	}
	ok := false
	switch k := key.(type) {
	case *ecdsa.PrivateKey:
		d, err := k.Bytes()
		if err != nil {
			return "", errors.New("it is not a valid ECDSA key")
		}
		b, ok = jws.AppendKey(b, k.Public())
		add("d", d) // of fixed size (RFC 7518 section 6.2.2)
	case *rsa.PrivateKey:
		if len(k.Primes) != 2 || k.Validate() != nil {
			return "", errors.New("it is not a valid RSA key with two primes")
		}
		// The values of a key that was never precomputed are not there, and to put them there would be
		// to write to what others may read.
		p, q, one := k.Primes[0], k.Primes[1], big.NewInt(1)
		b, ok = jws.AppendKey(b, k.Public())
		add("d", k.D.Bytes())
		add("p", p.Bytes())
		add("q", q.Bytes())
		add("dp", new(big.Int).Mod(k.D, new(big.Int).Sub(p, one)).Bytes())
		add("dq", new(big.Int).Mod(k.D, new(big.Int).Sub(q, one)).Bytes())
		add("qi", new(big.Int).ModInverse(q, p).Bytes())
	default:
		return "", fmt.Errorf("a %T cannot be sent; it has to be an *ecdsa.PrivateKey or *rsa.PrivateKey", key)
	}
	if !ok {
		return "", errors.New("a JWK cannot hold it")
	}
	return string(b) + `,"alg":"` + alg.String() + `"}`, nil
}

// witAuthorities returns the WIT authorities of td.
func witAuthorities(snap *spiffe.Snapshot, td spiffe.TrustDomain) map[string]crypto.PublicKey {
	b, err := snap.Bundle(td)
	if err != nil {
		return nil
	}
	return maps.Collect(b.WITAuthorities())
}

func sameKeys(a, b map[string]crypto.PublicKey) bool {
	return maps.EqualFunc(a, b, func(x, y crypto.PublicKey) bool {
		pub, ok := x.(interface{ Equal(crypto.PublicKey) bool })
		return ok && pub.Equal(y)
	})
}

// witBundles returns the response of FetchWITBundles for callers whose identities are of these trust
// domains (WAPI-62). One that has no WIT authorities does not do WIT-SVIDs (WIT-63): if it is foreign
// it is left out, and if all are such there is nothing to give.
func (e *encodings) witBundles(snap *spiffe.Snapshot, crls [][]byte, own []spiffe.TrustDomain) (*raw, error) {
	g := e.of(snap, crls)
	var extra []spiffe.TrustDomain // own ones that only their callers get
	for _, td := range own {
		if b, err := snap.Bundle(td); err != nil {
			return nil, err
		} else if !hasWIT(b) {
			extra = append(extra, td)
		}
	}
	if len(extra) == 0 {
		return g.wit.get(func() (*raw, error) { return encodeWITBundles(snap, nil) })
	}
	return encodeWITBundles(snap, extra)
}

func encodeWITBundles(snap *spiffe.Snapshot, extra []spiffe.TrustDomain) (*raw, error) {
	resp := &witBundlesResponse{bundles: make(map[string]string)}
	some := false
	for b := range snap.Bundles().All() {
		td := b.TrustDomain()
		if !hasWIT(b) && !slices.Contains(extra, td) {
			continue
		}
		some = some || hasWIT(b)
		only, err := spiffe.NewBundle(td, spiffe.BundleContents{WITAuthorities: maps.Collect(b.WITAuthorities())})
		if err != nil {
			return nil, err
		}
		doc, err := only.Marshal()
		if err != nil {
			return nil, err
		}
		// A plain JWK Set, as that of FetchJWTBundles.
		resp.bundles[td.ID().String()] = string(bytes.ReplaceAll(doc, []byte(`"use":"wit-svid",`), nil))
	}
	if !some {
		return nil, fmt.Errorf("no bundle has WIT authorities: %w", ErrDenied)
	}
	return encode(resp)
}

func hasWIT(b *spiffe.Bundle) bool {
	for range b.WITAuthorities() {
		return true
	}
	return false
}

func (h *Handler) witBundles(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (*raw, error) {
	var own []spiffe.TrustDomain
	err := checkIdentities(ids)
	for _, id := range ids {
		if err != nil {
			break
		}
		if td := id.SVID.ID().TrustDomain(); !slices.Contains(own, td) {
			own = append(own, td)
		}
	}
	var m *raw
	if err == nil {
		m, err = h.enc.witBundles(snap, h.crls(), own)
	}
	if err != nil {
		return nil, h.unavailable(ctx, fetchWITBundles, err)
	}
	return m, nil
}
