package gospiffe_test

import (
	"crypto"
	"crypto/ed25519"
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// theirSource is a source of go-spiffe that the test controls.
type theirSource struct {
	svid *x509svid.SVID
	err  error
}

func (s *theirSource) GetX509SVID() (*x509svid.SVID, error) { return s.svid, s.err }

func toSVID(t testing.TB, s *spiffe.SVID) *x509svid.SVID {
	t.Helper()
	return must.Get(gospiffe.ToSVIDSource(s).GetX509SVID())(t)
}

func TestSVIDs(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, ours := range []*spiffe.SVID{ca.SVID("/web"), ca.Intermediate().SVID("/db")} {
		theirs := toSVID(t, ours)
		certs, key := must.Get2(theirs.Marshal())(t)
		must.Get(x509svid.Parse(certs, key))(t) // go-spiffe holds it for good

		back := must.Get(gospiffe.FromSVIDSource(theirs).SVID())(t)
		assert.Equal(t, ours.ID(), back.ID())
		assert.Equal(t, ours.Chain(), back.Chain())
		assert.Equal(t, ours.Signer(), back.Signer())

		// Theirs can be changed, and ours does not change with it.
		theirs.Certificates[0], theirs.PrivateKey, theirs.ID = nil, nil, spiffeid.ID{}
		assert.Equal(t, ours.Chain(), back.Chain())
		assert.NotNil(t, ours.Leaf())
		assert.NotNil(t, back.Signer())
	}
}

// An SVID of theirs that breaks a rule does not cross.
func TestSVIDsRefused(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	broken := 0
	for _, fault := range spiffetest.Faults() {
		chain, key := ca.Broken(fault.Name)
		_, want := spiffe.NewSVID(chain, key)
		theirs := &x509svid.SVID{ID: spiffeid.RequireFromString("spiffe://example.org/broken"), Certificates: chain, PrivateKey: key}
		got, err := gospiffe.FromSVIDSource(theirs).SVID()
		if want == nil { // what only a verifier sees
			continue
		}
		broken++
		assert.Nil(t, got, "%v", fault.Name)
		assert.Equal(t, want, err, "%v", fault.Name)
	}
	assert.Greater(t, broken, 5)

	web, db := ca.SVID("/web"), ca.SVID("/db")
	for name, edit := range map[string]func(*x509svid.SVID){
		"another ID":          func(s *x509svid.SVID) { s.ID = spiffeid.RequireFromString("spiffe://example.org/db") },
		"no ID":               func(s *x509svid.SVID) { s.ID = spiffeid.ID{} },
		"no certificates":     func(s *x509svid.SVID) { s.Certificates = nil },
		"a nil certificate":   func(s *x509svid.SVID) { s.Certificates = append(s.Certificates, nil) },
		"no key":              func(s *x509svid.SVID) { s.PrivateKey = nil },
		"the key of another":  func(s *x509svid.SVID) { s.PrivateKey = db.Signer() },
		"the leaf of another": func(s *x509svid.SVID) { s.Certificates[0] = db.Leaf() },
	} {
		theirs := toSVID(t, web)
		edit(theirs)
		got, err := gospiffe.FromSVIDSource(theirs).SVID()
		assert.Nil(t, got, name)
		assert.Error(t, err, name)
	}
	_, err := gospiffe.FromSVIDSource((*x509svid.SVID)(nil)).SVID()
	assert.ErrorContains(t, err, "the source returned none")
	_, err = gospiffe.ToSVIDSource((*spiffe.SVID)(nil)).GetX509SVID()
	assert.ErrorContains(t, err, "the source returned none")
	_, err = gospiffe.ToSVIDSource(&spiffe.SVID{}).GetX509SVID()
	assert.ErrorIs(t, err, spiffe.ErrZero)
}

func TestSVIDSourceSuite(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	spiffetest.TestSVIDSource(t, func(t testing.TB) spiffe.SVIDSource {
		return gospiffe.FromSVIDSource(gospiffe.ToSVIDSource(ca.Source("/web")))
	})
}

func TestFromSVIDSource(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	theirs := toSVID(t, ca.SVID("/web"))
	src := &theirSource{svid: theirs}
	ours := gospiffe.FromSVIDSource(src)
	first := must.Get(ours.SVID())(t)

	// The same contents in another place are the same SVID.
	src.svid = &x509svid.SVID{ID: theirs.ID, Certificates: slices.Clone(theirs.Certificates), PrivateKey: theirs.PrivateKey}
	again := must.Get(ours.SVID())(t)
	assert.Same(t, first, again)

	// Other contents in the same place are another.
	fresh := ca.SVID("/web")
	src.svid.Certificates[0], src.svid.PrivateKey = fresh.Leaf(), fresh.Signer()
	second := must.Get(ours.SVID())(t)
	assert.NotSame(t, first, second)
	assert.True(t, fresh.Leaf().Equal(second.Leaf()))

	// What is no SVID any more is an error, and ends when it is one again.
	src.svid.PrivateKey = nil
	_, err := ours.SVID()
	require.Error(t, err)
	src.svid.PrivateKey = fresh.Signer()
	must.Get(ours.SVID())(t)

	closed := errors.New("closed")
	src.err = closed
	_, err = ours.SVID()
	assert.ErrorIs(t, err, closed)
	src.svid, src.err = nil, nil
	_, err = ours.SVID()
	assert.ErrorContains(t, err, "no error")
	assert.Panics(t, func() { gospiffe.FromSVIDSource(nil) })
}

func TestToSVIDSource(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	src := ca.Source("/web")
	theirs := gospiffe.ToSVIDSource(src)
	first := must.Get(theirs.GetX509SVID())(t)
	again := must.Get(theirs.GetX509SVID())(t)
	assert.Same(t, first, again)

	// A reader that changes what it was given changes it for no reader that comes later.
	for _, spoil := range []func(){
		func() { first.ID = spiffeid.RequireFromString("spiffe://example.org/admin") },
		func() { first.PrivateKey = nil },
		func() { first.Certificates[0] = nil },
		func() { first.Hint = "internal" },
	} {
		spoil()
		good := must.Get(theirs.GetX509SVID())(t)
		assert.Equal(t, "spiffe://example.org/web", good.ID.String())
		assert.NotNil(t, good.PrivateKey)
		assert.NotNil(t, good.Certificates[0])
		assert.Empty(t, good.Hint)
		first = good
	}

	src.Renew()
	renewed := must.Get(src.SVID())(t)
	second := must.Get(theirs.GetX509SVID())(t)
	assert.Same(t, renewed.Leaf(), second.Certificates[0])

	down := errors.New("down")
	src.Fail(down)
	_, err := theirs.GetX509SVID()
	assert.ErrorIs(t, err, down)
	assert.Panics(t, func() { gospiffe.ToSVIDSource(nil) })
}

// odd is a signer of a type that == panics for.
type odd struct {
	crypto.Signer
	_ []byte
}

func (o odd) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return o.Signer.Sign(r, digest, opts)
}

// Keys whose type has no == do not panic.
func TestSVIDSourceKeys(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	_, ed, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	web := ca.SVID("/web")
	src := &theirSource{svid: toSVID(t, web)}
	ours := gospiffe.FromSVIDSource(src)
	src.svid.PrivateKey = odd{Signer: web.Signer()}
	for range 2 {
		svid := must.Get(ours.SVID())(t)
		assert.Equal(t, web.ID(), svid.ID())
	}
	for range 2 {
		src.svid.PrivateKey = slices.Clone(ed)
		_, err = ours.SVID()
		assert.ErrorContains(t, err, "does not belong")
	}
}
