// Package descriptors has the descriptors of the SPIFFE Workload API for server reflection, as bytes: a
// server hands them out without looking into them, and without linking reflection itself. To change them,
// edit reflection.proto and run go generate in this directory; it wants protoc 3.21.12 in PATH.
package descriptors

import _ "embed" // for WorkloadAPI

//go:generate protoc -I . --include_imports --descriptor_set_out=reflection.binpb reflection.proto

// WorkloadAPI is an encoded google.protobuf.FileDescriptorSet with the Workload API under its names on
// the wire, after the file that it imports.
//
//go:embed reflection.binpb
var WorkloadAPI []byte
