package istioca

// Decoded is what the server reads out of a request.
type Decoded struct {
	CSR                 string
	Validity            int64
	Signer, Impersonate string
}

// Decode decodes a message.
func Decode(data []byte) (Decoded, error) {
	r, err := readRequest(data)
	if err != nil {
		return Decoded{}, err
	}
	return Decoded{r.csr, r.validity, r.signer, r.impersonate}, nil
}
