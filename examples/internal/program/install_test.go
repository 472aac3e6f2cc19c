package program_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/must"
)

const manifest = `# What it is.
#
#   image=registry.example.org/web:1 the image
#   name=? of it
#   more= nothing
kind: Deployment
metadata: {name: ${name}}
image: ${image}
args: [$(POD_NAME), "${more}"]
`

func TestManifest(t *testing.T) {
	t.Parallel()
	printed := func(args ...string) (string, error) {
		flags := flag.NewFlagSet("web", flag.ContinueOnError)
		(&program.Manifest{Text: manifest}).Register(flags)
		var out bytes.Buffer
		err := program.ParseFlags(flags, args, &out, program.Help{})
		return out.String(), err
	}
	out, err := printed("-install", "kubernetes", "-with", "name=web", "-with", "image=other/web@sha256:0a")
	require.ErrorIs(t, err, flag.ErrHelp, "the program ends")
	assert.Equal(t, `# What it is.
#
#   image=other/web@sha256:0a the image
#   name=web of it
#   more= nothing
kind: Deployment
metadata: {name: web}
image: other/web@sha256:0a
args: [$(POD_NAME), ""]
`, out)
	out = must.Get(printed())(t, "the program runs")
	assert.Empty(t, out)

	for _, c := range []struct {
		want string
		args []string
	}{
		{"-with name=VALUE", []string{"-install", "kubernetes"}},
		{`there is no "imgae" here, but image, more, name`, []string{"-install", "kubernetes", "-with", "imgae=x", "-with", "name=x"}},
		{"set it to kubernetes", []string{"-install", "docker"}},
		{"it is for -install kubernetes", []string{"-with", "name=x"}},
		{"want NAME=VALUE", []string{"-install", "kubernetes", "-with", "name"}},
		{"a value of letters", []string{"-install", "kubernetes", "-with", "name=x}\nkind: Secret"}},
		{"a value of letters", []string{"-install", "kubernetes", "-with", "name=x, y: z"}},
	} {
		out, err := printed(c.args...)
		require.ErrorAs(t, err, new(program.UsageError), c.args)
		require.ErrorContains(t, err, c.want)
		assert.Empty(t, out)
	}
}

// The pods of our own are told nothing of the Services of their namespace; those that a manifest adds a container to stay as they are.
func TestServiceLinks(t *testing.T) {
	t.Parallel()
	names := must.Get(filepath.Glob("../../*/*.yaml"))(t)
	own, added := 0, 0
	for _, name := range names {
		text := must.Get(os.ReadFile(name))(t)
		for object := range strings.SplitSeq(string(text), "\n---\n") {
			switch {
			case !regexp.MustCompile(`(?m)^kind: (Deployment|DaemonSet|StatefulSet)$`).MatchString(object):
			case strings.Contains(object, "\n  selector: "):
				own++
				assert.Contains(t, object, "\n      enableServiceLinks: false\n", name)
			default:
				added++
				assert.NotContains(t, object, "enableServiceLinks: false", name)
				assert.Contains(t, object, "(enableServiceLinks) stays as it is", name)
			}
		}
	}
	assert.Equal(t, 6, own)
	assert.Equal(t, 4, added)
}
