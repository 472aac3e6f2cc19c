// Package smallfile reads files that another process writes and that must be small: tokens, certificates and keys.
package smallfile

import (
	"fmt"
	"io"
	"os"
)

// Read returns the contents of the regular file with the name, links followed. A file of more than limit bytes is an
// error, and so is one that is not regular: a named pipe would block its reader. If there is no file, the error is an
// fs.ErrNotExist.
func Read(name string, limit int) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	data, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	switch {
	case err != nil:
		return nil, err
	case len(data) > limit:
		return nil, fmt.Errorf("%s is larger than %d KiB", name, limit>>10)
	}
	return data, nil
}
