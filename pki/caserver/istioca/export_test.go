package istioca

import "bytes"

// Decoded is what the server reads out of a request.
type Decoded struct {
	CSR                 string
	Validity            int64
	Signer, Impersonate string
}

// Decode decodes a message.
func Decode(data []byte) error {
	var r request
	return r.decode(data)
}

// DecodeAll is Decode with its result, which has nothing of data: that is used again.
func DecodeAll(data []byte) (Decoded, error) {
	var r request
	data = bytes.Clone(data)
	err := r.decode(data)
	clear(data)
	return Decoded{string(r.csr), r.validity, r.signer, r.impersonate}, err
}
