// Quantumpeer is a workload of TestQuantum: a server and a client in one state of a move to ML-DSA. It is also built with
// an older Go, and with an older tree, which has this file and without.go alone.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func main() {
	state := flag.String("state", "old", "")
	ca := flag.String("ca", "", "the URL of the CA; without it, this is the CA")
	path := flag.String("path", "/web", "of the ID")
	form := flag.String("form", "document", "of the bundle: document or der")
	pause := flag.Duration("pause", 200*time.Millisecond, "between two handshakes with a server")
	life := flag.Duration("life", 12*time.Second, "of the CA's certificates; new roots sign after a third of it")
	flag.Parse()
	go watch()
	var err error
	if *ca == "" {
		err = authority(bufio.NewScanner(os.Stdin), *life)
	} else {
		err = workload(*state, &client{*ca, *path, *form}, *pause)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "quantumpeer %s: %v\n", *state, err)
		os.Exit(1)
	}
}

func say(v any) { _ = json.NewEncoder(os.Stdout).Encode(v) }

var longest atomic.Int64

// watch notes for how long this process has stood still, at most.
func watch() {
	for last := time.Now(); ; {
		time.Sleep(50 * time.Millisecond)
		longest.Store(max(longest.Load(), int64(time.Since(last))))
		last = time.Now()
	}
}

func stood() time.Duration { return time.Duration(longest.Load()) }

var td = spiffe.MustParseTrustDomain("example.org")

// client is a caclient.CA.
type client struct{ url, path, form string }

func (c *client) Sign(ctx context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	der, err := c.do(ctx, http.MethodPost, "/sign?path="+url.QueryEscape(c.path), bytes.NewReader(csr.DER()))
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificates(der)
}

func (c *client) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	data, err := c.do(ctx, http.MethodGet, "/bundle?form="+c.form, nil)
	if err != nil {
		return nil, err
	}
	var b *spiffe.Bundle
	if c.form == "der" { // as Istio's API and the Workload API have it
		roots, err := x509.ParseCertificates(data)
		if err != nil {
			return nil, err
		}
		if b, err = spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: roots, RefreshHint: time.Second}); err != nil {
			return nil, err
		}
	} else if b, err = spiffe.ParseBundle(td, data); err != nil {
		return nil, err
	}
	return spiffe.NewBundleSet(b)
}

func (c *client) do(ctx context.Context, method, path string, body io.Reader) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.url+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, data)
	}
	return data, err
}

// seen is what a client has seen of a server.
type seen struct {
	Keys    map[string]int // handshakes by the algorithms of the server's key and, as the server says, of the client's
	Resumed int
	Failed  int
	Errors  []string
}

// status is what a workload says of itself.
type status struct {
	Servers map[string]*seen
	Metrics string
	Roots   int               // in its bundle
	Issuers map[string]string // of its certificates: the algorithm of the signature, by that of the key
	Stood   time.Duration
}

type work struct {
	mu      sync.Mutex
	servers map[string]*seen
	stop    map[string]context.CancelFunc
	ended   map[string]chan struct{}
	client  *spiffetls.Endpoint
}

func workload(state string, ca *client, pause time.Duration) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	config := secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org" + ca.path), CA: ca, Timeout: 2 * time.Second}
	var metrics spiffetls.Metrics
	tlsConfig := spiffetls.Config{Allow: spiffe.AllowMembersOf(td), Metrics: &metrics, HandshakeTimeout: time.Minute}
	if err := configure(state, &config, &tlsConfig); err != nil {
		return err
	}
	m, err := secretcache.Start(ctx, config)
	if err != nil {
		return err
	}
	defer m.Close()
	tlsConfig.Self, tlsConfig.Peers = m, m
	e, err := spiffetls.New(tlsConfig)
	if err != nil {
		return err
	}
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	l, err := e.Listener(inner)
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if conn.(*tls.Conn).HandshakeContext(ctx) == nil {
					fmt.Fprintln(conn, conn.(*tls.Conn).ConnectionState().PeerCertificates[0].PublicKeyAlgorithm)
				}
			}()
		}
	}()
	say(inner.Addr().String())

	w := &work{servers: map[string]*seen{}, stop: map[string]context.CancelFunc{}, ended: map[string]chan struct{}{}, client: e}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		switch words[0] {
		case "add": // NAME ADDRESS
			w.add(ctx, words[1], words[2], pause)
			say("added")
		case "drop": // NAME
			w.mu.Lock()
			stop, ended := w.stop[words[1]], w.ended[words[1]]
			w.mu.Unlock()
			stop()
			<-ended
			say("dropped")
		case "meet": // ADDRESS
			s := &seen{Keys: map[string]int{}}
			w.note(s, w.once(ctx, words[1], nil, s))
			say(s)
		case "status":
			var text bytes.Buffer
			if err := metrics.Report().Metrics(&text); err != nil {
				return err
			}
			st := status{Metrics: text.String(), Issuers: map[string]string{}, Stood: stood()}
			if b, err := m.Bundle(td); err == nil {
				for range b.X509Authorities() {
					st.Roots++
				}
			}
			svid, err := m.SVID()
			if err != nil {
				return err
			}
			for _, leaf := range leaves(svid) {
				st.Issuers[leaf.PublicKeyAlgorithm.String()] = leaf.SignatureAlgorithm.String()
			}
			w.mu.Lock()
			st.Servers = w.servers
			say(st)
			w.mu.Unlock()
		default:
			return errors.New("unknown command " + words[0])
		}
	}
	return nil
}

// add makes connections to a server until it is dropped, of which each second one may resume a session.
func (w *work) add(ctx context.Context, name, addr string, pause time.Duration) {
	ctx, cancel := context.WithCancel(ctx)
	s, ended := &seen{Keys: map[string]int{}}, make(chan struct{})
	w.mu.Lock()
	w.servers[name], w.stop[name], w.ended[name] = s, cancel, ended
	w.mu.Unlock()
	go func() {
		defer close(ended)
		sessions := tls.NewLRUClientSessionCache(4)
		for i := 0; ctx.Err() == nil; i++ {
			var cache tls.ClientSessionCache
			if i%2 == 1 {
				cache = sessions
			}
			w.note(s, w.once(context.WithoutCancel(ctx), addr, cache, s))
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	}()
}

func (w *work) note(s *seen, err error) {
	if err == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s.Failed++
	if len(s.Errors) < 5 {
		s.Errors = append(s.Errors, time.Now().Format("15:04:05.000 ")+err.Error())
	}
}

// once makes a connection, reads a line, and notes what both sides presented.
func (w *work) once(ctx context.Context, addr string, sessions tls.ClientSessionCache, s *seen) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	below, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer below.Close()
	_ = below.SetDeadline(time.Now().Add(2 * time.Minute))
	var conn *tls.Conn
	if sessions == nil {
		conn, err = w.client.Client(ctx, below, addr)
	} else {
		config, failed := w.client.ClientConfig()
		if failed != nil {
			return failed
		}
		config.ClientSessionCache, config.ServerName = sessions, "server"
		conn = tls.Client(below, config)
		err = conn.HandshakeContext(ctx)
	}
	if err != nil {
		return err
	}
	own, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	cs := conn.ConnectionState()
	w.mu.Lock()
	defer w.mu.Unlock()
	s.Keys[cs.PeerCertificates[0].PublicKeyAlgorithm.String()+" "+strings.TrimSpace(own)]++
	if cs.DidResume {
		s.Resumed++
	}
	return nil
}
