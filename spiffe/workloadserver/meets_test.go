package workloadserver_test

import (
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// What an agent is made of meets the interfaces without adapters.
var (
	_ workloadserver.Provider     = (*secretcache.Manager)(nil)
	_ workloadserver.Provider     = (*workloadapi.Source)(nil)
	_ workloadserver.JWTIssuer    = (*ca.Authority)(nil)
	_ workloadserver.JWTValidator = (*jwtsvid.Validator)(nil)
	_ workloadserver.JWTValidator = (*workloadapi.Client)(nil)
)
