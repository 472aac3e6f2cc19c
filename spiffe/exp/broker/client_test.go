package broker_test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/http"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// back is within which a source opens its streams again after an outage.
const back = 6 * time.Second

func pathOf(s *workloadapi.Source) string {
	svid, err := s.SVID()
	if err != nil {
		return err.Error()
	}
	return svid.ID().Path()
}

// Each reference has a source of its own: what happens to a workload happens to its source alone, and an outage of the
// server to none.
func TestSources(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		conformance.Covers(t, "BRK-8", "BRK-21", "BRK-24")
		h := newHub(t)
		stop := h.serve(memconn.Listen())
		c := h.client(h.ca.Source("/broker"))
		n := rounds.Of(50)
		all := make([]*workloadapi.Source, n)
		for i := range all {
			name := fmt.Sprint("w", i)
			h.add("shop", name, "/"+name)
			all[i] = ready(t, c, pod(name), workloadapi.Config{JWTBundles: i%10 == 0})
		}
		require.EqualValues(t, 1, h.conns.Load())
		check := func(without ...int) {
			t.Helper()
			synctest.Wait()
			for i, s := range all {
				if slices.Contains(without, i) {
					require.ErrorIs(t, must.Err(s.SVID()), spiffe.ErrNotReady, i)
					require.ErrorIs(t, must.Err(s.Bundle(h.ca.TrustDomain())), spiffe.ErrNotReady, i)
					continue
				}
				require.Equal(t, fmt.Sprint("/w", i), pathOf(s))
				workloadtest.SameRoots(t, h.ca, must.Get(s.Bundle(h.ca.TrustDomain()))(t))
			}
		}
		check()
		assert.Contains(t, all[3].Report().Upstreams[0].Name, `pods "w3" in namespace "shop"`)

		ids := h.objects["w7"].ids
		h.set(func() { h.objects["w7"].ids = nil })
		check(7)
		require.ErrorIs(t, must.Err(all[7].SVID()), workloadapi.ErrDenied)
		require.NotErrorIs(t, must.Err(all[7].SVID()), broker.ErrEnded)
		h.remove("w8")
		check(7, 8)
		require.ErrorIs(t, must.Err(all[8].SVID()), broker.ErrEnded)
		h.set(func() { h.objects["w7"].ids = ids })
		time.Sleep(back)
		check(8)
		old := must.Get(all[9].SVID())(t)
		h.objects["w9"].ids[0].Provider.(*spiffetest.Source).Renew()
		check(8)
		require.NotSame(t, old, must.Get(all[9].SVID())(t))

		h.agent.Fail(errors.New("the authority is away")) // Unavailable on each stream
		time.Sleep(time.Minute)
		check(8)
		h.agent.Fail(nil)
		require.NoError(t, stop())
		time.Sleep(time.Minute)
		check(8)
		require.EqualValues(t, 1, h.conns.Load())
		h.serve(memconn.Listen())
		h.ca.Rotate()
		h.agent.Renew()
		time.Sleep(back)
		check(8)
		require.EqualValues(t, 2, h.conns.Load())

		require.NoError(t, c.Close())
		time.Sleep(time.Minute)
		check(8)
		require.EqualValues(t, 2, h.conns.Load(), "a client that was closed does not connect")
	})
}

// Sources that begin at the same time share a connection, and those that are too many for it another one.
func TestOneConnection(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, l := range []net.Listener{nil, must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)} {
		h := newHub(t)
		h.serve(l)
		c := h.client(h.ca.Source("/broker"))
		h.add("shop", "web", "/web")
		var wg sync.WaitGroup
		for range 300 {
			wg.Go(func() { ready(t, c, pod("web")) })
		}
		wg.Wait()
		assert.LessOrEqual(t, h.conns.Load(), int32(3), "until it knows better, a client takes 100 streams for too many")
	}
}

// A workload that is not there yet is waited for; one that has been there and has ended is over, even if there is
// another one with its name later.
func TestEnded(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		conformance.Covers(t, "BRK-23")
		h := newHub(t)
		h.serve(memconn.Listen())
		c := h.client(h.ca.Source("/broker"))
		s, stop := source(t, c, pod("web"), workloadapi.Config{JWTBundles: true})
		time.Sleep(10 * time.Minute)
		require.Greater(t, len(h.taken()), 100, "it is asked for again")
		require.ErrorIs(t, must.Err(s.SVID()), broker.ErrEnded)
		h.add("shop", "web", "/web")
		time.Sleep(back)
		require.Equal(t, "/web", pathOf(s))
		h.remove("web")
		h.add("shop", "web", "/web")
		synctest.Wait()
		h.taken()
		for range 2 {
			for _, err := range []error{must.Err(s.SVID()), must.Err(s.Bundle(h.ca.TrustDomain())), must.Err(s.Snapshot()),
				s.Ready(t.Context())} {
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				require.ErrorIs(t, err, broker.ErrEnded)
				require.ErrorIs(t, err, workloadapi.ErrDenied)
			}
			time.Sleep(24 * time.Hour)
		}
		require.Empty(t, h.taken(), "it is not asked for again")
		require.ErrorIs(t, stop(), broker.ErrEnded)
		h.self.Renew()
		h.add("shop", "web", "/web")
		next := ready(t, h.client(h.ca.Source("/broker")), pod("web"))
		require.Equal(t, "/web", pathOf(next), "the next one has a source of its own")
	})
}

