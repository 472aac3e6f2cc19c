package linkerdproxy

import (
	"time"

	"github.com/svidkit/svidkit/caclient"
)

// NewWith is New with another certifier.
func NewWith(cfg Config, service caclient.CA) (*Identity, error) { return newIdentity(cfg, service) }

// RefreshIn is refreshIn.
func (id *Identity) RefreshIn(left time.Duration, failures int) time.Duration {
	return id.refreshIn(left, failures)
}
