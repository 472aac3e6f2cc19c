package auditlog

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"

	"github.com/svidkit/svidkit/pki/ca"
)

// What is wrong with a line, to test for with [errors.Is].
var (
	// ErrTorn says that a line is unfinished, as a crash leaves it. Its certificate was not issued.
	ErrTorn = errors.New("an unfinished line, as a crash leaves it")
	// ErrMalformed says that a line is finished, but no record: nobody but a stranger writes such.
	ErrMalformed = errors.New("not an audit record")
	// ErrChain says that a line does not vouch for the one before it: that was changed, or lines
	// between were taken out or put in.
	ErrChain = errors.New("the line before is not the one that this line was written after")
)

// LineError says what is wrong with a line. It wraps Err, which wraps one of the errors above.
type LineError struct {
	Line int // the first is 1
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("auditlog: line %d: %v", e.Line, e.Err) }

// Unwrap returns Err.
func (e *LineError) Unwrap() error { return e.Err }

// Read yields the records of an audit log in their order. What is wrong with a line is yielded as a
// [*LineError] at its place, after which the records go on: with the record if it is [ErrChain], and
// without one otherwise. Any other error is one of r, and the last thing that is yielded.
//
// The first line may follow on any line of another file. To check several files as one, give them
// to [io.MultiReader] in their order. What is read at once is bounded: a line of more than 64 KiB is
// malformed.
func Read(r io.Reader) iter.Seq2[ca.Issuance, error] {
	return func(yield func(ca.Issuance, error) bool) {
		lines := lineReader{r: bufio.NewReaderSize(r, maxLine+1), hash: sha256.New()}
		var last []byte // the hash of the line before, in hexadecimal; nil for none
		for number := 1; ; number++ {
			line, err := lines.next()
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(ca.Issuance{}, fmt.Errorf("auditlog: line %d: %w", number, err))
				return
			}
			i, err := lines.judge(line, last)
			if err != nil {
				err = &LineError{Line: number, Err: err}
			}
			if !yield(i, err) {
				return
			}
			last = hex.AppendEncode(last[:0], lines.hash.Sum(nil))
		}
	}
}

// lineReader reads lines of any length in bounded memory.
type lineReader struct {
	r       *bufio.Reader
	hash    hash.Hash // of the last line, all of it
	tooLong bool      // the last line is longer than what next returned
}

// next returns the next line without its newline, or the beginning of one that is too long. It is
// good until the next call. At the end the error is io.EOF.
func (l *lineReader) next() ([]byte, error) {
	l.hash.Reset()
	l.tooLong = false
	line, err := l.r.ReadSlice('\n')
	line = bytes.TrimSuffix(line, []byte{'\n'})
	l.hash.Write(line)
	if err == io.EOF && len(line) > 0 {
		return line, nil // without a newline at the end
	}
	if err != bufio.ErrBufferFull {
		return line, err
	}
	// A stranger's line, or what a lost write left. Only its hash and its last bytes are of use.
	l.tooLong = true
	var end []byte
	for err == bufio.ErrBufferFull {
		end = append(end[:0], line[max(0, len(line)-finishedLen):]...)
		line, err = l.r.ReadSlice('\n')
		line = bytes.TrimSuffix(line, []byte{'\n'})
		l.hash.Write(line)
	}
	if err != nil && err != io.EOF {
		return nil, err
	}
	return append(end, line...), nil
}

// finishedLen is how long the end of a finished line is: prevMember, a hash and lineEnd.
const finishedLen = len(prevMember) + 2*sha256.Size + len(lineEnd)

// finished reports whether line has the end that each record has and no part of one: inside of a
// string its quotes would have backslashes.
func finished(line []byte) bool {
	if len(line) < finishedLen {
		return false
	}
	end := line[len(line)-finishedLen:]
	return bytes.HasPrefix(end, []byte(prevMember)) && bytes.HasSuffix(end, []byte(lineEnd))
}

func (l *lineReader) judge(line, last []byte) (ca.Issuance, error) {
	switch {
	case !finished(line):
		return ca.Issuance{}, ErrTorn
	case l.tooLong:
		return ca.Issuance{}, fmt.Errorf("%w: more than %d bytes", ErrMalformed, maxLine)
	}
	i, prev, err := parse(line)
	switch {
	case err != nil:
		return ca.Issuance{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	case last != nil && !bytes.Equal(prev, last):
		return i, ErrChain
	}
	return i, nil
}
