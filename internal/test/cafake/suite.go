package cafake

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Run checks that a client keeps what [caclient.CA] promises: the kinds of its errors, the end of its context, what
// it does with hostile answers, alone, within [caclient.New] and below package secretcache, that no token is told,
// and that new roots arrive. fake is one of the functions of this package, or nil for a CA in this process; client
// makes the client under test from [Fake.Endpoint], or from [Fake.Signer].
//
//	caclienttest.Run(t, caclienttest.NewIstio, func(f *caclienttest.Fake) (caclient.CA, error) {
//		return istioca.New(istioca.Options{Endpoint: f.Endpoint()})
//	})
func Run(t *testing.T, fake func(t testing.TB, ca *spiffetest.CA, path string) *Fake, client func(*Fake) (caclient.CA,
	error)) {
	s := &suite{fake: fake, client: client}
	for _, part := range []struct {
		name   string
		remote bool // only for a CA that is called over the network
		test   func(*testing.T, *subject)
	}{
		{"Sign", false, s.signs},
		{"BadRequests", false, s.badRequests},
		{"Failures", false, s.failures},
		{"Context", false, s.context},
		{"Bundles", false, s.bundles},
		{"Watch", false, s.watch},
		{"Rotation", false, s.rotation},
		{"Hostile", false, s.hostile},
		{"Kinds", true, s.kinds},
		{"Dial", true, s.dial},
		{"Redirects", true, s.redirects},
		{"Endless", true, s.endless},
		{"Tokens", true, s.tokens},
	} {
		if part.remote && fake == nil {
			continue
		}
		t.Run(part.name, func(t *testing.T) {
			t.Parallel()
			part.test(t, s.subject(t, t, nil))
		})
	}
	t.Run("CredentialStays", func(t *testing.T) {
		t.Parallel()
		s.credentialStays(t)
	})
}

type suite struct {
	fake   func(t testing.TB, ca *spiffetest.CA, path string) *Fake
	client func(*Fake) (caclient.CA, error)
}

const workload = "/ns/default/sa/web"

// subject is a client with its CA.
type subject struct {
	t  testing.TB
	ca *spiffetest.CA
	f  *Fake
	c  caclient.CA
}

// subject makes a client; override changes its Endpoint, and t2 is what its Fake is made with.
func (s *suite) subject(t, t2 testing.TB, override func(*caclient.Endpoint)) *subject {
	t.Helper()
	ca := spiffetest.NewCA(t, "example.org")
	sub := &subject{t: t, ca: ca}
	if s.fake == nil {
		sub.f = New(t, ca, workload)
	} else {
		sub.f = s.fake(t2, ca, workload)
	}
	sub.again(s, override)
	return sub
}

// again makes another client of the same CA.
func (sub *subject) again(s *suite, override func(*caclient.Endpoint)) {
	sub.t.Helper()
	sub.f.mu.Lock()
	sub.f.override = override
	sub.f.mu.Unlock()
	c, err := s.client(sub.f)
	if err != nil {
		sub.t.Fatalf("the client cannot be made: %v", err)
	}
	sub.c = c
}

// checked returns the client within caclient.New.
func (sub *subject) checked() caclient.CA {
	sub.t.Helper()
	c, err := caclient.New(sub.c, &caclient.Options{Expect: sub.f.want})
	if err != nil {
		sub.t.Fatal(err)
	}
	return c
}

func (sub *subject) csr() *pki.CSR {
	sub.t.Helper()
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		sub.t.Fatal(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: sub.f.want.Names()})
	if err != nil {
		sub.t.Fatal(err)
	}
	return csr
}

// sign asks c for a certificate.
func (sub *subject) sign(ctx context.Context, c caclient.CA) ([]*x509.Certificate, error) {
	sub.t.Helper()
	return c.Sign(ctx, sub.csr(), time.Hour)
}

// works demands that a certificate can be had.
func (sub *subject) works(when string) {
	sub.t.Helper()
	if _, err := sub.sign(sub.t.Context(), sub.checked()); err != nil {
		sub.t.Errorf("%s: no certificate: %v", when, err)
	}
}

