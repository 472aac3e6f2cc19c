package caprogram

import (
	"flag"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
	"github.com/svidkit/svidkit/spiffe"
)

// pods are the flags of the signer for pods.
type pods struct {
	podcert.Options
	path   string
	signer *podcert.Signer // nil before Serve makes it
}

func (p *pods) define(fs *flag.FlagSet) {
	fs.StringVar(&p.SignerName, "pod-signer", "",
		"`name` of the signer, such as cluster.local/spiffe, whose certificates and roots pods have in volumes, "+
			"with -kubernetes; for Kubernetes 1.37 and later; empty: none")
	fs.StringVar(&p.path, "pod-id", "/ns/${namespace}/sa/${service-account}",
		"`path` of the identities of pods, which may also have ${pod}, ${pod-uid} and ${node}")
	fs.Float64Var(&p.NodeRate, "pod-node-rate", 200, "requests of pods per `second` and node; less than 0: no limit")
	fs.Float64Var(&p.NamespaceRate, "pod-namespace-rate", 1000,
		"requests of pods per `second` and namespace; less than 0: no limit")
}

// setPods makes the server sign for pods if the flags say so.
func (o *options) setPods(fs *flag.FlagSet) (err error) {
	p := &o.pods
	switch {
	case p.SignerName == "":
		return nil
	case !o.Kubernetes || o.ExternalCA != "":
		return program.Misused("-pod-signer: it is for a CA of its own with -kubernetes")
	case o.CA.DefaultTTL < time.Hour:
		return program.Misused("-default-ttl: with -pod-signer it is an hour at least, as Kubernetes takes no " +
			"certificate of less")
	}
	p.TrustDomain, p.TTL, p.APIServer = o.CA.TrustDomain, o.CA.DefaultTTL, fs.Lookup("kubernetes-api").Value.String()
	if strings.HasPrefix(p.APIServer, "http:") {
		p.HTTPClient = &http.Client{} // such as kubectl proxy, which authenticates us
	}
	if p.ID, err = template(p.TrustDomain, p.path); err != nil {
		return program.Misused("-pod-id: %w", err)
	}
	o.Pods = func(signer ca.Signer) (caserver.Part, error) {
		p.CA = signer
		if p.signer, err = podcert.New(p.Options); err != nil {
			return nil, program.Misused("-pod-signer: %w", err)
		}
		return p.signer, nil
	}
	return nil
}

// template returns a function for the ID of podcert.Options that makes an identity's path from a text with
// ${namespace}, ${service-account}, ${pod}, ${pod-uid} and ${node}, such as "/ns/${namespace}/sa/${service-account}".
// The error names the wrong part of the text.
func template(td spiffe.TrustDomain, path string) (func(spiffe.Pod) (spiffe.ID, error), error) {
	segments := strings.Split(path, "/")[1:]
	fill := func(p spiffe.Pod) (spiffe.ID, error) {
		all := strings.NewReplacer("${namespace}", p.Namespace, "${service-account}", p.ServiceAccount, "${pod}",
			p.Name, "${pod-uid}", p.UID, "${node}", p.Node)
		filled := make([]string, len(segments)) // each separately, so that one segment never becomes two
		for i, s := range segments {
			filled[i] = all.Replace(s)
		}
		return td.WorkloadID(filled...)
	}
	_, err := fill(spiffe.Pod{Namespace: "n", ServiceAccount: "a", Name: "p", UID: "u", Node: "m"})
	switch {
	case !strings.HasPrefix(path, "/"):
		return nil, fmt.Errorf("the template %.300q: it does not begin with a slash", path)
	case err != nil:
		return nil, fmt.Errorf("the template %.300q: %w", path, err)
	case !strings.Contains(path, "${"):
		return nil, fmt.Errorf("the template %.300q: all pods would have one identity; it has none of "+
			"${namespace}, ${service-account}, ${pod}, ${pod-uid} and ${node}", path)
	}
	return fill, nil
}
