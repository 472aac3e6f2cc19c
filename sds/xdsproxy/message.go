package xdsproxy

import (
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
)

// fields are the numbers of the fields of a message that are read, and of the requests that a [Handler] makes itself;
// 0 is one that it does not have.
type fields struct{ node, typeURL, resourceNames, errorDetail protofield.Number }

var (
	sotwRequest  = fields{node: 2, typeURL: 4, resourceNames: 3, errorDetail: 6}
	deltaRequest = fields{node: 1, typeURL: 2, resourceNames: 3, errorDetail: 7}
	response     = fields{typeURL: 4} // of both kinds
)

// kind is what a message is about.
type kind int

// The kinds of messages.
const (
	other kind = iota
	secrets
	listeners
	health
)

const (
	listenerType = "type.googleapis.com/envoy.config.listener.v3.Listener"
	healthType   = "type.googleapis.com/istio.v1.HealthInformation"
)

// read returns the kind of a message by its type URL, and its node, which may be a part of the message; nil if it has
// none. The error is protofield.ErrMalformed.
func (n fields) read(message []byte) (k kind, node []byte, err error) {
	err = protofield.Read(message, func(f *protofield.Field) {
		switch {
		case f.Data == nil:
		case f.Number == n.typeURL:
			switch string(f.Data) { // which needs no memory
			case secretType:
				k = secrets
			case listenerType:
				k = listeners
			case healthType:
				k = health
			default:
				k = other
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
		return other, nil, err
	}
	return k, node, nil
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

// report returns the request that tells the control plane how the workload is. text says what is wrong with it; it is
// UTF-8.
func (n fields) report(healthy bool, text string) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) {
		w.Text(n.typeURL, healthType)
		if !healthy {
			w.Message(n.errorDetail, func(w *protofield.Writer) {
				w.Varint(1, uint64(grpchttp.Internal))
				w.Text(2, text)
			})
		}
	})
}