// fails demands an error of a kind, which is a *caclient.Error, and returns it.
func (sub *subject) fails(when string, err, kind error) *caclient.Error {
	sub.t.Helper()
	e, ok := errors.AsType[*caclient.Error](err)
	if !ok {
		sub.t.Errorf("%s: the error is %v, want a *caclient.Error", when, err)
		return new(caclient.Error)
	}
	if !errors.Is(e, kind) {
		sub.t.Errorf("%s: the error is %v, want the kind %v", when, err, kind)
	}
	if e.Op == "" {
		sub.t.Errorf("%s: the error %v does not say what was tried", when, err)
	}
	sub.secretless(when, err.Error())
	return e
}

// secretless demands that a text has no token that a client was given.
func (sub *subject) secretless(when, text string) {
	sub.t.Helper()
	sub.f.mu.Lock()
	defer sub.f.mu.Unlock()
	for _, token := range sub.f.tokens {
		if strings.Contains(text, token) || len(token) >= 32 && strings.Contains(text, token[:len(token)/2]) {
			sub.t.Errorf("%s: a token, or half of one, is in %q", when, text)
		}
	}
}

func (s *suite) signs(t *testing.T, sub *subject) {
	for _, lifetime := range []time.Duration{0, 30 * time.Minute} {
		csr := sub.csr()
		chain, err := sub.c.Sign(t.Context(), csr, lifetime)
		if err != nil {
			t.Fatal(err)
		}
		if err := Check(chain, csr, sub.f.want, sub.ca.Bundle()); err != nil {
			t.Error(err)
		}
		if left := time.Until(chain[0].NotAfter); lifetime > 0 && !sub.f.api.OwnLife && left > lifetime+time.Minute {
			t.Errorf("asked for %v, got %v", lifetime, left)
		}
	}
	if key, err := pki.NewKey("ml-dsa-65"); err == nil { // with Go 1.27
		csr, err := pki.NewCSR(key, pki.CSROptions{SANs: sub.f.want.Names()})
		if err != nil {
			t.Fatal(err)
		}
		chain, err := sub.c.Sign(t.Context(), csr, time.Hour)
		if err != nil { // as Linkerd does
			sub.fails("a key of ML-DSA", err, caclient.ErrInvalid)
		} else if err := Check(chain, csr, sub.f.want, sub.ca.Bundle()); err != nil {
			t.Errorf("a key of ML-DSA: %v", err)
		}
	}
	issuer := sub.ca.Intermediate()
	sub.ca.EditAnswers(func(c []*x509.Certificate) []*x509.Certificate { return newForger(t, sub.ca).again(c[0]) })
	chain, err := sub.sign(t.Context(), sub.c)
	if err != nil || len(chain) != 2 {
		t.Errorf("below %v: %d certificates, %v; want a leaf and an intermediate", issuer, len(chain), err)
	}
	for _, m := range harmless(sub.ca) {
		sub.f.apply(m)
		chain, err := sub.sign(t.Context(), sub.checked())
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if len(chain) != 1 {
			t.Errorf("%s: %d certificates are handed on, want the leaf", m.name, len(chain))
		}
	}
	sub.f.apply(mutation{})

	// Any number at a time.
	c := sub.checked()
	var wg sync.WaitGroup
	for range 8 {
		csr := sub.csr()
		wg.Go(func() {
			if _, err := c.Sign(t.Context(), csr, 0); err != nil {
				t.Errorf("one of many: %v", err)
			}
			if _, err := c.FetchBundles(t.Context()); err != nil {
				t.Errorf("one of many: %v", err)
			}
		})
	}
	sub.ca.Rotate()
	wg.Wait()
}

func (s *suite) badRequests(t *testing.T, sub *subject) {
	before := sub.requests()
	chain, err := sub.c.Sign(t.Context(), nil, 0)
	sub.fails("no request", err, caclient.ErrInvalid)
	if chain != nil {
		t.Error("no request, but a chain")
	}
	_, err = sub.c.Sign(t.Context(), sub.csr(), -time.Second)
	sub.fails("a negative lifetime", err, caclient.ErrInvalid)
	if n := sub.requests(); n != before {
		t.Errorf("the CA was asked %d times for what no CA can sign", n-before)
	}
	sub.works("after bad requests")
}

func (sub *subject) requests() int {
	if sub.f.dial == nil {
		return 0
	}
	return sub.f.Requests()
}

