package caconfig

import (
	"flag"
	"log/slog"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
)

// definePods defines the flags of the signer of pod certificates. ID and Federated of pods are set later.
func (c *Config) definePods(fs *flag.FlagSet) {
	fs.StringVar(&c.pods.SignerName, "pod-signer", "", "`name` of the signer, such as cluster.local/spiffe, that gives pods the certificates that they ask for in their manifests, and keeps "+
		"the roots in ClusterTrustBundles; for Kubernetes 1.37 and later, with -kubernetes; empty: none")
	fs.StringVar(&c.podID, "pod-id", "/ns/${namespace}/sa/${service-account}", "`path` of the identities for -pod-signer, which may also have ${pod}, ${pod-uid} and ${node}")
	fs.Float64Var(&c.pods.NodeRate, "pod-node-rate", 200, "requests for -pod-signer per `second` of each node; 0: no limit")
	fs.Float64Var(&c.pods.NamespaceRate, "pod-namespace-rate", 1000, "requests for -pod-signer per `second` of each namespace; 0: no limit")
}

// podOptions returns the options of the signer of pod certificates, without CA and Logger.
func (c *Config) podOptions() (podcert.Options, error) {
	o := c.pods
	o.TrustDomain, o.TTL, o.APIServer, o.HTTPClient = c.CA.TrustDomain, c.CA.DefaultTTL, c.cluster.API.APIServer, c.cluster.API.HTTPClient
	for _, rate := range []*float64{&o.NodeRate, &o.NamespaceRate} {
		if *rate == 0 {
			*rate = -1
		}
	}
	var err error
	o.ID, err = podcert.Template(o.TrustDomain, c.podID)
	return o, err
}

// servePods has pods get certificates by the options o of the server.
func (c *Config) servePods(a *Authority, o *caserver.Options, log *slog.Logger) {
	o.Pods = func(signer ca.Signer) (caserver.Pods, error) {
		pods, err := c.podOptions()
		if err != nil {
			return nil, misused("-pod-id: %w", err)
		}
		pods.CA, pods.Logger, pods.Federated = signer, log, c.Federated
		s, err := podcert.New(pods)
		if err != nil {
			return nil, misused("-pod-signer: %w", err)
		}
		a.Pods = s
		return s, nil
	}
}
