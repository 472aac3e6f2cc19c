package istioagent

import (
	"net/http"
	"time"
)

// WithGoogle returns a configuration in which Google's services are at these addresses.
func (c Config) WithGoogle(service, exchange, metadata string) Config {
	c.urls.service, c.urls.exchange, c.urls.metadata = service, exchange, metadata
	return c
}

// WithOtherGone returns a configuration for which the server of another program may be away for so long.
func (c Config) WithOtherGone(d time.Duration) Config {
	c.otherGone = d
	return c
}

// WithKubernetes returns a configuration in a pod with this API server.
func (c Config) WithKubernetes(server string, client *http.Client) Config {
	c.InPod, c.kube.server, c.kube.client = true, server, client
	return c
}

// Timing returns the grace ratio and the jitter for package secretcache.
func (c Config) Timing() (grace, jitter float64) { return c.timing() }

// The rules for the files with roots.
var (
	CARootsFile  = caRootsFile
	XDSRootsFile = xdsRootsFile
)
