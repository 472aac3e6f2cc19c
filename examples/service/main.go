// Service is an HTTP server and a client that authenticate each other with an identity from the SPIFFE Workload API:
//
//	go run ./examples/service
//
// Without flags it is a demo that needs nothing else: it starts an agent in this process, with a certificate
// authority whose certificates live for four seconds, makes eight requests, each with a new handshake, and ends. The
// identity is renewed on the way, and no request fails.
//
// Beside a real agent, such as SPIRE's, the same code runs with
//
//	go run ./examples/service -socket unix:///run/spire/agent/public/api.sock
//
// or with the address in SPIFFE_ENDPOINT_SOCKET, until it is interrupted or has made -requests requests. If
// SPIFFE_CREDENTIAL_FOLDER names a directory, such as a volume that the kubelet keeps up to date, the identity comes
// from there, without an agent. With -url it calls another service instead of itself. With -health-addr
// 127.0.0.1:15026 it serves /ready, /live and /metrics; dashboard.json shows the metrics in Grafana. -algorithms and
// -require-mlkem say which keys and key exchanges it takes: see ../QUANTUM.md. After SIGTERM /ready says "draining" for
// the duration of -drain while requests are answered; then the service ends with its last request.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// options are the flags.
type options struct {
	socket     string
	folder     bool // the identity is in SPIFFE_CREDENTIAL_FOLDER
	url        string
	addr       string
	healthAddr string
	drain      time.Duration
	requests   int
	interval   time.Duration
	wait       time.Duration
	algorithms spiffe.Algorithms
	mlkem      bool
}

