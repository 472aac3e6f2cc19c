package grpchttp

import "io"

// For tests.
var (
	EncodeMessage = encodeMessage
	DecodeMessage = decodeMessage
	FormatTimeout = formatTimeout
	ParseTimeout  = parseTimeout
	AppendPrefix  = appendPrefix
	ErrShort      = errShort
	ReadRetryInfo = readRetryInfo
)

const FirstRead = firstRead

func ReadFrame(r io.Reader, limit int) (msg []byte, err error) {
	return readFrame(r, new([prefixSize]byte), limit, nil)
}
