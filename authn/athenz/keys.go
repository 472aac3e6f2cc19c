package athenz

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

const maxKeyFile = 64 << 10 // bytes

// keyDir is a directory with the versions of a key: files NAME.v1, NAME.v2 and so on. It is read for each use,
// because versions come and go while the program runs.
type keyDir struct {
	dir, name string
	private   bool
}

func (k *keyDir) check() error {
	if k.dir == "" {
		return errors.New("the Dir is empty: it has to be the directory with the keys")
	}
	if k.name == "" || k.name[0] == '.' || !isTokenText(k.name) {
		return fmt.Errorf("the KeyName %.64q has to be a name of letters, digits, hyphens, periods and "+
			"underscores", k.name)
	}
	return nil
}

// uri returns the issuer name for a version of the key.
func (k *keyDir) uri(version int) string {
	return "secret:" + k.name + "?version=v" + strconv.Itoa(version)
}

// version returns the version that an issuer name of this key contains.
func (k *keyDir) version(uri string) (int, error) {
	text, ok := strings.CutPrefix(uri, "secret:"+k.name+"?version=")
	if !ok {
		return 0, fmt.Errorf("the issuer %q is not secret:%s?version=vN", token.Clip(uri, token.MaxQuoted), k.name)
	}
	n, ok := parseVersion(text)
	if !ok {
		return 0, fmt.Errorf("the version %q is not v and a number", token.Clip(text, token.MaxQuoted))
	}
	return n, nil
}

// parseVersion parses v1, v2 and so on. It accepts one spelling of each number.
func parseVersion(text string) (int, bool) {
	digits, ok := strings.CutPrefix(text, "v")
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && n >= 0 && strconv.Itoa(n) == digits
}

func (k *keyDir) newest() (int, error) {
	files, err := os.ReadDir(k.dir)
	if err != nil {
		return 0, err
	}
	best := -1
	for _, f := range files {
		if text, ok := strings.CutPrefix(f.Name(), k.name+"."); ok {
			if n, ok := parseVersion(text); ok {
				best = max(best, n)
			}
		}
	}
	if best < 0 {
		return 0, fmt.Errorf("the directory %q has no file %s.v1 or of a later version: %w", k.dir, k.name,
			fs.ErrNotExist)
	}
	return best, nil
}

// readKey parses the file with a version of the key.
func readKey[K any](k *keyDir, version int, parse func(pem []byte) (K, error)) (key K, err error) {
	path := filepath.Join(k.dir, k.name+".v"+strconv.Itoa(version))
	f, err := private.OpenGiven(path, k.private, nil, private.Options{})
	if err != nil {
		return key, err
	}
	defer f.Close() // only read
	data, err := files.ReadAll(f, path, maxKeyFile)
	if err != nil {
		return key, err
	}
	if key, err = parse(data); err != nil {
		return key, fmt.Errorf("version v%d of the key %q: %w", version, k.name, err)
	}
	return key, nil
}
