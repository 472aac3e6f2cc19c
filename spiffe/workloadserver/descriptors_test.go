package workloadserver_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver/internal/descriptors"
)

// What reflection shows is a whole, has the seven methods, and the messages that we send.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	var set descriptorpb.FileDescriptorSet
	require.NoError(t, proto.Unmarshal(descriptors.WorkloadAPI, &set))
	files, err := protodesc.NewFiles(&set)
	require.NoError(t, err)
	d, err := files.FindDescriptorByName("SpiffeWorkloadAPI")
	require.NoError(t, err)
	methods := d.(protoreflect.ServiceDescriptor).Methods()
	streams := map[string]bool{
		"FetchX509SVID": true, "FetchX509Bundles": true, "FetchJWTSVID": false, "FetchJWTBundles": true,
		"ValidateJWTSVID": false, "FetchWITSVID": true, "FetchWITBundles": true,
	}
	require.Equal(t, len(streams), methods.Len())
	for i := range methods.Len() {
		m := methods.Get(i)
		stream, ok := streams[string(m.Name())]
		require.True(t, ok, m.Name())
		assert.Equal(t, stream, m.IsStreamingServer(), m.Name())
		assert.False(t, m.IsStreamingClient(), m.Name())
	}
	ours := (*workloadapi.X509SVIDResponse)(nil).ProtoReflect().Descriptor().ParentFile().Messages()
	theirs := d.ParentFile().Messages()
	require.Equal(t, ours.Len(), theirs.Len())
	for i := range ours.Len() {
		a, b := protodesc.ToDescriptorProto(ours.Get(i)), protodesc.ToDescriptorProto(theirs.Get(i))
		for _, f := range a.GetField() {
			if name := f.GetTypeName(); name != "" {
				f.TypeName = new(withoutPackage(name))
			}
		}
		assert.True(t, proto.Equal(a, b), "%v\n%v", a, b)
	}
}

func withoutPackage(name string) string {
	const own = ".svidkit.wire.workloadapi"
	if len(name) > len(own) && name[:len(own)] == own {
		return name[len(own):]
	}
	return name
}

// The descriptors are made from reflection.proto as it is. It needs protoc, and is left out without.
func TestDescriptorsAreFresh(t *testing.T) {
	t.Parallel()
	protoc, err := exec.LookPath("protoc")
	if err != nil {
		t.Skip("protoc is not in PATH")
	}
	out := filepath.Join(t.TempDir(), "set")
	cmd := exec.Command(protoc, "-I", ".", "--include_imports", "--descriptor_set_out="+out, "reflection.proto")
	cmd.Dir = "internal/descriptors"
	msg, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", msg)
	data, err := os.ReadFile(out)
	require.NoError(t, err)
	var fresh, kept descriptorpb.FileDescriptorSet
	require.NoError(t, proto.Unmarshal(data, &fresh))
	require.NoError(t, proto.Unmarshal(descriptors.WorkloadAPI, &kept))
	require.Len(t, kept.GetFile(), 2)
	assert.True(t, proto.Equal(fresh.GetFile()[1], kept.GetFile()[1]), "run go generate")
}
