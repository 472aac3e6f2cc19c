package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/tlsalert"
)

// target is the destination of a request.
type target struct {
	endpoint
	proven bool   // the connection presents our certificate
	client string // the identity in l5d-client-id; "" for none

	// orig is the request's HTTP version before the client's proxy upgraded it to HTTP/2, "HTTP/1.1" or "HTTP/1.0",
	// with an absolute URL or not; "" without an upgrade.
	orig     string
	absolute bool

	body io.Closer // the server's body of the request
}

type targetKey struct{}

// inboundHandler forwards requests to the application.
func (p *proxy) inboundHandler(conns *connections) http.Handler {
	forward := p.reverse("inbound", conns)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		to := target{endpoint: endpoint{addr: p.cfg.application}}
		if s, ok := r.Context().Value(connKey{}).(*stream); ok && p.cfg.clientID {
			to.client = s.client
		}
		// A CONNECT stays HTTP/2: by HTTP/1 the connection to the application would become its tunnel, and be reused.
		if text, ok := strings.CutPrefix(r.Header.Get(origProto), "HTTP/1."); ok && r.ProtoMajor == 2 &&
			r.Method != http.MethodConnect {
			minor, form, _ := strings.Cut(text, ";")
			if minor = strings.TrimSpace(minor); minor == "0" || minor == "1" {
				to.orig, to.absolute = "HTTP/1."+minor, strings.TrimSpace(form) == "absolute-form"
			}
		}
		forward.ServeHTTP(w, stripped(r, to))
	})
}

// outboundHandler forwards requests of the application by their routes.
func (p *proxy) outboundHandler(conns *connections) http.Handler {
	forward := p.reverse("outbound", conns)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e, err := endpoint{}, errors.New("it is no host with a number for its port")
		if to := authority(r.Host); to != "" {
			e, err = p.cfg.route(r.Context(), to)
		}
		if p.cfg.identity == nil {
			e.identity = "" // so that no request can require one
		}
		if required := r.Header.Values(requireID); err == nil && required != nil &&
			(len(required) != 1 || required[0] != e.identity) {
			err = errors.New("the server there has another identity than the header l5d-require-id asks for")
		}
		if err != nil {
			p.fail("outbound", w, fmt.Errorf("no route to %.300q: %w", r.Host, err))
			return
		}
		to := target{endpoint: e}
		if e.identity != "" {
			// After the certificate has expired, open connections with it stay in use. New ones are made only if they
			// may go without one.
			_, err := p.cfg.identity.Credential()
			to.proven = err == nil || errors.Is(err, linkerdproxy.ErrExpired) && !p.cfg.anonymous
		}
		forward.ServeHTTP(w, stripped(r, to))
	})
}

// stripped returns r for a target, without headers that only proxies may set (l5d-*, except the hop count), and
// without an upgrade to another HTTP or to TLS: after an upgrade, further requests would pass unread.
func stripped(r *http.Request, to target) *http.Request {
	to.body = r.Body
	r = r.WithContext(context.WithValue(r.Context(), targetKey{}, to))
	r.Header = r.Header.Clone()
	for name := range r.Header {
		if strings.HasPrefix(strings.ToLower(strings.Map(hyphen, name)), "l5d-") && name != hops {
			delete(r.Header, name)
		}
	}
	for _, value := range r.Header.Values("Upgrade") {
		for name := range strings.SplitSeq(strings.ToLower(value), ",") {
			name, _, _ = strings.Cut(strings.Join(strings.Fields(name), ""), "/")
			if name == "h2c" || name == "h2" || name == "http" || name == "tls" {
				r.Header.Del("Upgrade")
			}
		}
	}
	return r
}

// hyphen returns the hyphen for characters that applications may read as one. Where headers become variables, as in
// CGI, servers replace it by an underscore, and some replace every character that is not a letter or a digit.
func hyphen(r rune) rune {
	if '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' {
		return r
	}
	return '-'
}

// reverse returns a handler that forwards requests to their target. It keeps its connections in conns.
func (p *proxy) reverse(direction string, conns *connections) http.Handler {
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			to := r.In.Context().Value(targetKey{}).(target)
			r.Out.URL.Scheme, r.Out.URL.Host = "http", to.pool()
			r.Out.Host = cmp.Or(r.In.Host, to.addr) // a client of HTTP/1.0 may have sent none
			// Set it here: the client's header Connection can remove earlier headers.
			if to.client != "" {
				r.Out.Header.Set(clientID, to.client)
			}
			r.Out.URL.RawQuery = strings.ReplaceAll(r.In.URL.RawQuery, " ", "%20") // the application judges it
			r.Out.URL.Opaque = written(r.In)
			if to.absolute {
				r.Out.URL.Opaque = "//" + r.Out.Host + cmp.Or(r.Out.URL.Opaque, r.In.URL.EscapedPath())
			}
			n, _ := strconv.Atoi(r.In.Header.Get(hops))
			r.Out.Header.Set(hops, strconv.Itoa(n+1))
			r.Out.Trailer = nil // a trailer could hold a header that stripped removes
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if v, ok := r.In.Header[name]; ok {
					r.Out.Header[name] = v
				}
			}
		},
		Transport:      roundTripper{p.newTransport(false, conns), p.newTransport(true, conns)},
		FlushInterval:  -1,
		ModifyResponse: answered,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() != nil { // the client has gone
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			p.fail(direction, w, err)
		},
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n, err := strconv.Atoi(cmp.Or(r.Header.Get(hops), "0")); err != nil || n < 0 || n >= maxHops {
			p.failed[direction].Inc()
			http.Error(w, "linkerd-proxy: "+direction+" request not forwarded: it has come through too many proxies",
				http.StatusLoopDetected)
			return
		}
		if r.Method == "PRI" || r.Method == http.MethodConnect && r.ProtoMajor == 1 {
			// The application would take the next bytes for the tunnel's, or for HTTP/2, but other requests follow on
			// this connection.
			w.Header().Set("Connection", "close")
			const says = "linkerd-proxy: %s request not forwarded: no other protocol begins here by %s"
			http.Error(w, fmt.Sprintf(says, direction, r.Method), http.StatusNotImplemented)
			return
		}
		if r.ProtoMajor == 1 && r.ContentLength != 0 && r.Header.Get("Expect") == "" && r.Header.Get("Upgrade") == "" {
			fullDuplex(forward, w, r)
			return
		}
		forward.ServeHTTP(w, r)
	})
}