// failures are those of the CA behind the API.
func (s *suite) failures(t *testing.T, sub *subject) {
	sub.works("at first")
	sub.ca.FailNext(1, errors.New("the disk is full"))
	_, err := sub.sign(t.Context(), sub.c)
	sub.fails("a failure", err, caclient.ErrUnavailable)
	if !mayPass(err) {
		t.Errorf("a failure may pass, and the error %v does not say so", err)
	}
	sub.works("after a failure")
	sub.ca.FailNext(1, &caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, RetryAfter: 7 * time.Second,
		Err: errors.New("too busy")})
	_, err = sub.sign(t.Context(), sub.c)
	e := sub.fails("busy", err, caclient.ErrUnavailable)
	if e.RetryAfter != 0 && (e.RetryAfter < 7*time.Second || e.RetryAfter > 8*time.Second) {
		t.Errorf("the CA asks to wait for 7s, and the error says %v", e.RetryAfter)
	}
	sub.works("after it was busy")
}

// mayPass reports whether err says that asking again may help.
func mayPass(err error) bool {
	e, ok := errors.AsType[*caclient.Error](err)
	if ok {
		_, ok = e.Retryable()
	}
	return ok
}

// ends demands that an error says that the context is done, and why.
func (sub *subject) ends(when string, err, cause error) {
	sub.t.Helper()
	if !errors.Is(err, cause) {
		sub.t.Errorf("%s: the error is %v, want one that wraps %v", when, err, cause)
	}
}

func (s *suite) context(t *testing.T, sub *subject) {
	sub.works("at first")
	cause := errors.New("the test has seen enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := sub.sign(ctx, sub.c)
	sub.ends("a context that is done", err, cause)
	set, err := sub.c.FetchBundles(ctx)
	sub.ends("a context that is done", err, cause)
	if set != nil {
		t.Error("bundles beside an error")
	}

	sub.ca.Delay(time.Hour)
	defer sub.ca.Delay(0)
	ctx, cancel = context.WithCancelCause(t.Context())
	time.AfterFunc(50*time.Millisecond, func() { cancel(cause) })
	_, err = sub.sign(ctx, sub.c)
	sub.ends("a call that is cancelled", err, cause)
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	begin := time.Now()
	_, err = sub.sign(short, sub.c)
	sub.ends("a deadline", err, context.DeadlineExceeded)
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("a deadline of 50ms: the call took %v", d)
	}
	sub.ca.Delay(0)
	sub.works("after a deadline")
}

// has reports whether the bundles have a root.
func (sub *subject) has(when string, set *spiffe.BundleSet, err error, root *x509.Certificate) bool {
	sub.t.Helper()
	if err != nil || set == nil {
		sub.t.Errorf("%s: no bundles: %v", when, err)
		return false
	}
	b, err := set.Bundle(sub.ca.TrustDomain())
	if err != nil {
		sub.t.Errorf("%s: %v", when, err)
		return false
	}
	return slices.ContainsFunc(slices.Collect(b.X509Authorities()), root.Equal)
}

func (s *suite) bundles(t *testing.T, sub *subject) {
	busy := &caclient.Error{Kind: caclient.ErrUnavailable, Err: errors.New("as the test says")}
	sub.f.Refuse(busy)
	switch set, err := sub.c.FetchBundles(t.Context()); {
	case err != nil:
		sub.fails("a CA that is away at first", err, caclient.ErrUnavailable)
	case set == nil:
		t.Error("a CA that is away at first: neither bundles nor an error")
	}
	sub.f.Refuse(nil)
	set, err := sub.c.FetchBundles(t.Context())
	if !sub.has("at first", set, err, sub.ca.Root()) {
		t.Error("the bundle of the trust domain lacks the root")
	}
	old := sub.ca.Root()
	sub.ca.Rotate()
	if _, err := sub.sign(t.Context(), sub.c); err != nil { // some APIs have roots only with certificates
		t.Fatal(err)
	}
	set, err = sub.c.FetchBundles(t.Context())
	if !sub.has("after a rotation", set, err, sub.ca.Root()) || !sub.has("after a rotation", set, err, old) {
		t.Error("the bundle lacks the new root or the old one")
	}
	sub.f.Refuse(busy)
	set, err = sub.c.FetchBundles(t.Context())
	if !sub.has("what is known, while the CA is away", set, err, sub.ca.Root()) {
		t.Error("the bundle lacks a root while the CA is away")
	}
}

