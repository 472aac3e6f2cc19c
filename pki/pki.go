// Package pki makes and reads the parts of a workload identity: keys, certificate signing requests, subject
// alternative names, certificates and PEM.
//
// A workload makes a key with [NewKey] and a request with [NewCSR]. Its CA reads the request with [ParseCSR] and
// answers with [Issuer.Issue]. A [Secret] holds what Envoy or a file needs. Most programs use none of this themselves:
// package secretcache asks a CA and keeps the answer fresh, and package ca, below this one, is a whole CA.
//
// A CA makes a root with [NewRoot], or reads an existing CA and its revocation lists with [ReadKeyCertBundle].
// [Issuer.Issue] signs certificates for workloads and for CAs below it, and [Issuer.Renew] gives a root a new
// certificate with its old key.
//
// # What it promises
//
// A name has a type. A subject alternative name is a [SAN], never an item of a list in a string: a comma or a blank
// cannot become part of a name by accident, and text that looks like an address never turns into one.
//
// A request is not authority. [Issuer.Issue] takes every name from its caller. A CA takes only the public key from a
// [CSR]: its names are the sender's wish, and its signature proves only that the sender holds the key.
//
// Reading is strict and bounded. Sizes are checked before anything is parsed, key strength before any signature is
// verified, and trailing bytes, duplicates and indefinite forms are refused. An alternative name of an unknown kind
// keeps its type and its bytes.
//
// A certificate is checked before it is signed. An X.509-SVID has one URI, which is a SPIFFE ID with a path; a CA
// certificate names a trust domain without a path; key usage and basic constraints are always present and critical;
// no leaf outlives its issuer or has a name that the issuer's name constraints forbid. Otherwise [Issuer.Issue]
// returns a [*ProfileError] that names the rule. A signature that does not verify with the CA's certificate is an
// error too.
//
// The common name is for old readers only. It is empty unless asked for, at most 64 bytes, and never an identity.
//
// A key is a [crypto.Signer], which may live in hardware. It is written only as PKCS#8; PKCS#1 and SEC1 are also
// read. [Credential], [Issuer], [KeyCertBundle] and [Secret] do not print their keys with any verb of package fmt,
// with log/slog or as JSON.
//
// # What it does not do
//
// It does not decide which caller gets which name (package ca does), and does not verify peers (package spiffe does).
// It reads no clock, reads only files of a file system that it is given, and writes none.
package pki
