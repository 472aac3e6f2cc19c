package auditlog

import (
	"cmp"
	"log/slog"
	"os"
	"strings"
)

// Faults stands between a Log and its disk. A nil function does nothing.
type Faults struct {
	Write func(p []byte) (n int, err error) // n bytes of p reach the file; an error fails the write
	Sync  func() error

	SyncDir func() error // of the directory

	NoSync bool // to see what the rest costs
}

// OpenFaulty is [Open] with a disk that can fail.
func OpenFaulty(path string, logger *slog.Logger, f *Faults) (*Log, error) {
	l, err := newLog(path, logger)
	if err != nil {
		return nil, err
	}
	write, sync, dirs := l.write, l.sync, l.dirs
	l.write = func(file *os.File, p []byte) (int, error) {
		if f.Write == nil {
			return write(file, p)
		}
		n, fault := f.Write(p)
		n, err := write(file, p[:min(n, len(p))])
		return n, cmp.Or(fault, err)
	}
	l.sync = func(file *os.File) error {
		if f.Sync != nil {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		if f.NoSync {
			return nil
		}
		return sync(file)
	}
	l.dirs = func(dir string) error {
		if f.SyncDir != nil {
			if err := f.SyncDir(); err != nil {
				return err
			}
		}
		return dirs(dir)
	}
	return l, l.Reopen()
}

// MaxQueue is how many records wait.
const MaxQueue = maxQueue

// Pending returns how many records wait for the next write.
func (l *Log) Pending() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending == nil {
		return 0
	}
	return len(l.pending.lines)
}

// Line returns the line of a record, without a newline.
func Line(record any, prev [32]byte) (string, error) {
	line, err := encode(record)
	text, _ := link(nil, line, prev)
	return strings.TrimSuffix(string(text), "\n"), err
}
