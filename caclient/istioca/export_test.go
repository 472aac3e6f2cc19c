package istioca

import (
	"crypto/x509"
	"time"
)

// ReadChain reads the texts of an answer.
func ReadChain(texts []string) (chain, roots []*x509.Certificate, err error) { return readChain(texts) }

// RetryInfo reads a google.rpc.RetryInfo.
func RetryInfo(b []byte) time.Duration { return retryInfo(b) }
