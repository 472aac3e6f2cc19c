// Package workloadapi has the wire messages of the SPIFFE Workload API.
//
// Tests judge by them: package spiffe/workloadapi has messages of its own, which link no reflection, and
// compares every one with these. They are generated from workloadapi.proto, which has the published field
// numbers under a package name of our own. To change them, edit that file and descriptors/reflection.proto
// and run go generate in both directories; it wants protoc 3.21.12 and protoc-gen-go v1.36.12 in PATH. Never
// print an [X509SVID], a [WITSVID] or a [JWTSVID]: the String method that the generator gives them shows
// the private key, or the token.
package workloadapi

//go:generate protoc -I ../../../.. --go_out=../../../.. --go_opt=paths=source_relative internal/test/wire/workloadapi/workloadapi.proto
