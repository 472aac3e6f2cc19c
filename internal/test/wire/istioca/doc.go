// Package istioca has the wire messages of Istio's certificate API.
//
// The messages are generated from istioca.proto, which has the published field numbers under a
// package name of our own. To change them, edit that file and run go generate in this directory; it
// wants protoc 3.21.12 and protoc-gen-go v1.36.12 in PATH.
package istioca

//go:generate protoc -I ../../../.. --go_out=../../../.. --go_opt=paths=source_relative internal/test/wire/istioca/istioca.proto

// CreateCertificate is the path of the API's one method, as it is published.
const CreateCertificate = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
