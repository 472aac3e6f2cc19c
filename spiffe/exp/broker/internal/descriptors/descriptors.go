// Package descriptors has the descriptors of the SPIFFE Broker API for server reflection, as bytes. To change them,
// edit brokerapi.proto and run go generate in this directory; it wants protoc 3.21.12 in PATH.
package descriptors

import _ "embed" // for BrokerAPI

//go:generate protoc -I . --include_imports --descriptor_set_out=brokerapi.binpb brokerapi.proto

// BrokerAPI is an encoded google.protobuf.FileDescriptorSet with the Broker API, after the file that it imports.
//
//go:embed brokerapi.binpb
var BrokerAPI []byte
