package kubetest

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"
)

const maxSecret = 1 << 20 // bytes of the values of a secret

var dataKey = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)

// checkSecret holds the rules of secrets: base64, sizes, and what must not change.
func checkSecret(old, o object, _ string) error {
	name := o.text("metadata", "name")
	self := &resource{kind: "Secret"}
	data, _ := o["data"].(map[string]any)
	size := 0
	for k, v := range data {
		if v == nil {
			data[k], v = "", ""
		}
		s, ok := v.(string)
		raw, err := base64.StdEncoding.DecodeString(s)
		if !ok || err != nil {
			return failure(http.StatusBadRequest, "BadRequest",
				"Secret in version \"v1\" cannot be handled as a Secret: illegal base64 data in data.%s", k)
		}
		if !dataKey.MatchString(k) || k == "." || strings.HasPrefix(k, "..") {
			return invalid(self, name, "data[%s]: Invalid value: a valid config key must consist of "+
				"alphanumeric characters, '-', '_' or '.'", k)
		}
		size += len(raw)
	}
	if size > maxSecret {
		return invalid(self, name, "data: Too long: may not be more than %d bytes", maxSecret)
	}
	if o.text("type") == "" {
		o["type"] = "Opaque"
	}
	if old != nil && o.text("type") != old.text("type") {
		return invalid(self, name, "type: Invalid value: %q: field is immutable", o.text("type"))
	}
	return nil
}

// usages are those that a request may have.
var usages = []string{
	"signing", "digital signature", "content commitment", "key encipherment", "key agreement", "data " +
		"encipherment", "cert sign", "crl sign",
	"encipher only", "decipher only", "any", "server auth", "client auth", "code signing", "email " +
		"protection", "s/mime", "ipsec end system",
	"ipsec tunnel", "ipsec user", "timestamping", "ocsp signing", "microsoft sgc", "netscape sgc",
}

type csrSpec struct {
	Request           []byte   `json:"request"`
	SignerName        string   `json:"signerName"`
	ExpirationSeconds *int64   `json:"expirationSeconds"`
	Usages            []string `json:"usages"`
}

type csrCondition struct {
	Type   string `json:"type"`
	Status string `json:"status"`
}

// checkCSR holds the rules of certificate signing requests: who may change what, in which
// subresource.
func checkCSR(old, o object, subresource string) error {
	if old == nil {
		delete(o, "status")
		if err := checkCSRSpec(o); err != nil {
			return err
		}
		spec := o["spec"].(map[string]any)
		spec["username"] = "system:serviceaccount:kubetest:client"
		spec["groups"] = []any{"system:serviceaccounts", "system:serviceaccounts:kubetest", "system:authenticated"}
		o["status"] = map[string]any{}
		return nil
	}
	name := o.text("metadata", "name")
	self := &resource{kind: "CertificateSigningRequest"}
	o["spec"] = old["spec"]
	was, _ := old["status"].(map[string]any)
	is, _ := o["status"].(map[string]any)
	if subresource == "" {
		return nil // the status was put back by the store
	}
	before, err1 := conditions(was)
	after, err2 := conditions(is)
	if err1 != nil || err2 != nil {
		return failure(http.StatusBadRequest, "BadRequest", "status.conditions cannot be decoded")
	}
	types := map[string]bool{}
	for _, c := range after {
		if c.Type == "" || c.Status == "" || types[c.Type] {
			return invalid(self, name, "status.conditions: a type and a status are required, and each type may "+
				"occur once")
		}
		if slices.Contains([]string{"Approved", "Denied", "Failed"}, c.Type) && c.Status != "True" {
			return invalid(self, name, "status.conditions.status: Invalid value: %q: Approved, Denied and "+
				"Failed conditions must be \"True\"", c.Status)
		}
		types[c.Type] = true
	}
	had := map[string]bool{}
	for _, c := range before {
		had[c.Type] = true
	}
	for _, kept := range []string{"Approved", "Denied", "Failed"} {
		if had[kept] && !types[kept] {
			return invalid(self, name, "status.conditions: Forbidden: updates may not remove a condition of "+
				"type %q", kept)
		}
	}
	if types["Approved"] && types["Denied"] {
		return invalid(self, name, "status.conditions: Invalid value: Approved and Denied conditions are "+
			"mutually exclusive")
	}
	if is == nil {
		is = map[string]any{}
		o["status"] = is
	}
	if subresource == "approval" { // conditions and nothing else
		if v, ok := was["certificate"]; ok {
			is["certificate"] = v
		} else {
			delete(is, "certificate")
		}
		stamp(is)
		return nil
	}
	for _, decided := range []string{"Approved", "Denied"} {
		if types[decided] != had[decided] {
			return invalid(self, name, "status.conditions: Forbidden: updates may not add a condition of type "+
				"%q", decided)
		}
	}
	certificate, _ := is["certificate"].(string)
	if earlier, _ := was["certificate"].(string); earlier != "" && earlier != certificate {
		return invalid(self, name, "status.certificate: Forbidden: updates may not modify it")
	}
	if certificate != "" {
		raw, err := base64.StdEncoding.DecodeString(certificate)
		block, _ := pem.Decode(raw)
		if err != nil || block == nil || block.Type != "CERTIFICATE" {
			return invalid(self, name, "status.certificate: Invalid value: must contain one or more PEM blocks "+
				"of certificates")
		}
	}
	stamp(is)
	return nil
}

