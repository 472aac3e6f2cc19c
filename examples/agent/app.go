package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
)

// prober is one of the application's probes, as the pod declared it before the injector pointed the kubelet at the
// agent.
type prober struct {
	HTTPGet *struct {
		Path, Scheme string
		Port         json.RawMessage
		HTTPHeaders  []struct{ Name, Value string }
	}
	TCPSocket *struct{ Port json.RawMessage }
	GRPC      *struct {
		Port    json.RawMessage
		Service string
	}
	TimeoutSeconds int64
}

const maxProbe = 60 // seconds; the kubelet is unlikely to wait longer

// timeout returns the probe's timeout: one second if it names none.
func (p prober) timeout() time.Duration {
	return time.Duration(min(max(p.TimeoutSeconds, 1), maxProbe)) * time.Second
}

// appProbes serves the application's probes, at the paths that the injector gave to the kubelet.
type appProbes struct {
	probers    map[string]prober
	host       string // where the application listens
	statusPort string // of the agent, with a leading colon
	dialer     net.Dialer
}

// configureApp reads the injector's annotations of the application.
func (p *proxy) configureApp() error {
	var app struct {
		Scrape, Path, Port string
		Targets            []struct{ Port, Path string }
	}
	app.Scrape = "false" // the default without the variable
	p.app = appProbes{host: getenv(p.environ, "INSTANCE_IP"), statusPort: fmt.Sprint(":", p.cfg.Envoy.StatusPort)}
	loopback := false
	for name, into := range map[string]any{
		"ISTIO_KUBE_APP_PROBERS": &p.app.probers, "ISTIO_PROMETHEUS_ANNOTATIONS": &app,
		"REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION": &loopback,
	} {
		if err := json.Unmarshal([]byte(cmp.Or(getenv(p.environ, name), "null")), into); err != nil {
			return program.Misused("environment variable %s: set it to JSON, as the injector writes it: %w", name, err)
		}
	}
	if ip := net.ParseIP(p.app.host); loopback || ip == nil {
		p.app.host = "localhost"
	} else if ip.To4() != nil { // the pod's network rules do not redirect connections from this source
		p.app.dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 6)}
	} else {
		p.app.dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP("::6")}
	}

	if p.envoy {
		p.pages = append(p.pages, p.admin("/stats/prometheus"))
	}
	if app.Scrape == "false" || p.role == "router" {
		return nil
	}
	if len(app.Targets) == 0 {
		app.Targets = append(app.Targets, struct{ Port, Path string }{app.Port, app.Path})
	}
	for _, t := range app.Targets {
		if ":"+strings.TrimLeft(t.Port, "0") == p.app.statusPort {
			return program.Misused("environment variable ISTIO_PROMETHEUS_ANNOTATIONS: port %s is that of the "+
				"agent; prometheus.io/port has to be the application's", t.Port)
		}
		path := strings.TrimPrefix(cmp.Or(t.Path, "/metrics"), "/")
		p.pages = append(p.pages, "http://localhost:"+cmp.Or(t.Port, "80")+"/"+path)
	}
	return nil
}

const (
	maxScrapes = 8                // of the application at the same time; one for each peer address
	scrapeTime = 30 * time.Second // within which a peer must read the pages
)

// serveMetrics serves the agent's metrics, followed by Envoy's and, in a sidecar, the application's. It streams them
// and leaves out unavailable pages. If a page fails halfway, it aborts the response, so that the peer notices.
func (p *proxy) serveMetrics(agent http.Handler) http.Handler {
	if len(p.pages) == 0 {
		return agent
	}
	scrapes := make(chan struct{}, maxScrapes)
	var of sync.Map // by peer address
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.ResponseHeaderTimeout = p.client.Timeout
	client := &http.Client{Transport: transport, Timeout: scrapeTime, CheckRedirect: p.client.CheckRedirect}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer, _, _ := net.SplitHostPort(r.RemoteAddr)
		if _, other := of.LoadOrStore(peer, true); !other {
			defer of.Delete(peer)
			select {
			case scrapes <- struct{}{}:
				defer func() { <-scrapes }()
				p.answerMetrics(w, r, agent, client)
				return
			default:
			}
		}
		w.Header().Set("Retry-After", "1")
		http.Error(w, "another request for the metrics is being answered; try again when it has ended",
			http.StatusServiceUnavailable)
	})
}

