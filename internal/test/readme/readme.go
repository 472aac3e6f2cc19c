// Package readme reads the Go snippets of README.md, for tests that build them.
package readme

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

var fence = regexp.MustCompile("(?s)```go\n(package (\\w+)\n.*?)```")

// Snippets returns the snippets of the README below root, each a whole file, by names for them: a directory and a
// file of it.
func Snippets(root string) (map[string]string, error) {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		return nil, err
	}
	files := make(map[string]string)
	for i, s := range fence.FindAllStringSubmatch(string(text), -1) {
		name := fmt.Sprintf("snippet%d/%s.go", i, s[2])
		files[name] = s[1]
	}
	if len(files) == 0 || len(files) != strings.Count(string(text), "```go") {
		return nil, fmt.Errorf("README.md below %s has a snippet that is no file, or none at all", root)
	}
	return files, nil
}
