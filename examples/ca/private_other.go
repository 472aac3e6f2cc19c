//go:build !unix

package main

import "io/fs"

// checkPrivate leaves it to the access list of the folder who can read and change a file.
func checkPrivate(string, fs.FileInfo) error { return nil }
