package sds

import (
	"strings"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
)

// request is the part that we use of a DiscoveryRequest or a DeltaDiscoveryRequest. It shares no memory with the
// message, whose node can be large.
type request struct {
	node     string // its ID
	typeURL  string
	nonce    string
	names    []string // SotW: all names that the client wants from now on; delta: additional names
	drop     []string // delta: names that the client no longer wants
	have     map[string]string
	rejected bool   // error_detail is present
	reason   string // the message in error_detail
}

// fields are the field numbers of a request; 0 means that it has no such field.
type fields struct{ node, names, drop, have, typeURL, nonce, detail protofield.Number }

var (
	sotwFields  = fields{node: 2, names: 3, typeURL: 4, nonce: 5, detail: 6}
	deltaFields = fields{node: 1, typeURL: 2, names: 3, drop: 4, have: 5, nonce: 6, detail: 7}
)

// decode reads a request, and stops at the first limit that it exceeds. The error is for the client. A delta list may
// have twice the maximum of names: the excess names are refused one by one.
func decode(message []byte, delta bool, maxNames int) (*request, error) {
	n, most := sotwFields, maxNames
	if delta {
		n, most = deltaFields, 2*maxNames
	}
	var r request
	check := func(f *protofield.Field, have, length int) {
		switch {
		case length > maxName:
			f.Fail(grpchttp.Errorf(grpchttp.ResourceExhausted,
				"sds: a resource name of %d bytes; the limit is %d", length, maxName))
		case have >= most:
			f.Fail(errTooMany(maxNames))
		}
	}
	err := protofield.Read(message, func(f *protofield.Field) {
		if f.Data != nil { // every field that we read is a text or a message
			r.read(f, n, check)
		}
	})
	if err == protofield.ErrMalformed {
		err = grpchttp.Errorf(grpchttp.InvalidArgument, "sds: malformed request")
	}
	if err != nil {
		return nil, err
	}
	return &r, nil
}

// read reads a field.
func (r *request) read(f *protofield.Field, n fields, check func(f *protofield.Field, have, length int)) {
	add := func(to *[]string) {
		var name string
		check(f, len(*to), len(f.Data))
		f.Text(&name)
		*to = append(*to, name)
	}
	switch f.Number {
	case n.node:
		f.Message(protofield.Texts(&r.node))
	case n.names:
		add(&r.names)
	case n.drop:
		add(&r.drop)
	case n.have:
		var v string
		name := f.Entry(func(f *protofield.Field) { f.Text(&v) })
		check(f, len(r.have), len(name))
		if r.have == nil {
			r.have = make(map[string]string)
		}
		r.have[name] = v
	case n.typeURL:
		if r.typeURL = typeURL; string(f.Data) != typeURL { // ours needs no memory
			f.Text(&r.typeURL)
		}
	case n.nonce:
		f.Text(&r.nonce)
	case n.detail:
		r.rejected = true
		f.Message(func(f *protofield.Field) {
			if f.Number == 2 {
				f.Text(&r.reason)
			}
		})
	}
}

func errTooMany(maxNames int) *grpchttp.Error {
	return grpchttp.Errorf(grpchttp.ResourceExhausted,
		"sds: more than %d resource names; open another stream, or raise MaxNames of the server", maxNames)
}

// clip returns a copy of at most the first maxText bytes of s.
func clip(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return strings.Clone(s)
}
