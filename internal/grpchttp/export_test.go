package grpchttp

import (
	"encoding/binary"
	"io"
)

// For tests.
var (
	EncodeMessage = encodeMessage
	DecodeMessage = decodeMessage
	FormatTimeout = formatTimeout
	ParseTimeout  = parseTimeout
	ErrShort      = errShort
	ReadRetryInfo = readRetryInfo
)

// AppendPrefix appends the prefix of a message of this size.
func AppendPrefix(b []byte, size int) []byte {
	return binary.BigEndian.AppendUint32(append(b, 0), uint32(size))
}

const FirstRead = firstRead

func ReadFrame(r io.Reader, limit int) (msg []byte, err error) {
	return readFrame(r, new([prefixSize]byte), limit, nil)
}
