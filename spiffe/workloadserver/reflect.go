package workloadserver

import (
	"context"
	"io"
	"slices"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
)

// reflection returns the methods of server reflection, with which tools without the .proto files discover an API. For
// each stream set returns its descriptors: an encoded google.protobuf.FileDescriptorSet in which each file is after
// those that it imports.
func reflection(set func(context.Context) []byte) map[string]grpchttp.Method {
	methods := make(map[string]grpchttp.Method)
	for _, version := range []string{"v1", "v1alpha"} {
		service := "grpc.reflection." + version + ".ServerReflection"
		methods["/"+service+"/ServerReflectionInfo"] = func(ctx context.Context, c *grpchttp.Call) error {
			files, services := described(set(ctx))
			services = append(services, service)
			for {
				request, err := c.Receive()
				if err == io.EOF {
					return nil
				}
				if err != nil {
					return err
				}
				response, err := reflected(files, services, request)
				if err != nil {
					return grpchttp.Errorf(grpchttp.InvalidArgument, "the request is not a ServerReflectionRequest")
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
	name, pkg string
	symbols   []string // messages, enumerations, services and their methods, with full names
	encoded   []byte
}

// described returns the files of a set, and the names of their services.
func described(set []byte) (files []file, services []string) {
	err := protofield.Read(set, func(f *protofield.Field) {
		one := file{encoded: f.Data}
		f.Message(func(f *protofield.Field) {
			switch f.Number {
			case 1:
				f.Text(&one.name)
			case 2:
				f.Text(&one.pkg)
				one.pkg += "."
			case 4, 5, 6: // messages, enumerations and services
				names := named(f, one.pkg)
				if one.symbols = append(one.symbols, names...); f.Number == 6 {
					services = append(services, names[0])
				}
			}
		})
		files = append(files, one)
	})
	if err != nil {
		panic(err) // the descriptors are part of the program
	}
	return files, services
}

// named returns the full name of a descriptor and, of a service, of its methods.
func named(f *protofield.Field, prefix string) []string {
	names, service := []string{""}, f.Number == 6
	f.Message(func(f *protofield.Field) {
		if f.Number == 1 {
			f.Text(&names[0])
			names[0] = prefix + names[0]
		} else if f.Number == 2 && service {
			names = append(names, named(f, names[0]+".")...)
		}
	})
	return names
}

// reflected answers a ServerReflectionRequest with a ServerReflectionResponse.
func reflected(files []file, services []string, request []byte) ([]byte, error) {
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
		last = slices.IndexFunc(files, func(f file) bool { return slices.Contains(f.symbols, arg) })
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
			w.Message(6, func(w *protofield.Writer) {
				for _, name := range services {
					w.Message(1, func(w *protofield.Writer) { w.AddText(1, name) })
				}
			})
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
