package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"time"
)

var (
	// ErrRenewalDue says that a certificate should be renewed now.
	ErrRenewalDue = errors.New("the certificate is due for renewal")

	// ErrExpired says that a certificate has come to its end. Errors that wrap it wrap [ErrRenewalDue] too.
	ErrExpired = errors.New("the certificate has expired")
)

// RenewIn returns how long to wait from now until cert should be renewed, which is when the last
// graceRatio of its lifetime begins: 0.2 leaves a fifth of it for trying. 0 means at its end, 1 at its
// beginning. A graceRatio that is not from 0 to 1 is an error, as is a certificate that ends before it
// begins.
//
// If the time has come, the result is 0 and an error that wraps [ErrRenewalDue], and if the certificate
// has expired, also [ErrExpired]. A wait of more than 292 years is cut down to that.
func RenewIn(cert *x509.Certificate, graceRatio float64, now time.Time) (wait time.Duration, err error) {
	if cert == nil {
		return 0, errors.New("pki: renewal: no certificate")
	}
	if !(graceRatio >= 0 && graceRatio <= 1) { // which NaN is not either
		return 0, fmt.Errorf("pki: renewal: grace ratio %v, want 0 to 1", graceRatio)
	}
	// A lifetime may be far longer than a Duration can be, so it is counted in seconds.
	lifetime := cert.NotAfter.Unix() - cert.NotBefore.Unix()
	if lifetime < 0 {
		return 0, fmt.Errorf("pki: renewal: certificate %.300q ends before it begins", cert.Subject)
	}
	if now.After(cert.NotAfter) {
		return 0, fmt.Errorf("pki: renewal: certificate %.300q, at %s: %w: %w", cert.Subject, cert.NotAfter.UTC().Format(time.RFC3339), ErrExpired, ErrRenewalDue)
	}
	whole, fraction := math.Modf(float64(lifetime) * graceRatio)
	due := time.Unix(cert.NotAfter.Unix()-int64(whole), int64(cert.NotAfter.Nanosecond())-int64(fraction*1e9))
	if wait = due.Sub(now); wait <= 0 {
		return 0, fmt.Errorf("pki: renewal: certificate %.300q, since %s: %w", cert.Subject, due.UTC().Format(time.RFC3339), ErrRenewalDue)
	}
	return wait, nil
}
