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

// The end of each line: what comes before and after the hash of the line before it.
const (
	prevMember = `,"prev":"`
	lineEnd    = `"}`
	endLen     = len(prevMember) + 2*sha256.Size + len(lineEnd)
)

type digest = [sha256.Size]byte

var noDigest = strings.Repeat("0", 2*sha256.Size)

// encode returns the line of a record without its newline, after a line of zeros: see link.
func encode(record any) ([]byte, error) {
	var b bytes.Buffer
	j := json.NewEncoder(&b)
	j.SetEscapeHTML(false)
	if err := j.Encode(record); err != nil {
		return nil, err
	}
	line := append(bytes.TrimSuffix(b.Bytes(), []byte("}\n")), prevMember+noDigest+lineEnd...)
	if len(line) > maxLine {
		return nil, fmt.Errorf("it would be a line of more than %d bytes", maxLine)
	}
	return line, nil
}

// link makes line, which encode returned, follow one with the hash prev, and returns its own hash.
func link(line []byte, prev digest) digest {
	hex.Encode(line[len(line)-len(lineEnd)-2*sha256.Size:], prev[:])
	return sha256.Sum256(line)
}

// What is wrong with a line.
var (
	errTorn      = errors.New("an unfinished line, as a crash leaves it")
	errMalformed = errors.New("not an audit record")
	errChain     = errors.New("the line before is not the one that this line was written after")
)

// parse returns the time of a record, and what its line says of the line before. The error is errTorn for a line
// without the end that each record has and no part of one: inside of a string its quotes would have backslashes.
func parse(line []byte) (at time.Time, prev string, err error) {
	if len(line) < endLen || len(line) > maxLine {
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

// Verify reads a log in its files, the oldest first (see [Files]), and writes to w what is wrong with it, a line for
// each place, and where it begins and ends. It returns an error if there is no record, or if anything is wrong but for
// what a crash leaves.
//
// The first line must be the first one of all, or follow the line with the hash after, if files before it were
// archived or deleted; if after is "any", it may follow any line. The line with the hash last, as [Log.End] returned
// it once, must be there, or the end was cut off or changed; with an empty last Verify cannot tell that. Memory is
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
	out            io.Writer
	records, wrong int
	last           string // the hash of the line that was the last one once
	since          int    // lines after that; less than 0 before it was found
	begin, end     time.Time
	before, hash   string // before the first record, and of the last line
	open           bool   // the last line has no newline
	torn           string // where an unfinished line is that a crash has left, if the next line follows it
}

// read reads the lines of a file, which goes on where the one before ends.
func (v *verification) read(f io.Reader, where string) error {
	r, sum, line := bufio.NewReader(f), sha256.New(), []byte(nil)
	for number := 1; ; number++ {
		sum.Reset()
		line = line[:0]
		size, err := 0, bufio.ErrBufferFull
		for err == bufio.ErrBufferFull {
			var part []byte
			part, err = r.ReadSlice('\n')
			size += len(part)
			part = bytes.TrimSuffix(part, []byte{'\n'})
			sum.Write(part)
			if len(line) <= maxLine { // of a longer one the rest does not matter
				line = append(line, part...)
			}
		}
		where := fmt.Sprintf("%sline %d: ", where, number)
		switch {
		case err == io.EOF && size == 0:
			return nil
		case err != nil && err != io.EOF:
			return fmt.Errorf("%s%w", where, err)
		}
		v.open = err == io.EOF
		v.add(line, hex.EncodeToString(sum.Sum(nil)), where)
	}
}

// add judges a line that has the given hash.
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

// settle judges an unfinished line when it is known whether a crash leaves one there.
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
