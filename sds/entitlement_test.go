package sds

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestEntitlements makes random changes of what callers may have under which name, of secrets, and of what
// streams ask for, in virtual time, and holds what is sent against a model: no secret leaves after its caller has
// lost the right to it, or has got another in its place, and what callers may have is there a second later.
func TestEntitlements(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { newModel(t, seed).run(rounds.Of(160) * rounds.Of(1)) })
		})
	}
}

const (
	modelCallers  = 4
	modelStreams  = 12
	modelNames    = 6
	modelVersions = 5
)

// model is the world: which client may have what, and the secrets. It is the source.
//
// Its events are at whole microseconds, and all else that takes time takes a nanosecond more: so nothing is
// under way at the instant of an event, and what leaves later leaves with the rights as they are.
type model struct {
	t       *testing.T
	rnd     *rand.Rand
	h       *Handler
	names   []string
	secrets map[string][]*pki.Secret // versions of each
	streams []*modelStream
	sent    int

	mu      sync.Mutex
	rights  [modelCallers]map[string]string // by the name that is asked for: the source's, or "" for none
	current map[string]int                  // index of the version; -1 if there is no such secret
	changed func(string)
}

type modelCaller struct{}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), secrets: make(map[string][]*pki.Secret), current: make(map[string]int)}
	ca := spiffetest.NewCA(t, "example.org")
	for range modelVersions {
		for i := range modelNames {
			ca.Rotate()
			ca.DropOldRoots()
			name := fmt.Sprint("name-", i)
			s := must.Get(pki.NewSecretPEM(name, nil, nil, pki.MarshalCertificatesPEM(ca.Root()), time.Time{}))(t)
			m.secrets[name] = append(m.secrets[name], s)
			m.current[name] = -1
		}
	}
	for i := range modelNames {
		m.names = append(m.names, fmt.Sprint("name-", i))
	}
	for i := range m.rights {
		m.rights[i] = make(map[string]string)
	}
	m.h = must.Get(NewHandler(m, &Options{Resolve: func(ctx context.Context, name string) (string, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		source := m.rights[ctx.Value(modelCaller{}).(int)][name]
		if source == "" {
			return "", errors.New("no")
		}
		return source, nil
	}}))(t)
	for i := range modelStreams {
		m.streams = append(m.streams, m.open(i%2 == 0))
	}
	return m
}

// GenerateSecret takes up to 50 ms.
func (m *model) GenerateSecret(ctx context.Context, name string) (*pki.Secret, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, wait := m.current[name], m.short(50)
	m.mu.Unlock()
	select {
	case <-time.After(wait):
	case <-ctx.Done():
	}
	m.mu.Lock()
	if i < 0 {
		return nil, fs.ErrNotExist
	}
	return m.secrets[name][i], nil
}

func (m *model) Subscribe(f func(string)) func() {
	m.changed = f
	return func() {}
}

// random returns a number less than n.
func (m *model) random(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rnd.IntN(n)
}

// short returns a time of up to ms milliseconds, and a nanosecond. The lock is held.
func (m *model) short(ms int) time.Duration {
	return time.Duration(m.rnd.IntN(ms+1))*time.Millisecond + time.Nanosecond
}

func (m *model) run(events int) {
	end := func() {
		for _, s := range m.streams {
			s.close()
		}
		synctest.Wait()
		_ = m.h.Close()
	}
	defer func() {
		if m.t.Failed() {
			end()
		}
	}()
	for i := range events {
		m.pause(m.random(200))
		m.event()
		synctest.Wait()
		if i%10 == 9 {
			m.pause(1000)
			synctest.Wait()
			for _, s := range m.streams {
				s.check()
			}
		}
	}
	end()
	open, names := m.h.open.Held(), m.h.names.Held()
	require.Zero(m.t, open)
	require.Zero(m.t, names)
	require.Empty(m.t, m.h.table.names)
	require.Empty(m.t, m.h.table.names[""])
	require.Greater(m.t, m.sent, events/4, "the test is about something")
}

// pause sleeps for about ms milliseconds, to a whole microsecond.
func (m *model) pause(ms int) {
	d := time.Duration(ms+1) * time.Millisecond
	time.Sleep(d - time.Duration(time.Now().Nanosecond())%time.Microsecond)
}

func (m *model) event() {
	m.mu.Lock()
	name, caller, what := m.names[m.rnd.IntN(modelNames)], m.rnd.IntN(modelCallers), m.rnd.IntN(10)
	stream, refresh := m.rnd.IntN(modelStreams), m.rnd.IntN(2) == 0
	delta := m.rnd.IntN(2) == 0
	switch {
	case what < 5:
		old := m.rights[caller][name]
		m.rights[caller][name] = ""
		if old == "" || m.rnd.IntN(3) == 0 {
			m.rights[caller][name] = name
			if m.rnd.IntN(2) == 0 {
				m.rights[caller][name] = m.names[m.rnd.IntN(modelNames)]
			}
		}
		if old != "" && (old != name || m.current[name] < 0) { // there will be no news of its secret
			refresh = true
		}
		if now := m.current[name]; !refresh && now >= 0 {
			m.current[name] = (now + 1) % modelVersions
		}
	case what < 7:
		m.current[name], refresh = m.rnd.IntN(modelVersions+1)-1, false
	}
	m.mu.Unlock()
	switch {
	case what < 7 && refresh:
		m.h.Refresh()
	case what < 7:
		m.changed(name)
	case what < 9:
		m.streams[stream].change()
	default:
		m.streams[stream].close()
		m.streams[stream] = m.open(delta)
	}
}