func main() {
	var o options
	flag.StringVar(&o.socket, "socket", os.Getenv(workloadapi.SocketEnv),
		"address of the Workload API (default: the files in SPIFFE_CREDENTIAL_FOLDER, or else a demo)")
	flag.StringVar(&o.url, "url", "", "server to ask, such as https://127.0.0.1:8443 (default: this one)")
	flag.StringVar(&o.addr, "addr", "127.0.0.1:0", "host and port of the server; port 0: a free one")
	flag.DurationVar(&o.drain, "drain", 3*time.Second,
		"how long requests are answered after a signal, while /ready says 503")
	flag.StringVar(&o.healthAddr, "health-addr", "",
		"host and port of /ready, /live and /metrics, such as 127.0.0.1:15026 (default: none)")
	flag.IntVar(&o.requests, "requests", -1,
		"how many requests to make; 0: without end; -1: 8 in the demo, and without end beside an agent")
	flag.DurationVar(&o.interval, "interval", 500*time.Millisecond, "time between two requests")
	flag.DurationVar(&o.wait, "wait", 30*time.Second, "how long to wait for an identity")
	flag.Func("algorithms", fmt.Sprintf("`kinds` of keys that peers may have, of %s (default %s)", spiffe.AnyAlgorithm(),
		o.algorithms), func(text string) (err error) {
		o.algorithms, err = spiffe.ParseAlgorithms(text)
		return err
	})
	flag.BoolVar(&o.mlkem, "require-mlkem", false,
		"refuse connections whose secrecy a quantum computer can break: the key exchange has to be X25519MLKEM768")
	flag.Parse()
	o.folder = o.socket == "" && os.Getenv("SPIFFE_CREDENTIAL_FOLDER") != ""
	if err := o.check(); err != nil {
		fmt.Fprintln(os.Stderr, "service:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := start(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "service:", err)
		os.Exit(1)
	}
}

// check validates the command line.
func (o *options) check() error {
	if flag.NArg() > 0 {
		return fmt.Errorf("%q is not understood: there are only flags", flag.Arg(0))
	}
	if o.interval <= 0 || o.wait <= 0 {
		return fmt.Errorf("-interval %v and -wait %v have to be more than 0", o.interval, o.wait)
	}
	if o.drain < 0 {
		return fmt.Errorf("-drain %v is negative", o.drain)
	}
	if _, _, err := net.SplitHostPort(o.addr); err != nil {
		return fmt.Errorf("-addr: %w", err)
	}
	if o.healthAddr != "" {
		if _, _, err := net.SplitHostPort(o.healthAddr); err != nil {
			return fmt.Errorf("-health-addr: %w", err)
		}
	}
	if o.socket != "" {
		if _, err := workloadapi.New(workloadapi.Config{Address: o.socket}); err != nil {
			return fmt.Errorf("-socket: %w", err)
		}
	}
	return nil
}

// start runs the service beside the agent that o names, or beside its own.
func start(ctx context.Context, o options, out io.Writer) error {
	if o.socket != "" || o.folder {
		o.requests = max(o.requests, 0)
		return run(ctx, o, out)
	}
	if o.requests < 0 {
		o.requests = 8
	}
	return withAgent(ctx, func(ctx context.Context, socket string) error {
		fmt.Fprintln(out, "demo: an agent of our own at", socket)
		o.socket = socket
		return run(ctx, o, out)
	})
}

// open waits for the identity from the Workload API or from a directory.
func open(ctx context.Context, o options, log *slog.Logger) (source.Source, error) {
	if o.folder {
		return filesource.Start(ctx, filesource.Config{Logger: log})
	}
	return workloadapi.Start(ctx, workloadapi.Config{Address: o.socket, Logger: log})
}

// run is the service. Only its beginning deals with identities.
func run(ctx context.Context, o options, out io.Writer) error {
	starting, stop := context.WithTimeout(ctx, o.wait)
	defer stop()
	level := slog.LevelWarn
	if o.algorithms != (spiffe.Algorithms{}) {
		level = slog.LevelInfo // it names the peers that are left without ML-DSA
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	src, err := open(starting, o, log)
	if err != nil {
		return err
	}
	defer src.Close()
	me, err := src.SVID()
	if err != nil {
		return err
	}
	handshakes := new(spiffetls.Metrics)
	server := &http.Server{
		Handler:        &fair{Handler: http.HandlerFunc(hello)},
		ReadTimeout:    10 * time.Second,
		WriteTimeout:   10 * time.Second,
		IdleTimeout:    5 * time.Minute,
		MaxHeaderBytes: 16 << 10,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: 100, MaxReceiveBufferPerConnection: 64 << 10, MaxReceiveBufferPerStream: 64 << 10,
		},
	}
	endpoint, err := spiffetls.New(spiffetls.Config{
		Self: src, Peers: src, Allow: spiffe.AllowMembersOf(me.ID().TrustDomain()), // colleagues, both ways
		Algorithms: o.algorithms, RequireMLKEM: o.mlkem, Metrics: handshakes, Logger: log,
	})
	if err != nil {
		return err
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		return err
	}
	transport, err := endpoint.Transport()
	if err != nil {
		return err
	}
	var draining atomic.Bool
	state, err := health.New(
		health.Part{Name: "identity", Source: src.(report.Reporter)},
		health.Part{Name: "tls", Source: handshakes},
		health.Part{Name: "service", Check: func() error {
			if draining.Load() {
				return errors.New("draining")
			}
			return nil
		}},
	)
	if err != nil {
		return err
	}

	// The rest is plain net/http.
	fmt.Fprintf(out, "identity: %s, until %s\n", me.ID(), me.NotAfter().UTC().Format(time.RFC3339))
	l, err := net.Listen("tcp", cmp.Or(o.addr, "127.0.0.1:0"))
	if err != nil {
		return fmt.Errorf("-addr: %w", err)
	}
	url := "https://" + l.Addr().String()
	fmt.Fprintln(out, "serving:", url)
	url = cmp.Or(o.url, url)
	var wg sync.WaitGroup
	defer wg.Wait()
	// The limit keeps one client from taking the others' descriptors.
	wg.Go(func() { _ = server.ServeTLS(unixsocket.Limit(l, 1, nil), "", "") })
	defer server.Close()
	if o.healthAddr != "" {
		l, err := net.Listen("tcp", o.healthAddr)
		if err != nil {
			return fmt.Errorf("-health-addr: %w", err)
		}
		fmt.Fprintf(out, "health: http://%s/ready, /live and /metrics\n", l.Addr())
		// These connections leave descriptors for the service's own and for the Workload API.
		serving, end := context.WithCancel(context.WithoutCancel(ctx)) // until the requests have ended
		defer end()
		plain := &unixsocket.Server{Listener: l, Handler: state, Logger: log}
		wg.Go(func() { _ = plain.Run(serving) })
	}
	transport.DisableKeepAlives = true // a new handshake for each request, to see the renewals
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	err = ask(ctx, client, url, o, out)
	// After a signal, /ready tells clients to send no more; requests until then are answered.
	if ctx.Err() != nil {
		draining.Store(true)
		fmt.Fprintf(out, "draining for %v\n", o.drain)
		time.Sleep(o.drain)
	}
	client.CloseIdleConnections() // one to this service itself, whose request was cancelled, would be waited for
	ending, end := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer end()
	return errors.Join(err, server.Shutdown(ending)) // answer requests under way
}

// hello answers with the ID of the client.
func hello(w http.ResponseWriter, r *http.Request) {
	peer, ok := spiffetls.PeerFromContext(r.Context())
	if !ok {
		http.Error(w, "no client identity", http.StatusForbidden) // not reached: the handshake requires one
		return
	}
	fmt.Fprintf(w, "hello %s", peer.ID())
}

// ask makes the requests until ctx is done, which is no error.
func ask(ctx context.Context, client *http.Client, url string, o options, out io.Writer) error {
	certificates := make(map[string]bool)
	n := 0
	for tick := time.Tick(o.interval); ctx.Err() == nil && (o.requests == 0 || n < o.requests); n++ {
		text, serial, err := get(ctx, client, url)
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			return err
		}
		certificates[serial] = true
		fmt.Fprintf(out, "request %d: %s, from a server with certificate %s\n", n+1, text, serial)
		select {
		case <-tick:
		case <-ctx.Done():
		}
	}
	fmt.Fprintf(out, "%d requests, %d certificates, no failure\n", n, len(certificates))
	return nil
}

func get(ctx context.Context, client *http.Client, url string) (text, serial string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err != nil {
		return "", "", err
	}
	serial = resp.TLS.PeerCertificates[0].SerialNumber.Text(16)
	return string(body), serial[:min(8, len(serial))], nil
}
