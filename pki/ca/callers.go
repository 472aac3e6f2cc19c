package ca

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// CallerBundle returns the authorities whose certificates and tokens may still authenticate a caller to this CA:
// [Authority.Bundle] without the tainted keys. Servers that sign for callers verify them with it, so that a stolen
// key cannot be exchanged for a certificate of its successor. Workloads verify each other with Bundle, so leaves that
// the tainted key signed in good faith go on working.
//
// A tainted key, and each root with the same key, is missing as soon as [Authority.Taint] returns, and in other
// replicas as soon as they have read the store. They read the directory of a [NewDirStore] here and in Sign if
// another process has written to it, and other stores every 30 seconds. A workload whose certificate is from a
// tainted root must renew with another proof, such as its token. [Authority.Changed] announces changes. The bundle is
// not for publishing and has no sequence number. CallerBundle returns the same bundle until it changes, and blocks no
// more than Bundle does, except to read a directory that another process has written to.
func (a *Authority) CallerBundle() *spiffe.Bundle {
	a.look(context.Background())
	return a.current().callers
}

// newCallers returns the bundle of callers for s, which follows old. It keeps an equal bundle, because verifiers
// cache by its address.
func (a *Authority) newCallers(s, old *state) (*spiffe.Bundle, error) {
	if !s.Tainted() {
		return s.bundle, nil
	}
	clean := s.Untainted()
	if s.plugged != nil {
		clean.X509Authorities = s.plugged.roots
	}
	b, err := spiffe.NewBundle(a.cfg.TrustDomain, clean)
	if err != nil {
		return nil, fmt.Errorf("ca: bundle of the callers of %s: %w", a.cfg.TrustDomain, err)
	}
	if old != nil && b.Equal(old.callers) {
		b = old.callers
	}
	return b, nil
}

// A leaf's serial number says when its holder last proved its identity without a certificate. It has 20 octets:
// thirteen random ones (except two bits), four for the seconds since 1970, until 2106, and three for a mark. So the
// number is positive, unique and unpredictable (RFC 5280, section 4.1.2.2), and its first digits tell leaves apart.
// The time needs no extension that verifiers would have to know, and no state of the CA. Roots, and other programs'
// leaves, have serial numbers that are shorter or do not end with the mark.
const (
	serialOctets = 20
	timeOctets   = 4
	serialMark   = "svi"
	randomOctets = serialOctets - timeOctets - len(serialMark)
)

// newSerial returns a serial number that carries t.
func newSerial(t time.Time) *big.Int {
	var b [serialOctets]byte
	_, _ = rand.Read(b[:randomOctets]) // it does not fail
	b[0] = b[0]&0x3f | 0x40            // positive, and never shorter
	binary.BigEndian.PutUint32(b[randomOctets:], uint32(min(max(t.Unix(), 0), math.MaxUint32)))
	copy(b[randomOctets+timeOctets:], serialMark)
	return new(big.Int).SetBytes(b[:])
}

// serialTime returns the time in a serial number.
func serialTime(n *big.Int) (time.Time, bool) {
	if n == nil || n.Sign() <= 0 || n.BitLen() != 8*serialOctets-1 {
		return time.Time{}, false
	}
	var b [serialOctets]byte
	n.FillBytes(b[:])
	t := time.Unix(int64(binary.BigEndian.Uint32(b[randomOctets:])), 0)
	return t, bytes.HasSuffix(b[:], []byte(serialMark))
}

// Proven returns when the holder of a leaf last proved its identity to the CA without a certificate: the
// [Request.Proven] of its signing, in whole seconds. The caller must have verified the leaf with
// [Authority.CallerBundle]. A server that takes certificates as proof copies the time into the request for the next
// certificate, and refuses a time that is too long ago: so chains of renewals end.
//
// For a leaf without such a time, which another program has signed, or with an impossible one, Proven returns the
// leaf's NotBefore.
func (a *Authority) Proven(leaf *x509.Certificate) time.Time {
	t, ok := serialTime(leaf.SerialNumber)
	// The time is before the signature, and a leaf is backdated by no more than this.
	if latest := leaf.NotBefore.Add(max(a.cfg.MaxTTL, a.cfg.Backdate)); !ok || t.After(latest) ||
		t.After(leaf.NotAfter) {
		return leaf.NotBefore
	}
	return t
}
