package token

import (
	"encoding/json"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// DecodeClaim decodes the claim of a payload, which was already parsed strictly, with exactly this name (RFC 7519
// section 10.1.1) into the value that into points to. It reports whether there is such a claim.
func DecodeClaim(payload []byte, name string, into any) (bool, error) {
	r := strictjson.NewReader(payload)
	for member := range r.Members() {
		if string(member) == name {
			from := r.Offset()
			r.Skip()
			return true, json.Unmarshal(payload[from:r.Offset()], into)
		}
	}
	return false, nil
}
