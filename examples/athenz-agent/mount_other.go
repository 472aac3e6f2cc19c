//go:build !linux

package main

import "errors"

var errNoMounts = errors.New("volumes are mounted on Linux only")

func bind(_, _ string) error { return errNoMounts }

func unbind(string) error { return errNoMounts }
