// Package recordtext writes the items of a record as text, with a version that shows whether the text is still the
// one that was written.
package recordtext

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// MaxBytes limits a text.
const MaxBytes = 2 << 20

// Encode returns the items as JSON, in base64 by name, and a version that no other text has: it is random, and ends
// with a hash of the text.
func Encode(items map[string][]byte) (version string, text []byte, err error) {
	text, err = json.Marshal(items)
	if err == nil && len(text) > MaxBytes {
		err = fmt.Errorf("the record would have %d bytes, the limit is %d", len(text), MaxBytes)
	}
	return rotation.RandomID() + "-" + sumOf(text), text, err
}

// Decode returns the items of a text. An error says that it is not the text of the version.
func Decode(version string, text []byte) (items map[string][]byte, err error) {
	if err = json.Unmarshal(text, &items); err == nil && !strings.HasSuffix(version, "-"+sumOf(text)) {
		err = errors.New("its contents are not what was saved")
	}
	return items, err
}

func sumOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}
