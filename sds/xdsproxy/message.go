package xdsproxy

import (
	"github.com/svidkit/svidkit/internal/protofield"
)

// fields are the numbers of the fields of a message that are read; 0 is one that it does not have.
type fields struct{ node, typeURL protofield.Number }

var (
	sotwRequest  = fields{node: 2, typeURL: 4}
	deltaRequest = fields{node: 1, typeURL: 2}
	response     = fields{typeURL: 4} // of both methods
)

// read reports whether a message is about secrets, and returns its node, which may be a part of the message; nil if
// it has none. The error is protofield.ErrMalformed.
func (n fields) read(message []byte) (secrets bool, node []byte, err error) {
	err = protofield.Read(message, func(f *protofield.Field) {
		switch {
		case f.Data == nil:
		case f.Number == n.typeURL:
			if secrets = string(f.Data) == secretType; !secrets {
				var s string
				f.Text(&s) // receivers refuse what is not UTF-8
			}
		case f.Number == n.node && node == nil:
			node = f.Data[:len(f.Data):len(f.Data)]
		case f.Number == n.node: // receivers merge it, as they do with all messages that come twice
			node = append(node, f.Data...)
		}
	})
	if err != nil {
		return false, nil, err
	}
	return secrets, node, nil
}

// encode returns the field of a node, which may be nil.
func (n fields) encode(node []byte) []byte {
	b, _ := protofield.Write(func(w *protofield.Writer) { // cannot fail: it writes no text
		if node != nil {
			w.AddBytes(n.node, node)
		}
	})
	return b
}
