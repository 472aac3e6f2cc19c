package workloadserver

import (
	"context"
	"io"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/spiffe/workloadserver/internal/descriptors"
)

// reflection returns the methods of server reflection, which tools without the .proto file use to discover the API.
func reflection() map[string]grpchttp.Method {
	files := described()
	methods := make(map[string]grpchttp.Method)
	for _, version := range []string{"v1", "v1alpha"} {
		service := "grpc.reflection." + version + ".ServerReflection"
		methods["/"+service+"/ServerReflectionInfo"] = func(_ context.Context, c *grpchttp.Call) error {
			for {
				request, err := c.Receive()
				if err == io.EOF {
					return nil
				}
				if err != nil {
					return err
				}
				response, err := reflected(files, service, request)
				if err != nil {
					return badRequest("the request is not a ServerReflectionRequest")
				}
				if err := c.Send(response); err != nil {
					return err
				}
			}
		}
	}
	return methods
}

// file is an encoded FileDescriptorProto.
type file struct {
	name    string
	symbols string // with full names, each between spaces
	encoded []byte
}

// described returns the files of the service, each after those that it imports.
func described() []file {
	files := []file{{
		name: "google/protobuf/struct.proto",
		symbols: " google.protobuf.Struct google.protobuf.Value google.protobuf.ListValue " +
			"google.protobuf.NullValue ",
	}, {
		name: "reflection.proto",
		symbols: " SpiffeWorkloadAPI SpiffeWorkloadAPI.FetchX509SVID SpiffeWorkloadAPI.FetchX509Bundles " +
			"SpiffeWorkloadAPI.FetchJWTSVID SpiffeWorkloadAPI.FetchJWTBundles SpiffeWorkloadAPI.ValidateJWTSVID " +
			"SpiffeWorkloadAPI.FetchWITSVID SpiffeWorkloadAPI.FetchWITBundles X509SVIDRequest X509SVIDResponse " +
			"X509SVID X509BundlesRequest X509BundlesResponse JWTSVIDRequest JWTSVIDResponse JWTSVID " +
			"JWTBundlesRequest JWTBundlesResponse ValidateJWTSVIDRequest ValidateJWTSVIDResponse " +
			"WITSVIDRequest WITSVIDResponse WITSVID WITBundlesRequest WITBundlesResponse ",
	}}
	n := 0
	err := protofield.Read(descriptors.WorkloadAPI, func(f *protofield.Field) {
		files[n].encoded = f.Data
		n++
	})
	if err != nil {
		panic(err) // the descriptors are part of the program
	}
	return files
}

// reflected answers a ServerReflectionRequest with a ServerReflectionResponse.
func reflected(files []file, service string, request []byte) ([]byte, error) {
	var host, arg string
	var ask protofield.Number
	if err := protofield.Read(request, func(f *protofield.Field) {
		if f.Number == 1 {
			f.Text(&host)
		} else if f.Data != nil {
			ask, arg = f.Number, string(f.Data)
		}
	}); err != nil {
		return nil, err
	}
	code, text := grpchttp.NotFound, "not found"
	last := -1 // index of the file in the answer; the files before it are its imports
	switch ask {
	case 3: // file_by_filename
		last = slices.IndexFunc(files, func(f file) bool { return f.name == arg })
	case 4: // file_containing_symbol
		last = slices.IndexFunc(files, func(f file) bool { return strings.Contains(f.symbols, " "+arg+" ") })
	case 5, 6: // file_containing_extension, all_extension_numbers_of_type
		text = "there are no extensions"
	case 7: // list_services
	default:
		code, text = grpchttp.Unimplemented, "unknown request"
	}
	return protofield.Write(func(w *protofield.Writer) {
		w.AddText(1, host)
		w.AddBytes(2, request)
		switch {
		case ask == 7:
			writeServices(w, service)
		case last >= 0:
			w.Message(4, func(w *protofield.Writer) {
				for ; last >= 0; last-- {
					w.AddBytes(1, files[last].encoded)
				}
			})
		default:
			w.Message(7, func(w *protofield.Writer) {
				w.AddVarint(1, uint64(code))
				w.AddText(2, text)
			})
		}
	})
}

// writeServices writes the names of the services: the Workload API and reflection.
func writeServices(w *protofield.Writer, reflection string) {
	w.Message(6, func(w *protofield.Writer) {
		for _, name := range []string{"SpiffeWorkloadAPI", reflection} {
			w.Message(1, func(w *protofield.Writer) { w.AddText(1, name) })
		}
	})
}
