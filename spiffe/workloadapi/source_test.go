package workloadapi_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// feed is a stream that a test writes to, one message after the other.
type feed chan func(*call)

// serve is the function of a fake that does what comes through the feed.
func (f feed) serve(c *call) {
	for !c.ended {
		select {
		case do := <-f:
			do(c)
		case <-c.ctx.Done():
			return
		}
	}
}

// send sends a message on the stream, and waits until it was taken in. In a bubble only.
func (f feed) send(m proto.Message) { f.do(func(c *call) { c.send(m) }) }

func (f feed) do(do func(*call)) {
	f <- do
	synctest.Wait()
}

// source makes a source that runs, of a fake server.
func source(t testing.TB, cfg workloadapi.Config, f func(*call)) *workloadapi.Source {
	t.Helper()
	cfg.Client = inMemory(t, fake(t, f))
	s := must.Get(workloadapi.New(cfg))(t)
	workloadtest.Run(t, s)
	return s
}

func TestSource(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-5", "WAPI-8", "WAPI-10", "WAPI-11", "WAPI-12", "WAPI-15", "WAPI-21", "WEP-1", "WEP-7", "WEP-9", "AMB-20", "AMB-23")
	synctest.Test(t, func(t *testing.T) {
		home, other, third := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test"), workloadtest.NewDomain(t, "third.test")
		web, db := home.SVID("/web"), home.SVID("/db")
		streams := make(feed)
		calls := 0
		c := inMemory(t, fake(t, func(c *call) {
			calls++
			assert.Equal(t, "FetchX509SVID", c.rpc)
			assert.Empty(t, c.request)
			assert.NotContains(t, c.header, "Grpc-Timeout", "a stream has no deadline")
			streams.serve(c)
		}))
		s := must.Get(workloadapi.New(workloadapi.Config{Client: c}))(t)
		must.Fail(t, must.Err(s.SVID()), spiffe.ErrNotReady, "has neither called Start nor Run")
		stop := workloadtest.Run(t, s)
		synctest.Wait()
		for _, read := range []func() error{
			func() error { _, err := s.SVID(); return err },
			func() error { _, err := s.Bundle(home.TrustDomain()); return err },
			func() error { _, err := s.Snapshot(); return err },
			func() error { _, err := s.X509(); return err },
		} {
			require.ErrorIs(t, read(), spiffe.ErrNotReady)
			assert.ErrorContains(t, read(), "has not answered yet")
		}
		require.ErrorContains(t, s.Run(t.Context()), "already running")

		// The first response has two identities, two other trust domains, and a revocation list.
		m := response(t, home, web, other, third)
		m.Svids = append(m.Svids, message(t, home, db, ""))
		m.Crl = [][]byte{[]byte("revoked")}
		changed := s.Changed()
		streams.send(m)
		require.NoError(t, s.Ready(t.Context()))
		<-changed
		snap := must.Get(s.Snapshot())(t)
		svid := must.Get(s.SVID())(t)
		assert.Equal(t, web.Leaf().Raw, svid.Leaf().Raw, "the first is the default")
		assert.True(t, svid.Signer().(*ecdsa.PrivateKey).Equal(web.Signer()))
		all := must.Get(s.X509())(t)
		require.Len(t, all.Identities, 2)
		assert.Equal(t, db.ID(), all.Identities[1].SVID.ID())
		assert.Empty(t, all.Skipped)
		assert.Equal(t, [][]byte{[]byte("revoked")}, s.CRLs())
		for _, d := range []domain{home, other, third} {
			workloadtest.SameRoots(t, d, must.Get(s.Bundle(d.TrustDomain()))(t))
		}
		_, err := s.Bundle(spiffe.MustParseTrustDomain("unknown.test"))
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)

		// The same again is no change.
		changed = s.Changed()
		streams.send(m)
		assert.Same(t, snap, must.Get(s.Snapshot())(t))
		assert.Equal(t, uint64(2), s.Status().X509.Updates)

		// What is not in the newest response is gone; what has not changed is the same value.
		third.Rotate()
		streams.send(response(t, home, db, third))
		<-changed
		svid = must.Get(s.SVID())(t)
		assert.Same(t, all.Identities[1].SVID, svid)
		assert.ErrorIs(t, must.Err(s.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)
		before, _ := snap.Bundle(home.TrustDomain())
		b := must.Get(s.Bundle(home.TrustDomain()))(t)
		assert.Same(t, before, b)
		b = must.Get(s.Bundle(third.TrustDomain()))(t)
		workloadtest.SameRoots(t, third, b)
		assert.Empty(t, s.CRLs())
		assert.NoError(t, must.Err(snap.Bundle(other.TrustDomain())), "a snapshot does not change")

		// Days pass: the stream stays.
		time.Sleep(100 * time.Hour)
		assert.Equal(t, 1, calls)
		st := s.Status()
		assert.True(t, st.X509.Open)
		assert.True(t, st.Ready)
		assert.Equal(t, db.ID(), st.ID)
		assert.Equal(t, 2, s.Bundles().Len())
		assert.Equal(t, db.NotAfter(), st.NotAfter)
		assert.True(t, time.Now().After(st.NotAfter), "the identity has expired")

		// After the end everything stays readable.
		require.NoError(t, stop())
		must.Get(s.SVID())(t)
		assert.False(t, s.Status().X509.Open)
	})
}

