//go:build !linux

package main

import "errors"

func bind(_, _ string) error { return errors.ErrUnsupported }

func unbind(string) error { return errors.ErrUnsupported }
