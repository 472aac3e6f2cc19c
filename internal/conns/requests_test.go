package conns_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// named is a listener whose connections have the peer that the test says.
type named struct {
	*memconn.Listener
	mu    sync.Mutex
	peers map[net.Conn]string
	next  atomic.Value
	held  atomic.Pointer[chan struct{}] // what the connections write waits for it, if there is one
	early atomic.Pointer[func()]        // is called for each request before the Server has it, if there is one
	meet  atomic.Pointer[func()]        // is called for each request that it has let in or refused, if there is one
}

// holds is a connection of a listener that holds what is written.
type holds struct {
	net.Conn
	of *named
}

func (h holds) Write(p []byte) (int, error) {
	if held := h.of.held.Load(); held != nil {
		<-*held
	}
	return h.Conn.Write(p)
}

func (n *named) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	if err == nil {
		c = holds{c, n}
		n.mu.Lock()
		defer n.mu.Unlock()
		n.peers[c], _ = n.next.Load().(string)
	}
	return c, err
}

func (n *named) peer(c net.Conn) conns.Peer {
	n.mu.Lock()
	defer n.mu.Unlock()
	return conns.Peer{Names: []string{n.peers[c]}}
}

// connect opens a connection of a peer.
func (n *named) connect(t *testing.T, peer string) net.Conn {
	t.Helper()
	n.next.Store(peer)
	c := must.Get(n.DialContext(t.Context(), "", ""))(t)
	t.Cleanup(func() { _ = c.Close() })
	synctest.Wait()
	return c
}

// served serves h on a listener until the test ends, and returns the reasons of what is refused.
func served(t *testing.T, h http.HandlerFunc, streams int) (*named, func() map[string]int) {
	t.Helper()
	n := &named{Listener: memconn.Listen(), peers: map[net.Conn]string{}}
	var mu sync.Mutex
	reasons := map[string]int{}
	call := func(p *atomic.Pointer[func()]) {
		if f := p.Load(); f != nil {
			(*f)()
		}
	}
	l := conns.Listen(n, conns.Options{Peer: n.peer, Refused: func(_ net.Conn, what string, err *limit.Error) {
		call(&n.meet)
		mu.Lock()
		defer mu.Unlock()
		assert.Equal(t, "request refused", what)
		reasons[err.Reason]++
	}})
	srv := l.Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		call(&n.meet)
		h(w, r)
	}), streams, slog.DiscardHandler)
	inner := srv.Handler
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		call(&n.early)
		inner.ServeHTTP(w, r)
	})
	done := make(chan error, 1)
	go func() { done <- srv.Serve(conns.Patient(l)) }()
	t.Cleanup(func() {
		require.NoError(t, srv.Close())
		<-done
		synctest.Wait()
		assert.Zero(t, conns.UnderWay(), "all is given back")
	})
	return n, func() map[string]int { mu.Lock(); defer mu.Unlock(); return reasons }
}

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

func frame(kind, flags byte, stream uint32, payload string) string {
	b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return string(binary.BigEndian.AppendUint32(b, stream)) + payload
}

// get opens a stream for a path of one letter, with more of HPACK.
func get(stream uint32, path, more string) string {
	return frame(1, 5, stream, "\x82\x86\x04\x02/"+path+"\x01\x01x"+more)
}

// h2 begins a connection whose client takes so much of each answer. It returns what the client got of each stream.
func h2(t *testing.T, c net.Conn, window uint32) (answers func() map[uint32]string) {
	t.Helper()
	go func() {
		_, _ = io.WriteString(c, preface+frame(4, 0, 0, "\x00\x04"+string(binary.BigEndian.AppendUint32(nil, window)))+frame(4, 1, 0, ""))
	}()
	var mu sync.Mutex
	got := map[uint32]string{}
	go func() {
		for r := bufio.NewReader(c); ; {
			head := make([]byte, 9)
			if _, err := io.ReadFull(r, head); err != nil {
				return
			}
			body := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
			if _, err := io.ReadFull(r, body); err != nil {
				return
			}
			mu.Lock()
			switch id := binary.BigEndian.Uint32(head[5:]); {
			case id == 0:
			case head[3] == 3:
				got[id] += "reset"
			case head[3] == 1 && body[0] == 0x88:
				got[id] += "200 "
			case head[3] == 1:
				got[id] += "refused"
			case head[3] == 0:
				got[id] += string(body)
			}
			mu.Unlock()
		}
	}()
	synctest.Wait()
	return func() map[uint32]string {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(got)
	}
}

