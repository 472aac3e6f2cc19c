package workloadserver_test

import (
	"encoding/binary"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/workloadserver/internal/descriptors"
)

func fields(t testing.TB, b []byte) map[protowire.Number][][]byte {
	t.Helper()
	return workloadtest.Fields(t, b)
}

// Tools learn from the server what it serves, if they send the header.
func TestReflection(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-20", "WEP-18", "WAPI-4")
	home := workloadtest.NewDomain(t, "example.org")
	c := http2(t, handler(t, fixed(snapshot(t, home.SVID("/web"), home)), nil))
	for _, version := range []string{"v1", "v1alpha"} {
		in, out := io.Pipe()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/grpc.reflection."+version+".ServerReflection/ServerReflectionInfo", in)
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("workload.spiffe.io", "true")
		var r *rpc
		ask := func(n protowire.Number, arg string) map[protowire.Number][][]byte {
			t.Helper()
			msg := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "host")
			msg = protowire.AppendString(protowire.AppendTag(msg, n, protowire.BytesType), arg)
			go func() { _, _ = out.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))), msg...)) }()
			if r == nil {
				r = &rpc{T: t, Response: must.Get(c.Do(req))(t)}
			}
			answer := fields(t, r.Receive())
			assert.Equal(t, "host", string(answer[1][0]))
			assert.Equal(t, msg, answer[2][0], "the request is repeated")
			return answer
		}
		var services []string
		for _, s := range fields(t, ask(7, "*")[6][0])[1] {
			services = append(services, string(fields(t, s)[1][0]))
		}
		assert.Equal(t, []string{"SpiffeWorkloadAPI", "grpc.reflection." + version + ".ServerReflection"}, services)
		for _, symbol := range []string{"SpiffeWorkloadAPI", "SpiffeWorkloadAPI.FetchX509SVID", "X509SVIDResponse"} {
			files := fields(t, ask(4, symbol)[4][0])[1]
			require.Len(t, files, 2, symbol)
			var f descriptorpb.FileDescriptorProto
			require.NoError(t, proto.Unmarshal(files[0], &f))
			assert.Empty(t, f.GetPackage())
			assert.Len(t, f.GetService()[0].GetMethod(), 7)
		}
		var set descriptorpb.FileDescriptorSet
		require.NoError(t, proto.Unmarshal(descriptors.WorkloadAPI, &set))
		for i, file := range set.GetFile() {
			for _, m := range file.GetMessageType() {
				symbol := strings.TrimPrefix(file.GetPackage()+"."+m.GetName(), ".")
				assert.Len(t, fields(t, ask(4, symbol)[4][0])[1], i+1, symbol)
			}
			assert.Len(t, fields(t, ask(3, file.GetName())[4][0])[1], i+1)
		}
		for n, arg := range map[protowire.Number]string{3: "x.proto", 4: "grpc.health.v1.Health", 5: "x", 6: "x", 9: "x"} {
			failure := fields(t, ask(n, arg)[7][0])
			want := byte(5)
			if n == 9 {
				want = 12
			}
			assert.Equal(t, []byte{want}, failure[1][0])
			assert.NotEmpty(t, failure[2][0])
		}
		want := workloadtest.OK
		if version == "v1" {
			want = workloadtest.InvalidArgument
			must.Get(out.Write([]byte{0, 0, 0, 0, 1, 0xff}))(t)
		} else {
			require.NoError(t, out.Close())
		}
		code, _ := r.Status()
		assert.Equal(t, want, code)
		require.NoError(t, out.Close())
	}
}