// modelSecret is a version of a secret of the source.
type modelSecret struct {
	source  string
	version int
}

// modelStream is a client, as the ResponseWriter of its own request.
type modelStream struct {
	m      *model
	delta  bool
	caller int
	in     *io.PipeWriter
	cancel context.CancelFunc
	done   chan struct{}
	header http.Header

	// Guarded by m.mu.
	wanted map[string]bool
	has    map[string]modelSecret
	nonce  string
	over   bool
}

func (m *model) open(delta bool) *modelStream {
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	s := &modelStream{
		m: m, delta: delta, caller: m.random(modelCallers), in: w, cancel: cancel, done: make(chan struct{}),
		header: make(http.Header), wanted: make(map[string]bool), has: make(map[string]modelSecret),
	}
	method := "StreamSecrets"
	if delta {
		method = "DeltaSecrets"
	}
	req := httptest.NewRequestWithContext(context.WithValue(ctx, modelCaller{}, s.caller), http.MethodPost, service+method, r)
	req.ProtoMajor = 2
	req.Header.Set("Content-Type", "application/grpc")
	go func() {
		defer close(s.done)
		m.h.ServeHTTP(s, req)
	}()
	s.change()
	return s
}

func (s *modelStream) Header() http.Header { return s.header }
func (s *modelStream) WriteHeader(int)     {}
func (s *modelStream) Flush()              {}

func (s *modelStream) close() {
	s.m.mu.Lock()
	s.over = true
	s.m.mu.Unlock()
	_ = s.in.Close() // also when it is closed
	s.cancel()
	<-s.done
}

// change asks for other names.
func (s *modelStream) change() {
	s.m.mu.Lock()
	var add, drop []string
	for _, name := range s.m.names {
		switch want := s.m.rnd.IntN(3) > 0; {
		case want && !s.wanted[name]:
			s.wanted[name] = true
			add = append(add, name)
		case !want && s.wanted[name]:
			delete(s.wanted, name)
			delete(s.has, name)
			drop = append(drop, name)
		}
	}
	b := s.request(s.nonce, add, drop)
	s.m.mu.Unlock()
	_, _ = s.in.Write(b)
}

// request returns a request: for SotW one with all names that are wanted. The lock is held.
func (s *modelStream) request(nonce string, add, drop []string) []byte {
	var r proto.Message = &envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: add, ResourceNamesUnsubscribe: drop, ResponseNonce: nonce}
	if !s.delta {
		var names []string
		for _, name := range s.m.names {
			if s.wanted[name] {
				names = append(names, name)
			}
		}
		if len(names) == 0 {
			names = []string{"another"} // as none means everything at the beginning of a stream
		}
		r = &envoysds.DiscoveryRequest{ResourceNames: names, ResponseNonce: nonce}
	}
	msg, err := proto.Marshal(r)
	if err != nil {
		panic(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)
}

// Write is what the server sends: it is checked at that instant, and acknowledged within 100 ms.
func (s *modelStream) Write(p []byte) (int, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.over || len(p) < 5 {
		return len(p), nil
	}
	var removed []string
	sent := make(map[string]*envoysds.Secret)
	add := func(value []byte) {
		var secret envoysds.Secret
		require.NoError(m.t, proto.Unmarshal(value, &secret))
		sent[secret.GetName()] = &secret
	}
	if s.delta {
		var r envoysds.DeltaDiscoveryResponse
		require.NoError(m.t, proto.Unmarshal(p[5:], &r))
		for _, res := range r.GetResources() {
			add(res.GetResource().GetValue())
		}
		removed, s.nonce = r.GetRemovedResources(), r.GetNonce()
	} else {
		var r envoysds.DiscoveryResponse
		require.NoError(m.t, proto.Unmarshal(p[5:], &r))
		for _, res := range r.GetResources() {
			add(res.GetValue())
		}
		s.nonce = r.GetNonce()
	}
	for name, secret := range sent {
		m.sent++
		source := m.rights[s.caller][name]
		version := slices.IndexFunc(m.secrets[source], func(v *pki.Secret) bool {
			roots, _ := v.Roots()
			return string(roots) == string(secret.GetValidationContext().GetTrustedCa().GetInlineBytes())
		})
		if version < 0 {
			m.t.Errorf("%v: %q leaves for caller %d, which has lost the right to it; it may have %q", time.Now(), name, s.caller, source)
		}
		if s.wanted[name] {
			s.has[name] = modelSecret{source, version}
		}
	}
	for _, name := range removed {
		delete(s.has, name)
	}
	nonce := s.nonce
	time.AfterFunc(m.short(100), func() {
		m.mu.Lock()
		b := s.request(nonce, nil, nil)
		if s.over {
			b = nil
		}
		m.mu.Unlock()
		if b != nil {
			_, _ = s.in.Write(b)
		}
	})
	return len(p), nil
}

// check holds what the client has against the model, a second after the last event.
func (s *modelStream) check() {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range s.wanted {
		have, has := s.has[name]
		source := m.rights[s.caller][name]
		current := modelSecret{source, m.current[source]}
		switch entitled := source != "" && current.version >= 0; {
		case entitled:
			require.True(m.t, has && have == current, "%v: delta %v: %q: %v (%v), not %v", time.Now(), s.delta, name, have, has, current)
		case s.delta:
			require.False(m.t, has, "%v: %q was not withdrawn", time.Now(), name)
		}
	}
}
