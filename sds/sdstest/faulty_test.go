package sdstest

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

// faulty is a source that does something wrong with what it is given.
type faulty struct {
	secrets map[string]*pki.Secret
	changes int
	fault   func(f *faulty, name string, s *pki.Secret) *pki.Secret
	changed func(string)
	calls   chan func()
}

func (f *faulty) GenerateSecret(_ context.Context, name string) (s *pki.Secret, err error) {
	done := make(chan struct{})
	f.calls <- func() { s = f.secrets[name]; close(done) }
	if <-done; s == nil {
		return nil, fmt.Errorf("%q: %w", name, fs.ErrNotExist)
	}
	return s, nil
}

func (f *faulty) Subscribe(changed func(string)) func() {
	f.changed = changed
	return func() {}
}

func (f *faulty) set(name string, s *pki.Secret) {
	done := make(chan struct{})
	f.calls <- func() {
		f.changes++
		f.secrets[name] = f.fault(f, name, s)
		close(done)
	}
	<-done
	f.changed(name)
}

// startFaulty starts our server of such a source.
func startFaulty(t testing.TB, fault func(f *faulty, name string, s *pki.Secret) *pki.Secret) *Server {
	f := &faulty{secrets: make(map[string]*pki.Secret), fault: fault, calls: make(chan func())}
	go func() {
		for call := range f.calls {
			call()
		}
	}()
	h := must.Get(sds.NewHandler(f, nil))(t)
	l, protocols := memconn.Listen(), new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: h, Protocols: protocols} // a test
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		_ = srv.Close()
		<-done
		_ = h.Close()
		close(f.calls)
	})
	c := &http.Client{Transport: &http.Transport{Protocols: protocols, DialContext: l.DialContext}}
	return &Server{Client: c, URL: "http://localhost", Set: f.set}
}

// The suite and the model find servers out that lose a change, that are late by one, or that serve something else, and
// the script of a failure is short.
func TestFaulty(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	contents := newContents(t)
	for name, fault := range map[string]func(f *faulty, name string, s *pki.Secret) *pki.Secret{
		"loses every third change": func(f *faulty, name string, s *pki.Secret) *pki.Secret {
			if f.changes%3 == 0 {
				return f.secrets[name]
			}
			return s
		},
		"keeps what is gone": func(f *faulty, name string, s *pki.Secret) *pki.Secret {
			if s == nil {
				return f.secrets[name]
			}
			return s
		},
		"serves something else": func(_ *faulty, name string, s *pki.Secret) *pki.Secret {
			if name == "b" && s != nil {
				s, _ = pki.NewGenericSecret(name, map[string][]byte{"": []byte("else")})
			}
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fails := func(lines []string) error {
				return play(t.Context(), startFaulty(t, fault), contents, 100*time.Millisecond, lines)
			}
			found := 0
			for _, c := range cases() {
				if found < 3 && c.options.MaxNames == 0 && fails(c.lines) != nil {
					found++
				}
			}
			assert.Equal(t, 3, found, "cases")
			for seed := range uint64(20) {
				lines := randomScript(seed)
				err := fails(lines)
				if err == nil {
					continue
				}
				short, err := shrink(lines, err, fails, time.Now().Add(time.Minute))
				require.Error(t, err)
				assert.Equal(t, "finish", short[len(short)-1])
				if len(short) < len(lines)/2 {
					return
				}
				t.Logf("%q", short) // answers that are late on a busy machine fail a script now and then, and are not the fault
			}
			assert.Fail(t, "no seed fails and shrinks to less than half")
		})
	}
}

// recorder keeps how a test ends.
type recorder struct {
	testing.TB
	failed, skipped string
}

func (r *recorder) Error(args ...any)              { r.failed += fmt.Sprint(args...) }
func (r *recorder) Errorf(f string, args ...any)   { r.failed += fmt.Sprintf(f, args...) }
func (r *recorder) Skipf(text string, args ...any) { r.skipped += fmt.Sprintf(text, args...) }

// A known gap is an error once the server has it no more, and a case with a name that begins alike is none. A server
// with names of its own is asked by them.
func TestLacks(t *testing.T) {
	t.Parallel()
	contents := newContents(t)
	const good, bad = "set a 1|s ask a|s want a=1|s ack|d sub a b|d want a=1 -b|set a 2|s want a=2|fetch a want a=2",
		"set a 1|s ask a|s want a=2"
	for _, c := range []struct{ name, script, lacks, failed, skipped string }{
		{"sotw: one", good, "", "", ""},
		{"sotw: one", good, "sotw: one", "the server passes this case", ""},
		{"sotw: one", good, "sotw", "the server passes this case", ""},
		{"sotw: one and another", good, "sotw: one", "", ""},
		{"sotw: one", bad, "sotw: one", "", `line 3, "s want a=2": a response has ["a=1"]`},
		{"sotw: one and another", bad, "sotw: one", `line 3, "s want a=2": a response has ["a=1"]`, ""},
	} {
		r := &recorder{TB: t}
		run(r, func(t testing.TB, _ Options) *Server {
			s := startFaulty(t, func(_ *faulty, name string, s *pki.Secret) *pki.Secret {
				if name != "our-a" {
					t.Errorf("the source has %q", name)
				}
				return s
			})
			s.Lacks, s.Name = []string{c.lacks}, func(name string) string { return "our-" + name }
			return s
		}, contents, testCase{name: c.name, lines: strings.Split(c.script, "|")})
		assert.Contains(t, r.failed, c.failed)
		assert.Contains(t, r.skipped, c.skipped)
		assert.Equal(t, []bool{c.failed == "", c.skipped == ""}, []bool{r.failed == "", r.skipped == ""}, "%+v", c)
	}
}

// The script of a seed does not change, and scripts that make no sense are errors.
func TestScripts(t *testing.T) {
	t.Parallel()
	assert.Equal(t, randomScript(7), randomScript(7))
	assert.NotEqual(t, randomScript(7), randomScript(8))
	good := func(_ *faulty, _ string, s *pki.Secret) *pki.Secret { return s }
	contents := newContents(t)
	for _, line := range []string{"s", "set a x", "s dance now", "s send colour=red", "s ack", "s quiet", "s ends ok", "fetch a", "fetch a colour=red want a=1"} {
		err := play(t.Context(), startFaulty(t, good), contents, 100*time.Millisecond, []string{line})
		require.Error(t, err, line)
		assert.Contains(t, err.Error(), "line 1")
	}
	seen := make(map[string]bool)
	for _, c := range cases() {
		assert.False(t, seen[c.name], c.name)
		seen[c.name] = true
		assert.NotEmpty(t, c.lines, c.name)
	}
	assert.GreaterOrEqual(t, len(seen), 100)
	RunScript(t, func(t testing.TB, o Options) *Server {
		assert.Equal(t, Options{}, o)
		return startFaulty(t, good)
	}, strings.Join(randomScript(1), "\n"))
}
