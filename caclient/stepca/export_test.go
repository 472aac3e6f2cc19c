package stepca

import (
	"crypto/x509"
	"encoding/json"

	"github.com/svidkit/svidkit/pki"
)

// ReadAnswer reads the JSON of an answer to csr.
func ReadAnswer(csr *pki.CSR, body []byte) ([]*x509.Certificate, error) {
	var r response
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, err
	}
	return r.chain(csr)
}
