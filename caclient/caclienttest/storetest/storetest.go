// Package storetest is a suite that every store for package ca has to pass: what ca.Store promises, with many writers,
// lost answers and connections, failovers and restored copies, and what authorities on the store make of that.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) storetest.Place {
//			dir := filepath.Join(t.TempDir(), "ca")
//			return storetest.Place{Open: func() (ca.Store, error) { return ca.NewDirStore(dir) }}
//		})
//	}
//
// The items that it stores have names that begin with svidkit-, as an authority has them.
package storetest

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// Place is where stores keep one record, such as a directory, a Secret or a row of a table, and the power of the test
// over it. Only Open is required: a case that needs a function that is nil is skipped. One goroutine at a time calls
// the functions; calls of stores may be under way meanwhile. They fail the test by panicking or with the T of [Run].
type Place struct {
	// Open returns a store of the place, as another process has it. There is no record at first.
	Open func() (ca.Store, error)

	// Cut has the answer to the next Save be lost, or come as an error, although the record was replaced. In between,
	// meanwhile is called, by any goroutine; it may take longer than the Save.
	Cut func(meanwhile func())

	// Break ends all connections to the place and admits no others, until mend is called.
	Break func() (mend func())

	// Hang leaves all requests to the place without an answer, until mend is called.
	Hang func() (mend func())

	// FailOver kills the server of the place, and returns when the same or another serves it.
	FailOver func()

	// Behind returns a store that asks a copy of the place, which follows it and may be behind.
	Behind func() (ca.Store, error)

	// Dump makes a copy of the place, as an operator does for a backup; restore puts it back.
	Dump func() (restore func())

	// Remove takes away the table or directory that would hold the record, with the record, until back is called.
	Remove func() (back func())

	// Damage changes the stored items, but not the version.
	Damage func()
}

// Run checks that stores of a place keep the promises of [ca.Store], and that authorities on them stay one CA. The
// function place makes a new place for each case, until the case ends; it may call t.Parallel. With -short, only cases
// that take no time of their own are run.
func Run(t *testing.T, place func(t *testing.T) Place) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.slow && testing.Short() {
				t.Skip("takes a while, and this is a short run")
			}
			c.run(&bench{t, place(t)})
		})
	}
}

var cases = []struct {
	name string
	slow bool
	run  func(*bench)
}{
	{"no record", false, noRecord},
	{"contents", false, contents},
	{"versions", false, versions},
	{"ended context", false, endedContext},
	{"printing", false, printing},
	{"damage", false, damage},
	{"missing place", false, missingPlace},
	{"first of many", false, firstOfMany},
	{"many writers", true, manyWriters},
	{"readers", true, readers},
	{"watch", true, watch},
	{"lost answer", true, lostAnswer},
	{"lost connections", true, lostConnections},
	{"no answer", true, noAnswer},
	{"copy that is behind", true, behind},
	{"failover", true, failover},
	{"failover before the answer", true, failoverBeforeAnswer},
	{"replicas", true, replicas},
	{"replicas and a lost answer", true, replicasLostAnswer},
	{"replicas and a failover", true, replicasFailover},
	{"restored dump", true, restoredDump},
}

// bench is a case under way.
type bench struct {
	*testing.T
	Place
}

// need skips the case if the place does not have a function.
func (b *bench) need(name string, has bool) {
	b.Helper()
	if !has {
		b.Skipf("the place has no %s", name)
	}
}

// open returns a store of another process.
func (b *bench) open() ca.Store { b.Helper(); return b.must(b.Open()) }

func (b *bench) must(s ca.Store, err error) ca.Store {
	b.Helper()
	if err != nil {
		b.Fatalf("a store cannot be opened: %v", err)
	}
	return s
}

// record returns a record with a text that every item has.
func record(version, text string) ca.Record {
	return ca.NewRecord(version, map[string][]byte{"svidkit-text": []byte(text), "svidkit-" + text: []byte(text)})
}

// textOf returns the text of a record, which must be whole.
func (b *bench) textOf(r ca.Record) string {
	b.Helper()
	text := string(r.Data()["svidkit-text"])
	if len(r.Data()) != 2 || string(r.Data()["svidkit-"+text]) != text {
		b.Errorf("the record is not one that was saved: %v", slices.Sorted(maps.Keys(r.Data())))
	}
	return text
}

