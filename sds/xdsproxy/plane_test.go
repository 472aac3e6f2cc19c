package xdsproxy_test

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
)

var long = flag.Bool("long", false, "run the long tests")

// plane is a control plane: small, and true to the protocol.
type plane struct {
	mu      sync.Mutex
	content map[string]map[string][]byte // by type and name
	epoch   context.Context              // of the streams that are open
	kill    context.CancelFunc
	down    bool
	changed chan struct{} // closed at the next change
	secrets int           // requests for secrets, of which there should be none
	nodes   int           // streams whose first request has a node
	streams int
}

func newPlane() *plane {
	p := &plane{content: map[string]map[string][]byte{}, changed: make(chan struct{})}
	p.epoch, p.kill = context.WithCancel(context.Background())
	return p
}

// set changes a resource, whose version is its content; nil removes it.
func (p *plane) set(typeURL, name string, content []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.content[typeURL] == nil {
		p.content[typeURL] = map[string][]byte{}
	}
	if p.content[typeURL][name] = content; content == nil {
		delete(p.content[typeURL], name)
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// restart ends all streams. While it is down it refuses new ones.
func (p *plane) restart(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	p.kill()
	p.epoch, p.kill = context.WithCancel(context.Background())
}

// subscription is the state of a type on a stream.
type subscription struct {
	wild, named, waiting bool
	nonce                string
	names, sent          map[string]string // in sent: the version
}

func (p *plane) serve(ctx context.Context, c *grpchttp.Call, delta bool) error {
	p.mu.Lock()
	epoch, down := p.epoch, p.down
	p.streams++
	p.mu.Unlock()
	gone := grpchttp.Errorf(grpchttp.Unavailable, "the control plane is restarted")
	if down {
		return gone
	}
	messages, first := make(chan []byte), true
	received := make(chan struct{})
	defer func() { c.StopReceiving(); <-received }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer close(received)
		defer cancel()
		for {
			msg, err := c.Receive()
			if err != nil {
				return
			}
			select {
			case messages <- msg:
			case <-ctx.Done():
				return
			}
		}
	}()
	subs, serial := map[string]*subscription{}, 0
	for {
		p.mu.Lock()
		changed := p.changed
		var out []proto.Message
		for typeURL, s := range subs {
			if m := p.answer(typeURL, s, delta, &serial); m != nil {
				out = append(out, m)
			}
		}
		p.mu.Unlock()
		for _, m := range out {
			b, err := proto.Marshal(m)
			if err == nil {
				err = c.Send(b)
			}
			if err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-epoch.Done():
			return gone
		case <-ctx.Done():
			return nil
		case msg := <-messages:
			p.take(msg, subs, delta, first)
			first = false
		}
	}
}

func (p *plane) take(msg []byte, subs map[string]*subscription, delta, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := func(typeURL string, node *envoysds.Node) *subscription {
		if typeURL == secretType {
			p.secrets++
		}
		if first && node.GetId() != "" {
			p.nodes++
		}
		if subs[typeURL] == nil {
			subs[typeURL] = &subscription{names: map[string]string{}, sent: map[string]string{}}
		}
		return subs[typeURL]
	}
	if !delta {
		var r envoysds.DiscoveryRequest
		if proto.Unmarshal(msg, &r) != nil {
			return
		}
		s := of(r.GetTypeUrl(), r.GetNode())
		if r.GetResponseNonce() != s.nonce {
			return // stale
		}
		s.waiting = false
		s.named = s.named || len(r.GetResourceNames()) > 0
		s.wild = !s.named
		s.names = map[string]string{}
		for _, name := range r.GetResourceNames() {
			s.names[name] = ""
		}
		return
	}
	var r envoysds.DeltaDiscoveryRequest
	if proto.Unmarshal(msg, &r) != nil {
		return
	}
	_, begun := subs[r.GetTypeUrl()]
	s := of(r.GetTypeUrl(), r.GetNode())
	if r.GetResponseNonce() != "" {
		s.waiting = s.waiting && r.GetResponseNonce() != s.nonce
	}
	if !begun {
		s.wild = len(r.GetResourceNamesSubscribe()) == 0
		maps.Copy(s.sent, r.GetInitialResourceVersions())
	}
	for _, name := range r.GetResourceNamesUnsubscribe() {
		delete(s.names, name)
		delete(s.sent, name)
	}
	for _, name := range r.GetResourceNamesSubscribe() {
		s.names[name] = ""
		if begun {
			delete(s.sent, name)
		}
	}
}

// version returns the version of a resource: itself, if it is a short text.
func version(content []byte) string {
	if len(content) < 10 {
		return string(content)
	}
	return fmt.Sprintf("%x", sha256.Sum256(content))
}

// answer returns the response to send now, or nil.
func (p *plane) answer(typeURL string, s *subscription, delta bool, serial *int) proto.Message {
	if s.waiting {
		return nil
	}
	desired := map[string]string{}
	for name, content := range p.content[typeURL] {
		if _, ok := s.names[name]; ok || s.wild {
			desired[name] = version(content)
		}
	}
	if maps.Equal(desired, s.sent) && s.nonce != "" { // the first request of a stream is always answered
		return nil
	}
	*serial++
	sotw := &envoysds.DiscoveryResponse{TypeUrl: typeURL, Nonce: strconv.Itoa(*serial), VersionInfo: strconv.Itoa(*serial)}
	incremental := &envoysds.DeltaDiscoveryResponse{TypeUrl: typeURL, Nonce: sotw.Nonce}
	for _, name := range slices.Sorted(maps.Keys(desired)) {
		a := &anypb.Any{TypeUrl: typeURL, Value: p.content[typeURL][name]}
		sotw.Resources = append(sotw.Resources, a)
		if s.sent[name] != desired[name] {
			incremental.Resources = append(incremental.Resources, &envoysds.Resource{Name: name, Version: desired[name], Resource: a})
		}
	}
	for name := range s.sent {
		if _, ok := desired[name]; !ok {
			incremental.RemovedResources = append(incremental.RemovedResources, name)
		}
	}
	s.sent, s.waiting, s.nonce = desired, true, sotw.Nonce
	if delta {
		return incremental
	}
	return sotw
}

// proxied is what an Envoy wants and has. It connects again as Envoy does.
type proxied struct {
	t     testing.TB
	c     *grpchttp.Client
	delta bool
	r     *rand.Rand

	mu     sync.Mutex
	s      *grpchttp.Stream // nil while there is none
	wanted map[string]map[string]bool
	have   map[string]map[string]string // content of resources, and of secrets the name and serial
	nonces map[string]string
	first  bool
}

func (e *proxied) run(ctx context.Context) {
	for ctx.Err() == nil {
		method := stream
		if e.delta {
			method = delta
		}
		e.mu.Lock()
		e.s, e.first = e.c.Open(ctx, method, nil), true
		s := e.s
		clear(e.nonces)
		types := slices.Collect(maps.Keys(e.wanted))
		e.r.Shuffle(len(types), func(i, j int) { types[i], types[j] = types[j], types[i] })
		for _, typeURL := range types {
			e.send(typeURL, slices.Collect(maps.Keys(e.wanted[typeURL])), nil, true)
		}
		e.mu.Unlock()
		for {
			msg, err := s.Receive()
			if err != nil {
				break
			}
			e.mu.Lock()
			e.apply(msg)
			e.mu.Unlock()
		}
		e.mu.Lock()
		e.s = nil
		e.mu.Unlock()
		_ = s.Close()
		select {
		case <-ctx.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// send sends a request. Failures are for Receive.
func (e *proxied) send(typeURL string, add, drop []string, begin bool) {
	if e.s == nil {
		return
	}
	node := &envoysds.Node{Id: "model"}
	if !e.first {
		node = nil // as set_node_on_first_message_only says
	}
	e.first = false
	if e.delta {
		r := &envoysds.DeltaDiscoveryRequest{Node: node, TypeUrl: typeURL, ResourceNamesSubscribe: add, ResourceNamesUnsubscribe: drop}
		if begin {
			r.InitialResourceVersions = map[string]string{}
			for name := range e.wanted[typeURL] {
				if v, ok := e.have[typeURL][name]; ok {
					r.InitialResourceVersions[name] = v
				}
			}
		} else if add == nil && drop == nil {
			r.ResponseNonce = e.nonces[typeURL]
		}
		_ = e.s.Send(encode(e.t, r))
		return
	}
	_ = e.s.Send(encode(e.t, &envoysds.DiscoveryRequest{
		Node: node, TypeUrl: typeURL, ResourceNames: slices.Collect(maps.Keys(e.wanted[typeURL])), ResponseNonce: e.nonces[typeURL],
	}))
}

func (e *proxied) apply(msg []byte) {
	put := func(typeURL, name, version string, content []byte) {
		if typeURL != secretType {
			name, version = string(content[:1]), string(content) // its first letter is the name
		}
		e.have[typeURL][name] = version
	}
	if e.delta {
		var r envoysds.DeltaDiscoveryResponse
		require.NoError(e.t, proto.Unmarshal(msg, &r))
		for _, x := range r.GetResources() {
			put(r.GetTypeUrl(), x.GetName(), x.GetVersion(), x.GetResource().GetValue())
		}
		for _, name := range r.GetRemovedResources() {
			delete(e.have[r.GetTypeUrl()], name)
		}
		e.nonces[r.GetTypeUrl()] = r.GetNonce()
		e.send(r.GetTypeUrl(), nil, nil, false)
		return
	}
	var r envoysds.DiscoveryResponse
	require.NoError(e.t, proto.Unmarshal(msg, &r))
	if r.GetTypeUrl() != secretType {
		clear(e.have[r.GetTypeUrl()])
	}
	for _, a := range r.GetResources() {
		var s envoysds.Secret
		if r.GetTypeUrl() == secretType {
			require.NoError(e.t, proto.Unmarshal(a.GetValue(), &s))
		}
		put(r.GetTypeUrl(), s.GetName(), r.GetVersionInfo(), a.GetValue())
	}
	e.nonces[r.GetTypeUrl()] = r.GetNonce()
	e.send(r.GetTypeUrl(), nil, nil, false)
}

// Whatever happens in which order, in the end each Envoy has what the control plane and the source have, and nothing
// but that.
func TestScripts(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	tests, each := rounds.Of(5), rounds.Of(5) // scripts of a subtest
	if *long {
		tests = 500
	}
	for i := range tests {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			for k := range each {
				seed := uint64(i*each + k)
				synctest.Test(t, func(t *testing.T) { script(t, seed) })
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		})
	}
}

func script(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	n, p, src := memory(), newPlane(), new(secretSource)
	n.serve(t, "control", control(p.serve))
	h := newProxy(t, n, secrets(t, src, nil))
	n.serve(t, "proxy", h)
	names := []string{"a", "b", "c"}
	types := []string{clusters, endpoints, secretType}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var envoys []*proxied
	for i := range 2 {
		e := &proxied{
			t: t, c: grpchttp.NewClient(n.client(t, "proxy"), "http://localhost", maxMessage), delta: (int(seed)+i)%2 == 0, r: rand.New(rand.NewPCG(seed, 2)),
			wanted: map[string]map[string]bool{}, have: map[string]map[string]string{}, nonces: map[string]string{},
		}
		for _, typeURL := range types {
			e.wanted[typeURL], e.have[typeURL] = map[string]bool{"a": true}, map[string]string{}
		}
		envoys = append(envoys, e)
		wg.Go(func() { e.run(ctx) })
	}
	for step := range 15 + r.IntN(15) {
		typeURL, name := types[r.IntN(3)], names[r.IntN(3)]
		e := envoys[r.IntN(2)]
		switch r.IntN(8) {
		case 0:
			p.restart(r.IntN(2) == 0)
		case 1:
			e.mu.Lock()
			if e.s != nil && r.IntN(2) == 0 {
				s := e.s
				wg.Go(func() { _ = s.Close() })
			}
			e.mu.Unlock()
		case 2, 3:
			e.mu.Lock()
			if e.wanted[typeURL][name] {
				delete(e.wanted[typeURL], name)
				e.send(typeURL, nil, []string{name}, false)
			} else {
				e.wanted[typeURL][name] = true
				e.send(typeURL, []string{name}, nil, false)
			}
			e.mu.Unlock()
		case 4, 5, 6:
			switch {
			case typeURL == secretType:
				src.set(name, must.Get(pki.NewGenericSecret(name, map[string][]byte{"": {byte(step)}}))(t))
			case r.IntN(4) == 0:
				p.set(typeURL, name, nil)
			default:
				p.set(typeURL, name, []byte(name+strconv.Itoa(step)))
			}
		case 7:
			time.Sleep(time.Duration(r.IntN(4000)) * time.Millisecond)
		}
	}
	p.restart(false)
	time.Sleep(time.Minute)
	synctest.Wait()
	final := map[string]string{} // versions of the secrets, from a new delta stream
	s := envoys[0].c.Open(ctx, delta, nil)
	require.NoError(t, s.Send(askDelta(t, secretType, names...)))
	for missing := len(src.secrets); len(final) < missing; {
		msg := must.Get(s.Receive())(t)
		var resp envoysds.DeltaDiscoveryResponse
		require.NoError(t, proto.Unmarshal(msg, &resp))
		for _, x := range resp.GetResources() {
			final[x.GetName()] = x.GetVersion()
		}
		require.NoError(t, s.Send(encode(t, &envoysds.DeltaDiscoveryRequest{TypeUrl: secretType, ResponseNonce: resp.GetNonce()})))
	}
	_ = s.Close()
	for i, e := range envoys {
		e.mu.Lock()
		have, wanted := e.have, e.wanted // which nothing changes any more
		e.mu.Unlock()
		for _, typeURL := range types {
			for name := range wanted[typeURL] {
				got, ok := have[typeURL][name]
				want, exists := string(p.content[typeURL][name]), p.content[typeURL][name] != nil
				if typeURL == secretType {
					want, exists = final[name]
					if !e.delta { // whose versions are of all secrets together
						got = want
					}
				}
				require.Equal(t, exists, ok, "seed %d, Envoy %d, delta %v: %s %s", seed, i, e.delta, typeURL, name)
				require.Equal(t, want, got, "seed %d, Envoy %d, delta %v: %s %s", seed, i, e.delta, typeURL, name)
			}
		}
	}
	require.Zero(t, p.secrets, "seed %d: the control plane is asked for secrets", seed)
	require.Equal(t, p.streams > 0, p.nodes > 0)
	cancel()
	wg.Wait()
	synctest.Wait()
	streams, held := h.Held()
	require.Zero(t, streams, "seed %d", seed)
	require.Zero(t, held, "seed %d", seed)
}
