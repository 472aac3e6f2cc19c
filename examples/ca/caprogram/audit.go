package caprogram

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

// verifyAudit verifies audit logs with their rotated files, one chain for each. It verifies the end of a single one by
// the hash that -audit-head holds.
func (o *options) verifyAudit(in io.Reader, out io.Writer) error {
	head, err := o.readHead()
	if err == nil && head == "" && o.auditHead != "" {
		err = fmt.Errorf("%s is empty", o.auditHead)
	}
	if err != nil {
		return fmt.Errorf("-audit-head: %w", err)
	}
	logs := strings.Split(o.argument, ",")
	var failed []string
	for _, log := range logs {
		if len(logs) > 1 {
			fmt.Fprintf(out, "%s:\n", log)
		}
		if log == "-" {
			err = auditlog.Verify(out, o.auditAfter, head, in)
		} else {
			err = verify(out, o.auditAfter, head, log)
		}
		if err != nil {
			failed = append(failed, log)
			err = fmt.Errorf("-verify-audit: %s", strings.TrimPrefix(err.Error(), "auditlog: "))
			if len(logs) > 1 {
				fmt.Fprintln(out, strings.TrimPrefix(err.Error(), "-verify-audit: "))
			}
			continue
		}
		fmt.Fprintln(out, "all records are as they were written")
	}
	switch {
	case len(logs) > 1 && failed != nil:
		return fmt.Errorf("-verify-audit: %d of %d logs: %s", len(failed), len(logs), strings.Join(failed, ", "))
	case failed != nil:
		return err
	case head == "":
		fmt.Fprintln(out, "whether lines after that were cut off shows only by a hash that is kept elsewhere: "+
			"-audit-head names its file")
	}
	return nil
}

// verify verifies the files of the audit log at path.
func verify(out io.Writer, after, head, path string) error {
	paths, err := auditlog.Files(path)
	var logs []io.Reader
	for _, path := range paths {
		f, bad := os.Open(path)
		if err = errors.Join(err, bad); bad == nil {
			defer f.Close()
			logs = append(logs, f)
		}
	}
	return cmp.Or(err, auditlog.Verify(out, after, head, logs...))
}

// reopenAudit reopens the audit log at each signal, until ctx is done.
func reopenAudit(ctx context.Context, signals <-chan os.Signal, a *caconfig.Authority, log *slog.Logger) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-signals:
		}
		if err := a.ReopenAudit(); err != nil {
			log.Error("ca: the audit log cannot be reopened", "err", err)
		} else {
			log.Info("ca: the audit log was reopened")
		}
	}
}

// readHead returns the hash that -audit-head holds.
func (o *options) readHead() (string, error) {
	if o.auditHead == "" {
		return "", nil
	}
	text, err := os.ReadFile(o.auditHead)
	return strings.TrimSpace(string(text)), err
}

// headEvery is how often the hash of the audit log's last line is copied to -audit-head, if it has changed.
const headEvery = time.Second

// keepHead keeps that hash up to date until ctx is done. It does not overwrite a hash that is missing in the log:
// that hash proves that lines were cut off.
func (o *options) keepHead(ctx context.Context, a *caconfig.Authority, log *slog.Logger) {
	written, err := o.readHead()
	if err == nil && written != "" {
		err = verify(io.Discard, "any", written, o.AuditLog) // the first files may be gone
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Error("ca: -audit-head: the file stays as it is; keep it and the audit log, and name another file", "err",
			err)
		return
	}
	failed := ""
	for done := false; !done; {
		select {
		case <-ctx.Done():
			done = true
		case <-time.After(headEvery):
		}
		end := a.AuditEnd()
		if end == written {
			continue
		}
		if err := o.writeHead(end); err == nil {
			written, failed = end, ""
		} else if err.Error() != failed {
			failed = err.Error()
			log.Warn("ca: -audit-head cannot be written, and is tried again", "err", err)
		}
	}
}

func (o *options) writeHead(hash string) error {
	next := o.auditHead + ".new"
	if err := os.WriteFile(next, []byte(hash+"\n"), 0o600); err != nil {
		return err
	}
	return os.Rename(next, o.auditHead)
}

// missingRoot compares the audit log with the store, and names a root that is newer than the signing one but missing
// in the store, as after a restore. It reads the last two files, and ignores files that it cannot read.
func (o *options) missingRoot(a *caconfig.Authority) string {
	if a.Own == nil || o.AuditLog == "none" {
		return ""
	}
	s := a.Own.Status()
	paths, _ := auditlog.Files(o.AuditLog)
	roots := map[string]ca.KeyEvent{} // that were not revoked or retired since
	for _, path := range paths[max(0, len(paths)-2):] {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			// The first member is a time, and most lines are about certificates.
			_, rest, _ := bytes.Cut(lines.Bytes(), []byte{','})
			var e ca.KeyEvent
			if !bytes.HasPrefix(rest, []byte(`"event":`)) || json.Unmarshal(lines.Bytes(), &e) != nil ||
				e.Key != "root" {
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
	var newest ca.KeyEvent
	for _, k := range s.Roots {
		if delete(roots, k.ID); k.Phase == "active" {
			newest.Time = k.Activates
		}
	}
	for _, e := range roots {
		if e.Time.After(newest.Time) && e.NotAfter.After(time.Now()) {
			newest = e
		}
	}
	if newest.Serial == "" {
		return ""
	}
	return fmt.Sprintf("the store is older than the audit log, such as a backup: root %s is missing here (%s at "+
		"%s), and peers refuse what it signed until that is renewed",
		newest.Serial, newest.Event, newest.Time.UTC().Format(time.RFC3339))
}
