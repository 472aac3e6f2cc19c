package caconfig

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

// headEvery is how often the end of the audit log is written to -audit-head, if it is another one.
const headEvery = time.Second

// keepHead keeps the hash of the last line of the audit log in -audit-head, until ctx is done. A hash that is there and is not in the
// log is proof that lines were cut off, and stays.
func (c *Config) keepHead(ctx context.Context, l *auditlog.Log, log *slog.Logger) {
	text, err := os.ReadFile(c.AuditHead)
	written := string(bytes.TrimSpace(text))
	if written != "" {
		err = c.verify(written)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Error("caconfig: -audit-head: the file stays as it is, and so should the audit log: name another one when both are kept elsewhere", "err", err)
		return
	}
	failures := ratelog.New(log, 0)
	for done := false; ; {
		if end := l.End(); end != written {
			if err := c.writeHead(end); err != nil {
				failures.Warn("caconfig: -audit-head cannot be written", "file", slog.Any("err", err))
			} else {
				written = end
			}
		}
		if done {
			return
		}
		select {
		case <-ctx.Done():
			done = true
		case <-time.After(headEvery):
		}
	}
}

// verify verifies the audit log, whose last line was once the one with the hash last.
func (c *Config) verify(last string) error {
	paths, err := auditlog.Files(c.AuditLog)
	var files []io.Reader
	for _, path := range paths {
		f, bad := os.Open(path)
		if err = errors.Join(err, bad); bad == nil {
			defer f.Close()
			files = append(files, f)
		}
	}
	if err != nil {
		return err
	}
	return auditlog.Verify(io.Discard, last, files...)
}

func (c *Config) writeHead(hash string) error {
	root, err := os.OpenRoot(filepath.Dir(c.AuditHead))
	if err != nil {
		return err
	}
	defer root.Close()
	return fileset.Replace(root, filepath.Base(c.AuditHead), fileset.File{Data: []byte(hash + "\n"), Mode: 0o600})
}

// rootsIn returns what the last two files of the audit log at path say of roots that were not revoked or retired since, by serial number.
// What cannot be read says nothing.
func rootsIn(path string) map[string]*ca.KeyEvent {
	paths, _ := auditlog.Files(path)
	roots := map[string]*ca.KeyEvent{}
	for _, path := range paths[max(0, len(paths)-2):] {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			_, rest, _ := bytes.Cut(lines.Bytes(), []byte{','}) // the first member is a time, and most lines are of certificates
			e := new(ca.KeyEvent)
			if !bytes.HasPrefix(rest, []byte(`"event":`)) || json.Unmarshal(lines.Bytes(), e) != nil || e.Key != "root" {
				continue
			}
			switch e.Event {
			case "created", "adopted", "prepared", "activated", "renewed":
				roots[e.Serial] = e
			case "tainted", "revoked", "retired":
				delete(roots, e.Serial)
			}
		}
	}
	return roots
}

// missing says which of the roots is newer than the one that signs, and not in the store, as after a restore.
func missing(roots map[string]*ca.KeyEvent, s ca.Status) string {
	var signs time.Time
	for _, k := range s.Roots {
		if delete(roots, k.ID); k.Phase == ca.Active {
			signs = k.Activates
		}
	}
	var newest *ca.KeyEvent
	for _, e := range roots {
		if e.Time.After(signs) && e.NotAfter.After(time.Now()) && (newest == nil || e.Time.After(newest.Time)) {
			newest = e
		}
	}
	if newest == nil {
		return ""
	}
	return fmt.Sprintf("the store is older than the audit log, such as a backup: root %s is missing here (%s at %s), and peers refuse what it signed until that is renewed",
		newest.Serial, newest.Event, newest.Time.UTC().Format(time.RFC3339))
}
