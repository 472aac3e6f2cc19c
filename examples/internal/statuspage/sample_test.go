package statuspage_test

import (
	"errors"
	"time"

	"github.com/svidkit/svidkit/spiffe/report"
)

// sample has something of everything.
func sample(now time.Time) report.Report {
	return report.Report{
		Identities: []report.Identity{
			{Name: "spiffe://example.org/retrying", NotBefore: now.Add(-40 * time.Minute), NotAfter: now.Add(20 * time.Minute), Renewal: now.Add(30 * time.Second), Failures: 3, Err: errCA},
			{Name: "spiffe://example.org/expired", NotBefore: now.Add(-2 * time.Hour), NotAfter: now.Add(-time.Hour)},
			{Name: "spiffe://example.org/missing", Err: errors.New("not registered")},
			{Name: "file-cert:/etc/certs/cert.pem~/etc/certs/key.pem", NotAfter: now.Add(90 * 24 * time.Hour)},
		},
		Upstreams: []report.Upstream{
			{Name: "https://istiod.istio-system.svc:15012", LastSuccess: now.Add(-2 * time.Minute), NextAttempt: now.Add(30 * time.Second), Failures: 3, Err: errCA},
			{Name: "/etc/certs", LastSuccess: now.Add(-3 * time.Second)},
			{Name: "unix:///run/spire/agent.sock", NextAttempt: now.Add(time.Second)},
		},
		Servers: []report.Server{{
			Protocol: "SDS", Streams: 3, Names: map[string]string{"default": "0123456789abcdef0123456789abcdef", "ROOTCA": "fedcba9876543210fedcba9876543210", "late": ""},
			Pushes: []report.Push{
				{Time: now.Add(-5 * time.Second), Names: []string{"default"}, Version: "0123456789abcdef0123456789abcdef", Streams: 2},
				{Time: now.Add(-4 * time.Second), NACK: true, Names: []string{"default"},
					Version: "0123456789abcdef0123456789abcdef", Streams: 1, Client: "sidecar~10.1.2.3~web-1.ns~ns.svc.cluster.local",
					Message: "KEY_VALUES_MISMATCH"},
			},
		}},
		Problems: []error{errors.New("an entry of a bundle was skipped")},
	}
}
