// Package linkerd has the wire messages of Linkerd's identity API.
//
// The messages are generated from linkerd.proto, which has the published field numbers under a
// package name of our own. To change them, edit that file and run go generate in this directory; it
// wants protoc 3.21.12 and protoc-gen-go v1.36.12 in PATH. Never print a [CertifyRequest]: the String
// method that the generator gives it shows the token.
package linkerd

//go:generate protoc -I ../../../.. --go_out=../../../.. --go_opt=paths=source_relative internal/test/wire/linkerd/linkerd.proto

// Certify is the path of the API's one method, as it is published.
const Certify = "/io.linkerd.proxy.identity.Identity/Certify"
