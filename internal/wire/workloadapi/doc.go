// Package workloadapi has the wire messages of the SPIFFE Workload API.
//
// The messages are generated from workloadapi.proto, which has the published field numbers under a
// package name of our own. To change them, edit that file and reflection.proto and run go generate
// in this folder; it wants protoc 3.21.12 and protoc-gen-go v1.36.12 in PATH. Never print an
// [X509SVID], a [WITSVID] or a [JWTSVID]: the String method that the generator gives them shows
// the private key, or the token.
package workloadapi

import _ "embed" // for Descriptors

//go:generate protoc -I ../../.. --go_out=../../.. --go_opt=paths=source_relative internal/wire/workloadapi/workloadapi.proto
//go:generate protoc -I . --include_imports --descriptor_set_out=reflection.binpb reflection.proto

// Descriptors is an encoded google.protobuf.FileDescriptorSet with the Workload API under its names
// on the wire, after the file that it imports. It is what server reflection hands out.
//
//go:embed reflection.binpb
var Descriptors []byte