func (b *bench) save(s ca.Store, version, text string) string {
	b.Helper()
	next, err := s.Save(b.Context(), record(version, text))
	if err != nil || next == "" {
		b.Fatalf("Save returns %q, %v", next, err)
	}
	return next
}

// has checks what the place holds.
func (b *bench) has(s ca.Store, version, text string) {
	b.Helper()
	r, err := s.Load(b.Context())
	if err != nil {
		b.Fatalf("Load returns %v", err)
	}
	if have := b.textOf(r); have != text || version != "" && r.Version != version {
		b.Errorf("the place holds %q as version %q, want %q as %q", have, r.Version, text, version)
	}
}

// fails checks an error: it is one of want, or none of those that tell an authority more.
func (b *bench) fails(what string, err error, want ...error) {
	b.Helper()
	is := func(of error) bool { return errors.Is(err, of) }
	if err == nil || len(want) > 0 && !slices.ContainsFunc(want, is) ||
		len(want) == 0 && slices.ContainsFunc([]error{ca.ErrNoRecord, ca.ErrConflict, ca.ErrUnfit}, is) {
		b.Errorf("%s returns %v; want an error that wraps one of %v and nothing else", what, err, want)
	}
}

// eventually waits for a minute at most.
func (b *bench) eventually(what string, is func() bool) {
	b.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("after a minute: not %s", what)
		}
	}
}

func noRecord(b *bench) {
	s := b.open()
	for range 2 {
		_, err := s.Load(b.Context())
		b.fails("Load without a record", err, ca.ErrNoRecord)
		_, err = s.Save(b.Context(), record("1", "a"))
		b.fails("Save in place of a record that is not there", err, ca.ErrConflict)
	}
}

