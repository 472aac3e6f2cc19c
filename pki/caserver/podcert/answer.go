package podcert

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// request is a PodCertificateRequest.
type request struct {
	Metadata kube.ObjectMeta `json:"metadata"`
	Spec     struct {
		SignerName, PodName, PodUID, ServiceAccountName, ServiceAccountUID, NodeName, NodeUID string

		MaxExpirationSeconds      int32
		StubPKCS10Request         []byte
		UnverifiedUserAnnotations map[string]string
	} `json:"spec"`
	Status status `json:"status"`
}

// status is the answer to a request.
type status struct {
	Conditions       []condition `json:"conditions,omitempty"`
	CertificateChain string      `json:"certificateChain,omitempty"` // PEM
	NotBefore        *time.Time  `json:"notBefore,omitempty"`
	BeginRefreshAt   *time.Time  `json:"beginRefreshAt,omitempty"`
	NotAfter         *time.Time  `json:"notAfter,omitempty"`
}

type condition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"`
	Reason             string    `json:"reason"`
	Message            string    `json:"message"`
	LastTransitionTime time.Time `json:"lastTransitionTime"`
}

// change is the patch that answers a request.
type change struct {
	Metadata kube.ObjectMeta `json:"metadata"`
	Status   *status         `json:"status"`
}

// The conditions, and the reasons that the API defines.
const (
	issued, denied, failed = "Issued", "Denied", "Failed"

	unsupportedKey = "UnsupportedKeyType"
	annotations    = "InvalidUnverifiedUserAnnotations"
)

// errOne is wrapped by errors that concern one request only.
var errOne = errors.New("this request")

func (r *request) name() string { return r.Metadata.Namespace + "/" + r.Metadata.Name }

// pod returns what the API server vouches for.
func (r *request) pod() spiffe.Pod {
	return spiffe.Pod{
		Namespace: r.Metadata.Namespace, ServiceAccount: r.Spec.ServiceAccountName,
		ServiceAccountUID: r.Spec.ServiceAccountUID,
		Name:              r.Spec.PodName, UID: r.Spec.PodUID, Node: r.Spec.NodeName, NodeUID: r.Spec.NodeUID,
	}
}

// path returns the path of the namespace's requests, or a path below it.
func (r *request) path(below ...string) string {
	return kube.Path(append([]string{"apis", group, "v1", "namespaces", r.Metadata.Namespace,
		"podcertificaterequests"}, below...)...)
}

// size estimates how many bytes a waiting request takes.
func (r *request) size() int {
	n := 1024 + len(r.Spec.StubPKCS10Request)
	for _, m := range []map[string]string{r.Spec.UnverifiedUserAnnotations, r.Metadata.Labels,
		r.Metadata.Annotations} {
		for k, v := range m {
			n += 64 + len(k) + len(v)
		}
	}
	return n
}

// answered reports whether the request has an answer; answers are final.
func (r *request) answered() bool {
	final := func(c condition) bool { return c.Type == issued || c.Type == denied || c.Type == failed }
	return r.Status.CertificateChain != "" || slices.ContainsFunc(r.Status.Conditions, final)
}

// conclude returns an answer without a certificate.
func conclude(kind, reason, format string, args ...any) (*status, error) {
	text := kube.OneLine(fmt.Sprintf(format, args...), 1024)
	return &status{Conditions: []condition{{kind, "True", reason, text, time.Now().UTC().Truncate(time.Second)}}}, nil
}

// answer returns the answer to a request. The error says why there is none yet.
func (s *Signer) answer(ctx context.Context, r *request) (*status, error) {
	for name := range r.Spec.UnverifiedUserAnnotations {
		return conclude(denied, annotations, "this signer takes no annotations, and there is %.300q: remove "+
			"it from the pod's volume", name)
	}
	csr, err := pki.ParseCSR(r.Spec.StubPKCS10Request)
	switch {
	case errors.Is(err, pki.ErrWeakKey):
		return conclude(denied, unsupportedKey, "%v; this signer takes ECDSAP256, ECDSAP384, ECDSAP521, "+
			"ED25519, RSA3072 and RSA4096", err)
	case err != nil:
		return conclude(failed, "InvalidRequest", "%v", err)
	}
	pod := r.pod()
	id, err := s.opts.ID(pod)
	if _, advice := retry.After(err); advice == retry.Again {
		return nil, fmt.Errorf("%w has no identity yet: %w", errOne, err)
	}
	if err != nil {
		return conclude(denied, "NoIdentity", "%v", err)
	}
	life := min(time.Duration(cmp.Or(r.Spec.MaxExpirationSeconds, 86400))*time.Second, s.opts.TTL)
	chain, err := s.opts.CA.Sign(ctx, ca.Request{
		CSR: csr, ID: id, TTL: life - backdate, Backdate: backdate,
		Pod: pod, PodRequest: r.Metadata.Name, LimitKey: pod.UID,
		Caller: "system:node:" + pod.Node, Method: "pod-certificate-request",
	})
	switch {
	case errors.Is(err, ca.ErrIdentity), errors.Is(err, ca.ErrCSR):
		return conclude(failed, "NotCertified", "%v", err)
	case errors.Is(err, ca.ErrTTL), errors.Is(err, ca.ErrGeneration):
		return nil, fmt.Errorf("%w is not signed: %w", errOne, err)
	case err != nil:
		return nil, err
	}
	return grant(id, chain)
}

// grant returns the answer with a certificate.
func grant(id spiffe.ID, chain []*x509.Certificate) (*status, error) {
	from, to := chain[0].NotBefore, chain[0].NotAfter
	if to.Sub(from) < time.Hour {
		return nil, fmt.Errorf("%w: %w: the CA signs until %s only, and the API server takes no certificate of less "+
			"than an hour: replace its root", errOne, ca.ErrTTL, to.UTC().Format(time.RFC3339))
	}
	// at least 17 minutes from either end: the API wants 10
	at := renew.RenewAt(time.Now(), from, to, 0.5, 0.2, rand.Float64()).UTC().Truncate(time.Second)
	answer, err := conclude(issued, "Issued", "%s", id)
	answer.CertificateChain = string(pki.MarshalCertificatesPEM(chain...))
	answer.NotBefore, answer.NotAfter, answer.BeginRefreshAt = &from, &to, &at
	return answer, err
}