// answered modifies an answer on its way to the client.
func answered(r *http.Response) error {
	r.Header.Del(origProto)
	// The client's proxy restores this version.
	if r.Request.Context().Value(targetKey{}).(target).orig != "" {
		r.Header.Set(origProto, fmt.Sprintf("HTTP/1.%d", r.ProtoMinor))
	}
	if c, ok := r.Body.(io.ReadWriteCloser); ok && r.StatusCode == http.StatusSwitchingProtocols {
		r.Body = &switched{c, time.AfterFunc(tunnelTime, func() { _ = c.Close() })}
	}
	return nil
}

// fullDuplex forwards an HTTP/1 request whose body may continue during the answer. Otherwise the server reads and
// closes the body when the answer begins, and the transport, which still reads it, drops the application's
// connection. It does not apply to "Expect: 100-continue", where the server leaves the body alone and a client may
// wait for the whole answer before it sends one, nor to upgrades, which have no body afterwards.
func fullDuplex(forward http.Handler, w http.ResponseWriter, r *http.Request) {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex()
	forward.ServeHTTP(w, r)
	_ = rc.Flush()
	// A server that finds the body open may panic (golang/go#68560), and parses the rest of a broken one as a
	// request.
	if r.Body.Close() != nil {
		panic(http.ErrAbortHandler)
	}
}

// written returns the request's path as the client wrote it if net/url would write it differently, and otherwise "".
func written(r *http.Request) string {
	path, _, _ := strings.Cut(r.RequestURI, "?")
	if path == r.URL.EscapedPath() || !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//") {
		return ""
	}
	// HTTP/2 allows these.
	if strings.ContainsFunc(path, func(c rune) bool { return c <= ' ' || c == '#' || c == 0x7f }) {
		return ""
	}
	return path
}

// fail answers a request that cannot be forwarded.
func (p *proxy) fail(direction string, w http.ResponseWriter, err error) {
	p.failed[direction].Inc()
	p.log.Warn("request not forwarded", direction, slog.Any("err", err))
	if direction == "inbound" { // the client is another workload
		err = errors.New("the application does not answer")
	}
	http.Error(w, "linkerd-proxy: "+direction+" request not forwarded: "+err.Error(), http.StatusBadGateway)
}

// pool returns the host under which net/http pools connections: targets have separate connections, and so have
// connections with and without our identity.
func (t target) pool() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %v", t.addr, t.identity, t.serverName, t.proven))
	return hex.EncodeToString(sum[:16]) + ".mesh:80"
}

// roundTripper sends a request by its HTTP version, 1 or 2, or by the version that it had at the client.
type roundTripper [2]*http.Transport

func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.ProtoMajor < 2 || req.Context().Value(targetKey{}).(target).orig != "" {
		return r[0].RoundTrip(req)
	}
	if req.Body != nil {
		// An answer of 300 and above, or one that ends early, stops the transport, which waits for its last Read of
		// the body. Close of ReverseProxy's body does not end a Read.
		req = req.WithContext(req.Context())
		req.Body = struct {
			io.Reader
			io.Closer
		}{req.Body, req.Context().Value(targetKey{}).(target).body}
	}
	return r[1].RoundTrip(req)
}

// newTransport returns a transport for HTTP/1, or for HTTP/2 with prior knowledge. It dials the target's address.
func (p *proxy) newTransport(http2 bool, conns *connections) *http.Transport {
	t := &http.Transport{
		Protocols:              new(http.Protocols),
		DisableCompression:     true,
		MaxIdleConns:           1000,
		MaxIdleConnsPerHost:    100,
		IdleConnTimeout:        idleOut,
		MaxResponseHeaderBytes: maxHeader,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 10 * time.Second},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			to := ctx.Value(targetKey{}).(target).endpoint
			if !http2 {
				return p.dial(ctx, to, conns, 1)
			}
			if err := conns.asks(to.addr); err != nil {
				return nil, err
			}
			c, err := p.dial(ctx, to, conns, 2) // the preface, and a request
			if err != nil || to.identity != "" {
				return c, err
			}
			return &sniffed{Conn: c, of: conns, addr: to.addr}, nil
		},
	}
	t.Protocols.SetHTTP1(!http2)
	t.Protocols.SetUnencryptedHTTP2(http2)
	return t
}

// dial connects to an endpoint, with the mesh's TLS if the endpoint has an identity. The first writes go through
// package tlsalert.
func (p *proxy) dial(ctx context.Context, e endpoint, conns *connections, first int32) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	if e.identity == "" {
		return conns.dial(ctx, e.addr, p.elsewhere)
	}
	config, err := p.cfg.identity.ClientConfig(e.identity, e.serverName)
	if err != nil {
		return nil, err
	}
	raw, err := conns.dial(ctx, e.addr, nil) // the inbound port of a proxy, possibly of this one
	if err != nil {
		return nil, err
	}
	c, err := tlsalert.Client(ctx, raw, config, first)
	if err != nil {
		return nil, fmt.Errorf("TLS with %q: %w", e.addr, err)
	}
	return c, nil
}
