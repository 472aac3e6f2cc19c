package istioca

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/protofield"
)

// request has the fields of an IstioCertificateRequest that we read. Its other metadata is skipped: decoded, it takes
// thirty times as much memory as on the wire.
type request struct {
	csr         string // PEM
	validity    int64  // seconds
	signer      string // metadata CertSigner
	impersonate string // metadata ImpersonatedIdentity
}

func (r *request) read(f *protofield.Field) {
	switch f.Number {
	case 1:
		f.Text(&r.csr)
	case 3:
		f.Int64(&r.validity)
	case 4: // a google.protobuf.Struct
		f.Message(func(f *protofield.Field) {
			if f.Number == 1 {
				r.metadata(f)
			}
		})
	}
}

// metadata reads an entry, whose value is a google.protobuf.Value.
func (r *request) metadata(f *protofield.Field) {
	var text string
	switch f.Entry(func(f *protofield.Field) { f.Message(func(f *protofield.Field) { readText(f, &text) }) }) {
	case "CertSigner":
		r.signer = text
	case "ImpersonatedIdentity":
		r.impersonate = text
	}
}

// readText reads a google.protobuf.Value: one of several fields, of which the last counts. A value that is not a
// string is read as "".
func readText(f *protofield.Field, text *string) {
	switch {
	case f.Number == 3: // string_value
		f.Text(text)
	case (f.Number == 1 || f.Number == 4) && f.Type == protowire.VarintType, // null_value, bool_value
		f.Number == 2 && f.Type == protowire.Fixed64Type,                  // number_value
		(f.Number == 5 || f.Number == 6) && f.Type == protowire.BytesType: // struct_value, list_value
		*text = ""
	}
}
