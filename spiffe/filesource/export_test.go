package filesource

import (
	"io/fs"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/test/must"
)

var missing = follow.File{Err: fs.ErrNotExist}

// Taking returns a source, and a function that gives it files without a file system.
func Taking(t testing.TB, cfg Config) (*Source, func(files map[string][]byte) error) {
	t.Helper()
	s := must.Get(New(cfg))(t)
	return s, func(files map[string][]byte) error {
		read := follow.Files{cfg.CertFile: missing, cfg.KeyFile: missing}
		for _, b := range cfg.Bundles {
			read[b.Path] = missing
		}
		for path, data := range files {
			read[path] = follow.File{Data: data}
		}
		return s.files.take(t.Context(), read)
	}
}

// Status is the state of a Source.
type Status struct {
	Ready               bool
	LastUpdate, Checked time.Time
	Err                 error
	Notes               []error
}

// Status returns the state of s.
func (s *Source) Status() Status {
	st := s.cur.Load()
	checked, err := s.follower.Status()
	return Status{st.ready, st.at, checked, err, st.notes}
}
