package auditlog

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
)

// What is wrong with a line.
var (
	// ErrTorn says that a line is unfinished, as a crash leaves it. Its certificate was not issued.
	ErrTorn = errors.New("an unfinished line, as a crash leaves it")
	// ErrMalformed says that a line is finished, but no record: a Log does not write such.
	ErrMalformed = errors.New("not an audit record")
	// ErrChain says that a line does not vouch for the one before it: that was changed, or lines
	// between were taken out or put in.
	ErrChain = errors.New("the line before is not the one that this line was written after")
)

// Read yields the records of an audit log in their order. For a line that is wrong it yields an error that has the number
// of the line and wraps one of the errors above, with the record for [ErrChain] and with the zero Entry otherwise, and goes
// on. Any other error is one of r, and ends the sequence.
//
// The first line may follow any line of another file. To check several files as one, pass them to [io.MultiReader] in
// order. Memory is bounded: a line of more than 64 KiB is malformed.
func Read(r io.Reader) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		lines := lineReader{r: bufio.NewReader(r), hash: sha256.New()}
		var last *digest // the hash of the line before
		for number := 1; ; number++ {
			err := lines.next()
			if err == io.EOF {
				return
			}
			var e Entry
			broken := err != nil
			if !broken {
				e, err = lines.judge(last)
			}
			if err != nil {
				err = fmt.Errorf("auditlog: line %d: %w", number, err)
			}
			if !yield(e, err) || broken {
				return
			}
			last = (*digest)(lines.hash.Sum(nil))
		}
	}
}

// lineReader reads lines of any length in bounded memory.
type lineReader struct {
	r       *bufio.Reader
	hash    hash.Hash // of the last line, all of it
	line    []byte    // without its newline; only the end of one that is too long
	tooLong bool
}

// next reads the next line. At the end the error is io.EOF.
func (l *lineReader) next() error {
	l.hash.Reset()
	l.line, l.tooLong = l.line[:0], false
	for size := 0; ; {
		part, err := l.r.ReadSlice('\n')
		size += len(part)
		part = bytes.TrimSuffix(part, []byte{'\n'})
		l.hash.Write(part)
		if l.line = append(l.line, part...); len(l.line) > maxLine {
			l.tooLong = true
			l.line = append(l.line[:0], l.line[len(l.line)-endLen:]...)
		}
		switch {
		case err == bufio.ErrBufferFull:
		case err == io.EOF && size > 0: // without a newline at the end
			return nil
		default:
			return err
		}
	}
}

// judge returns the record in the line, which has to follow one with the hash last.
func (l *lineReader) judge(last *digest) (Entry, error) {
	switch {
	case !finished(l.line):
		return Entry{}, ErrTorn
	case l.tooLong:
		return Entry{}, fmt.Errorf("%w: more than %d bytes", ErrMalformed, maxLine)
	}
	e, prev, err := parse(l.line)
	switch {
	case err != nil:
		return Entry{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	case last != nil && prev != *last:
		return e, ErrChain
	}
	return e, nil
}
