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

// target is where a request goes.
type target struct {
	endpoint
	proven bool   // the connection has our certificate
	client string // the identity that the application is told; "" for none

	// orig is the version of HTTP that the request had before the client's proxy made HTTP/2 of it, "HTTP/1.1" or
	// "HTTP/1.0", with an absolute URL or not; "" if it did not.
	orig     string
	absolute bool

	body io.Closer // of the request, as the server has it
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
		// A CONNECT stays what it is: by HTTP/1 the connection to the application would be its tunnel, and be used
		// again.
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
			e.identity = "" // and so none that a request could require
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
			// Once the certificate has expired, open connections that have it are used, and no new ones are made,
			// unless those without one may be.
			_, err := p.cfg.identity.Credential()
			to.proven = err == nil || errors.Is(err, linkerdproxy.ErrExpired) && !p.cfg.anonymous
		}
		forward.ServeHTTP(w, stripped(r, to))
	})
}

// stripped returns r for a target, without what only proxies may say, which is each header l5d-* but the count of
// hops, and without what would end the reading of requests on the connection: after an upgrade to another HTTP, or to
// TLS, further ones would pass unread.
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

// hyphen returns the hyphen for what applications may take for it: with variables in the place of headers, as in CGI,
// servers have an underscore for it, and some of them for each character that is not a letter or a digit.
func hyphen(r rune) rune {
	if '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' {
		return r
	}
	return '-'
}

// reverse returns a handler that forwards requests to their target, as they are. Its connections are in conns.
func (p *proxy) reverse(direction string, conns *connections) http.Handler {
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			to := r.In.Context().Value(targetKey{}).(target)
			r.Out.URL.Scheme, r.Out.URL.Host = "http", to.pool()
			r.Out.Host = cmp.Or(r.In.Host, to.addr) // a client of HTTP/1.0 may have sent none
			// here, as the client says by its header Connection what is removed before
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
			r.Out.Trailer = nil // it could have what strip takes out
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
			p.failed.inc(direction)
			http.Error(w, "linkerd-proxy: "+direction+" request not forwarded: it has come through too many proxies",
				http.StatusLoopDetected)
			return
		}
		if r.Method == "PRI" || r.Method == http.MethodConnect && r.ProtoMajor == 1 {
			// The application would take what follows on its connection for that of the tunnel, or of HTTP/2, and
			// there other requests follow.
			w.Header().Set("Connection", "close")
			http.Error(w, "linkerd-proxy: "+direction+" request not forwarded: no other protocol begins here by "+r.Method,
				http.StatusNotImplemented)
			return
		}
		if r.ProtoMajor == 1 && r.ContentLength != 0 && r.Header.Get("Expect") == "" && r.Header.Get("Upgrade") == "" {
			fullDuplex(forward, w, r)
			return
		}
		forward.ServeHTTP(w, r)
	})
}

// answered changes an answer on its way to the client.
func answered(r *http.Response) error {
	r.Header.Del(origProto)
	// the client's proxy makes this version of the answer
	if r.Request.Context().Value(targetKey{}).(target).orig != "" {
		r.Header.Set(origProto, fmt.Sprintf("HTTP/1.%d", r.ProtoMinor))
	}
	if c, ok := r.Body.(io.ReadWriteCloser); ok && r.StatusCode == http.StatusSwitchingProtocols {
		r.Body = &switched{c, time.AfterFunc(tunnelTime, func() { _ = c.Close() })}
	}
	return nil
}

// fullDuplex forwards a request of HTTP/1 whose body may go on while it is answered. Without that the server reads
// and closes the body when the answer begins, and the transport, which still reads it, gives up the connection that
// the answer comes from. It is not for "Expect: 100-continue", where the server leaves the body alone and a client
// may wait for the end of the answer before it sends one, and not for upgrades, after which there is no body.
func fullDuplex(forward http.Handler, w http.ResponseWriter, r *http.Request) {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex()
	forward.ServeHTTP(w, r)
	_ = rc.Flush()
	// A server that finds the body open may panic (golang/go#68560), and takes what follows a broken one for a
	// request.
	if r.Body.Close() != nil {
		panic(http.ErrAbortHandler)
	}
}

// written returns the path of a request as the client has written it, where net/url would write it in another way;
// else "".
func written(r *http.Request) string {
	path, _, _ := strings.Cut(r.RequestURI, "?")
	if path == r.URL.EscapedPath() || !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//") {
		return ""
	}
	// HTTP/2 can have them
	if strings.ContainsFunc(path, func(c rune) bool { return c <= ' ' || c == '#' || c == 0x7f }) {
		return ""
	}
	return path
}

// fail answers a request that cannot be forwarded.
func (p *proxy) fail(direction string, w http.ResponseWriter, err error) {
	p.failed.inc(direction)
	p.log.Warn("request not forwarded", direction, slog.Any("err", err))
	if direction == "inbound" { // the client is another workload
		err = errors.New("the application does not answer")
	}
	http.Error(w, "linkerd-proxy: "+direction+" request not forwarded: "+err.Error(), http.StatusBadGateway)
}

// pool returns what net/http takes for a host: connections to one target are kept apart from those to others, and
// those that prove our identity from those that do not.
func (t target) pool() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %v", t.addr, t.identity, t.serverName, t.proven))
	return hex.EncodeToString(sum[:16]) + ".mesh:80"
}

// roundTripper sends a request by the version of HTTP that it came with, 1 or 2, or that it had at the client.
type roundTripper [2]*http.Transport

func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.ProtoMajor < 2 || req.Context().Value(targetKey{}).(target).orig != "" {
		return r[0].RoundTrip(req)
	}
	if req.Body != nil {
		// An answer of 300 and above, or one that ends early, stops the transport, which waits for its last Read of
		// the body. The body that ReverseProxy gives it has a Close that does not end one.
		req = req.WithContext(req.Context())
		req.Body = struct {
			io.Reader
			io.Closer
		}{req.Body, req.Context().Value(targetKey{}).(target).body}
	}
	return r[1].RoundTrip(req)
}

// newTransport returns a transport for HTTP/1, or for HTTP/2 from the first byte. The address that it dials is that
// of the target.
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

// dial connects to an endpoint, with the TLS of the mesh if it has an identity. The first writes are those of package
// tlsalert.
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
	raw, err := conns.dial(ctx, e.addr, nil) // the inbound port of a proxy, which may be this one
	if err != nil {
		return nil, err
	}
	c, err := tlsalert.Client(ctx, raw, config, first)
	if err != nil {
		return nil, fmt.Errorf("TLS with %q: %w", e.addr, err)
	}
	return c, nil
}
