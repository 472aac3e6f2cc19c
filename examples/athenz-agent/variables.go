package main

import (
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/settings"
)

const athenzs, cluster, here = "Athenz", "cluster configuration", "this program" // origins of names

var variables = []settings.Variable{
	program.Provider,
	program.Suffix,
	program.AdminDomain,
	program.SystemNamespaces,
	program.Var("ZTS_ENDPOINT", "", "URL of ZTS, without a path; required", cluster, program.IsHTTPS),
	program.Var("SERVER_CA_CERT", "", "file of the CA certificates of ZTS itself, in PEM; required", athenzs, nil),
	program.Var("SERVICE_CA_CERT", "", "file of the CA certificates of what ZTS issues, and of the nodes, in PEM; "+
		"required", cluster, nil),
	program.TrustDomain,
	program.Var("SIGNING_ENDPOINT", "", "URL of the signing service, without a path; required", here, program.IsHTTPS),
	program.Var("CERT_FILE", "", "certificate of the node with its intermediates, in PEM; required", here, nil),
	program.Var("KEY_FILE", "", "key of the node, in PEM; required", here, nil),
	program.Var("KUBELET_ENDPOINT", "https://127.0.0.1:10250", "URL of the kubelet's API", here, program.IsAPI),
	program.Var("VOLUMES_DIR", "/var/athenz/volumes", "directory with a directory for each volume", here, nil),
	program.Var("AGENT_SOCKET", "/var/athenz/agent/agent.sock", "Unix socket that is mounted into pods", here,
		program.IsAbsolute),
	program.HealthAddr,
	program.LogLevel,
}
