package settings

import "strings"

// Near returns the known name that name is a slip for, if it is not known itself: one letter is missing, too many or another,
// or two have changed places, and case, underscores and hyphens do not count. Known names of fewer than six letters are no
// candidates, nor are those that end with "*". A last word of one or two letters has to be there, as ID is no slip for IP, and
// so has the whole last word where only one letter is another, as PORT is no slip for POST.
func Near(name string, known []string) (right string, ok bool) {
	got := letters(name)
	for _, k := range known {
		if k == name {
			return "", false
		}
		want := letters(k)
		last := k[strings.LastIndexByte(k, '_')+1:]
		whole := strings.HasSuffix(got, letters(last))
		if len(want) < 6 || strings.HasSuffix(k, "*") || !whole && (len(last) < 3 || len(got) == len(want) && !swapped(got, want)) {
			continue
		}
		if got == want || swapped(got, want) || oneOff(got, want) {
			right, ok = k, true
		}
	}
	return right, ok
}

// letters returns the letters and digits of a name, in upper case.
func letters(name string) string {
	return strings.ToUpper(strings.NewReplacer("_", "", "-", "").Replace(name))
}

// common returns the length of the longest common prefix.
func common(a, b string) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// oneOff reports whether one letter of a is missing in b, too many or another.
func oneOff(a, b string) bool {
	if len(a) < len(b) {
		a, b = b, a
	}
	n := common(a, b)
	switch len(a) - len(b) {
	case 0:
		return n < len(a) && a[n+1:] == b[n+1:]
	case 1:
		return a[n+1:] == b[n:]
	}
	return false
}

// swapped reports whether two neighbours in a have changed places in b.
func swapped(a, b string) bool {
	n := common(a, b)
	return len(a) == len(b) && n+1 < len(a) && a[n] == b[n+1] && a[n+1] == b[n] && a[n+2:] == b[n+2:]
}
