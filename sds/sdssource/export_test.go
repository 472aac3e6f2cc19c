package sdssource

// FilesStatus is the state of one name of [Files].
type FilesStatus = fileStatus

// Status returns the state of each name, sorted.
func (f *Files) Status() []FilesStatus { return f.status() }
