package sds

import "github.com/svidkit/svidkit/internal/unixsocket"

// MaxPath is for tests.
const MaxPath = unixsocket.MaxPath
