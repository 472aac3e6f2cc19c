package gospiffe

import (
	"crypto"
	"reflect"
	"slices"
	"sync"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/svidkit/svidkit/spiffe"
)

func fromSVID(svid *x509svid.SVID) (*spiffe.SVID, error) {
	ours, err := spiffe.NewSVID(svid.Certificates, svid.PrivateKey)
	if err != nil {
		return nil, err
	}
	id, err := fromID(svid.ID)
	if err != nil {
		return nil, err
	}
	if id != ours.ID() {
		return nil, errorf("SVID: the field ID is %q and the certificate has %q; set both alike", id, ours.ID())
	}
	return ours, nil
}

func toSVID(svid *spiffe.SVID) (*x509svid.SVID, error) {
	if svid == nil {
		return nil, errorf("SVID: the source returned none, and no error")
	}
	id, err := toID(svid.ID())
	if err != nil {
		return nil, err
	}
	return &x509svid.SVID{ID: id, Certificates: slices.Clip(svid.Chain()), PrivateKey: svid.Signer()}, nil
}

// FromSVIDSource returns a source of the SVID in src; an [x509svid.SVID] is a source of itself. An SVID must follow
// the rules of [spiffe.NewSVID], whose errors the source returns, and its field ID must be the ID in the
// certificate. The hint is left out. The certificates and the key are shared.
//
// The source returns the same [*spiffe.SVID] until the identity, the certificates or the key from src change, in a
// new SVID or in place. SVID takes as long as GetX509SVID of src, which must not block. A program that changes an
// SVID in place must not do so while it is read.
func FromSVIDSource(src x509svid.Source) spiffe.SVIDSource {
	if src == nil {
		panic("gospiffe: FromSVIDSource needs a source")
	}
	type converted struct {
		from x509svid.SVID
		svid *spiffe.SVID
		err  error
	}
	var mu sync.Mutex
	var last *converted
	return svidSource(func() (*spiffe.SVID, error) {
		theirs, err := src.GetX509SVID()
		if err != nil {
			return nil, errorf("SVID: %w", err)
		}
		if theirs == nil {
			return nil, errorf("SVID: the source returned none, and no error")
		}
		mu.Lock()
		defer mu.Unlock()
		if last == nil || !same(theirs, &last.from) {
			last = &converted{from: shallow(theirs)}
			last.svid, last.err = fromSVID(&last.from)
		}
		return last.svid, last.err
	})
}

// ToSVIDSource returns a source for go-spiffe of the SVID in src, without a hint. The certificates and the key are
// shared. Unlike a [spiffe.SVID], the result shows its key when it is printed. Readers share the result, as with a
// go-spiffe source, until src has another SVID; after a reader has changed it, later calls return a new one.
func ToSVIDSource(src spiffe.SVIDSource) x509svid.Source {
	if src == nil {
		panic("gospiffe: ToSVIDSource needs a source")
	}
	type converted struct {
		from *spiffe.SVID
		svid *x509svid.SVID
		copy x509svid.SVID // of *svid, which readers may change
	}
	var mu sync.Mutex
	last := new(converted)
	return x509Source(func() (*x509svid.SVID, error) {
		ours, err := src.SVID()
		if err != nil {
			return nil, errorf("SVID: %w", err)
		}
		mu.Lock()
		defer mu.Unlock()
		if last.svid == nil || last.from != ours || !same(last.svid, &last.copy) {
			theirs, err := toSVID(ours)
			if err != nil {
				return nil, err
			}
			last = &converted{ours, theirs, shallow(theirs)}
		}
		return last.svid, nil
	})
}

// The adapters are functions, because no printer shows what a function holds.
type (
	svidSource func() (*spiffe.SVID, error)
	x509Source func() (*x509svid.SVID, error)
)

func (f svidSource) SVID() (*spiffe.SVID, error)          { return f() }
func (f x509Source) GetX509SVID() (*x509svid.SVID, error) { return f() }

// shallow copies the parts of s that same compares, so that later changes of s are seen.
func shallow(s *x509svid.SVID) x509svid.SVID {
	c := *s
	c.Certificates = slices.Clone(c.Certificates)
	return c
}

func same(a, b *x509svid.SVID) bool {
	return a.ID == b.ID && a.Hint == b.Hint &&
		slices.Equal(a.Certificates, b.Certificates) && sameKey(a.PrivateKey, b.PrivateKey)
}

// sameKey compares keys, most of which are pointers. It does not panic for a type without ==, such as the type of
// Ed25519 keys, and allocates only for types that are neither.
func sameKey(a, b any) bool {
	t := reflect.TypeOf(a)
	switch {
	case t != reflect.TypeOf(b):
		return false
	case t == nil || t.Kind() == reflect.Pointer:
		return a == b
	}
	if k, ok := a.(interface{ Equal(crypto.PrivateKey) bool }); ok {
		return k.Equal(b)
	}
	return reflect.ValueOf(a).Comparable() && a == b
}
