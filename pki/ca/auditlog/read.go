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
	"time"
)

// What is wrong with a line.
var (
	// ErrTorn says that a line is unfinished, as a crash leaves it: it is the last one and has no newline, or the next
	// line was written after it. Its certificate was not issued.
	ErrTorn = errors.New("an unfinished line, as a crash leaves it")
	// ErrMalformed says that a line is no record, and that no crash left it: a Log does not write such.
	ErrMalformed = errors.New("not an audit record")
	// ErrChain says that a line does not vouch for the one before it: that was changed, or lines
	// between were taken out or put in.
	ErrChain = errors.New("the line before is not the one that this line was written after")
)

// Read yields the records of an audit log in their order. For a line that is wrong it yields an error that has the
// number of the line and wraps one of the errors above, with the record for [ErrChain] and with the zero Entry
// otherwise, and goes on. Any other error is one of r, and ends the sequence.
//
// The first line may follow any line of another file. To check several files as one, and where they begin and end, use
// [Verify]. Memory is bounded: a line of more than 64 KiB is malformed.
func Read(r io.Reader) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for l := range read(r) {
			if !yield(l.Entry, l.err) {
				return
			}
		}
	}
}

// Verify reads a log in its files, the oldest first (see [Files]), and writes to w what is wrong with it, a line for
// each place, and where it begins and ends. It returns an error if there is no record, or if anything is wrong but for
// what a crash leaves.
//
// The first line must be the first one of all, or follow the line with the hash after, if files before it were
// archived or deleted; if after is "any", it may follow any line. The line with the hash last, as [Log.End] returned
// it once, must be there, or the end was cut off or changed; with an empty last Verify cannot tell that.
func Verify(w io.Writer, after, last string, files ...io.Reader) error {
	v := verification{since: -1}
	for l := range read(files...) {
		v.add(l, last)
		switch {
		case l.err == nil:
		case errors.Is(l.err, ErrTorn):
			fmt.Fprintln(w, l.err)
		case errors.Is(l.err, ErrChain), errors.Is(l.err, ErrMalformed):
			v.wrong++
			fmt.Fprintln(w, l.err)
		default:
			return l.err
		}
	}
	if v.records == 0 {
		return errors.New("auditlog: there is no record: this is no audit log, or all of it was overwritten")
	}
	from := "the first line of all"
	switch {
	case v.before == noDigest:
	case v.before == after, after == "any":
		from = "the line after " + v.before + ", as it should"
	default:
		v.wrong++
		from = "the line after " + v.before + ", which is not here: the lines before were cut off, " +
			"or are in another file"
	}
	fmt.Fprintf(w, "%d records, from %s to %s\nthe chain begins with %s\nthe chain ends with the line %s\n",
		v.records, v.begin.Format(time.RFC3339), v.end.Format(time.RFC3339), from, v.hash)
	const keep = "; keep the files, and compare them with a copy of before"
	switch {
	case v.wrong > 0:
		return fmt.Errorf("auditlog: lines were changed or taken out (places: %d)%s", v.wrong, keep)
	case last != "" && v.since < 0:
		return fmt.Errorf("auditlog: the line %.64q was the last one once and is not here: the end "+
			"was cut off or changed%s", last, keep)
	case last != "":
		fmt.Fprintf(w, "the line %s, which was the last one once, is here, and %d after it\n", last, v.since)
	}
	return nil
}

// verification is what Verify has found so far.
type verification struct {
	records, wrong int
	since          int // lines after the one that was the last one once; less than 0 before that was found
	begin, end     time.Time
	before, hash   string // before the first record, and of the last line
}

func (v *verification) add(l judged, last string) {
	if v.hash = hex.EncodeToString(l.hash[:]); v.since >= 0 || v.hash == last {
		v.since++
	}
	switch {
	case l.KeyEvent != nil:
		v.end = l.KeyEvent.Time
	case l.Issuance != nil:
		v.end = l.Issuance.Time
	default:
		return
	}
	if v.records++; v.records == 1 {
		v.before, v.begin = hex.EncodeToString(l.prev[:]), v.end
	}
}

// judged is a line, and what is wrong with it.
type judged struct {
	Entry
	prev, hash digest // prev of a record only
	err        error
	where      string
	open       bool // it has no newline
}

// read yields the lines of files, of which each goes on where the one before ends. An error of a reader is the last.
func read(files ...io.Reader) iter.Seq[judged] {
	return func(yield func(judged) bool) {
		var before *judged
		for l := range lines(files) {
			follows := before == nil || l.err == nil && l.prev == before.hash
			if l.err == nil && !follows {
				l.err = ErrChain
			}
			if before != nil && !yield(before.settled(follows)) {
				return
			}
			before = &l
		}
		if before != nil {
			yield(before.settled(before.open))
		}
	}
}

// settled returns l when it is known what follows, and whether a crash leaves an unfinished line there.
func (l judged) settled(crash bool) judged {
	switch {
	case errors.Is(l.err, ErrTorn) && !crash:
		l.err = fmt.Errorf("%s%w: it is unfinished, and was not the last one at a crash", l.where, ErrMalformed)
	case l.err != nil:
		l.err = fmt.Errorf("%s%w", l.where, l.err)
	}
	return l
}

// lines yields the lines of files by themselves.
func lines(files []io.Reader) iter.Seq[judged] {
	return func(yield func(judged) bool) {
		for _, f := range files {
			r, where := lineReader{r: bufio.NewReader(f), hash: sha256.New()}, "auditlog: "
			if named, ok := f.(interface{ Name() string }); ok && len(files) > 1 {
				where += named.Name() + ": "
			}
			for number := 1; ; number++ {
				err := r.next()
				if err == io.EOF {
					break
				}
				l := judged{err: err, open: r.open, where: fmt.Sprintf("%sline %d: ", where, number)}
				if err == nil {
					l.Entry, l.prev, l.err = r.judge()
				}
				r.hash.Sum(l.hash[:0])
				if !yield(l) || err != nil {
					return
				}
			}
		}
	}
}

// lineReader reads lines of any length in bounded memory.
type lineReader struct {
	r       *bufio.Reader
	hash    hash.Hash // of the last line, all of it
	line    []byte    // without its newline; only the end of one that is too long
	tooLong bool
	open    bool // it has no newline
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
		case err == io.EOF && size > 0:
			l.open = true
			return nil
		default:
			return err
		}
	}
}

// judge returns the record in the line, and what that says of the line before.
func (l *lineReader) judge() (e Entry, prev digest, err error) {
	switch {
	case !finished(l.line):
		return e, prev, ErrTorn
	case l.tooLong:
		return e, prev, fmt.Errorf("%w: more than %d bytes", ErrMalformed, maxLine)
	}
	if e, prev, err = parse(l.line); err != nil {
		err = fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return e, prev, err
}
