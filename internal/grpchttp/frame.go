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

// appendPrefix appends the prefix of a message of this size.
func appendPrefix(b []byte, size int) []byte {
	return binary.BigEndian.AppendUint32(append(b, 0), uint32(size))
}

// frame returns a message with its prefix.
func frame(msg []byte) []byte {
	return append(appendPrefix(make([]byte, 0, prefixSize+len(msg)), len(msg)), msg...)
}

// errShort says that a message ends before its length.
var errShort = errors.New("a message is cut short")

// readFrame returns the next message and its flags. At the end it returns io.EOF, in the middle of a message
// errShort, and for a message over the limit an Error. Other errors come from r, such as io.ErrUnexpectedEOF, which
// net/http returns if the connection was cut. prefix is a buffer for a prefix. Before readFrame allocates more than
// uncounted bytes it calls grow, unless that is nil, with the number of bytes.
func readFrame(r io.Reader, prefix *[prefixSize]byte, limit int, grow func(n int) error) (flags byte, msg []byte,
	err error) {
	if err := fill(r, prefix[:]); err != nil {
		return 0, nil, err
	}
	size := uint64(binary.BigEndian.Uint32(prefix[1:]))
	if size > uint64(limit) {
		return 0, nil, Errorf(ResourceExhausted, "a message of %d bytes is larger than the limit of %d", size, limit)
	}
	more := func(from, to uint64) error { // allocates
		if from = max(from, uncounted); grow == nil || to <= from {
			return nil
		}
		return grow(int(to - from)) // at most limit
	}
	have := min(size, firstRead)
	if err := more(0, have); err != nil {
		return 0, nil, err
	}
	msg = make([]byte, have)
	for done := uint64(0); done < size; {
		if err := fill(r, msg[done:]); err == io.EOF {
			return 0, nil, errShort
		} else if err != nil {
			return 0, nil, err
		}
		if done = uint64(len(msg)); done < size { // double it, so that an announced length costs nothing
			have = min(size, 2*done)
			if err := more(done, have); err != nil {
				return 0, nil, err
			}
			msg = append(make([]byte, 0, have), msg...)
			msg = msg[:cap(msg)]
		}
	}
	return prefix[0], msg, nil
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

// checkFlags returns the Error for a message with flags. A message compressed by a named method was refused earlier.
func checkFlags(flags byte) error {
	switch flags {
	case 0:
		return nil
	case 1:
		return Errorf(Internal, "a message has the flag of a compressed one, and there is no grpc-encoding")
	}
	return Errorf(Internal, "a message has unknown flags %#02x", flags)
}
