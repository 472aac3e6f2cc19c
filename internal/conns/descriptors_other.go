//go:build !unix

package conns

import "net"

func descriptorLimit() (int, bool) { return 0, false }

func descriptor(net.Conn) (int, bool) { return 0, false }
