package xdsproxy

import "github.com/svidkit/svidkit/internal/protofield"

// fields are the field numbers of a message; 0 means that it has no such field.
type fields struct{ node, typeURL protofield.Number }

var (
	sotwRequest  = fields{node: 2, typeURL: 4}
	deltaRequest = fields{node: 1, typeURL: 2}
	response     = fields{typeURL: 4} // of both methods
)

// read reports whether a message is about secrets. It also returns the message's node, which may share its memory;
// nil if there is none. The error is protofield.ErrMalformed.
func (n fields) read(message []byte) (secrets bool, node []byte, err error) {
	err = protofield.Read(message, func(f *protofield.Field) {
		switch {
		case f.Data == nil:
		case f.Number == n.typeURL:
			if secrets = string(f.Data) == secretType; !secrets {
				var s string
				f.Text(&s) // receivers refuse invalid UTF-8
			}
		case f.Number == n.node && node == nil:
			node = f.Data[:len(f.Data):len(f.Data)]
		case f.Number == n.node: // receivers merge a repeated node, as they do all repeated messages
			node = append(node, f.Data...)
		}
	})
	if err != nil {
		return false, nil, err
	}
	return secrets, node, nil
}

// encode returns node as a field, or nothing if it is nil.
func (n fields) encode(node []byte) []byte {
	b, _ := protofield.Write(func(w *protofield.Writer) { // cannot fail: it writes no text
		if node != nil {
			w.AddBytes(n.node, node)
		}
	})
	return b
}
