package linkerdproxy

import "log/slog"

// Environment is what an injector tells a proxy.
type Environment struct {
	Config

	// Destination and Policy are other services of the control plane; their Addr is empty if they are not set.
	Destination, Policy Service

	// RequireTLS and RequireIdentity are ports of the application that need mutual TLS, and a client with an identity.
	RequireTLS, RequireIdentity []int
}

// FromEnviron reads the environment, in the form of os.Environ. It takes the names of the first design of the protocol and
// those of today, and refuses values that contradict each other. log gets the names that are probably misspelled (Warn); it
// becomes the Logger of the Config, and may be nil. The error has a line for each bad variable, with what to set instead.
func FromEnviron(environ []string, log *slog.Logger) (*Environment, error)

// WriteEnviron writes the variables that [FromEnviron] reads, as a table in Markdown.