// A client does what the standard says of each code, with details and without.
func TestStatuses(t *testing.T) {
	t.Parallel()
	const dropped, final, long = true, true, 2 * time.Minute
	for name, test := range map[string]struct {
		code           int
		reason         string
		dropped, final bool
		from, to       time.Duration // when it calls again
		conns          int32
	}{
		"InvalidArgument":           {workloadtest.InvalidArgument, "", !dropped, final, 0, 0, 1},
		"invalid reference":         {workloadtest.InvalidArgument, invalid, !dropped, final, 0, 0, 1},
		"Unavailable":               {workloadtest.Unavailable, "", !dropped, !final, 0, back, 1},
		"Unauthenticated":           {unauthenticated, "", !dropped, !final, 0, back, 2},
		"PermissionDenied":          {workloadtest.PermissionDenied, "", dropped, !final, long, long + back, 1},
		"PermissionDenied, another": {workloadtest.PermissionDenied, notEntitled + "@example.org", dropped, !final, long, long + back, 1},
		"not entitled":              {workloadtest.PermissionDenied, notEntitled, dropped, !final, 0, back, 1},
		"NotFound":                  {notFound, "", dropped, final, 0, 0, 1},
		"not found":                 {notFound, unknown, dropped, final, 0, 0, 1},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			conformance.Covers(t, "BRK-8", "BRK-20", "AMB-9")
			h := newHub(t)
			h.serve(memconn.Listen())
			h.add("shop", "web", "/web")
			response, _, _ := h.first(h.raw("/broker"), svids, named("web"))
			bundles, _, _ := h.first(h.raw("/broker"), "SubscribeToJWTBundles", named("web"))
			h.conns.Store(0)
			fail := make(chan struct{})
			var calls atomic.Int32
			h.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/grpc")
				answer, jwt := response, path.Base(r.URL.Path) == "SubscribeToJWTBundles"
				if jwt {
					answer = bundles
				}
				_, _ = w.Write(workloadtest.Framed(answer))
				_ = http.NewResponseController(w).Flush()
				if jwt || calls.Add(1) > 1 {
					<-r.Context().Done()
					return
				}
				<-fail
				w.Header().Set(http.TrailerPrefix+"Grpc-Status", strconv.Itoa(test.code))
				if test.reason != "" {
					w.Header().Set(http.TrailerPrefix+"Grpc-Status-Details-Bin", detail(test.reason))
				}
			})
			h.serve(memconn.Listen())
			c := h.client(h.ca.Source("/broker"))
			s, stop := source(t, c, pod("web"), workloadapi.Config{JWTBundles: true})
			require.NoError(t, s.Ready(t.Context()))
			close(fail)
			synctest.Wait()
			begin := time.Now()
			if test.dropped {
				require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
			} else {
				require.Equal(t, "/web", pathOf(s))
			}
			if test.code == notFound {
				require.ErrorIs(t, must.Err(s.Bundle(h.ca.TrustDomain())), broker.ErrEnded, "of the other stream, too")
			}
			if test.final {
				time.Sleep(time.Hour / 2)
				require.EqualValues(t, 1, calls.Load())
				require.Equal(t, test.code == notFound, errors.Is(stop(), broker.ErrEnded))
				return
			}
			for calls.Load() < 2 && time.Since(begin) < time.Hour {
				time.Sleep(time.Second)
			}
			after := time.Since(begin)
			require.True(t, test.from <= after && after <= test.to, after)
			synctest.Wait()
			require.Equal(t, "/web", pathOf(s))
			require.Equal(t, test.conns, h.conns.Load())
			require.NoError(t, stop())
		})
	}
}

