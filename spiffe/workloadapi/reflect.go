package workloadapi

import (
	"context"
	"io"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/wire/workloadapi/descriptors"
)

// Server reflection (WEP-20), by which tools that have no .proto file learn what is served. There is
// one service to show, so the messages are put together by hand.
const (
	reflection       = "/grpc.reflection."
	reflectionMethod = ".ServerReflection/ServerReflectionInfo"
	serviceName      = "SpiffeWorkloadAPI"

	// Fields of ServerReflectionRequest.
	askFile, askSymbol, askExtension, askExtensions, askServices = 3, 4, 5, 6, 7

	// Fields of ServerReflectionResponse.
	repeatHost, repeatRequest, sayFiles, sayServices, sayError = 1, 2, 4, 6, 7

	notFound, unimplemented = 5, 12 // codes of gRPC
)

func reflectionOf(version string) grpchttp.Method {
	d := newShown("grpc.reflection." + version + ".ServerReflection")
	return func(_ context.Context, c *grpchttp.Call) error {
		for {
			req, err := c.Receive()
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			resp, err := d.answer(req)
			if err != nil {
				return refusal("the request is not a ServerReflectionRequest")
			}
			if err := c.Send(resp); err != nil {
				return err
			}
		}
	}
}

// shown are encoded FileDescriptorProtos.
type shown struct {
	service string // of reflection itself
	files   []file // each after those that it imports
}

type file struct {
	name    string
	symbols []string // services, methods and messages, with full names
	encoded []byte
}

func newShown(service string) *shown {
	d := &shown{service: service}
	each(descriptors.WorkloadAPI, func(_ protowire.Number, encoded []byte) {
		f := file{encoded: encoded}
		prefix := ""
		each(encoded, func(n protowire.Number, v []byte) {
			switch n {
			case 1:
				f.name = string(v)
			case 2:
				prefix = string(v) + "."
			case 4, 6: // messages and services, after the name and the package
				name := prefix + first(v)
				f.symbols = append(f.symbols, name)
				if n == 6 {
					each(v, func(n protowire.Number, v []byte) {
						if n == 2 {
							f.symbols = append(f.symbols, name+"."+first(v))
						}
					})
				}
			}
		})
		d.files = append(d.files, f)
	})
	return d
}

// first returns the name in a descriptor, which is its field 1.
func first(descriptor []byte) (name string) {
	each(descriptor, func(n protowire.Number, v []byte) {
		if n == 1 {
			name = string(v)
		}
	})
	return name
}

// each calls f for the length-delimited fields of a message, and reports whether it is one.
func each(message []byte, f func(n protowire.Number, v []byte)) bool {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeTag(message)
		if size < 0 || n > protowire.MaxValidNumber {
			return false
		}
		message = message[size:]
		if size = protowire.ConsumeFieldValue(n, kind, message); size < 0 {
			return false
		}
		if kind == protowire.BytesType {
			v, _ := protowire.ConsumeBytes(message)
			f(n, v)
		}
		message = message[size:]
	}
	return true
}

// answer makes the response to a request.
func (d *shown) answer(req []byte) ([]byte, error) {
	var host, arg []byte
	var ask protowire.Number
	if !each(req, func(n protowire.Number, v []byte) {
		if n == 1 {
			host = v
		} else {
			ask, arg = n, v
		}
	}) {
		return nil, errMalformed
	}
	var what protowire.Number
	var body []byte
	fail := func(code uint64, text string) {
		what = sayError
		body = protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), code)
		body = field(body, 2, []byte(text))
	}
	switch ask {
	case askServices:
		what = sayServices
		for _, name := range []string{serviceName, d.service} {
			body = field(body, 1, field(nil, 1, []byte(name)))
		}
	case askFile:
		d.find(func(f file) bool { return f.name == string(arg) }, &what, &body)
	case askSymbol:
		d.find(func(f file) bool { return slices.Contains(f.symbols, string(arg)) }, &what, &body)
	case askExtension, askExtensions:
		fail(notFound, "there are no extensions")
	default:
		fail(unimplemented, "unknown request")
	}
	if what == 0 {
		fail(notFound, "not found")
	}
	resp := field(nil, repeatHost, host)
	resp = field(resp, repeatRequest, req)
	return field(resp, what, body), nil
}

// find answers with the first file that is asked for, and those that it imports, which come after it.
func (d *shown) find(is func(file) bool, what *protowire.Number, body *[]byte) {
	for i, f := range d.files {
		if !is(f) {
			continue
		}
		*what = sayFiles
		for ; i >= 0; i-- {
			*body = field(*body, 1, d.files[i].encoded)
		}
		return
	}
}

func field(b []byte, n protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), v)
}
