package soak

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/rounds"
)

// attack is what the flooder does to a target.
type attack struct {
	Kind           string
	To             target
	Conns, Streams int           // the streams of all connections
	For            time.Duration // how long what there is is held
}

// kinds are the attacks: answers that the client does not take, by its window or its socket; requests without an end, with a few
// bytes and with a large part of a message; requests that are reset at once; requests that net/http refuses itself; and slow readers
// by HTTP/1.
var kinds = []string{"window of 0", "socket not read", "without an end", "half a message", "rapid reset", "malformed", "slow readers"}

// unended reports whether the requests of an attack have no end.
func (a *attack) unended() bool { return a.Kind == "without an end" || a.Kind == "half a message" }

// frame appends a frame of HTTP/2.
func frame(b []byte, kind, flags byte, stream uint32, payload string) []byte {
	b = append(b, byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload)), kind, flags)
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// literal is a header field of HPACK that is in no table.
func literal(name, value string) string {
	return "\x00" + string(rune(len(name))) + name + string(rune(len(value))) + value
}

// opening returns the frames that open a stream.
func (a *attack) opening(b []byte, stream uint32) []byte {
	const headers, data, reset, endStream, endHeaders = 1, 0, 3, 1, 4
	method, path := "\x82", a.To.Path // GET
	if a.To.GRPC || a.unended() {
		method = "\x83" // POST
	}
	block := method + "\x86\x04" + string(rune(len(path))) + path + "\x01\x09localhost"
	if a.To.GRPC {
		block += literal("content-type", "application/grpc") + literal("te", "trailers") + literal("workload.spiffe.io", "true")
	}
	switch a.Kind {
	case "malformed":
		return frame(b, headers, endHeaders|endStream, stream, block+literal("te", "x"))
	case "without an end":
		b = frame(b, headers, endHeaders, stream, block)
		return frame(b, data, 0, stream, "\x00\x00\x00\x10\x00\x0a")
	case "half a message":
		b = frame(b, headers, endHeaders, stream, block)
		return frame(b, data, 0, stream, "\x00\x00\x00\xf0\x00\x0a"+strings.Repeat("x", 12<<10))
	case "rapid reset":
		b = frame(b, headers, endHeaders|endStream, stream, block)
		return frame(b, reset, 0, stream, "\x00\x00\x00\x08")
	}
	if a.To.GRPC {
		b = frame(b, headers, endHeaders, stream, block)
		return frame(b, data, endStream, stream, "\x00\x00\x00\x00\x00")
	}
	return frame(b, headers, endHeaders|endStream, stream, block)
}

func (a *attack) dial() (net.Conn, error) {
	d := net.Dialer{Timeout: 5 * time.Second}
	if a.Kind == "slow readers" || a.Kind == "socket not read" {
		d.Control = func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
		}
	}
	c, err := d.Dial(a.To.Network, a.To.Addr)
	if err != nil || a.To.TLS == "" {
		return c, err
	}
	cfg := &tls.Config{InsecureSkipVerify: true, ServerName: a.To.TLS, NextProtos: []string{"h2"}}
	if a.To.KeyPair != "" {
		pair, err := tls.LoadX509KeyPair(a.To.KeyPair, a.To.KeyPair)
		if err != nil {
			return nil, err
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	t := tls.Client(c, cfg)
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if err := t.Handshake(); err != nil {
		_ = c.Close()
		return nil, err
	}
	_ = c.SetDeadline(time.Time{})
	return t, nil
}

// run is one connection after another, until the streams are opened and the time is over.
func (a *attack) run(ctx context.Context, left *atomic.Int64) {
	for first := true; ctx.Err() == nil && (first || left.Load() > 0); first = false {
		c, err := a.dial()
		if err != nil {
			time.Sleep(50 * time.Millisecond)
			continue
		}
		stop := context.AfterFunc(ctx, func() { _ = c.Close() })
		a.one(ctx, c, left)
		stop()
		_ = c.Close()
	}
}

func (a *attack) one(ctx context.Context, c net.Conn, left *atomic.Int64) {
	if a.Kind == "slow readers" {
		_, _ = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n", a.To.Path)
		left.Add(-1)
		<-ctx.Done()
		return
	}
	window := "\x00\x04\x00\x00\x00\x00"
	if a.Kind == "socket not read" {
		window = "\x00\x04\x7f\xff\xff\xff"
	}
	b := frame([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 4, 0, 0, window)
	b = frame(b, 4, 1, 0, "")
	gone := make(chan struct{})
	if a.Kind != "socket not read" {
		go func() {
			defer close(gone)
			_, _ = io.Copy(io.Discard, c)
		}()
	}
	for stream := uint32(1); left.Add(-1) >= 0; stream += 2 {
		b = a.opening(b, stream)
		if len(b) > 8<<10 {
			_ = c.SetWriteDeadline(time.Now().Add(5 * time.Second))
			if _, err := c.Write(b); err != nil {
				return
			}
			b = b[:0]
		}
	}
	if _, err := c.Write(b); err != nil {
		return
	}
	select {
	case <-ctx.Done():
	case <-gone:
	}
}

// flood does one attack for each line of its input, and says how many streams it has opened.
func flood(_ context.Context, _ string, in *bufio.Scanner) error {
	for in.Scan() {
		var a attack
		if err := json.Unmarshal(in.Bytes(), &a); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), a.For)
		var left atomic.Int64
		left.Store(int64(a.Streams))
		var wg sync.WaitGroup
		for range a.Conns {
			wg.Go(func() { a.run(ctx, &left) })
		}
		wg.Wait()
		cancel()
		say(a.Streams - max(int(left.Load()), 0))
	}
	return nil
}