// A response with a fault is discarded as a whole and reported, what was before stays, and the stream
// goes on.
func TestDiscard(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-14", "WAPI-26", "WAPI-30", "WAPI-32", "WAPI-33", "GO-15")
	home, web := inBubbles(t)
	other := workloadtest.NewDomain(t, "other.test")
	edit := func(f func(s *wire.X509SVID)) *wire.X509SVIDResponse {
		m := response(t, home, home.SVID("/edited"), other)
		f(m.GetSvids()[0])
		return m
	}
	fromChain := func(chain []*x509.Certificate, key crypto.Signer) func(*wire.X509SVID) {
		der := must.Get(x509.MarshalPKCS8PrivateKey(key))(t)
		return func(s *wire.X509SVID) {
			s.X509Svid, s.X509SvidKey = nil, der
			for _, c := range chain {
				s.X509Svid = append(s.X509Svid, c.Raw...)
			}
		}
	}
	inter := home.Intermediate()
	chain, key := inter.Certificate("/edited")
	ecKey := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	sec1 := must.Get(x509.MarshalECPrivateKey(ecKey))(t)

	tests := map[string]struct {
		m    proto.Message
		want string
	}{
		"no SVIDs":             {&wire.X509SVIDResponse{FederatedBundles: map[string][]byte{other.Key(): other.Roots()}}, "it has no SVIDs"},
		"nothing at all":       {&wire.X509SVIDResponse{}, "it has no SVIDs"},
		"no ID":                {edit(func(s *wire.X509SVID) { s.SpiffeId = "" }), "must begin with"},
		"no certificate":       {edit(func(s *wire.X509SVID) { s.X509Svid = nil }), "x509_svid is empty"},
		"no key":               {edit(func(s *wire.X509SVID) { s.X509SvidKey = nil }), "x509_svid_key is empty"},
		"no bundle":            {edit(func(s *wire.X509SVID) { s.Bundle = nil }), "bundle is empty"},
		"ID of another":        {edit(func(s *wire.X509SVID) { s.SpiffeId = "spiffe://example.org/db" }), "not \"spiffe://example.org/db\""},
		"ID of another domain": {edit(func(s *wire.X509SVID) { s.SpiffeId = "spiffe://other.test/edited" }), "not \"spiffe://other.test/edited\""},
		"not an ID":            {edit(func(s *wire.X509SVID) { s.SpiffeId = "SPIFFE://example.org/edited" }), "ID-2"},
		"junk certificate":     {edit(func(s *wire.X509SVID) { s.X509Svid = []byte("junk") }), "certificate 1"},
		"junk after the chain": {edit(func(s *wire.X509SVID) { s.X509Svid = append(s.X509Svid, 0) }), "certificate 2"},
		"PEM certificate": {edit(func(s *wire.X509SVID) {
			s.X509Svid = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.GetX509Svid()})
		}), "certificate 1"},
		"intermediate first": {edit(fromChain([]*x509.Certificate{chain[1], chain[0]}, key)), "X5-32"},
		"root as leaf":       {edit(fromChain([]*x509.Certificate{home.Root()}, ecKey)), "X5-32"},
		"wrong key":          {edit(fromChain(chain, ecKey)), "does not belong"},
		"known certificate, wrong key": {func() proto.Message {
			m := response(t, home, web)
			m.GetSvids()[0].X509SvidKey = message(t, home, home.SVID("/db"), "").GetX509SvidKey()
			return m
		}(), "does not belong"},
		"known bytes, another border": {func() proto.Message {
			m := response(t, home, web)
			s := m.GetSvids()[0]
			end := len(s.GetX509Svid()) - 1
			s.X509SvidKey = append(slices.Clone(s.GetX509Svid()[end:]), s.GetX509SvidKey()...)
			s.X509Svid = s.GetX509Svid()[:end]
			return m
		}(), "certificate 1"},
		"SEC1 key": {edit(func(s *wire.X509SVID) { s.X509SvidKey = sec1 }), "private key"},
		"PEM key": {edit(func(s *wire.X509SVID) {
			s.X509SvidKey = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: s.GetX509SvidKey()})
		}), "private key"},
		"junk after the key": {edit(func(s *wire.X509SVID) { s.X509SvidKey = append(s.X509SvidKey, 0) }), "private key"},
		"junk bundle":        {edit(func(s *wire.X509SVID) { s.Bundle = []byte("junk") }), "bundle: certificate 1"},
		"junk after the bundle": {edit(func(s *wire.X509SVID) {
			s.Bundle = append(s.GetBundle(), 0x30, 0x00)
		}), "bundle: certificate 2"},
		"second SVID is bad": {func() proto.Message {
			m := response(t, home, web)
			bad := message(t, home, home.SVID("/db"), "")
			bad.X509SvidKey = nil
			m.Svids = append(m.Svids, bad)
			return m
		}(), "SVID 2"},
		"too many SVIDs": {&wire.X509SVIDResponse{Svids: slices.Repeat([]*wire.X509SVID{{}}, workloadapi.MaxIdentities+1)}, "the limit is 512"},
	}
	for _, f := range spiffetest.Faults() {
		if rule := f.Rule; !slices.Contains([]string{"X5-30", "X5-31", "X5-38", "X5-39"}, rule) { // those are the peers' business, or of TestExtendedKeyUsages
			chain, key := home.Broken(f.Name)
			tests["leaf with "+f.Name] = struct {
				m    proto.Message
				want string
			}{edit(fromChain(chain, key)), rule}
		}
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				good := response(t, home, web)
				renewed := response(t, home, home.SVID("/web"), other)
				streams := make(feed)
				calls := 0
				s := source(t, workloadapi.Config{}, func(c *call) {
					calls++
					streams.serve(c)
				})
				streams.send(good)
				before := must.Get(s.Snapshot())(t)
				streams.send(test.m)
				assert.Same(t, before, must.Get(s.Snapshot())(t))
				st := s.Status().X509
				require.ErrorIs(t, st.Err, workloadapi.ErrBadResponse)
				assert.Contains(t, withRules(st.Err), test.want)
				assert.True(t, st.Open)
				assert.True(t, st.NextAttempt.IsZero())
				streams.send(renewed)
				assert.Equal(t, renewed.GetSvids()[0].GetX509Svid(), must.Get(s.SVID())(t).Leaf().Raw)
				assert.NoError(t, s.Status().X509.Err)
				assert.Equal(t, 1, calls)
			})
		})
	}
}

// A server that sends bad responses as fast as it can does not fill the log.
func TestDiscardLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		web := home.SVID("/web")
		var log syncBuffer
		streams := make(feed)
		source(t, workloadapi.Config{Logger: workloadtest.Logger(&log)}, streams.serve)
		n := rounds.Of(50)
		for range n {
			streams.send(response(t, home, web))
			streams.send(&wire.X509SVIDResponse{})
		}
		assert.Equal(t, 1, strings.Count(log.String(), `msg="workloadapi: response discarded"`))
		time.Sleep(61 * time.Second)
		assert.Equal(t, 2, strings.Count(log.String(), `msg="workloadapi: response discarded"`))
		assert.Contains(t, log.String(), fmt.Sprint("count=", n-1))
	})
}

