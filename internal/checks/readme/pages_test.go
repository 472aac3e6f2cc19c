package readme_test

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/readme"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// files returns the files of the project with this ending.
func files(t *testing.T, ending string) []string {
	var all []string
	require.NoError(t, filepath.WalkDir("../../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata"):
			return filepath.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ending):
			all = append(all, path)
		}
		return nil
	}))
	require.NotEmpty(t, all)
	return all
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	metric  = regexp.MustCompile(`svidkit_[a-z0-9_]+[a-z0-9]`)
	fenced  = regexp.MustCompile("(?ms)^```.*?^```|^(?: {4}|\t).*?$")
)

// anchors are what can be linked to in a page, as GitHub makes them of its headings.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		name := strings.ToLower(link.ReplaceAllString(strings.ReplaceAll(m[1], "[", ""), ""))
		name = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(name, "")
		all[strings.ReplaceAll(name, " ", "-")] = true
	}
	return all
}

// TestPages: each link of a page within the project leads to something, and each metric in it is one that the code writes.
func TestPages(t *testing.T) {
	t.Parallel()
	var code strings.Builder
	for _, file := range files(t, ".go") {
		if !strings.HasSuffix(file, "_test.go") {
			text := must.Get(os.ReadFile(file))(t)
			code.Write(text)
		}
	}
	written := map[string]bool{}
	for _, m := range metric.FindAllString(code.String(), -1) {
		written[m] = true
	}
	for _, page := range files(t, ".md") {
		text := must.Get(os.ReadFile(page))(t)
		for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(string(text), ""), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			target := page
			if file != "" {
				target = filepath.Join(filepath.Dir(page), filepath.FromSlash(file))
			}
			info, err := os.Stat(target)
			if !assert.NoError(t, err, "%s: %s", page, m[1]) || anchor == "" || info.IsDir() {
				continue
			}
			there := must.Get(os.ReadFile(target))(t)
			assert.True(t, anchors(string(there))[anchor], "%s: %s has no heading for this link", page, m[1])
		}
		if filepath.Base(page) == "METRICS.md" { // package deptest makes it from the code
			continue
		}
		for _, m := range metric.FindAllString(string(text), -1) {
			assert.True(t, written[m], "%s: no part writes the metric %s", page, m)
		}
	}
}

// TestTestCommands: the commands of pages that run tests name tests that there are, and their packages before -long, which is
// not a flag of go test: what follows it is for the tests.
func TestTestCommands(t *testing.T) {
	t.Parallel()
	command := regexp.MustCompile("go (?:-C ([\\w/]+) )?test [^`|\\n]*")
	run := regexp.MustCompile(`-(?:run|bench) '?([A-Z]\w+)`)
	found := 0
	for _, page := range files(t, ".md") {
		text := must.Get(os.ReadFile(page))(t)
		for _, m := range command.FindAllStringSubmatch(string(text), -1) {
			line := m[0]
			_, after, _ := strings.Cut(line, " -long")
			assert.NotContains(t, after, "./", "%s: %s", page, line)
			name := run.FindStringSubmatch(line)
			for _, dir := range regexp.MustCompile(`\./[\w/-]+`).FindAllString(line, -1) {
				tests := must.Get(filepath.Glob(filepath.Join("../../..", m[1], dir, "*_test.go")))(t)
				assert.NotEmpty(t, tests, "%s: %s", page, line)
				if name == nil {
					continue
				}
				found++
				var code strings.Builder
				for _, file := range tests {
					text := must.Get(os.ReadFile(file))(t)
					code.Write(text)
				}
				assert.Regexp(t, `func \w*`+name[1]+`\w*\(`, code.String(), "%s: %s", page, line)
			}
		}
	}
	assert.Greater(t, found, 5)
}

// TestReadme compiles the Go snippets of README.md, as they stand.
func TestReadme(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	root := must.Get(filepath.Abs("../../.."))(t)
	files := must.Get(readme.Snippets(root))(t)

	// The files are laid over places in the module, so that nothing is written to the tree.
	dir := t.TempDir()
	flag := "-overlay=" + filepath.Join(dir, "overlay.json")
	args := []string{"list", "-export", "-test", flag} // which compiles, and links nothing
	replace := map[string]string{}
	for name, text := range files {
		file := filepath.Join(dir, filepath.Base(name))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		replace[filepath.Join(root, "internal", "test", "readme", filepath.FromSlash(name))] = file
		args = append(args, "./internal/test/readme/"+path.Dir(name))
	}
	overlay := must.Get(json.Marshal(map[string]any{"Replace": replace}))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "go %v: %s", args, out)
}