func (p *proxy) answerMetrics(w http.ResponseWriter, r *http.Request, agent http.Handler, client *http.Client) {
	agent.ServeHTTP(w, r)
	for _, page := range p.pages {
		out := &appended{Writer: w}
		if _, err := fetch(r.Context(), client, http.MethodGet, page, "", out); err != nil {
			p.cfg.Logger.Info("agent: metrics are missing", slog.String("from", page), slog.Any("err", err))
			if out.begun {
				panic(http.ErrAbortHandler)
			}
		}
	}
}

// appended is a page that follows another one.
type appended struct {
	io.Writer
	begun bool
}

func (a *appended) Write(p []byte) (int, error) {
	if !a.begun {
		a.begun = true
		if _, err := io.WriteString(a.Writer, "\n"); err != nil {
			return 0, err
		}
	}
	return a.Writer.Write(p)
}

func (a *appProbes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p, ok := a.probers[r.URL.Path]
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "the method is not GET or HEAD, which the kubelet's probes have", http.StatusMethodNotAllowed)
		return
	}
	if !ok {
		http.Error(w, "ISTIO_KUBE_APP_PROBERS has no such probe", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), p.timeout())
	defer cancel()
	address := func(port json.RawMessage) string { return net.JoinHostPort(a.host, strings.Trim(string(port), `"`)) }
	var err error
	switch {
	case p.HTTPGet != nil:
		url := strings.ToLower(cmp.Or(p.HTTPGet.Scheme, "http")) + "://" + address(p.HTTPGet.Port) + "/" +
			strings.TrimPrefix(p.HTTPGet.Path, "/")
		err = a.forward(w, r.WithContext(ctx), url, p)
	case p.GRPC != nil:
		err = a.check(ctx, address(p.GRPC.Port), p.GRPC.Service)
	case p.TCPSocket != nil:
		var conn net.Conn
		if conn, err = a.dialer.DialContext(ctx, "tcp", address(p.TCPSocket.Port)); err == nil {
			err = conn.Close()
		}
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// forward forwards a probe as the kubelet would send it: it does not verify certificates, and accepts a redirect. It
// passes on the probe's own headers, but not the client's identity headers, which any client could forge here.
func (a *appProbes) forward(w http.ResponseWriter, r *http.Request, url string, p prober) error {
	out, err := http.NewRequestWithContext(r.Context(), r.Method, url, nil)
	if err != nil {
		return err
	}
	out.Header = r.Header.Clone()
	maps.DeleteFunc(out.Header, func(name string, _ []string) bool {
		name = strings.ToLower(name)
		return strings.HasPrefix(name, "l5d-") || strings.HasPrefix(name, "x-envoy-") ||
			strings.HasSuffix(name, "authorization") || name == "x-forwarded-client-cert"
	})
	for _, h := range p.HTTPGet.HTTPHeaders {
		out.Header.Del(h.Name)
	}
	for _, h := range p.HTTPGet.HTTPHeaders {
		out.Header.Add(h.Name, h.Value)
	}
	if !strings.HasSuffix(r.Host, a.statusPort) { // and the Host header is the probe's
		out.Host = r.Host
	}
	transport := &http.Transport{
		DialContext: a.dialer.DialContext, DisableKeepAlives: true, ForceAttemptHTTP2: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the server is in the same pod, and we send no secret
	}
	resp, err := transport.RoundTrip(out)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 == 3 {
		resp.StatusCode = http.StatusOK
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, io.LimitReader(resp.Body, 10<<10)) // the kubelet reads no more
	return nil
}

// check calls the gRPC health service. The request has one field, and so has the answer: 1 if the application serves.
func (a *appProbes) check(ctx context.Context, address, service string) error {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{DialContext: a.dialer.DialContext, Protocols: protocols}
	defer transport.CloseIdleConnections()
	message := append(binary.AppendUvarint([]byte{0x0a}, uint64(len(service))), service...)
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/grpc.health.v1.Health/Check",
		bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Te", "trailers")
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err == nil && string(answer) != "\x00\x00\x00\x00\x02\x08\x01" {
		status := cmp.Or(resp.Trailer.Get("Grpc-Status"), resp.Header.Get("Grpc-Status"), "none")
		err = errors.New("the application does not serve (grpc-status " + status + ")")
	}
	return err
}
