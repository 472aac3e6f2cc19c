package program

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Algorithms defines the flag -algorithms. usage says whose keys are meant.
func Algorithms(flags *flag.FlagSet, to *spiffe.Algorithms, usage string) {
	flags.Func("algorithms", fmt.Sprintf("the `kinds` of keys that %s, of %s (default %s)", usage, spiffe.AnyAlgorithm(),
		spiffe.Algorithms{}), func(text string) (err error) {
		*to, err = spiffe.ParseAlgorithms(text)
		return err
	})
}

// Keys parses the kinds of keys of a CA's roots or of identities: one, or two with a comma, of which one is of ML-DSA. In
// the result that one is last.
func Keys(text string) (string, error) {
	var classical, quantum []string
	for name := range strings.SplitSeq(strings.ReplaceAll(text, " ", ""), ",") {
		switch {
		case strings.HasPrefix(name, "ml-dsa"):
			quantum = append(quantum, name)
			if err := MLDSA(name); err != nil {
				return "", err
			}
		case slices.Contains([]string{"ecdsa-p256", "ecdsa-p384", "rsa-2048", "rsa-3072", "rsa-4096"}, name):
			classical = append(classical, name)
		default:
			return "", fmt.Errorf("%.40q is none of ecdsa-p256, ecdsa-p384, rsa-2048, rsa-3072, rsa-4096, ml-dsa-44 and "+
				"ml-dsa-65", name)
		}
	}
	if len(quantum) > 1 || len(classical) > 1 {
		return "", errors.New("of two, one is of ML-DSA, and the other is not")
	}
	return strings.Join(append(classical, quantum...), ","), nil
}

// MLDSA returns an error unless name is "ml-dsa-44" or "ml-dsa-65", and this program can make such keys.
func MLDSA(name string) error {
	if name != "ml-dsa-44" && name != "ml-dsa-65" {
		return fmt.Errorf("%.40q is neither ml-dsa-44 nor ml-dsa-65", name)
	}
	_, err := pki.NewKey(name)
	return err
}
