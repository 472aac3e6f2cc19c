//go:build !go1.27

package main

import (
	"bufio"
	"crypto/x509"
	"errors"
	"time"

	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func authority(*bufio.Scanner, time.Duration) error { return errors.New("this program has no ML-DSA") }

func configure(state string, _ *secretcache.Config, _ *spiffetls.Config) error {
	if state != "old" {
		return errors.New("this program has no ML-DSA")
	}
	return nil
}

func leaves(s *spiffe.SVID) []*x509.Certificate { return []*x509.Certificate{s.Leaf()} }
