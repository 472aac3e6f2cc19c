// Package guard detects requests that one handler cannot check for another, as they may read its path differently.
package guard

import (
	"errors"
	"fmt"
	"net/http"
	"path"
	"strings"
)

// ErrPath is wrapped by the errors of [Path].
var ErrPath = errors.New("its path can be read in two ways")

// Path returns an error if the path of r, which the caller guards, is ambiguous: if r is a CONNECT with a path, which
// a [http.ServeMux] leaves unchanged; if [path.Clean] changes the path, apart from a last slash; or if the caller was
// chosen by a pattern for a whole subtree, and an element of the path has an escaped slash, at which
// [http.FileServer] ends the element and a ServeMux does not.
func Path(r *http.Request) error {
	p := "/" + strings.TrimPrefix(r.URL.Path, "/") // http.StripPrefix removes a first slash
	switch clean := path.Clean(p); {
	case r.Method == http.MethodConnect && r.URL.Path != "":
		return fmt.Errorf("%w: a CONNECT has none", ErrPath)
	case p != clean && (clean == "/" || p != clean+"/"):
		return fmt.Errorf("%w: it has empty elements or dots", ErrPath)
	case (strings.HasSuffix(r.Pattern, "/") || strings.HasSuffix(r.Pattern, "...}")) &&
		strings.Contains(strings.ToLower(r.URL.RawPath), "%2f"):
		return fmt.Errorf("%w: it has an escaped slash", ErrPath)
	}
	return nil
}
