//go:build !unix

package main

import "net"

func usableDescriptors() (int, bool) { return 0, false }

func descriptor(net.Conn) (int, bool) { return 0, false }
