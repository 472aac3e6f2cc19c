package workloadagent

import "github.com/svidkit/svidkit/spiffe"

// Parse returns what is wrong with a file that has data.
func Parse(data []byte, td spiffe.TrustDomain) error {
	_, err := parse(data, td)
	return err
}
