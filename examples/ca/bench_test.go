package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	istiowire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
)

var (
	long     = flag.Bool("long", false, "run the load test")
	loadRate = flag.Int("load-rate", 1200, "requests per second of the load test")
	loadTime = flag.Duration("load-time", 15*time.Second, "duration of the load test")
)

// load is a server with everything on, and what a client sends to it. The client's own work is little:
// the signing request was made before, and the answer is only looked at for its status.
type load struct {
	server *server
	token  string
	body   []byte
}

func newLoad(t testing.TB, more ...string) *load {
	t.Helper()
	s, _ := start(t, newConfig(t, t.TempDir(), append([]string{"-caller-rate", "0", "-linkerd-addr", "", "-bundle-addr", "", "-admin-addr", ""}, more...)...))
	msg, err := proto.Marshal(&istiowire.IstioCertificateRequest{Csr: newCSR(t)})
	require.NoError(t, err)
	frame := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg)))
	return &load{s, token(t, s, "demo/web"), append(frame, msg...)}
}

// empty serves the same TLS on another port, and answers with as many bytes as the CA without doing
// anything.
func (l *load) empty(t testing.TB, size int) net.Addr {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	require.NoError(t, err)
	chain, err := l.server.ca.Sign(t.Context(), ca.Request{CSR: csr, ID: l.server.c.ServerID, DNSNames: []string{"localhost"}})
	require.NoError(t, err)
	certificate := mustSVID(t, chain, key).TLSCertificate()
	answer := make([]byte, size)
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		_ = caserver.Serve(ctx, listener, caserver.ServeOptions{
			TLS: &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*certificate}},
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Trailer", "Grpc-Status")
				_, _ = w.Write(answer)
				w.Header().Set("Grpc-Status", "0")
			}),
		})
	}()
	t.Cleanup(func() { cancel(); <-over })
	return listener.Addr()
}

// client returns a client with a connection of its own.
func (l *load) client(t testing.TB) *http.Client {
	c := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: l.server.ca.Bundle().CertPool(), ServerName: "localhost", MinVersion: tls.VersionTLS13},
		ForceAttemptHTTP2: true,
	}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// send makes one request and returns the size of the answer.
func (l *load) send(c *http.Client, to net.Addr) (int, error) {
	req, err := http.NewRequest(http.MethodPost, "https://"+to.String()+istiowire.CreateCertificate, bytes.NewReader(l.body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	req.Header.Set("Authorization", "Bearer "+l.token)
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	at := resp.Trailer
	if len(at) == 0 { // a refusal has its status in the header
		at = resp.Header
	}
	if status := at.Get("Grpc-Status"); err == nil && status != "0" {
		err = fmt.Errorf("status %q %q", status, at.Get("Grpc-Message"))
	}
	return int(n), err
}

// BenchmarkRequest is a whole request over HTTP/2 and TLS on loopback: authenticated, signed, recorded
// on the disk. Beside it stands an answer of the same size by a handler that does nothing.
//
//	go test -run xxx -bench Request ./examples/ca
func BenchmarkRequest(b *testing.B) {
	for _, clients := range []int{1, 32} {
		for _, kind := range []string{"audit", "noaudit", "empty"} {
			b.Run(fmt.Sprintf("%d/%s", clients, kind), func(b *testing.B) {
				var more []string
				if kind != "audit" {
					more = []string{"-audit-log", "none"}
				}
				l := newLoad(b, more...)
				to := l.server.at.Istio.Addr()
				size, err := l.send(l.client(b), to)
				require.NoError(b, err)
				if kind == "empty" {
					to = l.empty(b, size)
				}
				all := make([]*http.Client, clients)
				for i := range all {
					all[i] = l.client(b)
					if _, err := l.send(all[i], to); err != nil { // the handshake
						b.Fatal(err)
					}
				}
				var left atomic.Int64
				left.Store(int64(b.N))
				b.ReportAllocs()
				b.ResetTimer()
				var wg sync.WaitGroup
				for _, c := range all {
					wg.Go(func() {
						for left.Add(-1) >= 0 {
							if _, err := l.send(c, to); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				wg.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
			})
		}
	}
}

// TestLoad sends requests at a steady rate, whether answers come or not, and tells how long they took
// from the moment at which they were due.
//
//	go test -v -run TestLoad ./examples/ca -long
func TestLoad(t *testing.T) {
	if !*long {
		t.Skip("this takes a while; -long runs it")
	}
	l := newLoad(t)
	const connections = 32
	clients := make([]*http.Client, connections)
	for i := range clients {
		clients[i] = l.client(t)
		_, err := l.send(clients[i], l.server.at.Istio.Addr())
		require.NoError(t, err)
	}
	runtime.GC()
	n := int(loadTime.Seconds() * float64(*loadRate))
	took := make([]time.Duration, n)
	errs := make([]error, n)
	gap := time.Second / time.Duration(*loadRate)
	var wg sync.WaitGroup
	begin := time.Now().Add(100 * time.Millisecond)
	for i := range n {
		due := begin.Add(time.Duration(i) * gap)
		time.Sleep(time.Until(due))
		wg.Go(func() {
			_, errs[i] = l.send(clients[i%connections], l.server.at.Istio.Addr())
			took[i] = time.Since(due)
		})
	}
	wg.Wait()
	var refused []time.Duration
	served := took[:0:0]
	for i, err := range errs { // that a slow machine sheds load is as it should be; nothing else may happen
		if err == nil {
			served = append(served, took[i])
			continue
		}
		require.ErrorContains(t, err, `status "8"`)
		refused = append(refused, took[i])
	}
	for kind, took := range map[string][]time.Duration{"served": served, "refused": refused} {
		slices.Sort(took)
		if n := len(took); n > 0 {
			at := func(part float64) time.Duration { return took[int(part*float64(n-1))].Round(10 * time.Microsecond) }
			t.Logf("%d of %d requests at %d/s with audit %s: p50 %v, p90 %v, p99 %v, p99.9 %v, longest %v",
				len(took), len(errs), *loadRate, kind, at(0.5), at(0.9), at(0.99), at(0.999), at(1))
		}
	}
	require.Len(t, audited(t, l.server.c), len(served)+connections+1, "one record for each certificate, ours included")
}