// A peer that does not take its answers has two thirds of what there is, and one connection most of that; a second peer, and
// a second connection, are answered all the time. What the client does not take ends, and is given back.
func TestRequestsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, reasons := served(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }, 10_000)
		bad := n.connect(t, "a")
		answers := h2(t, bad, 0)
		const streams = 3000
		go func() {
			for i := range uint32(streams) {
				_, _ = io.WriteString(bad, get(2*i+1, "a", ""))
			}
		}()
		time.Sleep(10 * time.Second)
		share := conns.MaxWork * 2 / 3
		assert.InDelta(t, share*32/33, conns.UnderWay(), 2)
		refused := 0
		for _, answer := range answers() {
			if strings.HasPrefix(answer, "refused") {
				refused++
			}
		}
		assert.Equal(t, streams-conns.UnderWay(), refused)
		assert.Equal(t, map[string]int{conns.BusyCaller: refused}, reasons())

		second := n.connect(t, "a")
		of := h2(t, second, 1<<20)
		must.Get(io.WriteString(second, get(1, "a", "")))(t)
		assert.Equal(t, map[uint32]string{1: "200 hello"}, of(), "another connection of that peer")
		other := n.connect(t, "c")
		got := h2(t, other, 1<<20)
		for i := range uint32(100) {
			must.Get(io.WriteString(other, get(2*i+1, "a", "")))(t)
		}
		time.Sleep(time.Second) // a connection is read no faster than it is followed
		for id, answer := range got() {
			assert.Equal(t, "200 hello", answer, id)
		}
		assert.Len(t, got(), 100)

		time.Sleep(conns.AnswerTime)
		synctest.Wait()
		assert.Zero(t, conns.UnderWay(), "the time of the answers is over")
		reset := 0
		for _, answer := range answers() {
			if answer == "200 reset" {
				reset++
			}
		}
		assert.Equal(t, streams-refused, reset)
	})
}

// A request counts before its handler runs, whatever that waits for, and one with a long header for several.
func TestRequestsCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var inside, known atomic.Int32
		n, _ := served(t, func(w http.ResponseWriter, r *http.Request) {
			inside.Add(1)
			defer inside.Add(-1)
			switch r.URL.Path {
			case "/k":
				conns.Known(r.Context())
				assert.NoError(t, conns.Large(r.Context()))
				known.Add(1)
			case "/l":
				assert.NoError(t, conns.Large(r.Context()))
				assert.NoError(t, conns.Large(r.Context()))
			case "/r":
				defer conns.TakeAll(t)()
				assert.Error(t, conns.Large(r.Context()))
			}
			<-release
		}, 10_000)
		c := n.connect(t, "a")
		h2(t, c, 1<<20)
		must.Get(io.WriteString(c, get(1, "w", "")+get(3, "w", "")))(t)
		synctest.Wait()
		assert.Equal(t, 2, conns.UnderWay())
		must.Get(io.WriteString(c, get(5, "k", "")+get(7, "k", "")+get(9, "k", "")))(t)
		synctest.Wait()
		assert.EqualValues(t, 3, known.Load())
		assert.Equal(t, 2, conns.UnderWay(), "the handler counts the others")

		plain := n.connect(t, "b")
		must.Get(fmt.Fprintf(plain, "GET / HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n", strings.Repeat("x", 20<<10)))(t)
		synctest.Wait()
		assert.Equal(t, 2+3, conns.UnderWay())
		assert.EqualValues(t, 6, inside.Load())

		must.Get(io.WriteString(c, get(11, "l", "")))(t)
		synctest.Wait()
		assert.Equal(t, 2+3+2, conns.UnderWay(), "a large message")
		must.Get(io.WriteString(c, get(13, "r", "")))(t)
		synctest.Wait()
		close(release)
		synctest.Wait()
		assert.Zero(t, conns.UnderWay())
	})
}

// A request by TCP counts twice.
func TestRequestByTCP(t *testing.T) {
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	l := conns.Listen(inner, conns.Options{})
	counted := make(chan int, 1)
	srv := l.Server(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { counted <- conns.UnderWay() }), 10, slog.DiscardHandler)
	go func() { _ = srv.Serve(conns.Patient(l)) }()
	defer srv.Close()
	require.NoError(t, must.Get(http.Get("http://"+inner.Addr().String()))(t).Body.Close())
	assert.Equal(t, 2, <-counted)
}