func (s *suite) watch(t *testing.T, sub *subject) {
	w, ok := sub.c.(interface {
		WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error]
	})
	if !ok {
		t.Skip("the client has no WatchBundles; package secretcache polls")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	seen := 0
	for set, err := range w.WatchBundles(ctx) {
		seen++
		if !sub.has("watch", set, err, sub.ca.Root()) {
			continue
		}
		if seen > 1 {
			break
		}
		seen = 1
		sub.ca.Rotate()
		if _, err := sub.sign(ctx, sub.c); err != nil {
			t.Error(err)
		}
		if _, err := sub.c.FetchBundles(ctx); err != nil {
			t.Error(err)
		}
	}
	if seen < 2 || ctx.Err() != nil {
		t.Errorf("a watch does not tell of a new root: it told %d times in 20s", seen)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for range w.WatchBundles(ended) {
		t.Error("a watch goes on after the end of its context")
		break
	}
}

// rotation has the root change as often as it can, under a client that knows only what it was told.
func (s *suite) rotation(t *testing.T, sub *subject) {
	c := sub.checked()
	for i := range 5 {
		if i%2 == 0 {
			sub.ca.Rotate()
		} else {
			sub.ca.Prepare()
			sub.ca.Rotate()
		}
		if _, err := sub.sign(t.Context(), c); err != nil {
			t.Errorf("rotation %d: %v", i+1, err)
		}
	}
}

func (s *suite) hostile(t *testing.T, sub *subject) {
	c, csr := sub.checked(), sub.csr()
	begin := time.Now()
	all := mutations(t, sub.f)
	for _, m := range all {
		sub.f.apply(m)
		chain, err := c.Sign(t.Context(), csr, time.Hour)
		if chain != nil || err == nil {
			t.Errorf("%s: the answer is taken", m.name)
			continue
		}
		sub.fails(m.name, err, caclient.ErrBadAnswer)
		if !sub.f.want.ID().IsZero() && !strings.Contains(err.Error(), m.says) {
			t.Errorf("%s: the error is %v, want one with %q", m.name, err, m.says)
		}
		if mayPass(err) {
			t.Errorf("%s: the error %v says that asking again may help", m.name, err)
		}
		if len(err.Error()) > 4096 {
			t.Errorf("%s: an error of %d bytes", m.name, len(err.Error()))
		}
	}
	if d := time.Since(begin); d > 20*time.Second {
		t.Errorf("%d hostile answers took %v", len(all), d)
	}
	sub.f.apply(mutation{})
	sub.works("after hostile answers")
}

// credentialStays is hostile for package secretcache, which has a credential: it stays until there is a good one.
func (s *suite) credentialStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sub := s.subject(t, InMemory(t), nil)
		if sub.f.want.ID().IsZero() {
			t.Skip("package secretcache keeps X.509-SVIDs, and this API has none")
		}
		m, err := secretcache.New(secretcache.Config{ID: sub.f.id, CA: sub.c, Lifetime: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = m.Run(ctx)
		}()
		time.Sleep(time.Second)
		first, err := m.SVID()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Until(first.NotAfter()) / 4) // it is renewed later
		failures := 0
		for i, mut := range mutations(t, sub.f) {
			if i%step != 0 {
				continue
			}
			sub.f.apply(mut)
			st := status(t, m, sub.f.id)
			for st.Failures == failures && time.Until(first.NotAfter()) > 0 {
				time.Sleep(time.Second)
				st = status(t, m, sub.f.id)
			}
			failures = st.Failures
			if now, err := m.SVID(); err != nil || now != first {
				t.Fatalf("%s: the credential is %v, %v; want the one that was there", mut.name, now, err)
			}
			if st.Err == nil {
				t.Fatalf("%s: no error after %d failures", mut.name, failures)
			}
			sub.secretless(mut.name, st.Err.Error())
		}
		sub.f.apply(mutation{})
		left := time.Until(first.NotAfter())
		time.Sleep(left / 20)
		if now, err := m.SVID(); err != nil || now == first {
			t.Errorf("a twentieth of the remaining %v after the last hostile answer: %v, %v; want a new credential",
				left, now, err)
		}
		cancel()
		<-done
	})
}

