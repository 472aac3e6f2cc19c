package ca

import "io/fs"

// In has p read from a file system that is polled once a second, in place of a folder of the host.
func (p PluggedIn) In(fsys fs.FS) PluggedIn {
	p.fsys = fsys
	return p
}
