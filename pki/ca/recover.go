package ca

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// Recovery describes the version that [RecoverDirStore] chooses as the record of a CA. It holds no secret.
type Recovery struct {
	redacted // prints the version in one line

	Version  string // the name of its directory
	Root     string // the serial number of the root that signs, in hexadecimal; empty for a store of JWT keys
	RootEnds time.Time

	// Left has the versions that were not chosen, each with the reason. They stay where they are.
	Left []string
}

// RecoverDirStore finds the newest complete version in a directory of [NewDirStore] whose file CURRENT is lost or
// wrong. It returns that version and, with write, makes CURRENT name it, durably. It removes nothing, and authorities
// need not be stopped.
//
// A version is complete if its contents match the hash in its name. A version of an older release, whose name has no
// hash, is complete if it has a readable state, or the certificate and the key of a CA. The newest version has the
// highest revision. Versions of different CAs are refused: the operator must move the wrong ones away. A directory
// without a fault is refused too.
func RecoverDirStore(ctx context.Context, dir string, write bool) (Recovery, error) {
	d, err := newDirStore(dir)
	if err != nil {
		return Recovery{}, err
	}
	r, err := d.recover(ctx, write)
	if err != nil {
		return Recovery{}, fmt.Errorf("ca: recover %s: %w", d.dir, err)
	}
	return r, nil
}

func (d *dirStore) recover(ctx context.Context, write bool) (Recovery, error) {
	root, err := private.OpenDir(d.dir, keys)
	if err != nil {
		return Recovery{}, err
	}
	defer root.Close()
	unlock, err := d.lock(ctx, root)
	if err != nil {
		return Recovery{}, err
	}
	defer unlock()
	switch version, err := d.current(root); {
	case err == nil && version != "":
		if _, err := d.version(root, version); err == nil {
			return Recovery{}, fmt.Errorf("there is nothing to recover: CURRENT names %s, which is complete", version)
		}
	case err != nil && !errors.Is(err, errPointer):
		return Recovery{}, err
	}
	best, err := d.newest(root)
	if err != nil || !write {
		return best, err
	}
	const temp = "tmp-recovered"
	if err := d.disk.RemoveAll(root, temp); err != nil {
		return Recovery{}, err
	}
	if err := d.writeFile(root, temp, []byte(best.Version+"\n")); err != nil {
		return Recovery{}, err
	}
	if err := d.disk.Rename(root, temp, currentName); err != nil {
		return Recovery{}, err
	}
	return best, d.disk.SyncDir(root, ".")
}

// candidate is a complete version.
type candidate struct {
	Recovery
	authority string    // the CA
	revision  uint64    // counts the saves of the CA; 0 if the version does not say
	written   time.Time // the directory's time
	begun     bool      // it was being written, so any other version is better
}

// newest returns the version to recover.
func (d *dirStore) newest(root *os.Root) (Recovery, error) {
	names, err := d.versions(root)
	if err != nil {
		return Recovery{}, err
	}
	begun, _ := d.pointer(root, begunName)
	var found []candidate
	var left []string
	for _, name := range names {
		c, err := d.candidate(root, name)
		if err != nil {
			left = append(left, fmt.Sprintf("%s: not complete: %v", name, err))
			continue
		}
		c.begun = name == begun
		found = append(found, c)
	}
	if len(found) == 0 {
		return Recovery{}, fmt.Errorf("%w: no version is complete (%d are not: %s); restore the folder from a backup",
			ErrUnfit, len(left), strings.Join(left, "; "))
	}
	slices.SortStableFunc(found, func(a, b candidate) int {
		switch {
		case a.begun != b.begun && b.begun, a.begun == b.begun && a.revision > b.revision:
			return -1
		case a.begun != b.begun || a.revision < b.revision:
			return 1
		}
		return b.written.Compare(a.written)
	})
	best := found[0]
	for _, c := range found[1:] {
		if c.authority != best.authority {
			return Recovery{}, fmt.Errorf("%w: there are versions of different CAs: %s; and %s; move "+
				"those away that are wrong", ErrUnfit, best.Recovery, c.Recovery)
		}
		left = append(left, c.Recovery.String()+": older")
	}
	best.Left = left
	return best.Recovery, nil
}

// candidate returns a version if it is complete.
func (d *dirStore) candidate(root *os.Root, name string) (c candidate, err error) {
	info, err := root.Lstat(name)
	if err != nil {
		return c, err
	}
	if !info.IsDir() {
		return c, fmt.Errorf("%s is not a folder", filepath.Join(d.dir, name))
	}
	r, err := d.version(root, name)
	if err != nil {
		return c, err
	}
	data := r.Data()
	c = candidate{Recovery: Recovery{Version: name}, written: info.ModTime()}
	text := name + ", written " + c.written.UTC().Format(time.RFC3339)
	if state, ok := data[stateName]; ok {
		var s struct {
			Authority string `json:"authority"`
			Revision  uint64 `json:"revision"`
		}
		if err := json.Unmarshal(state, &s); err != nil || s.Authority == "" || s.Revision == 0 {
			return c, errors.Join(errors.New(stateName+" cannot be read"), err)
		}
		c.authority, c.revision = s.Authority, s.Revision
		text += fmt.Sprintf(", revision %d", c.revision)
	} else if sumOf(name) == "" && (len(data[caCertName]) == 0 || len(data[caKeyName]) == 0) {
		return c, fmt.Errorf("%w: it has neither %s nor both of %s and %s", fs.ErrNotExist, stateName, caCertName,
			caKeyName)
	}
	if len(data[caCertName]) > 0 {
		cert, err := firstCertificate(data[caCertName])
		if err != nil {
			return c, err
		}
		c.Root, c.RootEnds = rotation.Serial(cert), cert.NotAfter
		c.authority = cmp.Or(c.authority, c.Root)
		text += fmt.Sprintf(", root %s until %s", c.Root, c.RootEnds.UTC().Format(time.RFC3339))
	}
	c.redacted = redact.New(text)
	return c, nil
}
