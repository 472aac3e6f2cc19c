//go:build !linux

package workloadserver_test

import (
	"errors"
	"net"
)

func dialAs(int, string) (net.Conn, error) { return nil, errors.ErrUnsupported }
