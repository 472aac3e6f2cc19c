package podcert

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	labelTrustDomain = "k8s.spiffe.io/peer-trust-domain" // volumes select a bundle by it
	sequence         = "svidkit.github.io/sequence"      // annotation: the sequence number of the bundle
	maxBundle        = 1 << 20                           // bytes of PEM; the API server's limit
	newerFor         = 10 * time.Minute                  // how long another replica may be ahead
)

// clusterBundle is a ClusterTrustBundle.
type clusterBundle struct {
	Metadata kube.ObjectMeta `json:"metadata"`
	Spec     struct {
		SignerName  string `json:"signerName,omitempty"`
		TrustBundle string `json:"trustBundle,omitempty"`
	} `json:"spec"`
}

// bundles keeps the ClusterTrustBundles up to date.
type bundles struct {
	kubefollow.Keeper
	s       *Signer
	present kubefollow.Objects[clusterBundle]
	newer   map[string]time.Time // since when a bundle was newer than ours, by name; only behind uses it
}

func (b *bundles) init(s *Signer) {
	b.s, b.newer = s, make(map[string]time.Time)
	b.Keeper = kubefollow.Keeper{
		Name: "podcert: ClusterTrustBundle", Again: kubefollow.Again, Log: s.log, Behind: b.behind,
		Remedy: "bind a ClusterRole that may create and patch clustertrustbundles, and attest for the signer " +
			s.opts.SignerName + ", to the service account of this program",
	}
	b.present.Follower = kubefollow.Follower[clusterBundle]{
		API: s.api, Path: kube.Path("apis", group, "v1", "clustertrustbundles"), Kind: "ClusterTrustBundle",
		Query: url.Values{"fieldSelector": {"spec.signerName=" + s.opts.SignerName}},
	}
	b.present.Name, b.present.Keeper = func(o *clusterBundle) string { return o.Metadata.Name }, &b.Keeper
}

// bundles returns the bundle of the CA, and those of other trust domains.
func (s *Signer) bundles() (all []*spiffe.Bundle) {
	if own := s.opts.CA.Bundle(); own != nil {
		all = append(all, own)
	}
	if s.opts.Federated == nil {
		return all
	}
	if set := s.opts.Federated(); set != nil {
		for b := range set.All() {
			if b.TrustDomain() != s.opts.TrustDomain {
				all = append(all, b)
			}
		}
	}
	return all
}

// behind returns functions that write the objects that differ from our bundles.
func (b *bundles) behind() map[string]func(context.Context) error {
	present, writes := b.present.All(), make(map[string]func(context.Context) error)
	if present == nil {
		return nil
	}
	for _, bundle := range b.s.bundles() {
		want, err := b.object(bundle)
		if err != nil {
			b.Warn(bundle.TrustDomain().String(), err)
			continue
		}
		name := want.Metadata.Name
		old := present[name]
		switch {
		case old.Spec == want.Spec && old.Metadata.Labels[labelTrustDomain] == want.Metadata.Labels[labelTrustDomain]:
			delete(b.newer, name)
			continue
		case number(old) > number(want):
			if b.newer[name].IsZero() {
				b.newer[name] = time.Now()
			}
			if time.Since(b.newer[name]) < newerFor {
				continue
			}
		}
		// another replica's write in the meantime stays
		want.Metadata.ResourceVersion = old.Metadata.ResourceVersion
		path := b.present.Path
		writes[name] = func(ctx context.Context) error {
			if old.Metadata.Name == "" {
				return b.s.api.Create(ctx, path, want, nil)
			}
			return b.s.api.Patch(ctx, path+"/"+name, want)
		}
	}
	return writes
}

// object returns the object for a bundle in the cluster.
func (b *bundles) object(bundle *spiffe.Bundle) (o clusterBundle, err error) {
	td := bundle.TrustDomain().String()
	suffix := td
	// not every trust domain is a valid Kubernetes name
	if !kube.ValidName(td) || len(td)+len(b.s.opts.SignerName) > 250 {
		suffix = fmt.Sprintf("td-%x", sha256.Sum256([]byte(td)))[:35]
	}
	o.Metadata.Name = strings.ReplaceAll(b.s.opts.SignerName, "/", ":") + ":" + suffix
	o.Metadata.Labels, o.Metadata.Annotations = map[string]string{}, map[string]string{}
	if len(td) <= 63 { // the longest value of a label
		o.Metadata.Labels[labelTrustDomain] = td
	}
	if n, ok := bundle.Sequence(); ok {
		o.Metadata.Annotations[sequence] = strconv.FormatUint(n, 10)
	}
	o.Spec.SignerName, o.Spec.TrustBundle = b.s.opts.SignerName, string(bundle.MarshalPEM())
	switch n := len(o.Spec.TrustBundle); {
	case n == 0:
		return o, errors.New("the bundle has no root, and the API takes none without: delete the ClusterTrustBundle " +
			o.Metadata.Name + " if pods are not to trust the last one")
	case n > maxBundle:
		return o, fmt.Errorf("the bundle has %d bytes in PEM, and the API takes %d", n, maxBundle)
	}
	return o, nil
}

// number returns the sequence number of a bundle; 0 if it has none.
func number(o clusterBundle) uint64 {
	n, _ := strconv.ParseUint(o.Metadata.Annotations[sequence], 10, 64)
	return n
}
