package ra

import (
	"crypto/x509"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
)

const MaxLearned = maxLearned

// Accept tests an answer to r of the default signer, as Sign does.
func (a *RA) Accept(answer []byte, r ca.Request) ([]*x509.Certificate, error) {
	roots, err := a.roots()
	if err != nil {
		return nil, err
	}
	chain, _, err := a.accept(answer, &r, roots, time.Now())
	return chain, err
}

// Check tests a request, as Sign does before it sends anything.
func (a *RA) Check(r ca.Request) error {
	if f := a.check(&r); f != nil {
		return f
	}
	return nil
}

// Learn adds a root, as an answer with a leaf that ends then does.
func (a *RA) Learn(root *x509.Certificate, leafEnd time.Time) error { return a.learn(root, leafEnd) }