// detail is the trailer for a reason, of the domain spiffe.io unless another one follows it.
func detail(reason string) string {
	text := func(b []byte, n protowire.Number, s string) []byte {
		return protowire.AppendString(protowire.AppendTag(b, n, protowire.BytesType), s)
	}
	reason, domain, other := strings.Cut(reason, "@")
	if !other {
		domain = "spiffe.io"
	}
	info := text(text(nil, 1, reason), 2, domain)
	any := text(text(nil, 1, "type.googleapis.com/google.rpc.ErrorInfo"), 2, string(info))
	return base64.RawStdEncoding.EncodeToString(text(nil, 3, string(any)))
}

// A client whose certificate has ended on an open connection comes back with its renewed one, or once it has one.
func TestRenewedClient(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		conformance.Covers(t, "BRK-5", "BRK-8")
		h := newHub(t)
		h.serve(memconn.Listen())
		web := h.add("shop", "web", "/web").ids[0].Provider.(*spiffetest.Source)
		own := h.ca.Source("/broker")
		s := ready(t, h.client(own), pod("web"))
		for _, late := range []time.Duration{0, 0, 10 * time.Minute} {
			end := must.Get(own.SVID())(t).NotAfter()
			time.Sleep(time.Until(end.Add(-10 * time.Minute)))
			h.self.Renew()
			web.Renew()
			if late == 0 {
				own.Renew()
			}
			time.Sleep(time.Until(end.Add(late)))
			require.Equal(t, "/web", pathOf(s))
			if late > 0 {
				require.Error(t, s.Report().Upstreams[0].Err)
				own.Renew()
			}
			time.Sleep(back)
			require.LessOrEqual(t, len(h.taken()), 2, "it does not ask in vain")
			web.Renew()
			synctest.Wait()
			require.NoError(t, s.Report().Upstreams[0].Err)
			require.Equal(t, must.Get(web.SVID())(t).Leaf().Raw, must.Get(s.SVID())(t).Leaf().Raw, "the stream is open")
		}
	})
}

// A server of the right trust domain with another ID gets no request.
func TestServerID(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		conformance.Covers(t, "BRK-4")
		h := newHub(t)
		h.serve(memconn.Listen())
		h.add("shop", "web", "/web")
		own := h.ca.Source("/broker")
		c := must.Get(broker.NewClient(h.address, h.endpoint(own, "/another")))(t)
		c.DialBy(h.dial)
		s, stop := source(t, c, pod("web"))
		time.Sleep(time.Minute)
		must.Fail(t, must.Err(s.SVID()), spiffe.ErrNotReady, spiffe.ErrDenied, "spiffe://example.org/agent")
		assert.Positive(t, h.conns.Load())
		assert.Empty(t, h.taken())
		require.NoError(t, stop())
		require.NoError(t, c.Close())
	})
}

// Several identities are told apart by their hints, and the first is the default one.
func TestHints(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-26", "AMB-26")
	h := newHub(t)
	h.serve(memconn.Listen())
	h.add("shop", "web", "/web", "/admin")
	c := h.client(h.ca.Source("/broker"))
	assert.Equal(t, "/web", pathOf(ready(t, c, pod("web"))))
	admin := ready(t, c, pod("web"), workloadapi.Config{Hint: "/admin"})
	assert.Equal(t, "/admin", pathOf(admin))
	assert.Contains(t, must.Get(admin.Fetch(t.Context(), "db"))(t), ".")
	for u, err := range must.Get(c.For(pod("web")))(t).WatchX509SVIDs(t.Context()) {
		require.NoError(t, err)
		require.Len(t, u.Identities, 2)
		assert.Equal(t, "/web", u.Identities[0].Hint)
		assert.Equal(t, "/admin", u.Identities[1].Hint)
		break
	}
}

