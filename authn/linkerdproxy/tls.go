package linkerdproxy

import (
	"crypto/tls"
	"net/http"
)

// Endpoint is where a connection leads.
type Endpoint struct {
	Addr string // host:port

	// Identity is what the server has to prove: a DNS name, or a URI with a ServerName. Empty means a connection without TLS.
	Identity string

	// ServerName is the name that is asked for in the TLS handshake. Empty means Identity.
	ServerName string
}

// ServerConfig returns a configuration for the server side of the mesh, for connections with the server name of the
// workload. [PeerName] tells who the client is. Handshakes fail before there is a certificate and after it has expired.
func (id *Identity) ServerConfig() *tls.Config

// ClientConfig returns a configuration for connections to an endpoint that has an Identity.
func (id *Identity) ClientConfig(e Endpoint) (*tls.Config, error)

// PeerName returns the identity of a client that has presented a certificate in a handshake by [Identity.ServerConfig]: the
// first DNS name or URI of its certificate. It reports false for a client without one.
func PeerName(cs tls.ConnectionState) (name string, ok bool)

// Handler returns the handler for the admin port of a proxy: GET /ready, which is 503 while there is no valid certificate,
// GET /live, which is 503 once it has expired, and GET /metrics.
func (id *Identity) Handler() http.Handler
