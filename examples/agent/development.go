package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/sds/istioagent"
)

// developmentFolder is the variable that names the directory of a CA in development mode. The program examples/ca
// prints it.
const developmentFolder = "SVIDKIT_CA"

// development completes a configuration without CA and identity: it reads the variables in the directory of this
// machine's CA in development mode, and makes a token from its secret.
func development(cfg istioagent.Config, environ []string) (istioagent.Config, error) {
	dir := getenv(environ, developmentFolder)
	named := dir != ""
	if !named {
		set := func(name string) bool { return getenv(environ, name) != "" }
		if set("KUBERNETES_SERVICE_HOST") || set("CA_ADDR") || set("POD_NAMESPACE") && set("SERVICE_ACCOUNT") {
			return cfg, nil
		}
		state := os.Getenv("XDG_STATE_HOME")
		if !filepath.IsAbs(state) {
			home, _ := os.UserHomeDir() // empty without a home
			state = filepath.Join(home, ".local", "state")
		}
		dir = filepath.Join(state, "svidkit-ca", cmp.Or(getenv(environ, "TRUST_DOMAIN"), "cluster.local"))
	}
	text, err := os.ReadFile(filepath.Join(dir, "agent.env"))
	if err != nil && !named {
		return cfg, program.Misused("POD_NAMESPACE and SERVICE_ACCOUNT are the identity to ask for, and CA_ADDR is " +
			"where: set them, or first start examples/ca in its development mode on this machine")
	}
	secret, notSecret := os.ReadFile(filepath.Join(dir, "token-secret"))
	if err := errors.Join(err, notSecret); err != nil {
		return cfg, fmt.Errorf("%s: %w; it is the directory that examples/ca prints in development mode",
			developmentFolder, err)
	}
	var variables []string
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		variables = append(variables, name+"="+strings.Trim(value, "'"))
	}
	if getenv(environ, "PROXY_CONFIG") == "" { // PROXY_CONFIG names a control plane
		variables = append(variables, "PROXY_XDS_VIA_AGENT=false")
	}
	environ = slices.Concat(variables, environ)
	found, err := istioagent.FromEnvironment(environ)
	if err != nil {
		return cfg, program.UsageError{Err: err}
	}
	found.Root, found.Logger, found.AllowFiles = cfg.Root, cfg.Logger, cfg.AllowFiles
	name := getenv(environ, "POD_NAMESPACE") + "/" + getenv(environ, "SERVICE_ACCOUNT")
	if found.Root == "" { // socket paths must be short, and directories of other users are refused
		found.Root = filepath.Join(cmp.Or(os.Getenv("XDG_RUNTIME_DIR"), os.TempDir()),
			fmt.Sprintf("svidkit-agent-%d", os.Getuid()), strings.ReplaceAll(name, "/", "."))
	}
	found.TokenFile = filepath.Join(dir, "token."+strings.ReplaceAll(name, "/", "."))
	// The new file must have the right mode.
	if err := os.Remove(found.TokenFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return cfg, err
	}
	token := fmt.Appendf(nil, "%s.%s", strings.TrimSpace(string(secret)), name)
	if err := os.WriteFile(found.TokenFile, token, 0o600); err != nil {
		return cfg, err
	}
	cfg.Logger.Info("agent: development: the identity is from a CA on this machine, and proves nothing", "ca", dir,
		"identity", name, "root", found.Root)
	return found, nil
}

// getenv returns the value of a variable.
func getenv(environ []string, name string) (value string) {
	for _, line := range environ {
		if text, ok := strings.CutPrefix(line, name+"="); ok {
			value = text
		}
	}
	return value
}
