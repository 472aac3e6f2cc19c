package xdsproxy

import "github.com/svidkit/svidkit/internal/protofield"

// fields are the numbers of the fields that are read of a message; 0 is one that it does not have.
type fields struct{ node, typeURL protofield.Number }

var (
	sotwRequest  = fields{node: 2, typeURL: 4}
	deltaRequest = fields{node: 1, typeURL: 2}
	response     = fields{typeURL: 4} // of both kinds
)

// read returns whether the type URL of a message is that of secrets, and its node: the whole field, encoded, or nil if there
// is none. The error is protofield.ErrMalformed.
func (n fields) read(message []byte) (secret bool, node []byte, err error) {
	var parts [][]byte
	err = protofield.Read(message, func(f *protofield.Field) {
		switch {
		case f.Data == nil:
		case f.Number == n.typeURL:
			var s string
			if secret = string(f.Data) == secretType; !secret {
				f.Text(&s) // generated code refuses what is not UTF-8
			}
		case f.Number == n.node:
			parts = append(parts, f.Data)
		}
	})
	if err != nil {
		return false, nil, err
	}
	if parts != nil { // several are merged by the receiver, as embedded messages are
		node, err = protofield.Write(func(w *protofield.Writer) {
			for _, p := range parts {
				w.AddBytes(n.node, p)
			}
		})
	}
	return secret, node, err
}
