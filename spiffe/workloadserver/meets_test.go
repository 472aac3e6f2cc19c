package workloadserver_test

import (
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// What an agent is made of meets the interface and the options without adapters.
var (
	_ workloadserver.Provider = (*secretcache.Manager)(nil)
	_ workloadserver.Provider = (*workloadapi.Source)(nil)

	_ = []workloadserver.Options{
		{IssueJWTSVID: (*ca.Authority)(nil).IssueJWTSVID},
		{IssueJWTSVID: (*jwtsvid.Issuer)(nil).IssueJWTSVID},
		{ValidateJWTSVID: (*jwtsvid.Validator)(nil).ValidateJWTSVID},
		{ValidateJWTSVID: (*workloadapi.Client)(nil).ValidateJWTSVID},
		{IssueWITSVID: (*witsvid.Issuer)(nil).IssueWITSVID},
	}
)
