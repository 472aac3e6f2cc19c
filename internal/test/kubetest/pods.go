package kubetest

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"slices"
	"strings"
	"time"
)

type podStatus struct {
	Conditions       []csrCondition `json:"conditions"`
	CertificateChain string         `json:"certificateChain"`
	NotBefore        *time.Time     `json:"notBefore"`
	BeginRefreshAt   *time.Time     `json:"beginRefreshAt"`
	NotAfter         *time.Time     `json:"notAfter"`
}

// terminal returns the one condition that ends a request.
func (s *podStatus) terminal() string {
	for _, c := range s.Conditions {
		if slices.Contains([]string{"Issued", "Denied", "Failed"}, c.Type) {
			return c.Type
		}
	}
	return ""
}

// checkPodCertificate holds the rules of PodCertificateRequests, as the API server of Kubernetes 1.37 has them:
// a status that ends the request is the last one, and a certificate is that of its times, at least an hour and
// at most what the request allows.
func checkPodCertificate(old, o object, subresource string) error {
	self, name := &resource{kind: "PodCertificateRequest", group: "certificates.k8s.io"}, o.text("metadata", "name")
	if old == nil {
		delete(o, "status")
		return nil
	}
	o["spec"] = old["spec"]
	if subresource == "" {
		return nil
	}
	var was, is podStatus
	if json.Unmarshal(mustJSON(old["status"]), &was) != nil || json.Unmarshal(mustJSON(o["status"]), &is) != nil {
		return failure(http.StatusBadRequest, "BadRequest", "the status cannot be decoded")
	}
	switch {
	case was.terminal() != "":
		return invalid(self, name, "status: Forbidden: immutable after PodCertificateRequest is issued, denied, "+
			"or failed")
	case is.terminal() != "Issued":
		if is.CertificateChain != "" || is.NotBefore != nil || is.NotAfter != nil || is.BeginRefreshAt != nil {
			return invalid(self, name, "status: Forbidden: a certificate without the condition Issued")
		}
		return nil
	case is.NotBefore == nil || is.NotAfter == nil || is.BeginRefreshAt == nil:
		return invalid(self, name, "status: Required value: times of the certificate")
	}
	block, _ := pem.Decode([]byte(is.CertificateChain))
	if block == nil {
		return invalid(self, name, "status.certificateChain: Invalid value: no PEM")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return invalid(self, name, "status.certificateChain: Invalid value: %v", err)
	}
	var spec struct {
		MaxExpirationSeconds int `json:"maxExpirationSeconds"`
	}
	_ = json.Unmarshal(mustJSON(o["spec"]), &spec)
	life := is.NotAfter.Sub(*is.NotBefore)
	switch {
	case !leaf.NotBefore.Equal(*is.NotBefore) || !leaf.NotAfter.Equal(*is.NotAfter):
		return invalid(self, name, "status.notBefore: Invalid value: not that of the leaf")
	case time.Since(*is.NotBefore).Abs() > 5*time.Minute:
		return invalid(self, name, "status.notBefore: Invalid value: must be within 5 minutes of the current time")
	case life < time.Hour || life > time.Duration(spec.MaxExpirationSeconds)*time.Second:
		return invalid(self, name, "status.notAfter: Invalid value: a lifetime of %v", life)
	case is.BeginRefreshAt.Before(is.NotBefore.Add(10*time.Minute)) ||
		is.BeginRefreshAt.After(is.NotAfter.Add(-10*time.Minute)):
		return invalid(self, name, "status.beginRefreshAt: Invalid value: must be 10 minutes after notBefore "+
			"and before notAfter")
	}
	return nil
}

// checkTrustBundle holds the rules of ClusterTrustBundles: the name begins with that of the signer, which does
// not change, and there is a CA certificate, none of them twice.
func checkTrustBundle(old, o object, _ string) error {
	self, name, signer := &resource{kind: "ClusterTrustBundle",
		group: "certificates.k8s.io"}, o.text("metadata", "name"), o.text("spec", "signerName")
	seen := map[string]bool{}
	for rest := []byte(o.text("spec", "trustBundle")); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil || !cert.IsCA || seen[string(block.Bytes)] {
			return invalid(self, name, "spec.trustBundle: Invalid value: not a CA certificate, or one twice")
		}
		seen[string(block.Bytes)] = true
	}
	switch {
	case !strings.HasPrefix(name, strings.ReplaceAll(signer, "/", ":")+":"):
		return invalid(self, name, "metadata.name: Invalid value: ClusterTrustBundle for signerName %q must be "+
			"named with its prefix", signer)
	case old != nil && old.text("spec", "signerName") != signer:
		return invalid(self, name, "spec.signerName: Invalid value: field is immutable")
	case len(seen) == 0:
		return invalid(self, name, "spec.trustBundle: Invalid value: at least one trust anchor must be provided")
	case len(o.text("spec", "trustBundle")) > 1<<20:
		return invalid(self, name, "spec.trustBundle: Too long: may not be more than 1048576 bytes")
	}
	return nil
}