func checkCSRSpec(o object) error {
	name := o.text("metadata", "name")
	self := &resource{kind: "CertificateSigningRequest"}
	var spec csrSpec
	if json.Unmarshal(mustJSON(o["spec"]), &spec) != nil {
		return failure(http.StatusBadRequest, "BadRequest", "CertificateSigningRequest: the spec cannot be decoded")
	}
	block, rest := pem.Decode(spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(bytes.TrimSpace(rest)) > 0 {
		return invalid(self, name, "spec.request: Invalid value: PEM block type must be CERTIFICATE REQUEST")
	}
	if _, err := x509.ParseCertificateRequest(block.Bytes); err != nil {
		return invalid(self, name, "spec.request: Invalid value: not a certificate request")
	}
	domain, path, ok := strings.Cut(spec.SignerName, "/")
	if !ok || !subdomain.MatchString(domain) || path == "" || len(spec.SignerName) > 571 {
		return invalid(self, name, "spec.signerName: Invalid value: must be a fully qualified domain and path "+
			"of the form 'example.com/signer-name'")
	}
	if len(spec.Usages) == 0 {
		return invalid(self, name, "spec.usages: Required value: usages must be provided")
	}
	for i, u := range spec.Usages {
		if !slices.Contains(usages, u) || slices.Contains(spec.Usages[:i], u) {
			return invalid(self, name, "spec.usages[%d]: Invalid value: unknown or duplicate usage", i)
		}
	}
	if spec.ExpirationSeconds != nil && *spec.ExpirationSeconds < 600 {
		return invalid(self, name, "spec.expirationSeconds: Invalid value: %d: may not specify a duration less "+
			"than 600 seconds (10 minutes)", *spec.ExpirationSeconds)
	}
	return nil
}

func conditions(status map[string]any) (out []csrCondition, err error) {
	return out, json.Unmarshal(mustJSON(status["conditions"]), &out)
}

// stamp gives the conditions that have none the times at which they were set.
func stamp(status map[string]any) {
	list, _ := status["conditions"].([]any)
	for i, c := range list {
		m, ok := c.(map[string]any)
		if !ok {
			continue
		}
		now := time.Now().UTC().Format(time.RFC3339)
		m = maps.Clone(m)
		for _, f := range []string{"lastUpdateTime", "lastTransitionTime"} {
			if s, _ := m[f].(string); s == "" {
				m[f] = now
			}
		}
		list[i] = m
	}
}
