package linkerdproxy

import (
	"context"
	"io"
	"log/slog"
	"net"
)

// ProxyConfig configures a [Proxy]. Identity is required.
type ProxyConfig struct {
	// Identity is that of the workload. The Proxy does not start and does not close it.
	Identity *Identity

	// Application is the address, host:port, of the workload that inbound connections are forwarded to.
	Application string

	// Route returns where an outbound request goes, by its Host, which may have a port. Its error is answered with 502. It
	// must be safe for concurrent use.
	Route func(ctx context.Context, authority string) (Endpoint, error)

	// ClientID tells the application the proven identity of the client, in the header l5d-client-id of each HTTP request.
	// Without it the application gets no such header. What a client sends under that name never arrives.
	ClientID bool

	// RequireTLS refuses inbound connections that the Proxy does not terminate TLS for. RequireIdentity refuses clients
	// without a certificate, too.
	RequireTLS, RequireIdentity bool

	// Logger gets connections that are refused and requests that cannot be forwarded: the first of each reason at once and a
	// count of the others every minute (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Proxy forwards connections. [NewProxy] makes one. It is safe for concurrent use.
type Proxy struct {
	cfg ProxyConfig
}

// NewProxy checks cfg and returns a Proxy. It does nothing else.
func NewProxy(cfg ProxyConfig) (*Proxy, error)

// ServeInbound accepts the connections of clients on l, and forwards them to the application, until ctx is done; then it
// returns nil. It takes over l and closes it.
func (p *Proxy) ServeInbound(ctx context.Context, l net.Listener) error

// ServeOutbound accepts HTTP/1 and HTTP/2 requests of the application on l, without TLS, and forwards them by Route, until
// ctx is done; then it returns nil. It takes over l and closes it.
func (p *Proxy) ServeOutbound(ctx context.Context, l net.Listener) error

// WriteMetrics writes metrics in the text format of Prometheus.
func (p *Proxy) WriteMetrics(w io.Writer) error
