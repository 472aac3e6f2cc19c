// Package paths finds what is meant for a request by the patterns of [http.ServeMux]. It asks a ServeMux, so that the decision
// is about the very handler that another one with these patterns runs.
package paths

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
)

// Table has a value for each pattern. It never changes.
type Table[V any] struct{ mux *http.ServeMux }

// value is a handler that never runs.
type value[V any] struct{ v V }

// ServeHTTP implements [http.Handler].
func (value[V]) ServeHTTP(http.ResponseWriter, *http.Request) {}

// New returns a Table of at least one pattern. It is an error if check refuses a value, if ServeMux refuses a pattern, or if two
// of them meet in a request and neither is more specific.
func New[V any](all map[string]V, check func(V) error) (t Table[V], err error) {
	if len(all) == 0 {
		return t, errors.New("there is no path")
	}
	t.mux = http.NewServeMux()
	for _, pattern := range slices.Sorted(maps.Keys(all)) {
		if err := cmp.Or(check(all[pattern]), t.add(pattern, all[pattern])); err != nil {
			return Table[V]{}, fmt.Errorf("%q: %w", pattern, err)
		}
	}
	return t, nil
}

// add adds a value, with the panic of ServeMux as an error.
func (t Table[V]) add(pattern string, v V) (err error) {
	if i := strings.IndexByte(pattern, '/'); i >= 0 && path.Clean(pattern[i:]) != cmp.Or(strings.TrimSuffix(pattern[i:], "/"), "/") {
		return errors.New("its path is not clean, so that no request has it")
	}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("http.ServeMux does not take it: %s", withoutPlaces(fmt.Sprint(r)))
		}
	}()
	t.mux.Handle(pattern, value[V]{v})
	return nil
}

// withoutPlaces takes out of a text of ServeMux where Handle was called, which was here.
func withoutPlaces(text string) string {
	for {
		before, after, ok := strings.Cut(text, " (registered at ")
		if !ok {
			return text
		}
		_, after, _ = strings.Cut(after, ")")
		text = before + after
	}
}

// Find returns the value of the most specific pattern for r. It reports false if there is none, and for a request that ServeMux
// redirects: its path has empty elements or dots, or lacks the last slash. So it does for one whose path without escapes, as many
// handlers read it, leads to another pattern.
func (t Table[V]) Find(r *http.Request) (v V, ok bool) {
	h, pattern := t.mux.Handler(r)
	if r.URL.RawPath != "" {
		plain, u := r.WithContext(r.Context()), *r.URL
		u.RawPath, plain.URL = "", &u
		var other string
		if h, other = t.mux.Handler(plain); other != pattern {
			return v, false
		}
	}
	found, ok := h.(value[V])
	return found.v, ok
}
