package workloadagent

import (
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// NewOf is New with another API server.
func NewOf(cfg Config, apiServer kube.Options) (*Agent, error) {
	cfg.apiServer = apiServer
	return New(cfg)
}

// KnowsPod reports whether the API server has told of a pod.
func KnowsPod(a *Agent, uid string) bool {
	_, found, _ := a.objects["pods"].Find(uid, nil)
	return found
}

// Parse returns what is wrong with a file that has data.
func Parse(data []byte, td spiffe.TrustDomain) error {
	_, err := parse(data, &Config{Node: "n1", TrustDomain: td,
		Broker: spiffe.MustParseID("spiffe://example.org/agent")})
	return err
}

// ParseWithoutBrokers is Parse by an agent that serves none.
func ParseWithoutBrokers(data []byte) error { return must.Err(parse(data, new(Config))) }

// Granted returns the paths of the IDs that a process has by a file. A namespace that is empty says that it is in no pod of which
// the cluster says anything.
func Granted(data []byte, peer unixsocket.Peer, process unixsocket.Process, namespace, account string, labels map[string]string) (paths []string, err error) {
	r, err := parse(data, &Config{Node: "n1"})
	if err != nil {
		return nil, err
	}
	for _, g := range r.granted(caller{
		peer, func() (unixsocket.Process, bool) { return process, true }, func() (p pod, ok bool) {
			p.Metadata.Namespace, p.Metadata.Labels, p.Spec.Account = namespace, labels, account
			return p, namespace != ""
		},
	}) {
		paths = append(paths, g.id.Path())
	}
	return paths, nil
}