func status(t *testing.T, m *secretcache.Manager, id spiffe.ID) report.Identity {
	t.Helper()
	for _, i := range m.Report().Identities {
		if i.Name == id.String() {
			return i
		}
	}
	t.Fatalf("no status of %v", id)
	return report.Identity{}
}

func (s *suite) kinds(t *testing.T, sub *subject) {
	sub.works("at first")
	for _, kind := range []error{caclient.ErrUnavailable, caclient.ErrInvalid, caclient.ErrUnauthenticated,
		caclient.ErrDenied} {
		sub.f.Refuse(&caclient.Error{Kind: kind, Err: errors.New("as the test says"), RetryAfter: retryAfter(kind)})
		_, err := sub.sign(t.Context(), sub.c)
		e := sub.fails(kind.Error(), err, kind)
		if !strings.Contains(err.Error(), "as the test says") {
			t.Errorf("%v: the error %v lacks what the CA says", kind, err)
		}
		after, ok := e.Retryable()
		if ok != (kind == caclient.ErrUnavailable || e.MayPass) {
			t.Errorf("%v: Retryable(%v) is %v", kind, err, ok)
		}
		if kind == caclient.ErrUnavailable && after != 0 && (after < 7*time.Second || after > 8*time.Second) {
			t.Errorf("the CA asks to wait for 7s, and Retryable says %v", after)
		}
	}
	sub.f.Refuse(nil)
	sub.works("after refusals")
}

func retryAfter(kind error) time.Duration {
	if kind == caclient.ErrUnavailable {
		return 7 * time.Second
	}
	return 0
}

func (s *suite) dial(t *testing.T, sub *subject) {
	sub.works("at first")
	sub.f.Deny()
	sub.fails("Deny", sub.lasting(), caclient.ErrDenied)
	sub.f.Garble()
	sub.fails("Garble", sub.lasting(), caclient.ErrBadAnswer)
	sub.f.Drop()
	_, err := sub.sign(t.Context(), sub.c)
	sub.fails("Drop", err, caclient.ErrUnavailable)
	if !mayPass(err) {
		t.Errorf("a connection that is cut: the error %v does not say that it may pass", err)
	}
	sub.f.Hang()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = sub.sign(ctx, sub.c)
	sub.ends("Hang", err, context.DeadlineExceeded)
	sub.f.Mend()
	sub.works("after Mend")
}

// lasting returns the error that is left when those have passed that may: a turn of the dial cuts connections, too.
func (sub *subject) lasting() error {
	sub.t.Helper()
	c := sub.checked()
	_, err := sub.sign(sub.t.Context(), c)
	for range 5 {
		if !mayPass(err) {
			break
		}
		time.Sleep(50 * time.Millisecond)
		_, err = sub.sign(sub.t.Context(), c)
	}
	return err
}

// answerInstead has f answer every request so, until f is asked for nothing.
func (f *Fake) answerInstead(h http.HandlerFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.instead = h
}

func (s *suite) redirects(t *testing.T, sub *subject) {
	var reached atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	defer elsewhere.Close()
	for _, code := range []int{301, 302, 303, 307, 308} {
		sub.f.answerInstead(func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL+r.URL.Path, code)
		})
		if _, err := sub.sign(t.Context(), sub.c); err == nil {
			t.Errorf("%d: no error", code)
		} else {
			sub.secretless("a redirect", err.Error())
		}
	}
	if n := reached.Load(); n > 0 {
		t.Errorf("%d redirects were followed, with the token", n)
	}
	sub.f.answerInstead(nil)
	sub.works("after redirects")
}

func (s *suite) endless(t *testing.T, sub *subject) {
	sub.works("at first")
	for name, begin := range map[string]string{
		"letters":            "",
		"a message of 1 GiB": "\x00\x40\x00\x00\x00",
		"an endless text":    `{"crt":"`,
		"an endless list":    `{"crts":[`,
	} {
		if begin != "" && sub.f.api.GRPC != (begin[0] == 0) {
			continue // it is of the other kind of API
		}
		var sent atomic.Int64
		sub.f.answerInstead(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			contentType := "application/json"
			if sub.f.api.GRPC {
				contentType = "application/grpc"
			}
			w.Header().Set("Content-Type", contentType)
			n, err := io.WriteString(w, begin)
			for block := bytes.Repeat([]byte("aaaaaaa,"), 4096); err == nil &&
				sent.Load() < 64<<20; n, err = w.Write(block) {
				sent.Add(int64(n))
			}
		})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		_, err := sub.sign(ctx, sub.c)
		sub.fails(name, err, caclient.ErrBadAnswer)
		if ctx.Err() != nil {
			t.Errorf("%s: the client reads on", name)
		}
		cancel()
		if n := sent.Load(); n > 32<<20 {
			t.Errorf("%s: the client has taken %d bytes", name, n)
		}
	}
	sub.f.answerInstead(nil)
	sub.works("after endless answers")
}

