package spiffe

import (
	"crypto"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/certs/certpem"
)

// ErrAlgorithm says that a key is of a kind that the [Algorithms] in force do not have.
var ErrAlgorithm = errors.New("the kind of key is not allowed")

// Algorithms are the kinds of keys that a [Verifier], a validator of tokens or a CA accepts. The zero value is the
// default, "ecdsa,rsa,ed25519". ML-DSA, which a quantum computer does not break, is accepted only where it is named,
// and only by programs built with Go 1.27 or later:
//
//	ecdsa,rsa,ed25519,ml-dsa-44,ml-dsa-65    while a trust domain moves to ML-DSA
//	ml-dsa-44,ml-dsa-65                      afterwards: no key that a quantum computer breaks proves anything
type Algorithms struct{ kinds uint8 }

var algorithmNames = []string{"ecdsa", "rsa", "ed25519", "ml-dsa-44", "ml-dsa-65"}

const classical = 1<<3 - 1 // the first three

// AnyAlgorithm returns all algorithms.
func AnyAlgorithm() Algorithms { return Algorithms{1<<len(algorithmNames) - 1} }

// ParseAlgorithms parses the output of [Algorithms.String]: names with commas between them, in any order. An unknown,
// missing or repeated name is an error.
func ParseAlgorithms(text string) (a Algorithms, err error) {
	for name := range strings.SplitSeq(text, ",") {
		i := slices.Index(algorithmNames, strings.TrimSpace(name))
		if i < 0 || a.kinds&(1<<i) != 0 {
			return Algorithms{}, fmt.Errorf("spiffe: invalid algorithms: %.40q is none of %s, or is there twice", name,
				AnyAlgorithm())
		}
		a.kinds |= 1 << i
	}
	return a, nil
}

// String returns the names in order, such as "ecdsa,rsa,ed25519".
func (a Algorithms) String() string {
	var names []string
	for i, name := range algorithmNames {
		if a.has(i) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

func (a Algorithms) has(i int) bool {
	if a.kinds == 0 {
		a.kinds = classical
	}
	return i >= 0 && a.kinds&(1<<i) != 0
}

// Check returns an error that wraps [ErrAlgorithm] unless a has the kind of key. It does not judge the size of the key.
func (a Algorithms) Check(key crypto.PublicKey) error {
	name := certpem.Kind(key)
	if a.has(slices.Index(algorithmNames, name)) {
		return nil
	}
	if name == "" {
		name = fmt.Sprintf("%T", key)
	}
	return fmt.Errorf("%w: %s is none of %s", ErrAlgorithm, name, a)
}
