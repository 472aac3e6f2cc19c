package auditlog

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// The end of each line: the text around the hash of the line before it.
const (
	prevMember = `,"prev":"`
	lineEnd    = `"}`
	endLen     = len(prevMember) + 2*sha256.Size + len(lineEnd)
)

type digest = [sha256.Size]byte

// encode returns the line of a record without its last member and newline: see link.
func encode(record any) ([]byte, error) {
	var b bytes.Buffer
	j := json.NewEncoder(&b)
	j.SetEscapeHTML(false)
	if err := j.Encode(record); err != nil {
		return nil, err
	}
	line := bytes.TrimSuffix(b.Bytes(), []byte("}\n"))
	if len(line)+endLen > maxLine {
		return nil, fmt.Errorf("it would be a line of more than %d bytes", maxLine)
	}
	return line, nil
}

// link appends to text a line that encode returned, with the hash of the line before it, and returns the line's hash.
func link(text, line []byte, prev digest) ([]byte, digest) {
	begin := len(text)
	text = fmt.Appendf(text, "%s%s%x%s", line, prevMember, prev, lineEnd)
	return append(text, '\n'), sha256.Sum256(text[begin:])
}

// The faults of a line.
var (
	errTorn      = errors.New("an unfinished line, as a crash leaves it")
	errMalformed = errors.New("not an audit record")
	errChain     = errors.New("the line before is not the one that this line was written after")
)

// parse returns the time of a record, and the hash of the line before it. The error is errTorn for a line without the
// end that each record has. That end cannot be part of a record: inside a string its quotes would have backslashes.
func parse(line []byte) (at time.Time, prev string, err error) {
	if len(line) < endLen {
		return at, "", errTorn
	}
	rest, begins := bytes.CutPrefix(line[len(line)-endLen:], []byte(prevMember))
	hash, ends := bytes.CutSuffix(rest, []byte(lineEnd))
	if !begins || !ends {
		return at, "", errTorn
	}
	var record struct {
		Time time.Time `json:"time"`
	}
	if !bytes.HasPrefix(line, []byte(`{"time":`)) || line[len(line)-endLen-1] == '{' ||
		len(bytes.Trim(hash, "0123456789abcdef")) > 0 || json.Unmarshal(line, &record) != nil {
		return at, "", errMalformed
	}
	return record.Time, string(hash), nil
}

// Verify reads a log from its files, oldest first (see [Files]), and writes its faults to w, one line for each place,
// and its first and last records. It returns an error if there is no record, or for any fault that a crash does not
// explain.
//
// The first line must be the very first one, or follow the line with the hash after, if earlier files were archived
// or deleted; if after is "any", it may follow any line. The line with the hash last, which [Log.End] once returned,
// must be there; otherwise the end was cut off or changed. With an empty last Verify cannot tell that. Memory is
// bounded: a line of more than 64 KiB is no record.
func Verify(w io.Writer, after, last string, files ...io.Reader) error {
	v := verification{out: w, last: last, since: -1}
	for _, f := range files {
		where := "auditlog: "
		if named, ok := f.(interface{ Name() string }); ok && len(files) > 1 {
			where += named.Name() + ": "
		}
		if err := v.read(f, where); err != nil {
			return err
		}
	}
	v.settle(v.open)
	if v.records == 0 {
		return errors.New("auditlog: there is no record: this is no audit log, or all of it was overwritten")
	}
	from := "the first line of all"
	switch {
	case strings.Trim(v.before, "0") == "":
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

// verification is the progress of Verify.
type verification struct {
	out            io.Writer
	records, wrong int
	last           string // the hash that was once the last line's
	since          int    // lines after that; less than 0 until it is found
	begin, end     time.Time
	before, hash   string // before the first record, and of the last line
	open           bool   // the last line has no newline
	torn           string // the place of an unfinished line that a crash explains if the next line follows it
}

// read reads the lines of a file, which continues the file before it.
func (v *verification) read(f io.Reader, where string) error {
	r := bufio.NewReaderSize(f, maxLine+1) // a record and its newline
	for number := 1; ; number++ {
		sum, long := sha256.New(), false
		line, err := r.ReadSlice('\n')
		for err == bufio.ErrBufferFull {
			sum.Write(line)
			long = true
			line, err = r.ReadSlice('\n')
		}
		where := fmt.Sprintf("%sline %d: ", where, number)
		switch {
		case err == io.EOF && len(line) == 0 && !long:
			return nil
		case err != nil && err != io.EOF:
			return fmt.Errorf("%s%w", where, err)
		}
		line = bytes.TrimSuffix(line, []byte{'\n'})
		sum.Write(line)
		if long {
			line = nil // no record, whatever its end looks like
		}
		v.open = err == io.EOF
		v.add(line, hex.EncodeToString(sum.Sum(nil)), where)
	}
}

// add checks a line that has the given hash.
func (v *verification) add(line []byte, hash, where string) {
	at, prev, err := parse(line)
	follows := v.hash == "" || err == nil && prev == v.hash
	v.settle(follows)
	switch {
	case err == errTorn:
		v.torn = where
	case err != nil:
		v.complain(where, err)
	case !follows:
		v.complain(where, errChain)
	}
	if err == nil {
		if v.end = at; v.records == 0 {
			v.before, v.begin = prev, at
		}
		v.records++
	}
	if v.hash = hash; v.since >= 0 || hash == v.last {
		v.since++
	}
}

// settle judges an unfinished line, once it is known whether a crash explains it.
func (v *verification) settle(crash bool) {
	switch {
	case v.torn == "":
	case crash:
		fmt.Fprintf(v.out, "%s%v\n", v.torn, errTorn)
	default:
		v.complain(v.torn, fmt.Errorf("%w: it is unfinished, and was not the last one at a crash", errMalformed))
	}
	v.torn = ""
}

func (v *verification) complain(where string, err error) {
	v.wrong++
	fmt.Fprintf(v.out, "%s%v\n", where, err)
}
