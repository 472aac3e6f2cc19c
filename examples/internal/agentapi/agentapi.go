// Package agentapi is what the agent of a node and the client in a pod say to each other, and the client.
package agentapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
)

// Held is the body of a refresh: an identity that the caller has.
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

// PEM is base64 in JSON. On input, PEM itself is taken, too, which the original's documentation shows.
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
		return errors.New("not base64") // the text may be a key
	}
	*p = b
	return nil
}

// Handle returns the handle of the volume that is mounted at a path of the host: the HMAC-SHA256 of the path with a
// secret of the node, in base64 for URLs. It is what a pod proves itself with to the agent of its node. Athenz has a
// bare SHA-256; but a user who may read pods knows the UID of each, and so its path.
func Handle(secret []byte, mountPath string) string {
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write([]byte(mountPath))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// IsHandle reports whether s can be a handle, which is safe in a path.
func IsHandle(s string) bool {
	sum, err := base64.RawURLEncoding.Strict().DecodeString(s)
	return err == nil && len(sum) == sha256.Size && len(s) == 43
}