// Of gRPC the refusal is a status, and by HTTP/1 the connection goes on.
func TestRequestRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := served(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(w, "hello")
		}, 100)
		back := conns.TakeAll(t)
		c := n.connect(t, "a")
		r := bufio.NewReader(c)
		ask := func() *http.Response {
			must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"))(t)
			resp := must.Get(http.ReadResponse(r, nil))(t)
			must.Get(io.Copy(io.Discard, resp.Body))(t)
			return resp
		}
		resp := ask()
		assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
		assert.Equal(t, "10", resp.Header.Get("Retry-After"))

		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		tr := &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return n.DialContext(ctx, "", "") }}
		defer tr.CloseIdleConnections()
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://x/S/M", strings.NewReader("x")))(t)
		req.Header.Set("Content-Type", "application/grpc")
		resp = must.Get(tr.RoundTrip(req))(t)
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		assert.Equal(t, "8", resp.Header.Get("Grpc-Status"))
		assert.Contains(t, resp.Header.Get("Grpc-Message"), "try again later")
		require.NoError(t, resp.Body.Close())

		back()
		assert.Equal(t, http.StatusOK, ask().StatusCode)
		time.Sleep(2 * conns.AnswerTime) // which is not that of the next answer
		must.Get(io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n"))(t)
		resp = must.Get(http.ReadResponse(r, nil))(t)
		assert.Equal(t, http.StatusContinue, resp.StatusCode)
		must.Get(io.WriteString(c, "x"))(t)
		resp = must.Get(http.ReadResponse(r, nil))(t)
		assert.Equal(t, http.StatusOK, resp.StatusCode)
	})
}

// A request counts until the end of its answer is written, also when its handler has returned, and one that is refused waits so long.
func TestRequestsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := served(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, 10_000)
		// Of two answers the first is on its way, and the other one waits for it.
		ask := func(peer string) (c net.Conn, release func()) {
			c = n.connect(t, peer)
			h2(t, c, 1<<20)
			held, second, both := make(chan struct{}), make(chan struct{}), new(sync.WaitGroup)
			both.Add(2)
			var came atomic.Int32
			meet := func() {
				last := came.Add(1) == 2
				both.Done()
				both.Wait()
				n.held.Store(&held)
				if last {
					<-second
				}
			}
			n.meet.Store(&meet)
			must.Get(io.WriteString(c, get(1, "a", "")+get(3, "a", "")))(t)
			synctest.Wait()
			n.meet.Store(nil)
			close(second)
			synctest.Wait()
			return c, func() {
				n.held.Store(nil)
				close(held)
				synctest.Wait()
			}
		}
		_, release := ask("a")
		assert.Equal(t, 1, conns.UnderWay())
		assert.Zero(t, conns.Waiting())
		release()
		assert.Zero(t, conns.UnderWay())

		back := conns.TakeAll(t)
		_, release = ask("b")
		assert.Equal(t, 1, conns.Waiting())
		release()
		assert.Zero(t, conns.Waiting())
		c, release := ask("c")
		assert.Equal(t, 1, conns.Waiting())
		require.NoError(t, c.Close())
		synctest.Wait()
		assert.Zero(t, conns.Waiting())
		release()
		assert.Zero(t, conns.Waiting())
		back()
	})
}

// A stream whose handler begins when its connection is closed waits like others.
func TestRequestOfClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := served(t, func(http.ResponseWriter, *http.Request) {}, 100)
		back := conns.TakeAll(t)
		defer back()
		late, refused := make(chan struct{}), make(chan struct{})
		early, meet := func() { <-late }, func() { <-refused }
		n.early.Store(&early)
		n.meet.Store(&meet)
		c := n.connect(t, "a")
		h2(t, c, 1<<20)
		must.Get(io.WriteString(c, get(1, "a", "")))(t)
		synctest.Wait()
		assert.Equal(t, 1, conns.Waiting())
		require.NoError(t, c.Close())
		synctest.Wait()
		assert.Zero(t, conns.Waiting())
		close(late)
		synctest.Wait()
		assert.Equal(t, 1, conns.Waiting())
		close(refused)
		synctest.Wait()
		assert.Zero(t, conns.Waiting())
	})
}

// A time that a handler has set is over after it without harm.
func TestDeadlineAfterHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := served(t, func(w http.ResponseWriter, _ *http.Request) {
			wire := http.NewResponseController(w)
			require.NoError(t, wire.SetReadDeadline(time.Now().Add(time.Second)))
			require.NoError(t, wire.SetWriteDeadline(time.Now().Add(time.Second)))
			_, _ = io.WriteString(w, "hello")
		}, 100)
		c := n.connect(t, "a")
		answers := h2(t, c, 1<<20)
		for _, stream := range []uint32{1, 3} {
			must.Get(io.WriteString(c, get(stream, "a", "")))(t)
			time.Sleep(2 * time.Second)
			assert.Equal(t, "200 hello", answers()[stream])
		}
	})
}