// contents: all bytes come back, and nothing is shared or left over.
func contents(b *bench) {
	s, other := b.open(), b.open()
	large := make([]byte, 400<<10)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(large)
	first := map[string][]byte{
		"svidkit-large": large, "svidkit-empty": {}, "svidkit-nil": nil, "svidkit-A.b_c-d": {0, 255, '\n', 0xc3, '\\', '\''},
	}
	for i := range 256 {
		first["svidkit-bytes"] = append(first["svidkit-bytes"], byte(i))
	}
	version := ""
	second := map[string][]byte{"svidkit-only": []byte("y"), "svidkit-more": []byte("z")}
	for _, data := range []map[string][]byte{first, {"svidkit-only": []byte("x")}, second} {
		given := ca.NewRecord(version, maps.Clone(data))
		var err error
		if version, err = s.Save(b.Context(), given); err != nil {
			b.Fatal(err)
		}
		if !maps.EqualFunc(given.Data(), data, bytes.Equal) {
			b.Error("Save changes what it is given")
		}
		if data["svidkit-only"] != nil {
			given.Data()["svidkit-only"] = []byte("changed") // by the caller, later
		}
		for _, reader := range []ca.Store{s, other} {
			for range 2 {
				r, err := reader.Load(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				if r.Version != version || !maps.EqualFunc(r.Data(), data, bytes.Equal) {
					b.Errorf("version %q with %v comes back as %q with other items: %v", version,
						slices.Sorted(maps.Keys(data)), r.Version, slices.Sorted(maps.Keys(r.Data())))
				}
				for _, value := range r.Data() {
					clear(value) // it belongs to the caller
				}
				clear(r.Data())
			}
		}
	}
}

// versions: no state has the version of another, equal ones neither, and only the present one is replaced.
func versions(b *bench) {
	s, other := b.open(), b.open()
	seen := []string{""}
	for i := range 8 {
		version := b.save([]ca.Store{s, other}[i%2], seen[len(seen)-1], "abab"[i%4:i%4+1])
		if slices.Contains(seen, version) {
			b.Errorf("the version %q comes back", version)
		}
		for _, wrong := range append(seen, version+"0", "other") {
			_, err := other.Save(b.Context(), record(wrong, "wrong"))
			b.fails("Save in place of a version that is not there", err, ca.ErrConflict)
		}
		b.has(s, version, "abab"[i%4:i%4+1])
		seen = append(seen, version)
	}
}

func endedContext(b *bench) {
	s := b.open()
	version := b.save(s, "", "a")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(b.Context())
	cancel(cause)
	_, err := s.Load(ctx)
	b.fails("Load with a context that is done", err, cause, context.Canceled)
	_, err = s.Save(ctx, record(version, "b"))
	b.fails("Save with a context that is done", err, cause, context.Canceled)
	b.has(s, version, "a")
}

func printing(b *bench) {
	s := b.open()
	const secret = "a-private-value"
	version := b.save(s, "", secret)
	r, err := s.Load(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	_, conflict := s.Save(b.Context(), record(version+"0", secret))
	if said := fmt.Sprintf("%v %+v %#v %v %+v %v", s, s, s, r, r, conflict); strings.Contains(said, secret) {
		b.Errorf("it prints what it keeps: %s", said)
	}
}

func damage(b *bench) {
	b.need("Damage", b.Damage != nil)
	b.save(b.open(), "", "a")
	b.Damage()
	_, err := b.open().Load(b.Context())
	b.fails("Load of a damaged record", err, ca.ErrUnfit)
}

// missingPlace: what is missing may come back, and no CA is made in its place.
func missingPlace(b *bench) {
	b.need("Remove", b.Remove != nil)
	s := b.open()
	version := b.save(s, "", "a")
	back := b.Remove()
	_, err := s.Load(b.Context())
	if err == nil || errors.Is(err, ca.ErrNoRecord) {
		b.Errorf("without a place, Load returns %v", err)
	}
	for _, v := range []string{"", version} {
		if _, err = s.Save(b.Context(), record(v, "b")); err == nil || errors.Is(err, ca.ErrConflict) {
			b.Errorf("without a place, Save returns %v", err)
		}
	}
	back()
	b.has(s, version, "a")
}

// firstOfMany: of many that make the record, one does.
func firstOfMany(b *bench) {
	var wg sync.WaitGroup
	var won atomic.Pointer[string]
	begin := make(chan struct{})
	for i := range 6 {
		s, text := b.open(), strconv.Itoa(i)
		wg.Go(func() {
			<-begin
			if _, err := s.Save(b.Context(), record("", text)); err != nil {
				b.fails("Save by one of many", err, ca.ErrConflict)
			} else if other := won.Swap(&text); other != nil {
				b.Errorf("%s and %s have both made the record", *other, text)
			}
		})
	}
	close(begin)
	wg.Wait()
	if won.Load() == nil {
		b.Fatal("no writer has won")
	}
	b.has(b.open(), "", *won.Load())
}

// A counter is a number in the place that many increment.
type counter struct {
	*bench
	begun, done atomic.Int64 // increments that may have happened, and that have
}

// increment adds one. It returns the error of the store unless that is a conflict, after which it tries again for a
// minute.
func (c *counter) increment(s ca.Store) error {
	c.begun.Add(1)
	for end := time.Now().Add(time.Minute); ; {
		floor := c.done.Load()
		r, err := s.Load(c.Context())
		n := 0
		switch {
		case errors.Is(err, ca.ErrNoRecord) && floor == 0:
		case err != nil:
			return err
		default:
			n, _ = strconv.Atoi(c.textOf(r))
		}
		if int64(n) < floor {
			c.Errorf("Load returns %d after the Save of %d", n, floor)
		}
		if _, err = s.Save(c.Context(), record(r.Version, strconv.Itoa(n+1))); err == nil {
			for done := c.done.Load(); done < int64(n+1) && !c.done.CompareAndSwap(done, int64(n+1)); {
				done = c.done.Load()
			}
			return nil
		} else if !errors.Is(err, ca.ErrConflict) || time.Now().After(end) {
			return err
		}
	}
}

// manyWriters: no addition is lost. Each store has two writers.
func manyWriters(b *bench) {
	const writers, each = 6, 10
	c := counter{bench: b}
	stores := []ca.Store{b.open(), b.open(), b.open()}
	var wg sync.WaitGroup
	for i := range writers {
		s := stores[i/2]
		wg.Go(func() {
			for range each {
				if err := c.increment(s); err != nil {
					b.Errorf("an addition fails: %v", err)
				}
			}
		})
	}
	wg.Wait()
	b.has(b.open(), "", strconv.Itoa(writers*each))
}

// readers: each reading is whole, and not older than what was saved before it began.
func readers(b *bench) {
	c := counter{bench: b}
	s := b.open()
	if err := c.increment(s); err != nil {
		b.Fatal(err)
	}
	ended := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		s := b.open()
		wg.Go(func() {
			for n := int64(0); ; {
				select {
				case <-ended:
					return
				default:
				}
				floor := max(n, c.done.Load())
				r, err := s.Load(b.Context())
				if err != nil {
					b.Errorf("Load returns %v", err)
					return
				}
				if n, _ = strconv.ParseInt(b.textOf(r), 10, 64); n < floor {
					b.Errorf("Load returns %d after %d", n, floor)
				}
			}
		})
	}
	for range 50 {
		if err := c.increment(s); err != nil {
			b.Error(err)
		}
	}
	close(ended)
	wg.Wait()
}

// watch: a change by another is announced soon.
func watch(b *bench) {
	s, other := b.open(), b.open()
	w, ok := s.(interface {
		Watch(ctx context.Context, changed func())
	})
	if !ok {
		b.Skip("the store has no method Watch")
	}
	version := b.save(other, "", "0")
	ctx, stop := context.WithCancel(b.Context())
	var calls atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.Watch(ctx, func() { calls.Add(1) })
	}()
	for i := range 3 {
		before := calls.Load()
		version = b.save(other, version, strconv.Itoa(i+1))
		b.eventually("called", func() bool { return calls.Load() > before })
		time.Sleep(20 * time.Millisecond)
	}
	stop()
	b.eventually("returned from Watch, whose context is done", func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
}

// lostAnswer: the writer does not learn that its record is there, and finds it.
func lostAnswer(b *bench) {
	b.need("Cut", b.Cut != nil)
	s, version := b.open(), ""
	for i := range 4 {
		version = b.saveWithoutAnswer(s, version, strconv.Itoa(i), func() {})
		version = b.save(s, version, strconv.Itoa(i))
	}
}

// saveWithoutAnswer returns the version of a record whose writer did not get it.
func (b *bench) saveWithoutAnswer(s ca.Store, version, text string, meanwhile func()) string {
	b.Helper()
	b.Cut(meanwhile)
	if _, err := s.Save(b.Context(), record(version, text)); err != nil {
		b.fails("Save without an answer", err)
	}
	var r ca.Record
	b.eventually("connected", func() bool {
		var err error
		r, err = s.Load(b.Context())
		return err == nil || errors.Is(err, ca.ErrNoRecord)
	})
	if b.textOf(r) != text || r.Version == version {
		b.Fatalf("after the Save of %q without an answer, the place holds %q", text, b.textOf(r))
	}
	_, err := s.Save(b.Context(), record(version, "again"))
	b.fails("another Save of the same", err, ca.ErrConflict)
	return r.Version
}

// interrupted checks what a store says while nothing can be said of the place.
func (b *bench) interrupted(hook func() (mend func())) {
	s := b.open()
	version := b.save(s, "", "a")
	for _, store := range []ca.Store{s, b.open()} {
		mend := sync.OnceFunc(hook())
		late := time.AfterFunc(10*time.Second, func() {
			b.Error("calls do not return when their contexts are done")
			mend()
		})
		for range 2 {
			ctx, cancel := context.WithTimeout(b.Context(), 200*time.Millisecond)
			_, err := store.Load(ctx)
			b.fails("Load without a connection", err)
			_, err = store.Save(ctx, record(version, "b"))
			b.fails("Save without a connection", err)
			cancel()
		}
		if !late.Stop() {
			return
		}
		mend()
		var r ca.Record
		b.eventually("connected", func() (ok bool) {
			var err error
			r, err = store.Load(b.Context())
			return err == nil
		})
		if text := b.textOf(r); (text == "a") != (r.Version == version) {
			b.Errorf("the place holds %q as version %q", text, r.Version)
		}
		version = b.save(store, r.Version, "a")
	}
}

func lostConnections(b *bench) {
	b.need("Break", b.Break != nil)
	b.interrupted(b.Break)
}

// noAnswer: the end of its context is all that a caller waits for.
func noAnswer(b *bench) {
	b.need("Hang", b.Hang != nil)
	b.interrupted(b.Hang)
}

// behind: a copy is refused, or answers as the place does.
func behind(b *bench) {
	b.need("Behind", b.Behind != nil)
	s := b.open()
	version := b.save(s, "", "0")
	lagging := b.must(b.Behind())
	for i := range 20 {
		text := strconv.Itoa(i + 1)
		version = b.save(s, version, text)
		r, err := lagging.Load(b.Context())
		switch {
		case err != nil:
			b.fails("Load from a copy", err)
		case b.textOf(r) != text:
			b.Fatalf("a copy answers with %q after the Save of %q", b.textOf(r), text)
		}
	}
	if _, err := lagging.Save(b.Context(), record(version, "x")); err == nil {
		b.has(s, "", "x")
	} else {
		b.has(s, version, "20")
	}
}

// failover: what was saved is there afterwards, whatever happened in between.
func failover(b *bench) {
	b.need("FailOver", b.FailOver != nil)
	c := counter{bench: b}
	ended := make(chan struct{})
	var wg sync.WaitGroup
	var failed atomic.Int64
	for range 3 {
		s := b.open()
		wg.Go(func() {
			for {
				select {
				case <-ended:
					return
				default:
				}
				if err := c.increment(s); err != nil {
					failed.Add(1)
					b.fails("a call during a failover", err)
					time.Sleep(5 * time.Millisecond)
				}
			}
		})
	}
	more := func() {
		b.Helper()
		before := c.done.Load()
		b.eventually("writing", func() bool { return c.done.Load() > before+10 })
	}
	for range 2 {
		more()
		b.FailOver()
	}
	more()
	close(ended)
	wg.Wait()
	r, err := b.open().Load(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	n, _ := strconv.ParseInt(b.textOf(r), 10, 64)
	if n < c.begun.Load()-failed.Load() || n > c.begun.Load() {
		b.Errorf("%d additions were begun and %d failed; the place holds %d", c.begun.Load(), failed.Load(), n)
	}
}

// failoverBeforeAnswer: who takes the place of a server has what it wrote last.
func failoverBeforeAnswer(b *bench) {
	b.need("Cut and FailOver", b.Cut != nil && b.FailOver != nil)
	s := b.open()
	b.saveWithoutAnswer(s, b.save(s, "", "0"), "1", b.FailOver)
}

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	worker = spiffe.MustParseID("spiffe://example.org/worker")
)

// propagation is that of the authorities, which read the store four times as often.
const propagation = 400 * time.Millisecond

// A fleet is some authorities on one place.
type fleet struct {
	*bench
	replicas []*ca.Authority
	reported []string                  // the roots of rotations that were reported as done
	numbers  map[uint64]*spiffe.Bundle // what each replica had, by its number
	stop     func()
}

// authority opens one, which does not run.
func (b *bench) authority(ctx context.Context, create bool) (*ca.Authority, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return ca.Open(ctx, ca.Config{
		TrustDomain: domain, Create: create, DefaultTTL: time.Hour, MaxTTL: time.Hour,
		Rotation: ca.Rotation{Manual: true, Propagation: propagation},
	}, b.open())
}

// fleet starts n authorities at the same time.
func (b *bench) fleet(n int) *fleet {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	f := &fleet{bench: b, replicas: make([]*ca.Authority, n), numbers: make(map[uint64]*spiffe.Bundle)}
	var opening, running sync.WaitGroup
	for i := range n {
		opening.Go(func() {
			a, err := b.authority(ctx, true)
			if err != nil {
				b.Errorf("an authority does not open: %v", err)
				return
			}
			f.replicas[i] = a
			running.Go(func() { _ = a.Run(ctx) })
		})
	}
	opening.Wait()
	f.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	b.Cleanup(f.stop)
	if b.Failed() {
		b.FailNow()
	}
	return f
}

// look checks that replicas with one number have one bundle, and reports whether all have the same.
func (f *fleet) look() bool {
	f.Helper()
	same := true
	var last *spiffe.Bundle
	for _, a := range f.replicas {
		bundle := a.Bundle()
		number, _ := bundle.Sequence()
		if other := f.numbers[number]; other != nil && !other.Equal(bundle) {
			f.Fatalf("there are two bundles with the number %d", number)
		}
		f.numbers[number] = bundle
		same = same && (last == nil || last.Equal(bundle)) && a.Status().SyncError == nil
		last = bundle
	}
	return same
}

// rotate has replica i replace the root, and waits until all sign with the new one. If something happens meanwhile, it
// tries until there is a new root.
func (f *fleet) rotate(i int, meanwhile func()) {
	f.Helper()
	before := f.signer(0)
	outcome := make(chan error)
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	go func() {
		for {
			root, err := f.replicas[i].Rotate(ctx)
			if err == nil {
				f.reported = append(f.reported, root.ID)
			} else if meanwhile != nil && !errors.Is(err, ca.ErrRotating) && ctx.Err() == nil {
				time.Sleep(20 * time.Millisecond)
				continue
			} else if meanwhile != nil {
				err = nil
			}
			outcome <- err
			return
		}
	}()
	if meanwhile != nil {
		meanwhile()
	}
	if err := <-outcome; err != nil {
		f.Fatalf("Rotate returns %v", err)
	}
	f.eventually("one CA with a new root", func() bool {
		same := f.look()
		for j := range f.replicas {
			same = same && f.signer(j) != before && f.signer(j) == f.signer(0)
		}
		return same
	})
}

// signer returns the root with which a replica signs.
func (f *fleet) signer(i int) string {
	for _, root := range f.replicas[i].Status().Roots {
		if root.Phase == "active" {
			return root.ID
		}
	}
	return ""
}

// sign has a replica sign, which must be good for all.
func (f *fleet) sign(i int) {
	f.Helper()
	key, err := pki.NewKey("")
	if err != nil {
		f.Fatal(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		f.Fatal(err)
	}
	chain, err := f.replicas[i].Sign(f.Context(), ca.Request{CSR: csr, ID: worker})
	if err != nil {
		f.Fatalf("a replica does not sign: %v", err)
	}
	for _, a := range f.replicas {
		if _, err := chain[0].Verify(x509.VerifyOptions{Roots: a.Bundle().CertPool()}); err != nil {
			f.Errorf("what a replica has signed is not good for another: %v", err)
		}
	}
}

// settled checks that all replicas and a new one have the roots of all rotations that were reported, and, if exactly,
// none that was not.
func (f *fleet) settled(exactly bool) {
	f.Helper()
	a, err := f.authority(f.Context(), false)
	if err != nil {
		f.Fatal(err)
	}
	f.replicas = append(f.replicas, a)
	f.eventually("one CA", f.look)
	for i, a := range f.replicas {
		f.sign(i)
		roots := a.Status().Roots
		for _, id := range f.reported {
			if !slices.ContainsFunc(roots, func(k ca.KeyStatus) bool { return k.ID == id }) {
				f.Errorf("a replica has not the root %s of a rotation that was reported", id)
			}
		}
		if exactly && len(roots) != 1+len(f.reported) {
			f.Errorf("after %d rotations a replica has %d roots", len(f.reported), len(roots))
		}
	}
}

// replicas: authorities that start at the same time are one CA, and stay one through rotations.
func replicas(b *bench) {
	f := b.fleet(3)
	for i := range f.replicas {
		f.rotate(i, nil)
		f.sign(i)
	}
	f.settled(true)
}

// replicasLostAnswer: each rotation happens. It is not reported if the write that lost its answer is seen only later, as
// where it waits for a synchronous standby.
func replicasLostAnswer(b *bench) {
	b.need("Cut", b.Cut != nil)
	f := b.fleet(2)
	for i := range f.replicas {
		b.Cut(func() {})
		f.rotate(i, func() {})
	}
	f.settled(false)
}

// replicasFailover: a rotation that was reported is not lost.
func replicasFailover(b *bench) {
	b.need("FailOver", b.FailOver != nil)
	f := b.fleet(3)
	f.rotate(0, b.FailOver)
	if b.Cut != nil {
		b.Cut(b.FailOver)
		f.rotate(1, func() {})
	}
	f.rotate(2, b.FailOver)
	f.settled(false)
}

// restoredDump: an older record below running authorities is refused. They go on, and say so.
func restoredDump(b *bench) {
	b.need("Dump", b.Dump != nil)
	f := b.fleet(2)
	f.rotate(0, nil)
	restore, old, s := b.Dump(), f.signer(0), b.open()
	dumped, err := s.Load(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	f.rotate(1, nil)
	b.eventually("refused by all", func() bool {
		if r, err := s.Load(b.Context()); err != nil || !maps.EqualFunc(r.Data(), dumped.Data(), bytes.Equal) {
			restore() // a replica may have written meanwhile
		}
		return f.replicas[0].Status().SyncError != nil && f.replicas[1].Status().SyncError != nil
	})
	for i, a := range f.replicas {
		f.sign(i)
		if have := len(a.Status().Roots); have != 3 || f.signer(i) == old {
			b.Errorf("replica %d has taken the older record: %v", i, a.Status().Roots)
		}
		if _, err := a.Rotate(b.Context()); err == nil {
			b.Errorf("replica %d has replaced the older record", i)
		}
	}
	f.stop()
	a, err := b.authority(b.Context(), false)
	if err != nil {
		b.Fatalf("the older record does not open: %v", err)
	}
	if roots := a.Status().Roots; len(roots) != 2 || roots[1].ID != old {
		b.Errorf("the older record has %v", roots)
	}
}