func (s *suite) tokens(t *testing.T, sub *subject) {
	var mu sync.Mutex
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))
	sub.again(s, func(e *caclient.Endpoint) { e.Logger = logger })
	sub.works("with a logger")
	// A CA that repeats what it was sent.
	sub.f.answerInstead(func(w http.ResponseWriter, r *http.Request) {
		sub.f.mu.Lock()
		echo := strings.Join(sub.f.tokens, " and ")
		sub.f.mu.Unlock()
		sub.f.refuse(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: errors.New(echo)})
	})
	sub.f.mu.Lock()
	sub.f.tokens = nil
	sub.f.mu.Unlock()
	_, err := sub.sign(t.Context(), sub.c)
	sub.fails("a CA that repeats the token", err, caclient.ErrInvalid)
	sub.f.answerInstead(func(w http.ResponseWriter, r *http.Request) {
		sub.f.mu.Lock()
		last := sub.f.tokens[len(sub.f.tokens)-1]
		sub.f.mu.Unlock()
		sub.f.refuse(w, r, &caclient.Error{Kind: caclient.ErrInvalid, Err: errors.New(last[:(len(last)+1)/2])})
	})
	_, err = sub.sign(t.Context(), sub.c)
	sub.fails("a CA that repeats half of the token", err, caclient.ErrInvalid)
	sub.f.answerInstead(nil)
	quoting := false
	sub.again(s, func(e *caclient.Endpoint) {
		if quoting = e.HTTPClient != nil; quoting { // else the client connects by itself
			e.HTTPClient = &http.Client{Transport: quoter{sub.f}}
		}
	})
	if quoting {
		_, err = sub.sign(t.Context(), sub.c)
		sub.fails("a CA that repeats the token in what is not HTTP", err, caclient.ErrUnavailable)
	}
	sub.again(s, func(e *caclient.Endpoint) { e.Logger = logger })
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		sub.secretless("the client with "+format, fmt.Sprintf(format, sub.c))
		sub.secretless("the Fake with "+format, fmt.Sprintf(format, sub.f.String()))
	}
	logger.Info("log", "client", sub.c, "err", err)
	mu.Lock()
	sub.secretless("the log", log.String())
	mu.Unlock()

	reason := errors.New("the token has gone")
	sub.again(s, func(e *caclient.Endpoint) { e.Token = func(context.Context) (string, error) { return "", reason } })
	_, err = sub.sign(t.Context(), sub.c)
	sub.fails("no token", err, reason)
	for _, bad := range []string{"two\nlines", "two words", "\x00", "ümlaut", strings.Repeat("x", 70<<10)} {
		sub.again(s, func(e *caclient.Endpoint) {
			e.Token = func(context.Context) (string, error) {
				return bad, nil
			}
		})
		_, err = sub.sign(t.Context(), sub.c)
		e := sub.fails("a token that is none", err, caclient.ErrInvalid)
		if strings.Contains(e.Error(), bad) {
			t.Errorf("the token is in %q", e)
		}
	}
	sub.again(s, func(e *caclient.Endpoint) {
		e.Token = func(context.Context) (string, error) { return "another-token", nil }
	})
	if _, err = sub.sign(t.Context(), sub.c); err == nil || strings.Contains(err.Error(), "another-token") {
		t.Errorf("another token: the error is %v", err)
	}
}

// quoter fails each request as net/http does if the answer is not HTTP: with the answer, which repeats the tokens.
type quoter struct{ f *Fake }

func (q quoter) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		r.Body.Close()
	}
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return nil, fmt.Errorf("malformed HTTP response %q", strings.Join(q.f.tokens, " "))
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }
