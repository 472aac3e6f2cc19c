// Package files reads small files that other processes write, such as tokens, certificates and keys.
package files

import (
	"fmt"
	"io"
	"os"
)

// Read returns the contents of the regular file name, following links. A file of more than limit bytes is an error,
// and so is one that is not regular: a named pipe would block its reader. If the file does not exist, the error wraps
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
	return ReadAll(f, name, limit)
}

// ReadAll returns the rest of an open file. More than limit bytes are an error that contains name.
func ReadAll(r io.Reader, name string, limit int) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	switch {
	case err != nil:
		return nil, err
	case len(data) > limit:
		return nil, fmt.Errorf("%s has more than %d bytes", name, limit)
	}
	return data, nil
}
