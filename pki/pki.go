// Package pki makes and reads what a workload identity is made of: keys, certificate signing
// requests, subject alternative names, certificates and PEM.
//
// A workload makes a key with [NewKey] and a request with [NewCSR]. Its CA reads the request with
// [ParseCSR] and answers with [Issuer.IssueLeaf]. What Envoy or a file needs is a [Secret]. Most
// programs use none of this themselves: package secretcache asks a CA and keeps the answer fresh,
// and package ca, below this one, is a whole CA.
//
// A CA makes a root with [NewRoot], or reads an existing CA with [ReadKeyCertBundle], which verifies it as a
// whole, revocation lists included. [Issuer.IssueCA] signs a CA below it, [Issuer.IssueCertificate] any
// other certificate, and [Issuer.Renew] gives a root a new certificate with its old key.
//
// # What it promises
//
// A name has a type. A subject alternative name is a [SAN] with a type, a [spiffe.ID] or a [net.IP];
// there are no lists in strings, so that a comma or a blank is never part of a name by accident, and
// a text that looks like an address never turns into one.
//
// A request is not authority. [Issuer.IssueLeaf] takes every name from its caller. Of a [CSR] a CA
// takes the public key; the names in it are what its sender asked for, and the only thing that its
// signature proves is that the sender holds the key.
//
// Reading is strict and bounded. Sizes are checked before anything is parsed, key strength before
// any signature is verified, and trailing bytes, duplicates and indefinite forms are refused. An
// alternative name of a kind that we do not know keeps its own type and its bytes.
//
// What is signed is right before it is signed. An X.509-SVID has one URI, which is a SPIFFE ID with
// a path; a CA certificate names a trust domain and no path; key usage and basic constraints are
// always there and critical; no leaf lives longer than its issuer, and no name is signed that the name
// constraints of the issuer forbid. Any other request gives a [*ProfileError] that names the
// rule, and no certificate.
//
// What was signed is right before it leaves. A signature that does not verify with the key in the CA's
// certificate is an error, whatever the key is made of and whatever it says of itself by then.
//
// The common name is for old readers only. It is empty unless asked for, at most 64 bytes, and never
// an identity.
//
// Keys are a [crypto.Signer], which may live in hardware, until the moment they are written, and are
// then always PKCS#8. PKCS#1 and SEC1 are read too. [Issuer], [KeyCertBundle] and [Secret] do not print
// their keys with any verb of package fmt, with log/slog or as JSON.
//
// # What it does not do
//
// It does not decide which caller gets which name: that is package ca. It does not verify peers: that is
// package spiffe. It reads no clock, no files but those of a file system that it is given, and writes
// none.
package pki
