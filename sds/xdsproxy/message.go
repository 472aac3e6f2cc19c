package xdsproxy

import "github.com/svidkit/svidkit/internal/protofield"

// fields are the numbers of the fields that are read of a message; 0 is one that it does not have.
type fields struct{ node, typeURL protofield.Number }

var (
	sotwRequest  = fields{node: 2, typeURL: 4}
	deltaRequest = fields{node: 1, typeURL: 2}
	response     = fields{typeURL: 4} // of both kinds
)

// read returns whether the type URL of a message is that of secrets, and its node, which is in parts if the field
// comes more than once; nil if it has none. The error is protofield.ErrMalformed.
func (n fields) read(message []byte) (secret bool, node [][]byte, err error) {
	err = protofield.Read(message, func(f *protofield.Field) {
		switch {
		case f.Data == nil:
		case f.Number == n.typeURL:
			var s string
			if secret = string(f.Data) == secretType; !secret { // which needs no memory
				f.Text(&s) // receivers refuse what is not UTF-8
			}
		case f.Number == n.node:
			node = append(node, f.Data)
		}
	})
	if err != nil {
		return false, nil, err
	}
	return secret, node, nil
}

// encode returns the field of a node, in memory of its own.
func (n fields) encode(node [][]byte) []byte {
	b, _ := protofield.Write(func(w *protofield.Writer) { // cannot fail: it writes no text
		for _, part := range node { // which receivers merge, as they do with all messages that come twice
			w.AddBytes(n.node, part)
		}
	})
	return b
}
