package main

import (
	"errors"
	"path/filepath"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/settings"
)

const athenzs, here = "Athenz", "this program" // origins of names

var variables = []settings.Variable{
	program.Var("MODE", "init", "init gets the first identity and ends, refresh keeps it fresh", athenzs,
		program.OneOf("init", "refresh")),
	program.Var("ENDPOINT", "unix:///identity/connect/agent.sock", "socket of the node's agent", athenzs, isUnix),
	program.Var("ID_FILE", "/identity/id", "file with the handle of the pod's volume", here, nil),
	program.Var("KEY_FILE", "/tls/service.key",
		"gets the key; in the directory of CERT_FILE and CA_CERT_FILE", athenzs,
		nil),
	program.Var("CERT_FILE", "/tls/service.cert", "gets the certificate", athenzs, nil),
	program.Var("CA_CERT_FILE", "/tls/cacert.pem", "gets the CA certificates", athenzs, nil),
	program.Var("TOKEN_FILE", "/tokens/ntoken", "gets the service token", here, nil),
	program.Var("REFRESH_INTERVAL", "1h", "time between refreshes, give or take a tenth", athenzs, isInterval),
	program.HealthAddr,
	program.LogLevel,
}

func isUnix(s string) error {
	path, ok := strings.CutPrefix(s, "unix://")
	if !ok || !filepath.IsAbs(path) {
		return errors.New("set it to the address of a Unix socket, such as unix:///identity/connect/agent.sock")
	}
	return nil
}

func isInterval(s string) error {
	if d, err := time.ParseDuration(s); err != nil || d < time.Minute {
		return errors.New("set it to a minute or more, such as 1h")
	}
	return nil
}