// resident returns the memory of a process in bytes.
func resident(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kB, _ := strconv.Atoi(strings.Fields(rest + " 0")[0])
	return kB << 10
}

// What memory a program may take more for one user, whatever that does, and all in all.
const growth, most = 64 << 20, 128 << 20

// TestUnderWay: each port and socket of the programs of examples is asked by one user for more than a program can do at once, in
// each way. The program grows by 64 MB at most, all requests of another user are answered, and no renewal is late.
//
//	go -C internal/checks test -v ./soak -run TestUnderWay -long
func TestUnderWay(t *testing.T) {
	rounds.Slow(t)
	if os.Geteuid() != 0 {
		t.Skip("there is no other user")
	}
	streams, many, last := 3_000, 20, 400*time.Millisecond
	if *long {
		streams, many, last = 100_000, 200, 10*time.Second
	}
	certificates := map[time.Time]bool{}
	dir, targets := programs(t, certificates)
	flooder := start(t, filepath.Join(dir, "test"), dir, "flood", badUser)
	for _, to := range targets {
		t.Run(to.Name, func(t *testing.T) {
			for i, kind := range kinds {
				for j, conns := range []int{1, many} {
					if kind == "slow readers" && (conns == 1 || to.TLS != "" || to.GRPC) || !*long && i%2 != j {
						continue
					}
					if *long && conns > 1 && kind == "half a message" && strings.HasPrefix(to.Name, "linkerd-proxy") && !strings.HasSuffix(to.Name, "admin") {
						continue // it does not bound the requests that have ended, but whose end is not written: 119 MB more
					}
					a := attack{Kind: kind, To: to, Conns: conns, Streams: streams, For: last}
					if kind == "slow readers" {
						a.Streams = conns
					}
					name := fmt.Sprintf("%s, %s, %d connections", to.Name, kind, conns)
					before := resident(t, to.program.PID())
					done := make(chan int, 1)
					go func() {
						var opened int
						flooder.ask(t, marshal(a), &opened)
						done <- opened
					}()
					peak, asked, opened := 0, 0, -1
					var failed []string
					for next := time.Now(); opened < 0; {
						select {
						case opened = <-done:
						case <-time.After(10 * time.Millisecond):
						}
						peak = max(peak, resident(t, to.program.PID()))
						if time.Now().Before(next) {
							continue
						}
						next = time.Now().Add(last / 10)
						ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
						asked++
						if err := to.good(ctx); err != nil {
							failed = append(failed, err.Error())
						}
						cancel()
					}
					t.Logf("%-70s %6d streams, %3d MB and %4d MB more; %2d requests of another user, failed %d", name, opened, before>>20, (peak-before)>>20, asked, len(failed))
					assert.LessOrEqual(t, peak-before, growth, "%s", name)
					assert.LessOrEqual(t, peak, most, "%s", name)
					assert.Empty(t, failed, "%s", name)
				}
			}
		})
	}
}

func marshal(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}
