package nodeagent

import (
	"net/http"

	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
)

// CA is what an agent has of ZTS.
type CA = instanceCA

// NewWith is New with another ZTS.
func NewWith(cfg Config, ca func(ztsclient.Options) (CA, error)) (http.Handler, error) {
	return newAgent(cfg, ca)
}

// NewCA is newCA.
func NewCA(o ztsclient.Options) (CA, error) { return newCA(o) }
