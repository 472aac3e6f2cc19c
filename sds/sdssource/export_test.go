package sdssource

// NewFilesOf is NewFiles with another limit on names.
func NewFilesOf(cfg FilesConfig, maxNames int) (*Files, error) {
	cfg.maxNames = maxNames
	return NewFiles(cfg)
}

// FilesStatus is the state of one name.
type FilesStatus struct {
	Have      bool
	Err, Note error
}

// Status returns the state of each name.
func (f *Files) Status() map[string]FilesStatus {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]FilesStatus{}
	for name, e := range f.names {
		all[name] = FilesStatus{e.secret != nil, e.err, e.note}
	}
	return all
}