// One bundle that is damaged hides no other, and costs its trust domain nothing.
func TestBundleIsolation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-41", "BND-11", "BND-15")
	synctest.Test(t, func(t *testing.T) {
		home, other, third := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test"), workloadtest.NewDomain(t, "third.test")
		impostor := workloadtest.NewDomain(t, "example.org")
		web := home.SVID("/web")
		streams := make(feed)
		var log syncBuffer
		s := source(t, workloadapi.Config{Logger: workloadtest.Logger(&log)}, streams.serve)

		// From the first response on: others are there although one is junk.
		m := response(t, home, web, other, third)
		m.FederatedBundles[third.Key()] = []byte("junk")
		streams.send(m)
		bundle := func(d domain) *spiffe.Bundle {
			t.Helper()
			return must.Get(s.Bundle(d.TrustDomain()))(t)
		}
		skipped := func(want ...string) {
			t.Helper()
			got := s.Status().X509.Skipped
			require.Len(t, got, len(want), "%v", got)
			for i, w := range want {
				assert.ErrorContains(t, got[i], w)
			}
		}
		workloadtest.SameRoots(t, other, bundle(other))
		assert.ErrorIs(t, must.Err(s.Bundle(third.TrustDomain())), spiffe.ErrUnknownTrustDomain)
		skipped(`"third.test": skipped: certificate 1`)
		assert.Equal(t, 1, strings.Count(log.String(), "part of a response skipped"))
		streams.send(m)
		assert.Equal(t, 1, strings.Count(log.String(), "part of a response skipped"), "the same is said once")

		// What was good stays while what comes is damaged: half a bundle is not a bundle.
		streams.send(response(t, home, web, other, third))
		skipped()
		good := bundle(other)
		other.Rotate()
		m = response(t, home, web, third)
		m.FederatedBundles[other.Key()] = append(other.Roots(), "junk"...)
		streams.send(m)
		assert.Same(t, good, bundle(other))
		workloadtest.SameRoots(t, third, bundle(third))
		skipped(`"other.test": skipped: certificate 3`)

		// A name that is not that of a trust domain, and a copy of our own: both are ignored.
		m = response(t, home, web, other)
		m.FederatedBundles["example.org"] = impostor.Roots()
		m.FederatedBundles["spiffe://example.org/web"] = impostor.Roots()
		m.FederatedBundles[home.Key()] = impostor.Roots()
		streams.send(m)
		workloadtest.SameRoots(t, home, bundle(home))
		workloadtest.SameRoots(t, other, bundle(other))
		skipped("its name", "it is the own trust domain", "its name")
		assert.Equal(t, 2, s.Bundles().Len())

		// Nothing is a statement: nothing of this trust domain is trusted any more.
		m = response(t, home, web, third)
		m.FederatedBundles[other.Key()] = nil
		streams.send(m)
		assert.Empty(t, slices.Collect(bundle(other).X509Authorities()))
		skipped()

		// And so is a bundle in which nothing can be used. A leaf among CAs is left out.
		m = response(t, home, web, third)
		m.FederatedBundles[other.Key()] = other.SVID("/leaf").Leaf().Raw
		m.FederatedBundles[third.Key()] = append(third.SVID("/leaf").Leaf().Raw, third.Roots()...)
		streams.send(m)
		assert.Empty(t, slices.Collect(bundle(other).X509Authorities()))
		workloadtest.SameRoots(t, third, bundle(third))
		skipped("not a CA certificate", "not a CA certificate")

		// Two SVIDs that bring two bundles of one trust domain: the first counts.
		m = response(t, home, web)
		second := message(t, home, home.SVID("/db"), "")
		second.Bundle = impostor.Roots()
		m.Svids = append(m.Svids, second)
		streams.send(m)
		workloadtest.SameRoots(t, home, bundle(home))
		skipped("brought another")
	})
}

// A root that was revoked is not trusted any more, although the identity is still one of that root.
func TestRevokedRoot(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BND-6")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		web := home.SVID("/web")
		streams := make(feed)
		s := source(t, workloadapi.Config{}, streams.serve)
		streams.send(response(t, home, web))
		home.Rotate()
		home.DropOldRoots()
		streams.send(response(t, home, web))
		workloadtest.SameRoots(t, home, must.Get(s.Bundle(home.TrustDomain()))(t))
		assert.Equal(t, web.ID(), must.Get(s.SVID())(t).ID())
		skipped := s.Status().X509.Skipped
		require.Len(t, skipped, 1)
		assert.ErrorContains(t, skipped[0], `peers will refuse "spiffe://example.org/web"`)
	})
}

// An identity with which a workload can neither serve nor dial is discarded, and one with which it can do one
// of them does not take the place of one with which it can do both, until that has ended.
func TestExtendedKeyUsages(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-20", "X5-39")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		mint := func(path string, usages ...x509.ExtKeyUsage) *spiffe.SVID {
			return home.SVID(path, func(c *x509.Certificate) { c.ExtKeyUsage = usages })
		}
		const server, client, sign = x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageCodeSigning
		streams := make(feed)
		s := source(t, workloadapi.Config{}, streams.serve)
		has := func(want *spiffe.SVID) {
			t.Helper()
			assert.Equal(t, want.Chain(), must.Get(s.SVID())(t).Chain())
		}
		refuses := func(svid *spiffe.SVID, reason string) {
			t.Helper()
			before, _ := s.Snapshot()
			streams.send(response(t, home, svid))
			after, _ := s.Snapshot()
			assert.Same(t, before, after)
			require.ErrorIs(t, s.Status().X509.Err, workloadapi.ErrBadResponse)
			assert.ErrorContains(t, s.Status().X509.Err, reason)
		}
		takes := func(svid *spiffe.SVID, note string) {
			t.Helper()
			streams.send(response(t, home, svid))
			require.NoError(t, s.Status().X509.Err)
			has(svid)
			if note == "" {
				assert.Empty(t, s.Status().X509.Skipped)
				return
			}
			require.Len(t, s.Status().X509.Skipped, 1)
			assert.ErrorContains(t, s.Status().X509.Skipped[0], note)
		}

		refuses(mint("/web", sign), "neither a server nor a client")
		require.ErrorIs(t, must.Err(s.SVID()), spiffe.ErrNotReady, "it is of no use as the first one either")
		takes(mint("/web", server), "permit a server only")
		refuses(mint("/web", client, sign), "permit less than")
		takes(mint("/web"), "")
		takes(mint("/web", x509.ExtKeyUsageAny), "")
		good := mint("/web", sign, server, client)
		takes(good, "")
		refuses(mint("/web", sign), "neither a server nor a client")
		refuses(mint("/web", server), "permit less than")
		refuses(mint("/web", client), "permit less than")
		refuses(home.SVID("/web", func(c *x509.Certificate) {
			c.ExtKeyUsage, c.UnknownExtKeyUsage = nil, []asn1.ObjectIdentifier{{1, 3, 6, 1, 4, 1, 99999}}
		}), "neither a server nor a client")
		narrow := home.Intermediate(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{server} })
		refuses(narrow.SVID("/web"), "permit less than")

		takes(mint("/other", server), "permit a server only") // another identity
		takes(good, "")
		time.Sleep(time.Until(good.NotAfter()) + time.Second)
		takes(mint("/web", client), "permit a client only") // better than one that has expired
	})
}

