package grpchttp

import (
	"encoding/binary"
	"errors"
	"io"
)

const (
	prefixSize = 5
	firstRead  = 1 << 10 // bytes allocated for a message on its prefix alone
	uncounted  = 4 << 10 // bytes of a message that a server allocates without asking Handler.Incoming
)

// frame returns a message with its prefix.
func frame(msg []byte) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 1, prefixSize+len(msg)), uint32(len(msg)))
	return append(b, msg...)
}

// errShort says that a message ends before its length.
var errShort = errors.New("a message is cut short")

// readFrame returns the next message. At the end it returns io.EOF, in the middle of a message errShort, and for a
// message over the limit or with flags an Error. Other errors come from r, such as io.ErrUnexpectedEOF, which net/http
// returns if the connection was cut. prefix is a buffer for a prefix. Before readFrame allocates more than uncounted
// bytes it calls grow, unless that is nil, with the number of bytes.
func readFrame(r io.Reader, prefix *[prefixSize]byte, limit int, grow func(n int) error) (msg []byte, err error) {
	if err := fill(r, prefix[:]); err != nil {
		return nil, err
	}
	size, err := sizeIn(prefix, limit)
	if err != nil {
		return nil, err
	}
	// Double the memory as bytes arrive, so that an announced length costs nothing.
	for have := min(size, firstRead); ; have = min(size, 2*have) {
		done := len(msg)
		if more := have - max(done, uncounted); grow != nil && more > 0 {
			if err := grow(more); err != nil {
				return nil, err
			}
		}
		msg = append(make([]byte, 0, have), msg...)[:have]
		if err := fill(r, msg[done:]); err == io.EOF {
			return nil, errShort
		} else if err != nil {
			return nil, err
		}
		if have == size {
			return msg, nil
		}
	}
}

// sizeIn returns the size in a prefix.
func sizeIn(prefix *[prefixSize]byte, limit int) (int, error) {
	size := binary.BigEndian.Uint32(prefix[1:])
	switch flags := prefix[0]; {
	case uint64(size) > uint64(limit):
		return 0, Errorf(ResourceExhausted, "a message of %d bytes is larger than the limit of %d", size, limit)
	case flags == 1: // a message compressed by a named method was refused earlier
		return 0, Errorf(Internal, "a message has the flag of a compressed one, and there is no grpc-encoding")
	case flags != 0:
		return 0, Errorf(Internal, "a message has unknown flags %#02x", flags)
	}
	return int(size), nil
}

// fill reads until p is full. The error is io.EOF if r ends before the first byte, and errShort if it ends later.
func fill(r io.Reader, p []byte) error {
	for n := 0; n < len(p); {
		k, err := r.Read(p[n:])
		n += k
		switch {
		case n == len(p):
			return nil
		case err == io.EOF && n > 0:
			return errShort
		case err != nil:
			return err
		}
	}
	return nil
}