// JWT-SVIDs are fetched as from a Workload API. What the Broker API does not have is not asked for.
func TestTokens(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-10", "BRK-11", "BRK-21")
	h := newHub(t)
	h.serve(memconn.Listen())
	h.add("shop", "web", "/web", "/admin")
	c := h.client(h.ca.Source("/broker"))
	w := must.Get(c.For(pod("web")))(t)
	ctx := t.Context()
	for u, err := range w.WatchWITSVIDs(ctx, spiffe.ID{}) {
		assert.ErrorIs(t, err, errors.ErrUnsupported, u)
	}
	_, _, err := w.ValidateJWTSVID(ctx, "db", "a.b.c")
	require.ErrorIs(t, err, errors.ErrUnsupported)
	assert.Zero(t, h.conns.Load())

	s := ready(t, c, pod("web"), workloadapi.Config{JWTBundles: true})
	validator := must.Get(jwtsvid.NewValidator(s, []string{"db"}, nil))(t)
	check := func(token, path string) {
		t.Helper()
		id, _, err := validator.ValidateJWTSVID(ctx, "db", token)
		require.NoError(t, err)
		assert.Equal(t, path, id.Path())
	}
	admin := h.ca.SVID("/admin").ID()
	tokens := must.Get(w.FetchJWTSVIDs(ctx, spiffe.ID{}, "db", "queue"))(t)
	require.Len(t, tokens, 2)
	check(tokens[1].Token(), "/admin")
	assert.Equal(t, "/admin", tokens[1].Hint)
	tokens = must.Get(w.FetchJWTSVIDs(ctx, admin, "db"))(t)
	require.Len(t, tokens, 1)
	check(tokens[0].Token(), "/admin")
	check(must.Get(s.Fetch(ctx, "db"))(t), "/web")
	cache := must.Get(jwtsvid.NewCache(s, nil))(t)
	token := must.Get(cache.Fetch(ctx, "db"))(t)
	check(token, "/web")
	assert.Equal(t, token, must.Get(cache.Fetch(ctx, "db"))(t))

	h.set(func() { g := everything; g.Audiences = []string{"queue"}; h.grants["/broker"] = g })
	require.ErrorIs(t, must.Err(s.Fetch(ctx, "db")), workloadapi.ErrDenied)
	require.NotErrorIs(t, must.Err(s.Fetch(ctx, "db")), broker.ErrEnded)
	must.Get(s.Fetch(ctx, "queue"))(t)
	h.remove("web")
	require.ErrorIs(t, must.Err(w.FetchJWTSVIDs(ctx, admin, "queue")), broker.ErrEnded)
	require.ErrorIs(t, must.Err(s.Fetch(ctx, "queue")), broker.ErrEnded)
}

// The address is that of the environment variable; names are allowed, unlike those of a Workload API. A reference that
// names nothing is not sent, nor a PID to another machine.
func TestNewClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-7", "BRK-14", "BRK-15", "BRK-16", "BRK-18")
	assert.Equal(t, "SPIFFE_BROKER_SOCKET", broker.SocketEnv)
	h := newHub(t)
	e := h.endpoint(h.ca.Source("/broker"), "/agent")
	must.Fail(t, must.Err(broker.NewClient("", e)), broker.SocketEnv)
	must.Fail(t, must.Err(broker.NewClient("/run/broker.sock", e)), "unix:///run/broker.sock")
	for _, address := range []string{"unix:///run/broker.sock", "tcp://broker.example.com:8443", "tcp://127.0.0.1:8000"} {
		c := must.Get(broker.NewClient(address, e))(t)
		must.Get(c.For(pod("web")))(t)
		err := must.Err(c.For(broker.Reference{PID: math.MaxInt32}))
		if strings.HasPrefix(address, "tcp:") {
			must.Fail(t, err, "Unix sockets only")
		} else if runtime.GOOS == "linux" {
			require.ErrorIs(t, err, fs.ErrNotExist)
		}
		uid := "0fa1b2c3-4d5e-6f70-8192-a3b4c5d6e7f8"
		for _, edit := range []func(*broker.Reference){
			func(r *broker.Reference) { *r = broker.Reference{} },
			func(r *broker.Reference) { *r = broker.Reference{PID: -1} },
			func(r *broker.Reference) { r.PID = 1 },
			func(r *broker.Reference) { r.Object.Group = "" },
			func(r *broker.Reference) { r.Object.Plural = "" },
			func(r *broker.Reference) { r.Object.Name = "" },
			func(r *broker.Reference) { r.Object.Name, r.Object.UID = "", uid },
			func(r *broker.Reference) { r.Object.Name = "../web" },
			func(r *broker.Reference) { r.Object.UID = uid[1:] },
		} {
			r := pod("web")
			edit(&r)
			must.Fail(t, must.Err(c.For(r)), "broker: ")
		}
		require.NoError(t, c.Close())
	}
	for want, r := range map[string]broker.Reference{
		"pid":              {PID: 1},
		"pods":             pod("web"),
		"deployments.apps": {Object: broker.Object{Plural: "deployments", Group: "apps", Name: "web"}},
	} {
		assert.Equal(t, want, r.Kind())
		assert.Contains(t, r.String(), want)
	}
}

// A name in the address is looked up.
func TestDialByName(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-7")
	h := newHub(t)
	h.serve(must.Get(net.Listen("tcp", "127.0.0.1:0"))(t))
	h.add("shop", "web", "/web")
	_, port := must.Get2(net.SplitHostPort(strings.TrimPrefix(h.address, "tcp://")))(t)
	c := must.Get(broker.NewClient("tcp://LOCALHOST:"+port, h.endpoint(h.ca.Source("/broker"), "/agent")))(t)
	defer c.Close()
	assert.Equal(t, "/web", pathOf(ready(t, c, pod("web"))))
}