func TestHints(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-21", "WAPI-22", "WAPI-24")
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		m := &wire.X509SVIDResponse{}
		for _, id := range []struct{ path, hint string }{{"/1", "a"}, {"/2", "a"}, {"/3", ""}, {"/4", ""}, {"/5", "b"}} {
			m.Svids = append(m.Svids, message(t, home, home.SVID(id.path), id.hint))
		}
		streams := make(feed)
		c := inMemory(t, fake(t, func(c *call) {
			c.send(m)
			streams.serve(c)
		}))
		for hint, want := range map[string]string{"": "/1", "a": "/1", "b": "/5", "c": ""} {
			s := must.Get(workloadapi.New(workloadapi.Config{Client: c, Hint: hint}))(t)
			stop := workloadtest.Run(t, s)
			synctest.Wait()
			svid, err := s.SVID()
			if want == "" {
				must.Fail(t, err, spiffe.ErrNotReady, `no identity with the hint "c"`)
				assert.ErrorIs(t, must.Err(s.Snapshot()), spiffe.ErrNotReady)
				assert.NoError(t, must.Err(s.Bundle(home.TrustDomain())))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				err = s.Ready(ctx)
				cancel()
				must.Fail(t, err, context.DeadlineExceeded, `hint "c"`)
				st := s.Status()
				assert.False(t, st.Ready)
			} else {
				require.NoError(t, err)
				assert.Equal(t, want, svid.ID().Path())
			}
			u := must.Get(s.X509())(t)
			var got []string
			for _, id := range u.Identities {
				got = append(got, id.SVID.ID().Path()+" "+id.Hint)
			}
			assert.Equal(t, []string{"/1 a", "/3 ", "/4 ", "/5 b"}, got)
			require.Len(t, u.Skipped, 1)
			assert.ErrorContains(t, u.Skipped[0], "an earlier one has the hint")
			require.NoError(t, stop())
		}
		_, err := workloadapi.New(workloadapi.Config{Client: c, Hint: "a", BundlesOnly: true})
		assert.ErrorContains(t, err, "BundlesOnly")
		_, err = workloadapi.New(workloadapi.Config{Client: c, Address: "unix:///run/a.sock"})
		assert.ErrorContains(t, err, "an Address, and a Client")
	})
}

// PermissionDenied withdraws what was received; nothing else does.
func TestWithdraw(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-17", "WAPI-31", "WEP-16")
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		web := home.SVID("/web")
		streams := make(feed)
		var log syncBuffer
		s := source(t, workloadapi.Config{Logger: workloadtest.Logger(&log)}, streams.serve)
		streams.send(response(t, home, web, other))
		snap := must.Get(s.Snapshot())(t)

		for _, code := range []int{workloadtest.Unavailable, workloadtest.Internal, workloadtest.ResourceExhausted, workloadtest.OK, 1, 2, 16} {
			streams.do(func(c *call) { c.end(code, "later") })
			assert.Same(t, snap, must.Get(s.Snapshot())(t, "code %d", code))
			assert.True(t, s.Status().Ready)
			time.Sleep(time.Minute)
			streams.send(response(t, home, web, other))
			assert.NoError(t, s.Status().X509.Err)
		}

		changed := s.Changed()
		streams.do(func(c *call) { c.end(workloadtest.PermissionDenied, "no identity issued") })
		<-changed
		must.Fail(t, must.Err(s.SVID()), spiffe.ErrNotReady, workloadapi.ErrDenied, `"no identity issued"`)
		for _, d := range []domain{home, other} {
			require.ErrorIs(t, must.Err(s.Bundle(d.TrustDomain())), spiffe.ErrNotReady)
		}
		require.ErrorIs(t, must.Err(s.X509()), workloadapi.ErrDenied)
		assert.False(t, s.Status().Ready)
		assert.Contains(t, log.String(), "has withdrawn")

		// Three more denials, and then there is an identity again.
		for range 3 {
			streams.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
			time.Sleep(time.Minute)
		}
		assert.Equal(t, 4, s.Status().X509.Failures)
		streams.send(response(t, home, web))
		require.NoError(t, s.Ready(t.Context()))
		assert.ErrorIs(t, must.Err(s.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)

		// It counts as well when it comes first on the next stream.
		streams.do(func(c *call) { c.end(workloadtest.Unavailable, "restart") })
		require.NoError(t, s.Ready(t.Context()))
		streams.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
		require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
	})
}

// What was withdrawn does not come back as the last good one of a bundle that is damaged later.
func TestWithdrawForgets(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-17")
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		web := home.SVID("/web")
		streams := make(feed)
		s := source(t, workloadapi.Config{}, streams.serve)
		streams.send(response(t, home, web, other))
		damaged := response(t, home, web)
		damaged.FederatedBundles[other.Key()] = []byte("junk")
		streams.send(damaged)
		must.Get(s.Bundle(other.TrustDomain()))(t)
		streams.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
		streams.send(damaged)
		must.Get(s.SVID())(t)
		require.ErrorIs(t, must.Err(s.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)
	})
}

// A stream is given up after bad responses in a row, and not for a few in a year.
func TestPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		good := response(t, home, home.SVID("/web"))
		streams := make(feed)
		calls := 0
		s := source(t, workloadapi.Config{}, func(c *call) {
			calls++
			streams.serve(c)
		})
		for range 5 {
			for range 7 {
				streams.send(&wire.X509SVIDResponse{})
				require.ErrorIs(t, s.Status().X509.Err, workloadapi.ErrBadResponse)
			}
			streams.send(good)
			require.NoError(t, s.Status().X509.Err)
		}
		assert.Equal(t, 1, calls)
	})
}

