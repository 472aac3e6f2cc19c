package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/sds/istioagent"
)

// prober is how the kubelet would probe a container of the application, if the injector had not sent it here.
type prober struct {
	HTTPGet *struct {
		Path, Scheme string
		Port         json.RawMessage
	}
	TCPSocket *struct{ Port json.RawMessage }
	GRPC      *struct {
		Port    json.RawMessage
		Service string
	}
	TimeoutSeconds int
}

// appProbes answers for the application at the paths that the injector has given to the kubelet.
type appProbes struct {
	probers map[string]prober
	host    string
	dialer  net.Dialer
}

func newAppProbes(cfg istioagent.Config) (*appProbes, error) {
	a := &appProbes{host: cfg.Address}
	if cfg.Envoy.AppProbers != "" {
		if err := json.Unmarshal([]byte(cfg.Envoy.AppProbers), &a.probers); err != nil {
			return nil, misused("environment variable ISTIO_KUBE_APP_PROBERS: %w", err)
		}
	}
	if ip := net.ParseIP(a.host); cfg.Envoy.LocalProbes || ip == nil {
		a.host = "localhost"
	} else if ip.To4() != nil { // by this source the rules of the pod's network leave a connection alone
		a.dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 6)}
	} else {
		a.dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP("::6")}
	}
	return a, nil
}

func (a *appProbes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p, ok := a.probers[r.URL.Path]
	if !ok {
		http.Error(w, "ISTIO_KUBE_APP_PROBERS has no such probe", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(max(p.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	address := func(port json.RawMessage) string { return net.JoinHostPort(a.host, strings.Trim(string(port), `"`)) }
	var err error
	switch {
	case p.HTTPGet != nil:
		a.get(ctx, w, r, strings.ToLower(p.HTTPGet.Scheme), address(p.HTTPGet.Port), p.HTTPGet.Path)
		return
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

// get forwards a request, as the kubelet sends it: certificates are not verified, and a redirect is good.
func (a *appProbes) get(ctx context.Context, w http.ResponseWriter, r *http.Request, scheme, address, path string) {
	if scheme != "https" {
		scheme = "http"
	}
	out, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+address+"/"+strings.TrimPrefix(path, "/"), nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	out.Header = r.Header.Clone()
	if host := r.Header.Get("Host"); host != "" {
		out.Host = host
	}
	transport := &http.Transport{
		DialContext: a.dialer.DialContext, DisableKeepAlives: true, ForceAttemptHTTP2: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // it is the pod itself, and no secret is sent
	}
	resp, err := transport.RoundTrip(out)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 && resp.StatusCode < 400 {
		return
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, io.LimitReader(resp.Body, 10<<10))
}

// check asks the health service of gRPC, whose answer begins with a status of 1 if it serves.
func (a *appProbes) check(ctx context.Context, address, service string) error {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{DialContext: a.dialer.DialContext, Protocols: protocols}
	defer transport.CloseIdleConnections()
	var message []byte
	if service != "" {
		message = append(binary.AppendUvarint([]byte{0x0a}, uint64(len(service))), service...)
	}
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/grpc.health.v1.Health/Check", bytes.NewReader(body))
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
	if err == nil && (len(answer) < 7 || answer[5] != 0x08 || answer[6] != 1) {
		err = fmt.Errorf("the application does not serve (grpc-status %q)", resp.Trailer.Get("Grpc-Status")+resp.Header.Get("Grpc-Status"))
	}
	return err
}

// page keeps an answer of the agent, so that more can be added to it.
type page struct {
	bytes.Buffer
	header http.Header
	code   int
}

func (p *page) Header() http.Header  { return p.header }
func (p *page) WriteHeader(code int) { p.code = code }

// serveMetrics answers with the metrics of the agent, then those of the Envoy, and at a sidecar those of the application.
// What cannot be had is left out.
func (p *proxy) serveMetrics(agent http.Handler) (http.Handler, error) {
	sources := []string{p.admin("/stats/prometheus")}
	if text := p.cfg.Envoy.AppMetrics; text != "" && !p.router {
		var app struct {
			Scrape, Path, Port string
			Targets            []struct{ Port, Path string }
		}
		if err := json.Unmarshal([]byte(text), &app); err != nil {
			return nil, misused("environment variable ISTIO_PROMETHEUS_ANNOTATIONS: %w", err)
		}
		if len(app.Targets) == 0 {
			app.Targets = append(app.Targets, struct{ Port, Path string }{app.Port, app.Path})
		}
		for _, t := range app.Targets {
			switch t.Port {
			case "":
				t.Port = "80"
			case fmt.Sprint(p.cfg.Envoy.StatusPort):
				return nil, misused("environment variable ISTIO_PROMETHEUS_ANNOTATIONS: port %s is that of the agent; prometheus.io/port has to be the application's", t.Port)
			}
			if t.Path == "" {
				t.Path = "/metrics"
			}
			if app.Scrape != "false" {
				sources = append(sources, "http://localhost:"+t.Port+"/"+strings.TrimPrefix(t.Path, "/"))
			}
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		all := &page{header: w.Header(), code: http.StatusOK}
		agent.ServeHTTP(all, r)
		for _, source := range sources {
			if all.Len() > 0 && all.Bytes()[all.Len()-1] != '\n' {
				all.WriteByte('\n')
			}
			if _, err := fetch(r.Context(), p.client, http.MethodGet, source, "", all); err != nil && !errors.Is(err, context.Canceled) {
				p.log.Info("agent: metrics are missing", slog.String("from", source), slog.Any("err", err))
			}
		}
		w.Header().Del("Content-Length")
		w.WriteHeader(all.code)
		_, _ = w.Write(all.Bytes())
	}), nil
}
