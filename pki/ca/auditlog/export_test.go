package auditlog

import (
	"log/slog"
	"time"
)

// Faults stands between a Log and its disk. A nil function does nothing.
type Faults struct {
	Write func(p []byte) (n int, err error) // n bytes of p reach the file; an error fails the write
	Sync  func() error
	Open  func() error

	SyncDir func() error // of the folder

	NoSync bool // to see what the rest costs
}

// OpenFaulty is [Open] with a disk that can fail.
func OpenFaulty(path string, logger *slog.Logger, f *Faults) (*Log, error) {
	return open(path, logger, faultyFS{f: f})
}

type faultyFS struct {
	osFileSystem
	f *Faults
}

func (fsys faultyFS) OpenFile(path string, warn func(error)) (file, error) {
	if fsys.f.Open != nil {
		if err := fsys.f.Open(); err != nil {
			return nil, err
		}
	}
	f, err := fsys.osFileSystem.OpenFile(path, warn)
	if err != nil {
		return nil, err
	}
	return faultyFile{f, fsys.f}, nil
}

func (fsys faultyFS) Probe(path string, n int) error {
	if fsys.f.Write != nil {
		if n, fault := fsys.f.Write(make([]byte, n)); fault != nil && n < probeSize {
			return fault
		}
		return nil
	}
	return fsys.osFileSystem.Probe(path, n)
}

func (fsys faultyFS) SyncDir(dir string) error {
	if fsys.f.SyncDir != nil {
		if err := fsys.f.SyncDir(); err != nil {
			return err
		}
	}
	return fsys.osFileSystem.SyncDir(dir)
}

type faultyFile struct {
	file
	f *Faults
}

func (f faultyFile) Write(p []byte) (int, error) {
	if f.f.Write == nil {
		return f.file.Write(p)
	}
	n, fault := f.f.Write(p)
	n, err := f.file.Write(p[:n])
	if fault != nil {
		err = fault
	}
	return n, err
}

func (f faultyFile) Sync() error {
	if f.f.Sync != nil {
		if err := f.f.Sync(); err != nil {
			return err
		}
	}
	if f.f.NoSync {
		return nil
	}
	return f.file.Sync()
}

// OpenHasty is [Open] of a Log that looks at its disk more often than once a second.
func OpenHasty(path string) (*Log, error) {
	l, err := Open(path, nil)
	if err == nil {
		l.every = 50 * time.Millisecond
	}
	return l, err
}

// SetQueue sets how many records wait. It is called before there are any.
func (l *Log) SetQueue(n int) { l.room = make(chan struct{}, n) }

// Pending returns how many records wait for the next write.
func (l *Log) Pending() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending == nil {
		return 0
	}
	return len(l.pending.lines)
}

// Line returns the line of e, without a newline.
func Line(e Entry, prev [32]byte) (string, error) {
	line, err := encode(e)
	if err == nil {
		link(line, prev)
	}
	return string(line), err
}