// A source that has stopped leaves no connection of its own behind.
func TestRunHangsUp(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	good := response(t, home, home.SVID("/web"))
	path := filepath.Join(workloadtest.SocketDir(t), "s")
	l := must.Get(net.Listen("unix", path))(t)
	closed := make(chan struct{})
	srv := &http.Server{
		Handler:   fake(t, func(c *call) { c.send(good); c.wait() }),
		Protocols: new(http.Protocols),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed {
				close(closed)
			}
		},
	}
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	s := must.Get(workloadapi.New(workloadapi.Config{Address: "unix://" + path}))(t)
	stop := workloadtest.Run(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	require.NoError(t, s.Ready(ctx))
	require.NoError(t, stop())
	select {
	case <-closed:
	case <-ctx.Done():
		t.Error("the connection is still there")
	}
	_ = srv.Close()
	<-done
}

// The waits between attempts, with a server that notes when they come.
func TestReconnect(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-6", "WAPI-18", "WAPI-19", "WEP-14", "WEP-15", "WEP-17", "AMB-10", "AMB-11", "AMB-13", "DIV-14")
	home, web := inBubbles(t)
	good := response(t, home, web)
	nonsense := func(c *call) {
		for c.ctx.Err() == nil {
			c.sendRaw([]byte("nonsense"))
		}
	}
	for name, test := range map[string]struct {
		answer func(n int, c *call) // of attempt n, from 0
		// The longest waits before the attempts after the first.
		waits []time.Duration
		final bool
	}{
		"unavailable":            {func(_ int, c *call) { c.end(workloadtest.Unavailable, "") }, []time.Duration{2, 4, 5, 5, 5, 5, 5}, false},
		"denied":                 {func(_ int, c *call) { c.end(workloadtest.PermissionDenied, "") }, []time.Duration{2, 4, 5, 5, 5}, false},
		"unknown code":           {func(_ int, c *call) { c.end(77, "") }, []time.Duration{2, 4, 5, 5, 5}, false},
		"ends without an answer": {func(int, *call) {}, []time.Duration{2, 4, 5, 5, 5}, false},
		"answers nonsense":       {func(_ int, c *call) { c.sendRaw([]byte("nonsense")) }, []time.Duration{2, 4, 5, 5, 5}, false},
		"nonsense without end":   {func(_ int, c *call) { nonsense(c) }, []time.Duration{2, 4, 5, 5, 5}, false},
		"good, and nonsense":     {func(_ int, c *call) { c.send(good); nonsense(c) }, []time.Duration{2, 4, 5, 5, 5}, false},
		"lives, and ends":        {func(_ int, c *call) { c.send(good); c.sleep(2 * time.Second) }, []time.Duration{0, 0, 0, 0, 0}, false},
		"lives, and is cut":      {func(_ int, c *call) { c.send(good); c.sleep(2 * time.Second); panic(http1Abort) }, []time.Duration{0, 0, 0}, false},
		"answers and hangs up":   {func(_ int, c *call) { c.send(good) }, []time.Duration{0, 2}, false}, // and so on, by chance
		"good after three failures": {func(n int, c *call) {
			if n%4 == 3 {
				c.send(good)
				c.sleep(15 * time.Second)
			}
			c.end(workloadtest.Unavailable, "")
		}, []time.Duration{2, 4, 5, 0, 2, 4, 5, 0, 2}, false},
		"good and then denied": {func(_ int, c *call) {
			c.send(good)
			c.sleep(15 * time.Second)
			c.end(workloadtest.PermissionDenied, "")
		}, []time.Duration{2, 2, 2}, false},
		"refused":                  {func(_ int, c *call) { c.end(workloadtest.InvalidArgument, "no header") }, nil, true},
		"unimplemented":            {func(_ int, c *call) { c.end(workloadtest.Unimplemented, "switched off") }, nil, true},
		"good and then refused":    {func(_ int, c *call) { c.send(good); c.end(workloadtest.InvalidArgument, "no header") }, nil, true},
		"not a gRPC server at all": {func(_ int, c *call) { c.w.WriteHeader(403) }, []time.Duration{2, 4, 5, 5}, false},
		"no such path":             {func(_ int, c *call) { c.w.WriteHeader(404) }, []time.Duration{2, 4, 5, 5}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var attempts, ends []time.Time
				var mu sync.Mutex
				note := func(to *[]time.Time) int {
					mu.Lock()
					defer mu.Unlock()
					*to = append(*to, time.Now())
					return len(*to) - 1
				}
				cfg := workloadapi.Config{Client: inMemory(t, fake(t, func(c *call) {
					n := note(&attempts)
					defer note(&ends)
					test.answer(n, c)
				}))}
				s := must.Get(workloadapi.New(cfg))(t)
				if test.final {
					err := s.Run(t.Context())
					e, ok := err.(*workloadapi.Error)
					require.True(t, ok, "%v", err)
					assert.True(t, e.Final)
					assert.Equal(t, "FetchX509SVID", e.RPC)
					_, again := e.Retryable()
					assert.False(t, again)
					want := workloadapi.ErrRefused
					if e.Code == workloadtest.Unimplemented {
						want = errors.ErrUnsupported
					}
					require.ErrorIs(t, err, want)
					synctest.Wait() // for the handlers
					assert.Len(t, attempts, 1)
					assert.Zero(t, s.Status().X509.NextAttempt)
					if _, svid := s.SVID(); svid == nil {
						require.NoError(t, s.Ready(t.Context()), "what was received stays")
					} else {
						require.ErrorIs(t, s.Ready(t.Context()), want, "there is nothing to wait for")
					}
					return
				}
				stop := workloadtest.Run(t, s)
				time.Sleep(time.Duration(rounds.Of(75)) * time.Second)
				require.NoError(t, stop())
				synctest.Wait() // for the handlers
				mu.Lock()
				defer mu.Unlock()
				require.Greater(t, len(attempts), len(test.waits))
				for i, most := range test.waits {
					wait := attempts[i+1].Sub(ends[i])
					if most == 0 {
						assert.Zero(t, wait, "attempt %d", i+1)
						continue
					}
					assert.LessOrEqual(t, wait, most*time.Second, "attempt %d", i+1)
					assert.GreaterOrEqual(t, wait, time.Second, "attempt %d", i+1)
				}
				if name == "answers and hangs up" {
					assert.Less(t, len(attempts), 3*rounds.Of(75), "not busy")
				}
			})
		})
	}
}

