// Package envoysds has the wire messages of Envoy's Secret Discovery Service v3.
//
// The messages are generated from envoysds.proto, which has the published field numbers under a
// package name of our own. To change them, edit that file and run go generate in this directory; it
// wants protoc 3.21.12 and protoc-gen-go v1.36.12 in PATH. Never print a [Secret]: the String
// method that the generator gives it shows the private key.
package envoysds

//go:generate protoc -I ../../../.. --go_out=../../../.. --go_opt=paths=source_relative internal/test/wire/envoysds/envoysds.proto
