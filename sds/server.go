package sds

import "github.com/svidkit/svidkit/authn/unixsocket"

// ErrSocketInUse is [unixsocket.ErrInUse].
var ErrSocketInUse = unixsocket.ErrInUse

// Server is a [unixsocket.Server].
type Server = unixsocket.Server