// A server that asks its clients to wait is obeyed, as far as the life that is left allows.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	for ask, want := range map[string][2]time.Duration{
		"40000": {40 * time.Second, 44 * time.Second}, "3600000": {2 * time.Minute, 2 * time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := source(t, workloadapi.Config{}, func(c *call) {
				c.w.Header().Set(http.TrailerPrefix+"Grpc-Retry-Pushback-Ms", ask)
				c.end(workloadtest.Unavailable, "")
			})
			synctest.Wait()
			e, ok := errors.AsType[*workloadapi.Error](s.Status().X509.Err)
			require.True(t, ok)
			after, again := e.Retryable()
			assert.True(t, again)
			assert.Equal(t, ask, fmt.Sprint(after.Milliseconds()))
			assert.GreaterOrEqual(t, e.RetryIn, want[0])
			assert.LessOrEqual(t, e.RetryIn, want[1])
		})
	}
}

// A server that takes a request and says nothing is left after a while.
func TestSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		good := response(t, home, home.SVID("/web"))
		var calls atomic.Int32
		s := source(t, workloadapi.Config{}, func(c *call) {
			if calls.Add(1) < 3 {
				c.flush()
				c.wait()
				return
			}
			c.send(good)
			c.wait()
		})
		time.Sleep(workloadapi.SilenceLimit - time.Second)
		assert.Equal(t, int32(1), calls.Load())
		time.Sleep(2 * time.Second)
		assert.ErrorContains(t, s.Status().X509.Err, "did not answer in time")
		start := time.Now()
		require.NoError(t, s.Ready(t.Context()))
		assert.Less(t, time.Since(start), 3*time.Minute)
		time.Sleep(time.Hour)
		assert.Equal(t, int32(3), calls.Load(), "after an answer silence is fine")
	})
}

// jwks is a JWK Set as servers send it, made with nothing of the library.
func jwks(t testing.TB, edit func(i int, jwk map[string]any), keys ...*ecdsa.PublicKey) []byte {
	t.Helper()
	var all []any
	for i, k := range keys {
		point := must.Get(k.Bytes())(t)
		jwk := map[string]any{"kty": "EC", "crv": "P-256", "kid": fmt.Sprint("key-", i), "x": b64(point[1:33]), "y": b64(point[33:])}
		if edit != nil {
			edit(i, jwk)
		}
		all = append(all, jwk)
	}
	return must.Get(json.Marshal(map[string]any{"keys": all}))(t)
}

func TestJWTBundles(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-16", "WAPI-44", "WAPI-45", "WAPI-46", "WAPI-47", "WAPI-55")
	home, web := inBubbles(t)
	other := workloadtest.NewDomain(t, "other.test")
	a, b := workloadtest.NewKey(t).Public().(*ecdsa.PublicKey), workloadtest.NewKey(t).Public().(*ecdsa.PublicKey)
	synctest.Test(t, func(t *testing.T) {
		x509s, jwts := make(feed), make(feed)
		s := source(t, workloadapi.Config{JWTBundles: true}, func(c *call) {
			if c.rpc == "FetchJWTBundles" {
				jwts.serve(c)
			} else {
				x509s.serve(c)
			}
		})
		x509s.send(response(t, home, web))
		assert.False(t, s.Status().Ready)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		err := s.Ready(ctx)
		cancel()
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		assert.ErrorContains(t, err, "no bundles for JWT-SVIDs: the server of an http.Client has not answered yet")
		jwts.send(&wire.JWTBundlesResponse{Bundles: map[string][]byte{
			home.Key(): jwks(t, nil, a, b), other.Key(): jwks(t, nil, b), "spiffe://broken.test": []byte("{"),
		}})
		require.NoError(t, s.Ready(t.Context()))
		keys := func(d domain) (ids []string, roots int) {
			t.Helper()
			bundle := must.Get(s.Bundle(d.TrustDomain()))(t)
			for id := range bundle.JWTAuthorities() {
				ids = append(ids, id)
			}
			return ids, len(slices.Collect(bundle.X509Authorities()))
		}
		ids, roots := keys(home)
		assert.Equal(t, []string{"key-0", "key-1"}, ids)
		assert.Equal(t, 1, roots)
		ids, roots = keys(other)
		assert.Equal(t, []string{"key-0"}, ids)
		assert.Zero(t, roots, "keys for tokens verify no certificates")
		assert.ErrorIs(t, must.Err(s.Bundle(spiffe.MustParseTrustDomain("broken.test"))), spiffe.ErrUnknownTrustDomain)
		require.Len(t, s.Status().JWT.Skipped, 1)
		snap := must.Get(s.Snapshot())(t)

		// The two streams come and go by themselves.
		x509s.send(response(t, home, home.SVID("/web"), other))
		ids, roots = keys(other)
		assert.Equal(t, []string{"key-0"}, ids)
		assert.Equal(t, 1, roots)
		now := must.Get(s.Snapshot())(t)
		before, _ := snap.Bundle(home.TrustDomain())
		after, _ := now.Bundle(home.TrustDomain())
		assert.Same(t, before, after, "made once")

		jwts.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
		ids, roots = keys(home)
		assert.Empty(t, ids)
		assert.Equal(t, 1, roots)
		must.Get(s.SVID())(t)
		assert.False(t, s.Status().Ready)
		ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
		err = s.Ready(ctx)
		cancel()
		must.Fail(t, err, workloadapi.ErrDenied, "no bundles for JWT-SVIDs: ")
		jwts.send(&wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): jwks(t, nil, a)}})
		x509s.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
		ids, roots = keys(home)
		assert.Equal(t, []string{"key-0"}, ids)
		assert.Zero(t, roots)
		x509s.send(response(t, home, web))

		// A profile that is switched off stops alone.
		jwts.do(func(c *call) { c.end(workloadtest.Unimplemented, "") })
		assert.ErrorIs(t, s.Status().JWT.Err, errors.ErrUnsupported)
		time.Sleep(time.Hour)
		x509s.send(response(t, home, home.SVID("/web")))
		ids, _ = keys(home)
		assert.Equal(t, []string{"key-0"}, ids, "what was received stays")
		assert.Equal(t, uint64(4), s.Status().X509.Updates)
	})
}

