// Package agentapi is the protocol between a node's agent and the client in a pod, with a client.
package agentapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
)

// Held is the body of a refresh: the caller's identity.
type Held struct {
	Key  PEM `json:"keyPEM"`
	Cert PEM `json:"certPEM"`
}

// Given is an answer.
type Given struct {
	Token string `json:"ntoken"`
	Key   PEM    `json:"keyPEM"`
	Cert  PEM    `json:"certPEM"`
	CA    PEM    `json:"caCertPEM"`
}

// PEM is base64-encoded in JSON. Plain PEM is also accepted on input, as the original agent's documentation shows it.
type PEM []byte

// UnmarshalJSON implements [json.Unmarshaler].
func (p *PEM) UnmarshalJSON(data []byte) error {
	var s string
	if err := json.Unmarshal(data, &s); err != nil {
		return errors.New("not a string")
	}
	if len(s) > 5 && s[:5] == "-----" {
		*p = PEM(s)
		return nil
	}
	var b []byte
	if json.Unmarshal(data, &b) != nil {
		return errors.New("not base64") // without the text, which may be a key
	}
	*p = b
	return nil
}

// Handle returns the handle of the volume that is mounted at a path of the host: the HMAC-SHA256 of the path with the
// node's secret, in base64 for URLs. A pod proves itself with it to its node's agent. Athenz uses a bare SHA-256, but
// a user who may read pods knows each pod's UID, and so its path.
func Handle(secret []byte, mountPath string) string {
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write([]byte(mountPath))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// IsHandle reports whether s can be a handle. A handle is safe in a path.
func IsHandle(s string) bool {
	sum, err := base64.RawURLEncoding.Strict().DecodeString(s)
	return err == nil && len(sum) == sha256.Size && len(s) == 43
}
