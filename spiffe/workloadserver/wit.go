package workloadserver

import (
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
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// witStream makes the responses of one stream of WIT-SVIDs. Each WIT-SVID is issued for this stream only. It is
// replaced when half of its life is over, or when the WIT authorities of its trust domain change, because verifiers
// may refuse it from then on.
type witStream struct {
	h    *Handler
	r    *http.Request
	want spiffe.ID // zero means all

	held     map[label]*heldWIT
	sent     bool      // the caller has a response
	failures int       // of the issuer, in a row
	retry    time.Time // after a failure, the time of the next attempt
}

// label tells the identities of a caller apart.
type label struct {
	id   spiffe.ID
	hint string
}

// heldWIT is a WIT-SVID in force.
type heldWIT struct {
	m           workloadwire.SVID
	issued      time.Time
	renew, exp  time.Time
	authorities map[string]crypto.PublicKey // of its trust domain, when it was issued
}

func (h *Handler) fetchWITSVID(r *http.Request, request []byte) (answer, error) {
	var id string
	if workloadwire.ReadTexts(request, &id) != nil {
		return nil, badRequest("the request is not a WITSVIDRequest")
	}
	want, err := parseWanted(id)
	return (&witStream{h: h, r: r, want: want}).answer, err
}

// answer makes the current response. The first one has a WIT-SVID for every identity of the caller. Later ones leave
// out an identity whose WIT-SVID has expired or cannot be issued, so that the others are renewed and withdrawn in
// time.
func (s *witStream) answer(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) ([]byte, time.Time, error) {
	now := time.Now()
	attempt := !now.Before(s.retry)
	next := make(map[label]*heldWIT)
	resp := &workloadwire.SVIDs{}
	var failed error
	missing, expired := false, 0
	for _, id := range ids {
		l := label{id.SVID.ID(), id.Hint}
		if next[l] != nil || !s.want.IsZero() && l.id != s.want {
			continue
		}
		w := s.held[l]
		if w != nil && !now.Before(w.exp) {
			w = nil
			expired++
		}
		authorities := witAuthorities(snap, l.id.TrustDomain())
		if attempt && (w == nil || !now.Before(w.renew) || !maps.EqualFunc(w.authorities, authorities, jws.SameKey)) {
			fresh, err := s.issue(ctx, l, now)
			switch {
			case errors.Is(err, ErrDenied):
				continue
			case err != nil:
				failed = cmp.Or(failed, err)
			default:
				w, fresh.authorities = fresh, authorities
			}
		}
		if w == nil {
			missing = true
			continue
		}
		next[l] = w
		resp.SVIDs = append(resp.SVIDs, w.m)
	}
	switch {
	case failed != nil && !s.sent:
		return nil, time.Time{}, failed
	case failed != nil:
		_ = s.h.told(ctx, s.r, failed) // the stream goes on
		s.failures++
		s.retry = now.Add(s.wait(failed, next, now))
	case attempt:
		s.failures, s.retry = 0, time.Time{}
	}
	if len(resp.SVIDs) == 0 {
		return nil, time.Time{}, s.nothing(missing, expired)
	}
	s.held, s.sent = next, true
	m, err := workloadwire.WIT.WriteSVIDs(resp)
	return m, s.due(now), err
}

// nothing returns the error for a caller that has no WIT-SVID now. missing says that it may have one, which cannot be
// issued; expired is how many of those before have expired.
func (s *witStream) nothing(missing bool, expired int) error {
	switch {
	case missing && expired == len(s.held): // nothing is withdrawn
		return status(grpchttp.Unavailable,
			"the WIT-SVIDs of this caller have expired, and there are no others now; try again later")
	case missing: // everything is withdrawn, and only this code says so
		return status(grpchttp.PermissionDenied, "the identities of this caller are others now; call again")
	}
	return errDenied(s.want)
}

// due returns when to check again: when a WIT-SVID must be renewed, or a failed attempt repeated.
func (s *witStream) due(now time.Time) time.Time {
	due := s.retry
	for _, w := range s.held {
		if w.renew.After(now) && (due.IsZero() || w.renew.Before(due)) {
			due = w.renew
		}
	}
	return due
}

// wait returns how long to wait after a failure: a share of the remaining life of the WIT-SVIDs in force.
func (s *witStream) wait(failure error, held map[label]*heldWIT, now time.Time) time.Duration {
	var life, left time.Duration
	for _, w := range held {
		if l := w.exp.Sub(now); left == 0 || l < left {
			life, left = w.exp.Sub(w.issued), l
		}
	}
	return patience.Wait(renew.NewFailure(s.failures, failure), life, left, rand.Float64())
}

// issue calls the issuer and checks what it returns. The token itself is its verifiers' to check.
func (s *witStream) issue(ctx context.Context, l label, now time.Time) (*heldWIT, error) {
	ctx, cancel := context.WithTimeout(ctx, hookTimeout)
	defer cancel()
	token, signer, err := s.h.opts.IssueWITSVID(ctx, l.id, l.hint)
	if err != nil {
		return nil, issuerError(l.id, err)
	}
	claims, ok := jws.ReadClaims(token)
	switch {
	case !ok || !claims.Bound:
		return nil, failure("issuer", fmt.Errorf("what is for %q is not a WIT-SVID", l.id))
	case claims.Subject != l.id.String():
		return nil, failure("issuer", fmt.Errorf("the WIT-SVID for %q is of another ID", l.id))
	case !now.Before(claims.Expires.At):
		return nil, failure("issuer", fmt.Errorf("the WIT-SVID for %q has expired", l.id))
	}
	key, err := privateJWK(signer)
	if err != nil {
		return nil, failure("issuer", fmt.Errorf("the key for %q: %w", l.id, err))
	}
	exp := claims.Expires.At
	return &heldWIT{
		m:      workloadwire.SVID{ID: l.id.String(), Hint: l.hint, Parts: [3][]byte{[]byte(token), []byte(key)}},
		issued: now,
		renew:  now.Add(max(exp.Sub(now)/2, time.Second)),
		exp:    exp,
	}, nil
}

// privateJWK returns a private key as a JWK.
func privateJWK(key crypto.Signer) (string, error) {
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
		add("d", d)                                // fixed size (RFC 7518 section 6.2.2)
		alg, _ := jws.DefaultAlgorithm(k.Public()) // the only one for the curve
		b = append(b, `,"alg":"`+alg.String()+`"`...)
	case *rsa.PrivateKey:
		if len(k.Primes) != 2 || k.Validate() != nil {
			return "", errors.New("it is not a valid RSA key with two primes")
		}
		// A key that was never precomputed lacks these values. Precomputing it here would race with concurrent
		// readers.
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
	return string(b) + "}", nil
}

// witAuthorities returns the WIT authorities of td.
func witAuthorities(snap *spiffe.Snapshot, td spiffe.TrustDomain) map[string]crypto.PublicKey {
	b, err := snap.Bundle(td)
	if err != nil {
		return nil
	}
	return b.Contents().WITAuthorities
}