// What alone has changed of a bundle is seen: keys for tokens that are replaced, and CRLs.
func TestPartsChange(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-11", "WAPI-12")
	home, web := inBubbles(t)
	a, b := workloadtest.NewKey(t).Public().(*ecdsa.PublicKey), workloadtest.NewKey(t).Public().(*ecdsa.PublicKey)
	synctest.Test(t, func(t *testing.T) {
		x509s, jwts := make(feed), make(feed)
		s := source(t, workloadapi.Config{JWTBundles: true}, func(c *call) {
			if c.rpc == "FetchJWTBundles" {
				jwts.serve(c)
			} else {
				x509s.serve(c)
			}
		})
		x509s.send(response(t, home, web))
		for _, key := range []*ecdsa.PublicKey{a, b} {
			changed := s.Changed()
			jwts.send(&wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): jwks(t, nil, key)}})
			<-changed
			bundle := must.Get(must.Get(s.Snapshot())(t).Bundle(home.TrustDomain()))(t)
			assert.Equal(t, map[string]crypto.PublicKey{"key-0": key}, bundle.Contents().JWTAuthorities)
			workloadtest.SameRoots(t, home, bundle)
		}
		for _, crls := range [][][]byte{{[]byte("one")}, {[]byte("two")}, nil} {
			m := response(t, home, web)
			m.Crl = crls
			changed := s.Changed()
			x509s.send(m)
			select {
			case <-changed:
			default:
				t.Errorf("no change was reported for %q", crls)
			}
			assert.Equal(t, crls, s.CRLs())
		}
	})
}

// How much a bundle may have is the same as for a bundle document.
func TestBundleLimits(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	root := home.Root().Raw
	var r workloadapi.Reader
	ders := func(value []byte) error {
		_, err := r.X509Bundles(marshal(t, &wire.X509BundlesResponse{Bundles: map[string][]byte{home.Key(): value}}))
		return err
	}
	keys := func(value []byte) error {
		_, err := r.JWTBundles(marshal(t, &wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): value}}))
		return err
	}
	require.NoError(t, ders(slices.Repeat(root, jws.MaxSetKeys)))
	r = workloadapi.Reader{}
	require.ErrorIs(t, ders(slices.Repeat(root, jws.MaxSetKeys+1)), spiffe.ErrTooLarge)
	for n, tooLarge := range map[int]bool{jws.MaxSetSize: false, jws.MaxSetSize + 1: true} {
		r = workloadapi.Reader{}
		err := ders(append(slices.Clone(root), make([]byte, n-len(root))...))
		require.Error(t, err)
		assert.Equal(t, tooLarge, errors.Is(err, spiffe.ErrTooLarge), "%d: %v", n, err)
		r = workloadapi.Reader{} // or the one from before would do
		err = keys(append([]byte(`{"keys":[]}`), bytes.Repeat([]byte(" "), n-11)...))
		assert.Equal(t, tooLarge, errors.Is(err, spiffe.ErrTooLarge), "%d: %v", n, err)
		assert.Equal(t, tooLarge, err != nil)
	}
}

// What a value of FetchJWTBundles may look like.
func TestJWTBundleValues(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-46", "AMB-21", "DIV-12")
	home := workloadtest.NewDomain(t, "example.org")
	a, b := workloadtest.NewKey(t).Public().(*ecdsa.PublicKey), workloadtest.NewKey(t).Public().(*ecdsa.PublicKey)
	use := func(values ...any) func(int, map[string]any) {
		return func(i int, jwk map[string]any) {
			if values[i] != nil {
				jwk["use"] = values[i]
			}
		}
	}
	set := jwks(t, nil, a)
	document, err := home.Bundle().Marshal() // with X.509 authorities
	require.NoError(t, err)
	for name, test := range map[string]struct {
		value   []byte
		want    []string
		skipped int
		err     string
	}{
		"without use":            {jwks(t, use(nil, nil), a, b), []string{"key-0", "key-1"}, 0, ""},
		"with use of SPIFFE":     {jwks(t, use("jwt-svid", "jwt-svid"), a, b), []string{"key-0", "key-1"}, 0, ""},
		"for signatures":         {jwks(t, use("sig", "sig"), a, b), []string{"key-0", "key-1"}, 0, ""},
		"another use":            {jwks(t, use("x509-svid", "wit-svid"), a, b), nil, 2, ""},
		"one of another use":     {jwks(t, use("enc", nil), a, b), []string{"key-1"}, 1, ""},
		"without a key ID":       {jwks(t, func(i int, k map[string]any) { delete(k, "kid") }, a), nil, 1, ""},
		"no keys":                {[]byte(`{"keys":[]}`), nil, 0, ""},
		"nothing":                {nil, nil, 0, ""},
		"an X.509 authority":     {document, nil, 1, ""},
		"not JSON":               {[]byte("{"), nil, 0, "invalid JWK Set of"},
		"more than a megabyte":   {bytes.Repeat([]byte(" "), jws.MaxSetSize+1), nil, 0, "input too large"},
		"more than 1,000 keys":   {[]byte(`{"keys":[` + strings.Repeat("0,", 1000) + `0]}`), nil, 0, "BND-33"},
		"two keys with one name": {jwks(t, func(_ int, k map[string]any) { k["kid"] = "same" }, a, b), nil, 0, "BND-30"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var r workloadapi.Reader
			u, err := r.JWTBundles(marshal(t, &wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): test.value, "spiffe://ok.test": set}}))
			require.NoError(t, err)
			ok := must.Get(u.Bundles.Bundle(spiffe.MustParseTrustDomain("ok.test")))(t)
			assert.Len(t, ok.Contents().JWTAuthorities, 1)
			bundle, err := u.Bundles.Bundle(home.TrustDomain())
			if test.err != "" {
				require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
				require.Len(t, u.Skipped, 1)
				assert.Contains(t, withRules(u.Skipped[0]), test.err)
				return
			}
			require.NoError(t, err)
			var got []string
			for id := range bundle.JWTAuthorities() {
				got = append(got, id)
			}
			assert.Equal(t, test.want, got)
			assert.Len(t, u.Skipped, test.skipped, "%v", u.Skipped)
			assert.Empty(t, slices.Collect(bundle.X509Authorities()))
			if slices.Contains(got, "key-0") && name != "two keys with one name" {
				key, _ := bundle.JWTAuthority("key-0")
				assert.True(t, a.Equal(key))
			}
		})
	}
}

