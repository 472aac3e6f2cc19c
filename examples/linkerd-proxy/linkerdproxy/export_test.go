package linkerdproxy

import (
	"net/netip"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/protofield"
)

// NewWith is New with another certifier.
func NewWith(cfg Config, service caclient.CA) (*Identity, error) { return newIdentity(cfg, service) }

// RefreshIn is refreshIn.
func (id *Identity) RefreshIn(left time.Duration, failures int) time.Duration {
	return id.refreshIn(left, failures)
}

// ReadUpdate reads a message of the destination service.
func ReadUpdate(message []byte) ([]Endpoint, error) {
	u := update{addrs: map[netip.AddrPort]Endpoint{}}
	if err := protofield.Read(message, u.read); err != nil {
		return nil, err
	}
	return u.endpoints()
}