// What a stream has in memory goes with it, though a time that its handler has set as it ended is not over.
func TestDeadlineOfEnded(t *testing.T) {
	for name, set := range map[string]func(*http.ResponseController, time.Time) error{
		"read": (*http.ResponseController).SetReadDeadline, "write": (*http.ResponseController).SetWriteDeadline,
	} {
		t.Run(name, func(t *testing.T) {
			const streams = 2000
			var handled sync.WaitGroup
			handled.Add(streams)
			l := memconn.Listen()
			limited := conns.Listen(l, conns.Options{Peer: func(net.Conn) conns.Peer { return conns.Peer{} }})
			srv := limited.Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer handled.Done()
				<-r.Context().Done() // the client has reset the stream
				assert.NoError(t, set(http.NewResponseController(w), time.Now().Add(time.Hour)))
			}), 10_000, slog.DiscardHandler)
			go func() { _ = srv.Serve(conns.Patient(limited)) }()
			defer srv.Close()
			c := must.Get(l.DialContext(t.Context(), "", ""))(t)
			defer c.Close()
			go func() { _, _ = io.Copy(io.Discard, c) }()
			inUse := func() int64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return int64(m.HeapAlloc)
			}
			before := inUse()
			must.Get(io.WriteString(c, preface+frame(4, 0, 0, "")))(t)
			for i := range uint32(streams) {
				must.Get(io.WriteString(c, get(2*i+1, "a", "")+frame(3, 0, 2*i+1, "\x00\x00\x00\x08")))(t)
			}
			handled.Wait()
			assert.Eventually(t, func() bool { return inUse()-before < streams*300 }, time.Minute, 10*time.Millisecond) // bytes of each
		})
	}
}

// A client that does not read is not read: what it sends waits at its side. One whose streams get no handler is closed.
func TestPatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		n, _ := served(t, func(w http.ResponseWriter, _ *http.Request) {
			asked.Add(1)
			w.WriteHeader(http.StatusNoContent)
		}, 10_000)
		c := n.connect(t, "a")
		sent := make(chan int, 1)
		go func() {
			_, _ = io.WriteString(c, preface+frame(4, 0, 0, ""))
			i := 0
			for ; i < 200_000; i++ {
				if _, err := io.WriteString(c, get(uint32(2*i+1), "a", "")); err != nil {
					break
				}
			}
			sent <- i
		}()
		time.Sleep(30 * time.Second)
		assert.Less(t, int(asked.Load()), 100_000)
		assert.LessOrEqual(t, conns.UnderWay(), conns.MaxWork)
		require.NoError(t, c.Close())
		<-sent

		m := n.connect(t, "b")
		h2(t, m, 0)
		failed := make(chan error, 1)
		begun := time.Now()
		go func() {
			for i := 0; ; i++ {
				if _, err := io.WriteString(m, get(uint32(2*i+1), "a", "\x00\x02te\x01x")); err != nil { // which net/http answers itself
					failed <- err
					return
				}
			}
		}()
		require.Error(t, <-failed)
		assert.LessOrEqual(t, time.Since(begun), 15*time.Second)
		synctest.Wait()
		assert.Zero(t, conns.Waiting())
	})
}

// one is a listener of one connection.
type one struct {
	net.Listener
	c net.Conn
}

func (o one) Accept() (net.Conn, error) { return o.c, nil }

// Nothing is read while what was written is not taken.
func TestPatientRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		c := must.Get(conns.Patient(one{c: server}).Accept())(t)
		assert.Same(t, server, conns.Raw(c))
		go func() { _, _ = io.WriteString(c, "x") }()
		synctest.Wait()
		go func() { _, _ = io.WriteString(client, "y") }()
		var read atomic.Int32
		go func() {
			n, _ := c.Read(make([]byte, 1))
			read.Add(int32(n))
		}()
		synctest.Wait()
		assert.Zero(t, read.Load())
		must.Get(io.ReadFull(client, make([]byte, 1)))(t)
		synctest.Wait()
		assert.EqualValues(t, 1, read.Load())
	})
}

// A stream that has nothing to send for longer than a client has to take an answer lasts, with both versions of HTTP.
func TestQuietStream(t *testing.T) {
	t.Parallel()
	for name, only := range map[string]func(*http.Protocols){
		"HTTP/1.1": func(p *http.Protocols) { p.SetHTTP1(true) }, "HTTP/2": func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				inner := memconn.Listen()
				l := conns.Listen(inner, conns.Options{Peer: func(net.Conn) conns.Peer { return conns.Peer{Names: []string{"a"}} }})
				srv := l.Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					for n := range 3 {
						fmt.Fprintln(w, "event", n)
						w.(http.Flusher).Flush()
						time.Sleep(2 * time.Minute)
					}
				}), 10, slog.DiscardHandler)
				go func() { _ = srv.Serve(conns.Patient(l)) }()
				defer srv.Close()
				transport := &http.Transport{DialContext: inner.DialContext, Protocols: new(http.Protocols)}
				defer transport.CloseIdleConnections()
				only(transport.Protocols)
				resp := must.Get((&http.Client{Transport: transport}).Get("http://server.test/"))(t)
				defer resp.Body.Close()
				assert.Equal(t, "event 0\nevent 1\nevent 2\n", string(must.Get(io.ReadAll(resp.Body))(t)))
			})
		})
	}
}