// Without an identity of its own a program takes the bundles.
func TestBundlesOnly(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-34", "WAPI-35", "WAPI-14")
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		streams := make(feed)
		s := source(t, workloadapi.Config{BundlesOnly: true}, func(c *call) {
			assert.Equal(t, "FetchX509Bundles", c.rpc)
			streams.serve(c)
		})
		streams.send(&wire.X509BundlesResponse{Crl: [][]byte{{1}, {2}}, Bundles: map[string][]byte{home.Key(): home.Roots(), other.Key(): other.Roots()}})
		require.NoError(t, s.Ready(t.Context()))
		st := s.Status()
		assert.True(t, st.Ready)
		assert.Zero(t, st.NotAfter)
		for _, d := range []domain{home, other} {
			workloadtest.SameRoots(t, d, must.Get(s.Bundle(d.TrustDomain()))(t))
		}
		assert.Equal(t, [][]byte{{1}, {2}}, s.CRLs())
		must.Fail(t, must.Err(s.SVID()), spiffe.ErrNotReady, "bundles only")
		streams.send(&wire.X509BundlesResponse{})
		assert.ErrorContains(t, s.Status().X509.Err, "it has no bundles")
		streams.send(&wire.X509BundlesResponse{Bundles: map[string][]byte{home.Key(): []byte("junk")}})
		assert.NoError(t, s.Status().X509.Err)
		workloadtest.SameRoots(t, home, must.Get(s.Bundle(home.TrustDomain()))(t))
		require.ErrorIs(t, must.Err(s.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)
		streams.send(&wire.X509BundlesResponse{Bundles: map[string][]byte{other.Key(): []byte("junk"), "x": nil}})
		require.ErrorIs(t, s.Status().X509.Err, workloadapi.ErrBadResponse)
		assert.ErrorContains(t, s.Status().X509.Err, "no bundle in it can be used")
		streams.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
		require.ErrorIs(t, must.Err(s.Bundle(home.TrustDomain())), workloadapi.ErrDenied)
	})
}

// Nothing prints keys or tokens.
func TestNoSecretsInPrint(t *testing.T) {
	t.Parallel()
	home, web := inBubbles(t)
	_, key := must.Get2(web.MarshalDER())(t)
	synctest.Test(t, func(t *testing.T) {
		var log syncBuffer
		s := source(t, workloadapi.Config{Logger: workloadtest.Logger(&log)}, func(c *call) {
			if c.rpc == "FetchJWTSVID" {
				c.send(&wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{{SpiffeId: "spiffe://example.org/web", Svid: "to.ke.n"}}})
				return
			}
			if c.rpc == "FetchWITSVID" {
				c.send(&wire.WITSVIDResponse{Svids: []*wire.WITSVID{{SpiffeId: "spiffe://example.org/web", WitSvid: "to.ke.n", WitSvidKey: `{"d":"to.ke.n"}`}}})
				return
			}
			c.send(response(t, home, web))
			c.wait()
		})
		require.NoError(t, s.Ready(t.Context()))
		token := &must.Get(workloadapi.ClientOf(s).FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a"))(t)[0]
		assert.Equal(t, "to.ke.n", token.Token())
		var wit workloadapi.TokenSVID
		for all, err := range workloadapi.ClientOf(s).WatchWITSVIDs(t.Context(), spiffe.ID{}) {
			require.NoError(t, err)
			wit = all[0]
			break
		}
		clear(wit.KeyJWK()) // by a program that is done with it
		assert.Equal(t, `{"d":"to.ke.n"}`, string(wit.KeyJWK()))
		assert.Equal(t, "to.ke.n", wit.Token())
		u := must.Get(s.X509())(t)
		for _, v := range []any{s, workloadapi.ClientOf(s), token, *token, wit, &wit, u, *u, u.Identities[0], s.Status()} {
			for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
				text := fmt.Sprintf(verb, v)
				assert.NotContains(t, text, "to.ke.n", "%s of %T", verb, v)
				assert.NotContains(t, text, fmt.Sprint(key[40:60]), "%s of %T", verb, v)
			}
			b, _ := json.Marshal(v)
			assert.NotContains(t, string(b), "to.ke.n", "%T", v)
			slog.New(slog.NewTextHandler(&log, nil)).Info("value", "v", v)
			slog.New(slog.NewJSONHandler(&log, nil)).Info("value", "v", v)
		}
		assert.NotContains(t, log.String(), "to.ke.n")
		assert.Equal(t, "workloadapi.Source(the server of an http.Client)", s.String())
		assert.Equal(t, "spiffe://example.org/web", token.String())
	})
	var none workloadapi.TokenSVID
	assert.Empty(t, none.Token())
	assert.Nil(t, none.KeyJWK())
}

// Readers load a pointer. It runs alone, as it counts.
func TestReadersDoNotAllocate(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates")
	}
	home := workloadtest.NewDomain(t, "example.org")
	c := dial(t, onSocket(t, fake(t, func(c *call) { c.send(response(t, home, home.SVID("/web"))); c.wait() })))
	s := must.Get(workloadapi.New(workloadapi.Config{Client: c}))(t)
	workloadtest.Run(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	require.NoError(t, s.Ready(ctx))
	td := home.TrustDomain()
	for name, read := range map[string]func(){
		"SVID":     func() { _, _ = s.SVID() },
		"Bundle":   func() { _, _ = s.Bundle(td) },
		"Snapshot": func() { _, _ = s.Snapshot() },
		"X509":     func() { _, _ = s.X509() },
		"Changed":  func() { _ = s.Changed() },
	} {
		assert.Zero(t, testing.AllocsPerRun(1000, read), name)
	}
}

// withRules is the text of err with the ids of the rules that it wraps behind it, as texts leave them out.
func withRules(err error) string {
	var text strings.Builder
	text.WriteString(err.Error())
	for e, ok := errors.AsType[*spiffe.ParseError](err); ok; e, ok = errors.AsType[*spiffe.ParseError](e.Err) {
		text.WriteString(" " + e.Rule)
	}
	return text.String()
}
